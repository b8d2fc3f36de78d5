"""Agents inside a Slurm allocation: one `srun` step starts them all, and its two pipes serve them all.

`slurm/framing.py` says how they are told apart and why so. srun's exit status is of no use (with one failing task
it reports the tasks it killed), so codes come through the agents. Every agent reads the same stdin, so a write of any
channel goes to all nodes and is meant for one. srun leads a session of its own: a terminal's Ctrl-C reaches the
launcher only. When the launcher goes, srun's stdin ends, with it the agents' stdin, and with that the ranks. srun waits
for the end of all of them, and where Slurm or a node has ended as well it would wait forever: a guard ends it then.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import ProtocolError, TransportError, UsageError
from launcher.base.fields import named
from launcher.base.timeouts import timeouts
from launcher.cluster.cluster import Host
from launcher.slurm.framing import ALL, DATA, END, PIECE_BYTES, LineReader, encode_lines
from launcher.transport.api import Shared, StderrTail
from launcher.transport.command import NEUTRAL_FOLDER, agent_argv, is_relative
from launcher.transport.local import start_child

if TYPE_CHECKING:
    from launcher.cluster.cluster import Cluster
    from launcher.transport.ssh.options import SshOptions

RELAY_MODULE = "launcher.agent.relay"
_ABSENCE_S = 3.0  # the thread that listens never pauses for so long by itself
_READ_BYTES = 1 << 18
# srun keeps what it has received and not yet printed in 1024 buffers of at most 1024 bytes (a line of ours each), for
# all nodes together. As long as all are taken, each that gets free goes to the node that comes first in its list, and
# of the last one nothing comes through, whatever it says: measured with three nodes that flood, two got 150 MB through
# in 18 s, the third 0.2 MB. Therefore the output of all nodes that may be on its way fits into three quarters of them.
_OUTPUT_BYTES = 768 * PIECE_BYTES
_MIN_WINDOW_BYTES = 2048  # of one node: so the above holds up to 202 nodes; of more that all flood some may wait long
_MAX_SHARED = 16  # frames for all nodes, of 1.4 MB, that wait for srun to take them
_END_S = 2.0
_TAIL_WAIT_S = 0.5
_ORPHAN_S = 30  # what srun gets to end once the launcher has gone; the agents end their ranks with or without it
_FORK_S = 5  # what the process that srun forks gets after that, to tell Slurm of the end
# The guard is in srun's process group ($$): no other can have that number as long as the guard lives. It hears of the
# launcher's end, however it came, by the end of a pipe that nobody writes to; a line says that it is not needed. It is
# no child of srun, which waits for its children.
_GUARDED = """\
( (
  if ! read -r _ <"$1"; then
    PATH="$PATH:/usr/bin:/bin" num_s=0
    while [ "$num_s" -lt "$2" ] && kill -0 $$; do sleep 1; num_s=$((num_s + 1)); done
    sleep "$3"
    kill -KILL 0
  fi
) </dev/null >/dev/null 2>&1 &)
shift 3
exec "$@"
"""
# What srun says about --cpu-bind=none where the cluster binds nothing anyway.
_NOISE = ("srun: cluster configuration lacks support for cpu binding",)
# Options of the job that srun would read from the environment as its own, against one agent on each node.
_NOT_FOR_SRUN = (
    "SLURM_CPU_BIND", "SLURM_CPUS_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_EXACT", "SLURM_GPU_BIND",
    "SLURM_GPUS_PER_TASK", "SLURM_LABELIO", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_TRES", "SLURM_STDERRMODE", "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_TRES_PER_TASK",
    "SLURM_UNBUFFEREDIO", "SRUN_CPUS_PER_TASK",
)  # fmt: skip


class SrunTransport:
    """Starts the agents of all hosts of a run with the first `open`, in one step: both `Transport` and `Transports`.

    A host opened a second time gets a step of its own: that is how a lost host is cleaned up.
    """

    name = "srun"

    def __init__(self, hosts: Sequence[Host], *, python: str | None = None, root: Path | None = None) -> None:
        self._hosts = tuple(hosts)
        self._agent = agent_argv(python, RELAY_MODULE, root)
        self._folder = [] if is_relative(python) else [f"--chdir={NEUTRAL_FOLDER}"]
        self._lock = threading.Lock()
        self._unclaimed: dict[str, SrunChannel] | None = None
        self._steps: list[SrunStep] = []

    @classmethod
    def of(cls, options: SshOptions, cluster: Cluster) -> SrunTransport:
        """Return what reaches the hosts of an allocation. Raises: UsageError for options that srun cannot obey."""
        if options.setup:
            raise UsageError(
                f"{named('setup')} and {named('venv_script')} are for hosts reached over SSH; srun passes this"
                " environment on",
                hint="put the commands into the batch script, before `launch`",
            )
        return cls([host for host in cluster.hosts if host.slots], python=options.remote_python)

    def prepare(self, hosts: Sequence[Host]) -> None:
        """End the steps of an earlier run; the next host that is opened begins a new one, on all of `hosts`."""
        self.close()
        with self._lock:
            self._hosts, self._unclaimed = tuple(hosts), None

    def for_host(self, host: Host) -> SrunTransport:
        return self

    def address_of(self, host: Host) -> str:
        """Return the address other nodes reach `host` by: its node name."""
        return host.name

    def notes_on(self, hosts: Sequence[Host]) -> tuple[str, ...]:
        """Return nothing: srun reaches all nodes alike."""
        return ()

    def command_for(self, host: Host) -> str:
        return shlex.join(self._argv(self._hosts))

    def open(self, host: Host) -> SrunChannel:
        with self._lock:
            if self._unclaimed is None:
                self._unclaimed = dict(self._start(self._hosts, timeouts().srun_silence_s).channels)
            channel = self._unclaimed.pop(host.name, None)
            return channel or self._start((host,), timeouts().srun_sweep_silence_s).channels[host.name]

    def close(self) -> None:
        with self._lock:
            steps, self._steps = self._steps, []
        for step in steps:
            step.close()

    def _start(self, hosts: Sequence[Host], silence_s: float) -> SrunStep:
        environ = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_SRUN}
        step = SrunStep(self._argv(hosts), [host.name for host in hosts], environ, silence_s)
        self._steps.append(step)
        return step

    def _argv(self, hosts: Sequence[Host]) -> list[str]:
        count = len(hosts)
        # Inside another step whose resources are all taken. Where nodes differ, Slurm 22.05 would then give every node
        # the smallest number of GPUs: there the step waits for its resources instead.
        overlap = ["--overlap"] if len({len(host.slots) for host in hosts}) == 1 else []
        return [
            "srun",
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(host.name for host in hosts)}",
            # The controller decides who is stopped when a rank, an agent or a node is lost, not srun.
            "--kill-on-bad-exit=0",
            "--no-kill",
            "--wait=0",
            *overlap,
            "--cpu-bind=none",  # an agent's ranks use all CPUs of the job on the node
            "--mpi=none",
            "--export=ALL",
            *self._folder,
            *self._agent,
        ]


class SrunStep:
    """One srun process; `channels` are its nodes, each of which is lost when it is silent for `silence_s`."""

    def __init__(self, argv: Sequence[str], names: Sequence[str], environ: Mapping[str, str], silence_s: float) -> None:
        self._silence_s = silence_s
        self._process, self._lifeline = _start_srun(argv, environ)
        if self._process.stdin is None or self._process.stdout is None or self._process.stderr is None:
            raise RuntimeError("Popen made no pipe")
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        # Writing has a thread of its own, and reading never waits for anybody: srun serves both in one thread, so who
        # writes to it while it waits to be read from would wait forever.
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: the end of stdin
        # What is for all nodes is sent when the first of them is to get it, and no other waits for room meanwhile.
        self._shared_lock = threading.Lock()
        self._shared: set[int] = set()  # ids of what was sent: it lives until every node's turn has come
        self._shared_room = threading.Semaphore(_MAX_SHARED)
        self._end_lock = threading.Lock()
        self._stdin_ended = False
        self._is_broken = False
        self.window_bytes = max(_OUTPUT_BYTES // len(names), _MIN_WINDOW_BYTES)
        self.channels = {name: SrunChannel(self, name) for name in names}
        self._live = dict(self.channels)
        self._stderr = StderrTail(self._process.stderr.read, "srun", self._process.stderr.close)
        threading.Thread(target=self._read, name="read-srun", daemon=True).start()
        threading.Thread(target=self._write, name="write-srun", daemon=True).start()

    def send(self, node: str, lines: bytes) -> None:
        """Write whole lines to every agent, later and in this order. Raises: TransportError when srun is gone."""
        if self._is_broken:
            raise TransportError(
                "srun is gone: the agent cannot be reached", where=node, hint=self.stderr_tail() or None
            )
        self._outbox.put(lines)

    def send_to_all(self, node: str, frame: Shared) -> None:
        """Send a frame that every agent gets, unless it is on its way already; waits for room. Raises: TransportError.

        node: whose turn it is. What is sent to that node later arrives later.
        """
        with self._shared_lock:
            if id(frame) in self._shared:
                return
            while not self._shared_room.acquire(timeout=1.0):
                if self._is_broken:
                    break
            self.send(node, Shared(encode_lines(ALL, DATA, frame)))
            self._shared.add(id(frame))

    def release(self, name: str) -> None:
        """Record that a channel is closed; the last one ends the step."""
        self._live.pop(name, None)
        if not self._live:
            self.close()

    def end_stdin(self) -> None:
        """End every agent's stdin once all channels have ended theirs. Idempotent."""
        with self._end_lock:
            if not self._stdin_ended and all(channel.stdin_ended for channel in self.channels.values()):
                self._stdin_ended = True
                self._outbox.put(None)

    def close(self) -> None:
        """End the step: by the end of its stdin, else by SIGTERM, else by SIGKILL. Idempotent."""
        for channel in self.channels.values():
            channel.stdin_ended = True
        self.end_stdin()
        for stop in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                stop()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a device is left to the kernel
            self._process.wait(timeouts().kill_s)
        was_killed = self._process.returncode in (None, -signal.SIGKILL)
        with self._end_lock:
            if not self._lifeline.closed:
                with contextlib.suppress(OSError), self._lifeline:
                    if not was_killed:  # else what it has forked still speaks to Slurm, and the guard ends that
                        self._lifeline.write(b"\n")

    def exit_status(self) -> int | None:
        """Return srun's own status (128+signal when killed), None while it runs or ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_S)
            return code if code >= 0 else 128 - code
        return None

    def stderr_tail(self) -> str:
        """Return the last lines srun and the agents wrote to stderr."""
        text = self._stderr.text(_TAIL_WAIT_S if self._process.poll() is not None else 0.0)
        return "\n".join(line for line in text.splitlines() if line not in _NOISE)

    def listen_stderr(self, take: Callable[[bytes], None]) -> None:
        """Give what srun and the agents write to stderr to `take`."""
        self._stderr.listen(take)

    def _write(self) -> None:
        """Send what is in the outbox; runs in a thread of its own until the end of stdin, or of srun."""
        try:
            for lines in iter(self._outbox.get, None):
                view = memoryview(lines)
                while view:
                    view = view[os.write(self._stdin.fileno(), view) :]
                if isinstance(lines, Shared):
                    self._shared_room.release()
        except OSError:
            self._is_broken = True
        self._stdin.close()

    def _read(self) -> None:
        """Hand out what comes from srun; runs in a thread of its own until srun's stdout ends."""
        reader = LineReader()
        poller = select.poll()
        poller.register(self._stdout.fileno(), select.POLLIN)
        now_s = time.monotonic()
        try:
            while True:
                if poller.poll(1000):
                    data = os.read(self._stdout.fileno(), _READ_BYTES)
                    if not data:
                        return
                    for line in reader.feed(data):
                        self._deliver(line.node, line.kind, line.body)
                before_s, now_s = now_s, time.monotonic()
                for channel in self.channels.values():
                    if now_s - before_s > _ABSENCE_S:  # this process was stopped: it could hear nobody
                        channel.last_heard_s = now_s
                    if now_s - channel.last_heard_s > self._silence_s:
                        channel.end(None)
        except ProtocolError:  # nothing that follows can be trusted: every channel ends
            return
        finally:
            for channel in self.channels.values():
                channel.end(None)
            self._stdout.close()

    def _deliver(self, node: str, kind: bytes, body: bytes) -> None:
        channel = self.channels.get(node)
        if channel is None:
            return
        channel.last_heard_s = time.monotonic()
        if kind == DATA:
            channel.push(body)
        elif kind == END:
            channel.end(int(body) if body.isdigit() else None)


