"""Entries of jobs: private, whole, told apart from other processes with the same pid, and never a job's failure."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from harness.launch.command import wait_until

from launcher.base.errors import LauncherError, TransportError, UsageError
from launcher.base.secrets import MASK
from launcher.base.timeouts import timeouts
from launcher.cluster.cluster import Cluster, Host, place
from launcher.plan.plan import Command, JobPlan
from launcher.registry import registry


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def plan(job_id: str = "calm-otter-0001") -> JobPlan:
    return JobPlan(
        job_id=job_id,
        placement=place(Cluster((Host("node-a", (0, 1)), Host("node-b", (0, 1))))),
        command=Command("script", "train.py", ("--token", "s3cret")),
        cwd="/data",
        run_folder=Path("runs") / job_id,
        master_addr="node-a",
        master_port=None,
        transports={0: "ssh", 1: "ssh"},
        forwarded_env={"TOKEN": "other"},
    )


def fail(text: str) -> None:
    raise AssertionError(text)


def test_an_entry_says_where_and_how_the_job_ran() -> None:
    with registry.registered(plan(), fail) as registration:
        entry = registry.find_job("calm-otter-0001")
        assert entry.state == "running"
        assert entry.pid == os.getpid()
        assert entry.hosts == ("node-a", "node-b")
        assert entry.num_ranks == 4
        assert entry.command == ("train.py", "--token", MASK)
        assert entry.run_folder == "/data/runs/calm-otter-0001"
        assert abs(entry.started_s - time.time()) < 60
        registration.exit_code = 3
    entry = registry.find_job("calm-otter-0001")
    assert (entry.state, entry.exit_code) == ("ended", 3)
    assert entry.ended_s is not None
    assert entry.ended_s >= entry.started_s


def test_entries_are_private_and_leave_no_other_files() -> None:
    with registry.registered(plan(), fail):
        pass
    folder = registry.jobs_folder()
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "other" not in path.read_text()  # values of the environment are nobody's business


def test_an_error_ends_the_entry_with_its_code() -> None:
    with pytest.raises(TransportError), registry.registered(plan(), fail):
        raise TransportError("gone")
    assert registry.find_job("calm").exit_code == 69
    with pytest.raises(ZeroDivisionError), registry.registered(plan(), fail):
        raise ZeroDivisionError
    assert registry.find_job("calm").exit_code == 1


def test_a_folder_that_cannot_be_written_fails_no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    warnings: list[str] = []
    with registry.registered(plan(), warnings.append) as registration:
        registration.exit_code = 0
    assert len(warnings) == 1
    assert "launch ps will not show this job" in warnings[0]
    assert registry.all_jobs() == []


def test_a_relative_state_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert registry.jobs_folder() == tmp_path / ".local/state/launch/jobs"


def test_a_launcher_that_was_killed_is_lost_and_gets_no_signal() -> None:
    process = subprocess.Popen(["sleep", "60"])
    identity = registry.process_identity(process.pid)
    assert identity is not None
    with registry.registered(plan(), fail):
        entry = dataclasses.replace(registry.find_job("calm"), pid=process.pid, process=identity)
    assert entry.state == "running"
    assert registry.send_signal(entry, signal.SIGKILL)
    process.wait()
    assert entry.state == "lost"
    assert not registry.send_signal(entry, signal.SIGTERM)


def test_another_process_with_the_same_pid_is_not_the_job() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        with registry.registered(plan(), fail):
            entry = dataclasses.replace(registry.find_job("calm"), pid=process.pid)
        assert entry.state == "lost"
        assert not registry.send_signal(entry, signal.SIGTERM)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_job_of_another_machine_is_known_as_such() -> None:
    with registry.registered(plan(), fail):
        entry = dataclasses.replace(registry.find_job("calm"), machine="other-machine")
    assert entry.state == "elsewhere"


def test_ids_may_be_abbreviated_as_long_as_they_are_unique() -> None:
    for job_id in ("calm-otter-0001", "calm-otter-0002", "keen-lynx-0003"):
        with registry.registered(plan(job_id), fail):
            pass
    assert registry.find_job("k").job_id == "keen-lynx-0003"
    assert registry.find_job("calm-otter-0002").job_id == "calm-otter-0002"
    with pytest.raises(UsageError, match=r"is the beginning of 2 jobs.*calm-otter-0001, calm-otter-0002"):
        registry.find_job("calm")
    with pytest.raises(UsageError, match='did you mean "keen-lynx-0003"'):
        registry.find_job("keen-linx-0003")
    with pytest.raises(UsageError, match="launch ps shows"):
        registry.find_job("")


def test_files_that_are_no_entry_are_left_out() -> None:
    with registry.registered(plan(), fail):
        pass
    folder = registry.jobs_folder()
    whole = json.loads((folder / "calm-otter-0001.json").read_text())
    for name, text in {
        "half": '{"job_id": ',
        "list": "[]",
        "new": '{"job_id": "x", "colour": 1}',
        "copy": json.dumps(whole),
        "text": json.dumps(whole | {"job_id": "text", "started_s": "now"}),
        "number": json.dumps(whole | {"job_id": "number", "hosts": [1]}),
        "flat": json.dumps(whole | {"job_id": "flat", "hosts": None}),
    }.items():
        (folder / f"{name}.json").write_text(text)
    assert [entry.job_id for entry in registry.all_jobs()] == ["calm-otter-0001"]


def test_old_entries_are_dropped_and_running_ones_kept() -> None:
    with registry.registered(plan("old-ended-0001"), fail):
        pass
    with registry.registered(plan("old-running-0002"), fail):
        for path in registry.jobs_folder().iterdir():
            os.utime(path, (1000.0, 1000.0))
        with registry.registered(plan("new-job-0003"), fail):
            pass
        assert [entry.job_id for entry in registry.all_jobs()] == ["old-running-0002", "new-job-0003"]


def entry_elsewhere(job_id: str, silent_s: float) -> None:
    """Leave the entry of a job that another machine has begun, and that was touched so long ago."""
    with registry.registered(plan(job_id), fail):
        pass
    path = registry.jobs_folder() / f"{job_id}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "other", "ended_s": None}))
    os.utime(path, (time.time() - silent_s,) * 2)


def test_a_job_of_another_machine_is_kept_while_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KEPT_S", 60.0)
    entry_elsewhere("calm-otter-0001", 120.0)
    entry_elsewhere("keen-lynx-0002", 3600.0)
    assert {entry.job_id: entry.state for entry in registry.all_jobs()} == {
        "calm-otter-0001": "elsewhere",
        "keen-lynx-0002": "lost",
    }
    with registry.registered(plan("new-job-0003"), fail):
        pass
    assert {entry.job_id for entry in registry.all_jobs()} == {"calm-otter-0001", "new-job-0003"}


def test_a_running_job_touches_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TOUCH_INTERVAL_S", 0.02)
    with registry.registered(plan(), fail):
        (path,) = registry.jobs_folder().iterdir()
        os.utime(path, (1000.0, 1000.0))
        wait_until(lambda: registry.find_job("calm").touched_s > 1000.0, "the next touch", 10)


def test_a_job_of_another_user_is_not_ours_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int, _number: int) -> None:
        raise PermissionError

    with registry.registered(plan(), fail):
        monkeypatch.setattr(os, "kill", refuse)
        with pytest.raises(LauncherError, match="belongs to another user"):
            registry.send_signal(registry.find_job("calm"), signal.SIGTERM)


@pytest.mark.parametrize("value", ["1e300", "NaN", "-1"])
def test_numbers_that_are_no_time_make_no_entry(value: str) -> None:
    with registry.registered(plan(), fail):
        path = registry.jobs_folder() / "calm-otter-0001.json"
        data = json.loads(path.read_text())
        path.write_text(json.dumps(data | {"started_s": float(value)}))
        assert registry.all_jobs() == []
        path.write_text("[" * 100_000)
        assert registry.all_jobs() == []


def test_a_disk_that_does_not_answer_holds_no_job_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_TIMEOUT_SCALE", "0.01")
    timeouts.cache_clear()
    stall, said = threading.Event(), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(registry, "write_private", lambda *_: stall.wait())
        with registry.registered(plan(), said.append):
            assert said == ["the disk with the list of jobs does not answer; launch ps will not show this job"]
    said.clear()
    with registry.registered(plan(), said.append):
        monkeypatch.setattr(registry, "write_private", lambda *_: stall.wait())
    assert said == ["the disk with the list of jobs does not answer; launch ps will not show how this job ended"]
    stall.set()
    timeouts.cache_clear()
