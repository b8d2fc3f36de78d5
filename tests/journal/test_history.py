"""The history of a job from its journal: all starts, one clock, and whatever is left of damaged files."""

from __future__ import annotations

import json
import math
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.launch.journals import BEGAN_S, Try, write_job
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.journal import curves
from launcher.journal.history import History, read_history
from launcher.journal.summary import Summary, summarize


def restarted() -> list[Try]:
    """A job that failed after step 20, and continued after step 15."""
    return [
        Try(num_steps=20, exit_code=1, own=[raised_by(1)]),
        Try(first_step=16, num_steps=10, began_s=BEGAN_S + 30),
    ]


def raised_by(rank: int) -> dict[str, object]:
    return {"kind": "raised", "time_s": BEGAN_S + 5, "rank": rank, "type": "ValueError", "message": "bad data"}


def test_restarts_are_one_history(tmp_path: Path) -> None:
    history = read_history(write_job(tmp_path, *restarted()))
    assert [len(start.ranks[1]) for start in history.starts] == [20, 10]
    assert history.starts[0].kept_until == 15
    assert [history.starts[0].kept_share(step, 1) for step in (15, 16)] == [1.0, 0.0]
    assert history.starts[0].kept_share(17, 4) == 0.5  # a record of steps 14 to 17
    summary = summarize(history)
    assert (summary.first_step, summary.last_step, summary.num_redone_steps) == (1, 25, 5)
    assert [(each.exit_code, each.reason, each.raised) for each in summary.tries] == [
        (1, "exit code 1", "ValueError: bad data"),
        (0, None, ""),
    ]
    kept, redone = curves.over_steps(history, "loss")
    assert kept.xs == [float(step) for step in range(1, 26)]
    assert redone.xs == [float(step) for step in range(16, 21)]


def test_the_figures_are_those_of_the_steps(tmp_path: Path) -> None:
    summary = summarize(read_history(write_job(tmp_path, *restarted())))
    assert summary.rate is not None
    assert summary.rate.unit == "tokens/s"
    for value in (summary.rate.median, summary.rate.first_tenth, summary.rate.last_tenth):
        assert value == pytest.approx(2 * 8192 / 0.25)
    # 25 of 30 steps count; of each 0.75 + 0.2 (rank 0) and 0.02 (rank 1) were useful.
    useful_s = 25 * 0.25 * (0.75 + (0.2 + 0.02) / 2)
    assert summary.useful_s == pytest.approx(useful_s)
    assert summary.duration_s == pytest.approx(30 + 10 * 0.25 + 1)
    assert summary.goodput == pytest.approx(useful_s / 33.5)
    assert summary.outside_s == pytest.approx(33.5 - 30 * 0.25)
    assert summary.phases_s["forward"] == pytest.approx(30 * 0.25 * 0.3)
    assert summary.phases_of_step_s["forward"] == pytest.approx(0.25 * 0.3)
    assert summary.slowest is not None
    assert (summary.slowest.rank, summary.slowest.host) == (1, "node-a")
    assert summary.slowest.own_s == pytest.approx(0.25 * 0.98)
    assert summary.peak_bytes == {0: 3_321_761_280, 1: 3_322_809_856}
    assert summary.sent_bytes_of_step == 25_769_680


def test_saves_and_flops_are_counted_over_all_starts(tmp_path: Path) -> None:
    first, second = restarted()
    save = {"kind": "save", "time_s": BEGAN_S + 1, "path": "saved", "duration_s": 0.5}
    engine = {"kind": "engine", "time_s": BEGAN_S, "config": {}, "peak_flops": 1e14}
    flops = {"kind": "flops", "time_s": BEGAN_S, "flops": 2.5e12, "micro_batches": 2}
    first.own_of_ranks = {rank: [save, save] for rank in (0, 1)}
    second.own_of_ranks = {0: [engine, flops, save], 1: [save | {"duration_s": 2.0}]}
    summary = summarize(read_history(write_job(tmp_path, first, second)))
    assert (summary.num_saves, summary.save_s) == (3, 3.0)
    assert summary.rate is not None
    assert summary.rate.mfu == pytest.approx(2 * 2.5e12 / 0.25 / 1e14)


