"""Readers, disks and hosts that stall for minutes: no job may be lost, and every wait must end when it should.

    python tests/soak/stalls.py [--pause 120] [--disk 60] [--hosts 64] [--lease 30] [--cases reader disk] [--output F]

The pause of the reader is longer than the lease of the hosts. Writes a section of docs/benchmarks.md; exit code 1 when
any line of it went wrong. Most of the time it waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # what writes sections of pages
from common import Section, argument_parser, table
from harness import scripts
from harness.launch.command import Launch, slowness, wait_until
from harness.launch.sshd import LoopbackSshd, MuteServer, StalledServer
from harness.launch.stalls import DRIVER, LOUD, StalledLog, UnreadPipe

from launcher.base.processes import members_of_job
from launcher.cluster.nodeset import expand

NUM_LINES = 100_000  # of each of two ranks, at least
CONNECT_TIMEOUT_S = 10
# Both times `slowness`.
AT_ONCE_S = 2.0
START_S = 5.0  # for work beside the waits: interpreters start, keys are exchanged


CASES = ("reader", "disk", "suspended", "accept", "exec")


@dataclass
class Outcome:
    """One line of the table."""

    what: str
    expected: str
    found: str
    is_ok: bool


@dataclass(frozen=True)
class Setting:
    """What all cases share."""

    folder: Path
    ssh: list[str]  # options for two hosts

    def script(self, text: str) -> Path:
        """Write a script into the folder."""
        return scripts.write(self.folder, text)


def reader_pauses(setting: Setting, pause_s: float) -> Outcome:
    """Two hosts print without end, and the reader of the launcher's output pauses."""
    pipe = UnreadPipe()
    job = Launch(setting.folder, *setting.ssh, setting.script(LOUD), str(NUM_LINES), stdout=pipe.write_end)
    pipe.started()
    wait_until(lambda: bool(list(setting.folder.glob("runs/*/rank_0.log"))), "the run folder")
    job_id = next((setting.folder / "runs").iterdir()).name
    time.sleep(pause_s)
    num_alive = len(members_of_job(job_id))
    (setting.folder / "enough").touch()
    start_s = time.monotonic()
    output = pipe.read_all()
    code = job.wait().code
    wrong = wrong_ranks(output, setting.folder / "runs" / job_id)
    return Outcome(
        f"the reader of standard output pauses for {pause_s:g} s",
        "2 ranks live, all lines come, exit 0",
        f"{num_alive} ranks live, {wrong or 'all lines'}, exit {code} {time.monotonic() - start_s:.1f} s later",
        (num_alive, wrong, code) == (2, "", 0),
    )


def wrong_ranks(output: bytes, run_folder: Path) -> str:
    """Say which ranks' lines are not all on the display, in order, as they are in the log."""
    wrong = []
    for rank in range(2):
        prefix = f"[{rank} 127.0.0.{rank + 1}] ".encode()
        shown = [line.removeprefix(prefix) for line in output.splitlines(keepends=True) if line.startswith(prefix)]
        if b"".join(shown) != (run_folder / f"rank_{rank}.log").read_bytes():
            wrong.append(str(rank))
    return f"lines of rank {', '.join(wrong)} differ" if wrong else ""


def disk_stalls(setting: Setting, stall_s: float) -> Outcome:
    """The log of one of two ranks takes nothing; afterwards its disk answers again."""
    job_id = f"stalled-disk-{os.getpid():x}"
    log = StalledLog(setting.folder / "runs", job_id)
    log.open()
    driver = scripts.write(setting.folder, DRIVER, "driver.py")
    words = (job_id, "600", *setting.ssh, setting.script(LOUD), "20000")
    job = Launch(setting.folder, *words, program=(driver,))
    wait_until(lambda: "[0 127.0.0.1] line 15000 " in job.out, "the display, which does not wait for the disk")
    time.sleep(stall_s)
    num_alive = len(members_of_job(job_id))
    (setting.folder / "enough").touch()
    start_s = time.monotonic()
    written = log.read_all()
    code = job.wait().code
    prefix = b"[0 127.0.0.1] "
    shown = [line[len(prefix) :] for line in job.out.encode().splitlines(keepends=True) if line.startswith(prefix)]
    is_same = b"".join(shown) == written
    return Outcome(
        f"the disk of the logs stalls for {stall_s:g} s",
        "the display continues, 2 ranks live, the log is whole, exit 0",
        f"{num_alive} ranks live, the log is {'whole' if is_same else 'not whole'}, exit {code}"
        f" {time.monotonic() - start_s:.1f} s later",
        (num_alive, is_same, code) == (2, True, 0),
    )


