"""`python -m launcher.agent.relay`: what srun starts on each node; it stands between srun's pipes and the agent.

It takes the lines for its node out of what srun sends to all, and turns the agent's stream into lines (see
`transport/lines.py`). The agent itself is a child and knows nothing of this: its stdin ends with srun's, and its
lease with it. When the agent is killed the relay says so at once, which srun would not.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time

from launcher.agent.main import main as agent_main
from launcher.base import env
from launcher.transport.lines import BEAT, DATA, END, LineReader, encode_lines

BEAT_INTERVAL_S = 5.0
_READ_BYTES = 1 << 16
_FAREWELL_S = 30.0  # how long to wait for the launcher to have read everything


class Relay:
    """Moves bytes between srun (descriptors 0 and 1) and the agent's two pipes, until the agent's output ends."""

    def __init__(self, node: str, to_agent: int, from_agent: int) -> None:
        self._node = node
        self._to_agent: int | None = to_agent
        self._from_agent = from_agent
        self._reader = LineReader()
        self._last_sent_s = 0.0
        self._poller = select.poll()
        self._poller.register(0, select.POLLIN)
        self._poller.register(from_agent, select.POLLIN)
        self._dismissed = False

    def run(self) -> None:
        """Serve until the agent's output has ended or srun is gone."""
        _write_all(1, b"\n")  # ends what start-up files of the node may have printed
        try:
            while self._turn():
                pass
        except BrokenPipeError:  # srun is gone: nobody hears the agent any more
            self._end_agent()
        os.close(self._from_agent)

    def report(self, status: int) -> None:
        """Tell how the agent ended, and stay until that was read: Slurm cuts lines when a task ends."""
        try:
            _write_all(1, encode_lines(self._node, END, str(status).encode()))
        except BrokenPipeError:
            return
        deadline_s = time.monotonic() + _FAREWELL_S
        while not self._dismissed and time.monotonic() < deadline_s:
            if any(self._poller.poll(1000)):
                self._read_srun()

    def _turn(self) -> bool:
        """Wait for something and pass it on; False when the agent's output has ended."""
        for descriptor, _ in self._poller.poll(BEAT_INTERVAL_S * 1000):
            if descriptor == 0:
                self._read_srun()
                continue
            data = os.read(self._from_agent, _READ_BYTES)
            if not data:
                self._poller.unregister(self._from_agent)
                return False
            self._say(encode_lines(self._node, DATA, data))
        if time.monotonic() - self._last_sent_s >= BEAT_INTERVAL_S:
            self._say(encode_lines(self._node, BEAT))
        return True

    def _say(self, lines: bytes) -> None:
        _write_all(1, lines)
        self._last_sent_s = time.monotonic()

    def _read_srun(self) -> None:
        data = os.read(0, _READ_BYTES)
        if not data:
            self._poller.unregister(0)
            self._dismiss()
        for line in self._reader.feed(data):
            if line.node != self._node:
                continue
            if line.kind == END:
                self._dismiss()
            elif line.kind == DATA and self._to_agent is not None:
                try:
                    _write_all(self._to_agent, line.body)
                except BrokenPipeError:  # it is about to end, its output says how
                    self._end_agent()

    def _dismiss(self) -> None:
        self._dismissed = True
        self._end_agent()

    def _end_agent(self) -> None:
        if self._to_agent is not None:
            os.close(self._to_agent)
            self._to_agent = None


def main() -> int:
    """Start the agent as a child and serve it. Returns the exit status of the process."""
    command_read, command_write = os.pipe()
    output_read, output_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(command_read, 0)
        os.dup2(output_write, 1)
        for descriptor in (command_read, command_write, output_read, output_write):
            os.close(descriptor)
        return agent_main()
    os.close(command_read)
    os.close(output_write)
    # Slurm signals every process of a step; the agent obeys, and its last words still have to pass through here.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    node = os.environ.get(env.SLURMD_NODENAME.name) or socket.gethostname().partition(".")[0]
    relay = Relay(node, command_write, output_read)
    relay.run()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    relay.report(status if status >= 0 else 128 - status)
    return 0


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    sys.exit(main())
