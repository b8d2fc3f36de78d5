"""The experts of a rank at once give what they give one after another, where that is the same function."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from harness.train.behind import Waits
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import launcher
from launcher.moe import MoE
from launcher.parallel.expert import grouped
from launcher.parallel.expert.exchange import run_each
from launcher.parallel.expert.grouped import are_groupable, run_grouped, stacked

pytestmark = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch.nn.functional.grouped_mm is of torch 2.10")

WIDTH, INNER, RANKS = 16, 24, 2
SIZES = ((3, 0, 5, 1), (0, 7, 0, 0), (0, 0, 0, 0), (8, 16, 8, 8), (1, 1, 1, 129), (13,))
ROUNDING = 2.0**-8  # of bf16, relative


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU counted among the devices with a kernel for grouped products."""
    monkeypatch.setattr(grouped, "has_grouped_kernel", lambda _: True)


def _expert(*, bias: bool = True, activation: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, INNER, bias=bias), activation or nn.GELU(), nn.Linear(INNER, WIDTH, bias=bias)
    )


def _experts(count: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> list[nn.Module]:
    torch.manual_seed(count)
    return [_expert(**options).to(dtype) for _ in range(count)]


def _rows(count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(7)).to(dtype)


Run = Callable[[list[nn.Module], Tensor, tuple[int, ...]], Tensor]


def _computed(run: Run, experts: list[nn.Module], rows: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Return the output, and the gradients of the rows and of all parameters."""
    experts, rows = copy.deepcopy(experts), rows.clone().requires_grad_()
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.dtype is torch.float32):
        output = run(experts, rows, sizes)
    ((output.float() + 1).square() * torch.linspace(-1, 1, WIDTH, device=rows.device)).sum().backward()
    grads = [param.grad for expert in experts for param in expert.parameters()]
    assert rows.grad is not None
    return [output, rows.grad, *(torch.zeros(()) if grad is None else grad for grad in grads)]


def _check_like_the_loop(
    experts: list[nn.Module], rows: Tensor, sizes: tuple[int, ...], device: str = "cpu", **limits: float
) -> None:
    """Compare both with fp64: what runs at once is at most a few roundings of bf16 further off than the loop."""
    wide = _computed(run_each, [copy.deepcopy(expert).double() for expert in experts], rows.double(), sizes)
    placed = [expert.to(device) for expert in experts]
    with torch.autocast(device, torch.bfloat16, enabled=rows.dtype is torch.float32):
        assert are_groupable(placed, rows.to(device))
    found = _computed(run_grouped, placed, rows.to(device), sizes)
    wanted = _computed(run_each, placed, rows.to(device), sizes)
    for own, loop, exact in zip(found, wanted, wide, strict=True):
        assert own.shape == loop.shape
        assert own.dtype is loop.dtype
        scale = exact.norm()
        off, loop_off = ((each.cpu().double() - exact).norm() for each in (own, loop))
        assert off <= 2 * loop_off + 2 * ROUNDING * scale, (off / scale, loop_off / scale)
        assert scale > 0 or not own.any()  # an expert without rows, exactly


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "autocast"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_output_and_gradients_are_those_of_one_after_another(
    sizes: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    _check_like_the_loop(_experts(len(sizes), dtype, bias=bias), _rows(sum(sizes), dtype), sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_on_a_gpu(sizes: tuple[int, ...], bias: bool) -> None:
    if not grouped.has_grouped_kernel(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("this GPU has no kernel for grouped products")
    garbage = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(8)]
    del garbage  # what is not written has this value
    for dtype in (torch.bfloat16, torch.float32):
        _check_like_the_loop(_experts(len(sizes), dtype, bias=bias), _rows(sum(sizes), dtype), sizes, "cuda")


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("kind", sorted(grouped._ELEMENTWISE, key=lambda kind: kind.__name__))
def test_every_activation(kind: type[nn.Module]) -> None:
    takes_inplace = "inplace" in inspect.signature(kind).parameters
    for options in ({}, {"inplace": True}) if takes_inplace else ({},):
        experts = _experts(3, activation=kind(**options))
        for expert in experts:
            expert.eval()  # dropout draws other numbers
        _check_like_the_loop(experts, _rows(9), (4, 0, 5))


@pytest.mark.usefixtures("forced")
def test_a_part_that_comes_twice_runs_twice() -> None:
    experts: list[nn.Module] = []
    for inner in _experts(2):
        assert isinstance(inner, nn.Sequential)
        experts.append(nn.Sequential(inner[0], inner[1], inner[2], inner[1], inner[0], inner[1], inner[2]))
    _check_like_the_loop(experts, _rows(9), (4, 5))


@pytest.mark.usefixtures("forced")
def test_experts_that_are_frozen_get_no_gradient_and_others_do() -> None:
    experts, rows = _experts(2), _rows(9).requires_grad_()
    experts[0].requires_grad_(False)
    run_grouped(experts, rows, (4, 5)).sum().backward()
    assert rows.grad is not None
    assert [param.grad is not None for expert in experts for param in expert.parameters()] == [False] * 4 + [True] * 4
    first = experts[1].get_parameter("0.weight").grad
    assert first is not None
    run_grouped([expert.requires_grad_(False) for expert in experts], rows, (4, 5)).sum().backward()


@pytest.mark.usefixtures("forced")
def test_the_host_reads_no_size_from_the_device() -> None:
    experts, rows, waits = _experts(4), _rows(9).requires_grad_(), Waits()
    with waits.counting():
        run_grouped(experts, rows, (3, 0, 5, 1)).sum().backward()
    assert waits.counts == Counter()


@pytest.mark.usefixtures("forced")
def test_what_the_kernel_leaves_unwritten_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    product = F.grouped_mm

    def left_unwritten(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        found = product(left, right, offs=offs)
        if found.dim() == 3:
            found[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return found

    monkeypatch.setattr(F, "grouped_mm", left_unwritten)
    for sizes in ((3, 0, 5, 1), (0, 7, 0, 0)):
        _check_like_the_loop(_experts(4), _rows(sum(sizes)), sizes)


# ---- weights ----


def test_weights_in_a_flat_buffer_are_not_copied() -> None:
    flat = torch.arange(4 * 40, dtype=torch.bfloat16)
    parts = [flat[40 * index + 8 : 40 * index + 24].view(2, 8) for index in range(4)]
    whole = stacked([nn.Parameter(part) for part in parts])
    assert torch.equal(whole, torch.stack(parts))
    assert whole.data_ptr() == parts[0].data_ptr()
    assert not whole.requires_grad
    assert stacked(parts[:1]).data_ptr() == parts[0].data_ptr()


@pytest.mark.parametrize(
    "offsets",
    [
        (0, 16, 40, 56),  # at other distances
        (48, 32, 16, 0),  # backwards
        (0, 20, 40, 60),  # not at multiples of 16 bytes
        (4, 20, 36, 52),  # neither
        (0, 8, 16, 24),  # one in another
    ],
    ids=str,
)
def test_weights_that_lie_otherwise_are_copied(offsets: tuple[int, ...]) -> None:
    flat = torch.arange(80, dtype=torch.bfloat16)
    parts = [flat[offset : offset + 16].view(2, 8) for offset in offsets]
    whole = stacked(parts)
    assert torch.equal(whole, torch.stack(parts))
    assert whole.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()
    assert whole.data_ptr() % 16 == 0
    apart = [part.clone() for part in parts]
    assert torch.equal(stacked(apart), whole)


# ---- what runs one after another ----


def _hooked(register: str) -> Callable[[list[nn.Module]], Any]:
    def hook(experts: list[nn.Module]) -> Any:
        return getattr(experts[1].get_submodule("2"), register)(lambda *_: None)

    return hook


class _Adapted(nn.Linear):
    """A linear layer of which only its own forward knows what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class _Expert(nn.Sequential):
    pass


def _replace_forward(experts: list[nn.Module]) -> None:
    layer = experts[1].get_submodule("0")
    layer.forward = lambda x: 2 * F.linear(x, layer.weight, layer.bias)  # type: ignore[method-assign,arg-type]


def _with_part(index: int, part: nn.Module) -> Callable[[list[nn.Module]], None]:
    return lambda experts: experts[1].register_module(str(index), part.to(torch.bfloat16))


def _narrow() -> list[nn.Module]:
    return [nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)]


def _compiled(experts: list[nn.Module]) -> None:
    experts[1].get_submodule("0")._compiled_call_impl = lambda x: x  # as `compile()` does, without the compiler


def _transposed(experts: list[nn.Module]) -> None:
    for expert in experts:
        param = expert.get_parameter("0.weight")
        param.data = param.data.t().contiguous().t()


_OTHERS: dict[str, Callable[[list[nn.Module]], Any]] = {
    "forward hook": _hooked("register_forward_hook"),
    "forward pre-hook": _hooked("register_forward_pre_hook"),
    "backward hook": _hooked("register_full_backward_hook"),
    "backward pre-hook": _hooked("register_full_backward_pre_hook"),
    "hook of the expert": lambda experts: experts[0].register_forward_hook(lambda *_: None),
    "hook of all modules": lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None),
    "replaced forward": _replace_forward,
    "compiled": _compiled,
    "parametrized": lambda experts: parametrizations.weight_norm(experts[1].get_submodule("0")),
    "adapted layer": _with_part(0, _Adapted(WIDTH, INNER)),
    "a layer that looks at whole rows": _with_part(1, nn.LayerNorm(INNER)),
    "other activation": _with_part(1, nn.ReLU()),
    "activation with other settings": _with_part(1, nn.GELU("tanh")),
    "activation in another mode": _with_part(1, nn.GELU().eval()),
    "one without a bias": _with_part(0, nn.Linear(WIDTH, INNER, bias=False)),
    "other width": lambda experts: [_with_part(2 * side, part)(experts) for side, part in enumerate(_narrow())],
    "other class": lambda experts: experts.__setitem__(0, _Expert(*experts[0].children())),
    "no linear layer": lambda experts: experts.__setitem__(slice(None), [nn.Sequential(nn.GELU()) for _ in experts]),
    "odd width": lambda experts: experts.__setitem__(
        slice(None), [nn.Sequential(nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)).bfloat16() for _ in experts]
    ),
    "not contiguous": _transposed,
    "other type": lambda experts: [expert.float() for expert in experts],
    "no experts": lambda experts: experts.clear(),
}


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("name", _OTHERS)
def test_what_runs_one_after_another(name: str) -> None:
    experts, rows = _experts(3), _rows(6)
    assert are_groupable(experts, rows)
    handle = _OTHERS[name](experts)
    try:
        assert not are_groupable(experts, rows)
    finally:
        if isinstance(handle, RemovableHandle):
            handle.remove()


