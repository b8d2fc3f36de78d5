"""Each fault gives its own verdict, with the right rank, and no other; a healthy run, however noisy, gives none."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import pytest
from harness.journals import START_S, FakeJob, changed, longer
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.journal.checks import RULES
from launcher.journal.verdicts import Verdict, Verdicts

MIB = 1 << 20


def _names(verdicts: list[Verdict]) -> list[tuple[str, int | None]]:
    return [(each.name, each.rank) for each in verdicts]


def _samples(ranks: set[int], count: int = 20, **fields: Any) -> list[tuple[int | None, dict[str, Any]]]:
    return [
        (rank, {"kind": "sample", "time_s": START_S + 5.0 * number, **fields})
        for number in range(count)
        for rank in ranks
    ]


def _saves(ranks: set[int], duration_s: float) -> list[tuple[int | None, dict[str, Any]]]:
    return [
        (rank, {"kind": "save", "time_s": START_S + 10.0 * n, "path": "last.pt", "duration_s": duration_s})
        for n in range(1, 6)
        for rank in ranks
    ]


def _without_loader(_rank: int, _step: int, record: dict[str, Any]) -> None:
    del record["phases"]["data"]


FAULTS: dict[str, tuple[FakeJob, tuple[str, int | None], str]] = {
    "slow rank": (
        FakeJob(changes=(longer("forward", 0.1, {2}),)),
        ("straggler", 2),
        "rank 2 (node-b) is slow: 100 ms more than the others in each step",
    ),
    "slow rank of two": (FakeJob(2, 1, changes=(longer("script", 0.2, {1}),)), ("straggler", 1), "rank 1 is slow"),
    "slow rank without the engine": (
        FakeJob(is_plain=True, changes=(longer("script", 0.1, {3}),)),
        ("straggler", 3),
        "in the forward pass or the script's own work",
    ),
    "slow host": (
        FakeJob(changes=(longer("backward", 0.1, {2, 3}),), num_ranks=6, num_hosts=3),
        ("slow_host", None),
        "node-b",
    ),
    "slow input": (FakeJob(changes=(longer("data", 0.1),)), ("input", None), "each rank waits 102 ms of each step"),
    "slow input of one rank": (FakeJob(changes=(longer("data", 0.1, {1}),)), ("input", 1), "rank 1 (node-a) waits"),
    "slow script": (FakeJob(changes=(_without_loader, longer("script", 0.1))), ("input", None), "the script itself"),
    "slow input without the engine": (
        FakeJob(is_plain=True, changes=(longer("data", 0.1, {0}),)),
        ("input", 0),
        "rank 0 (node-a) waits",
    ),
    "garbage collection of one rank": (FakeJob(changes=(longer("gc", 0.06, {1}),)), ("gc", 1), "of rank 1 (node-a)"),
    "garbage collection in turns": (
        FakeJob(changes=tuple(longer("gc", 0.1, {rank}, every=5 + rank) for rank in range(4))),
        ("gc", None),
        "all ranks",
    ),
    "slow network": (FakeJob(changes=(longer("communication", 0.4),)), ("communication", None), "communication"),
    "slower than at first": (
        FakeJob(changes=(longer("backward", 0.15, first_step=120),)),
        ("slowdown", None),
        "the backward has grown",
    ),
    "slow saves": (FakeJob(extra=_saves({0, 1, 2, 3}, 2.0)), ("slow_saves", None), "waits 20% of the time"),
    "slow saves of one rank": (
        FakeJob(extra=_saves({0, 1, 2}, 0.1) + _saves({3}, 3.0)),
        ("slow_saves", 3),
        "rank 3 (node-b) waits 30%",
    ),
    "memory creep": (
        FakeJob(
            changes=(changed({1}, 1, memory_bytes=lambda _, step: 1024 * MIB + step * MIB + 9 * MIB * (step % 7)),)
        ),
        ("memory", 1),
        "rank 1 (node-a) creeps up",
    ),
    "NaN on all ranks": (FakeJob(changes=(changed(loss="nan"),)), ("nan", None), "the loss is not finite"),
    "infinite norm": (FakeJob(changes=(changed(norm="inf"),)), ("nan", None), "the gradient norm is not finite"),
    "NaN of one rank first": (
        FakeJob(changes=(changed(first_step=51, loss="nan"), changed({2}, loss="nan"))),
        ("bad_data", 2),
        "is not finite",
    ),
    "loss spike": (
        FakeJob(changes=(changed(first_step=200, loss=lambda loss, _: loss * 4),)),
        ("loss_spike", None),
        "the loss is",
    ),
    "bad data of one rank": (
        FakeJob(changes=(changed({1}, 1, loss=lambda loss, _: loss * 3),)),
        ("bad_data", 1),
        "that of the others is",
    ),
    "bad data of one of two": (
        FakeJob(2, 1, changes=(changed({1}, 150, loss=lambda loss, _: loss * 4),)),
        ("bad_data", 1),
        "and was",
    ),
    "loss scale": (
        FakeJob(
            changes=(changed(first_step=1, loss_scale=1024.0, skipped=lambda _, step: int(step > 100 and step % 2)),)
        ),
        ("loss_scale", None),
        "of the steps update nothing",
    ),
    "loss scale at its minimum": (
        FakeJob(changes=(changed(first_step=1, loss_scale=lambda _, step: 1024.0 if step < 100 else 1.0),)),
        ("loss_scale", None),
        "it is 1",
    ),
    "throttled": (
        FakeJob(extra=_samples({2}, throttled="heat")),
        ("clocks", 2),
        "node-b, rank 2 (node-b) are lowered: heat",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_gives_its_verdict_alone(name: str) -> None:
    job, expected, words = FAULTS[name]
    verdicts = job.verdicts()
    assert _names(verdicts) == [expected], verdicts
    assert words in verdicts[0].text
    assert verdicts[0].next == RULES[verdicts[0].name].next


@pytest.mark.parametrize("name", ["slow rank", "slow input", "garbage collection of one rank", "slow host"])
def test_a_fault_is_found_in_noise(name: str) -> None:
    job, expected, _ = FAULTS[name]
    noisy = FakeJob(**{**vars(job), "noise": 0.15, "seed": 5})
    assert expected in _names(noisy.verdicts())


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10_000),
    st.floats(0.0, 0.3),
    st.sampled_from([1, 2, 3, 8]),
    st.booleans(),
    st.floats(0.02, 3.0),
)
def test_noise_gives_none(seed: int, noise: float, num_ranks: int, is_plain: bool, scale: float) -> None:
    job = FakeJob(num_ranks, 1, 250, is_plain, noise, seed, scale=scale)
    assert job.verdicts() == []


def test_below_the_deadband_is_nothing() -> None:
    assert FakeJob(changes=(longer("forward", 0.009, {1}),)).verdicts() == []


@pytest.mark.parametrize(("time_s", "severity"), [(0.03, "warning"), (0.08, "critical")])
def test_severity_is_the_share_of_an_iteration(time_s: float, severity: str) -> None:
    (verdict,) = FakeJob(changes=(longer("forward", time_s, {1}),)).verdicts()
    assert verdict.severity == severity
    assert verdict.share == pytest.approx(time_s / (0.206 + time_s), rel=0.01)


def test_says_since_when_and_until_when() -> None:
    def change(rank: int, step: int, record: dict[str, Any]) -> None:
        if rank == 1 and 100 <= step < 200:
            record["phases"]["backward"] += 0.1

    (verdict,) = FakeJob(changes=(change,)).verdicts()
    assert 85 <= (verdict.since_step or 0) <= 101
    assert 200 <= (verdict.until_step or 0) <= 235


def test_a_few_slow_steps_are_nothing() -> None:
    assert FakeJob(changes=(longer("forward", 3.0, {1}, every=60),), num_steps=400).verdicts() == []
    assert FakeJob(changes=(longer("data", 2.0, every=100),), num_steps=400).verdicts() == []


@pytest.mark.parametrize(
    ("phase", "time_s", "waits", "names"),
    [
        ("data", 0.03, (0.0, 0.0, 0.0, 0.0), [("input", None)]),
        ("data", 0.03, (0.12, 0.12, 0.12, 0.12), []),
        ("communication", 0.2, (0.0, 0.0, 0.0, 0.0), [("communication", None)]),
        ("communication", 0.2, (0.0, 0.0, 0.0, 0.3), []),
    ],
)
def test_what_ranks_wait_for_processors_is_taken_off(
    phase: str, time_s: float, waits: tuple[float, ...], names: list[tuple[str, int | None]]
) -> None:
    """Those who read data are short of processors, too; in collectives the others wait for the one that is."""
    samples: list[tuple[int | None, dict[str, Any]]] = [
        (rank, {"kind": "sample", "time_s": START_S + second, "cpu_wait_s": share * second})
        for second in range(0, 80, 5)
        for rank, share in enumerate(waits)
    ]
    assert _names(FakeJob(changes=(longer(phase, time_s),), extra=samples).verdicts()) == names


def test_nothing_is_said_of_communication_until_the_load_of_hosts_is_known() -> None:
    """The first sample of a rank says how long it has waited for processors, and the second since when."""
    first: list[tuple[int | None, dict[str, Any]]] = [
        (rank, {"kind": "sample", "time_s": START_S, "cpu_wait_s": 0.0}) for rank in range(4)
    ]
    second = [(rank, {**record, "time_s": START_S + 40, "cpu_wait_s": 0.0}) for rank, record in first]
    slow = longer("communication", 0.2)
    assert _names(FakeJob(changes=(slow,), extra=first).verdicts()) == []
    (verdict,) = FakeJob(changes=(slow,), extra=first + second).verdicts()
    assert verdict.name == "communication"
    assert verdict.since_step is not None
    assert verdict.since_step > 40 / 0.45


def test_warming_up_is_nothing() -> None:
    def compile(rank: int, step: int, record: dict[str, Any]) -> None:
        if step <= 4:
            record["phases"]["forward"] += 20.0 / (rank + 1)
            record["memory_bytes"] = step * 100 * MIB

    assert FakeJob(changes=(compile,)).verdicts() == []


def test_memory_that_levels_off_is_no_creep() -> None:
    def grow(_: int, step: int) -> int:
        return int((1024 + 400 * (1 - 0.99**step)) * MIB)

    assert FakeJob(changes=(changed(None, 1, memory_bytes=grow),), num_steps=600).verdicts() == []


def test_who_waits_is_not_named() -> None:
    """A rank that waits for a network, and for nobody: its own time is that of the others."""
    names = _names(FakeJob(changes=(longer("communication", 0.2, {3}),)).verdicts())
    assert ("straggler", 3) not in names


@pytest.mark.parametrize(("loss_scale", "has_verdict"), [(None, True), (1024.0, False)])
def test_a_gradient_that_is_not_finite_is_named(loss_scale: float | None, has_verdict: bool) -> None:
    """With a loss scale an overflow that is skipped is normal."""

    def overflow(_: int, step: int, record: dict[str, Any]) -> None:
        record["loss_scale"] = loss_scale
        if step == 200:
            record.update(norm="inf", skipped=1)

    record = {"kind": "nonfinite", "time_s": START_S + 40, "step": 200, "what": "gradient", "module": "head.bias"}
    extra: list[tuple[int | None, dict[str, Any]]] = [(0, record)] if has_verdict else []
    found = FakeJob(changes=(overflow,), extra=extra).verdicts()
    assert [verdict.text for verdict in found] == (
        ["the gradient norm is not finite; first in the gradient of head.bias"] if has_verdict else []
    )


def test_one_spike_is_nothing() -> None:
    assert FakeJob(changes=(lambda r, s, rec: rec.update(loss=50.0) if s == 200 else None,)).verdicts() == []


def _progress(time_s: float, beats: dict[int, int]) -> tuple[None, dict[str, Any]]:
    ranks = [[rank, count, count, None, "training", None] for rank, count in beats.items()]
    return None, {"kind": "progress", "time_s": START_S + time_s, "ranks": ranks}


def _fed(records: list[tuple[int | None, dict[str, Any]]]) -> Verdicts:
    verdicts = Verdicts()
    verdicts.feed(None, FakeJob().job_record())
    for rank, record in records:
        verdicts.feed(rank, record)
    return verdicts


def test_the_one_rank_that_has_stopped_is_named() -> None:
    records = [_progress(t, dict.fromkeys(range(4), t)) for t in range(1, 10)]
    verdicts = _fed(records + [_progress(t, {0: t, 1: t, 3: t}) for t in range(10, 35)])
    assert _names(verdicts.current(START_S + 35)) == [("silent", 2)]
    behind = _fed([*records, _progress(10, {0: 10, 1: 10, 3: 10})])
    assert behind.current(START_S + 20) == []
    (verdict,) = behind.current(START_S + 60)
    assert _names([verdict]) == [("silent", 2)]
    assert "rank 2 (node-b) has made no progress for 51.0 s (training)" in verdict.text
    even = _fed(records)
    assert even.current(START_S + 600) == []  # an evaluation, a save: nobody is behind


def test_the_rank_on_which_it_began_may_tell_it_last() -> None:
    """Without the engine ranks tell no loss before one is not finite. Records of several hosts come at other times."""

    def bad(rank: int, step: int) -> tuple[int, dict[str, Any]]:
        record = {"kind": "nonfinite", "time_s": START_S + 10, "step": step, "what": "loss", "last_finite": step - 1}
        return rank, {**record, "module": None}

    samples = [(rank, {"kind": "sample", "time_s": START_S + 5}) for rank in range(4)]
    verdicts = _fed([*samples, bad(0, 42), bad(1, 42), bad(3, 42)])
    assert verdicts.current(START_S + 11) == []
    verdicts.feed(*bad(2, 41))
    assert _names(verdicts.current(START_S + 11.5)) == [("bad_data", 2)]
    everywhere = _fed([*samples, *(bad(rank, 42) for rank in range(4))])
    assert _names(everywhere.current(START_S + 11)) == [("nan", None)]


def test_a_number_that_is_looked_at_in_some_steps_alone_names_no_rank_where_several_were_finite_before() -> None:
    """As on a GPU, whose ranks write their records after other steps."""

    def told(rank: int, last_finite: int, step: int) -> tuple[int, dict[str, Any]]:
        record = {"kind": "nonfinite", "time_s": START_S + 10, "step": step, "what": "loss", "last_finite": last_finite}
        return rank, {**record, "module": None}

    samples = [(rank, {"kind": "sample", "time_s": START_S + 5}) for rank in range(4)]
    everywhere = _fed([*samples, told(0, 95, 100), *(told(rank, 96, 101) for rank in (1, 2, 3))])
    assert _names(everywhere.current(START_S + 11)) == [("nan", None)]
    first = _fed([*samples, told(0, 90, 95), *(told(rank, 96, 101) for rank in (1, 2, 3))])
    assert _names(first.current(START_S + 11)) == [("bad_data", 0)]


def test_a_host_whose_clock_is_slow_is_waited_for_all_the_same() -> None:
    record = {
        "kind": "nonfinite",
        "time_s": START_S - 30,
        "step": 42,
        "what": "loss",
        "module": None,
        "last_finite": 41,
    }
    verdicts = _fed([(rank, {"kind": "sample", "time_s": START_S + 5}) for rank in range(4)])
    assert verdicts.current(START_S + 10) == []
    verdicts.feed(0, record)
    assert verdicts.current(START_S + 11) == []
    assert _names(verdicts.current(START_S + 14)) == [("nan", None)]  # the others tell no losses


def test_a_later_nan_has_a_module_of_its_own() -> None:
    def break_down(_: int, step: int, record: dict[str, Any]) -> None:
        if step == 60:
            record.update(norm="inf", skipped=1)
        if step >= 250:
            record.update(loss="nan")

    def told(step: int, what: str, module: str) -> list[tuple[int, dict[str, Any]]]:
        record = {"kind": "nonfinite", "time_s": START_S + step / 5, "step": step, "what": what, "module": module}
        return [(rank, record) for rank in range(4)]

    extra = [*told(60, "gradient", "embedding.weight"), *told(250, "output", "head")]
    (verdict,) = FakeJob(num_steps=300, changes=(break_down,), extra=extra).verdicts()
    assert "first in module head" in verdict.text


def test_a_loss_that_falls_quickly_is_no_bad_data_where_records_come_in_batches() -> None:
    """Windows end in the middle of the batch of one rank, whose mean covers other steps than those of the others."""
    fall = changed(first_step=1, loss=lambda _, step: 3.0 * 0.5 ** (step / 24))
    for seed in range(8):
        job = FakeJob(num_ranks=4, num_hosts=1, num_steps=1500, scale=0.1, seed=seed, noise=0.05, changes=(fall,))
        draw = random.Random(seed)
        flushes = [draw.random() / 2 for _ in range(4)]
        beat = draw.random()

        def arrival_s(
            each: tuple[int | None, dict[str, Any]], flushes: list[float] = flushes, beat: float = beat
        ) -> float:
            rank, time_s = each[0], float(each[1]["time_s"])
            if rank is None:
                return time_s
            flushed_s = flushes[rank] + math.ceil(2 * (time_s - flushes[rank])) / 2
            return beat + math.ceil(flushed_s - beat)

        verdicts = Verdicts()
        records = list(job.records())
        for rank, record in sorted(records, key=lambda each: (arrival_s(each), -1 if each[0] is None else each[0])):
            verdicts.feed(rank, record)
            assert verdicts.current(arrival_s((rank, record))) == []


def test_a_loss_scale_that_was_never_larger_has_not_collapsed() -> None:
    assert FakeJob(num_steps=300, changes=(changed(first_step=1, loss_scale=1.0),)).verdicts() == []


def test_the_first_failure_is_told_with_what_was_raised() -> None:
    failure = {"kind": "rank failed", "host": "node-b", "rank": 2, "exit_code": 1, "reason": "exit code 1"}
    verdicts = _fed(
        [
            (None, {"kind": "raised", "time_s": START_S, "rank": 2, "type": "OSError", "message": "File too large\nx"}),
            (None, {"kind": "end", "time_s": START_S + 1, "exit_code": 1, "duration_s": 1.0, "failure": failure}),
        ]
    )
    (verdict,) = verdicts.current()
    assert verdict.text == "rank 2 (node-b) failed first: exit code 1; OSError: File too large"
    assert verdict.severity == "critical"


@pytest.mark.parametrize("value", [None, "text", -1, [], {}, 1e400])
def test_records_with_other_fields_are_no_error(value: object) -> None:
    job = FakeJob(2, 1, 60)
    for field in ("step", "phases", "loss", "duration_s", "memory_bytes", "num_steps", "time_s", "norm"):
        verdicts = Verdicts()
        for rank, record in job.records():
            verdicts.feed(rank, {**record, field: value} if record["kind"] == "step" else record)
        verdicts.current()


def test_ten_thousand_ranks_cost_little() -> None:
    """A record costs microseconds, and a look less than the second that it has."""
    job = FakeJob(10_000, 100, 12, scale=10.0, changes=(longer("forward", 2.0, {77}, 1),))
    verdicts, records = Verdicts(), list(job.records())
    begin_s = time.process_time()
    for rank, record in records:
        verdicts.feed(rank, record)
    per_record_s = (time.process_time() - begin_s) / len(records)
    begin_s = time.process_time()
    verdicts.current()
    look_s = time.process_time() - begin_s
    assert per_record_s < 200e-6
    assert look_s < 1.0