@pytest.mark.parametrize(("parts", "share"), [(1, 0.5), (2, 1.0)])
def test_tokens_of_ranks_that_share_samples_are_counted_once(tmp_path: Path, parts: int, share: float) -> None:
    """Two tensor parallel ranks have the same tokens, two sequence parallel ones a half each."""
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    engine = {"kind": "engine", "time_s": BEGAN_S, "config": sizes | {"sequence_parallel_size": parts}}
    history = read_history(write_job(tmp_path, Try(own_of_ranks={0: [engine]})))
    rate = summarize(history).rate
    assert rate is not None
    assert rate.median == pytest.approx(share * 2 * 8192 / 0.25)
    assert curves.rate_over_time(history).means[10] == pytest.approx(rate.median, rel=1e-3)


def test_all_ranks_are_on_the_clock_of_the_launcher(tmp_path: Path) -> None:
    clocks = {"node-a": 0.0, "node-b": 3600.0, "node-c": -7.5}
    history = read_history(write_job(tmp_path, Try(num_ranks=3, host_clocks=clocks)))
    for rank in history.ranks():
        assert rank.columns["time_s"][0] == pytest.approx(BEGAN_S + 0.25, abs=1e-3)
    assert history.begun_s == BEGAN_S
    rates = curves.rate_over_time(history)
    assert len(rates.means) == 20
    assert rates.means == pytest.approx([3 * 8192 / 0.25] * 20, rel=1e-3)


def test_steps_of_a_script_without_the_engine_are_counted_through_restarts(tmp_path: Path) -> None:
    write_job(tmp_path, *restarted())
    known = {"kind", "time_s", "num_steps", "duration_s", "lr", "memory_bytes"}
    for path in tmp_path.rglob("rank_*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        plain = [
            {name: value for name, value in record.items() if name in known}
            | {"phases": {"backward": 0.1}, "step": step}
            for step, record in enumerate(records, start=1)
            if record["kind"] == "step"
        ]
        path.write_text("".join(json.dumps(record) + "\n" for record in plain))
    # Written with blanks these are no records of a journal.
    assert summarize(read_history(tmp_path)).last_step is None
    for path in tmp_path.rglob("rank_*.jsonl"):
        path.write_text(path.read_text().replace('": ', '":').replace(", ", ","))
    history = read_history(tmp_path)
    summary = summarize(history)
    assert (summary.has_engine, summary.num_redone_steps, summary.last_step) == (False, 0, 32)
    assert summary.rate is not None
    assert (summary.rate.unit, summary.rate.median) == ("steps/s", pytest.approx(4.0))
    assert (summary.slowest, summary.first_loss) == (None, None)
    assert curves.waiting(history) is None


def test_what_scripts_log_becomes_curves(tmp_path: Path) -> None:
    values = [{"step": 5, "accuracy": 0.5, "name": "a"}, {"step": 6, "accuracy": 0.75, "name": "b"}, {"lost": 3}]
    logs = [{"kind": "log", "time_s": BEGAN_S + place, "values": each} for place, each in enumerate(values)]
    history = read_history(write_job(tmp_path, Try(own_of_ranks={0: logs})))
    found = curves.logged(history)
    assert set(found) == {"accuracy", "lost"}
    axis, curve = found["accuracy"]
    assert (axis, curve.xs, curve.means) == ("step", [5.0, 6.0], [0.5, 0.75])
    assert found["lost"][0] == "time"
    assert summarize(history).logged == {"step": 6, "accuracy": 0.75, "name": "b", "lost": 3}


def test_a_loss_that_is_not_finite_is_named_with_its_step(tmp_path: Path) -> None:
    write_job(tmp_path, Try())
    path = tmp_path / "rank_1.jsonl"
    lines = path.read_text().splitlines()
    lines[7] = json.dumps(json.loads(lines[7]) | {"loss": "nan", "norm": "inf"}, separators=(",", ":"))
    path.write_text("\n".join(lines) + "\n")
    history = read_history(tmp_path)
    assert math.isinf(history.starts[0].ranks[1].columns["norm"][6])
    assert summarize(history).first_nonfinite_loss == 7


def test_a_large_journal_is_sampled_and_the_figures_hold(tmp_path: Path) -> None:
    write_job(tmp_path, Try(num_steps=4_000))
    exact = summarize(read_history(tmp_path))
    history = read_history(tmp_path, 1 << 18)
    assert history.is_sample
    assert sum(rank.num_read_bytes for rank in history.ranks()) <= 1 << 18
    sample = summarize(history)
    assert (sample.first_step, sample.last_step) == (exact.first_step, exact.last_step) == (1, 4_000)
    assert (sample.first_loss, sample.last_loss) == (exact.first_loss, exact.last_loss)
    assert sample.goodput == pytest.approx(exact.goodput, rel=0.01)
    assert sample.phases_s["forward"] == pytest.approx(exact.phases_s["forward"], rel=0.01)
    assert sample.num_damaged == 0
    assert not read_history(tmp_path, 1 << 30).is_sample


