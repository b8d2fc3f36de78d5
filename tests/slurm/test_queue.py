"""Waiting for a job of Slurm where its controller does not always answer, and its files appear late."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from harness.launch.command import run_here

import launcher
from launcher.base.errors import TransportError, UsageError
from launcher.base.timeouts import timeouts

# Answers what the file `answers` says, a line for each question; the last line again and again.
SCONTROL = """#!/bin/sh
cd {folder}
echo x >> asked
line=$(sed -n "$(wc -l < asked)p" answers)
line=${{line:-$(tail -n 1 answers)}}
case $line in
  fail) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1;;
  forgotten) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
esac
echo "JobId=7 JobState=$line Reason=None ExitCode=0:0"
echo "   StdOut={folder}/job.log"
"""
PROGRAMS = {"scontrol": SCONTROL, "sbatch": "#!/bin/sh\necho 7\n"}


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says what a Slurm without a job 7 answers when it is asked for that job."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(text.format(folder=tmp_path))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path / "answers"


@pytest.fixture
def job(answers: Path, tmp_path: Path) -> launcher.SlurmJob:
    folder = tmp_path / "job"
    folder.mkdir(0o700)
    (folder / "number").write_text("7")
    return launcher.SlurmJob(folder)


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    short = timeouts().scaled(0.002)
    for module in ("launcher.slurm.queue", "launcher.api.submit"):
        monkeypatch.setattr(f"{module}.timeouts", lambda: short)


def test_a_controller_that_does_not_answer_once_ends_no_following(answers: Path, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("all of it\n")
    (tmp_path / "train.py").write_text("")
    for states in ("fail\nRUNNING\nCOMPLETED\n", "RUNNING\nfail\nCOMPLETED\n"):
        (tmp_path / "asked").unlink(missing_ok=True)
        answers.write_text(states)
        result = run_here(tmp_path, "sbatch", "--follow", "train.py")
        assert (result.code, result.out) == (0, "7\nall of it\n"), result.err
        assert result.err.count("! Slurm does not answer (scontrol: slurm_load_jobs error: Unable to contact") == 1
    answers.write_text("forgotten\n")
    result = run_here(tmp_path, "sbatch", "--follow", "train.py")
    assert (result.code, "Slurm has forgotten job 7" in result.err) == (69, True)


def test_a_log_that_appears_after_the_end_of_its_job_is_shown(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.write_text("COMPLETED\n")
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(
        "launcher.cli.commands.sbatch.refresh", lambda folder: (folder / "job.log").write_text("late\n")
    )
    result = run_here(tmp_path, "sbatch", "--follow", "train.py")
    assert (result.code, result.out) == (0, "7\nlate\n"), result.err


def test_a_controller_that_does_not_answer_once_ends_no_wait(
    job: launcher.SlurmJob, answers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers.write_text("fail\nRUNNING\nfail\nCANCELLED\n")
    with pytest.raises(launcher.JobError, match="ended as CANCELLED and left no result"):
        job.result(timeout_s=120)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "Slurm job 7: Slurm does not answer" in caplog.text
    answers.write_text("fail\n")
    with pytest.raises(TransportError, match=r"Unable to contact|timed out"):
        job.state()


@pytest.mark.usefixtures("short_times")
def test_a_controller_that_never_answers_ends_the_wait(job: launcher.SlurmJob, answers: Path) -> None:
    answers.write_text("fail\n")
    with pytest.raises(TransportError, match=r"Unable to contact|timed out"):  # the last answer, or that there is none
        job.wait()


def test_a_result_that_a_client_of_a_shared_disk_does_not_see_yet_is_found(
    job: launcher.SlurmJob, answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client remembers that there is no such file until the folder changes, as one of NFS does."""
    answers.write_text("COMPLETED\n")
    (job.folder / "ended").write_bytes(pickle.dumps(UsageError("it is found")))
    exists, utime, fresh = Path.exists, os.utime, []
    monkeypatch.setattr(os, "utime", lambda path, *rest: (fresh.append(path), utime(path, *rest)))
    monkeypatch.setattr(Path, "exists", lambda path: exists(path) and (path.name != "ended" or bool(fresh)))
    with pytest.raises(UsageError, match="it is found"):
        job.result(timeout_s=60)
