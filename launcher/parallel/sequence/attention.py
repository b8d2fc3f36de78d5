"""Attention of models that say themselves where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from launcher.comm.groups import RankGroup
from launcher.parallel.sequence.exchange import gather_heads, scatter_heads
from launcher.parallel.sequence.ranks import sequence_ranks


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
