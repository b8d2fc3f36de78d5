"""Kill something at random, again and again: nothing may be left, hang, end with a wrong code or damage a journal.

    python tests/soak/random_kills.py [--count 200] [--seed 0] [--output FILE]

Each round starts a job of 3 ranks that ignore SIGTERM, each with a child in a session of its own, waits a random
moment, and kills a rank, a rank's child, the agent or the launcher with a random signal. The ranks write into their
journals meanwhile, which must be readable to the last whole line. Writes a section of docs/benchmarks.md; exit code 1
when any round went wrong.
"""

from __future__ import annotations

import collections
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # what writes sections of pages
from common import Section, argument_parser, median, table

from launcher.base.processes import descendants, members_of_job
from launcher.journal.read import JobJournal

RANKS = 3
GRACE_S = 0.5
HANG_S = 30.0
SCRIPT = """
import os, signal, subprocess, sys, time
import launcher
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal,time; signal.signal(15, signal.SIG_IGN); print('child', flush=True); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True, stdout=subprocess.PIPE)
process.stdout.readline()
print("READY", os.getpid(), process.pid, flush=True)
step = 0
while process.poll() is None:
    launcher.log(step=step, text="x" * (step % 5000))
    step += 1
    time.sleep(0.001)
code = process.returncode
sys.exit(41)  # a rank whose child was killed fails with a code of its own
"""
VICTIMS = ("rank", "child", "agent", "launcher")
SIGNALS = {
    "rank": (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGUSR2),
    "child": (signal.SIGKILL, signal.SIGSEGV),
    "agent": (signal.SIGKILL,),
    "launcher": (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
}


def expected_code(victim: str, number: int) -> int:
    """Return the code `launch` must end with, as subprocess shows it."""
    if victim == "child":
        return 41
    if victim == "agent":
        return 69
    if victim == "launcher":
        return -number if number == signal.SIGKILL else 128 + number
    return 128 + number


def one_round(folder: Path, chance: random.Random) -> tuple[str, float, str]:
    """Run and kill one job. Returns what was killed how, the seconds until nothing was left, and what went wrong."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    out = folder / "out"
    with out.open("wb") as file:
        job = subprocess.Popen(
            [sys.executable, "-m", "launcher", "--num_gpus", str(RANKS), "--grace", str(GRACE_S), str(script)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # nohup may have started us
        )
    deadline = time.monotonic() + HANG_S
    while out.read_text().count("READY") < RANKS and time.monotonic() < deadline:
        time.sleep(0.01)
    text = out.read_text()
    job_id = text.split("job ", 1)[1].split()[0]
    ready = [line.split()[-2:] for line in text.splitlines() if "READY" in line]
    agent = next(pid for pid in descendants(job.pid) if str(pid) not in {p for pair in ready for p in pair})
    victim = chance.choice(VICTIMS)
    number = chance.choice(SIGNALS[victim])
    rank_pid, child_pid = map(int, chance.choice(ready))
    pid = {"rank": rank_pid, "child": child_pid, "agent": agent, "launcher": job.pid}[victim]
    time.sleep(chance.random() * 0.6)
    start_s = time.monotonic()
    os.kill(pid, number)
    problem = _watch_the_end(job, job_id, expected_code(victim, number)) or _journal_problem(folder / "runs" / job_id)
    return f"{victim}, {signal.Signals(number).name}", time.monotonic() - start_s, problem


def _watch_the_end(job: subprocess.Popen[bytes], job_id: str, expected: int) -> str:
    try:
        code = job.wait(HANG_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
        return "launch hung"
    deadline = time.monotonic() + 10.0
    while members_of_job(job_id) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = members_of_job(job_id)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if left:
        return f"{len(left)} processes were left"
    return "" if code == expected else f"code {code} instead of {expected}"


def _journal_problem(run_folder: Path) -> str:
    """Return what is wrong with the journal of a job that has ended, "" for nothing."""
    (start,) = JobJournal(run_folder).tries
    for rank, file in (*start.ranks.items(), (None, start.launcher)):
        records = list(file.poll())
        steps = [record["values"]["step"] for record in records if record["kind"] == "log"]
        if file.num_damaged or steps != list(range(len(steps))):
            return f"the journal of {'the launcher' if rank is None else f'rank {rank}'} is damaged"
    return ""


def main() -> None:
    """Kill, and write what happened."""
    parser = argument_parser(__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    page = Section("Random kills")
    chance = random.Random(options.seed)
    times: dict[str, list[float]] = collections.defaultdict(list)
    problems: dict[str, list[str]] = collections.defaultdict(list)
    for _ in range(options.count):
        with tempfile.TemporaryDirectory() as folder:
            what, seconds, problem = one_round(Path(folder), chance)
        times[what].append(seconds)
        if problem:
            problems[what].append(problem)
    rows = [
        [what, str(len(values)), f"{median(values):.2f} s", f"{max(values):.2f} s", "; ".join(problems[what]) or "none"]
        for what, values in sorted(times.items())
    ]
    columns = [
        "killed",
        "times",
        "nothing left after (median)",
        "at most",
        "wrong code, hang, orphan or damaged journal",
    ]
    text = (
        f"{RANKS} ranks that ignore SIGTERM, each with a child in a session of its own, grace {GRACE_S} s;"
        f" seed {options.seed}.\n\n{table(columns, rows)}"
    )
    page.write(f"{options.count} jobs, one kill each", text, options.output)
    sys.exit(any(problems.values()))


if __name__ == "__main__":
    main()
