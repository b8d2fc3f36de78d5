"""Splitting a model: twice, from DeepSpeed's entry, what is refused, and the check of gradients after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.comm.groups import world_group
from launcher.config.schema_parallel import TensorParallel
from launcher.engine.parallel import check_replicated_gradients
from launcher.parallel.tensor.functions import full_values
from launcher.parallel.tensor.split import report_of, split_model, tensor_group, tp_model_init
from launcher.parallel.tensor.styles import Style
from launcher.zero.construct import Init
from launcher.zero.marks import split_of

PLAN = {"up": "column", "down": "row"}


class Block(nn.Module):
    """Has a parameter of its own between two layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(4)
        self.gain, self.scale = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """x: [samples, 8]."""
        inside = self.norm(torch.tanh(self.up(x)).unflatten(-1, (-1, 4))).flatten(-2) * self.gain
        y: Tensor = self.down(inside) * self.scale
        return y


def build() -> Any:
    torch.manual_seed(2)
    return Block()


def _twice(rank: int, world_size: int) -> tuple[bool, str]:
    group = world_group()
    model = build()
    first = split_model(model, group, TensorParallel(), PLAN)
    values = model.up.weight.clone()
    again = split_model(model, group, TensorParallel(), PLAN)
    assert first.num_layers == {Style.COLUMN: 1, Style.ROW: 1}
    same = again is first is report_of(model) and bool((model.up.weight == values).all())
    with pytest.raises(EngineError) as error:
        split_model(model, tensor_group(1), TensorParallel(), PLAN)
    return same, str(error.value)


def test_a_model_is_split_once() -> None:
    for is_same, text in run_on_ranks(2, _twice):
        assert is_same
        assert "the model is split over 2 ranks, and cannot be split over 1; use the same size" in text


def _initialized(rank: int, world_size: int) -> dict[str, Any]:
    """Pairs of neighbours share a model, from DeepSpeed's entry."""
    whole = build()
    model = build()
    returned = tp_model_init(model, tp_size=2, dtype=torch.bfloat16, config={"train_batch_size": 4}, plan=PLAN)
    split = split_of(model.up.weight)
    assert returned is model
    assert split is not None
    full = full_values(model.up.weight, tensor_group(2))
    return {
        "index": split.index,
        "full": torch.equal(full, whole.up.weight.to(torch.bfloat16)),
        "dtype": model.scale.dtype,
        "again": tp_model_init(build(), plan=PLAN).up.weight.shape[0],
    }


def test_tp_model_init_splits_over_neighbours() -> None:
    found = run_on_ranks(4, _initialized)
    assert [one["index"] for one in found] == [0, 1, 0, 1]
    assert all(one["full"] and one["dtype"] is torch.bfloat16 and one["again"] == 16 for one in found)


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(EngineError, match=r"tp_size 3 does not divide the 1 ranks of this job"):
        tp_model_init(build(), 3)


def _refused(rank: int, world_size: int, kind: str) -> tuple[str, bool]:
    group = world_group()
    if kind == "meta":
        with torch.device("meta"):
            model: Any = Block()
    else:
        with Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
            model = Block()
    with pytest.raises(EngineError) as error:
        split_model(model, group, TensorParallel(), PLAN)
    return str(error.value), type(model.up) is nn.Linear


@pytest.mark.parametrize(
    ("kind", "message"),
    [("meta", "the parameter has no values (it is on the device meta)"), ("zero.Init", "is sharded by zero.Init")],
)
def test_parameters_without_values_are_refused(kind: str, message: str) -> None:
    for text, is_unchanged in run_on_ranks(2, _refused, kind):
        assert message in text
        assert is_unchanged


def _gradients(rank: int, world_size: int, has_sum: bool) -> tuple[str, dict[str, Tensor]]:
    model = build()
    plan = {**PLAN, "norm": "replicated_summed_grad", "*gain": Style.REPLICATED_SUMMED_GRAD} if has_sum else PLAN
    group = world_group()
    split_model(model, group, TensorParallel(), plan)
    model(torch.randn(6, 8, generator=torch.Generator().manual_seed(1))).sin().sum().backward()
    grads = {name: param.grad for name, param in model.named_parameters() if split_of(param) is None}
    try:
        check_replicated_gradients(list(grads), list(grads.values()), group)
    except EngineError as error:
        return str(error), grads
    return "", grads


def test_gradients_that_differ_between_ranks_are_named() -> None:
    for text, _ in run_on_ranks(2, _gradients, False):
        assert "the gradient of gain, norm.weight, norm.bias differs between the ranks of one layer" in text
        assert "it is used between a column- and a row-split layer" in text
        assert "grad_allreduce: true in tensor_parallel.partition_config" in text
    model = build()
    model(torch.randn(6, 8, generator=torch.Generator().manual_seed(1))).sin().sum().backward()
    for text, grads in run_on_ranks(2, _gradients, True):
        assert text == ""
        for name, grad in grads.items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad)


def _not_finite(rank: int, world_size: int) -> None:
    bad = torch.tensor([float("nan"), 1.0])
    check_replicated_gradients(["a", "b"], [bad, torch.ones(3)], world_group())


def test_gradients_that_are_not_finite_are_not_a_finding() -> None:
    run_on_ranks(2, _not_finite)
