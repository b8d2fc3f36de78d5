"""The all-to-all around attention: from all heads of a part of the sequence to a part of the heads of all of it.

Jacobs et al., https://arxiv.org/abs/2309.14509, section 3.1. Each rank sends and receives 1/P of its activations, so
the bytes of a rank fall with the number of ranks P. What goes together (query, key and value) is one message to each
rank. Every rank of the group must call the same functions in the same order.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from launcher.base.errors import EngineAssertionError, EngineError
from launcher.comm.groups import RankGroup, world_group
from launcher.comm.mesh import current_mesh
from launcher.comm.torch_internals import outside_graphs

_num_exchanges = [0]  # of this process so far


def num_exchanges() -> int:
    """Return how often this process has exchanged heads for a sequence, or back."""
    return _num_exchanges[0]


@outside_graphs
def scatter_heads(
    group: RankGroup, query: Tensor, key: Tensor, value: Tensor, *, head_dim: int, sequence_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's heads of the whole sequence, from all heads of its part. Collective; differentiable.

    query, key, value: of any dtypes, with `length / P` positions along `sequence_dim` and all heads along `head_dim`.
    Returned: `length` positions and 1/P of the heads, contiguous. Heads of keys and values that the ranks do not divide
    are repeated until they do, as Bekman et al., https://arxiv.org/abs/2506.13996, section 3.2.1, and their gradients
    are summed; the heads of queries for each head of keys are fewer then.

    Raises: EngineError for heads of queries that the ranks do not divide.
    """
    num_heads, num_key_heads = query.shape[head_dim], key.shape[head_dim]
    check_heads(num_heads, group.world_size)
    if num_heads % num_key_heads:
        raise EngineError(f"{num_key_heads} heads of keys do not divide the {num_heads} heads of queries")
    num_repeats = group.world_size // math.gcd(num_key_heads, group.world_size)
    if num_repeats > 1:
        key, value = (each.repeat_interleave(num_repeats, dim=head_dim) for each in (key, value))
    query, key, value = _Exchange.apply(group, head_dim, sequence_dim, query, key, value)
    return query, key, value


@outside_graphs
def gather_heads(group: RankGroup, x: Tensor, *, head_dim: int, sequence_dim: int) -> Tensor:
    """Return all heads of this rank's part of the sequence: the way back of `scatter_heads`. Collective.

    x: the whole sequence along `sequence_dim`, this rank's heads along `head_dim`, or their features one head after
    another.
    """
    gathered: tuple[Tensor] = _Exchange.apply(group, sequence_dim, head_dim, x)
    return gathered[0]


def check_heads(num_heads: int, num_ranks: int, where: str | None = None) -> None:
    """Raise EngineError where the ranks of a sequence do not divide the heads of queries."""
    if num_heads % num_ranks:
        sizes = ", ".join(str(size) for size in range(1, num_heads + 1) if num_heads % size == 0)
        raise EngineAssertionError(
            f"{num_ranks} ranks of one sequence do not divide {num_heads} attention heads: each computes whole heads",
            where=where,
            hint=f"use a sequence_parallel_size of {sizes}",
        )


