"""The ladder as data: which rung is next, for which memory, and where it ends."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.load import load_config, patched
from launcher.planner.ladder import (
    DEVICE,
    EXAMPLE_NVME_PATH,
    HOST,
    PIPELINE_STANDINGS,
    STANDINGS,
    EngineFacts,
    Rung,
    Standing,
    advice_for,
    combined,
    rungs,
    standing_keys,
    standings_below,
)
from launcher.planner.settings import freed_bytes

GPU = EngineFacts(
    device="cuda", stage=0, num_shards=8, micro_batch=4, accumulation=3, follows_micro_batch=True, can_recompute=True
)
CPU = dataclasses.replace(GPU, device="cpu")


def after(facts: EngineFacts, rung: Rung) -> EngineFacts:
    """Return the facts of the engine that is built with a rung's patch."""
    keys = {"train_micro_batch_size_per_gpu": facts.micro_batch, "gradient_accumulation_steps": facts.accumulation}
    keys |= {"train_batch_size": facts.micro_batch * facts.accumulation * facts.num_shards}
    config = load_config(patched({**keys, **standing_keys(facts.standing)}, rung.patch)).config
    zero = config.zero_optimization
    assert config.train_micro_batch_size_per_gpu is not None
    assert config.gradient_accumulation_steps is not None
    assert config.train_batch_size is None or "train_batch_size" not in rung.patch
    return dataclasses.replace(
        facts,
        micro_batch=config.train_micro_batch_size_per_gpu,
        accumulation=config.gradient_accumulation_steps,
        recomputes=facts.recomputes or config.activation_checkpointing.blocks,
        stage=int(zero.stage),
        optimizer=zero.offload_optimizer.device,
        param=zero.offload_param.device,
    )


def way_down(facts: EngineFacts, memory: str = DEVICE) -> list[tuple[str, EngineFacts]]:
    """Return what each rung changes and the engine on it, from the first to the last, as `--on-oom ladder` goes."""
    found: list[tuple[str, EngineFacts]] = []
    while (rung := advice_for(memory, facts).rung) is not None:
        facts = after(facts, rung)
        found.append((rung.change, facts))
    return found


def test_a_gpu_s_way_down() -> None:
    way = way_down(GPU)
    assert [(facts.micro_batch, facts.recomputes, *facts.standing) for _, facts in way] == [
        (2, False, 0, "none", "none"),
        (1, False, 0, "none", "none"),
        (1, True, 0, "none", "none"),
        (1, True, 1, "none", "none"),
        (1, True, 2, "none", "none"),
        (1, True, 2, "cpu", "none"),
        (1, True, 3, "cpu", "none"),
        (1, True, 3, "cpu", "cpu"),
    ]
    last = way[-1][1]
    assert "needs a local folder, zero_optimization.offload_optimizer.nvme_path" in advice_for(DEVICE, last).end
    with_disk = dataclasses.replace(GPU, nvme_path="/disk")
    *_, (change, lowest) = way_down(with_disk)
    assert (change, lowest.standing) == ("optimizer and parameters → disk", Standing(3, "nvme", "nvme"))
    assert advice_for(DEVICE, last).rung is None
    assert advice_for(DEVICE, lowest).end == "the ladder ends here: more ranks, or more memory for each"
    (rung,) = rungs(dataclasses.replace(last, nvme_path="/disk"), DEVICE)
    assert rung.patch["zero_optimization"]["offload_param"] == {"device": "nvme", "nvme_path": "/disk"}


def test_many_ranks_shard_parameters_before_the_optimizer_stays_away() -> None:
    way = [each for _, each in way_down(dataclasses.replace(GPU, num_shards=64))]
    assert [each.standing for each in way[4:]] == [
        Standing(2), Standing(2, "cpu"), Standing(3), Standing(3, "cpu"), Standing(3, "cpu", "cpu"),
    ]  # fmt: skip


def test_on_a_cpu_host_memory_is_no_other_one() -> None:
    way = [facts.standing for _, facts in way_down(CPU)]
    assert way[3:] == [Standing(1), Standing(2), Standing(3)]
    assert way_down(CPU, HOST) == way_down(CPU, DEVICE)
    *_, (_, lowest) = way_down(dataclasses.replace(CPU, nvme_path="/disk"))
    assert lowest.standing == Standing(3, "nvme", "nvme")


def test_on_a_node_with_gpus_only_a_disk_relieves_its_host() -> None:
    assert rungs(GPU, HOST, "/disk") == []
    assert "fewer ranks on a host" in advice_for(HOST, GPU).end.lower()
    offloaded = dataclasses.replace(GPU, stage=2, optimizer="cpu")
    (rung,) = rungs(offloaded, HOST, "/disk")
    assert after(offloaded, rung).standing == Standing(2, "nvme")
    assert advice_for(HOST, offloaded).rung is None
    assert "nvme_path" in advice_for(HOST, offloaded).end
    (rung,) = rungs(dataclasses.replace(GPU, stage=3, optimizer="cpu", param="cpu"), HOST, "/disk")
    assert rung.change == "optimizer and parameters → disk"


def test_a_single_rank_shards_nothing() -> None:
    alone = dataclasses.replace(GPU, num_shards=1, recomputes=True, micro_batch=1)
    assert [facts.standing for _, facts in way_down(alone)] == [Standing(2, "cpu"), Standing(3, "cpu", "cpu")]


