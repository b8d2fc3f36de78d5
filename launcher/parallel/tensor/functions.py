"""What the ranks of one layer exchange, with its gradient: the operators f and g of Megatron-LM, and slices.

Shoeybi et al., https://arxiv.org/abs/1909.08053, section 3: f is `copy_to_ranks`, g is `sum_over_ranks`. Sums are taken
in the type of the activation. Every rank of the group must call the same functions in the same order.

[Note: a gradient's sum behind the weight gradient] A column-split layer sums the gradient of its input over the ranks.
Its weight's gradient needs no other rank, so it is computed meanwhile. Autograd runs what is ready from the newest
node to the oldest, so the order of the nodes in the forward, `_EndSum`, `_WeightLater`, `_BeginSum`, `_Linear`, is what
makes backward begin the sum, compute the weight's gradient, and wait. Layers that get the same input share one sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from launcher.comm.groups import RankGroup
from launcher.comm.pending import Pending
from launcher.comm.torch_internals import is_executed
from launcher.zero.marks import split_of


def copy_to_ranks(x: Tensor, group: RankGroup) -> Tensor:
    """Return `x`, which is alike on every rank; backward sums its gradient over the ranks."""
    copied: Tensor = _BeginSum.apply(x, _Sum(group))
    return copied


def sum_over_ranks(x: Tensor, group: RankGroup) -> Tensor:
    """Sum over the ranks, in the memory of `x`, which nothing may have saved; backward hands the gradient on.

    x: contiguous, not a leaf that requires a gradient.
    """
    total: Tensor = _SumOverRanks.apply(x, group)
    return total


def gather_last_dim(x: Tensor, group: RankGroup, blocks: Sequence[int] | None = None) -> Tensor:
    """Return the ranks' parts of the last dimension as a whole; backward takes this rank's part of the gradient.

    x: [..., n]. blocks: the sizes that the whole has along the last dimension, of which each rank holds its share one
    after another; None for one block, n * world size.
    """
    whole: Tensor = _GatherLastDim.apply(x, group, tuple(blocks or (x.shape[-1] * group.world_size,)))
    return whole


def split_last_dim(x: Tensor, group: RankGroup, blocks: Sequence[int] | None = None) -> Tensor:
    """Return this rank's part of the last dimension of what is alike on every rank; backward gathers the gradient.

    x: [..., n]. blocks: as of `gather_last_dim`.
    """
    part: Tensor = _SplitLastDim.apply(x, group, tuple(blocks or (x.shape[-1],)))
    return part


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: RankGroup, *, is_transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute a linear layer whose input is alike on every rank; backward sums the input's gradient over the ranks.

    x: [..., in], requires a gradient. weight: [out, in], or [in, out] where `is_transposed`. Returns [..., out], and
    the copied input: what other layers compute from it takes part in the same sum.
    """
    total = _Sum(group)
    whole = _EndSum.apply(x, total)
    if not weight.requires_grad:
        copied = _BeginSum.apply(whole, total)
        return linear(copied, weight, bias, is_transposed=is_transposed), copied
    work = _WeightWork(is_transposed)
    token = _WeightLater.apply(weight, bias, work)
    copied = _BeginSum.apply(whole, total)
    return _Linear.apply(copied, token, weight.detach(), None if bias is None else bias.detach(), work), copied


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_transposed: bool) -> Tensor:
    """Return x · weight + bias for a weight [out, in], or [in, out] where `is_transposed`."""
    return F.linear(x, weight.t() if is_transposed else weight, bias)


# ---- sums ----


class _Sum:
    """The sum of one gradient over the ranks. Without `_EndSum` around it, it is waited for at once."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.has_end = False
        self._pending: Pending | None = None

    def begin(self, grad: Tensor) -> Tensor:
        """Return the memory in which the sum will be. A gradient that is contiguous is overwritten."""
        flat, result = _flat(grad, self.group)
        self._pending = self.group.communicator.all_reduce(flat)
        if not self.has_end:
            self.end()
        return result

    def end(self) -> None:
        """Wait for the sum."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


