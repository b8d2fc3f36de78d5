"""What a rank tells of its progress, and what its agent reads."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.base import env, progress
from launcher.base.progress import (
    NO_PROGRESS,
    STARTING,
    RankProgress,
    heartbeat,
    make_counter,
    phase,
    read_counter,
    update_progress,
)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The record of a rank that this process is."""
    descriptor = make_counter(str(tmp_path / "progress"))
    monkeypatch.setenv(env.PROGRESS_FILE.name, str(tmp_path / "progress"))
    monkeypatch.setattr(progress, "_shared", None)
    yield descriptor
    os.close(descriptor)


def test_a_rank_that_has_told_nothing(record: int) -> None:
    assert read_counter(record) == NO_PROGRESS


def test_heartbeats_count_and_keep_the_last_loss(record: int) -> None:
    heartbeat()
    heartbeat(2.5)
    heartbeat()
    assert read_counter(record) == RankProgress(3, None, 2.5, STARTING)


def test_telling_is_no_heartbeat(record: int) -> None:
    heartbeat()
    update_progress(step=40, total_steps=50)
    update_progress(loss=-0.5)
    assert read_counter(record) == RankProgress(1, 40, -0.5, STARTING, 50)


def test_a_loss_that_is_nan_is_none(record: int) -> None:
    heartbeat(1.0)
    heartbeat(math.nan)
    assert read_counter(record) == RankProgress(2, None, None, STARTING)
    heartbeat(math.inf)
    assert read_counter(record).loss == math.inf


def test_without_launch_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.PROGRESS_FILE.name, raising=False)
    monkeypatch.setattr(progress, "_shared", None)
    heartbeat(1.0)
    assert progress._shared is None


@pytest.mark.parametrize("loss", ["x", "1.5", b"1", [1.0], object(), 1j, 10**400])
def test_a_loss_that_is_no_number_is_refused_and_harms_no_later_one(record: int, loss: object) -> None:
    with pytest.raises(TypeError, match=r"heartbeat\(loss\) takes a number"):
        heartbeat(loss)  # type: ignore[arg-type]
    assert read_counter(record) == NO_PROGRESS
    heartbeat(2)
    assert read_counter(record) == RankProgress(1, None, 2.0, STARTING)


def test_a_phase_ends_with_its_block_and_is_no_heartbeat(record: int) -> None:
    update_progress(phase="")
    with phase("reading\nthe  data"):
        assert read_counter(record) == RankProgress(phase="reading the data")
        with phase("évaluating" * 9):
            assert read_counter(record).phase == ("évaluating" * 9)[:36]  # of 40 bytes
        with contextlib.suppress(KeyError), phase("evaluating"):
            raise KeyError
        assert read_counter(record).phase == "reading the data"
    assert read_counter(record) == RankProgress()
    with pytest.raises(TypeError, match=r"phase\(text\) takes a string.*got int 3"), phase(3):  # type: ignore[arg-type]
        pass


@phase("saving")
def _phase_within(record: int) -> str:
    return read_counter(record).phase


def test_a_phase_decorates_a_function(record: int) -> None:
    assert [_phase_within(record), _phase_within(record), read_counter(record).phase] == ["saving", "saving", STARTING]


def test_a_second_copy_of_the_module_goes_on_where_the_first_one_was(record: int) -> None:
    """The worker's copy is not the script's: what one has told, the other one keeps."""
    spec = importlib.util.find_spec("launcher.base.progress")
    assert spec is not None
    assert spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    heartbeat(0.5)
    spec.loader.exec_module(other)
    other.heartbeat()
    other.update_progress(phase="exiting")
    heartbeat()
    assert read_counter(record) == RankProgress(3, None, 0.5, "exiting")
