"""A million lines from four ranks: are all in the files, in order on the console, and how fast, beside torchrun --tee.

python benchmarks/output.py [--lines 250000] [--ranks 4] [--rounds 3] [--output FILE]
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import BIN, TORCHRUN, Section, argument_parser, measure_in_turns, median, rounds_text, table

SCRIPT = """
import os, sys
rank, count = os.environ["RANK"], int(sys.argv[1])
write = sys.stdout.write
for number in range(count):
    write(f"line {number} of rank {rank} with some more text, as a training loop would print it\\n")
"""


def _launch(folder: Path, ranks: int) -> list[str]:
    return [str(BIN / "launch"), "--log-dir", str(folder / "logs"), "--num_gpus", str(ranks)]


def _torchrun(folder: Path, ranks: int) -> list[str]:
    return [*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", "--tee", "3", "--log-dir", str(folder)]


LAUNCHERS: dict[str, Callable[[Path, int], list[str]]] = {"launch": _launch, "torchrun --tee 3": _torchrun}


def check_console(text: str, ranks: int, lines: int) -> str:
    """Return what is wrong with the console: every line of every rank, in order within the rank."""
    seen = dict.fromkeys(map(str, range(ranks)), 0)
    for number, rank in re.findall(r"line (\d+) of rank (\d+) ", text):
        if int(number) != seen[rank]:
            return f"rank {rank}: line {number} where {seen[rank]} was due"
        seen[rank] += 1
    missing = {rank: lines - count for rank, count in seen.items() if count != lines}
    return f"missing: {missing}" if missing else ""


def check_files(folder: Path, ranks: int, lines: int) -> str:
    """Return what is wrong with the log files."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            for rank in set(re.findall(r"line 0 of rank (\d+) ", text := path.read_text(errors="replace"))):
                found[rank] = text.count(f" of rank {rank} ")
    wrong = {rank: found.get(str(rank), 0) for rank in range(ranks) if found.get(str(rank), 0) != lines}
    return f"lines in files: {wrong}" if wrong else ""


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--lines", type=int, default=250_000, help="of each rank; default: %(default)s")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    page = Section("Output", "torch")
    problems: dict[str, set[str]] = {name: set() for name in LAUNCHERS}

    def run(name: str) -> float:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            script = folder / "script.py"
            script.write_text(SCRIPT)
            console = folder / "console"
            start_s = time.perf_counter()
            with console.open("wb") as file:
                command = [*LAUNCHERS[name](folder, options.ranks), str(script), str(options.lines)]
                subprocess.run(command, check=True, stdout=file, stderr=subprocess.STDOUT, env=os.environ)
            elapsed_s = time.perf_counter() - start_s
            shown = console.read_text(errors="replace")
            console.unlink()
            problems[name] |= {check_console(shown, options.ranks, options.lines)} - {""}
            problems[name] |= {check_files(folder, options.ranks, options.lines)} - {""}
        return elapsed_s

    samples = measure_in_turns({name: (lambda name=name: run(name)) for name in LAUNCHERS}, options.rounds)
    total = options.lines * options.ranks
    rows = [
        [name, f"{median(v):.1f} s", f"{total / median(v) / 1e3:.0f}k lines/s", "; ".join(problems[name]) or "none"]
        for name, v in samples.items()
    ]
    columns = ["", "time", "rate", "lost or out of order, on the console or in files"]
    text = f"{total:,} lines from {options.ranks} ranks.\n\n{table(columns, rows)}"
    page.write(rounds_text(options.rounds), text, options.output)


if __name__ == "__main__":
    main()