def test_where_it_runs_one_after_another(forced: None) -> None:
    experts, rows = _experts(3), _rows(6)
    assert not are_groupable(experts, rows.float())
    assert not are_groupable(experts, rows.half())
    with torch.autocast("cpu", torch.float16):
        assert not are_groupable(experts, rows)
    said: list[bool] = []
    torch.func.vmap(lambda each: said.append(are_groupable(experts, rows)) or each)(rows)  # type: ignore[func-returns-value]
    assert said == [False]


def test_a_cpu_has_no_kernel_for_it() -> None:
    assert not grouped.has_grouped_kernel(torch.device("cpu"))
    assert not are_groupable(_experts(3), _rows(6))


@pytest.mark.parametrize(
    ("capability", "has"), [((8, 0), False), ((9, 0), True), ((10, 0), True), ((10, 3), False), ((12, 0), False)]
)
def test_gpus_with_a_kernel_for_it(capability: tuple[int, int], has: bool) -> None:
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.version, "hip", None),
    ):
        assert grouped.has_grouped_kernel.__wrapped__(torch.device("cuda", 0)) is has


# ---- the layer ----


def _layer(**options: Any) -> MoE:
    torch.manual_seed(11)
    layer = MoE(WIDTH, _expert(), num_experts=4, k=2, top2_2nd_expert_sampling=False, **options)
    with torch.no_grad():
        for number, param in enumerate(layer.deepspeed_moe.experts.parameters()):
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(number)) * 0.3)
    return layer.bfloat16()


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("drops", [True, False])
def test_the_layer(drops: bool) -> None:
    layer, x = _layer(drop_tokens=drops), _rows(13)
    found = []
    for choice in (True, False):
        layer.zero_grad()
        with mock.patch.object(grouped, "has_grouped_kernel", return_value=choice):
            output = layer(x)[0]
        output.float().square().sum().backward()
        assert {*layer.deepspeed_moe.experts._run_grouped.values()} == {choice}
        found.append([output, *(param.grad for param in layer.deepspeed_moe.experts.parameters())])
    for own, loop in zip(*found, strict=True):
        assert own is not None
        assert (own - loop).float().norm() <= 8 * ROUNDING * loop.float().norm()


