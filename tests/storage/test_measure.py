"""The measurement of a disk: bounded, on the real thing, and its choice."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.storage.measure import (
    CHUNK_BYTES,
    GRID,
    NUM_MEASUREMENTS,
    DiskMeter,
    Rates,
    as_config,
    best,
    survey,
)
from launcher.storage.store import AioSettings


@pytest.fixture
def meter(tmp_path: Path) -> Iterator[DiskMeter]:
    made = DiskMeter(str(tmp_path), 2 * CHUNK_BYTES + 1)
    yield made
    made.close()


def test_it_uses_what_was_asked_for_in_whole_chunks_and_leaves_nothing(meter: DiskMeter, tmp_path: Path) -> None:
    assert meter.size_bytes == 2 * CHUNK_BYTES
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_filled_as_far_as_the_time_allows(meter: DiskMeter) -> None:
    meter.fill(seconds=0.0)
    assert meter.size_bytes == CHUNK_BYTES
    assert meter.read_rate(GRID[0], seconds=0.0) > 0


def test_a_rate_is_bytes_over_time(meter: DiskMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    known, delay_s = os.preadv, 0.02

    def slow(descriptor: int, views: list[memoryview], offset: int) -> int:
        time.sleep(delay_s)
        return known(descriptor, views, offset)

    meter.fill(seconds=10.0)
    monkeypatch.setattr(os, "preadv", slow)
    one_at_a_time = AioSettings(4 << 20, queue_depth=1, num_threads=1)
    assert meter.read_rate(one_at_a_time, seconds=0.2) < (4 << 20) / delay_s
    assert meter.write_rate(one_at_a_time, seconds=0.05) > 0


def test_all_settings_are_measured(meter: DiskMeter) -> None:
    told: list[int] = []
    found = survey(meter, 0.5, told.append)
    assert [rates.settings for rates in found] == list(GRID)
    assert all(rates.read_bytes_per_s > 0 < rates.write_bytes_per_s for rates in found)
    assert len(GRID) <= sum(told) <= NUM_MEASUREMENTS


def rates(block_size_bytes: int, queue_depth: int, read: float, write: float) -> Rates:
    return Rates(AioSettings(block_size_bytes, queue_depth, 1), read, write)


def test_the_best_is_quick_both_ways_and_among_equals_small() -> None:
    one_sided = rates(1 << 20, 4, read=9.0, write=1.0)
    large, small, slow = (rates(1 << 20, depth, 4.0, rate) for depth, rate in ((32, 4.0), (8, 3.9), (4, 3.0)))
    assert best([one_sided, large, small, slow]) is small
    assert as_config(small.settings) == {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1}
