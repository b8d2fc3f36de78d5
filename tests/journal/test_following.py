"""A journal that is followed: while it grows, after its end, across restarts, cut anywhere, and damaged."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.launch.fake_job import FakeJob, grown

from launcher.journal import live
from launcher.journal.live import LOSS, STEPS_PER_S, TOKENS_PER_S, Curve, JobView, LiveJob
from launcher.journal.read import JournalFile
from launcher.journal.records import LAUNCHER_RECORDS, RANK_RECORDS


def look(job: FakeJob) -> JobView:
    return LiveJob(job.run_folder).look(time.time())


def facts_of(view: JobView) -> dict[str, Any]:
    """What does not depend on when a record was read."""
    facts = dataclasses.asdict(view)
    for rank in facts["ranks"].values():
        del rank["heard_at_s"], rank["moved_at_s"]
    return facts | {"goodput": None}


def test_a_running_job(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 4, ranks_a_host=2)
    job.begin()
    live_job = LiveJob(job.run_folder)
    view = live_job.look(time.time())
    assert (view.has_journal, view.world_size, view.step, view.slowest) == (True, 4, None, None)
    assert [(rank.host, rank.pid, rank.phase) for rank in view.ranks.values()] == [
        ("node-0", 1000, "starting Python"),
        ("node-0", 1001, "starting Python"),
        ("node-1", 1002, "starting Python"),
        ("node-1", 1003, "starting Python"),
    ]
    for step in (1, 2, 3):
        for rank in range(4):
            job.step(rank, step, own_s=0.5 if rank == 2 else 0.2)
    job.launcher("progress", ranks=[[rank, 3, 3, 2.5, "training", 10] for rank in range(4)])
    view = live_job.look(time.time())
    assert (view.step, view.total_steps, view.loss) == (3, 10, pytest.approx(8 / 3))
    assert view.steps_per_s == pytest.approx(2.0)
    assert view.tokens_per_s == pytest.approx(4 * 2048)
    assert view.left_s == pytest.approx(3.5)
    assert view.goodput == pytest.approx(1.5 / 60, rel=0.5)
    assert view.slowest is not None
    assert (view.slowest.rank, view.slowest.own_s) == (2, pytest.approx(0.5))
    assert view.slowest.median_s == pytest.approx(0.2)
    assert view.ranks[2].phases == pytest.approx({"forward": 0.5 / 3, "backward": 1 / 3, "communication": 0.0})
    assert view.curves[LOSS] == [(1, 8.0), (2, 4.0), (3, pytest.approx(8 / 3))]
    assert view.curves[TOKENS_PER_S] == [(step, pytest.approx(4 * 2048)) for step in (1, 2, 3)]
    job.launcher("exit", rank=1, status=-9, max_rss_bytes=1)
    job.launcher("end", exit_code=137, duration_s=1.0, failure={"reason": "killed by SIGKILL", "rank": 1})
    view = live_job.look(time.time())
    assert (view.exit_code, view.reason, view.ranks[1].status, view.left_s) == (137, "killed by SIGKILL", -9, None)


def test_a_journal_that_is_cut_anywhere_is_read_on(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 1)
    job.begin()
    job.rank(0, "rank", version=1, rank=0, local_rank=0, host="node-0", pid=1000, monotonic_s=1.0)
    for step in (1, 2, 3):
        job.step(0, step)
    job.launcher("progress", ranks=[[0, 3, 3, 2.5, "training", 10]])
    job.launcher("verdict", name="input", severity="warning", rank=0, host=None, text="slow input", next="workers")
    whole = facts_of(look(job))
    assert whole["step"] == 3
    assert len(whole["verdicts"]) == 1
    for name in ("rank_0.jsonl", "launcher.jsonl"):
        path = job.run_folder / name
        for size in range(0, path.stat().st_size, 5):
            live_job = LiveJob(job.run_folder)
            with grown(path, size):
                live_job.look(time.time())
            assert facts_of(live_job.look(time.time())) == whole, f"{name} cut at {size}"


def test_of_a_large_journal_the_end_is_read_and_a_sample_of_the_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = FakeJob(tmp_path, 2)
    job.begin()
    for step in range(1, 1001):
        for rank in range(2):
            job.step(rank, step)
        job.launcher("progress", ranks=[[rank, step, step, 1.0, "training", 2000] for rank in range(2)])
    whole = look(job)
    assert whole.curves[LOSS][0][0] < 3
    monkeypatch.setattr(live, "_TAIL_BYTES", 4000)
    monkeypatch.setattr(live, "_LEAST_TAIL_BYTES", 4000)
    monkeypatch.setattr(live, "_WHOLE_BYTES", 20_000)
    monkeypatch.setattr(live, "_NUM_SAMPLES", 50)
    monkeypatch.setattr(live, "_SAMPLE_BYTES", 1000)
    read = _count_bytes(monkeypatch)
    view = look(job)
    assert sum(read.values()) < 0.4 * sum(path.stat().st_size for path in job.run_folder.glob("*.jsonl"))
    assert (view.step, view.total_steps, view.ranks[1].step) == (1000, 2000, 1000)
    steps = [step for step, _ in view.curves[LOSS]]
    assert steps == sorted(set(steps))
    assert steps[0] < 30
    assert steps[-1] == 1000
    assert 50 < len(steps) < 100
    assert view.goodput is None


def _count_bytes(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """Count the bytes of a journal that are made into records."""
    counts: dict[Path, int] = {}
    poll, peek = JournalFile.poll, JournalFile.peek

    def counted(file: JournalFile, records: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for record in records:
            counts[file.path] = counts.get(file.path, 0) + len(json.dumps(record))
            yield record

    monkeypatch.setattr(JournalFile, "poll", lambda file, kinds=None: counted(file, poll(file, kinds)))
    monkeypatch.setattr(JournalFile, "peek", lambda file, start, size: counted(file, peek(file, start, size)))
    return counts


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_restart_continues_the_curve_from_its_checkpoint(tmp_path: Path, is_watched: bool) -> None:
    job = FakeJob(tmp_path, 2)
    live_job = LiveJob(job.run_folder)

    def seen() -> JobView:
        return live_job.look(time.time()) if is_watched else JobView()

    job.begin()
    for step in range(1, 8):
        job.step(0, step, loss=1.0)
        job.step(1, step)
    job.launcher("verdict", name="x", severity="critical", rank=1, host=None, text="rank 1 is slow", next="")
    job.launcher("exit", rank=1, status=1, max_rss_bytes=1)
    job.launcher("end", exit_code=1, duration_s=1.0, failure={"reason": "exit code 1"})
    seen()
    job.begin(restart=1)
    seen()
    for step in (5, 6):
        for rank in range(2):
            job.step(rank, step, loss=0.5)
    view = live_job.look(time.time())
    assert (view.restart, view.exit_code, view.step, view.verdicts) == (1, None, 6, ())
    assert [rank.status for rank in view.ranks.values()] == [None, None]
    assert view.curves[LOSS] == [(step, 1.0) for step in (1, 2, 3, 4)] + [(5, 0.5), (6, 0.5)]
    assert view.goodput == pytest.approx(6 * 0.5 / 60, rel=0.5)  # what was done twice counts once
    texts = [text for _, text in view.events]
    assert "rank 1 ended with 1" in texts
    assert "restart 1" in texts


def test_without_a_journal(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 2)
    job.write_log(0, "hello\n")
    assert not look(job).has_journal
    assert not LiveJob(tmp_path / "not there").look(time.time()).has_journal


def test_loss_and_rate_of_a_script_that_only_makes_heartbeats(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 2)
    job.begin()
    for second in range(1, 5):
        ranks = [[rank, 10 * second, None, 1 / second, "", None] for rank in range(2)]
        job.launcher("progress", time_s=job.start_s + second, ranks=ranks)
    view = look(job)
    assert (view.step, view.loss, view.steps_per_s) == (40, 0.25, pytest.approx(10.0))
    assert view.curves[LOSS] == [(10 * second, 1 / second) for second in range(1, 5)]
    assert [step for step, _ in view.curves[STEPS_PER_S]] == [20, 30, 40]


def test_values_that_a_script_logs_are_curves(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 2)
    job.begin()
    for rank in (0, 1):
        for step in (1, 2):
            job.rank(rank, "log", values={"step": step, "accuracy": step / 10 + rank, "note": "x", "bad": "nan"})
    assert look(job).curves == {"accuracy": [(1, 0.1), (2, 0.2)]}


def test_a_rank_that_says_nothing_is_named(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 3)
    job.begin()
    live_job = LiveJob(job.run_folder)
    live_job.look(time.time())
    for rank in range(3):
        job.step(rank, 1)
    now_s = time.time()
    live_job.look(now_s)
    job.step(0, 2)
    job.step(2, 2)
    view = live_job.look(now_s + 30)
    assert [(rank.rank, rank.silence_s(now_s + 30)) for rank in view.silent(now_s + 30)] == [(1, pytest.approx(30.0))]
    job.launcher("end", exit_code=0, duration_s=1.0, failure=None)
    assert live_job.look(now_s + 30).silent(now_s + 60) == []


def test_of_very_many_ranks_some_are_read_at_each_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_MAX_FILES", 10)
    job = FakeJob(tmp_path, 40)
    job.begin()
    for rank in range(40):
        job.step(rank, 1)
    live_job = LiveJob(job.run_folder)
    assert sum(rank.step is not None for rank in live_job.look(time.time()).ranks.values()) == 10
    wanted = live_job.look(time.time(), [39]).ranks
    assert wanted[39].step == 1
    for _ in range(3):
        view = live_job.look(time.time())
    assert all(rank.step == 1 for rank in view.ranks.values())
    assert all(rank.step == 1 for rank in LiveJob(job.run_folder).look(time.time(), reads_all=True).ranks.values())


def test_a_brief_look_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = FakeJob(tmp_path, 8)
    job.begin()
    for step in range(1, 601):
        for rank in range(8):
            job.step(rank, step)
        job.launcher("progress", ranks=[[rank, step, step, 1.0, "training", 2000] for rank in range(8)])
    read = _count_bytes(monkeypatch)
    view = LiveJob(job.run_folder, is_brief=True).look(time.time())
    assert (view.step, view.total_steps, view.loss) == (600, 2000, pytest.approx(8 / 600))
    assert view.tokens_per_s == pytest.approx(8 * 2048)
    assert set(read) == {job.run_folder / "launcher.jsonl", job.run_folder / "rank_0.jsonl"}
    assert max(read.values()) < 150_000


WRONG = (None, True, -1, 10**30, 1e308, "x", "nan", [], [None], [[None] * 6], {}, {"ranks": 1})


@pytest.mark.parametrize("kind", [*LAUNCHER_RECORDS, *RANK_RECORDS])
def test_records_with_wrong_values_break_nothing(tmp_path: Path, kind: str) -> None:
    job = FakeJob(tmp_path, 2)
    job.begin()
    fields = (LAUNCHER_RECORDS if kind in LAUNCHER_RECORDS else RANK_RECORDS)[kind]
    add = job.launcher if kind in LAUNCHER_RECORDS else lambda kind, **facts: job.rank(0, kind, **facts)
    for wrong in WRONG:
        add(kind, **dict.fromkeys(fields, wrong))
        for name in fields:
            add(kind, **{"rank": 0, "step": 1, name: wrong})
    add("progress", ranks=[[0, wrong, wrong, wrong, wrong, wrong] for wrong in WRONG])
    with (job.run_folder / "launcher.jsonl").open("ab") as file:
        file.write(b'{"kind":"notice"\n\xff\n[]\n' + b"[" * 100_000 + b"\n")
    view = look(job)
    assert view.has_journal


def test_a_curve_has_a_bound_and_keeps_its_form() -> None:
    curve, total = Curve(), Curve(is_total=True)
    for step in range(10_000):
        curve.add(step, step)
        total.add(step, step)
    points = curve.points()
    assert 200 < len(points) <= 514
    assert all(abs(step - value) < 100 for step, value in points)
    assert total.points()[-1] == (9_999, 9_999)
    curve.cut(5_000)
    assert 4_900 < curve.points()[-1][0] < 5_000
