"""What a rank tells of its progress, and what its agent reads."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.base import env, progress
from launcher.base.progress import NOTHING, Told, heartbeat, make_counter, read_counter, tell


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The record of a rank that this process is."""
    descriptor = make_counter(str(tmp_path / "progress"))
    monkeypatch.setenv(env.PROGRESS_FILE.name, str(tmp_path / "progress"))
    for name, value in (("_shared", None), ("_count", 0), ("_step", -1), ("_loss", math.nan)):
        monkeypatch.setattr(progress, name, value)
    yield descriptor
    os.close(descriptor)


def test_a_rank_that_has_told_nothing(record: int) -> None:
    assert read_counter(record) == NOTHING


def test_heartbeats_count_and_keep_the_last_loss(record: int) -> None:
    heartbeat()
    heartbeat(2.5)
    heartbeat()
    assert read_counter(record) == Told(3, None, 2.5)


def test_telling_is_no_heartbeat(record: int) -> None:
    heartbeat()
    tell(step=40)
    tell(loss=-0.5)
    assert read_counter(record) == Told(1, 40, -0.5)


def test_a_loss_that_is_nan_is_none(record: int) -> None:
    heartbeat(1.0)
    heartbeat(math.nan)
    assert read_counter(record) == Told(2, None, None)
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
    assert read_counter(record) == NOTHING
    heartbeat(2)
    assert read_counter(record) == Told(1, None, 2.0)
