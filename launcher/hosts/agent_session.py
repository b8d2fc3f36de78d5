"""One program on one host under an ordinary agent, which ends whatever the program leaves behind.

`launch check` and `launch exec --supervise` run programs so.
"""

from __future__ import annotations

import os
import time

from launcher.agent.wire import (
    Bye,
    Decoder,
    Exited,
    Hello,
    Message,
    Output,
    PickPort,
    PortPicked,
    Spawn,
    SpawnFailed,
    Stop,
    check_version,
)
from launcher.base.errors import Diagnostic, TransportError
from launcher.hosts.fanout import GRACE_S, READ_BYTES, Session, Task, host_variables
from launcher.job.environment import forwarded
from launcher.job.flow_control import Window
from launcher.job.outcome import shell_code
from launcher.job.plan import DEFAULT_LEASE_S
from launcher.job.sender import Sender
from launcher.transport.api import Channel
from launcher.transport.diagnose import start_failure


class AgentSession(Session):
    """One host with an agent, which ends whatever its program leaves behind."""

    def __init__(self, number: int, task: Task, job_id: str) -> None:
        super().__init__(number, task, job_id)
        self._heard_s = 0.0  # monotonic, when the agent last said something; it answers every ping
        self._was_started = False
        self._said_bye = False
        self._asked_s = 0.0
        self._window = Window(None)  # the channel's own, once there is one
        self._sender: Sender | None = None  # once there is a channel
        self._wanted_grace_s: float | None = None  # of a stop

    @property
    def is_lost(self) -> bool:
        return self._was_started and not self._said_bye

    @property
    def silent_since_s(self) -> float | None:
        # An agent on this machine has no lease: its pipe tells its end.
        return self._heard_s if self.has_answered and self.opening.transport != "local" else None

    def follow(self, channel: Channel) -> None:
        self._window = Window(channel.window_bytes)
        self._sender = Sender(channel, has_lease=self.opening.transport != "local")
        if self._wanted_grace_s is not None:  # a stop that came before there was a sender
            self.stop(self._wanted_grace_s)
        decoder = Decoder(expect_magic=True)
        try:
            while data := channel.read(READ_BYTES):
                self._heard_s = time.monotonic()
                for message in decoder.feed(data):
                    self._handle(message, channel)
        finally:
            self._sender.end()
        if not self.has_answered:
            raise start_failure(channel, None, decoder.banner)
        raise TransportError("stopped before its end" if self._said_bye else "the connection was lost")

    def stop(self, grace_s: float) -> None:
        self._wanted_grace_s = grace_s
        self._send(Stop(grace_s))

    def _send(self, message: Message) -> None:
        """Send a message; a lost connection is noticed by the reader."""
        if self._sender is not None:
            self._sender.send(message)

    def _handle(self, message: Message, channel: Channel) -> None:
        result = self.result
        if isinstance(message, Hello):
            self.has_answered = True
            check_version(message, channel.host_name)
            self._asked_s = time.monotonic()
            self._send(PickPort())
        elif isinstance(message, PortPicked):
            result.round_trip_s = time.monotonic() - self._asked_s
            result.port = message.port
            result.started_s = time.time()
            self._was_started = True
            self._send(self._spawn_message(channel.window_bytes))
        elif isinstance(message, Output):
            self.keep(message.data, result.stdout if message.stream == "stdout" else result.stderr)
            handled = self._window.handled(message)
            if handled is not None:
                self._send(handled)
        elif isinstance(message, SpawnFailed):
            result.error = Diagnostic(f"it could not be started: {message.reason}", result.host.name, message.hint)
        elif isinstance(message, Exited):
            result.exit_code = shell_code(message.status)
            result.stderr += str((message.record or {}).get("traceback", "")).encode("utf-8", "backslashreplace")
        elif isinstance(message, Bye):
            self._said_bye = True

    def _spawn_message(self, window_bytes: int | None) -> Spawn:
        return Spawn(
            job_id=self.job_id,
            commands=[list(self.task.command)],
            cwd=self.task.cwd,
            env={} if self.result.transport == "local" else forwarded(os.environ),
            rank_envs=[host_variables(self.number)],
            lease_s=None if self.result.transport == "local" else DEFAULT_LEASE_S,
            grace_s=GRACE_S,
            window_bytes=window_bytes,
        )
