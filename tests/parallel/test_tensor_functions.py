"""What ranks of one layer exchange, forward and backward, against autograd of the whole computation."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.comm.communicator import Communicator
from launcher.comm.groups import world_group
from launcher.comm.pending import Pending
from launcher.parallel.tensor import functions

WORLDS = pytest.mark.parametrize("world_size", [2, 4])


def random(*shape: int, seed: int = 0, requires_grad: bool = True) -> Tensor:
    """The same double precision numbers on every rank."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.requires_grad_(requires_grad)


def _copy_and_sum(rank: int, world_size: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Each rank scales by its own factor: the sum is that by the sum of the factors."""
    x = random(*shape)
    group = world_group()
    y = functions.sum_over_ranks(functions.copy_to_ranks(x, group) * (rank + 1), group)
    (y * random(*shape, seed=1, requires_grad=False)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@WORLDS
@pytest.mark.parametrize("shape", [(4, 8), (3, 5), (1,), (2, 3, 7)])  # most of them no multiple of the ranks
def test_copies_and_sums(world_size: int, shape: tuple[int, ...]) -> None:
    factor = sum(range(1, world_size + 1))
    for y, grad in run_on_ranks(world_size, _copy_and_sum, shape):
        torch.testing.assert_close(y, random(*shape).detach() * factor)
        torch.testing.assert_close(grad, random(*shape, seed=1).detach() * factor)


def _gradient_of_a_fan_out(rank: int, world_size: int) -> bool:
    """A gradient that somebody else holds is not summed in its own memory."""
    x = random(4, 8)
    copied = functions.copy_to_ranks(x, world_group())
    grad = torch.ones(4, 8, dtype=torch.float64)
    torch.autograd.backward([copied], [grad])
    return bool((grad == 1).all())


def test_the_given_gradient_is_left_alone() -> None:
    assert run_on_ranks(2, _gradient_of_a_fan_out) == [True, True]


BLOCKS = pytest.mark.parametrize("blocks", [(8,), (16, 4, 4)])


def _split_and_gather(rank: int, world_size: int, blocks: tuple[int, ...]) -> dict[str, Tensor]:
    group = world_group()
    x, factor = random(3, sum(blocks)), random(3, sum(blocks), seed=1, requires_grad=False)
    part = functions.split_last_dim(x, group, blocks)
    whole = functions.gather_last_dim(part.square(), group, blocks)
    (whole * factor).sum().backward()
    assert x.grad is not None
    return {"part": part.detach(), "whole": whole.detach(), "grad": x.grad}


@WORLDS
@BLOCKS
def test_slices_of_every_block_and_back(world_size: int, blocks: tuple[int, ...]) -> None:
    x = random(3, sum(blocks))
    (x.square() * random(3, sum(blocks), seed=1).detach()).sum().backward()
    for rank, found in enumerate(run_on_ranks(world_size, _split_and_gather, blocks)):
        own = torch.cat([block.chunk(world_size, -1)[rank] for block in x.detach().split(blocks, -1)], -1)
        torch.testing.assert_close(found["part"], own, rtol=0, atol=0)
        torch.testing.assert_close(found["whole"], x.detach().square(), rtol=0, atol=0)
        torch.testing.assert_close(found["grad"], x.grad)


def _column(rank: int, world_size: int, is_transposed: bool, frozen: str) -> dict[str, Any]:
    """Two column-split layers on one input, and what backward does in which order."""
    group, order = world_group(), []
    x = random(3, 5)
    weights = [random(6, 5, seed=seed).detach().chunk(world_size)[rank].clone() for seed in (1, 2)]
    biases = [random(6, seed=seed).detach().chunk(world_size)[rank].clone().requires_grad_() for seed in (3, 4)]
    if is_transposed:
        weights = [weight.t().contiguous() for weight in weights]
    for weight in weights:
        weight.requires_grad_(frozen != "weight")
    if frozen == "bias":
        biases[0].requires_grad_(False)
    if frozen != "weight":
        weights[0].register_hook(lambda grad: order.append("weight"))
    hidden = x * 2
    y, copied = functions.column_linear(hidden, weights[0], biases[0], group, is_transposed=is_transposed)
    other = functions.linear(copied, weights[1], biases[1], is_transposed=is_transposed)
    begin, wait = Communicator.all_reduce, Pending.wait

    def begun(*args: Any, **named: Any) -> Pending:
        order.append("begin")
        return begin(*args, **named)

    def waited(pending: Pending) -> None:
        order.append("wait")
        wait(pending)

    with mock.patch.object(Communicator, "all_reduce", begun), mock.patch.object(Pending, "wait", waited):
        (y.sin().sum() + other.cos().sum()).backward()
    grads = [tensor.grad for tensor in (x, *weights, *biases)]
    return {"outputs": (y.detach(), other.detach()), "grads": grads, "order": order}


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("frozen", ["", "weight", "bias"])
@pytest.mark.parametrize("world_size", [2, 3])  # the gradient of the input has 15 elements
def test_layers_with_one_input_share_one_sum_behind_the_weight_gradient(
    world_size: int, is_transposed: bool, frozen: str
) -> None:
    x, weights, biases = random(3, 5), [random(6, 5, seed=seed) for seed in (1, 2)], [random(6, seed=s) for s in (3, 4)]
    y, other = (F.linear(x * 2, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    (y.sin().sum() + other.cos().sum()).backward()
    for rank, found in enumerate(run_on_ranks(world_size, _column, is_transposed, frozen)):
        for output, whole in zip(found["outputs"], (y, other), strict=True):
            torch.testing.assert_close(output, whole.detach().chunk(world_size, -1)[rank])
        grad_x, *own = found["grads"]
        torch.testing.assert_close(grad_x, x.grad)
        for index, (grad, tensor) in enumerate(zip(own, (*weights, *biases), strict=True)):
            if (frozen == "weight" and index < 2) or (frozen == "bias" and index == 2):
                assert grad is None
                continue
            assert tensor.grad is not None
            part = tensor.grad.chunk(world_size)[rank]
            torch.testing.assert_close(grad, part.t() if is_transposed and index < 2 else part)
        assert found["order"] == (["begin", "wait"] if frozen == "weight" else ["begin", "weight", "wait"])


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def _in_two_parts(rank: int, world_size: int, is_transposed: bool) -> dict[str, Any]:
    """The backward of the input, then that of the weight, as pipelines of zero bubble part them; and both at once."""
    weight = random(5, 6) if is_transposed else random(6, 5)
    x, bias = random(3, 5, seed=1), random(6, seed=2)
    found: dict[str, Any] = {}
    for name in ("together", "apart"):
        y, _ = functions.column_linear(x * 2, weight, bias, world_group(), is_transposed=is_transposed)
        products = []
        for inputs in ((x, weight, bias),) if name == "together" else ((x,), (weight, bias)):
            with Products() as counted:
                found[name] = found.get(name, ()) + torch.autograd.grad(y.sin().sum(), inputs, retain_graph=True)
            products.append(counted.count)
        found[f"products {name}"] = products
    return found


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_backward_in_two_parts_computes_each_gradient_once(is_transposed: bool) -> None:
    for found in run_on_ranks(2, _in_two_parts, is_transposed):
        assert found["products together"] == [2]
        assert found["products apart"] == [1, 1]
        for whole, part in zip(found["together"], found["apart"], strict=True):
            assert torch.equal(whole, part)
