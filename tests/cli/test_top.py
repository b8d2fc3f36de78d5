"""`launch top`: the screens, by textual's pilot and in a real terminal; the plain frame; what `launch ps` shows."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import html
import json
import os
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import scripts
from harness.launch.command import Launch, run_here, slowness, wait_until
from harness.launch.fake_job import FakeJob
from harness.launch.terminal import TerminalLaunch
from harness.refused import refused
from textual.pilot import Pilot
from textual.widgets import Input, Static

from launcher.cli.commands import trace as trace_command
from launcher.cli.commands.top import _kill, _stacks, _trace, top
from launcher.cli.top import app as screens
from launcher.cli.top import frame
from launcher.cli.top.app import Actions, ConfirmScreen, JobScreen, ListScreen, LogScreen, TextScreen, TopApp
from launcher.cli.top.frame import Filter, chart, phase_widths
from launcher.cli.top.widgets import Rows
from launcher.journal import live
from launcher.journal.live import RankView
from launcher.journal.trace_request import REQUEST_FILE, parsed_request
from launcher.registry.registry import JobEntry, all_jobs, find_job

SMALL, LARGE = (80, 24), (140, 40)
TRAINING = """
    import os, time
    import launcher
    for step in range(1, 100000):
        launcher.heartbeat(loss=1 / step)
        print(f"line {step}", flush=True)
        time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(screens, "_REFRESH_S", 0.2)
    monkeypatch.setattr(screens, "_LIST_REFRESH_S", 0.2)
    monkeypatch.setattr(live, "_SILENCE_S", 3600.0)  # on a busy machine a test takes longer than a rank may be silent


def a_job(folder: Path, num_ranks: int = 4, **options: Any) -> FakeJob:
    """Return a registered job whose ranks have taken three steps."""
    job = FakeJob(folder, num_ranks, **options)
    job.register()
    job.begin()
    take_steps(job, 1, 2, 3)
    return job


def take_steps(job: FakeJob, *steps: int) -> None:
    for step in steps:
        for rank in range(job.num_ranks):
            job.step(rank, step)
        ranks = [[rank, step, step, 0.5, "training", 10] for rank in range(job.num_ranks)]
        job.launcher("progress", ranks=ranks)


class Screens:
    """The application, as a person would see and use it."""

    def __init__(self, pilot: Pilot[None]) -> None:
        self.pilot, self.app = pilot, pilot.app

    @property
    def lines(self) -> list[str]:
        """What is on the screen."""
        found: dict[int, str] = {}
        svg = self.app.export_screenshot(simplify=False)
        for x, line, text in re.findall(r'<text class="[^"]+" x="([\d.]+)"[^>]*line-(\d+)\)">([^<]*)</text>', svg):
            start, row = round(float(x) / 12.2), found.get(int(line), "")
            found[int(line)] = row.ljust(start) + html.unescape(text).replace("\xa0", " ")
        return [found.get(row, "").rstrip() for row in range(self.app.size.height)]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + 20 * slowness()
        while not condition():
            assert time.monotonic() < deadline_s, f"waited for {what}:\n{self.text}"
            await self.pilot.pause(0.02)

    async def shows(self, text: str) -> None:
        await self.until(lambda: text in self.text, text)

    async def is_on(self, screen: type[object]) -> None:
        await self.until(lambda: isinstance(self.app.screen, screen), screen.__name__)


