"""Logs are read whole, from the last lines on, and further as they grow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.job.logs import RankLog
from launcher.registry import log_reader
from launcher.registry.log_reader import LogReader


def joined(reader: LogReader) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for rank, data in reader.read():
        found[rank] = found.get(rank, b"") + data
    return found


def test_ranks_come_in_order_of_their_numbers(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        (tmp_path / f"rank_{rank}.log").write_text(f"{rank}\n")
    (tmp_path / "report.json").write_text("{}")
    (tmp_path / "rank_x.log").write_text("no rank")
    reader = LogReader(str(tmp_path), None, None)
    assert list(reader.read()) == [(0, b"0\n"), (2, b"2\n"), (10, b"10\n")]
    assert reader.ranks() == [0, 2, 10]


def test_only_what_is_new_is_read_again(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    reader = LogReader(str(tmp_path), None, 1)
    assert joined(reader) == {}
    assert not reader.has_found
    log.write_bytes(b"one\ntwo\nthr")  # it came later: its beginning is news too
    assert joined(reader) == {0: b"one\ntwo\nthr"}
    with log.open("ab") as file:
        file.write(b"ee\n")
    assert joined(reader) == {0: b"ee\n"}
    assert joined(reader) == {}
    assert reader.has_found


def test_one_rank_alone(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(f"{rank}\n")
    assert joined(LogReader(str(tmp_path), 1, None)) == {1: b"1\n"}


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        (b"one\ntwo\nthree\n", 2, b"two\nthree\n"),
        (b"one\ntwo\nthree", 2, b"two\nthree"),
        (b"one\ntwo\n", 9, b"one\ntwo\n"),
        (b"one\n\n\n", 2, b"\n\n"),
        (b"one\ntwo\n", 0, b""),
        (b"", 3, b""),
        (b"\n", 1, b"\n"),
    ],
)
def test_the_last_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: bytes, count: int, expected: bytes
) -> None:
    (tmp_path / "rank_0.log").write_bytes(text)
    for block_bytes in (1, 2, 3, 7, 1 << 20):
        monkeypatch.setattr(log_reader, "_BLOCK_BYTES", block_bytes)
        assert joined(LogReader(str(tmp_path), None, count)).get(0, b"") == expected, block_bytes


def test_the_last_start_counts(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text("first\n")
    for number in (2, 10):
        (tmp_path / f"restart_{number}").mkdir()
        (tmp_path / f"restart_{number}" / "rank_0.log").write_text(f"{number}\n")
    assert joined(LogReader(str(tmp_path), None, None)) == {0: b"10\n"}


def test_a_log_that_was_truncated_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "rank_0.log")
    log.write(b"one\ntwo\n")
    reader = LogReader(str(tmp_path), None, None)
    assert joined(reader) == {0: b"one\ntwo\n"}
    os.truncate(log.path, 0)
    log.write(b"new\n")
    assert log.path.read_bytes() == b"new\n", "no hole of zeros before it"
    assert joined(reader) == {0: b"new\n"}
    log.close()
