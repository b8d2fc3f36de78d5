"""What scripts for DeepSpeed read and call on an engine and its optimizer."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from harness.train.parity import weight_distance
from harness.train.ranks import run_on_ranks
from harness.train.zoo import LR, WEIGHT_DECAY, batches, build, engine_of, train_plain
from torch import Tensor

import launcher
from launcher.base.errors import EngineError
from launcher.compat.optimizers import DeepSpeedCPUAdam, FusedAdam

STEPS = 3


def _own(rank: int, world_size: int, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    return [tensor.chunk(world_size)[rank] for tensor in batch]


# ---- the optimizer ----


def _look(rank: int, world_size: int, stage: int) -> None:
    engine = engine_of(build("Plain"), stage, world_size)
    optimizer = engine.optimizer
    assert optimizer.averaged_gradients == {}
    engine.backward(engine(*_own(rank, world_size, batches(1)[0])))
    [gradients] = optimizer.averaged_gradients.values()
    whole = torch.stack(
        [launcher.zero.safe_get_full_grad(param).square().sum() for param in engine.module.parameters()]
    )
    own = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    if stage and world_size > 1:
        torch.distributed.all_reduce(own)
    torch.testing.assert_close(own, whole.sum())
    partitions = optimizer.get_fp32_grad_partitions()
    assert {group: list(found) for group, found in partitions.items()} == {0: list(range(len(gradients)))}
    assert optimizer._global_grad_norm == 0.0
    engine.step()
    assert optimizer._global_grad_norm == engine.get_global_grad_norm() > 0.0
    masters = optimizer.fp32_partitioned_groups_flat
    assert (
        sum(master.numel() for master in masters) >= sum(p.numel() for p in build("Plain").parameters()) // world_size
    )
    assert {master.dtype for master in masters} == {torch.float32}
    assert [param for group in optimizer.bit16_groups for param in group] == list(engine.module.parameters())
    param, state = next(iter(optimizer.optimizer.state.items()))  # of those that this rank has a part of
    assert state.keys() == optimizer.state[param].keys() >= {"step", "exp_avg", "exp_avg_sq"}
    if stage == 0:
        assert state["exp_avg"].shape == param.shape
    assert optimizer.optimizer.param_groups[0]["lr"] == LR
    assert not optimizer.needs_scaler()


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 1)])
def test_what_an_optimizer_shows(stage: int, world_size: int) -> None:
    run_on_ranks(world_size, _look, stage)


def _write(rank: int, world_size: int, zero: dict[str, Any], num_passes: int) -> tuple[dict[str, Tensor], list[float]]:
    """Train with gradients that a script has divided by 3 before each step, and that are clipped after."""
    more = {"gradient_clipping": 0.05, "gradient_accumulation_steps": num_passes}
    engine = engine_of(build("Plain"), 0, num_passes * world_size, zero_optimization=zero, **more)
    norms = []
    for batch in batches(STEPS):
        own = _own(rank, world_size, batch)
        for number in range(num_passes):
            engine.backward(engine(*(tensor.chunk(num_passes)[number] for tensor in own)))
            if number + 1 < num_passes:
                for gradients in engine.optimizer.averaged_gradients.values():
                    assert zero["stage"] > 1 or not gradients
                engine.step()
        held = engine.optimizer.averaged_gradients[0]
        with mock.patch.object(engine._layer_ranks, "check_gradients", side_effect=RuntimeError("no step")):
            for gradient in held:
                gradient.div_(6)
            with pytest.raises(RuntimeError, match="no step"):
                engine.step()
        for gradient in held:  # after a step that took what was written before
            gradient.mul_(2)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return engine.state_dict(), norms


@pytest.mark.parametrize("num_passes", [1, 2])
@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_written_into_the_summed_gradients_counts(stage: int, device: str, num_passes: int) -> None:
    if stage == 0 and device == "cpu":
        pytest.skip("nothing is offloaded at stage 0")
    model = build("Plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    expected = []
    for batch in batches(STEPS):
        model(*batch).backward()
        for param in model.parameters():
            param.grad.div_(3)  # type: ignore[union-attr]
        expected.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": device}}
    for weights, norms in run_on_ranks(2, _write, zero, num_passes):
        assert norms == pytest.approx(expected, rel=1e-4)
        assert weight_distance(weights, dict(model.state_dict())) <= 2e-6


def test_the_base_optimizer_is_the_clients_or_of_the_configs_class() -> None:
    model = build("Plain")
    client = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"train_batch_size": 8, "steps_per_print": 0}
    engine, optimizer, *_ = launcher.initialize(model=model, optimizer=client, config=config)
    assert engine.basic_optimizer is optimizer.optimizer is client
    launcher.initialize(model=model, optimizer=client, config=config)  # what it showed is no state of its own
    assert isinstance(engine_of(build("Plain"), 0, 1).optimizer, FusedAdam)  # DeepSpeed wraps none there
    by_name = engine_of(build("Plain"), 2, 1).optimizer.optimizer
    assert isinstance(by_name, torch.optim.AdamW)
    assert isinstance(by_name, FusedAdam)
    assert not isinstance(by_name, DeepSpeedCPUAdam)
    assert by_name.adam_w_mode
    with pytest.raises(EngineError, match=r"call engine\.step\(\)"):
        by_name.step()
    offloaded = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    on_host = engine_of(build("Plain"), 2, 1, zero_optimization=offloaded).optimizer.optimizer
    assert isinstance(on_host, DeepSpeedCPUAdam)
    assert not isinstance(engine_of(build("Plain"), 1, 1).optimizer, FusedAdam)


def test_a_state_of_torchs_form_goes_both_ways() -> None:
    model = build("Plain")
    plain = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    engine = engine_of(build("Plain"), 0, 1)
    data = batches(2 * STEPS)
    for batch in data[:STEPS]:
        engine(*batch).backward()
        engine.step()
    state = engine.optimizer.state_dict()
    model.load_state_dict(engine.state_dict())
    plain.load_state_dict({"state": state["state"], "param_groups": state["param_groups"]})
    other = engine_of(build("Plain"), 0, 1)
    other.load_state_dict(engine.state_dict())
    other.optimizer.load_state_dict(plain.state_dict())
    for batch in data[STEPS:]:
        for trained, optimizer in ((model, plain), (other, other.optimizer)):
            trained(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert weight_distance(other.state_dict(), dict(model.state_dict())) <= 2e-6


def test_a_loss_scale_by_deepspeeds_names() -> None:
    fp16: dict[str, Any] = {"enabled": True, "loss_scale": 8.0}
    optimizer = engine_of(build("Plain"), 1, 1, fp16=fp16, gradient_clipping=1.0).optimizer
    assert optimizer.needs_scaler()
    assert optimizer.loss_scaler.cur_scale == optimizer.loss_scaler.loss_scale == 8.0
    assert optimizer.loss_scale_config.cur_scale == 8.0
    assert not optimizer.loss_scaler.dynamic
    gradients = [torch.full((4,), 16.0)]  # of norm 32: 4 without the scale
    optimizer.unscale_and_clip_grads(gradients, 32.0)
    torch.testing.assert_close(gradients[0].norm(), torch.tensor(1.0))


# ---- the engine ----


def _coalesce(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    engine = engine_of(build("Plain"), stage, world_size)
    for batch in batches(STEPS):
        x, y = _own(rank, world_size, batch)
        with engine.coalesce_grad_reduction():
            for part in range(2):
                engine.backward(engine(x.chunk(2)[part], y.chunk(2)[part]) / 2)
            with pytest.raises(EngineError, match="within no_sync"):
                engine.step()
            with pytest.raises(AssertionError, match="nested in another"), engine.coalesce_grad_reduction():
                pass
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backward_passes_of_one_block_are_one_step(stage: int) -> None:
    for weights in run_on_ranks(2, _coalesce, stage):
        assert weight_distance(weights, train_plain("Plain", STEPS)[1]) <= 2e-6


def test_where_a_block_cannot_be() -> None:
    with (
        pytest.raises(NotImplementedError, match="ZeRO stage"),
        engine_of(build("Plain"), 0, 1).coalesce_grad_reduction(),
    ):
        pass
    engine = engine_of(build("Plain"), 2, 1, managed_gradient_accumulation=False)
    with pytest.raises(AssertionError, match="coalesce_grad_reduction"), engine.coalesce_grad_reduction():
        pass
    with pytest.raises(AssertionError, match="set_gradient_accumulation_boundary"):
        engine.set_gradient_accumulation_boundary(True)


def test_samples_without_managed_accumulation_are_those_that_went_back() -> None:
    engine = engine_of(build("Plain"), 2, 1, managed_gradient_accumulation=False, gradient_accumulation_steps=4)
    for num_micro_batches in (2, 5):
        for batch in batches(num_micro_batches):
            engine.backward(engine(*batch))
        engine.step()
    assert (engine.global_steps, engine.global_samples) == (2, 7 * engine.train_micro_batch_size_per_gpu())


def _empty(rank: int, world_size: int) -> dict[str, Tensor]:
    engine = engine_of(build("Plain"), 3, world_size)
    for batch in batches(STEPS):
        loss = engine(*_own(rank, world_size, batch))
        engine.empty_partition_cache()
        assert all(param.numel() == 0 for param in engine.module.parameters())
        loss.backward()
        engine.step()
    return engine.state_dict()


def test_the_cache_of_partitions_can_be_emptied_at_any_time() -> None:
    for weights in run_on_ranks(2, _empty):
        assert weight_distance(weights, train_plain("Plain", STEPS)[1]) <= 2e-6


def test_getters_of_an_engine() -> None:
    engine = engine_of(build("Plain"), 2, 1, log_level="info")
    assert engine.managed_gradient_accumulation() is True
    assert engine.log_level() == "info"
    assert engine.seq_parallel_group is None
    assert engine.checkpoint_mp_rank == 0
    assert engine._get_optimizer_ckpt_name("folder", "tag", 1) == "folder/tag/expp_rank_1_mp_rank_00_optim_states.pt"
    timer = engine.tput_timer
    assert timer.batch_size == engine.train_batch_size()
    for _ in range(4):
        engine.backward(engine(*batches(1)[0]))
        engine.step()
    assert (timer.micro_step_count, timer.global_step_count) == (4, 4)
    assert timer.avg_samples_per_sec() > 0