def watch(
    use: Callable[[Screens], Awaitable[None]],
    entry: JobEntry | None = None,
    *,
    size: tuple[int, int] = SMALL,
    kill: Callable[[JobEntry], str] = _kill,
    stacks: Callable[[JobEntry], str] = _stacks,
    trace: Callable[[JobEntry, Callable[[], bool]], str] = _trace,
) -> None:
    """Run the application and use it."""

    async def run() -> None:
        app = TopApp(Actions(all_jobs, kill, stacks, trace), entry)
        async with app.run_test(size=size) as pilot:
            await use(Screens(pilot))

    asyncio.run(run())


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_from_the_list_to_a_job_to_a_log_and_back(tmp_path: Path, size: tuple[int, int]) -> None:
    FakeJob(tmp_path, 1, job_id="bold-lark-0001").register(ended_s=time.time(), exit_code=3, started_s=1e9)
    job = a_job(tmp_path)
    job.write_log(2, "first\n\x1b[31mred\x1b[0m \x1b]0;title\x07\rsecond\n  50%\r 100%\r\n")

    async def use(seen: Screens) -> None:
        await seen.shows("3/10 · 2.667 · 8.2k tok/s")
        rows = [line.split()[:2] for line in seen.lines[1:3]]
        assert rows == [["calm-otter-4f2a", "running"], ["bold-lark-0001", "exit"]]
        await seen.press("enter")
        await seen.shows("step 3 of 10 · loss 2.667 · 8.2k tok/s")
        assert len(seen.app.screen.query_one(Rows).keys_in_sight) == 4
        assert all(len(line) <= size[0] for line in seen.lines)
        await seen.shows("rank 0: 500 ms a step = communication 40% · backward 40% · forward 20%")
        if size == LARGE:
            await seen.shows("log of rank 0")
        assert ("log of rank 0" in seen.text) == (size == LARGE)
        await seen.press("down", "down")
        await seen.shows("rank 2: 500 ms a step")
        if size == SMALL:
            await seen.press("tab")
            await seen.until(lambda: "loss 2.667  steps" not in seen.text, "the log in place of the curves")
        await seen.shows("log of rank 2")
        await seen.shows("second")
        assert [line.strip() for line in seen.lines if line.strip() in ("first", "second", "100%")] == [
            "first",
            "second",
            "100%",
        ]
        if size == SMALL:
            await seen.press("tab")
        await seen.press("enter")
        await seen.is_on(LogScreen)
        await seen.shows("calm-otter-4f2a: log of rank 2")
        job.write_log(2, "later\n")
        await seen.shows("later")
        await seen.press("escape", "escape")
        await seen.is_on(ListScreen)
        await seen.press("question_mark")
        await seen.shows("keys of launch top")
        await seen.press("escape", "q")

    watch(use, size=size)


def test_filter_sort_and_fold(tmp_path: Path) -> None:
    job = a_job(tmp_path, 6, ranks_a_host=2)
    job.step(3, 4, own_s=0.49)
    job.launcher("exit", rank=5, status=-9, max_rss_bytes=1)

    async def use(seen: Screens) -> None:
        rows = seen.app.screen.query_one(Rows)

        def shown() -> list[object]:
            return list(rows.keys_in_sight)

        await seen.until(lambda: shown() == [0, 1, 2, 3, 4, 5], "all ranks")
        await seen.shows("SIGKILL")
        await seen.press("slash", *"node-1", "enter")
        await seen.until(lambda: shown() == [2, 3], "ranks of a host")
        await seen.shows("filter node-1")
        await seen.press("slash")
        assert seen.app.screen.query_one(Input).value == "node-1"
        await seen.press(*["backspace"] * 6, *"0,4-5", "enter")
        await seen.until(lambda: shown() == [0, 4, 5], "ranks by number")
        await seen.press("escape")
        await seen.until(lambda: shown() == [0, 1, 2, 3, 4, 5], "all ranks again")
        await seen.press(*[">"] * 7, "r")
        await seen.shows("OWN*")
        await seen.until(lambda: shown()[:1] == [3], "the slowest first")
        await seen.press("home", "r")
        await seen.until(lambda: shown()[-1:] == [3] and rows.key == 3, "the cursor where its row is")
        await seen.pilot.resize_terminal(*LARGE)
        await seen.shows("HEARD")
        await seen.press(*["<"] * 7, "f")
        await seen.until(lambda: shown() == ["node-0", "node-1", "node-2"], "hosts")
        await seen.shows("+ node-2  2 ranks  1 SIGKILL  1 training")
        await seen.press("end", "enter")
        await seen.until(lambda: shown() == ["node-0", "node-1", "node-2", 4, 5], "an open host")
        await seen.press("enter", "f")
        await seen.until(lambda: len(shown()) == 6, "ranks")

    watch(use, find_job(job.job_id))


def test_kill_asks_first(tmp_path: Path) -> None:
    job, killed = a_job(tmp_path), list[str]()

    def kill(entry: JobEntry) -> str:
        killed.append(entry.job_id)
        return "it has ended"

    async def use(seen: Screens) -> None:
        for answer in ("n", "escape", "enter"):
            await seen.press("k")
            await seen.is_on(ConfirmScreen)
            await seen.shows("Kill calm-otter-4f2a on all its hosts?")
            await seen.press(answer)
            await seen.is_on(JobScreen)
        assert killed == []
        await seen.press("k", "y")
        await seen.until(lambda: killed == [job.job_id], "the kill")
        await seen.shows("it has ended")

    watch(use, find_job(job.job_id), kill=kill)


