"""Elasticity: what the chosen batch promises, against brute force, and how a config, the engine and commands use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from launcher.base.errors import ConfigError
from launcher.cli.commands.config import config_group
from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.elastic import ElasticBatch, ElasticRules, elastic_batch, elastic_batch_of, highly_composite
from launcher.config.load import load_config

rules_of_any_kind = st.builds(
    ElasticRules,
    max_train_batch_size=st.integers(1, 3000),
    micro_batch_sizes=st.lists(st.integers(1, 24), min_size=1, max_size=4).map(tuple),
    min_gpus=st.integers(1, 8),
    max_gpus=st.integers(1, 200),
    prefer_larger_batch=st.booleans(),
    version=st.sampled_from([0.1, 0.2]),
    num_gpus_per_node=st.sampled_from([1, 2, 4, 8]),
    model_parallel_size=st.sampled_from([1, 1, 2, 4]),
)


def batch_or_none(rules: ElasticRules) -> ElasticBatch | None:
    try:
        return elastic_batch(rules)
    except ConfigError as error:
        (problem,) = error.diagnostics
        assert problem.hint
        assert str(problem.where).startswith("elasticity.")
        return None


def section(**more: Any) -> dict[str, Any]:
    return {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3], **more}


# ---- the arithmetic ----


def test_highly_composite_numbers_are_the_records_of_the_divisor_count() -> None:
    limit = 60_000
    counts = [0] * (limit + 1)
    for divisor in range(1, limit + 1):
        for multiple in range(divisor, limit + 1, divisor):
            counts[multiple] += 1
    records, most = [], 0
    for number in range(1, limit + 1):
        if counts[number] > most:
            records.append(number)
            most = counts[number]
    assert [number for number in highly_composite() if number <= limit] == records
    assert highly_composite()[-1] == 720_720


def test_a_case_worked_out_by_hand() -> None:
    """lcm(2, 3) = 6 and 6 × 2 = 12; 12 / 2 has the divisors 1 2 3 6, 12 / 3 has 1 2 4."""
    batch = elastic_batch(ElasticRules(12, (2, 3)))
    assert (batch.train_batch_size, batch.world_sizes) == (12, (1, 2, 3, 4, 6))
    assert [batch.plan_for(size).sizes for size in batch.world_sizes] == [
        (12, 3, 4),
        (12, 3, 2),
        (12, 2, 2),
        (12, 3, 1),
        (12, 2, 1),
    ]


def test_the_case_of_many_configs() -> None:
    """DeepSpeed's documented example: 816, the least common multiple, times 12."""
    batch = elastic_batch(ElasticRules(10_000, (8, 12, 16, 17), min_gpus=32, max_gpus=1500, version=0.1))
    assert batch.train_batch_size == 9792
    assert len(batch.world_sizes) == 23


@given(rules_of_any_kind)
def test_every_valid_world_divides_the_batch_as_promised(rules: ElasticRules) -> None:
    batch = batch_or_none(rules)
    assume(batch is not None)
    assert batch is not None
    assert batch.train_batch_size <= rules.max_train_batch_size
    assert list(batch.world_sizes) == sorted(set(batch.world_sizes))
    for size in batch.world_sizes:
        assert rules.min_gpus <= size <= rules.max_gpus
        plan = batch.plan_for(size)
        assert plan.world_size * rules.model_parallel_size == size
        assert plan.train_batch_size == batch.train_batch_size
        assert plan.micro_batch_size * plan.accumulation_steps * plan.world_size == batch.train_batch_size
        assert plan.micro_batch_size in rules.micro_batch_sizes
        if rules.version == 0.2:
            assert size % rules.num_gpus_per_node == 0
    assert elastic_batch(rules) == batch


@given(rules_of_any_kind)
@settings(max_examples=50)
def test_valid_worlds_are_all_there_are(rules: ElasticRules) -> None:
    """Try every world by the definition alone."""
    batch = batch_or_none(rules)
    assume(batch is not None)
    assert batch is not None
    step = rules.num_gpus_per_node if rules.version == 0.2 else 1
    fitting = [
        size
        for size in range(step, rules.max_gpus + 1, step)
        if size >= rules.min_gpus
        and any(
            batch.train_batch_size * rules.model_parallel_size % (micro * size) == 0
            # A node's copies are one factor of the batch; a micro-batch must divide the rest.
            and batch.train_batch_size // max(1, step // rules.model_parallel_size) % micro == 0
            for micro in rules.micro_batch_sizes
        )
    ]
    assert list(batch.world_sizes) == fitting