def _flat(x: Tensor, group: RankGroup) -> tuple[Tensor, Tensor]:
    """Return memory that collectives take, 1-D and a multiple of the ranks, with the values of `x`, and a view like x.

    That is the memory of `x` itself where it can be.
    """
    numel, num_ranks = x.numel(), group.world_size
    if numel % num_ranks == 0:
        dense = x.contiguous()
        return dense.view(-1), dense
    flat = x.new_zeros((numel + num_ranks - 1) // num_ranks * num_ranks)
    flat[:numel].copy_(x.reshape(-1))
    return flat, flat[:numel].view(x.shape)


class _BeginSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: _Sum) -> Tensor:
        ctx.total = total
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Without a node behind it, the gradient may be somebody else's memory.
        return ctx.total.begin(grad if ctx.total.has_end else grad.clone()), None


class _EndSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: _Sum) -> Tensor:
        ctx.total = total
        total.has_end = True
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.total.end()
        return grad, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        ctx.mark_dirty(x)
        flat, result = _flat(x, group)
        group.communicator.all_reduce(flat).wait()
        if result.data_ptr() != x.data_ptr():
            x.copy_(result)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# ---- slices ----


def own_part(whole: Tensor, group: RankGroup, blocks: Sequence[int]) -> Tensor:
    """Return a rank's share of every block of the last dimension, one after another; of one block, a view."""
    parts, start = [], 0
    for block in blocks:
        share = block // group.world_size
        parts.append(whole.narrow(-1, start + group.rank * share, share))
        start += block
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def gathered(part: Tensor, group: RankGroup, blocks: Sequence[int], dim: int = -1) -> Tensor:
    """Return the whole of what every rank holds `own_part` of. Collective."""
    own = part.contiguous().view(-1)
    flat = own.new_empty(group.world_size * own.numel())
    group.communicator.all_gather(flat, own).wait()
    rows = [row.view(part.shape) for row in flat.chunk(group.world_size)]
    parts, start = [], 0
    for block in blocks:
        share = block // group.world_size
        parts += [row.narrow(dim, start, share) for row in rows]
        start += share
    return torch.cat(parts, dim)


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup, blocks: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.blocks = group, blocks
        return gathered(x, group, blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return own_part(grad, ctx.group, ctx.blocks).contiguous(), None, None


class _SplitLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup, blocks: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.blocks = group, blocks
        return own_part(x, group, blocks).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gathered(grad, ctx.group, ctx.blocks), None, None


# ---- the weight gradient, while a sum is in flight ----


class _WeightWork:
    """What a weight's gradient is computed from, handed from one node to another."""

    def __init__(self, is_transposed: bool) -> None:
        self.is_transposed = is_transposed
        self.kept: tuple[Tensor, Tensor] | None = None  # [samples, in] and [samples, out]


class _Linear(torch.autograd.Function):
    """A linear layer whose backward leaves the gradients of weight and bias to `_WeightLater`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, weight: Tensor, bias: Tensor | None, work: _WeightWork) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.work = work
        return linear(x, weight, bias, is_transposed=work.is_transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        grad_rows = grad.reshape(-1, grad.shape[-1])
        for_input, for_weight = (_is_run(node) for node, _ in ctx.next_functions[:2])
        grad_x = None
        if for_weight:
            ctx.work.kept = (x.reshape(-1, x.shape[-1]), grad_rows)
        if for_input:
            grad_x = (grad_rows @ (weight.t() if ctx.work.is_transposed else weight)).view(x.shape)
        return grad_x, grad.new_zeros(()) if for_weight else None, None, None, None


def _is_run(node: Any) -> bool:
    """Whether the backward that runs now executes a node of the autograd graph. Call it within a backward.

    `ctx.needs_input_grad` says what some backward needs. A schedule of pipelines that splits the backward into that of
    inputs and that of weights runs this function twice, and would compute the gradient of the input twice.
    """
    return node is not None and is_executed(node)


class _WeightLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, work: _WeightWork) -> Tensor:
        ctx.work = work
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, grad), ctx.work.kept = ctx.work.kept, None
        grad_weight = x.t() @ grad if ctx.work.is_transposed else grad.t() @ x
        return grad_weight, grad.sum(0) if ctx.needs_input_grad[1] else None, None


# ---- Wholes of parameters of which ranks have parts ----


@torch.no_grad()
def full_values(param: nn.Parameter, group: RankGroup) -> Tensor:
    """Return all of a parameter of which each rank of the group holds a part; of another one, its own values.

    The parameter must be unsharded. Every rank of the group must call it.
    """
    split = split_of(param)
    if split is None:
        return param.detach()
    return gathered(param.detach().to(group.device), group, split.blocks, split.dim)
