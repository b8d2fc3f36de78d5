"""What a start continues from: `--resume` and the counts of restarts."""

from __future__ import annotations

import pytest

from launcher.base.resume import StartKind, start_kind


@pytest.mark.parametrize(
    ("resume", "is_restart", "own", "expected"),
    [
        ("", False, "own", ()),
        ("", True, "own", ("own",)),
        ("", True, None, ()),
        ("auto", False, "own", ("own",)),
        ("auto", True, "own", ("own",)),
        ("never", False, "own", ()),
        ("never", True, "own", ()),
        ("/other", False, "own", ("/other",)),
        ("/other", True, "own", ("own", "/other")),  # what the job has saved itself is newer
        ("/other", True, "/other", ("/other",)),
        ("/other", False, None, ("/other",)),
    ],
)
def test_where_a_start_looks_for_a_checkpoint(
    resume: str, is_restart: bool, own: str | None, expected: tuple[str, ...]
) -> None:
    kind = StartKind(resume, is_restart)
    assert kind.folders(own) == expected
    assert kind.resumes == bool(expected or (is_restart and resume != "never"))


@pytest.mark.parametrize("name", ["LAUNCH_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_any_count_of_restarts_means_that_the_job_was_started_before(name: str) -> None:
    assert start_kind({name: "1"}).is_restart
    assert not start_kind({name: "0"}).is_restart
    assert not start_kind({name: ""}).is_restart
    assert not start_kind({}).is_restart


def test_only_the_job_that_saved_there_continues_unasked() -> None:
    allowed = [StartKind("auto", False), StartKind("never", False), StartKind("own", False)]
    assert all(kind.may_begin_in("own", []) for kind in allowed)
    assert not StartKind("", False, ("a", "77")).may_begin_in("own", ["a"])
    assert not StartKind("/other", False, ("a", "77")).may_begin_in("own", ["a"])
    assert StartKind("", True, ("b", "77")).may_begin_in("own", ["a", "77"])
    assert not StartKind("", True, ("b", "78")).may_begin_in("own", ["a", "77"])  # its first start was refused


def test_a_job_has_the_ids_that_its_starts_share() -> None:
    environ = {"LAUNCH_JOB_ID": "calm-otter-4f2a", "TORCHELASTIC_RUN_ID": "calm-otter-4f2a", "SLURM_JOB_ID": "77"}
    assert start_kind(environ).jobs == ("calm-otter-4f2a", "77")
    assert start_kind({}).jobs == ()
