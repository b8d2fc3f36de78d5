"""Whole matrices out of the parts that ranks own, and their updates back to the parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from launcher.comm.groups import RankGroup
from launcher.kernels.api import Span
from launcher.optim.api import ParamShard
from launcher.optim.muon.muon import as_matrix, descent, direction, iteration, orthogonalized, uses_muon

# Elements of one exchange that a rank holds, about: enough of them that work is spread evenly, and few enough that
# what is in flight stays small beside the model.
BATCH_NUMEL = 2**25
REPLICATED_BATCH_NUMEL = 2**27  # where every rank holds everything


class Matrices:
    """The shards whose groups use Muon. Each is a part of a matrix, whose parts are on all ranks or on some.

    One rank orthogonalises a matrix: it gets the parts of its momentum from their owners and sends them the parts of
    the update. Where every rank owns all (stage 0) only updates travel, which are the same bits on each rank then.
    """

    def __init__(
        self, shards: Sequence[ParamShard], groups: Sequence[Mapping[str, Any]], ranks: RankGroup | None
    ) -> None:
        """shards: of the same parameters in the same order on every rank.

        groups: live options of the optimizer's groups. ranks: None: this process alone.
        """
        self._groups = groups
        self._device = None if ranks is None else ranks.device  # which is quicker than the place masters are kept in
        self._ranks = None if ranks is None or ranks.process_group is None else ranks
        self._shards = frozenset(shard for shard in shards if uses_muon(groups[shard.group]))

    def __contains__(self, shard: ParamShard) -> bool:
        return shard in self._shards

    def updates(
        self, shards: Sequence[ParamShard], spans: Mapping[ParamShard, Span], grad_scale: float
    ) -> Iterator[list[Span]]:
        """Update momenta; yield, batch by batch, spans with the step that weights have to take, gradients scaled.

        shards: those to update, the same on every rank. spans: of what is here and has a gradient. Collective, and
        whether a matrix has a gradient makes no difference to it: a rank that owns nothing of it does not know.
        """
        for batch in self._batches(shards):
            parts = {shard: self._part(shard, spans.get(shard), grad_scale) for shard in batch}
            if self._ranks is None:
                updates = {shard: self._update(shard, part) for shard, part in parts.items() if shard in spans}
            else:
                updates = self._updates_over(self._ranks, batch, parts)
            yield [self._descent(shard, spans[shard], updates[shard]) for shard in batch if shard in spans]

    def _batches(self, shards: Sequence[ParamShard]) -> Iterator[list[ParamShard]]:
        is_split = any(shard.is_split for shard in shards)
        most = BATCH_NUMEL * self._ranks.world_size if self._ranks and is_split else REPLICATED_BATCH_NUMEL
        batch: list[ParamShard] = []
        total = 0
        for shard in shards:
            if batch and total + shard.numel > most:
                yield batch
                batch, total = [], 0
            batch.append(shard)
            total += shard.numel
        if batch:
            yield batch

    def _part(self, shard: ParamShard, span: Span | None, grad_scale: float) -> Tensor:
        """Return this rank's part of what is orthogonalised, 1-D, where and in the type in which it travels."""
        device = self._device or shard.master.device
        how = iteration(self._groups[shard.group], device)
        if span is None:
            return torch.zeros(len(shard.owned), dtype=how.dtype, device=device)
        return direction(span, grad_scale).to(device, how.dtype)

    def _update(self, shard: ParamShard, direction: Tensor) -> Tensor:
        how = iteration(self._groups[shard.group], direction.device)
        return orthogonalized(direction.view(as_matrix(shard.shape)), how).reshape(-1)

    def _descent(self, shard: ParamShard, span: Span, update: Tensor) -> Span:
        return descent(span, update.to(span.master.device), self._groups[shard.group], shard.shape)

    # ---- between ranks ----

    def _updates_over(
        self, ranks: RankGroup, batch: Sequence[ParamShard], parts: Mapping[ParamShard, Tensor]
    ) -> dict[ParamShard, Tensor]:
        """Return this rank's parts of the updates, 1-D. Collective."""
        workers = _workers(ranks, batch)
        mine = [shard for shard in batch if workers[shard] == ranks.rank]
        full = {shard: parts[shard] for shard in mine}
        if any(shard.is_split for shard in batch):
            full = _gathered(ranks, batch, workers, parts)
        updates = {shard: self._update(shard, full[shard]) for shard in mine}
        return _handed_out(ranks, batch, workers, updates, parts[batch[0]])


def _workers(ranks: RankGroup, batch: Sequence[ParamShard]) -> dict[ParamShard, int]:
    """Return the rank that orthogonalises each matrix: the most expensive first, each to the one with the least to do.

    Of ranks with as much to do the one that owns most of it.
    """
    loads = [0] * ranks.world_size
    workers = {}
    work = {shard: shard.numel * min(as_matrix(shard.shape)) for shard in batch}
    for shard in sorted(batch, key=lambda shard: work[shard], reverse=True):
        workers[shard] = min(range(ranks.world_size), key=lambda rank: (loads[rank], -len(shard.parts[rank])))
        loads[workers[shard]] += work[shard]
    return workers


def _gathered(
    ranks: RankGroup,
    batch: Sequence[ParamShard],
    workers: Mapping[ParamShard, int],
    parts: Mapping[ParamShard, Tensor],
) -> dict[ParamShard, Tensor]:
    """Send parts to who works on them; return the matrices this rank works on, 1-D. Collective."""
    everybody = range(ranks.world_size)
    sends = [[parts[shard] for shard in batch if workers[shard] == worker] for worker in everybody]
    mine = [shard for shard in batch if workers[shard] == ranks.rank]
    sizes = [[len(shard.parts[source]) for shard in mine] for source in everybody]
    received = _exchange(ranks, sends, sizes, parts[batch[0]])
    return {shard: torch.cat(pieces) for shard, pieces in zip(mine, zip(*received, strict=True), strict=True)}


def _handed_out(
    ranks: RankGroup,
    batch: Sequence[ParamShard],
    workers: Mapping[ParamShard, int],
    updates: Mapping[ParamShard, Tensor],
    like: Tensor,
) -> dict[ParamShard, Tensor]:
    """Send the parts of updates to their owners; return what this rank owns of all. Collective.

    like: any tensor of the updates' type and device.
    """
    everybody = range(ranks.world_size)
    sends = [
        [update[shard.parts[owner].start : shard.parts[owner].stop] for shard, update in updates.items()]
        for owner in everybody
    ]
    of_worker = [[shard for shard in batch if workers[shard] == worker] for worker in everybody]
    sizes = [[len(shard.owned) for shard in shards] for shards in of_worker]
    received = _exchange(ranks, sends, sizes, like)
    found: dict[ParamShard, Tensor] = {}
    for shards, pieces in zip(of_worker, received, strict=True):
        found.update(zip(shards, pieces, strict=True))
    return found


def _exchange(
    ranks: RankGroup, sends: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
) -> list[tuple[Tensor, ...]]:
    """Send `sends[r]` to rank r; return what rank r sent here, tensors of `sizes[r]` elements. Collective.

    like: any tensor of the type and device of all.
    """
    outgoing = [torch.cat([like.new_empty(0), *tensors]) for tensors in sends]
    incoming = [like.new_empty(sum(of_source)) for of_source in sizes]
    ranks.communicator.exchange(outgoing, incoming).wait()
    return [flat.split(list(of_source)) for flat, of_source in zip(incoming, sizes, strict=True)]
