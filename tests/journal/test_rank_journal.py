"""A rank's journal: what is added is read at the other end of a pipe, and nothing waits for the reader."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.base import env
from launcher.journal import rank as rank_module
from launcher.journal.rank import RankJournal, encoded, log, own_journal
from launcher.journal.read import JobJournal, JournalFile, LineReader, last_record


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    os.close(ends[0])
    os.close(ends[1])


def records_of(reader: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in os.read(reader, 1 << 20).splitlines()]


def test_records_come_in_order_behind_the_head(pipe: tuple[int, int]) -> None:
    journal = RankJournal(pipe[1])
    for number in range(5):
        journal.add("log", values={"number": number})
    journal.close()
    head, *rest = records_of(pipe[0])
    assert head["kind"] == "rank"
    assert (head["version"], head["pid"]) == (1, os.getpid())
    assert [record["values"]["number"] for record in rest] == list(range(5))


def test_nobody_waits_for_a_pipe_that_is_full_and_what_is_lost_is_counted(pipe: tuple[int, int]) -> None:
    journal = RankJournal(pipe[1])
    for number in range(20_000):
        journal.add("log", values={"number": number, "text": "x" * 100})
    received = bytearray()

    def read() -> None:
        while not received.endswith(b'"end"}}\n'):
            received.extend(os.read(pipe[0], 1 << 20))

    reading = threading.Thread(target=read)
    reading.start()
    journal.flush()
    journal.add("log", values={"number": "end"})
    journal.close()
    reading.join()
    records = [json.loads(line) for line in received.splitlines()]
    dropped = sum(record["num_records"] for record in records if record["kind"] == "dropped")
    assert dropped > 0
    assert dropped + sum(record["kind"] == "log" for record in records) == 20_001


def test_records_that_wait_are_one_write(pipe: tuple[int, int]) -> None:
    """Each write wakes the agent and the launcher."""
    journal = RankJournal(pipe[1])
    with mock.patch.object(os, "write", wraps=os.write) as write:
        for number in range(50):
            journal.add("log", values={"number": number})
        journal.flush()
    assert write.call_count < 10  # the thread of the journal may have woken in between
    journal.close()


def test_a_child_of_the_rank_has_no_journal(monkeypatch: pytest.MonkeyPatch, pipe: tuple[int, int]) -> None:
    monkeypatch.setattr(rank_module, "_journal", None)
    monkeypatch.setattr(rank_module, "_off_pid", None)
    monkeypatch.setenv(env.JOURNAL_FD.name, f"{os.getpid() + 1}:{pipe[1]}")
    assert own_journal() is None
    log(accuracy=1.0)
    monkeypatch.setattr(rank_module, "_off_pid", None)
    monkeypatch.setenv(env.JOURNAL_FD.name, f"{os.getpid()}:{pipe[1]}")
    journal = own_journal()
    assert journal is not None
    journal.close()


def test_a_file_in_the_place_of_a_closed_pipe_is_left_alone(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    journal = RankJournal(writer)
    journal.flush()
    own = os.open(tmp_path / "own", os.O_RDWR | os.O_CREAT)
    os.dup2(own, writer)  # what `os.closerange(3, 256)` and `open(...)` of a script come to
    journal.add("log", values={"x": 1})
    with pytest.raises(OSError, match="Bad file descriptor"):
        journal.flush()
    journal.close()
    assert (tmp_path / "own").read_bytes() == b""
    for descriptor in (reader, writer, own):
        os.close(descriptor)


def test_log_without_a_value_is_an_error() -> None:
    with pytest.raises(TypeError, match="at least one value"):
        log()


class _Broken:
    def __float__(self) -> float:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        return "<broken>"


def test_what_json_has_not_becomes_text() -> None:
    values = {"nan": math.nan, "inf": -math.inf, "object": _Broken(), "path": Path("a"), "nested": [math.inf, {"x": 1}]}
    record = json.loads(encoded({"kind": "log", "values": values}), parse_constant=lambda name: pytest.fail(name))
    assert record["values"] == {
        "nan": "nan", "inf": "-inf", "object": "<broken>", "path": "PosixPath('a')", "nested": ["inf", {"x": 1}],
    }  # fmt: skip


# ---- reading ----

RECORDS = [{"kind": "step", "time_s": float(number), "step": number, "text": "é" * number} for number in range(6)]
DATA = b"".join(map(encoded, RECORDS))


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, len(DATA)), again=st.integers(0, len(DATA)))
def test_a_journal_is_read_to_its_last_whole_line_wherever_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, cut: int, again: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "rank_0.jsonl"
    first, second = sorted((cut, again))
    file, seen = JournalFile(path), []
    for end in (first, second, len(DATA)):
        path.write_bytes(DATA[:end])
        seen += list(file.poll())
        assert seen == RECORDS[: DATA[:end].count(b"\n")]
    assert file.num_damaged == 0


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, len(DATA)), max_size=8))
def test_a_stream_may_be_cut_anywhere(cuts: list[int]) -> None:
    seen: list[dict[str, Any]] = []
    reader = LineReader()
    edges = [0, *sorted(cuts), len(DATA)]
    for start, end in itertools.pairwise(edges):
        reader.feed(DATA[start:end], seen.append)
    assert seen == RECORDS


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    path.write_bytes(encoded(RECORDS[0]) + b"\x00\xff garbage\n[1]\n" + b"[" * 5000 + b"\n" + encoded(RECORDS[1]))
    file = JournalFile(path)
    assert list(file.poll()) == RECORDS[:2]
    assert file.num_damaged == 3


def test_kinds_are_chosen_before_lines_are_parsed(tmp_path: Path) -> None:
    path = tmp_path / "launcher.jsonl"
    path.write_bytes(encoded({"kind": "job"}) + b'{"kind":"progress", broken\n' + encoded({"kind": "end"}))
    file = JournalFile(path)
    assert [record["kind"] for record in file.poll(frozenset({"job", "end"}))] == ["job", "end"]
    assert file.num_damaged == 0


def test_the_last_record_of_a_kind_is_found_at_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    assert last_record(path, "step") is None
    path.write_bytes(encoded({"kind": "torch"}) + DATA + encoded({"kind": "log"}) + b'{"kind":"step", cut off')
    assert last_record(path, "step") == RECORDS[-1]
    assert last_record(path, "torch", tail_bytes=100) is None
    assert last_record(path, "torch") == {"kind": "torch"}


def test_starts_and_ranks_are_found_in_order(tmp_path: Path) -> None:
    for folder in ("", "restart_2", "restart_10", "restart_x"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for rank in (10, 2):
            (tmp_path / folder / f"rank_{rank}.jsonl").write_bytes(encoded({"kind": "rank"}))
    journal = JobJournal(tmp_path)
    assert [each.folder.name for each in journal.tries] == [tmp_path.name, "restart_2", "restart_10"]
    assert list(journal.tries[0].ranks) == [2, 10]
    assert journal.exists
    assert not JobJournal(tmp_path / "none").exists
