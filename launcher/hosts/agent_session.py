"""One program on one host under an ordinary agent, which ends whatever the program leaves behind.

`launch check` and `launch exec --supervise` run programs so.
"""

from __future__ import annotations

import os
import time

from launcher.agent.wire import Exited, Hello, Message, Output, PickPort, PortPicked, Spawn, SpawnFailed
from launcher.base.errors import Diagnostic
from launcher.fleet.agent import Agent
from launcher.hosts.session import GRACE_S, HostRun
from launcher.job.environment import forwarded
from launcher.job.outcome import shell_code
from launcher.job.plan import DEFAULT_LEASE_S


class AgentSession(Agent):
    """One host with an agent whose only rank is the program."""

    def __init__(self, run: HostRun) -> None:
        super().__init__(run.task.host, (run.number,))
        self.run = run
        self._asked_s = 0.0

    @property
    def is_lost(self) -> bool:
        """True when something may be left on the host and no agent there ends it."""
        return self.run.result.started_s is not None and not self.exited_cleanly

    def take_output(self, output: Output) -> None:
        result = self.run.result
        self.run.keep(output.data, result.stdout if output.stream == "stdout" else result.stderr)
        self.handled(output)

    def handle(self, message: Message) -> None:
        """Take the next message of the agent. On the main thread."""
        result = self.run.result
        if isinstance(message, Hello):
            self._asked_s = time.monotonic()
            self.send(PickPort())
        elif isinstance(message, PortPicked):
            result.round_trip_s = time.monotonic() - self._asked_s
            result.port = message.port
            result.started_s = time.time()
            self.send(self._spawn_message())
        elif isinstance(message, SpawnFailed):
            result.error = Diagnostic(f"it could not be started: {message.reason}", self.name, message.hint)
        elif isinstance(message, Exited):
            result.exit_code = shell_code(message.status)
            result.stderr += str((message.record or {}).get("traceback", "")).encode("utf-8", "backslashreplace")

    def _spawn_message(self) -> Spawn:
        task, is_local = self.run.task, self.transport == "local"
        return Spawn(
            job_id=self.run.job_id,
            commands=[list(task.command)],
            cwd=task.cwd,
            env={} if is_local else forwarded(os.environ),
            rank_envs=[self.run.variables],
            lease_s=None if is_local else DEFAULT_LEASE_S,
            grace_s=GRACE_S,
            window_bytes=self.window.num_bytes,
        )