@pytest.mark.usefixtures("forced")
def test_a_repeated_forward_runs_as_the_first_one_did() -> None:
    layer, x = _layer(drop_tokens=False), _rows(13).requires_grad_()
    activation = layer.deepspeed_moe.experts.deepspeed_experts[0][1]
    for hooks_first in (True, False):
        handle = activation.register_forward_hook(lambda *_: None) if hooks_first else None
        output = checkpoint(lambda rows: layer(rows)[0], x, use_reentrant=False)
        if handle is None:
            handle = activation.register_forward_hook(lambda *_: None)
        else:
            handle.remove()
        output.sum().backward()
        handle.remove()


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("casts", [True, False])
def test_a_forward_in_another_precision_in_between_does_not_change_a_repeated_one(casts: bool) -> None:
    layer, x = _layer(drop_tokens=False).float(), _rows(13).float()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
        output = checkpoint(lambda rows: layer(rows)[0], x.requires_grad_(), use_reentrant=False)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=not casts):
        layer(x)
    output.float().sum().backward()
    assert sorted(layer.deepspeed_moe.experts._run_grouped.values()) == [False, True]


# ---- with the engine ----


class _Model(nn.Module):
    def __init__(self, *, drops: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            MoE(
                WIDTH,
                _expert(),
                num_experts=8,
                ep_size=1,
                k=2,
                drop_tokens=drops,
                top2_2nd_expert_sampling=False,
            )
            for _ in range(2)
        )
        with torch.no_grad():
            for layer in self.layers:
                layer.deepspeed_moe.gate.wg.weight[0] = -9.0  # inputs are positive: no token for the first expert

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        for layer in self.layers:
            y = y + F.relu(layer(y)[0])
        return (y.float() - x.roll(1, -1)).square().mean()


