"""How tokens reach the ranks of their experts and come back, with the way of their gradients.

Two forms. Without drops (Gale et al., "MegaBlocks", https://arxiv.org/abs/2211.15841, section 3) ranks exchange how
many tokens they send, and how many each expert gets, then the tokens: `at_experts`. With a capacity (Lepikhin et al.,
"GShard", https://arxiv.org/abs/2006.16668, section 3.2) every rank sends as many places as any other, filled or not, so
that no size is exchanged and the host waits for no device: `swap_chunks`.

[Note: a backward on every rank] The backward of an exchange is an exchange, so it must run on all ranks or on none. A
rank to which no token came has nothing between what it received and what it sends back. So both ends of an exchange
without drops are joined by an anchor, a number that carries no value and is there on every rank.

[Note: recomputation] Activation checkpointing repeats a forward and stops at the last tensor that backward needs, which
may differ between ranks where their tokens do. `_Combine` saves a tensor when its exchange has ended, so that all of
them repeat all exchanges.

[Note: one read] The host needs sizes before it can queue work on a GPU, and each one that it reads lets the GPU run
out of work. So all sizes of an exchange without drops are read at once, and index lists are made from sizes that are
known, where `nonzero` would wait to find its own. (`nonzero_static` fails on a GPU for no element before torch 2.10.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from launcher.comm.groups import RankGroup
from launcher.parallel.expert.placement import ExpertPlacement

# rows [pairs, width], the expert of each counted from this rank's first, ascending [pairs], how many rows each expert
# has, and the weight of each row [pairs] -> weighted outputs [pairs, width].
RunExperts = Callable[[Tensor, Tensor, Sequence[int], Tensor], Tensor]


@dataclass(frozen=True)
class _Route:
    """Which rows travel between this rank and the others. Rows are sorted by rank."""

    group: RankGroup
    token: Tensor  # int64 [sent], the token of each row that is sent
    num_tokens: int
    num_sent: list[int]  # rows to each rank
    num_received: list[int]  # rows from each rank
    sizes: list[int]  # rows of each expert here; one that came for two of them counts twice


def at_experts(
    x: Tensor, experts: Tensor, weights: Tensor, placement: ExpertPlacement, run: RunExperts, *, trains: bool
) -> Tensor:
    """Return for each token the weighted sum of its experts' outputs; no token is dropped.

    x: [tokens, width]. experts: int [tokens, k], numbers of experts of all ranks; what is negative no rank computes.
    weights: [tokens, k], of any floating-point type. run: see `RunExperts`; it is called on every rank, perhaps with no
    row. trains: whether the experts have parameters that are trained, alike on every rank. Returns [tokens, width] in
    the type of `x`. Every rank of the group must call it.

    A token is sent once to each rank that has some of its experts, and comes back from it as one partial sum.
    """
    num_local = placement.num_local
    if trains and torch.is_grad_enabled() and not (x.requires_grad or weights.requires_grad):
        x = x.detach().requires_grad_()  # or a rank that no token reaches would have no way back
    with torch.no_grad():
        route, to_rank = _route(experts, placement)
        ids = experts[route.token] - to_rank[:, None] * num_local
        ids = torch.where((ids >= 0) & (ids < num_local), ids, -1)
    rows, row_weights, row_ids, anchor = _Dispatch.apply(x, weights, ids, route)
    with torch.no_grad():
        # What another rank computes comes last, and is left out.
        expert, pair = torch.where(row_ids < 0, num_local, row_ids).reshape(-1).sort(stable=True)
        expert, pair = expert[: sum(route.sizes)], pair[: sum(route.sizes)]
        row = pair // row_ids.shape[1]
    outputs = run(rows[row], expert, route.sizes, row_weights.reshape(-1)[pair])
    sums = torch.zeros(rows.shape, dtype=outputs.dtype, device=rows.device).index_add(0, row, outputs)
    combined: Tensor = _Combine.apply(sums.to(x.dtype), anchor, route)
    return combined


def swap_chunks(x: Tensor, group: RankGroup) -> Tensor:
    """Send chunk r along dimension 0 to rank r, and return what every rank has sent here, in rank order.

    x: [ranks * chunk, ...], of the same shape on every rank of the group. Every rank must call it. Backward does the
    same with the gradient.
    """
    swapped: Tensor = _SwapChunks.apply(x, group)
    return swapped


def _route(experts: Tensor, placement: ExpertPlacement) -> tuple[_Route, Tensor]:
    """Return the route of tokens, and to which rank each row goes. Collective; the host waits for the sizes, once.

    experts: see `at_experts`.
    """
    group, num_ranks = placement.group, placement.group.world_size
    number = torch.where(experts < 0, placement.num_experts, experts).long()  # the last: of no expert, and of no rank
    is_sent = torch.zeros(num_ranks + 1, len(number), dtype=torch.bool, device=number.device)
    is_sent = is_sent.scatter_(0, (number // placement.num_local).t(), True)[:num_ranks]
    of_expert = number.new_zeros(placement.num_experts + 1)
    of_expert.scatter_add_(0, number.reshape(-1), number.new_ones(number.numel()))
    # [ranks, 1 + experts of a rank]: rows, and those of each expert.
    sent = torch.cat([is_sent.sum(1, keepdim=True), of_expert[:-1].view(num_ranks, -1)], 1)
    received = torch.empty_like(sent)
    group.communicator.all_to_all(sent.view(-1), received.view(-1)).wait()
    to_ranks, from_ranks = torch.stack([sent, received]).tolist()
    num_sent, num_received = ([counts[0] for counts in each] for each in (to_ranks, from_ranks))
    sizes = [sum(counts) for counts in list(zip(*from_ranks, strict=True))[1:]]
    place = _places_of(is_sent.view(-1), sum(num_sent))
    to_rank, token = place // len(number), place % len(number)
    return _Route(group, token, len(number), num_sent, num_received, sizes), to_rank


def _places_of(mask: Tensor, num_true: int) -> Tensor:
    """Return where `mask` is true, as `nonzero` does, which would wait for the number. mask: bool [n] -> [num_true]."""
    goes_to = torch.where(mask, mask.cumsum(0), 0)  # place 0 is one more, for what is false
    found = goes_to.new_empty(num_true + 1)
    return found.scatter_(0, goes_to, torch.arange(len(mask), device=mask.device))[1:]


def _exchange(rows: Tensor, group: RankGroup, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
    """Send rows, [sum of num_sent, ...], to the ranks; return those that came, [sum of num_received, ...]."""
    rows = rows.contiguous()
    output = rows.new_empty(sum(num_received), *rows.shape[1:])
    width = rows.shape[1:].numel()
    sends = list(rows.view(-1).split([count * width for count in num_sent]))
    receives = list(output.view(-1).split([count * width for count in num_received]))
    group.communicator.exchange(sends, receives).wait()
    return output


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, route: _Route
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.route, ctx.types = route, (x.dtype, weights.dtype)
        # One exchange for both: numbers of experts are exact in fp32.
        kept = torch.promote_types(weights.dtype, torch.float32)
        facts = torch.cat([ids.to(kept), weights[route.token].to(kept)], 1)
        facts = _exchange(facts, route.group, route.num_sent, route.num_received)
        rows = _exchange(x[route.token], route.group, route.num_sent, route.num_received)
        row_ids, row_weights = facts.chunk(2, 1)
        row_ids = row_ids.long()
        ctx.mark_non_differentiable(row_ids)
        return rows, row_weights.to(weights.dtype), row_ids, x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, weights: Tensor, _ids: Any, _anchor: Any) -> tuple[Tensor, Tensor, None, None]:
        route: _Route = ctx.route
        found = []
        for grad, dtype in zip((rows, weights), ctx.types, strict=True):
            sent = _exchange(grad, route.group, route.num_received, route.num_sent)
            total = sent.new_zeros(route.num_tokens, sent.shape[1]).index_add_(0, route.token, sent)
            found.append(total.to(dtype))
        return found[0], found[1], None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, anchor: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        came = _exchange(sums, route.group, route.num_received, route.num_sent)
        total = came.new_zeros(route.num_tokens, came.shape[1]).index_add_(0, route.token, came)
        ctx.save_for_backward(route.token)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        route: _Route = ctx.route
        (token,) = ctx.saved_tensors
        return _exchange(grad[token], route.group, route.num_sent, route.num_received), grad.new_zeros(()), None


class _SwapChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return _swapped(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _swapped(grad, ctx.group), None


def _swapped(x: Tensor, group: RankGroup) -> Tensor:
    x = x.contiguous()
    output = torch.empty_like(x)
    group.communicator.all_to_all(x.view(-1), output.view(-1)).wait()
    return output


class _Untouched(torch.autograd.Function):
    """Outputs of experts that no token has reached, with gradients of zero for their parameters."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *params: Tensor) -> Tensor:
        ctx.save_for_backward(rows, *params)
        return torch.empty_like(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(each) for each in ctx.saved_tensors)


def untouched(rows: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return the outputs for no row, [0, width]; the parameters get gradients of zero."""
    outputs: Tensor = _Untouched.apply(rows, *params)
    return outputs


# ---- The experts of a rank, run on the tokens that came to it ----


def run_each(experts: Sequence[nn.Module], rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Run each expert on its rows, which may be none. rows: [n, width], those of the first expert first -> the same.

    sizes: how many rows each expert has. Every expert runs: one that no token has reached gets a gradient of zero then,
    as all ranks with a copy of it do.
    """
    parts = rows.split(list(sizes))
    return torch.cat([output_of(module, part) for module, part in zip(experts, parts, strict=True)])


def output_of(expert: nn.Module, rows: Tensor) -> Tensor:
    """Return the output of an expert; the first one where it returns several, such as a bias besides."""
    output = expert(rows)
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first