class SrunChannel:
    """The part of a step that belongs to one node; implements `Channel`."""

    def __init__(self, step: SrunStep, name: str) -> None:
        self._step = step
        self.host_name = name
        self.window_bytes = step.window_bytes
        self._changed = threading.Condition()
        self._unread = bytearray()  # no more than the window, and what is not output
        self._ended = False
        self._closed = False
        self._status: int | None = None
        self.stdin_ended = False
        self.last_heard_s = time.monotonic()

    def read(self, max_bytes: int) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._unread or self._ended or self._closed)
            if not self._unread or self._closed:
                return b""
            data = bytes(self._unread[:max_bytes])
            del self._unread[:max_bytes]
            return data

    def write(self, data: bytes) -> None:
        if self._ended or self.stdin_ended:
            raise TransportError("the agent is gone", where=self.host_name, hint=self.stderr_tail() or None)
        if isinstance(data, Shared):
            self._step.send_to_all(self.host_name, data)
        else:
            self._step.send(self.host_name, encode_lines(self.host_name, DATA, data))

    def close_stdin(self) -> None:
        if self.stdin_ended:
            return
        self.stdin_ended = True
        with contextlib.suppress(TransportError):
            self._step.send(self.host_name, encode_lines(self.host_name, END))
        self._step.end_stdin()

    def stderr_tail(self) -> str:
        return self._step.stderr_tail()

    def listen_stderr(self, take: Callable[[bytes], None]) -> None:
        """Give the step's whole stderr to `take`: srun keeps no nodes apart there."""
        self._step.listen_stderr(take)

    def wait(self, timeout_s: float) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended, timeout_s)
            if not self._ended or self._status is not None:
                return self._status
        return self._step.exit_status()

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self.close_stdin()
        self._step.release(self.host_name)

    # ---- called by the step's reading thread ----

    def push(self, data: bytes) -> None:
        """Keep bytes until they are read."""
        with self._changed:
            if not self._closed:
                self._unread += data
                self._changed.notify_all()

    def end(self, status: int | None) -> None:
        """Record that nothing more will come; the first status stays."""
        with self._changed:
            if not self._ended:
                self._ended, self._status = True, status
                self._changed.notify_all()


def _start_srun(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], io.FileIO]:
    """Start srun and its guard. Returns srun's process and the pipe whose end tells the guard that we have gone."""
    program = shutil.which(argv[0])
    if program is None:
        raise TransportError(
            "this is a Slurm allocation, but srun is not in PATH",
            hint=f"add Slurm's programs to PATH, or name the hosts with {named('hostfile')} to use SSH",
        )
    try:
        reader, writer = os.pipe()
    except OSError as error:
        raise TransportError(f"srun cannot be started: {error.strerror or error}", where=program) from None
    lifeline = io.FileIO(writer, "w")
    guard = ["/bin/sh", "-c", _GUARDED, "sh", f"/dev/fd/{reader}", str(_ORPHAN_S), str(_FORK_S)]
    try:
        process = start_child([*guard, program, *argv[1:]], environ, (reader,))
    except OSError as error:
        lifeline.close()
        raise TransportError(f"srun cannot be started: {error.strerror or error}", where=program) from None
    finally:
        os.close(reader)
    return process, lifeline
