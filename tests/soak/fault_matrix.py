"""Every way a job can die, on every transport: exit code, cause, logs, how long until nothing is left.

    python tests/soak/fault_matrix.py [--transports local,ssh,srun] [--only NAME] [--output FILE]

Local ranks; loopback hosts behind a real sshd; the nodes of a real Slurm; where hosts crash or cables are cut, nodes
in network namespaces with an sshd or slurmd each. All ranks have a child in a session of its own that ignores SIGTERM.
Exit code 1 when any cell is wrong. Needs root. tests/faults/test_matrix.py runs some of the cells in every test run.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # what writes sections of pages
from common import Section, argument_parser, table
from harness.launch import nodes, slurm, sshd
from harness.launch.command import Launch, Result, wait_until
from soak.fault_places import (
    LEASE_S,
    Place,
    full_disk,
    local,
    memory_limit,
    mortal_srun,
    mortal_ssh,
    parent_of,
    srun,
    ssh,
)

from launcher.base.processes import members_of_job

GRACE_S = 1.0
HANG_S = 90.0
LIMIT_S = 5.0  # from the moment a fault can be known until nothing is left
NUM_LINES = 1000
NOT_LOCAL = frozenset({"ssh", "srun"})
EVERYWHERE = NOT_LOCAL | {"local"}

PREAMBLE = """
import os, signal, subprocess, sys, time
import launcher
rank, odd = os.environ["RANK"], os.environ["RANK"] == "1"
child = "import signal,time; signal.signal(15, signal.SIG_IGN); print('child', flush=True); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True, stdout=subprocess.PIPE)
process.stdout.readline()
for number in range(1000):
    print("line", number)
