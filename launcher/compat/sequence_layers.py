"""Layers of DeepSpeed for parts of sequences, with its arguments and their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F

from launcher.base.errors import EngineError
from launcher.parallel.sequence import attention


class DistributedAttention(attention.DistributedAttention):
    """`launcher.DistributedAttention` with DeepSpeed's arguments."""

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        """sequence_process_group: None for that of the engine. sp_stream, num_kv_heads: without effect: one exchange
        carries query, key and value, and keys tell their heads.
        """
        super().__init__(local_attention, sequence_process_group, scatter_idx, gather_idx)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Do what `launcher.DistributedAttention` does. batch_dim_idx: 0 or 1; the other one is the sequence.

        Raises: EngineError for another one, and for `rotary_pos_emb`.
        """
        if batch_dim_idx not in (0, 1) or rotary_pos_emb is not None:
            raise EngineError(
                f"DistributedAttention(batch_dim_idx={batch_dim_idx}, rotary_pos_emb=...) is not supported",
                hint="use a batch_dim_idx of 0 or 1, and rotate queries and keys before the attention",
            )
        self.gather_idx = 1 - batch_dim_idx
        return super().forward(query, key, value, *args, **kwargs)


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, sp_group: ProcessGroup
) -> Tensor:
    """Return the loss of every token of the whole sequence, [length, batch], in fp32. Collective.

    vocab_parallel_logits: [length of this part, batch, vocabulary], the whole vocabulary. target: [length of this
    part, batch]. Backward sums the gradients that all ranks have for this part, as each has the same loss and the
    engine takes the mean.
    """
    losses = F.cross_entropy(vocab_parallel_logits.float().movedim(-1, 1), target, reduction="none")
    return torch.cat(all_gather(losses, group=sp_group))
