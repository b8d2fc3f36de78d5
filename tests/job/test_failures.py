"""Which failure is called the first, whatever order the news arrives in."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

from launcher.agent.wire import Exited
from launcher.cluster.cluster import Host, NodePlacement
from launcher.job.failures import FailureBook
from launcher.job.logs import RankLog
from launcher.job.node import Node
from launcher.job.report import Failure


class NoChannel:
    window_bytes = None

    def stderr_tail(self) -> str:
        return "Connection to node-b closed."


def node(name: str = "node-a", clock_offset_s: float = 0.0) -> Node:
    placement = NodePlacement(0, Host(name, (0, 1)), 0)
    return Node(placement, cast(Any, NoChannel()), clock_offset_s=clock_offset_s)


def exited(rank: int, status: int, time_s: float, message: str = "", **more: Any) -> Exited:
    record = {"time_s": time_s, "type": "RuntimeError", "message": message, "traceback": message} if message else None
    return Exited(rank, status, time_s, record, more.get("max_rss_bytes", 0), more.get("oom"))


def add(book: FailureBook, where: Node, message: Exited, path: Path) -> Failure | None:
    log = RankLog(path)
    log.close()
    return book.add_exit(where, message, log)


def book_of(tmp_path: Path, now_s: float, *exits: tuple[Node, Exited]) -> FailureBook:
    book = FailureBook(now_s - 10)
    for number, (where, message) in enumerate(exits):
        if number == 1:
            book.stop_ordered(by_user=False)
        add(book, where, message, tmp_path / f"{number}.log")
    return book


def rank_of(book: FailureBook) -> int | None:
    assert book.cause is not None
    return book.cause.rank


def test_the_earliest_death_is_the_cause(tmp_path: Path) -> None:
    now_s = time.monotonic()
    book = book_of(tmp_path, now_s, (node(), exited(1, 1, now_s, "b")), (node(), exited(0, 3, now_s - 0.1, "a")))
    assert rank_of(book) == 0


def test_an_error_about_a_lost_peer_is_no_cause_if_there_is_another(tmp_path: Path) -> None:
    now_s = time.monotonic()
    lost = "Connection closed by peer [127.0.0.1]:4711"
    book = book_of(tmp_path, now_s, (node(), exited(0, 1, now_s - 0.01, lost)), (node(), exited(1, -9, now_s)))
    assert rank_of(book) == 1
    alone = book_of(tmp_path, now_s, (node(), exited(0, 1, now_s, lost)))
    assert rank_of(alone) == 0


def test_clocks_of_different_hosts_are_compared_on_ours(tmp_path: Path) -> None:
    now_s = time.monotonic()
    ahead = node("node-b", clock_offset_s=-3600.0)  # its clock is an hour ahead
    book = book_of(
        tmp_path, now_s, (node(), exited(0, 1, now_s, "late")), (ahead, exited(1, 1, now_s + 3600 - 0.2, "early"))
    )
    assert rank_of(book) == 1


def test_deaths_by_our_own_hand_are_no_failures(tmp_path: Path) -> None:
    now_s = time.monotonic()
    later = now_s + 0.2
    book = book_of(
        tmp_path, now_s, (node(), exited(0, 3, now_s)), (node(), exited(1, -15, later)), (node(), exited(2, -9, later))
    )
    assert book.cause is not None
    assert book.cause.exit_code == 3


def test_what_a_rank_does_on_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    book = FailureBook(time.monotonic())
    book.stop_ordered(by_user=True)
    failing = exited(0, 1, time.monotonic() + 0.1, "interrupted")
    assert add(book, node(), failing, tmp_path / "0.log") is None
    assert book.cause is None


def test_a_lost_host_is_a_cause_with_what_its_agent_said_last(tmp_path: Path) -> None:
    book = FailureBook(time.monotonic())
    book.add_host(node("node-b"), "the connection was lost")
    assert book.cause is not None
    assert (book.cause.host, book.cause.rank, book.cause.exit_code) == ("node-b", None, 69)
    assert book.cause.last_lines == ("Connection to node-b closed.",)


def test_out_of_memory_is_said(tmp_path: Path) -> None:
    now_s = time.monotonic()
    book = book_of(tmp_path, now_s, (node(), exited(0, -9, now_s, oom="the limit was reached", max_rss_bytes=1 << 30)))
    assert book.cause is not None
    assert (book.cause.exit_code, book.cause.reason) == (137, "killed by SIGKILL, out of memory")
    assert (book.cause.oom, book.cause.max_rss_bytes) == ("the limit was reached", 1 << 30)


def test_a_rank_that_is_killed_on_its_way_out_keeps_its_own_code(tmp_path: Path) -> None:
    now_s = time.monotonic()
    record = {"time_s": now_s, "type": "SystemExit", "message": "7", "traceback": "", "exit_code": 7}
    book = FailureBook(now_s - 1)
    add(book, node(), Exited(0, -15, now_s + 0.4, record, 0, None), tmp_path / "0.log")
    assert book.cause is not None
    assert (book.cause.exit_code, book.cause.signal_name, book.cause.reason) == (7, None, "exit code 7")
