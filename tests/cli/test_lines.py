"""Lines of many ranks on one stream: prefixes stand at their beginnings only, and what has no end yet is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import scripts
from harness.launch.terminal import TerminalLaunch

from launcher.cli.console.lines import MixedLines

LATER_S = 1e9  # monotonic: long after anything


def test_a_line_end_that_is_cut_in_two_is_one_line() -> None:
    lines = MixedLines()
    assert lines.feed(0, b"[0] ", b"one\r") == b""
    assert lines.feed(0, b"[0] ", b"\ntwo\n") == b"[0] one\r\n[0] two\n"


def test_a_progress_bar_that_ended_with_a_carriage_return_is_shown_after_a_moment() -> None:
    lines = MixedLines()
    assert lines.feed(0, b"[0] ", b"10%\r") == b""
    assert lines.settle(0.0) == b""
    assert lines.settle(LATER_S) == b"[0] 10%\r"
    assert lines.settle(LATER_S) == b""


def test_a_bar_that_begins_with_a_carriage_return_has_one_prefix() -> None:
    lines = MixedLines()
    shown = b"".join(lines.feed(0, b"[0] ", piece) for piece in (b"a\n\r 0%", b"\r50%", b"\r100%\n", b"\rnext\n"))
    assert shown == b"[0] a\n\r[0]  0%\r[0] 50%\r[0] 100%\n\r[0] next\n"
    assert lines.feed(0, b"[0] ", b"\r") + lines.settle(LATER_S) == b"\r"


def test_a_long_line_has_one_prefix() -> None:
    lines = MixedLines()
    shown = b"".join(lines.feed(0, b"[0] ", b"x" * 10_000) for _ in range(20)) + lines.feed(0, b"[0] ", b"end\nnext\n")
    assert shown == b"[0] " + b"x" * 200_000 + b"end\n[0] next\n"


def test_a_long_line_of_one_rank_is_broken_off_where_another_writes() -> None:
    lines = MixedLines()
    shown = (
        lines.feed(0, b"[0] ", b"x" * 100_000) + lines.feed(1, b"[1] ", b"short\n") + lines.feed(0, b"[0] ", b"end\n")
    )
    assert shown == b"[0] " + b"x" * 100_000 + b"\n[1] short\n[0] end\n"
    assert lines.flush() == b""


def test_an_unfinished_line_on_a_terminal_is_replaced_by_the_whole_one() -> None:
    lines = MixedLines(lambda: 20)
    assert lines.feed(0, b"[0] ", b"Loading") == b""
    assert lines.settle(LATER_S) == b"[0] Loading\r"
    assert lines.settle(LATER_S) == b"", "once is enough"
    assert lines.feed(1, b"[1] ", b"hi\n") == b"\x1b[K[1] hi\n"
    assert lines.feed(0, b"[0] ", b" the model, which is long") == b""
    assert lines.settle(LATER_S) == b"[0] Loading the mode\r"[:19] + b"\r"
    assert lines.interrupt() == b"\x1b[K"
    assert lines.feed(0, b"[0] ", b"\n") == b"[0] Loading the model, which is long\n"


def test_a_bar_on_a_terminal_makes_room_for_the_line_of_another_rank() -> None:
    for lines, clear in ((MixedLines(lambda: 80), b"\x1b[K"), (MixedLines(), b"")):
        assert lines.feed(0, b"[0] ", b"10% of all\r") + lines.settle(LATER_S) == b"[0] 10% of all\r"
        assert lines.feed(0, b"[0] ", b"20% of all\r") + lines.settle(LATER_S) == b"[0] 20% of all\r"
        assert lines.feed(1, b"[1] ", b"hi\n") == clear + b"[1] hi\n"
        assert lines.feed(0, b"[0] ", b"30%\r") + lines.settle(LATER_S) == b"[0] 30%\r"
        assert lines.interrupt() == clear
        assert lines.interrupt() == b""


def test_unfinished_lines_stay_out_of_pipes_and_files() -> None:
    lines = MixedLines()
    lines.feed(0, b"[0] ", b"Loading")
    assert lines.settle(LATER_S) == b""
    assert lines.flush() == b"[0] Loading\n"


UNFINISHED = """
    import os, sys, time
    if os.environ["RANK"] == "0":
        print("Loading the model...", end="", flush=True)
    else:
        sys.stderr.write("\\r 0%|          | 0/10")
        sys.stderr.flush()
    while not os.path.exists("go"):
        time.sleep(0.05)
    if os.environ["RANK"] == "0":
        print(" done")
"""


@pytest.mark.parametrize("options", [[], ["--plain"]])
def test_lines_without_an_end_are_seen_on_a_terminal(tmp_path: Path, options: list[str]) -> None:
    job = TerminalLaunch(tmp_path, *options, "--num_gpus", "2", scripts.write(tmp_path, UNFINISHED))
    job.read_until(lambda: b"[0] Loading the model...\r" in job.raw, "the line")
    job.read_until(lambda: b"[1]  0%|          | 0/10\r" in job.raw, "the bar")
    (tmp_path / "go").touch()
    assert job.wait() == 0
    rows = job.everything
    assert rows.count("[0] Loading the model... done") == 1
    assert [row for row in rows if "Loading" in row] == ["[0] Loading the model... done"]
