"""Trials of settings: the largest micro-batch by as few as there can be, what ranks report, what times teach."""

from __future__ import annotations

import bisect
import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.planner.tuning import (
    ConfigFacts,
    Factors,
    Outcome,
    RankTrial,
    Trial,
    best,
    is_followed,
    learned,
    micro_batches,
    most_trials,
    outcome_of,
    reports_in,
    with_micro_batch,
)

FACTS = ConfigFacts(1, "none", "none", 4, 6, 2, has_pipeline=False, keeps_batch=True)
TRIAL = Trial("stage 1", {}, 4, 6)
SECONDS = st.just(0.0) | st.floats(1e-3, 5)
RANK = RankTrial(0, 0, "node-a", "cpu", FACTS, [0.2, 0.1, 0.3], 100, has_loader=False, input_shape=[4, 16])


# ---- the largest micro-batch ----


@given(st.integers(0, 5000))
def test_halving_takes_no_more_trials_than_is_said(count: int) -> None:
    for largest in {0, 1, count // 3, count // 2, count - 1, count}:
        tried: list[int] = []
        place = bisect.bisect_left(range(count), True, key=lambda size: bool(tried.append(size)) or size >= largest)
        assert place == min(max(largest, 0), count)
        assert len(tried) <= most_trials(count) == math.ceil(math.log2(count + 1))


@given(st.integers(1, 3000), st.integers(1, 200))
def test_divisors_keep_the_batch_exactly(samples: int, most: int) -> None:
    facts = replace(FACTS, micro_batch=1, accumulation=samples)
    sizes = micro_batches(most, samples)
    assert sizes == [size for size in range(1, most + 1) if samples % size == 0]
    for size in sizes:
        keys, accumulation = with_micro_batch(size, facts)
        assert size * accumulation == samples
        assert keys == {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": accumulation}


def test_a_config_without_a_batch_keeps_its_accumulation() -> None:
    assert micro_batches(5, None) == [1, 2, 3, 4, 5]
    assert with_micro_batch(5, replace(FACTS, keeps_batch=False))[1] == 6


# ---- what ranks report ----


def test_reports_are_found_among_whatever_a_script_prints() -> None:
    other = replace(RANK, rank=1, facts=None, oom_phase="backward", reserved_bytes=7)
    cut = RANK.as_line()[:-9]
    texts = [f"step 1\n{other.as_line()}\nbye", f"no line end\n{RANK.as_line()}\n@launch-trial of mine\n{cut}"]
    assert reports_in(texts) == [RANK, other]


def test_the_slowest_rank_of_each_step_counts() -> None:
    other = replace(RANK, rank=1, steps_s=[0.1, 0.4, 0.1], peak_bytes=300)
    assert outcome_of(TRIAL, [RANK, other]) == Outcome(TRIAL, 0.3, 300)
    assert outcome_of(TRIAL, [replace(RANK, steps_s=[])]).step_s is None


def test_a_rank_without_memory_comes_before_what_it_has_done_to_others() -> None:
    found = outcome_of(TRIAL, [replace(RANK, refused="a peer has gone"), replace(RANK, rank=1, oom_phase="step")])
    assert (found.oom_phase, found.refused, found.step_s) == ("step", None, None)


@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        ([8, 16], {}, True),
        ([4, 16], {}, False),
        ([4, 32], {}, True),  # samples are columns
        (None, {}, None),
        ([4, 16], {"has_loader": True}, True),
    ],
)
def test_a_script_follows_if_a_dimension_grows_as_the_micro_batch(
    shape: list[int] | None, changes: dict[str, bool], expected: bool | None
) -> None:
    twice = replace(RANK, facts=replace(FACTS, micro_batch=8), input_shape=shape, **changes)
    assert is_followed(RANK, twice) is expected


def test_nothing_is_recommended_that_is_not_clearly_quicker() -> None:
    own = Outcome(TRIAL, 1.0)
    slower, same, quicker = (Outcome(replace(TRIAL, label=str(time)), time) for time in (2.0, 0.99, 0.9))
    assert best([own, slower, same], 2) is own
    assert best([own, slower, quicker, same], 2) is quicker
    assert best([Outcome(TRIAL, oom_phase="forward"), slower], 2) is slower
    assert best([Outcome(TRIAL, oom_phase="forward")], 2) is None
    more = Outcome(replace(TRIAL, micro_batch=16), 2.0)
    assert best([own, more], 2) is more, "samples a second count"
    assert own.samples_per_s(2) == 48


# ---- what times teach ----


def measured(parts: dict[str, float], step_s: float | None) -> Outcome:
    return Outcome(replace(TRIAL, parts=parts), step_s)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_factors_are_found_where_the_outcomes_determine_them(factors: list[float], rng: random.Random) -> None:
    """One outcome is mostly of each part, and one is of all: no part is hidden by the others."""
    names = [f"part {place}" for place in range(len(factors))]
    rows = [{name: (10.0 if name == large else 1.0) + rng.random() for name in names} for large in (*names, "none")]
    outcomes = [measured(row, sum(f * s for f, s in zip(factors, row.values(), strict=True))) for row in rows]
    found = learned(outcomes, "now")
    assert found is not None
    assert found.num_outcomes == len(rows)
    for outcome in outcomes:
        assert found.seconds(outcome.trial.parts) == pytest.approx(outcome.step_s, rel=1e-3)
    if len(factors) > 1:
        assert [found.by_part[name] for name in names] == pytest.approx(factors, rel=1e-2, abs=1e-2)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, st.floats(0.1, 10)), min_size=1, max_size=8))
def test_no_factor_is_negative_and_none_fits_worse_than_one_for_all(rows: list[tuple[float, ...]]) -> None:
    outcomes = [measured(dict(zip("abc", row[:3], strict=True)), row[3]) for row in rows]
    found = learned(outcomes, "now")
    if found is None:
        assert all(sum(row[:3]) == 0 for row in rows)
        return
    assert found.common > 0
    assert all(value >= 0 for value in found.by_part.values())

    def error(factors: Factors) -> float:
        known = [each for each in outcomes if sum(each.trial.parts.values()) > 0]
        return sum((factors.seconds(each.trial.parts) / (each.step_s or 1.0) - 1) ** 2 for each in known)

    assert error(found) <= error(replace(found, by_part={})) + 1e-6


def test_few_outcomes_or_such_as_are_alike_give_one_factor() -> None:
    two = [measured({"compute": 1.0, "update": 1.0}, 4.0), measured({"compute": 2.0, "update": 1.0}, 6.0)]
    found = learned([*two, measured({}, 9.0), measured({"compute": 1.0}, None)], "now")
    assert found is not None
    assert (found.by_part, found.common) == ({}, pytest.approx(2.0))
    alike = learned([measured({"compute": size, "update": 2 * size}, 9 * size) for size in (1.0, 2.0, 3.0)], "now")
    assert alike is not None
    assert (alike.by_part, alike.common) == ({}, pytest.approx(3.0))
    assert learned([measured({}, 1.0)], "now") is None
    assert Factors.from_json(json.dumps(found.as_json())) == found