def test_a_trace_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    job = a_job(tmp_path)

    def trace(_: JobEntry, _is_cancelled: Callable[[], bool]) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "trace_1.json.gz")

    async def use(seen: Screens) -> None:
        await seen.press("p")
        await seen.is_on(TextScreen)
        await seen.shows("No space left on device")
        await seen.press("escape")
        await seen.is_on(JobScreen)

    watch(use, find_job(job.job_id), trace=trace)


def test_a_trace_is_given_up_when_its_screen_is_left(tmp_path: Path) -> None:
    job, ends = a_job(tmp_path), list[str]()
    is_recorded = threading.Event()

    def trace(_: JobEntry, is_cancelled: Callable[[], bool]) -> str:
        while not is_recorded.wait(0.02):
            if is_cancelled():
                ends.append("given up")
                return "given up"
        ends.append("written")
        return "trace_1.json.gz: ranks 0, 1"

    async def use(seen: Screens) -> None:
        await seen.press("p")
        await seen.is_on(TextScreen)
        await seen.shows("the ranks record their next steps")
        await seen.press("escape")
        await seen.is_on(JobScreen)
        await seen.until(lambda: ends == ["given up"], "the end of the request")
        is_recorded.set()
        await seen.press("p")
        await seen.shows("trace_1.json.gz: ranks 0, 1")
        await seen.press("escape")

    watch(use, find_job(job.job_id), trace=trace)
    assert ends == ["given up", "written"]


def test_a_trace_begins_when_the_one_that_was_just_given_up_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job(tmp_path)
    request, ids = Path(find_job(job.job_id).run_folder) / REQUEST_FILE, list[str]()
    monkeypatch.setattr(trace_command, "_POLL_S", 1.0)  # the user is quicker

    def is_asked() -> bool:
        with contextlib.suppress(OSError):
            asked = parsed_request(request.read_bytes())
            ids.extend([asked.id] if asked is not None and asked.id not in ids else [])
        return bool(ids)

    async def use(seen: Screens) -> None:
        await seen.press("p")
        await seen.until(is_asked, "the first request")
        await seen.press("escape", "p")
        await seen.until(lambda: is_asked() and len(ids) == 2, "the second request")
        await seen.shows("the ranks record their next steps")
        await seen.press("escape")
        await seen.until(lambda: not request.exists(), "the end of the second")

    watch(use, find_job(job.job_id))


def test_a_real_job_is_watched_its_stacks_taken_and_killed(tmp_path: Path) -> None:
    job = Launch(tmp_path, "--num_gpus", "2", scripts.write(tmp_path, TRAINING))
    wait_until(lambda: job.out.count("line 3") >= 2, "the ranks")

    async def use(seen: Screens) -> None:
        await seen.shows("localhost × 2 ranks")
        await seen.shows("steps/s")
        await seen.shows("loss 0.")
        await seen.press("s")
        await seen.is_on(TextScreen)
        await seen.shows("Current thread")
        await seen.press("escape", "p")
        await seen.shows("not imported torch")
        await seen.press("escape", "k", "y")
        await seen.until(lambda: job.process.poll() is not None, "its end")
        await seen.shows("exit 143")
        await seen.press("s")
        await seen.shows("has ended; what its ranks wrote: launch logs")

    watch(use, find_job(job.job_id))
    assert job.wait().code == 143


def test_a_job_that_restarts_and_ends_while_it_is_watched(tmp_path: Path) -> None:
    job = a_job(tmp_path, 2)

    async def use(seen: Screens) -> None:
        await seen.shows("step 3 of 10")
        job.launcher("exit", rank=1, status=1, max_rss_bytes=1)
        job.launcher("end", exit_code=1, duration_s=1.0, failure={"reason": "exit code 1", "rank": 1})
        await seen.shows("between starts")
        await seen.shows("✗ exit code 1")
        job.begin(restart=1)
        take_steps(job, 2, 3, 4)
        await seen.shows("restart 1")
        await seen.shows("step 4 of 10")
        for rank in range(2):
            job.launcher("exit", rank=rank, status=0, max_rss_bytes=1)
        job.launcher("end", exit_code=0, duration_s=1.0, failure=None)
        job.register(ended_s=time.time(), exit_code=0)
        await seen.until(lambda: seen.lines[0].startswith("calm-otter-4f2a · ended"), "its end")
        await seen.until(
            lambda: sum(line.split()[1:3] == ["node-0", "ended"] for line in seen.lines) == 2, "its ranks' ends"
        )
        await seen.press("v")
        await seen.shows("restart 1")
        await seen.shows("rank 1 ended with 1")

    watch(use, find_job(job.job_id))


