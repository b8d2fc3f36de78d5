"""Which checkpoints stay, and what killed saves have left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from harness.checkpoints import write_checkpoint

from launcher.checkpoint_files.folder import begin, committed_in, set_latest
from launcher.checkpoint_files.retention import MIN_AGE_S, Retention, leftovers, prune, remove_leftover, superseded


def steps_in(root: Path) -> list[int]:
    return [each.manifest.step for each in committed_in(root)]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "expected"),
    [(1, None, [10]), (3, None, [6, 8, 10]), (1, 4, [4, 8, 10]), (2, 5, [8, 10]), (9, None, [2, 4, 6, 8, 10])],
)
def test_the_newest_and_the_multiples_stay(
    tmp_path: Path, keep_last: int, keep_every: int | None, expected: list[int]
) -> None:
    for step in (2, 4, 6, 8, 10):
        write_checkpoint(tmp_path, step)
    removed = prune(tmp_path, Retention(keep_last, keep_every))
    assert steps_in(tmp_path) == expected
    assert sorted([*expected, *(each.manifest.step for each in removed)]) == [2, 4, 6, 8, 10]
    assert not list(tmp_path.glob(".*"))


def test_what_latest_names_is_never_removed(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step)
    set_latest(tmp_path, "global_step2")
    prune(tmp_path, Retention(1))
    assert steps_in(tmp_path) == [2, 6]


def test_the_newest_is_what_was_saved_last_and_not_the_highest_step(tmp_path: Path) -> None:
    """A run that went back to step 2 and saves step 4 keeps that, and not the step 10 it went back from."""
    for step, after_s in ((2, 0.0), (10, 1.0), (4, 2.0)):
        write_checkpoint(tmp_path, step, after_s=after_s)
    prune(tmp_path, Retention(1))
    assert steps_in(tmp_path) == [4]


def test_folders_without_a_manifest_neither_count_nor_go(tmp_path: Path) -> None:
    for step in (2, 4):
        write_checkpoint(tmp_path, step)
    (tmp_path / "global_step6").mkdir()
    (tmp_path / "global_step6" / "mp_rank_00_model_states.pt").write_text("of DeepSpeed")
    (tmp_path / "notes").mkdir()
    assert [each.manifest.step for each in superseded(tmp_path, Retention(1))] == [2]
    prune(tmp_path, Retention(1))
    assert (tmp_path / "global_step6" / "mp_rank_00_model_states.pt").exists()
    assert (tmp_path / "notes").exists()


def test_leftovers_are_what_no_manifest_names(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 2)
    (tmp_path / ".global_step4.tmp").mkdir()
    (tmp_path / ".global_step4.tmp" / "rank-00000.safetensors").write_bytes(b"12345")
    (path / "rank-00001-0badcafe.safetensors").write_bytes(b"123")
    begin(tmp_path / "other", "global_step2", "0badcafe").path.rename(tmp_path / "marked")
    (marker,) = (tmp_path / "marked").iterdir()
    marker.rename(path / marker.name)  # as a power loss may leave it after the commit
    (path / "tokenizer.json").write_text("a user's own")
    found = leftovers(tmp_path)
    assert [each.path.relative_to(tmp_path).as_posix() for each in found] == [
        ".global_step4.tmp",
        "global_step2/.save-0badcafe.tmp",
        "global_step2/rank-00001-0badcafe.safetensors",
    ]
    assert [each.num_bytes for each in found] == [5, 0, 3]
    assert all(each.may_be_in_use for each in found)
    old_s = time.time() - MIN_AGE_S - 60
    for each in (*tmp_path.glob(".global_step4.tmp/*"), tmp_path / ".global_step4.tmp"):
        os.utime(each, (old_s, old_s))
    found = leftovers(tmp_path)
    assert [each.may_be_in_use for each in found] == [False, True, True]
    for each in found:
        remove_leftover(each)
    assert leftovers(tmp_path) == []
    assert steps_in(tmp_path) == [2]
    assert (path / "tokenizer.json").exists()


def test_a_removal_that_was_killed_leaves_no_checkpoint_of_which_a_part_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4):
        write_checkpoint(tmp_path, step)

    def killed(path: Path) -> None:
        (path / "state.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.checkpoint_files.retention.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, Retention(1))
    assert steps_in(tmp_path) == [4]
    assert [each.path.name for each in leftovers(tmp_path)] == [".global_step2.tmp"]
