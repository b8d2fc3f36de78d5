"""The loss of a whole sequence from the losses of its parts, which may count different numbers of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from launcher.comm import collectives
from launcher.comm.groups import RankGroup
from launcher.parallel.sequence.batch import IGNORED
from launcher.parallel.sequence.ranks import sequence_ranks


def sequence_loss(
    loss: Tensor, shift_labels: Tensor, *, ignore_index: int = IGNORED, group: ProcessGroup | None = None
) -> Tensor:
    """Return the mean loss over the tokens of whole sequences, from the mean over those of this rank's part.

    loss: scalar; of a part without any token that counts it may be NaN. shift_labels: this rank's part; the tokens that
    count are those that are not `ignore_index`. group: the ranks of one sequence; None: those of the engine that was
    built last. Collective; the result is alike on all ranks, and each must call backward on it, with the same factors.

    Backward gives this part its share of the gradient, times the number of ranks P. Each of P ranks differentiates its
    own copy of one loss, and the engine takes the mean of their gradients: P · 1/P leaves those of a single process.
    """
    ranks = sequence_ranks(group)
    num_tokens = (shift_labels != ignore_index).sum()
    if ranks is None:
        own: Tensor = torch.where(num_tokens > 0, loss, loss.new_zeros(()))
        return own
    total: Tensor = _MeanOverRanks.apply(loss, num_tokens, ranks)
    return total


class _MeanOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, num_tokens: Tensor, ranks: RankGroup) -> Tensor:
        own = torch.where(num_tokens > 0, loss.double() * num_tokens, 0.0)
        rows = collectives.gather_rows(ranks, torch.stack([own, num_tokens.double()]))
        total, counted = rows.sum(dim=0).unbind()
        counted = counted.clamp(min=1.0)
        ctx.share = ranks.world_size * num_tokens / counted
        return (total / counted).to(loss.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return (grad * ctx.share).to(grad.dtype), None, None
