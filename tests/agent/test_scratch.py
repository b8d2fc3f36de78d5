"""The folder of an agent's own: nothing of it is left behind, whoever was killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.agents import Agent, spawn
from harness.launch.command import DEADLINE_S

from launcher.agent import scratch
from launcher.agent.wire import Bye, Hello, Started, Stop, Sweep
from launcher.plan.plan import new_job_id


def test_an_agent_without_a_temporary_folder_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scratch, "_places", lambda: [str(tmp_path / "missing")])
    with pytest.raises(FileNotFoundError) as caught:
        scratch.Scratch("calm-otter-0000")
    assert caught.value.filename == str(tmp_path / "missing")


def test_nothing_of_an_agent_is_left_and_it_removes_what_a_killed_one_has_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    sleeps, passes = scripts.write(tmp_path, "import time; time.sleep(600)"), tmp_path / "pass.py"
    passes.write_text("print(1)")
    killed, living, pids = Agent(), Agent(), []
    with killed.process, living.process:
        for agent in (killed, living):
            assert isinstance(agent.receive(), Hello)
            agent.send(spawn(sleeps))
            started = agent.receive()
            assert isinstance(started, Started)
            pids.append(started.pid)
        killed.kill()
        os.kill(pids[0], signal.SIGKILL)
        folders = list(place.glob("launch-agent-*"))
        assert len(folders) == 2
        for folder in folders:
            os.utime(folder, (0, 0))  # young folders are left alone
        young = place / "launch-agent-a-b-0000-1"
        young.mkdir()
        (young / "lock").touch()
        os.utime(young, (time.time() + 86_400.0,) * 2)  # young to the end, however slow this machine is
        last = Agent()
        with last.process:
            last.send(spawn(passes))
            assert last.receive_all()[-1] == Bye()
            assert last.process.wait(DEADLINE_S) == 0
        (left,) = set(place.iterdir()) - {young}
        assert living.process.poll() is None
        living.send(Stop(0.0))
        assert living.receive_all()[-1] == Bye()
        assert living.process.wait(DEADLINE_S) == 0
    assert not left.exists()
    assert young.exists()


def test_what_a_killed_agent_has_left_goes_with_the_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job_id = new_job_id()
    killed = Agent()
    assert isinstance(killed.receive(), Hello)
    with killed.process:
        killed.send(spawn(scripts.write(tmp_path, "import time; time.sleep(600)"), job_id=job_id))
        assert isinstance(killed.receive(), Started)
        (left,) = tmp_path.glob("launch-agent-*")
        killed.kill()
    bystander = tmp_path / "launch-agent-other-job-0000-1"
    bystander.mkdir()
    (tmp_path / f"launch-agent-{job_id}-link").symlink_to(bystander)
    (bystander / "error_0").write_text("")
    sweeper = Agent()
    with sweeper.process:
        sweeper.send(Sweep(job_id))
        assert sweeper.receive_all()[-1] == Bye()
    assert not left.exists()
    assert (bystander / "error_0").exists()