def is_suspended(setting: Setting, pause_s: float) -> Outcome:
    """Ctrl-Z for longer than the lease."""
    script = setting.script("import os, time\nprint('READY')\nwhile not os.path.exists('enough'): time.sleep(0.1)")
    job = Launch(setting.folder, *setting.ssh, script, in_our_session=True)
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    job.signal(signal.SIGTSTP)
    time.sleep(pause_s)
    num_alive = len(members_of_job(job.job_id))
    job.signal(signal.SIGCONT)
    wait_until(lambda: "continued after " in job.err, "the end of the suspension")
    (setting.folder / "enough").touch()
    code = job.wait().code
    return Outcome(
        f"Ctrl-Z for {pause_s:g} s",
        "2 ranks live, exit 0",
        f"{num_alive} ranks live, exit {code}",
        (num_alive, code) == (2, 0),
    )


@contextlib.contextmanager
def dead_hosts(folder: Path, step: str, num_hosts: int) -> Iterator[list[str]]:
    """Yield the options for hosts that accept a connection and answer no further than one step."""
    hosts, config = folder / "dead", folder / "config"
    hosts.write_text("".join(f"127.0.0.{number} slots=1\n" for number in range(1, num_hosts + 1)))
    own = f"Host *\n  ConnectTimeout {CONNECT_TIMEOUT_S}\n"
    with contextlib.ExitStack() as stack:
        if step == "accept":
            port = stack.enter_context(StalledServer()).port
            config.write_text(f"Host *\n  Port {port}\n{own}")
        else:
            server = stack.enter_context(MuteServer(folder / "server", step))
            config.write_text(server.ssh_config.read_text() + own)
        yield ["--hostfile", str(hosts), "--ssh_config", str(config)]


def hosts_hang(setting: Setting, step: str, num_hosts: int) -> list[Outcome]:
    """Wait to the end, and be interrupted."""
    what = {"accept": "after TCP accept", "command": "in the SSH exec request"}[step]
    script = setting.script("pass")
    with dead_hosts(setting.folder, step, num_hosts) as options:
        start_s = time.monotonic()
        result = Launch(setting.folder, *options, script).wait(600)
        all_s = time.monotonic() - start_s
        job = Launch(setting.folder, *options, script)
        wait_until(lambda: "waiting for " in job.err, "the line about the wait")
        start_s = time.monotonic()
        job.signal(signal.SIGINT)
        code = job.wait(600).code
        interrupt_s = time.monotonic() - start_s
    at_once_s = AT_ONCE_S * slowness()
    found = (line.removeprefix("✗ ").partition(": ")[0] for line in result.err.splitlines() if line.startswith("✗ 127"))
    num_named = sum(len(expand(names)) for names in found)
    # A host gives its turn to the next after a second, 32 at a time; the login before the exec request takes its time.
    limit_s = num_hosts // 32 + (1 if step == "accept" else 2) * CONNECT_TIMEOUT_S + START_S * slowness()
    return [
        Outcome(
            f"{num_hosts} hosts hang {what}",
            f"each named, exit 69 within {limit_s:.3g} s",
            f"{num_named} named, exit {result.code} after {all_s:.1f} s",
            (num_named, result.code) == (num_hosts, 69) and all_s < limit_s,
        ),
        Outcome(
            "Ctrl-C meanwhile",
            f"exit 130 within {at_once_s:.3g} s",
            f"exit {code} after {interrupt_s:.2f} s",
            code == 130 and interrupt_s < at_once_s,
        ),
    ]


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--pause", type=float, default=120.0, help="seconds that the reader, or launch itself, pauses")
    parser.add_argument("--disk", type=float, default=60.0, help="seconds that the disk of the logs stalls")
    parser.add_argument("--hosts", type=int, default=64, help="hosts that hang after TCP accept; a quarter in exec")
    parser.add_argument("--lease", type=float, default=30.0, help="the lease of the hosts, in seconds")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="default: all")
    options = parser.parse_args()
    page = Section("Stalls", "paramiko")
    outcomes: list[Outcome] = []
    cases: dict[str, Callable[[Setting], Outcome | list[Outcome]]] = {
        "reader": lambda setting: reader_pauses(setting, options.pause),
        "disk": lambda setting: disk_stalls(setting, options.disk),
        "suspended": lambda setting: is_suspended(setting, options.pause),
        "accept": lambda setting: hosts_hang(setting, "accept", options.hosts),
        "exec": lambda setting: hosts_hang(setting, "command", max(1, options.hosts // 4)),
    }
    with LoopbackSshd() as sshd:
        for case in (cases[name] for name in options.cases):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                (folder / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
                ssh = ["--hostfile", "hosts", "--ssh_config", str(sshd.ssh_config), "--lease", f"{options.lease:g}"]
                found = case(Setting(folder, ssh))
            outcomes += found if isinstance(found, list) else [found]
    rows = [[o.what, o.expected, o.found, "yes" if o.is_ok else "**no**"] for o in outcomes]
    setting = f"Hosts over SSH with a lease of {options.lease:g} s and a connect timeout of {CONNECT_TIMEOUT_S} s."
    text = f"{setting}\n\n{table(['', 'expected', 'found', 'as expected'], rows)}"
    page.write("One run of each line", text, options.output)
    sys.exit(0 if all(outcome.is_ok for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