def test_of_very_many_ranks_some_are_read(tmp_path: Path) -> None:
    write_job(tmp_path, Try(num_steps=2, num_ranks=300))
    history = read_history(tmp_path, 1 << 20)
    assert history.is_sample
    assert {0, 299} < set(history.starts[0].ranks)
    rate = summarize(history).rate
    assert rate is not None
    assert rate.median == pytest.approx(300 * 8192 / 0.25)  # of all ranks


def test_maps_and_curves_are_bounded(tmp_path: Path) -> None:
    many_ranks = curves.waiting(read_history(write_job(tmp_path / "ranks", Try(num_steps=3, num_ranks=210))))
    assert many_ranks is not None
    assert (len(many_ranks.ranks), len(many_ranks.shares), many_ranks.ranks[-1]) == (105, 105, (208, 209))
    history = read_history(write_job(tmp_path / "steps", Try(num_steps=700)))
    many_steps = curves.waiting(history)
    assert many_steps is not None
    assert (len(many_steps.steps), len(many_steps.ranks)) == (234, 2)
    assert len(curves.over_steps(history, "loss")[0].xs) <= curves.MAX_POINTS
    steps, width, phases = curves.phases_over_steps(history)
    assert len(steps) <= curves.MAX_BARS
    assert width == 6
    assert phases["forward"] == pytest.approx([0.075] * len(steps))


@pytest.fixture(scope="module")
def whole() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        logs = [{"kind": "log", "time_s": BEGAN_S, "values": {"step": 1, "accuracy": 0.5}}]
        first, second = restarted()
        first.own_of_ranks[0] = logs
        yield write_job(Path(name), first, second)


def read_all(folder: Path) -> tuple[History, Summary]:
    """Do everything with a journal that show and report do."""
    history = read_history(folder)
    summary = summarize(history)
    json.dumps(summary.as_dict(), allow_nan=False)
    curves.logged(history)
    curves.waiting(history)
    curves.phases_over_steps(history)
    curves.rate_over_time(history)
    curves.over_time(history, "memory_bytes")
    curves.over_steps(history, "loss")
    read_history(folder, 10_000)
    return history, summary


@settings(max_examples=40)
@given(data=st.data())
def test_files_may_be_cut_at_any_byte(whole: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        shutil.copytree(whole, folder)
        complete = read_history(whole)
        paths = sorted(folder.rglob("*.jsonl"))
        path = data.draw(st.sampled_from(paths))
        text = path.read_bytes()
        length = data.draw(st.integers(0, len(text)))
        path.write_bytes(text[:length])
        history, _ = read_all(folder)
        assert history.num_damaged == 0
        if path.name.startswith("rank_"):
            start = history.starts[int(path.parent != folder)]
            rank = int(path.stem.removeprefix("rank_"))
            num_whole = text[:length].count(b'{"kind":"step"') - (b'"step"' in text[:length].rpartition(b"\n")[2][:15])
            assert len(start.ranks[rank]) == num_whole
            assert len(history.starts[0].ranks) == len(complete.starts[0].ranks)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    num_bytes=st.integers(1, 40),
    removed=st.sampled_from(["", "rank_0.jsonl", "launcher.jsonl"]),
)
def test_damaged_lines_and_missing_files_are_left_out(whole: Path, seed: int, num_bytes: int, removed: str) -> None:
    noise = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        shutil.copytree(whole, folder)
        for path in folder.rglob("*.jsonl"):
            text = bytearray(path.read_bytes())
            for _ in range(num_bytes):
                text[noise.randrange(len(text))] = noise.randrange(256)
            path.write_bytes(text)
        if removed:
            (folder / removed).unlink()
        history, _ = read_all(folder)
        lost = sum(
            20 * (start.number == 0) + 10 * start.number - len(rank)
            for start in history.starts
            for rank in start.ranks.values()
        )
        assert lost <= 4 * num_bytes + history.num_damaged


def test_a_folder_without_a_journal_has_no_figures(tmp_path: Path) -> None:
    summary = summarize(read_history(tmp_path))
    assert (summary.begun_s, summary.last_step, summary.rate) == (None, None, None)
    assert read_all(tmp_path)