def test_what_needs_a_look_is_said_in_the_head(tmp_path: Path) -> None:
    job = a_job(tmp_path, 4)
    for step in (4, 5, 6):
        for rank in range(4):
            job.step(rank, step, own_s=0.5 if rank == 2 else 0.2)

    async def use(seen: Screens) -> None:
        await seen.shows("! rank 2 (node-0) is the slowest: 400 ms a step of its own, the others 250 ms")
        text = "rank 2 is slow: its backward takes 0.4 s, that of the others 0.2 s " + "and so on " * 20
        job.launcher("verdict", name="slow", severity="warning", rank=2, host=None, text=text, next="look at its GPU")
        await seen.shows("! rank 2 is slow: its backward takes 0.4 s")
        await seen.until(lambda: "and so on" in seen.lines[3], "a second line")
        await seen.press("v")
        await seen.shows("warning: rank 2 is slow")
        await seen.shows("next: look at its GPU")
        await seen.press("escape")
        job.launcher("verdict", name="bad", severity="critical", rank=0, host=None, text="rank 0 is worse", next="")
        await seen.shows("! rank 0 is worse (v: 2 verdicts)")

    watch(use, find_job(job.job_id))


def test_a_thousand_ranks(tmp_path: Path) -> None:
    job = a_job(tmp_path, 1000)
    drawn = list[object]()

    async def use(seen: Screens) -> None:
        await seen.shows("+ node-0  8 ranks  8 training  step 3")
        await seen.shows("125 hosts × 8 ranks")
        await seen.press("f")
        rows = seen.app.screen.query_one(Rows)
        await seen.until(lambda: list(rows.keys_in_sight)[:2] == [0, 1], "ranks")
        assert len(rows.keys_in_sight) <= SMALL[1]
        await seen.press("end")
        await seen.until(lambda: rows.key == 999, "the last rank")
        take_steps(job, 4)
        await seen.until(
            lambda: any(line.split()[:4] == ["999", "node-124", "training", "4"] for line in seen.lines), "4"
        )
        row, rows._row = rows._row, lambda key: drawn.append(key) or row(key)  # type: ignore[func-returns-value]
        rows.refresh()
        await seen.pilot.pause()
        assert 0 < len(set(drawn)) <= SMALL[1]

    watch(use, find_job(job.job_id))


def test_a_job_without_a_journal_has_its_logs(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 2)
    job.register()
    job.write_log(1, "hello\n")

    async def use(seen: Screens) -> None:
        await seen.shows("no journal: it ran with --no-journal")
        await seen.shows("calm-otter-4f2a · running · node-0 × 2 ranks")
        await seen.press("down", "enter")
        await seen.shows("hello")

    watch(use, find_job(job.job_id))
    out = run_here(tmp_path, "top", "calm", "--once").out
    assert "no journal" in out


def test_a_damaged_or_removed_run_folder_breaks_no_screen(tmp_path: Path) -> None:
    job = a_job(tmp_path, 2)

    async def use(seen: Screens) -> None:
        await seen.shows("step 3 of 10")
        with (job.run_folder / "rank_0.jsonl").open("ab") as file:
            file.write(b'{"kind":"step","step":"x","phases":{"forward":"y"}}\n\xff\xfe\n{"kind":"step","st')
        job.rank(1, "step", step=4, num_steps=1, duration_s="nan", phases=[], loss="inf")
        await seen.shows("inf")
        for path in job.run_folder.glob("*"):
            path.unlink()
        job.run_folder.rmdir()
        (tmp_path / "state/launch/jobs/calm-otter-4f2a.json").unlink()
        await seen.pilot.pause(0.2)
        await seen.press("l", "escape", "v", "escape", "tab")
        await seen.shows("calm-otter-4f2a")

    watch(use, find_job(job.job_id))


def test_in_a_terminal(tmp_path: Path) -> None:
    a_job(tmp_path, 2)
    terminal = TerminalLaunch(tmp_path, "top", "calm", size=SMALL, term="xterm-16color")
    terminal.read_until(lambda: any("step 3 of 10" in row for row in terminal.visible), "the job")
    terminal.read_until(lambda: terminal.visible[-1].endswith("verdicts · ?"), "the keys")
    assert b"[38;2;" not in terminal.raw  # the terminal's own colours
    terminal.type(b"q")
    assert terminal.wait() == 0