def test_a_pipeline_has_a_ladder_of_its_own() -> None:
    pipeline = dataclasses.replace(GPU, has_pipeline=True, can_recompute=False)
    way = [(facts.micro_batch, facts.standing) for _, facts in way_down(pipeline)]
    assert way == [(2, Standing(0)), (1, Standing(0)), (1, Standing(1)), (1, Standing(1, "cpu"))]


def test_an_engine_for_inference_keeps_parameters_elsewhere() -> None:
    inference = dataclasses.replace(GPU, trains=False)
    assert [facts.standing for _, facts in way_down(inference)] == [Standing(3), Standing(3, "none", "cpu")]


def test_what_a_config_or_an_optimizer_refuses_is_left_out() -> None:
    facts = dataclasses.replace(
        GPU, recomputes=True, micro_batch=1, refused=(Standing(2).text, Standing(2, "cpu").text)
    )
    assert [each.standing for _, each in way_down(facts)][:2] == [Standing(1), Standing(3)]


@given(micro=st.integers(1, 10**4), accumulation=st.integers(1, 64))
def test_the_effective_batch_stays(micro: int, accumulation: int) -> None:
    facts = dataclasses.replace(GPU, micro_batch=micro, accumulation=accumulation)
    way = [each for _, each in way_down(facts) if each.stage == 0 and not each.recomputes]
    sizes = [micro, *(each.micro_batch for each in way)]
    assert sizes[-1] == 1
    assert all(each.micro_batch * each.accumulation == micro * accumulation for each in way)
    assert all(before % size == 0 and size <= before / 2 for before, size in itertools.pairwise(sizes))


def test_a_micro_batch_that_halves_unevenly_is_divided() -> None:
    way = [each for _, each in way_down(dataclasses.replace(GPU, micro_batch=6, accumulation=2))]
    assert [(each.micro_batch, each.accumulation) for each in way[:2]] == [(3, 4), (1, 12)]


def test_a_script_that_does_not_follow_the_micro_batch_is_told_so() -> None:
    advice = advice_for(DEVICE, dataclasses.replace(GPU, follows_micro_batch=False))
    assert advice.rung is not None
    assert advice.rung.patch == {"activation_checkpointing": {"blocks": True}}
    assert advice.skipped is not None
    assert advice.skipped.change == "micro-batch 4 → 2, accumulation 3 → 6"
    assert advice.skipped.needs == "take the batch size from engine.train_micro_batch_size_per_gpu()"


def test_a_rung_that_had_no_effect_ends_the_ladder() -> None:
    rung = advice_for(DEVICE, GPU).rung
    assert rung is not None
    again = advice_for(DEVICE, GPU, [rung.patch])
    assert again.rung is None
    assert "its last rung had no effect (micro-batch 4 → 2, accumulation 3 → 6)" in again.end
    assert not advice_for(DEVICE, None).has_ladder


def test_patches_add_up() -> None:
    config = {
        "train_batch_size": 96,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "overlap_comm": True},
    }
    first = {"train_batch_size": None, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    second = {"zero_optimization": {"stage": 3}, "bf16": None, "gradient_clipping": 2}
    assert patched(config, combined(first, second)) == patched(patched(config, first), second)


def test_facts_survive_json_and_nothing_else_does() -> None:
    facts = dataclasses.replace(GPU, nvme_path="/disk", num_params=7, refused=("stage 2",))
    read = EngineFacts.from_json(json.loads(json.dumps(dataclasses.asdict(facts))))
    assert read is not None
    assert dataclasses.replace(read, refused=tuple(read.refused)) == facts


@pytest.mark.parametrize(
    "change",
    [{"stage": "0"}, {"micro_batch": 0}, {"micro_batch": True}, {"optimizer": "moon"}, {"nvme_path": 3}, {"device": 1}],
)
def test_facts_that_no_engine_wrote_are_none(change: dict[str, Any]) -> None:
    assert EngineFacts.from_json({**dataclasses.asdict(GPU), **change}) is None
    assert EngineFacts.from_json({"stage": 1}) is None
    assert EngineFacts.from_json(None) is None


def test_standings_below_one_need_less_of_everything() -> None:
    assert standings_below(Standing(2)) == [
        Standing(2, "cpu"),
        Standing(3),
        Standing(3, "cpu"),
        Standing(3, "cpu", "cpu"),
        Standing(3, "nvme", "nvme"),
    ]
    assert standings_below(Standing(3, "nvme", "nvme")) == []
    assert standings_below(Standing(0), PIPELINE_STANDINGS) == [Standing(1), Standing(1, "cpu")]


@pytest.mark.parametrize("standing", STANDINGS[1:])
def test_the_keys_of_a_standing_are_a_config_of_it(standing: Standing) -> None:
    zero = load_config(standing_keys(standing)).config.zero_optimization
    assert (zero.stage, zero.offload_optimizer.device, zero.offload_param.device) == standing
    assert EXAMPLE_NVME_PATH in json.dumps(standing_keys(standing)) or "nvme" not in standing


def test_what_a_rung_frees_is_the_planner_s_formula() -> None:
    facts = dataclasses.replace(GPU, num_shards=4, num_params=10**6, precision="bf16", optimizer_type="AdamW")
    assert freed_bytes(facts, standing_keys(Standing(1))) == 12 * 10**6 * 3 // 4
    assert freed_bytes(dataclasses.replace(facts, stage=1), standing_keys(Standing(2))) == 4 * 10**6 * 3 // 4
    assert freed_bytes(facts, {"activation_checkpointing": {"blocks": True}}) is None
    assert freed_bytes(dataclasses.replace(facts, num_params=None), standing_keys(Standing(1))) is None
