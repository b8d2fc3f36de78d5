"""The launcher's side of `launch trace`: requests become orders once, and answers become files once they are whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.agent.wire import Trace
from launcher.job.traces import TraceDesk
from launcher.journal.trace_request import REQUEST_FILE, AnswerHead, TraceRequest, answer_file

REQUEST = TraceRequest("a1", 1, [0, 3], 2, 7)
ANSWER = AnswerHead("a1", num_bytes=300).encoded() + bytes(range(256)) + b"\n" * 44


class Files:
    """Does at once what its thread would do later."""

    def put(self, call: Callable[[], object]) -> None:
        call()


@pytest.fixture
def desk(tmp_path: Path) -> TraceDesk:
    return desk_of(tmp_path, [])


def desk_of(folder: Path, woken: list[bool]) -> TraceDesk:
    plan: Any = SimpleNamespace(run_folder=folder)
    return TraceDesk(plan, cast("Any", Files()), lambda: woken.append(True))


def test_a_request_is_an_order_once_and_so_is_its_end(tmp_path: Path) -> None:
    woken: list[bool] = []
    desk, path, times = desk_of(tmp_path, woken), tmp_path / REQUEST_FILE, itertools.count(1)
    assert desk.look(next(times)) is None
    path.write_bytes(REQUEST.encoded())
    assert desk.look(next(times)) == Trace("a1", [0, 3], 2, 7)
    assert desk.look(next(times)) is None
    path.unlink()
    assert desk.look(next(times)) == Trace("", [], 0, 0)
    assert desk.look(next(times)) is None
    assert len(woken) == 2
    for damaged in (b"", b"{", b"[1]", b'{"id": "x"}', REQUEST.encoded().replace(b"7", b"-7")):
        path.write_bytes(damaged)
        assert desk.look(next(times)) is None


def test_the_disk_is_looked_at_now_and_then(tmp_path: Path, desk: TraceDesk) -> None:
    assert desk.look(1.0) is None
    (tmp_path / REQUEST_FILE).write_bytes(REQUEST.encoded())
    assert desk.look(1.1) is None
    assert desk.look(2.0) is not None


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, len(ANSWER) - 1), max_size=6))
def test_an_answer_may_be_cut_anywhere(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    folder = tmp_path_factory.mktemp("run")
    desk, path = desk_of(folder, []), folder / answer_file(3)
    handled: list[bool] = []
    desk.write_rank(3, b"", lambda: handled.append(True))
    edges = sorted({0, *cuts, len(ANSWER)})
    for start, end in itertools.pairwise(edges):
        assert not path.exists()
        desk.write_rank(3, ANSWER[start:end], lambda: handled.append(True))
    assert path.read_bytes() == ANSWER
    assert len(handled) == len(edges)
    desk.write_rank(3, b"more than was announced", lambda: handled.append(True))
    assert path.read_bytes() == ANSWER


def test_an_answer_that_is_not_complete_leaves_nothing(tmp_path: Path, desk: TraceDesk) -> None:
    (tmp_path / REQUEST_FILE).write_bytes(REQUEST.encoded())
    desk.look(1.0)
    for _ in range(2):  # the second one takes the place of the first
        desk.write_rank(0, b"", lambda: None)
        desk.write_rank(0, ANSWER[:100], lambda: None)
    (tmp_path / REQUEST_FILE).unlink()
    desk.look(2.0)
    assert list(tmp_path.iterdir()) == []
    desk.write_rank(0, ANSWER[100:], lambda: None)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_answer_where_there_is_room_for_it(tmp_path: Path, desk: TraceDesk) -> None:
    (tmp_path / "trace_rank_1.part").mkdir()
    desk.write_rank(1, b"", lambda: None)
    desk.write_rank(1, ANSWER, lambda: None)
    assert b"the launcher cannot write it" in (tmp_path / answer_file(1)).read_bytes()
