"""`engine.offload_states()` frees memory, training continues with the same bits, and freed memory is never read.

On CPUs all states are in host memory already and stay. Here they move nevertheless: host memory is taken for a device.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness.train.checkpoint_runs import config, make_engine, train
from harness.train.ranks import run_on_ranks
from torch import nn

import launcher.zero
from launcher.base.errors import EngineError
from launcher.engine.engine import Engine
from launcher.engine.sharded import StateKind
from launcher.zero.host_copy import HostCopy
from launcher.zero.unit import unit_of

BF16 = {"bf16": {"enabled": True}}
CASES = [(0, {}), (1, BF16), (2, BF16), (3, BF16), (3, {})]


def _weights(engine: Any) -> list[torch.Tensor]:
    found = [launcher.zero.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    return [weight for weight in found if weight is not None]


def _tensors(engine: Any) -> dict[str, list[torch.Tensor]]:
    """Return by kind what an engine keeps between steps."""
    units = {id(unit): unit for param in engine.module.parameters() if (unit := unit_of(param)) is not None}.values()
    return {
        "optim_states": [state for unit in units for state in unit.state_tensors()],
        "hp_params": [unit.params.master for unit in units if unit.params.master is not unit.params.shard],
        "lp_params": [unit.params.shard for unit in units],
        "lp_grads": [unit.grads.owned_grad for unit in units if unit.grads is not None],
    }


def _bytes(engine: Any) -> dict[str, int]:
    found = _tensors(engine)
    return {kind: sum(each.untyped_storage().nbytes() for each in tensors) for kind, tensors in found.items()}


def _error(call: Any) -> str:
    with pytest.raises(EngineError) as caught:
        call()
    return str(caught.value)


def _moved(rank: int, world_size: int, stage: int, more: dict[str, Any], folder: str) -> None:
    plain = make_engine(world_size, stage, **more)
    expected = train(plain, 5)
    wanted = _weights(plain)
    engine = make_engine(world_size, stage, **more)
    with patch("launcher.engine.sharded.is_in_host_memory", lambda _: False):
        losses = train(engine, 2)
        before, weights, values = _bytes(engine), _weights(engine), [p.detach().clone() for p in engine.parameters()]
        assert all(before[kind] for kind in ("optim_states", "lp_params", "lp_grads"))

        # Everything but the parameters, as between training and generation: a forward works, a backward does not.
        engine.offload_states(include=[kind for kind in StateKind if kind is not StateKind.lp_params])
        free = _bytes(engine)
        assert free == {"optim_states": 0, "hp_params": 0, "lp_params": before["lp_params"], "lp_grads": 0}
        x = torch.randn(2, 7, dtype=next(engine.module.parameters()).dtype)
        loss = engine(x, x)
        assert "has moved contiguous_grad_buffer, hp_params" in _error(lambda: engine.backward(loss))
        with launcher.zero.GatheredParameters(list(engine.module.parameters())):
            assert all(torch.equal(p, v) for p, v in zip(engine.parameters(), values, strict=True) if v.numel())
        assert all(map(torch.equal, _weights(engine), weights))
        assert launcher.zero.safe_get_full_optimizer_state(engine.module.embed.weight, "exp_avg") is not None
        engine.save_checkpoint(folder, "away")
        assert _bytes(engine) == free

        # The parameters, too.
        engine.optimizer.offload_states()
        assert not any(_bytes(engine).values())
        assert "reload_states" in _error(lambda: engine(x, x))
        assert "reload_states" in _error(engine.zero_grad)
        assert all(map(torch.equal, _weights(engine), weights))
        if stage < 3:  # readable where they are
            assert all(map(torch.equal, engine.parameters(), values))
        else:
            param = engine.module.embed.weight
            assert "reload_states" in _error(lambda: param.ds_tensor.sum())
            assert "reload_states" in _error(lambda: launcher.zero.GatheredParameters([param]).__enter__())
        engine.reload_states()
        assert _bytes(engine) == before
        losses += train(engine, 1)

        # A write meanwhile counts, and a checkpoint takes its place.
        engine.offload_states()
        first = engine.module.embed.weight
        full = launcher.zero.safe_get_full_fp32_param(first)
        launcher.zero.safe_set_full_fp32_param(first, full + 1)
        assert torch.equal(launcher.zero.safe_get_full_fp32_param(first), full + 1)
        engine.load_checkpoint(folder, "away")
        assert _bytes(engine) == before
        assert all(map(torch.equal, _weights(engine), weights))
        losses[2:] = train(engine, 3)
        assert (losses, [torch.equal(*pair) for pair in zip(_weights(engine), wanted, strict=True)]) == (
            expected,
            [True] * len(wanted),
        )
        engine.offload_states()
        engine.destroy()
        with launcher.zero.GatheredParameters(list(engine.module.parameters())):
            assert all(torch.isfinite(param).all() and param.numel() for param in engine.module.parameters())


@pytest.mark.parametrize(("stage", "more"), CASES)
def test_states_leave_the_device_and_come_back_with_the_same_bits(
    stage: int, more: dict[str, Any], tmp_path: Path
) -> None:
    run_on_ranks(2, _moved, stage, more, str(tmp_path))


def _on_cpu(rank: int, world_size: int) -> list[Any]:
    engine = make_engine(world_size, 2)
    train(engine, 1)
    before = _bytes(engine)
    engine.offload_states(include=["optim_states", "hp_params"], device="cpu", pin_memory=True, non_blocking=True)
    after = _bytes(engine)
    losses = train(engine, 1)
    engine.reload_states(non_blocking=True)
    errors = [
        _error(lambda: engine.offload_states(device="nvme")),
        _error(lambda: engine.offload_states(include=["states"])),
    ]
    engine.offload_states(device="none")
    engine(*[torch.randn(2, 7)] * 2).backward()
    errors.append(_error(engine.offload_states))
    engine.destroy()
    return [before == after, len(losses), errors]


def test_on_cpus_nothing_moves_and_wrong_calls_are_errors() -> None:
    for is_same, num_losses, (nvme, unknown, within) in run_on_ranks(2, _on_cpu):
        assert (is_same, num_losses) == (True, 1)
        assert "host memory only" in nvme
        assert "there are optim_states, hp_params" in unknown
        assert "call it after engine.step()" in within


def _without_optimizer(rank: int, world_size: int) -> None:
    options = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine: Engine = launcher.initialize(model=nn.Linear(4, 4), config=options)[0]
    expected = engine(torch.ones(1, 4))
    with patch("launcher.engine.sharded.is_in_host_memory", lambda _: False):
        engine.offload_states()
        assert "reload_states" in _error(lambda: engine(torch.ones(1, 4)))
        engine.reload_states()
    assert torch.equal(engine(torch.ones(1, 4)), expected)
    engine.destroy()
    plain: Engine = launcher.initialize(model=nn.Linear(4, 4), config={"train_micro_batch_size_per_gpu": 1})[0]
    assert 'engine.module.to("cpu")' in _error(plain.offload_states)
    plain.destroy()


def test_an_engine_without_an_optimizer_moves_the_parameters_that_it_has() -> None:
    run_on_ranks(2, _without_optimizer)


def _between(rank: int, world_size: int, stage: int) -> None:
    engine = make_engine(world_size, stage, **BF16)
    with patch("launcher.engine.sharded.is_in_host_memory", lambda _: False):
        train(engine, 2)
        before, weights = _bytes(engine), _weights(engine)

        # Host memory ends in the middle: everything is as before.
        made = []

        def limited(*args: Any, **kwargs: Any) -> HostCopy:
            made.append(None)
            if len(made) == 3:
                raise MemoryError("no host memory")
            return HostCopy(*args, **kwargs)

        with patch("launcher.engine.sharded.HostCopy", limited), pytest.raises(MemoryError):
            engine.offload_states()
        assert _bytes(engine) == before
        assert all(map(torch.equal, _weights(engine), weights))

        # Twice, with other kinds; reading from another thread; saving weights.
        engine.offload_states(include=["optim_states"])
        engine.offload_states(include=["hp_params"])
        assert _bytes(engine)["optim_states"] == _bytes(engine)["hp_params"] == 0
        assert all(map(torch.equal, engine.state_dict().values(), engine.state_dict().values()))
        if stage < 3:
            engine.offload_states()
            read: list[torch.Tensor] = []
            thread = threading.Thread(target=lambda: read.extend(p.clone() for p in engine.module.parameters()))
            thread.start()
            thread.join()
            assert all(map(torch.equal, read, engine.module.parameters()))
        else:
            engine.offload_states()
            assert "reload_states" in _error(engine.state_dict)

        # Another engine of the same model ends this one, which gives the values back first.
        options = config(world_size, stage, **BF16)
        second = launcher.initialize(model=engine.module, config=options)[0]
        close = [torch.allclose(*pair, rtol=1e-2) for pair in zip(_weights(second), weights, strict=True)]
        assert all(close)
        train(second, 1)
        second.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_other_calls_between_and_errors_in_the_middle(stage: int) -> None:
    run_on_ranks(2, _between, stage)