def _trained(rank: int, world_size: int, stage: int, drops: bool, forces: bool) -> tuple[list[Any], int, bool, Tensor]:
    """Return losses and gradients, how many products ran at once, whether weights lie in one piece, and weights."""
    num_products = 0
    product = F.grouped_mm

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal num_products
        num_products += 1
        return product(*args, **kwargs)

    config = {
        "train_micro_batch_size_per_gpu": 6,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 0,
    }
    found: list[Any] = []
    with (
        mock.patch.object(grouped, "has_grouped_kernel", return_value=forces),
        mock.patch.object(F, "grouped_mm", counted),
    ):
        engine = launcher.initialize(model=_Model(drops=drops), config=config)[0]
        experts = engine.module.layers[1].deepspeed_moe.experts.deepspeed_experts
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + rank)
            loss = engine(torch.randn(6, WIDTH, generator=generator).bfloat16())
            engine.backward(loss)
            if step == 0:
                found = [launcher.zero.safe_get_full_grad(param) for param in experts.parameters()]
            engine.step()
            found.append(loss.detach())
        last = [expert[2].weight for expert in experts]
        is_in_one = stage < 3 and stacked(last).data_ptr() == last[0].data_ptr()
        weights = torch.cat([value.reshape(-1).float() for value in engine.state_dict().values()])
        engine.destroy()
    return found, num_products, is_in_one, weights


def _both_ways(rank: int, world_size: int, stage: int, drops: bool) -> list[Any]:
    return [_trained(rank, world_size, stage, drops, forces) for forces in (True, False)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("drops", [True, False], ids=["drops", "no drops"])
def test_with_the_engine(stage: int, drops: bool) -> None:
    for (found, num_products, is_in_one, weights), (wanted, num_of_loop, _, of_loop) in run_on_ranks(
        RANKS, _both_ways, stage, drops
    ):
        assert num_of_loop == 0
        # Of two layers in each of two mixtures: forward, gradients of rows, of weights and of biases, for four steps.
        assert num_products == (0 if stage == 3 else 4 * 2 * 2 * 4)
        assert is_in_one is (stage < 3)
        for own, loop in zip(found, wanted, strict=True):
            assert (own - loop).norm() <= 8 * ROUNDING * loop.norm()
        if not drops:
            assert [grad.any().item() for grad in found[:4]] == [False] * 4
        torch.testing.assert_close(weights, of_loop, rtol=2 * ROUNDING, atol=4e-3)  # as far as four updates go
