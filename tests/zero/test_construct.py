"""`zero.Init`, `GatheredParameters`, and the functions that reach single parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.train.ranks import run_on_ranks
from harness.train.zoo import SAMPLES, WIDTH, Plain, batches, build, train_plain
from torch import Tensor, nn

import launcher
from launcher.base.errors import ConfigError, EngineError
from launcher.config.load import load_config
from launcher.config.policies import Place
from launcher.zero import GatheredParameters, Init, ZeroParamStatus
from launcher.zero.placement import shard_placements

STEPS = 3


def config(stage: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES // 2,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        **more,
    }


def train(engine: Any, rank: int) -> list[float]:
    losses = []
    for x, y in batches(STEPS):
        part = slice(rank * SAMPLES // 2, (rank + 1) * SAMPLES // 2)
        loss = engine(x[part], y[part])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / 2)
    return losses


# ---- Init ----


def _gathered_in_any_order(rank: int, world_size: int) -> list[bool]:
    with Init():
        model = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
    params = list(model.parameters())
    with GatheredParameters(params[:: 1 if rank == 0 else -1], modifier_rank=0):
        if rank == 0:
            for number, param in enumerate(params):
                param.data.fill_(number)
    with GatheredParameters(set(params)):
        return [bool((param == number).all()) for number, param in enumerate(params)]


def test_ranks_may_give_the_parameters_to_gather_in_different_orders() -> None:
    assert run_on_ranks(2, _gathered_in_any_order) == [[True] * 8] * 2


def _init_and_train(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(23 if rank == 0 else 99)  # rank 0's values count
    before = nn.Module.__init__  # torch.compile of an earlier test may have replaced it
    with Init(config_dict_or_path=config()):
        with Init():  # has the settings of the outer one, and what is built within it is sharded at its end
            model = Plain()
        held = [param.numel() for param in model.parameters()]
    after = sum(param.numel() for param in model.parameters())
    shapes = [tuple(param.ds_shape) for param in model.parameters()]
    kept = sum(param.ds_tensor.numel() for param in model.parameters())
    restored = nn.Module.__init__ is before
    engine = launcher.initialize(model=model, config=config())[0]
    return {
        "held": held,
        "after": after,
        "shapes": shapes,
        "kept": kept,
        "losses": train(engine, rank),
        "restored": restored,
    }


def test_a_model_built_sharded_trains_like_one_built_whole() -> None:
    reference = build("Plain")
    found = run_on_ranks(2, _init_and_train)
    assert [rank["kept"] for rank in found] == [sum(-(-param.numel() // 2) for param in reference.parameters())] * 2
    for rank in found:
        assert rank["after"] == 0
        assert sum(rank["held"]) == 0
        assert rank["shapes"] == [tuple(param.shape) for param in reference.parameters()]
        assert rank["losses"] == pytest.approx(train_plain("Plain", STEPS)[0], rel=1e-6)
        assert rank["restored"]


class _Initialized(nn.Module):
    """Sets its weights after its parts have been sharded, in the two ways models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(self.first.weight, 0.5)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Parameter(torch.ones(3))
        self.apply(self._set)

    @staticmethod
    def _set(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.bias.data.fill_(0.25)


def _initialize_weights(rank: int, world_size: int) -> dict[str, float]:
    with Init(dtype=torch.bfloat16):
        model = _Initialized()
    with GatheredParameters(model.parameters()):
        assert model.first.weight.dtype == torch.bfloat16
        return {
            name: param.float().mean().item() for name, param in model.named_parameters() if name != "second.weight"
        }


def test_weights_set_during_construction_count() -> None:
    for found in run_on_ranks(2, _initialize_weights):
        assert found == {"first.weight": 0.5, "first.bias": 0.25, "second.bias": 0.25, "own": 1.0}


def _shard_existing(rank: int, world_size: int) -> list[int]:
    model = build("Tied")
    Init(module=model)
    return [param.numel() for param in model.parameters()]


def test_an_existing_model_can_be_sharded() -> None:
    assert all(set(found) == {0} for found in run_on_ranks(2, _shard_existing))


def test_a_group_of_one_rank_in_a_job_of_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(EngineError, match=r"has one rank, and the job WORLD_SIZE=2"):
            Init()
    finally:
        dist.destroy_process_group()


def test_disabled_nothing_is_sharded() -> None:
    with Init(enabled=False):
        model = nn.Linear(3, 3)
    assert model.weight.shape == (3, 3)
    assert not hasattr(model.weight, "ds_id")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mpu": object()}, r"zero.Init\(mpu=...\) is not supported"),
        ({"remote_device": "nvme"}, 'remote_device="nvme"'),
        ({"pin_memry": True}, "no argument pin_memry"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Init(**arguments)


def _groups(rank: int, world_size: int) -> list[str]:
    everybody, alone = dist.new_group(), [dist.new_group([each]) for each in range(world_size)][rank]
    mpu: Any = type("Mpu", (), {"get_data_parallel_group": lambda _: everybody})()
    for given in ({"data_parallel_group": dist.group.WORLD}, {"data_parallel_group": everybody}, {"mpu": mpu}):
        with Init(**given):
            layer = nn.Linear(4, 4)
        assert layer.weight.numel() == 0
    said = []
    for given in ({"data_parallel_group": alone}, {"sequence_data_parallel_group": alone}):
        with pytest.raises(EngineError) as error:
            Init(**given)
        said.append(str(error.value))
    return said


def test_groups_of_all_ranks_are_accepted() -> None:
    for said in run_on_ranks(2, _groups):
        assert all("is not supported with a part of the ranks" in error for error in said)


@pytest.mark.parametrize("asked", [{"offload_param": {"device": "cpu"}}, {"cpu_offload_param": True}])
def test_init_reads_a_config_as_the_engine_does(asked: dict[str, Any]) -> None:
    placements = shard_placements(load_config({"zero_optimization": {"stage": 3, **asked}}).config, None)
    assert placements is not None
    assert placements.of_shard(1).place is Place.HOST
    with pytest.raises(ConfigError, match='did you mean "stage"'):
        Init(config_dict_or_path={"zero_optimization": {"stagee": 3, **asked}})


# ---- GatheredParameters ----


def _gather(rank: int, world_size: int) -> dict[str, Any]:
    with Init():
        model = Plain()
    weight, other = model.head.weight, model.blocks[0].scale
    facts: dict[str, Any] = {"status": [weight.ds_status]}
    with GatheredParameters([weight, None, nn.Parameter(torch.ones(1)), weight], modifier_rank=0):
        facts["status"].append(weight.ds_status)
        facts["inside"] = weight.numel()
        with GatheredParameters(p for p in (weight, other)):
            facts["both"] = other.numel()
        facts["still"] = weight.numel()  # the outer block holds it
        if rank == 0:
            weight.data.fill_(7.0)
    facts["status"].append(weight.ds_status)
    with GatheredParameters(weight):
        facts["value"] = weight.mean().item()
        weight.data.fill_(1.0)  # without a modifier rank this is forgotten
    with GatheredParameters([]), GatheredParameters(weight):
        facts["later"] = weight.mean().item()
    engine = launcher.initialize(model=model, config=config())[0]
    with GatheredParameters(weight, modifier_rank=1):
        if rank == 1:
            weight.data.fill_(3.0)
    facts["in engine"] = engine.state_dict()["head.weight"].mean().item()
    return facts


def test_parameters_are_whole_inside_and_changes_of_one_rank_count() -> None:
    status = ZeroParamStatus
    for facts in run_on_ranks(2, _gather):
        assert facts["status"] == [status.NOT_AVAILABLE, status.AVAILABLE, status.NOT_AVAILABLE]
        assert (facts["inside"], facts["both"], facts["still"]) == (WIDTH, WIDTH, WIDTH)
        assert (facts["value"], facts["later"], facts["in engine"]) == (7.0, 7.0, 3.0)


# ---- single parameters ----


def _access(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    from launcher import zero

    engine = launcher.initialize(model=build("Plain"), config=config(stage))[0]
    weight = engine.module.blocks[1].up.weight
    facts: dict[str, Any] = {"early": zero.safe_get_full_optimizer_state(weight, "exp_avg")}
    x, y = batches(1)[0]
    part = slice(rank * SAMPLES // 2, (rank + 1) * SAMPLES // 2)
    engine.backward(engine(x[part], y[part]))
    facts["grad"] = zero.safe_get_full_grad(weight)
    zero.safe_set_full_grad(weight, torch.full((2 * WIDTH, WIDTH), 0.5))
    facts["new grad"] = zero.safe_get_full_grad(weight)
    local = zero.safe_get_local_grad(weight)
    facts["local"] = 0 if local is None else local.numel()
    engine.step()
    facts["after step"] = zero.safe_get_full_grad(weight)
    facts["exp_avg"] = zero.safe_get_full_optimizer_state(weight, "exp_avg")
    zero.safe_set_full_optimizer_state(weight, torch.ones(2 * WIDTH, WIDTH), "exp_avg")
    facts["new exp_avg"] = zero.safe_get_full_optimizer_state(weight, "exp_avg")
    facts["param"] = zero.safe_get_full_fp32_param(weight)
    zero.safe_set_full_fp32_param(weight, torch.full((2 * WIDTH, WIDTH), 2.0))
    facts["new param"] = zero.safe_get_full_fp32_param(weight)
    facts["state dict"] = engine.state_dict()["blocks.1.up.weight"]
    facts["frozen"] = zero.safe_get_full_fp32_param(nn.Parameter(torch.ones(2)))
    return facts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_gradients_and_states_can_be_read_and_written(stage: int) -> None:
    model = build("Plain")
    weight = model.blocks[1].up.weight
    model(*batches(1)[0]).backward()
    found = run_on_ranks(2, _access, stage)
    for facts in found:
        assert facts["early"] is None
        assert torch.allclose(facts["grad"], weight.grad, rtol=1e-5, atol=1e-8)
        assert torch.equal(facts["new grad"], torch.full_like(weight, 0.5))
        assert torch.allclose(facts["exp_avg"], torch.full_like(weight, 0.05), rtol=1e-6)
        assert torch.equal(facts["new exp_avg"], torch.ones_like(weight))
        assert facts["after step"] is None
        assert facts["param"].shape == weight.shape
        assert torch.equal(facts["new param"], torch.full_like(weight, 2.0))
        assert torch.equal(facts["state dict"], torch.full_like(weight, 2.0))
        assert facts["frozen"] is None
    shared = sum(facts["local"] for facts in found)
    assert shared == weight.numel() * (2 if stage == 0 else 1)


def _access_local(rank: int, world_size: int) -> tuple[Tensor | None, list[str]]:
    from launcher import zero

    engine = launcher.initialize(model=build("Plain"), config=config())[0]
    weight = engine.module.head.weight
    mine = zero.safe_get_local_fp32_param(weight)
    assert mine is not None
    zero.safe_set_local_fp32_param(weight, torch.full_like(mine, float(rank + 1)))
    messages = []
    for action in (
        lambda: zero.safe_set_local_fp32_param(weight, torch.ones(1000)),
        lambda: zero.safe_set_full_grad(weight, torch.ones_like(mine)),
        lambda: zero.safe_set_full_fp32_param(nn.Parameter(torch.ones(1)), torch.ones(1)),
    ):
        try:
            action()
        except EngineError as error:
            messages.append(str(error))
    return zero.safe_get_full_fp32_param(weight), messages


def test_local_parts_and_mistakes() -> None:
    for whole, messages in run_on_ranks(2, _access_local):
        assert whole is not None
        assert set(whole.unique().tolist()) <= {1.0, 2.0}
        assert "this rank's part of head.weight has" in messages[0]
        assert "head.weight has no gradient now" in messages[1]
        assert "is not trained by an engine" in messages[2]
