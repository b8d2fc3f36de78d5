"""Each kind of split layer against the whole one: outputs, gradients, what it shows, what it keeps."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.comm.groups import world_group
from launcher.config.schema_parallel import TensorParallel
from launcher.parallel.tensor.functions import full_values
from launcher.parallel.tensor.split import split_model
from launcher.parallel.tensor.styles import LayerPlan, Style

IN, OUT = 8, 12


class Scaled(nn.Embedding):
    """As models of transformers have them."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


class Pair(nn.Module):
    """Two layers, the second of which gets the first one's outputs."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


class Packed(Pair):
    """A gated layer: two in one."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.first(x).chunk(2, -1)
        y: Tensor = self.second(torch.sigmoid(gate) * up)
        return y


class Tied(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self, kind: type[nn.Embedding] = nn.Embedding, padding: int | None = None) -> None:
        super().__init__()
        self.words = kind(OUT, IN, padding_idx=padding)
        self.head = nn.Linear(IN, OUT)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.words(tokens))
        return y


def linear(num_in: int, num_out: int, bias: bool = True) -> nn.Module:
    return nn.Linear(num_in, num_out, bias=bias)


def conv1d(num_in: int, num_out: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(num_out, num_in)
    nn.init.normal_(layer.bias)
    return layer  # type: ignore[no-any-return]


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "column, row": (lambda: Pair(linear(IN, OUT), linear(OUT, IN)), {"first": "column", "second": "row"}),
    "without biases": (
        lambda: Pair(linear(IN, OUT, False), linear(OUT, IN, False)),
        {"first": Style.COLUMN, "second": Style.ROW},
    ),
    "gathered, split": (
        lambda: Pair(linear(IN, OUT), linear(OUT, IN)),
        {"first": "column_gathered", "second": "row_split_input"},
    ),
    "gathered blocks": (
        lambda: Pair(linear(IN, OUT), linear(OUT, IN)),
        {"first": LayerPlan(Style.COLUMN_GATHERED, (8, 4)), "second": LayerPlan(Style.ROW_SPLIT_INPUT, (4, 4, 4))},
    ),
    "packed": (lambda: Packed(linear(IN, 2 * OUT), linear(OUT, IN)), {"first": "packed_column", "second": "row"}),
    "packed row": (
        lambda: Pair(linear(IN, OUT), linear(OUT, IN)),
        {"first": LayerPlan(Style.PACKED_COLUMN, (8, 4)), "second": LayerPlan(Style.PACKED_ROW, (8, 4))},
    ),
    "Conv1D": (lambda: Pair(conv1d(IN, OUT), conv1d(OUT, IN)), {"first": "column", "second": "row"}),
    "packed Conv1D": (
        lambda: Packed(conv1d(IN, 2 * OUT), conv1d(OUT, IN)),
        {"first": "packed_column", "second": "row"},
    ),
    "gathered Conv1D": (
        lambda: Pair(conv1d(IN, OUT), conv1d(OUT, IN)),
        {"first": "column_gathered", "second": "row_split_input"},
    ),
    "tied": (Tied, {"words": "vocabulary"}),
    "tied, by the head": (Tied, {"head": "colwise_gather_output"}),
    "padding here": (lambda: Tied(padding=1), {"words": "vocabulary"}),
    "padding there": (lambda: Tied(padding=OUT - 1), {"words": "vocabulary"}),
    "scaled": (lambda: Tied(Scaled), {"words": "vocabulary", "head": "column_gathered"}),
}


def model_of(case: str) -> nn.Module:
    torch.manual_seed(5)
    model: nn.Module = CASES[case][0]()
    return model.double()


