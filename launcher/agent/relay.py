"""The relay: what srun starts on each node; it stands between srun's pipes and the agent.

It takes the lines for its node out of what srun sends to all, and turns the agent's stream into lines (see
`slurm/framing.py`). The agent itself is a child and knows nothing of this: its stdin ends with srun's, and its
lease with it. Each direction has a thread: a flood of output that waits for srun must not keep orders and pings from
the agent. When the agent is killed the relay says so at once, which srun would not.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading

from launcher.agent.main import clean_up_after, serve
from launcher.base import env
from launcher.base.processes import adopt_orphans
from launcher.base.signals import hear_of_children
from launcher.base.timeouts import timeouts
from launcher.slurm.framing import ALL, BEAT, DATA, END, LineReader, encode_lines

BEAT_INTERVAL_S = 5.0
_READ_BYTES = 1 << 16


class Relay:
    """Moves bytes between srun (descriptors 0 and 1) and the agent's two pipes, until the agent's output ends."""

    def __init__(self, node: str, to_agent: int, from_agent: int) -> None:
        self._node = node
        self._to_agent: int | None = to_agent
        self._to_agent_lock = threading.Lock()
        self._from_agent = from_agent
        self._poller = select.poll()
        self._poller.register(from_agent, select.POLLIN)
        self._dismissed = threading.Event()

    def run(self) -> None:
        """Serve until the agent's output has ended or srun is gone."""
        threading.Thread(target=self._read_srun, name="read-srun", daemon=True).start()
        try:
            _write_all(1, b"\n")  # ends what start-up files of the node may have printed
            while self._turn():
                pass
        except BrokenPipeError:  # srun has ended: nothing reads what the agent writes
            self._end_agent()
        os.close(self._from_agent)

    def report(self, status: int) -> None:
        """Tell how the agent ended, and stay until that was read: Slurm cuts lines when a task ends."""
        try:
            _write_all(1, encode_lines(self._node, END, str(status).encode()))
        except BrokenPipeError:
            return
        self._dismissed.wait(timeouts().srun_farewell_s)

    def _turn(self) -> bool:
        """Wait for something and pass it on; False when the agent's output has ended."""
        if self._poller.poll(BEAT_INTERVAL_S * 1000):
            data = os.read(self._from_agent, _READ_BYTES)
            if not data:
                return False
            _write_all(1, encode_lines(self._node, DATA, data))
        else:
            _write_all(1, encode_lines(self._node, BEAT))
        return True

    def _read_srun(self) -> None:
        """Pass on what is for this agent; runs in a thread of its own until srun's stdin ends.

        Also after the agent's own end: srun keeps what it sends until every node has taken it.
        """
        reader = LineReader()
        try:
            while data := os.read(0, _READ_BYTES):
                for line in reader.feed(data):
                    if line.node not in (self._node, ALL):
                        continue
                    if line.kind == END:
                        self._dismiss()
                    elif line.kind == DATA:
                        self._pass_on(line.body)
        finally:
            self._dismiss()

    def _dismiss(self) -> None:
        self._dismissed.set()
        self._end_agent()

    def _pass_on(self, data: bytes) -> None:
        with self._to_agent_lock:
            if self._to_agent is not None:
                # It is about to end when it does not read any more; its output says how.
                with contextlib.suppress(BrokenPipeError):
                    _write_all(self._to_agent, data)

    def _end_agent(self) -> None:
        with self._to_agent_lock:
            if self._to_agent is not None:
                os.close(self._to_agent)
                self._to_agent = None


def main() -> int:
    """Start the agent as a child and serve it. Returns the exit status of the process."""
    hear_of_children()
    command_read, command_write = os.pipe()
    output_read, output_write = os.pipe()
    adopt_orphans()  # for this agent the relay is the guard
    child = os.fork()
    if child == 0:
        os.dup2(command_read, 0)
        os.dup2(output_write, 1)
        for descriptor in (command_read, command_write, output_read, output_write):
            os.close(descriptor)
        return serve(is_in_step=True)
    os.close(command_read)
    os.close(output_write)
    # Slurm signals every process of a step; the agent obeys, and its last words still have to pass through here.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    node = os.environ.get(env.SLURMD_NODENAME.name) or socket.gethostname().partition(".")[0]
    relay = Relay(node, command_write, output_read)
    relay.run()
    relay.report(clean_up_after(child, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    return 0


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    sys.exit(main())