@given(rules_of_any_kind, st.integers(1, 3000))
@settings(max_examples=50)
def test_no_micro_batch_alone_fits_more_worlds(rules: ElasticRules, more: int) -> None:
    """Each candidate is at most as good as the chosen batch: among them each micro-batch by any scale of its own."""
    batch = batch_or_none(rules)
    assume(batch is not None and rules.version == 0.1)
    assert batch is not None
    for micro in rules.micro_batch_sizes:
        scale = max(number for number in highly_composite() if number <= rules.max_train_batch_size // micro)
        worlds = {
            size
            for size in range(rules.min_gpus, rules.max_gpus + 1)
            if any(micro * scale % (other * size) == 0 for other in rules.micro_batch_sizes)
        }
        assert len(worlds) <= len(batch.world_sizes)
        if len(worlds) == len(batch.world_sizes):
            assert (micro * scale <= batch.train_batch_size) or not rules.prefer_larger_batch
            assert (micro * scale >= batch.train_batch_size) or rules.prefer_larger_batch


@given(rules_of_any_kind)
def test_the_order_and_repetition_of_micro_batches_change_nothing(rules: ElasticRules) -> None:
    shuffled = ElasticRules(
        **{**vars(rules), "micro_batch_sizes": (*reversed(rules.micro_batch_sizes), rules.micro_batch_sizes[0])}
    )
    first, second = batch_or_none(rules), batch_or_none(shuffled)
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert (first.train_batch_size, first.world_sizes) == (second.train_batch_size, second.world_sizes)


@given(rules_of_any_kind)
def test_a_larger_range_of_worlds_never_fits_fewer(rules: ElasticRules) -> None:
    batch = batch_or_none(rules)
    assume(batch is not None)
    assert batch is not None
    wider = elastic_batch(ElasticRules(**{**vars(rules), "min_gpus": 1, "max_gpus": rules.max_gpus + 50}))
    assert len(wider.world_sizes) >= len(batch.world_sizes)


def test_whole_nodes() -> None:
    batch = elastic_batch(ElasticRules(96, (2, 3), num_gpus_per_node=8, max_gpus=64))
    assert batch.train_batch_size == 96
    assert batch.world_sizes == (8, 16, 24, 32, 48)
    halves = elastic_batch(ElasticRules(96, (2, 3), num_gpus_per_node=8, max_gpus=64, model_parallel_size=2))
    assert all(size % 8 == 0 for size in halves.world_sizes)
    assert halves.plan_for(8).world_size == 4


def test_equal_candidates_are_told_apart_by_preference() -> None:
    larger, smaller = (
        elastic_batch(ElasticRules(9, (3, 4), max_gpus=2, prefer_larger_batch=prefer)) for prefer in (True, False)
    )
    assert (larger.train_batch_size, smaller.train_batch_size) == (8, 6)
    assert larger.world_sizes == smaller.world_sizes == (1, 2)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (ElasticRules(4, (2, 6)), "micro-batch 6 is over max_train_batch_size 4; remove it, or raise"),
        (
            ElasticRules(40, (2, 6), num_gpus_per_node=8),
            "elasticity.micro_batch_sizes: micro-batch 6 × 8 (a node) is over max_train_batch_size 40",
        ),
        (ElasticRules(40, ()), "no micro-batch to choose from; such as"),
        (ElasticRules(40, (2,), min_gpus=9, max_gpus=8), "elasticity.min_gpus: 9 is over max_gpus 8; lower it"),
        (ElasticRules(40, (2,), max_gpus=10**6), "elasticity.max_gpus: more than 100000 ranks"),
        (ElasticRules(40, (2,), version=0.3), "elasticity.version: 0.3 is not a known version; use 0.2"),
        (ElasticRules(40, (2,), version=0.1, model_parallel_size=2), "more than 1 needs version 0.2"),
        (
            ElasticRules(40, (2,), num_gpus_per_node=3, model_parallel_size=2),
            "3 is not a multiple of model_parallel_size",
        ),
        (ElasticRules(40, (2,), min_gpus=21), "no world of 21 to 10000 ranks fits a batch of at most 40; raise"),
        (ElasticRules(400, (2,), min_gpus=1, max_gpus=3, num_gpus_per_node=4), "ranks in whole nodes of 4 fits"),
    ],
)
def test_rules_that_cannot_be_kept(rules: ElasticRules, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        elastic_batch(rules)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("world_size", "near"), [(5, "the nearest that fit: 4 and 6"), (7, "the nearest that fit: 6"), (1000, ": 6")]
)
def test_a_world_that_does_not_fit_names_the_nearest_that_do(world_size: int, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        elastic_batch(ElasticRules(12, (2, 3))).plan_for(world_size)
    assert f"world size {world_size} does not fit the elastic batch 12" in str(caught.value)
    assert str(caught.value).endswith(near)


# ---- in a config ----


def errors_of(data: dict[str, Any], world_size: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(data, world_size=world_size)
    return [str(diagnostic) for diagnostic in caught.value.diagnostics]


def test_the_batch_keys_come_from_it_and_the_reason_is_said() -> None:
    loaded = load_config({"elasticity": section()}, world_size=3)
    assert loaded.notices == ()
    config, choices = resolve_auto(loaded.config, AutoFacts(world_size=3))
    assert config.train_batch_size == 12
    assert config.train_micro_batch_size_per_gpu == 2
    assert config.gradient_accumulation_steps == 2
    assert {choice.reason for choice in choices} == {"elasticity: the batch fits 5 world sizes from 1 to 6"}


def test_sizes_that_are_auto_are_its_to_decide() -> None:
    loaded = load_config({"elasticity": section(prefer_larger_batch="auto"), "train_batch_size": "auto"})
    config, choices = resolve_auto(loaded.config, AutoFacts(world_size=4, micro_batch_size=1))
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (12, 3)
    assert [choice.key for choice in choices].count("train_batch_size") == 1


def test_batch_keys_beside_it_are_an_error_or_without_effect() -> None:
    data = {"elasticity": section(), "train_batch_size": 7, "gradient_accumulation_steps": 2}
    found = errors_of(data)
    assert len(found) == 2
    assert all("elasticity decides it; remove it, or set elasticity.ignore_non" in line for line in found)
    loaded = load_config({**data, "elasticity": section(ignore_non_elastic_batch_info=True)}, world_size=4)
    assert [notice.message for notice in loaded.notices] == [
        "train_batch_size 7 has no effect: elasticity decides it",
        "gradient_accumulation_steps 2 has no effect: elasticity decides it",
    ]
    assert resolve_auto(loaded.config, AutoFacts(world_size=4))[0].train_batch_size == 12


def test_a_section_that_is_off_leaves_the_batch_keys_alone() -> None:
    config = load_config({"elasticity": section(enabled=False), "train_batch_size": 7}, world_size=7).config
    assert elastic_batch_of(config) is None
    assert resolve_auto(config, AutoFacts(world_size=7))[0].train_batch_size == 7


@pytest.mark.parametrize(
    ("more", "world_size", "expected"),
    [
        ({}, 5, "world size 5 does not fit the elastic batch 12; the nearest that fit: 4 and 6"),
        ({"version": 3}, None, "elasticity.version: 3 is not a known version; use 0.2, or 0.1"),
        ({"micro_batch_sizes": []}, None, "elasticity.micro_batch_sizes: no micro-batch to choose from"),
        ({"model_parallel_size": 2}, None, "elasticity.model_parallel_size 2 is not supported; elasticity counts"),
        ({"max_train_batch_size": 10**300}, 17, "world size 17 does not fit the elastic batch 4324320"),
    ],
)
def test_what_is_wrong_in_the_section(more: dict[str, Any], world_size: int | None, expected: str) -> None:
    found = errors_of({"elasticity": section(**more)}, world_size)
    assert any(expected in line for line in found), found


def test_the_largest_batch_and_the_micro_batches_must_be_given() -> None:
    assert errors_of({"elasticity": {"enabled": True}}) == [
        'config: elasticity: "max_train_batch_size" is missing; add "max_train_batch_size" to the section'
    ]


def test_keys_without_effect_are_reported() -> None:
    notices = load_config({"elasticity": section(min_time=20, version=0.1, num_gpus_per_node=4)}).notices
    assert [notice.message for notice in notices] == [
        "elasticity.min_time 20 has no effect: no world is timed",
        "elasticity.num_gpus_per_node has no effect: version 0.1 counts ranks",
    ]


# ---- on the command line ----


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"elasticity": section()}, indent=1))
    return str(path)


