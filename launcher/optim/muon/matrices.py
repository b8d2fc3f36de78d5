"""Whole matrices out of the parts that ranks own, and their updates back to the parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from launcher.comm import collectives
from launcher.comm.groups import DataParallelGroup
from launcher.kernels.api import Span
from launcher.optim.api import FlatShard
from launcher.optim.muon.muon import as_matrix, descent, direction, iteration, uses_muon
from launcher.optim.muon.orthogonal import orthogonalized

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
        self, shards: Sequence[FlatShard], groups: Sequence[Mapping[str, Any]], ranks: DataParallelGroup | None
    ) -> None:
        """shards: each a part of one parameter, the same parameters in the same order on every rank.

        groups: live options of the optimizer's groups. ranks: None: this process alone.
        """
        self._shards = shards
        self._groups = groups
        self._device = None if ranks is None else ranks.device  # which is quicker than the place masters are kept in
        self._ranks = None if ranks is None or ranks.process_group is None else ranks
        self._wholes = {
            number: shard.whole
            for number, shard in enumerate(shards)
            if shard.whole is not None and uses_muon(groups[shard.group])
        }

    def __contains__(self, number: int) -> bool:
        return number in self._wholes

    def descents(
        self, numbers: Sequence[int], spans: Mapping[int, list[Span]], grad_scale: float
    ) -> Iterator[list[Span]]:
        """Update momenta; yield, batch by batch, spans with the step that weights have to take, gradients scaled.

        numbers: shards to update, the same on every rank. spans: what of them is here and has a gradient. Collective,
        and whether a matrix has a gradient makes no difference to it: a rank that owns nothing of it does not know.
        """
        for batch in self._batches([number for number in numbers if number in self]):
            parts = {number: self._part(number, spans.get(number, ()), grad_scale) for number in batch}
            if self._ranks is None:
                updates = {number: self._update(number, part) for number, part in parts.items() if spans.get(number)}
            else:
                updates = self._updates_over(self._ranks, batch, parts)
            yield [self._descent(number, span, updates[number]) for number in batch for span in spans.get(number, ())]

    def _batches(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        is_split = any(self._wholes[number].is_split for number in numbers)
        most = BATCH_NUMEL * self._ranks.world_size if self._ranks and is_split else REPLICATED_BATCH_NUMEL
        batch: list[int] = []
        total = 0
        for number in numbers:
            numel = self._wholes[number].numel
            if batch and total + numel > most:
                yield batch
                batch, total = [], 0
            batch.append(number)
            total += numel
        if batch:
            yield batch

    def _part(self, number: int, spans: Sequence[Span], grad_scale: float) -> Tensor:
        """Return this rank's part of what is orthogonalised, 1-D, where and in the type in which it travels."""
        shard = self._shards[number]
        device = self._device or shard.master.device
        how = iteration(self._groups[shard.group], device)
        part = torch.zeros(shard.master.numel(), dtype=how.dtype, device=device)
        for span in spans:
            part[_place(span, shard)] = direction(span, grad_scale).to(device, how.dtype)
        return part

    def _update(self, number: int, direction: Tensor) -> Tensor:
        how = iteration(self._groups[self._shards[number].group], direction.device)
        return orthogonalized(direction.view(as_matrix(self._wholes[number].shape)), how).reshape(-1)

    def _descent(self, number: int, span: Span, update: Tensor) -> Span:
        shard = self._shards[number]
        piece = update[_place(span, shard)].to(span.master.device)
        return descent(span, piece, self._groups[shard.group], self._wholes[number].shape)

    # ---- between ranks ----

    def _updates_over(
        self, ranks: DataParallelGroup, batch: Sequence[int], parts: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return this rank's parts of the updates, 1-D. Collective."""
        workers = self._workers(ranks, batch)
        mine = [number for number in batch if workers[number] == ranks.rank]
        wholes = {number: parts[number] for number in mine}
        if any(self._wholes[number].is_split for number in batch):
            wholes = self._gathered(ranks, batch, workers, parts)
        updates = {number: self._update(number, wholes[number]) for number in mine}
        return self._handed_out(ranks, batch, workers, updates, parts[batch[0]])

    def _workers(self, ranks: DataParallelGroup, batch: Sequence[int]) -> dict[int, int]:
        """Return the rank that orthogonalises each matrix: the dearest first, each to the one with the least to do.

        Of ranks with as much to do the one that owns most of it.
        """
        loads = [0] * ranks.world_size
        workers = {}
        work = {number: self._wholes[number].numel * min(as_matrix(self._wholes[number].shape)) for number in batch}
        for number in sorted(batch, key=lambda number: work[number], reverse=True):
            parts = self._wholes[number].parts
            workers[number] = min(range(ranks.world_size), key=lambda rank: (loads[rank], -len(parts[rank])))
            loads[workers[number]] += work[number]
        return workers

    def _gathered(
        self, ranks: DataParallelGroup, batch: Sequence[int], workers: Mapping[int, int], parts: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Send parts to who works on them; return the matrices this rank works on, 1-D. Collective."""
        everybody = range(ranks.world_size)
        sends = [[parts[number] for number in batch if workers[number] == worker] for worker in everybody]
        mine = [number for number in batch if workers[number] == ranks.rank]
        sizes = [[len(self._wholes[number].parts[source]) for number in mine] for source in everybody]
        received = _exchange(ranks, sends, sizes, parts[batch[0]])
        return {number: torch.cat(pieces) for number, pieces in zip(mine, zip(*received, strict=True), strict=True)}

    def _handed_out(
        self,
        ranks: DataParallelGroup,
        batch: Sequence[int],
        workers: Mapping[int, int],
        updates: Mapping[int, Tensor],
        like: Tensor,
    ) -> dict[int, Tensor]:
        """Send the parts of updates to their owners; return what this rank owns of all. Collective.

        like: any tensor of the updates' type and device.
        """
        everybody = range(ranks.world_size)
        owned = {number: self._wholes[number].parts for number in batch}
        sends = [
            [update[owned[number][owner].start : owned[number][owner].stop] for number, update in updates.items()]
            for owner in everybody
        ]
        of_worker = [[number for number in batch if workers[number] == worker] for worker in everybody]
        sizes = [[len(owned[number][ranks.rank]) for number in numbers] for numbers in of_worker]
        received = _exchange(ranks, sends, sizes, like)
        found: dict[int, Tensor] = {}
        for numbers, pieces in zip(of_worker, received, strict=True):
            found.update(zip(numbers, pieces, strict=True))
        return found


def _exchange(
    ranks: DataParallelGroup, sends: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
) -> list[tuple[Tensor, ...]]:
    """Send `sends[r]` to rank r; return what rank r sent here, tensors of `sizes[r]` elements. Collective.

    like: any tensor of the type and device of all.
    """
    outgoing = [torch.cat([like.new_empty(0), *tensors]) for tensors in sends]
    incoming = [like.new_empty(sum(of_source)) for of_source in sizes]
    collectives.exchange(ranks, outgoing, incoming).wait()
    return [flat.split(list(of_source)) for flat, of_source in zip(incoming, sizes, strict=True)]


def _place(span: Span, shard: FlatShard) -> slice:
    """Return where in a shard a span of it stands."""
    start = span.master.storage_offset() - shard.master.storage_offset()
    return slice(start, start + span.master.numel())
