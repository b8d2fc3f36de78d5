"""Traces of several ranks become one file: one clock, a process a rank, whatever the profiler has written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import LauncherError
from launcher.journal.trace_merge import RankTrace, merge_traces, read_head
from launcher.journal.trace_request import AnswerHead

BOOT_S = 1_000.0  # our wall clock minus our monotonic clock
OFFSETS_S = {"node-a": 0.0, "node-b": -250.0}  # our monotonic clock minus theirs
WALL_ERRORS_S = {"node-a": 0.0, "node-b": 3600.0}  # how wrong their wall clocks are


def answer(folder: Path, rank: int, host: str, begin_s: float, num_bytes: int | None = None) -> RankTrace:
    """Return the trace of three steps of 0.1 s that begin at a time of our monotonic clock."""
    clock_ns = int(1e9 * (begin_s - OFFSETS_S[host]))  # of the host
    wall_ns = int(1e9 * (begin_s + BOOT_S + WALL_ERRORS_S[host]))
    steps = [(7 + number, wall_ns + number * 100_000_000) for number in range(4)]
    facts = {
        "time_ns": wall_ns + 10**9,
        "monotonic_ns": clock_ns + 10**9,
        "pid": 500,
        "steps": steps,
        "phases": [(wall_ns, "forward"), (wall_ns + 40_000_000, "backward")],
    }
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "ts": 5.0, "pid": 500, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 500, "tid": 501, "ts": 10_000.25, "dur": 5.5},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 20_000.0, "dur": float("nan")},
        {"ph": "s", "id": 3, "pid": 500, "tid": 501, "ts": 10_000.25, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 3, "pid": 0, "tid": 7, "ts": 20_000.0, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 99.0},
    ]
    profile = {"baseTimeNanoseconds": wall_ns, "traceEvents": events}
    data = gzip.compress(json.dumps(facts).encode() + b"\n" + json.dumps(profile).encode())
    path = folder / f"trace_rank_{rank}"
    path.write_bytes(AnswerHead("1", num_bytes=len(data)).encoded() + data[:num_bytes])
    return RankTrace(rank, host, path, BOOT_S + OFFSETS_S[host])


def test_ranks_of_hosts_with_other_clocks_are_on_one(tmp_path: Path) -> None:
    traces = [answer(tmp_path, 5, "node-b", 5_000.001), answer(tmp_path, 0, "node-a", 5_000.0)]
    records = [
        {"kind": "notice", "text": "no progress", "time_s": 6_000.15},
        {"kind": "raised", "rank": 5, "type": "KeyError", "message": "x", "time_s": 6_000.2},
        {"kind": "notice", "text": "too late", "time_s": 6_000.4},
        {"kind": "end", "time_s": 6_000.2},
    ]
    target = tmp_path / "trace.json.gz"
    merged = merge_traces(target, traces, records)
    assert (merged.first_step, merged.last_step, merged.common_steps) == (8, 10, 3)
    assert merged.num_bytes == target.stat().st_size
    content = json.loads(gzip.decompress(target.read_bytes()), parse_constant=lambda name: pytest.fail(name))
    assert content["baseTimeNanoseconds"] == 6_000 * 10**9
    events = content["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert list(names.values()) == [
        "rank 0 (node-a)", "rank 0 device 0", "rank 5 (node-b)", "rank 5 device 0", "launch",
    ]  # fmt: skip
    shown = {(names[each["pid"]][:6], each["name"], each["ts"]) for each in events if each["ph"] in "Xi"}
    for rank, delay_us in (("rank 0", 0.0), ("rank 5", 1_000.0)):
        assert {(rank, f"step {8 + number}", 100_000.0 * number + delay_us) for number in range(3)} <= shown
        assert {(rank, "forward", delay_us), (rank, "backward", 40_000.0 + delay_us)} <= shown
        assert {(rank, "aten::mm", 10_000.25 + delay_us), (rank, "gemm", 20_000.0 + delay_us)} <= shown
    marks = sorted((ts, name) for who, name, ts in shown if who == "launch")
    assert marks == [
        (pytest.approx(150_000.0, abs=1), "notice: no progress"),
        (pytest.approx(200_000.0, abs=1), "raised of rank 5: x"),
    ]
    arrows = [each["id"] for each in events if each["ph"] in "sf"]
    assert len(arrows) == 4
    assert len(set(arrows)) == 2, "the two ends of one rank's arrow have one id, and ranks have others"


def test_a_trace_that_is_cut_off_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    trace = answer(tmp_path, 3, "node-a", 5_000.0, num_bytes=40)
    with pytest.raises(LauncherError, match="the trace of rank 3 is damaged"):
        merge_traces(tmp_path / "trace.json", [trace], [])
    assert [path.name for path in tmp_path.iterdir()] == ["trace_rank_3"]


def test_what_is_no_answer_has_no_head(tmp_path: Path) -> None:
    path = tmp_path / "answer"
    assert read_head(path) is None
    for line in (b"", b"x\n", b"[]\n", b'{"id": 1}\n', b'{"id": "a", "num_bytes": -1}\n', b'{"id": "a", "more": 1}\n'):
        path.write_bytes(line)
        assert read_head(path) is None
    path.write_bytes(b'{"id": "a", "error": "no"}\n')
    assert read_head(path) == AnswerHead("a", "no")
