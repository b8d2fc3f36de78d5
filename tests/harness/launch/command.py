"""Run the real command line in a child process, and look for what it leaves behind."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base.processes import die_with_parent, members_of_job
from launcher.cluster.nodeset import expand

ROOT = Path(__file__).resolve().parents[3]
_GAP_S = {signal.SIGINT: 0.2, signal.SIGTERM: 1.1, signal.SIGHUP: 1.1}  # see `fleet.signals`
DEADLINE_S = 240.0  # on a machine with other work, a start of torch alone may take half a minute
_USUAL_LOAD = 4.0  # processes for each processor, beside which the limits of the tests suffice


def slowness() -> float:
    """Return what the limits of waits are multiplied with: more than 1 where many processes wait for a processor."""
    return max(1.0, os.getloadavg()[0] / (_USUAL_LOAD * (os.cpu_count() or 1)))


def with_limits(factor: float) -> dict[str, str]:
    """Return an environment in which launch waits so many times as long as usual, and longer where the tests do."""
    return {"LAUNCH_TIMEOUT_SCALE": f"{factor * slowness():.3f}"}


@dataclass(frozen=True)
class Result:
    """How a `launch` command ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """What is on stderr but for the lines about waits, which a machine with other work needs."""
        return re.sub(r"^waiting for .*\n", "", self.err, flags=re.MULTILINE)

    @property
    def out_of_hosts(self) -> dict[str, str]:
        """What each host of `launch exec` wrote to stdout: hosts with equal output that end apart are shown apart."""
        _, *parts = re.split(r"^(\S+):\n", self.out, flags=re.MULTILINE)
        return {host: text for names, text in zip(parts[::2], parts[1::2], strict=True) for host in expand(names)}

    @property
    def job_id(self) -> str:
        match = re.search(r"job (\w+-\w+-[0-9a-f]{4})", self.out + self.err)
        assert match is not None, self.out + self.err
        return match.group(1)


# Not -m: no file of the working folder may take the package's place.
_LAUNCH = ROOT / "launcher" / "__main__.py"


class Launch:
    """`launch ARGS` in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        *args: str | Path,
        env: dict[str, str] | None = None,
        stdout: int | None = None,
        program: Sequence[str | Path] = (_LAUNCH,),
        in_our_session: bool = False,
    ) -> None:
        """stdout: a descriptor in place of the file that `out` reads. program: what Python runs.

        in_our_session: the command can be suspended by SIGTSTP, which means nothing to a session of its own.
        """
        self.folder = folder
        self._signalled_s = -math.inf
        self._out, self._err = folder / "launch.out", folder / "launch.err"
        command = [sys.executable, *map(str, program), *map(str, args)]
        our_pid = os.getpid()
        own = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state"), **(env or {})}

        def prepare() -> None:
            die_with_parent(our_pid)  # a test that fails half-way leaves no job behind
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup, or in the background of a script
            if in_our_session:
                os.setpgrp()

        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
                env={**with_limits(1.0), **os.environ, **own},
                start_new_session=not in_our_session,
                preexec_fn=prepare,
            )

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def job_id(self) -> str:
        wait_until(lambda: " · job " in self.out + self.err, "the start line")
        return Result(0, self.out, self.err).job_id

    def wait(self, timeout_s: float = DEADLINE_S) -> Result:
        """Wait for the end; a command that hangs is killed and fails the test."""
        try:
            code = self.process.wait(timeout_s * slowness())
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"launch hung:\n{self.out}\n{self.err}") from None
        return Result(code, self.out, self.err)

    def signal(self, number: int, after: str = "") -> None:
        """Send a signal to the launcher alone; not so soon after the last one that both would count as one.

        after: what the launcher says of the last one, which a busy machine may let it handle late.
        """
        if after:
            wait_until(lambda: after in self.err, after)
            self._signalled_s = time.monotonic()
        gap_s = _GAP_S.get(number, 0.0)
        time.sleep(max(0.0, self._signalled_s + gap_s - time.monotonic()))
        os.kill(self.process.pid, number)
        self._signalled_s = time.monotonic() if gap_s else self._signalled_s


def run_launch(folder: Path, *args: str | Path, env: dict[str, str] | None = None) -> Result:
    """Run `launch ARGS` to its end."""
    return Launch(folder, *args, env=env).wait()


def run_here(folder: Path, *args: str | Path, env: dict[str, str] | None = None) -> Result:
    """Run `launch ARGS` in a fork of this process: for what starts no ranks, and quicker than a start of python."""
    return run_forked(folder, ["launch", *args], _launch, env=env)


def run_forked(
    folder: Path, argv: Sequence[str | Path], main: Callable[[], object], env: dict[str, str] | None = None
) -> Result:
    """Call `main` in a fork of this process, in a folder, as the program that was started with these arguments.

    It has what this process has imported: torch takes no seconds.
    """
    out, err = folder / "launch.out", folder / "launch.err"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(folder)
            os.environ.update({"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state"), **(env or {})})
            for descriptor, path in enumerate((os.devnull, out, err)):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115  # as long as we live
            sys.argv = [*map(str, argv)]
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(1)  # a fork has no threads of OpenMP
            code = code_of(main)
        finally:
            os._exit(code)
    ended = []
    wait_until(lambda: ended.extend(os.waitpid(pid, os.WNOHANG)) is None and ended[-2] == pid, "launch", DEADLINE_S)
    return Result(os.waitstatus_to_exitcode(ended[-1]), out.read_text(), err.read_text())


def _launch() -> None:
    from launcher.cli.main import main

    main()


def code_of(main: Callable[[], object]) -> int:
    """Call a program's `main`; return its exit code."""
    try:
        main()
        code: object = 0
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  # as an interpreter does at its end
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1


def nap(duration: str) -> str:
    """Return a duration for `sleep` that no other run of these tests uses: such a process is known by its words."""
    return f"{duration}{os.getpid():07d}"


def command_lines() -> dict[int, bytes]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found[int(path.parent.name)] = path.read_bytes()
        except OSError:  # it has ended
            continue
    return found


def running(*words: str) -> list[int]:
    """Return the processes with this command line."""
    wanted = "".join(f"{word}\0" for word in words).encode()
    return [pid for pid, line in command_lines().items() if line == wanted]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait for a condition with a deadline. To find it out takes a tenth of a processor, where it is quick.

    timeout_s: on a machine that is not overloaded; see `slowness`.
    """
    begin_s = start = time.monotonic()
    while not condition():
        end = time.monotonic()
        limit_s = timeout_s * slowness()
        assert end < begin_s + limit_s, f"waited {limit_s:.0f} s for {what}"
        time.sleep(min(max(0.02, 9 * (end - start)), 0.5))
        start = time.monotonic()


def wait_until_gone(job_id: str, timeout_s: float = 10.0) -> None:
    """Wait until no process of the job is left; kill what is left and fail otherwise."""
    try:
        wait_until(lambda: not members_of_job(job_id), f"the end of {job_id}", timeout_s)
    finally:
        for pid in members_of_job(job_id):
            os.kill(pid, signal.SIGKILL)
