"""Functions of long sequences computed tile by tile, by the names of `deepspeed.runtime.sequence_parallel.ulysses_sp`.

Each tile keeps only its input, and is computed again in backward: of what a function computes inside, one tile is in
memory at a time. That is checkpointing of tiles, with autograd's own sums of gradients: a parameter has one gradient
at the end, whatever the number of tiles is, and a sharded one is gathered around each of its uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from launcher.base.errors import EngineError

_REDUCTIONS: dict[str | None, Callable[[Sequence[Tensor], int], Tensor]] = {
    None: lambda tiles, dim: torch.cat(list(tiles), dim) if tiles[0].dim() else torch.stack(list(tiles)),
    "mean": lambda tiles, dim: torch.stack(list(tiles)).mean(),
    "sum": lambda tiles, dim: torch.stack(list(tiles)).sum(),
}


class TiledMLP:
    """A function of each position of a sequence, such as an MLP, over tiles of the sequence."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor], self: Any, x: Tensor, shards: int, compute_params: Any = None
    ) -> Tensor:
        """Return `fn(self, x)`. x: [..., sequence, width], in `shards` tiles along the sequence.

        At stage 3 every rank must use the same number of tiles. compute_params: not needed.
        """
        return torch.cat([_tile(fn, self, part) for part in x.chunk(shards, dim=-2)], dim=-2)


class TiledFusedLogitsLoss:
    """A loss of hidden states and labels over tiles of positions, whose logits are never whole."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Any = None,
        output_reduction: str = "mean",
    ) -> Tensor:
        """Return the mean or sum of `fn(self, x, y)`, or of `fn(self, x, y, mask)`, over tiles of all positions.

        x: [batch, sequence, ...]. y: [batch, sequence, ...]. mask: [batch, sequence]. Tiles of different length weigh
        the same: see `sum`. At stage 3 every rank must use the same number of tiles. compute_params: not needed.
        Raises: ValueError for other shapes or another reduction.
        """
        if output_reduction not in ("mean", "sum"):
            raise ValueError(
                f'TiledFusedLogitsLoss: unknown output_reduction "{output_reduction}"; use "mean" or "sum"'
            )
        for name, given in (("x", x), ("y", y), ("mask", mask)):
            if given is not None and (given.dim() < 2 or given.shape[:2] != x.shape[:2]):
                raise ValueError(
                    f"TiledFusedLogitsLoss: {name} has shape {tuple(given.shape)}: begin as x, with [batch, sequence]"
                )
        parts = [each.flatten(0, 1).chunk(shards) for each in (x, y, mask) if each is not None]
        tiles = [_tile(fn, self, *tile) for tile in zip(*parts, strict=True)]
        return _REDUCTIONS[output_reduction](tiles, 0)


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Any = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """Return `fn(**kwargs_to_shard, **kwargs_to_pass)`, computed in tiles along dimension 1 of what is to be sharded.

    seqlen: of that dimension. output_reduction: "mean" or "sum" of the tiles' results; None: they are joined along
    output_unshard_dimension. At stage 3 every rank must use the same number of tiles. grad_requiring_tensor_key,
    compute_params: not needed, gradients are found by autograd. Raises: EngineError for another length or reduction.
    """
    if output_reduction not in _REDUCTIONS:
        raise EngineError(
            f'sequence_tiled_compute: unknown output_reduction "{output_reduction}"', hint='use "mean", "sum" or None'
        )
    for name, given in kwargs_to_shard.items():
        if given.shape[1] != seqlen:
            raise EngineError(
                f"sequence_tiled_compute: {name} has shape {tuple(given.shape)}",
                hint=f"dimension 1 of what is sharded must have seqlen {seqlen}",
            )
    names = list(kwargs_to_shard)

    def run(*tile: Tensor) -> Tensor:
        return fn(**dict(zip(names, tile, strict=True)), **kwargs_to_pass)

    parts = [given.chunk(shards, dim=1) for given in kwargs_to_shard.values()]
    tiles = [_tile(run, *tile) for tile in zip(*parts, strict=True)]
    return _REDUCTIONS[output_reduction](tiles, output_unshard_dimension)


class SequenceTiledCompute:
    """`sequence_tiled_compute` with the tensors one after another."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Any,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> Tensor:
        """args: the values of `keys_to_shard`, then those of `keys_to_pass`."""
        sharded = dict(zip(keys_to_shard, args[: len(keys_to_shard)], strict=True))
        passed = dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True))
        limits = compute_params, output_unshard_dimension, output_reduction
        return sequence_tiled_compute(fn, seqlen, shards, sharded, passed, grad_requiring_tensor_key, *limits)


def _tile(fn: Callable[..., Tensor], *args: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return fn(*args)
    result: Tensor = checkpoint(fn, *args, use_reentrant=False)
    return result
