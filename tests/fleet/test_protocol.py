"""Agents that are broken or hostile: one error that names the host, and nothing is left running."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT, run_launch, wait_until_gone

from launcher.agent.wire import Bye, Exited, Message, Output, PortPicked, Raised, SpawnFailed, Started
from launcher.base.errors import ProtocolError
from launcher.fleet.agent_link import ProtocolCheck

# The agent's own code, changed in one place: what it says when a rank was started.
BROKEN = """
import sys
if "launcher.agent.main" in sys.orig_argv:
    from launcher.agent import wire
    from launcher.agent.wire import Outbox
    send = Outbox.send
    def send_and_break(self, message):
        send(self, message)
        if isinstance(message, wire.Started):
            header = {header!r}
            self._unsent += len(header).to_bytes(4, "big") + bytes(4) + header
    Outbox.send = send_and_break
"""
HEADERS = {
    b'{"type": "Output", "rank": 7, "stream": "stdout"}': "Output for rank 7, which is not on this host",
    b'{"type": "Exited", "rank": 0, "status": 999, "time_s": 0, "record": null, "max_rss_bytes": 0, "oom": null}': (
        "Exited of rank 0 with status 999"
    ),
    b'{"type": "Output", "rank": 0, "stream": "result"}': "result of rank 0 has no place",
    b'{"type": "Raised", "rank": 0, "record": {"type": 1}}': "an unreadable error record of rank 0",
    b'{"type": "Pong", "time_s": "noon"}': "time_s of Pong is 'noon'",
    b'{"type": "Bye"}': "Bye without a word about 1 of its ranks",
    b'{"type": "Pong", "time_s": ' + b"[" * 100_000: "damaged",
}


@pytest.mark.parametrize("header", HEADERS, ids=HEADERS.values())
def test_an_agent_that_breaks_the_protocol_is_one_error_of_its_host(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN.format(header=header))
    script = scripts.write(tmp_path, "import time; time.sleep(600)")
    result = run_launch(tmp_path, script, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert result.code == 69
    assert result.err.count("✗") == 1
    assert "✗ localhost was lost" in result.err
    assert HEADERS[header] in result.err
    assert "Traceback" not in result.err
    # Its agent was killed: that nothing is left can be said of what carries the job's id only.
    assert "No process with the job's id is left on localhost." in result.err
    wait_until_gone(result.job_id)


def exited(rank: int, status: int = 0) -> Exited:
    return Exited(rank, status, 1.0, None, 0, None)


def test_what_agents_say_is_allowed() -> None:
    check = ProtocolCheck(range(4, 6))
    record = {"type": "E", "message": "", "traceback": "", "time_s": 1.0, "exit_code": 1}
    for message in (PortPicked(4000), Started(4, 1), Output(5, "stderr", b""), Raised(5, record), exited(4), exited(5)):
        check.check(message)
    check.check(Bye())
    ProtocolCheck(range(2)).check(Bye([4711]))
    failed = ProtocolCheck(range(2))
    failed.check(SpawnFailed("no space"))
    failed.check(Bye())


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([Started(3, 1)], "rank 3, which is not on this host"),
        ([exited(0), exited(0)], "for the second time"),
        ([exited(0), Bye()], "Bye without a word about 1 of its ranks"),
        ([Output(0, "stdin", b"")], "output on 'stdin'"),
        ([PortPicked(70_000)], "port 70000"),
        ([exited(0, -65)], "status -65"),
    ],
)
def test_what_they_may_not_say(messages: list[Message], problem: str) -> None:
    check = ProtocolCheck(range(2))
    for message in messages[:-1]:
        check.check(message)
    with pytest.raises(ProtocolError, match=problem):
        check.check(messages[-1])