def test_config_check_checks_the_world_size(file: str) -> None:
    good = CliRunner().invoke(config_group, ["check", file, "--world-size", "4"])
    assert (good.exit_code, good.output) == (0, f"✓ {file}: ok\n")
    bad = CliRunner().invoke(config_group, ["check", file, "--world-size", "5"])
    assert bad.exit_code == 2
    assert f"✗ {file}:2:16: world size 5 does not fit" in bad.output


def test_config_elastic_shows_every_world(file: str) -> None:
    lines = CliRunner().invoke(config_group, ["elastic", file]).output.splitlines()
    assert lines[0] == f"{file}: batch 12 fits 5 world sizes from 1 to 6"
    assert [line.split() for line in lines[2:]] == [
        ["1", "3", "4"],
        ["2", "3", "2"],
        ["3", "2", "2"],
        ["4", "3", "1"],
        ["6", "2", "1"],
    ]
    found = json.loads(CliRunner().invoke(config_group, ["elastic", file, "--json"]).output)
    assert found["train_batch_size"] == 12
    assert found["worlds"][2] == {
        "world_size": 3,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
    }


def test_config_elastic_of_a_config_without_it(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{}")
    result = CliRunner().invoke(config_group, ["elastic", str(path)])
    assert isinstance(result.exception, ConfigError)
    assert "elasticity is off" in str(result.exception)
