"""Thousands of ranks of a small script, under the usual limit of open files of the launching process.

    python benchmarks/many_ranks.py [--ranks 2000] [--hosts 8] [--limit 1024] [--output F]

The hosts are addresses of this machine behind one sshd, which keeps the limit it has: an agent needs three files for
each of its ranks, the launcher one, for its log. Writes a section of docs/benchmarks.md; exit code 1 when a rank or its
log is missing.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, Section, argument_parser, table
from harness import scripts
from harness.launch.sshd import LoopbackSshd

TIMEOUT_S = 500.0


@dataclass(frozen=True)
class Limit:
    """The limit of open files that the launcher gets."""

    text: str
    soft: int
    hard: int

    def apply(self) -> None:
        """Set it for this process. Runs in the child."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.soft, self.hard))


def run(ranks_of_host: list[int], sshd: LoopbackSshd, limit: Limit) -> list[str]:
    """Run the job; return the row of the table, whose last cell is "yes" when nothing is missing."""
    num_ranks = sum(ranks_of_host)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [f"127.0.0.{number} slots={count}\n" for number, count in enumerate(ranks_of_host, 1)]
        (folder / "hosts").write_text("".join(lines))
        script = scripts.write(folder, "import os; print('rank', os.environ['RANK'], 'is here')")
        words = ["--plain", "--hostfile", "hosts", "--ssh_config", str(sshd.ssh_config), str(script)]
        start_s = time.monotonic()
        done = _launch(folder, words, limit.apply)
        wall_s = time.monotonic() - start_s
        num_shown = sum(line.endswith(" is here") for line in done.stdout.splitlines())
        logs = [path.read_text() for path in folder.glob("runs/*/rank_*.log")]
        num_logs = sum(text.endswith("is here\n") for text in logs)
    is_whole = (done.returncode, num_shown, num_logs) == (0, num_ranks, num_ranks)
    if not is_whole:
        print(done.stderr[-2000:], file=sys.stderr)
    hosts = f"{len(ranks_of_host)} × {ranks_of_host[0]}"
    found = f"exit {done.returncode}, {num_shown:,} lines, {num_logs:,} logs"
    return [hosts, limit.text, f"{wall_s:.1f} s", found, "yes" if is_whole else "**no**"]


def _launch(folder: Path, words: list[str], prepare: Callable[[], None]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state")}
    return subprocess.run(
        [sys.executable, str(ROOT / "launcher" / "__main__.py"), *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        preexec_fn=prepare,
    )


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2000, help="of all hosts together; default: %(default)s")
    parser.add_argument("--hosts", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--limit", type=int, default=1024, help="of open files, default: %(default)s")
    options = parser.parse_args()
    page = Section("Thousands of ranks", "paramiko")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = (
        Limit(f"`ulimit -Sn {options.limit}`", options.limit, hard),
        Limit(f"`ulimit -n {options.limit}`", options.limit, options.limit),
    )
    with LoopbackSshd() as sshd:
        rows = [run([options.ranks // options.hosts] * options.hosts, sshd, limit) for limit in limits]
    text = (
        "Every rank is a Python process that prints one line; hosts and ranks share this machine's cores.\n\n"
        + table(["hosts × ranks", "limit of the launcher", "from start to end", "found", "whole"], rows)
    )
    page.write("One run of each line", text, options.output)
    sys.exit(0 if all(row[-1] == "yes" for row in rows) else 1)


if __name__ == "__main__":
    main()
