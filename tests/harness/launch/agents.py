"""A real agent without a launcher: messages go in and come out."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from harness.launch.command import ROOT

from launcher.agent.wire import Decoder, Hello, Message, Spawn, encode
from launcher.plan.plan import new_job_id
from launcher.transport.command import AGENT_MODULE, own_argv


class Agent:
    """One agent process and its decoded messages."""

    def __init__(self, *, stderr: int | None = None) -> None:
        self.process = subprocess.Popen(
            own_argv(AGENT_MODULE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]),
            },
            start_new_session=True,
        )
        self._decoder = Decoder(expect_magic=True)
        self._ready: list[Message] = []
        self.pid = 0  # of the agent itself, once it has said hello; `process` is its guard

    def send(self, message: Message) -> None:
        """Write a message to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(encode(message))
        self.process.stdin.flush()

    def receive(self) -> Message | None:
        """Return the next message, None at the end of the stream."""
        assert self.process.stdout is not None
        while not self._ready:
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                return None
            self._ready.extend(self._decoder.feed(data))
        message = self._ready.pop(0)
        if isinstance(message, Hello):
            self.pid = message.pid
        return message

    def kill(self) -> None:
        """Kill it and its guard at once, so that neither cleans up behind the other. `Hello` has been received."""
        os.kill(self.pid, signal.SIGSTOP)
        self.process.kill()
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait()

    def receive_all(self) -> list[Message]:
        """Return all messages until the end of the stream."""
        return list(iter(self.receive, None))


def spawn(
    script: Path,
    *,
    ranks: int = 1,
    lease_s: float | None = None,
    grace_s: float = 5.0,
    job_id: str | None = None,
    env: dict[str, str] | None = None,
    window_bytes: int | None = None,
    progress_interval_s: float = 1.0,
) -> Spawn:
    """Return the order to start a script on so many ranks."""
    return Spawn(
        job_id=job_id or new_job_id(),
        commands=[["script", str(script)]] * ranks,
        cwd=str(script.parent),
        env=env or {},
        rank_envs=[{"RANK": str(rank)} for rank in range(ranks)],
        lease_s=lease_s,
        grace_s=grace_s,
        window_bytes=window_bytes,
        progress_interval_s=progress_interval_s,
    )
