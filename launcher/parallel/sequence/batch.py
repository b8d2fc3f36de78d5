"""Batches cut along the sequence: labels are shifted before, and every token keeps its position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from launcher.base.errors import EngineError
from launcher.comm.groups import RankGroup
from launcher.parallel.sequence.exchange import sequence_ranks
from launcher.parallel.sequence.positions import made_positions

IGNORED = -100  # label of a token that counts in no loss
# What has one entry for each token; other tensors are cut where their second dimension is as long.
_BY_TOKEN = ("inputs_embeds", "position_ids", "labels", "shift_labels", "attention_mask", "token_type_ids")


def shard_sequence(
    batch: Mapping[str, Any], group: ProcessGroup | None = None, *, shifts_labels: bool = True
) -> dict[str, Any]:
    """Return this rank's part of a batch that all ranks of the sequence have alike; no communication.

    batch: with `input_ids` or `inputs_embeds`, [batch, length, ...]. Tensors of that length along dimension 1 are cut
    into contiguous parts, one for each rank; the rest stays whole. `labels` become `shift_labels`: position i has the
    token after it, also where that is on the next rank, and the last one of a sequence has -100. `position_ids` are
    made where there are none, 0 to length - 1; a model of transformers that gets the same tensor knows what the other
    ranks have without asking them, so move a batch to its device before, not after.
    shifts_labels: False for labels of the tokens themselves, as of masked language models: they stay `labels`.
    group: the ranks of one sequence; None: those of the engine that was built last. Without several ranks labels are
    shifted and positions made all the same, so that a script works with any number of them.

    Raises: EngineError for a length that the ranks do not divide, and for inputs of different lengths.
    """
    ranks = sequence_ranks(group)
    rank, num_ranks = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    return part_of_batch(batch, rank, num_ranks, shifts_labels=shifts_labels)


def part_of_batch(batch: Mapping[str, Any], rank: int, num_ranks: int, *, shifts_labels: bool = True) -> dict[str, Any]:
    """Return the part of rank `rank` of `num_ranks`: see `shard_sequence`."""
    return with_positions(cut(batch, rank, num_ranks, shifts_labels=shifts_labels), rank, num_ranks)


def cut(batch: Mapping[str, Any], rank: int, num_ranks: int, *, shifts_labels: bool = True) -> dict[str, Any]:
    """Return the part of rank `rank` of `num_ranks`, with positions only where the batch has them."""
    length = _tokens(batch).shape[1]
    if length % num_ranks:
        raise EngineError(
            f"{num_ranks} ranks do not divide a sequence of {length} tokens",
            hint=f"pad sequences to a multiple of {num_ranks}: pad_to_multiple_of={num_ranks} of the collator",
        )
    whole = dict(batch)
    if shifts_labels and isinstance(whole.get("labels"), Tensor):
        labels = whole.pop("labels")
        whole.setdefault("shift_labels", F.pad(labels, (0, 1), value=IGNORED)[..., 1:])
    part = slice(rank * (length // num_ranks), (rank + 1) * (length // num_ranks))
    found = {}
    for name, value in whole.items():
        is_cut = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
        if name in _BY_TOKEN and isinstance(value, Tensor) and not is_cut:
            raise EngineError(
                f"{name} has the shape {list(value.shape)}, and the sequence {length} tokens",
                hint="give [batch, length]; masks over pairs of tokens follow from it and from position_ids",
            )
        found[name] = value[:, part].contiguous() if is_cut else value
    return found


def with_positions(part: dict[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    """Return a part with its positions, counted from the begin of the whole sequence, where it has none."""
    if part.get("position_ids") is not None:
        return part
    return {**part, "position_ids": made_positions(_tokens(part), rank, num_ranks)}


def _tokens(batch: Mapping[str, Any]) -> Tensor:
    for name in ("input_ids", "inputs_embeds"):
        value = batch.get(name) if isinstance(batch, Mapping) else None
        if isinstance(value, Tensor) and value.dim() > 1:
            return value
    raise EngineError(
        "a batch that is cut along the sequence is a dict with input_ids, [batch, length]",
        hint='such as launcher.shard_sequence({"input_ids": tokens, "labels": tokens})',
    )


# ---- The loss of a whole sequence ----


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
        rows = ranks.communicator.gather_rows(torch.stack([own, num_tokens.double()]))
        total, counted = rows.sum(dim=0).unbind()
        counted = counted.clamp(min=1.0)
        ctx.share = ranks.world_size * num_tokens / counted
        return (total / counted).to(loss.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return (grad * ctx.share).to(grad.dtype), None, None
