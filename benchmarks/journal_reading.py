"""Write a large journal, and measure how long `launch show` and `launch report` take to read it.

python benchmarks/journal_reading.py --megabytes 100 --ranks 8
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import Goal, Section, argument_parser, goals_table, measure_in_turns, median, rounds_text, spread, table
from harness.launch.journals import BEGAN_S, Try  # `common` has put the tests' harness on the path

_MAX_SHOW_S, _MAX_REPORT_S = 0.5, 10.0


def write_journal(folder: Path, num_bytes: int, num_ranks: int) -> int:
    """Write the journal of a job of the engine that was restarted; return its bytes."""
    first = Try(num_bytes=num_bytes // num_ranks // 2, num_ranks=num_ranks, exit_code=1)
    first.write(folder)
    # Its last tenth is done again.
    begin, began_s = first.num_steps * 9 // 10, BEGAN_S + first.num_steps * first.step_s + 60
    second = Try(begin, num_bytes=first.num_bytes, num_ranks=num_ranks, began_s=began_s)
    second.write(folder / "restart_1")
    return sum(path.stat().st_size for path in folder.rglob("*.jsonl"))


def timed(command: list[str], folder: Path) -> float:
    """Run a command; return the seconds of wall time."""
    start_s = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    duration_s = time.perf_counter() - start_s
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return duration_s


def main() -> None:
    parser = argument_parser(__doc__ or "", rounds=5)
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the journal (default 100)")
    parser.add_argument("--ranks", type=int, default=8, help="files of ranks (default 8)")
    arguments = parser.parse_args()
    section = Section("Reading a journal", "plotly", "rich")
    launch = [sys.executable, "-m", "launcher"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = folder / "run"
        run.mkdir()
        num_bytes = write_journal(run, int(arguments.megabytes * 1e6), arguments.ranks)
        commands = {
            "launch show": [*launch, "show", str(run)],
            "launch report": [*launch, "report", str(run), "-o", "page.html"],
        }
        cpu_s: dict[str, list[float]] = {name: [] for name in commands}

        def measure(name: str) -> float:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            duration_s = timed(commands[name], folder)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            return duration_s

        os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
        samples = measure_in_turns({name: lambda name=name: measure(name) for name in commands}, arguments.rounds)
        page_bytes = (folder / "page.html").stat().st_size
    size = f"{num_bytes / 1e6:.0f} MB"
    rows = [
        [name, f"{median(times):.2f} s", spread(times), f"{median(cpu_s[name]):.2f} s"]
        for name, times in samples.items()
    ]
    goals = []
    for name, limit_s in (("launch show", _MAX_SHOW_S), ("launch report", _MAX_REPORT_S)):
        took_s = median(samples[name])
        is_met = took_s <= limit_s
        why = f"{median(cpu_s[name]):.2f} s of them are its own processor time"
        goals.append(Goal(f"{name}, {size} of journal", f"≤ {limit_s:g} s", f"{took_s:.2f} s", is_met, why))
    text = (
        f"A journal of {size}: {arguments.ranks} ranks of the engine, started twice. `launch show` reads samples of it,"
        f" `launch report` all of it; its page has {page_bytes / 1e6:.1f} MB, most of which is plotly.js. The whole"
        " commands, from start to exit.\n\n"
        + table(["command", "median", "quartiles", "processor time"], rows)
        + "\n\n"
        + goals_table(goals)
    )
    section.write(rounds_text(arguments.rounds, "commands in turns"), text, arguments.output)


if __name__ == "__main__":
    main()
