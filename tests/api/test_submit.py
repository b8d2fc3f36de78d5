"""`launcher.submit` in a real Slurm: failures come back, jobs can be cancelled and found again; what is refused."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from harness.launch.command import wait_until
from harness.launch.slurm import LoopbackSlurm

import launcher
from launcher.base.errors import UsageError
from launcher.base.timeouts import timeouts
from launcher.slurm import queue

ASKED = launcher.Sbatch(time="5")


@pytest.mark.cluster
def test_failures_come_back_and_a_job_can_be_followed_cancelled_and_found_again(
    slurm: LoopbackSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyError("bad data")

    def wait() -> None:
        print("READY")
        time.sleep(600)

    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_CONF",):
        monkeypatch.setenv(name, slurm.env[name])
    elsewhere = launcher.Sbatch(time="5", job_name="own", output="%x-%j-%N.out")
    waiting = launcher.submit(wait, slurm=elsewhere, env={"TOKEN": "s3cr3t"})
    failing = launcher.submit(fail, slurm=ASKED, ranks=2)
    with pytest.raises(launcher.JobTimeout, match="continues"):
        waiting.result(timeout_s=0.0)
    wait_until(lambda: waiting.stdout() == "READY\n", "the rank")
    assert waiting.state() == "RUNNING"
    waiting.cancel()
    with pytest.raises(launcher.RankFailed, match="KeyError: 'bad data'") as caught:
        launcher.SlurmJob(failing.folder.relative_to(tmp_path)).result(timeout_s=60)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.outcome.run_folder == failing.folder
    with pytest.raises(launcher.JobError, match="ended as CANCELLED and left no result") as cancelled:
        waiting.result(timeout_s=60)
    (log,) = tmp_path.glob(f"own-{waiting.job_id}-*.out")
    assert f"its log is {log}\n" in f"{cancelled.value}\n"
    assert oct(waiting.folder.stat().st_mode & 0o777) == "0o700"
    assert "s3cr3t" not in (waiting.folder / "batch.sh").read_text()


@pytest.mark.parametrize(
    ("output", "log", "where"),
    [
        ("%x-%j.out", "/out/own-7.out", "/out/own-7.out"),
        ("/a b/%x-%j.out", None, "/a b/%x-%j.out"),
        (None, None, "FOLDER/slurm.out"),
    ],
)
def test_the_log_of_a_job_that_did_not_get_far_is_where_output_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str | None, log: str | None, where: str
) -> None:
    """log: what Slurm says; None: it has forgotten the job."""
    state = None if log is None else queue.JobState("TIMEOUT", 0, Path(log), "None")
    monkeypatch.setattr(queue, "submit", lambda _: 7)
    monkeypatch.setattr(queue, "job_state", lambda _: state)
    monkeypatch.setattr("launcher.api.submit.timeouts", lambda: timeouts().scaled(0.01))
    job = launcher.submit(print, slurm=launcher.Sbatch(time="5", output=output), log_dir=tmp_path)
    with pytest.raises(launcher.JobError, match="left no result") as caught:
        job.result()
    assert caught.value.diagnostics[0].hint == f"its log is {where.replace('FOLDER', str(job.folder))}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"slurm": launcher.Sbatch(array="0-3")}, "an array makes several jobs"),
        ({"slurm": launcher.Sbatch(container_image="image.sif")}, "a container has a Python of its own"),
        ({"slurm": ASKED, "ranks": 0}, "ranks=: expected a whole number from 1 to 1024, or gpu, cpu, auto, got 0"),
        ({"slurm": {"time": "5"}}, "slurm is a dict"),
    ],
)
def test_what_cannot_give_results_back_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        launcher.submit(print, log_dir=tmp_path, **values)
    assert list(tmp_path.iterdir()) == []


def test_only_the_folder_of_a_job_is_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "request").write_bytes(pickle.dumps(None))
    with pytest.raises(UsageError, match="not the folder of a submitted job"):
        launcher.SlurmJob(tmp_path)


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_not_unpickled(tmp_path: Path, mode: int) -> None:
    (tmp_path / "number").write_text("7")
    tmp_path.chmod(mode)
    with pytest.raises(UsageError, match="other users can write to this folder"):
        launcher.SlurmJob(tmp_path)
    tmp_path.chmod(0o700)
    assert launcher.SlurmJob(tmp_path).job_id == 7
