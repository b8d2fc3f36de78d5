"""Every way a job can die, on every transport: exit code, how long until nothing is left, what is named as the cause.

    PYTHONPATH=tests python benchmarks/fault_matrix.py [--transports local,ssh,srun] > section.md

Local ranks; two loopback hosts behind a real sshd; three nodes of a real Slurm. All ranks have a child in a session of
its own that ignores SIGTERM. Exit code 1 when any cell is wrong. Nodes that crash and cut cables are in tests/faults.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common import machine_line, table
from harness.launching import Launch, wait_until
from harness.slurm import LoopbackSlurm
from harness.sshd import LoopbackSshd

from launcher.base.processes import members_of_job, send

GRACE_S = 1.0
# From the moment a fault is there: what is left afterwards has escaped.
LIMIT_S = 10.0

PREAMBLE = """
import os, signal, subprocess, sys, time
child = "import signal,time; signal.signal(15, signal.SIG_IGN); print('child', flush=True); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True, stdout=subprocess.PIPE)
process.stdout.readline()
print("READY", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
odd = os.environ["RANK"] == "1"
"""
WAIT = "\ntime.sleep(600)\n"


@dataclass(frozen=True)
class Fault:
    """One way to die."""

    name: str
    body: str = ""  # what the ranks do once all are ready
    signal_launcher: int | None = None
    kills_agent: bool = False
    options: tuple[str, ...] = ()
    code: int = 0
    names: str = ""  # what the report must say


FAULTS = (
    Fault("rank exits 3", "odd and sys.exit(3)", code=3, names="rank 1 .*exit code 3"),
    Fault("rank raises", "if odd: raise ValueError('bad data')", code=1, names="(?s)rank 1 .*ValueError: bad data"),
    Fault("import error on one rank", "if odd: import no_such_module", code=1, names="(?s)rank 1 .*no_such_module"),
    Fault("rank killed (SIGKILL)", "odd and os.kill(os.getpid(), 9)", code=137, names="rank 1 .*killed by SIGKILL"),
    Fault("rank crashes (SIGSEGV)", "odd and os.kill(os.getpid(), 11)", code=139, names="rank 1 .*killed by SIGSEGV"),
    Fault("rank hangs", "", options=("--hang-timeout", "2"), code=124, names="no progress for 2 s"),
    Fault("agent killed", kills_agent=True, code=69, names="was lost"),
    Fault("launcher gets SIGINT", signal_launcher=signal.SIGINT, code=130),
    Fault("launcher gets SIGTERM", signal_launcher=signal.SIGTERM, code=143),
    Fault("launcher gets SIGHUP", signal_launcher=signal.SIGHUP, code=129),
    Fault("launcher killed (SIGKILL)", signal_launcher=signal.SIGKILL, code=-9),
)


@dataclass(frozen=True)
class Place:
    """Where ranks run: options of `launch`, further environment, and how many ranks that makes."""

    options: tuple[str, ...]
    env: dict[str, str]
    num_ranks: int


@contextlib.contextmanager
def places(names: list[str], folder: Path) -> Iterator[dict[str, Place]]:
    """Start what the transports need."""
    found: dict[str, Place] = {}
    with contextlib.ExitStack() as stack:
        if "local" in names:
            found["local"] = Place(("--num_gpus", "2"), {}, 2)
        if "ssh" in names:
            sshd = stack.enter_context(LoopbackSshd())
            hosts = folder / "hosts"
            hosts.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
            found["ssh"] = Place(("--hostfile", str(hosts), "--ssh_config", str(sshd.ssh_config)), {}, 2)
        if "srun" in names:
            slurm = stack.enter_context(LoopbackSlurm())
            found["srun"] = Place((), stack.enter_context(slurm.allocation("--gres=gpu:1")), 3)
        yield found


def run_fault(fault: Fault, place: Place, folder: Path) -> tuple[float, str]:
    """Run one cell. Returns seconds from the fault until nothing was left, and what is wrong ("" when nothing is)."""
    folder.mkdir(parents=True)
    script = folder / "script.py"
    script.write_text(PREAMBLE + fault.body + WAIT)
    job = Launch(folder, "--grace", str(GRACE_S), *place.options, *fault.options, script, env=place.env)
    try:
        wait_until(lambda: job.out.count("READY") == place.num_ranks, "the ranks")
        job_id, start_s = job.job_id, time.monotonic()
        if fault.options:
            start_s += float(fault.options[1])  # a hang is there when its time is over
        _strike(fault, job, folder)
        result = job.wait(30)
        wait_until(lambda: not members_of_job(job_id), "the end of all processes", LIMIT_S)
    except AssertionError as error:
        return LIMIT_S, str(error).splitlines()[0]
    finally:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()
    seconds = time.monotonic() - start_s
    if result.code != fault.code:
        return seconds, f"code {result.code} instead of {fault.code}"
    if fault.names and not re.search(fault.names, result.err):
        return seconds, "the cause is not named"
    return seconds, ""


def _strike(fault: Fault, job: Launch, folder: Path) -> None:
    (folder / "go").touch()
    if fault.signal_launcher is not None:
        job.signal(fault.signal_launcher)
    if fault.kills_agent:
        send(_agents(job)[:1], signal.SIGKILL)


def _agents(job: Launch) -> list[int]:
    """Return the pids of the job's agents: parents of its ranks, on whatever "host" of this machine."""
    members = members_of_job(job.job_id)
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in members}
    return sorted(parents - members)


def main() -> None:
    """Fill the matrix and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transports", default="local,ssh,srun")
    options = parser.parse_args()
    names = options.transports.split(",")
    rows, is_green = [], True
    with tempfile.TemporaryDirectory() as text, places(names, Path(text)) as found:
        os.environ["XDG_STATE_HOME"] = text
        for number, fault in enumerate(FAULTS):
            cells = []
            for name, place in found.items():
                seconds, problem = run_fault(fault, place, Path(text) / f"{number}_{name}")
                is_green = is_green and not problem
                cells.append(f"✗ {problem}" if problem else f"{seconds:.1f} s")
            rows.append([fault.name, str(fault.code), *cells])
    print("## Faults\n")
    print(machine_line())
    print(
        f"Seconds from the fault until no process of the job was left anywhere; grace {GRACE_S:g} s, children of ranks"
    )
    print("ignore SIGTERM. Exit code and named cause are checked in every cell;")
    print("`PYTHONPATH=tests python benchmarks/fault_matrix.py`.\n")
    print(table(["fault", "exit code", *found], rows))
    print()
    sys.exit(not is_green)


if __name__ == "__main__":
    main()