class _Exchange(torch.autograd.Function):
    """Cuts every tensor along one dimension, and joins what the ranks have sent along another."""

    @staticmethod
    def forward(ctx: Any, group: RankGroup, cut_dim: int, join_dim: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.dims = group, (cut_dim, join_dim)
        _num_exchanges[0] += 1
        found: dict[int, Tensor] = {}
        # Under autocast, queries and keys may have another type than values.
        for dtype in dict.fromkeys(each.dtype for each in tensors):
            places = [place for place, each in enumerate(tensors) if each.dtype == dtype]
            parts = _exchanged(group, cut_dim, join_dim, [tensors[place] for place in places])
            found.update(zip(places, parts, strict=True))
        return tuple(found[place] for place in range(len(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cut_dim, join_dim = ctx.dims
        return (None, None, None, *_Exchange.apply(ctx.group, join_dim, cut_dim, *grads))


def _exchanged(group: RankGroup, cut_dim: int, join_dim: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Send part r along `cut_dim` to rank r; return what arrives, joined along `join_dim` in the order of ranks."""
    num_ranks = group.world_size
    parts = [each.unflatten(cut_dim, (num_ranks, -1)).movedim(cut_dim % each.dim(), 0) for each in tensors]
    sizes = [part[0].numel() for part in parts]
    sent = tensors[0].new_empty(num_ranks, sum(sizes))
    received = torch.empty_like(sent)
    for part, columns in zip(parts, sent.split(sizes, dim=1), strict=True):
        columns.unflatten(1, part.shape[1:]).copy_(part)
    group.communicator.all_to_all(sent.view(-1), received.view(-1)).wait()
    joined = []
    for part, columns in zip(parts, received.split(sizes, dim=1), strict=True):
        place = join_dim % (part.dim() - 1)
        arrived = columns.unflatten(1, part.shape[1:]).movedim(0, place)
        joined.append(arrived.flatten(place, place + 1).contiguous())
    return joined


# ---- Which ranks have parts of the same sequences ----


_named: weakref.WeakKeyDictionary[ProcessGroup, RankGroup] = weakref.WeakKeyDictionary()


def sequence_ranks(group: ProcessGroup | None = None) -> RankGroup | None:
    """Return the ranks of `group`, None where it has a single one.

    group: None for those of the engine that was built last; before the first, and where its mesh has no sequence axis,
    there are none.
    """
    mesh = current_mesh()
    own = None if mesh is None else mesh.sequence
    if group is None or (own is not None and own.process_group is group):
        return own
    if group.size() == 1:
        return None
    if group not in _named:
        _named[group] = (world_group() if mesh is None else mesh.world).subset(group)
    return _named[group]


# ---- Attention of models that say where it is ----


class DistributedAttention(nn.Module):
    """Computes any attention on parts of a sequence: around it, ranks exchange the sequence for heads and back.

    Jacobs et al., https://arxiv.org/abs/2309.14509, section 3.1. The wrapped attention sees the whole sequence, in
    order, and this rank's heads, so a causal attention stays causal; masks and positions that it gets as further
    arguments are those of the whole sequence. Without a sequence axis it is called as it is.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        group: ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
    ) -> None:
        """local_attention: a module or a function of query, key, value and more, which returns a tensor.

        group: the ranks of one sequence; None: those of the engine that the model gets. scatter_idx: the dimension of
        the heads. gather_idx: that of the sequence. By default [batch, length, heads, features]; for
        `scaled_dot_product_attention`, [batch, heads, length, features], they are 1 and 2.
        """
        super().__init__()
        self.local_attention = local_attention
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self._ranks = _Ranks(group)

    def bind(self, ranks: RankGroup | None) -> None:
        """Use the ranks of an engine, None for a single one, unless a group was named."""
        self._ranks.bind(ranks)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the attention's output for this rank's part, with all heads. Collective.

        query, key, value: this rank's part of the sequence, all heads, of equal sizes on all ranks. There may be fewer
        heads of keys than of queries; where the ranks do not divide them the attention gets them repeated.
        The output has its dimensions where the query has them; heads and features may be flattened to one.
        Raises: EngineError for heads of queries that the ranks do not divide.
        """
        ranks = self._ranks.find()
        if ranks is None:
            return self.local_attention(query, key, value, *args, **kwargs)
        head_dim, sequence_dim = self.scatter_idx, self.gather_idx
        query, key, value = scatter_heads(ranks, query, key, value, head_dim=head_dim, sequence_dim=sequence_dim)
        output = self.local_attention(query, key, value, *args, **kwargs)
        return gather_heads(ranks, output, head_dim=head_dim, sequence_dim=sequence_dim)


class _Ranks:
    """The ranks of one attention, and of its copies."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self._is_bound = False
        self._ranks: RankGroup | None = None

    def __deepcopy__(self, _: Any) -> _Ranks:
        return self

    def bind(self, ranks: RankGroup | None) -> None:
        if self._group is None:
            self._is_bound, self._ranks = True, ranks

    def find(self) -> RankGroup | None:
        return self._ranks if self._is_bound else sequence_ranks(self._group)
