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


def test_only_a_new_run_is_kept_out_of_a_folder_that_is_in_use() -> None:
    allowed = [StartKind("", True), StartKind("auto", False), StartKind("never", False), StartKind("own", False)]
    assert all(kind.may_begin_in("own") for kind in allowed)
    assert not StartKind("", False).may_begin_in("own")
    assert not StartKind("/other", False).may_begin_in("own")