open(f"ready_{rank}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
"""
LAST_WORDS = "\nif odd: print('last words', flush=True)\n"
VICTIMS = """
if not odd:
    time.sleep(0.1)
    raise ConnectionResetError("connection reset by peer")
"""
WAIT = "\ntime.sleep(600)\n"
FLOOD = """
block = b"".join(b"%015d\\n" % number for number in range(62_500))  # 1 MB
start = time.monotonic()
for number in range(int(os.environ["NUM_BLOCKS"]) if odd else 10**6):
    sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()
    time.sleep(max(0.0, start + number / 100 - time.monotonic()))
open("took", "w").write(str(time.monotonic() - start))
sys.exit(3)
"""


_EXPLANATION = f"""\
Seconds from the fault until no process of the job was left anywhere, at most {LIMIT_S:g} s after the fault could be
known (a lease of {LEASE_S:g} s, a hang time of 2 s). Grace {GRACE_S:g} s; children of ranks ignore SIGTERM and have
sessions of their own. Checked in every cell as well: the exit code, the one cause with host, rank and traceback,
victims folded, complete logs, another job of the same user untouched.
"""


@dataclass(frozen=True)
class Fault:
    """One way to die."""

    name: str
    body: str = WAIT  # what the ranks do once all are ready
    strike: Callable[[Place, Launch, int], None] | None = None  # what is done to the job; given an agent's pid too
    options: tuple[str, ...] = ()
    code: int = 0
    names: str = ""  # what the report must say; {host}: that of rank 1
    kind: str = ""  # "memory", "pipe", "disk", "flood" and "mortal" need more than a script
    known_after_s: float = 0.0  # before, nobody can tell that it is there
    transports: frozenset[str] = EVERYWHERE


def _signal(number: int) -> Callable[[Place, Launch, int], None]:
    return lambda _place, job, _agent: job.signal(number)


def _kill_agent(_place: Place, _job: Launch, agent: int) -> None:
    os.kill(agent, signal.SIGKILL)


def _kill_service(place: Place, _job: Launch, agent: int) -> None:
    if place.kill_service is not None:
        place.kill_service(agent)


def _of_node(deed: str) -> Callable[[Place, Launch, int], None]:
    return lambda place, _job, _agent: getattr(place.node, deed)()


_ODD = r"✗ rank 1 \({host}, pid \d+\) failed .*"
FAULTS = (
    Fault("rank exits 3", LAST_WORDS + "odd and sys.exit(3)" + VICTIMS, code=3, names=_ODD + "exit code 3"),
    Fault(
        "rank raises",
        LAST_WORDS + "if odd: raise ValueError('bad data')" + VICTIMS,
        code=1,
        names="(?s)" + _ODD + r'File "[^"]*script.py", line \d+.*ValueError: bad data',
    ),
    Fault(
        "import error on one rank",
        LAST_WORDS + "if odd: import no_such_module" + VICTIMS,
        code=1,
        names="(?s)" + _ODD + "ModuleNotFoundError: No module named 'no_such_module'",
    ),
    Fault(
        "rank killed (SIGKILL)",
        LAST_WORDS + "odd and os.kill(os.getpid(), 9)" + VICTIMS,
        code=137,
        names=_ODD + "killed by SIGKILL\n",
    ),
    Fault(
        "rank crashes (SIGSEGV)",
        LAST_WORDS + "odd and os.kill(os.getpid(), 11)" + VICTIMS,
        code=139,
        names=_ODD + "killed by SIGSEGV",
    ),
    Fault(
        "rank out of memory",
        LAST_WORDS + "held = []\nwhile odd: held.append(b'x' * (10 << 20))" + WAIT,
        code=137,
        names="(?s)" + _ODD + r"killed by SIGKILL, out of memory\n.*limit 300.0 MiB; this rank held up to \d\d\d",
        kind="memory",
        known_after_s=1.0,
    ),
    Fault(
        "rank hangs",
        "launcher.heartbeat()\nwhile odd: time.sleep(1)\nwhile True:\n    launcher.heartbeat()\n    time.sleep(0.05)",
        options=("--hang-timeout", "2"),
        code=124,
        names="(?s)" + _ODD + r"no progress for 2 s\n.*script.py.* line \d+",
        known_after_s=2.0,
    ),
    Fault(
        "rank raises, a thread of it lives on",
        LAST_WORDS + "import threading\nodd and threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "if odd: raise ValueError('bad data')" + WAIT,
        code=1,
        names=r"(?s)rank 1 \({host}, pid \d+\) has failed but has not exited.*ValueError: bad data.*" + _ODD,
        known_after_s=GRACE_S,
    ),
    Fault("agent killed", strike=_kill_agent, code=69, names="✗ {host} was lost"),
    Fault(
        "node crashes",
        strike=_of_node("crash"),
        code=69,
        names="✗ {host} was lost",
        kind="mortal",
        known_after_s=LEASE_S,
        transports=NOT_LOCAL,
    ),
    Fault(
        "network partition",
        strike=_of_node("cut"),
        code=69,
        names="✗ {host} was lost",
        kind="mortal",
        known_after_s=LEASE_S,
        transports=NOT_LOCAL,
    ),
    Fault("launcher gets SIGINT", strike=_signal(signal.SIGINT), code=130),
    Fault("launcher gets SIGTERM", strike=_signal(signal.SIGTERM), code=143),
    Fault("launcher gets SIGHUP", strike=_signal(signal.SIGHUP), code=129),
    Fault("launcher killed (SIGKILL)", strike=_signal(signal.SIGKILL), code=-9),
    Fault(
        "stdout closed, then rank exits 3",
        "\nfor number in range(1000): print('line', number + 1000)\n" + LAST_WORDS + "odd and sys.exit(3)" + WAIT,
        code=3,
        names=_ODD + "exit code 3",
        kind="pipe",
    ),
    Fault(
        "log disk full, then rank exits 3",
        "\nfor number in range(1000): print('filling', number, 'x' * 5000)\n"
        + LAST_WORDS
        + "odd and sys.exit(3)"
        + WAIT,
        code=3,
        names="(?s)rank_1.log: No space left on device; the log is incomplete, the job continues.*" + _ODD,
        kind="disk",
        known_after_s=1.0,
    ),
    Fault(
        "100 MB/s from each rank, then one exits 3",
        FLOOD,
        code=3,
        names=_ODD + "exit code 3",
        kind="flood",
    ),
    # Last: for a while Slurm hesitates to start steps on that node.
    Fault(
        "sshd, slurmd killed on one host",
        strike=_kill_service,
        code=69,
        names="✗ {host} was lost",
        options=("--lease", str(LEASE_S)),
        known_after_s=LEASE_S,  # a relay without its slurmd says nothing more; sshd's end is known at once
        transports=NOT_LOCAL,
    ),
)


@dataclass
class Outcome:
    """How a cell went: seconds from the fault until nothing was left, and what is wrong ("" when nothing is)."""

    seconds: float
    problem: str = ""
    note: str = ""


class Places:
    """The places of one transport, each started when it is needed first."""

    def __init__(self, transport: str, folder: Path, stack: contextlib.ExitStack) -> None:
        self._transport = transport
        self._folder = folder
        self._stack = stack
        self._usual: Place | None = None

    @contextlib.contextmanager
    def place_for(self, fault: Fault) -> Iterator[Place]:
        """Yield where a fault happens; nodes that are going to die are started for it alone."""
        if fault.kind == "mortal":
            start = {"ssh": mortal_ssh, "srun": mortal_srun}[self._transport]
            with start(self._folder / f"{fault.name}".replace(" ", "_")) as place:
                yield place
            return
        if self._usual is None:
            make = {"local": local, "ssh": ssh, "srun": srun}[self._transport]
            self._folder.mkdir(parents=True, exist_ok=True)
            self._usual = self._stack.enter_context(make(self._folder))
        yield self._usual
        if fault.strike is _kill_service and self._usual.revive is not None:
            self._usual.revive()


def run_fault(fault: Fault, place: Place, folder: Path, limit_s: float = LIMIT_S) -> Outcome:
    """Run one cell. limit_s: from the moment the fault can be known until nothing is left."""
    folder.mkdir(parents=True)
    (folder / "script.py").write_text(PREAMBLE + fault.body)
    with contextlib.ExitStack() as stack:
        try:
            return _run(fault, place, folder, limit_s, stack)
        except AssertionError as error:
            return Outcome(limit_s, str(error).splitlines()[0])


def _run(fault: Fault, place: Place, folder: Path, limit_s: float, stack: contextlib.ExitStack) -> Outcome:
    logs = stack.enter_context(full_disk(folder / "disk")) if fault.kind == "disk" else folder / "runs"
    let_out = stack.enter_context(memory_limit(place.agent_parents())) if fault.kind == "memory" else None
    reader, writer = os.pipe() if fault.kind == "pipe" else (None, None)
    nowhere = os.open(os.devnull, os.O_WRONLY) if fault.kind == "flood" else None
    options = ("--grace", str(GRACE_S), "--log-dir", str(logs), *place.options, *fault.options)
    options += ("--env", f"NUM_BLOCKS={place.num_flood_blocks}")
    job = Launch(folder, *options, "script.py", env=place.env, stdout=writer if writer is not None else nowhere)
    stack.callback(_end, job)
    for descriptor in (writer, nowhere):
        if descriptor is not None:
            os.close(descriptor)
    wait_until(lambda: len(list(folder.glob("ready_*"))) == place.num_ranks, "the ranks")
    (run_folder,) = (path for path in logs.iterdir() if path.is_dir())
    ranks = range(place.num_ranks)
    wait_until(lambda: all(_has_all_lines(run_folder / f"rank_{rank}.log") for rank in ranks), "the output so far")
    agent = _agent_of(run_folder.name, rank=1)
    if let_out is not None:
        let_out()
    if reader is not None:
        os.read(reader, 100)  # `head -1` has what it wants
        os.close(reader)
    (folder / "go").touch()
    start_s = time.monotonic()
    if fault.strike is not None:
        fault.strike(place, job, agent)
    gone_s = _wait_for_end(job, run_folder.name) - start_s
    known_after_s, rate = fault.known_after_s, ""
    if fault.kind == "flood" and (folder / "took").exists():
        known_after_s = float((folder / "took").read_text())
        rate = f" at {place.num_flood_blocks / known_after_s:.0f} MB/s"
    problem = _problem(fault, place, job.wait(1), run_folder)
    if not problem and gone_s - known_after_s > limit_s:
        problem = f"{gone_s:.1f} s until all was gone"
    return Outcome(gone_s - (known_after_s if rate else 0.0), problem, rate)


def _wait_for_end(job: Launch, job_id: str) -> float:
    """Wait for the end of all processes and of `launch`. Returns when the former was."""
    gone_s, deadline_s = None, time.monotonic() + HANG_S
    while gone_s is None or job.process.poll() is None:
        assert time.monotonic() < deadline_s, f"hung: left are {members_of_job(job_id)}, launch: {job.process.poll()}"
        if gone_s is None and not members_of_job(job_id):
            gone_s = time.monotonic()
        time.sleep(0.05)
    return gone_s


def _has_all_lines(path: Path) -> bool:
    return path.exists() and b"line %d\n" % (NUM_LINES - 1) in path.read_bytes()


def _end(job: Launch) -> None:
    if job.process.poll() is None:
        job.process.kill()
        job.process.wait()


def _agent_of(job_id: str, rank: int) -> int:
    """Return the pid of the agent of a rank, on whatever "host" of this machine."""
    members = members_of_job(job_id)
    for pid in members:
        if parent_of(pid) not in members and f"RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text():
            return parent_of(pid)
    raise AssertionError(f"no agent of rank {rank} is there")


def _problem(fault: Fault, place: Place, result: Result, run_folder: Path) -> str:
    """Say what is wrong about the end of a job."""
    if result.code != fault.code:
        return f"code {result.code} instead of {fault.code}: {result.err[-300:]}"
    if fault.names and not re.search(fault.names.replace("{host}", re.escape(place.host)), result.err):
        return "the cause is not named"
    if result.err.count("✗ ") != bool(fault.names) or result.err.count("Traceback") > 1:
        return "not one cause"
    if "connection reset by peer" in result.err:
        return "a victim is shown"
    if place.harm:
        return place.harm
    return _log_problem(fault, place, result, run_folder)


def _log_problem(fault: Fault, place: Place, result: Result, run_folder: Path) -> str:
    if fault.kind == "disk":  # the console has everything instead
        lines = re.findall(r"filling (\d+) x{5000}\n", "".join(re.findall(r"^\[1[ \]].*\n", result.out, re.MULTILINE)))
        return "" if lines == [str(number) for number in range(1000)] else "lines are missing on the console"
    for rank in range(place.num_ranks):
        log = (run_folder / f"rank_{rank}.log").read_bytes()
        lines = NUM_LINES * (2 if fault.kind == "pipe" and rank == 1 else 1)
        expected = b"".join(b"line %d\n" % number for number in range(lines))
        if fault.kind == "flood":
            block = b"".join(b"%015d\n" % number for number in range(62_500))
            expected += block * (place.num_flood_blocks if rank == 1 else 1)
        elif rank == 1 and LAST_WORDS in fault.body:
            expected += b"last words\n"
        if not log.startswith(expected):
            return f"the log of rank {rank} is incomplete"
    return ""


def why_not(transport: str) -> str | None:
    """Return why no cell of a transport can run here, None when they can."""
    if os.geteuid() != 0:
        return "control groups and mounts need root"
    checks = {"local": [], "ssh": [sshd.available, nodes.available], "srun": [slurm.available, nodes.available]}
    return next((reason for check in checks[transport] if (reason := check()) is not None), None)


def main() -> None:
    """Fill the matrix and write it."""
    parser = argument_parser(__doc__)
    parser.add_argument("--transports", default="local,ssh,srun")
    parser.add_argument("--only", default="", help="faults whose name contains this")
    options = parser.parse_args()
    names = options.transports.split(",")
    page = Section("Faults")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the jobs would rightly ignore it
    faults = [fault for fault in FAULTS if options.only in fault.name]
    columns: list[list[str]] = []
    with tempfile.TemporaryDirectory() as text:
        os.environ["XDG_STATE_HOME"] = text
        for name in names:
            reason = why_not(name)
            if reason is not None:
                columns.append([f"not run: {reason}"] * len(faults))
                continue
            with contextlib.ExitStack() as stack:
                places = Places(name, Path(text, name), stack)
                columns.append([_cell(fault, name, places, Path(text, f"{name}_jobs")) for fault in faults])
    rows = [[fault.name, str(fault.code), *cells] for fault, *cells in zip(faults, *columns, strict=True)]
    text = f"{_EXPLANATION}\n{table(['fault', 'exit code', *names], rows)}"
    page.write("Each cell is one sample", text, options.output)
    sys.exit(any("✗" in cell for column in columns for cell in column))


def _cell(fault: Fault, transport: str, places: Places, folder: Path) -> str:
    if transport not in fault.transports:
        return "–"
    with places.place_for(fault) as place:
        outcome = run_fault(fault, place, folder / fault.name.replace(" ", "_"))
    sys.stderr.write(f"{transport}: {fault.name}: {outcome}\n")
    return f"✗ {outcome.problem}" if outcome.problem else f"{outcome.seconds:.1f} s{outcome.note}"


if __name__ == "__main__":
    main()