def input_of(model: nn.Module) -> Tensor:
    if isinstance(model, Tied):
        return torch.tensor([[0, 1, 5, OUT - 1], [7, 3, 1, 1]])
    return torch.randn(3, 5, IN, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def run(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    x = input_of(model)
    if x.is_floating_point():
        x.requires_grad_()
    y: Tensor = model(x)
    y.sin().sum().backward()
    return y.detach(), x.grad


def _split(rank: int, world_size: int, case: str) -> dict[str, Any]:
    group = world_group()
    model = model_of(case)
    split_model(model, group, TensorParallel(), CASES[case][1])
    y, grad = run(model)
    whole = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        part = nn.Parameter(param.grad)
        part.__dict__.update(param.__dict__)
        whole[name] = full_values(part, group)
    again = copy.deepcopy(model)  # as for a reference model
    with torch.no_grad():
        copied = again(input_of(model))
    return {"y": y, "grad": grad, "params": whole, "copied": copied, "text": repr(model)}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_split_layer_computes_what_the_whole_one_does(world_size: int, case: str) -> None:
    if "Conv1D" in case:
        pytest.importorskip("transformers")
    model = model_of(case)
    y, grad = run(model)
    for found in run_on_ranks(world_size, _split, case):
        torch.testing.assert_close(found["y"], y)
        torch.testing.assert_close(found["copied"], y)
        torch.testing.assert_close(found["grad"], grad)
        for name, param in model.named_parameters():
            torch.testing.assert_close(found["params"][name], param.grad)


def test_printed_layers_show_both_sizes() -> None:
    text = run_on_ranks(2, _split, "column, row")[0]["text"]
    assert "ColumnParallelLinear(in_features=8, out_features=6 of 12, bias=True)" in text
    assert "RowParallelLinear(in_features=6 of 12, out_features=8, bias=True)" in text
    text = run_on_ranks(2, _split, "padding here")[0]["text"]
    assert "VocabParallelEmbedding(6 of 12, 8, padding_idx=1)" in text
    assert "(head): ColumnParallelLinear(in_features=8, out_features=6 of 12, bias=True)" in text


def _in_autocast(rank: int, world_size: int, is_split: bool) -> dict[str, Any]:
    model = model_of("column, row").float()
    if is_split:
        split_model(model, world_group(), TensorParallel(), CASES["column, row"][1])
    x = input_of(model).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    y.float().sum().backward()
    first: Any = model.first
    assert x.grad is not None
    return {"y": y.detach(), "grad": x.grad, "dtypes": [first.weight.grad.dtype, first.bias.grad.dtype]}


def test_under_autocast_layers_compute_in_16_bits() -> None:
    whole = _in_autocast(0, 1, False)
    for found in run_on_ranks(2, _in_autocast, True):
        assert found["y"].dtype == whole["y"].dtype == torch.bfloat16
        assert found["dtypes"] == whole["dtypes"] == [torch.float32, torch.float32]
        torch.testing.assert_close(found["y"].float(), whole["y"].float(), rtol=0.02, atol=0.02)
        torch.testing.assert_close(found["grad"], whole["grad"], rtol=0.03, atol=0.03)


def _kept(rank: int, world_size: int, fails: bool) -> bool:
    """Whether the input of a layer is still alive after a forward."""
    model: Any = model_of("column, row")
    split_model(model, world_group(), TensorParallel(), CASES["column, row"][1])
    if fails:
        model.second = nn.Linear(1, 1)
    x = input_of(model).requires_grad_()
    reference = weakref.ref(x)
    try:
        model(x)
    except RuntimeError:
        assert fails
    model.first(x)  # a layer that is called alone keeps nothing either
    del x
    gc.collect()
    return reference() is not None


@pytest.mark.parametrize("fails", [False, True])
def test_no_activation_outlives_its_forward(fails: bool) -> None:
    assert run_on_ranks(2, _kept, fails) == [False, False]


def _unknown_token(rank: int, world_size: int, token: int) -> str:
    model: Any = model_of("tied")
    split_model(model, world_group(), TensorParallel(), CASES["tied"][1])
    try:
        model.words(torch.tensor([token]))
    except IndexError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("token", [OUT, -1])
def test_a_token_that_no_rank_has_is_an_error_as_in_torch(token: int) -> None:
    assert run_on_ranks(2, _unknown_token, token) == ["IndexError", "IndexError"]


def _unsplit_before_row(rank: int, world_size: int) -> str:
    model = model_of("column, row")
    split_model(model, world_group(), TensorParallel(), {"second": "row"})
    with pytest.raises(EngineError) as error:
        model(input_of(model))
    return str(error.value)


def test_a_row_split_layer_behind_a_whole_one_says_so() -> None:
    for text in run_on_ranks(2, _unsplit_before_row):
        assert text.startswith("second: the input has 12 features and not this rank's 6 of 12: the layer before it")
        assert "use -1 in the reshape" in text