def test_without_a_terminal_or_textual_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_job(tmp_path, 2)
    result = run_here(tmp_path, "top")
    assert result.code == 2
    assert "launch top needs a terminal" in result.err
    assert "launch ps --json" in result.err
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "textual", None)
        patch.delitem(sys.modules, "launcher.cli.top.app")
        for name in [name for name in sys.modules if name.startswith("textual.")]:
            patch.delitem(sys.modules, name)
        patch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
        patch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
        message = refused(lambda: top.main(["calm"], standalone_mode=False))
    assert "launch top needs the package textual; pip install 'launch-zero[top]'" in message
    out = run_here(tmp_path, "top", "calm", "--once").out.splitlines()
    assert out[0].startswith("calm-otter-4f2a · running · node-0 × 2 ranks · 0:0")
    assert out[1] == "step 3 of 10 · loss 2.667 · 4.1k tok/s · 0:00:03 left · goodput 2% · 2 steps/s"
    assert out[3].split()[:3] == ["RANK", "HOST", "STATE"]
    assert out[4].split()[:4] == ["0", "node-0", "training", "3"]
    assert out[-1] == "a step of rank 0, 500 ms: communication 40% · backward 40% · forward 20%"


def test_a_job_whose_launcher_has_gone_has_no_rank_that_runs(tmp_path: Path) -> None:
    job = a_job(tmp_path, 2)
    job.register(process="another boot:1")
    out = run_here(tmp_path, "top", "calm", "--once").out.splitlines()
    assert "launcher gone" in out[0]
    assert "left" not in out[1]
    assert [line.split()[2] for line in out[4:6]] == ["gone", "gone"]


def test_json_of_a_job_of_the_list_and_of_ps(tmp_path: Path) -> None:
    job = a_job(tmp_path, 2)
    job.step(0, 4, loss="nan")
    found = json.loads(run_here(tmp_path, "top", "calm", "--json").out)
    assert (found["state"], found["step"], found["loss"]) == ("running", 3, "nan")
    assert [rank["state"] for rank in found["ranks"]] == ["training", "training"]
    (listed,) = json.loads(run_here(tmp_path, "top", "--json").out)
    (entry,) = json.loads(run_here(tmp_path, "ps", "--json").out)
    assert listed["progress"] == entry["progress"]
    assert (entry["progress"]["step"], entry["progress"]["total_steps"]) == (3, 10)
    lines = run_here(tmp_path, "ps").out.splitlines()
    assert "  STEP · LOSS · RATE  " in lines[0]
    assert "  3/10 · nan · 4.1k tok/s  train.py --steps 10" in lines[1]
    assert "3/10 · nan" in run_here(tmp_path, "top", "--once").out


def test_a_list_of_jobs_is_not_slow_for_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        a_job(tmp_path, 1, job_id=f"calm-otter-{number:04x}")
    ticks = iter(range(100))
    monkeypatch.setattr(frame, "_LIST_S", 2.5)
    monkeypatch.setattr(frame, "time", type("Clock", (), {"monotonic": lambda: next(ticks), "time": time.time}))
    views = frame.ProgressOfJobs().look(all_jobs())
    assert list(views) == ["calm-otter-0004", "calm-otter-0003"]  # the newest, until the time is over


def test_words_of_a_frame() -> None:
    ranks = [RankView(number, host=f"node-{number // 4}") for number in range(12)]
    for text, expected in (("", 12), ("3", 1), ("0-3 11", 5), ("node-1", 4), ("NODE-2,0", 5), ("nothing", 0)):
        assert sum(map(Filter(text).has, ranks)) == expected, text
    rows = chart([(step, step) for step in range(100)], 40, 3)
    assert [row[:8].strip() for row in rows] == ["97.5", "", "1.5"]
    assert max(map(len, rows)) <= 40
    assert rows[2][9:].count("█") > rows[1].count("█") > rows[0].count("█")
    assert chart([(1, 5.0)], 20, 2)[0].startswith("       5 ")
    assert chart([], 20, 2) == ["", ""]
    assert phase_widths({"forward": 1.0, "backward": 2.0, "gc": 1e-9}, 30) == [("forward", 10), ("backward", 20)]
    assert phase_widths({}, 30) == []


def test_a_look_that_takes_long_keeps_the_keys_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job(tmp_path, 2)
    goes_on = threading.Event()
    look = screens.LiveJob.look

    def slow(live: screens.LiveJob, *arguments: Any) -> Any:
        goes_on.wait(60)
        return look(live, *arguments)

    monkeypatch.setattr(screens.LiveJob, "look", slow)

    async def use(seen: Screens) -> None:
        await seen.press("question_mark")
        await seen.shows("keys of launch top")
        assert seen.app.screen.query_one(Static) is not None
        goes_on.set()
        await seen.press("escape")
        await seen.shows("step 3 of 10")

    watch(use, find_job(job.job_id))
