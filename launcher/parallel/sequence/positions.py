"""Positions of a rank's tokens within whole sequences, and whether they are known without asking the other ranks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.zero.marks import Mark

# On a tensor: rank, number of ranks, and its version then, which a change in place raises.
_MADE_FOR: Mark[tuple[int, int, int]] = Mark("made_for")


def made_positions(tokens: Tensor, rank: int, num_ranks: int) -> Tensor:
    """Return the positions of a rank's part, counted from the begin of the whole sequence: int64 [batch, length].

    tokens: [batch, length, ...], of the part.
    """
    size, length = tokens.shape[:2]
    places = torch.arange(rank * length, (rank + 1) * length, device=tokens.device)
    positions = places.expand(size, -1).contiguous()
    if not positions.is_inference():  # those have no version
        _MADE_FOR.put(positions, (rank, num_ranks, positions._version))
    return positions


def are_made_positions(positions: Any, rank: int, num_ranks: int) -> bool:
    """Whether this is what `made_positions` has returned for a rank, unchanged. A copy, as of another device, is not.

    Ranks that treat their parts alike all get the same answer.
    """
    made_for = _MADE_FOR.of(positions)
    return made_for is not None and made_for == (rank, num_ranks, positions._version)


# ---- Models that count positions in a way of their own ----


_FUNCTION = "create_position_ids_from_input_ids"


class OwnPositions:
    """Compares the positions of a batch with those that the model itself would count, as far as these can be told.

    Embeddings of the RoBERTa family count from behind the number of the padding token, and those of OPT leave out
    padding. `shard_sequence`, which knows no model, counts all tokens from 0.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name = type(model).__name__
        paddings = [getattr(module, "padding_idx", None) for module in model.modules() if hasattr(module, _FUNCTION)]
        self._first = next((padding + 1 for padding in paddings if isinstance(padding, int)), 0)
        self._leaves_out_padding = any(_reads_mask(module) for module in model.modules())

    def check(self, position_ids: Tensor, is_token: Tensor | None) -> None:
        """Raise EngineError for positions that the model would not give to these tokens.

        position_ids, is_token: [batch, length], of whole sequences. is_token is False at padding; None without any.
        """
        own = position_ids[:, 0] if is_token is None else position_ids[is_token]
        if self._first and bool((own < self._first).any()):
            raise EngineError(
                f"{self._name} counts positions from {self._first}, and those of the batch begin at {int(own.min())}",
                hint=f"give shard_sequence position_ids, such as {_FUNCTION} of the model's embeddings returns them",
            )
        if not self._leaves_out_padding or is_token is None:
            return
        if bool((is_token & (position_ids > is_token.long().cumsum(-1) - 1)).any()):
            raise EngineError(
                f"{self._name} leaves out padding when it counts positions, and those of the batch count it",
                hint="give shard_sequence position_ids=attention_mask.cumsum(-1) * attention_mask - 1, or put"
                " padding behind the tokens",
            )


def _reads_mask(module: nn.Module) -> bool:
    """Whether a module is an embedding of positions that it counts by a mask."""
    return isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(type(module).forward).parameters
