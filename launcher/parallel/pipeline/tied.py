"""Parameters that several stages have a copy of, such as an embedding whose weight is the output layer's, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from launcher.base.errors import EngineError
from launcher.comm.communicator import Transfer
from launcher.comm.groups import RankGroup
from launcher.parallel.pipeline.links import RankOf
from launcher.parallel.pipeline.stages import StagedModel
from launcher.zero.gradients import UnitGradients
from launcher.zero.marks import mark_copy
from launcher.zero.parameters import unit_params_of
from launcher.zero.unit import FlatUnit


def mark_copies(model: StagedModel, rank: int, rank_of: RankOf) -> None:
    """Mark the parameters that a rank of an earlier stage counts and saves. Before units are built."""
    params = dict(model.named_parameters())
    for name, holders in _holders(model, rank_of):
        if rank in holders[1:]:
            mark_copy(params[name])


class TiedParameters:
    """Keeps all copies of a parameter equal: they start with the same values, and get the same gradients."""

    def __init__(self, model: StagedModel, units: Sequence[FlatUnit], group: RankGroup, rank_of: RankOf) -> None:
        """group: the ranks of the pipeline."""
        self._group = group
        self._params = dict(model.named_parameters())
        self._gradients = dict(_trained(units))
        # What this rank has a copy of, with the ranks that have one, in the order of stages.
        self._shared = [(name, holders) for name, holders in _holders(model, rank_of) if group.rank in holders]

    def copy_from_owner(self) -> None:
        """Give all copies the values of the first stage's. Every rank of the pipeline must call it."""
        for name, (owner, *others) in self._shared:
            param = self._params[name]
            self._check_alike(name, param, [peer for peer in (owner, *others) if peer != self._group.rank])
            dense = param.data.contiguous()
            sent = dense.view(-1).view(torch.uint8)
            if self._group.rank == owner:
                transfers = [Transfer(sent, peer, is_sent=True) for peer in others]
            else:
                transfers = [Transfer(sent, owner, is_sent=False)]
            self._group.communicator.transfer(transfers).wait()
            if self._group.rank != owner:
                param.data.copy_(dense)
                found = unit_params_of(param)
                if found is not None:
                    found.refresh()

    def _check_alike(self, name: str, param: torch.Tensor, peers: Sequence[int]) -> None:
        """Raise EngineError, on all ranks with a copy, where tensor parallelism has split the copies differently."""
        own = torch.tensor([param.numel()], device=param.device)
        sizes = [torch.empty_like(own) for _ in peers]
        transfers = [Transfer(own, peer, is_sent=True) for peer in peers]
        transfers += [Transfer(size, peer, is_sent=False) for peer, size in zip(peers, sizes, strict=True)]
        self._group.communicator.transfer(transfers).wait()
        found = sorted({int(size) for size in (own, *sizes)})
        if len(found) > 1:
            raise EngineError(
                "stages share this parameter and have different parts of it, of"
                f" {' and '.join(map(str, found))} values",
                where=name,
                hint="split all layers that use it alike: tensor_parallel.partition_config names them",
            )

    def add_gradients(self) -> None:
        """Replace this rank's gradients by the sums, which have the same bits on all ranks with a copy.

        After the last backward of a step, before reductions. Every rank of the pipeline must call it.
        """
        for name, holders in self._shared:
            if name not in self._gradients:
                continue
            gradients, index = self._gradients[name]
            own = gradients.local_gradient(index)
            others = {peer: torch.empty_like(own) for peer in holders if peer != self._group.rank}
            transfers = [Transfer(own, peer, is_sent=True) for peer in others]
            transfers += [Transfer(received, peer, is_sent=False) for peer, received in others.items()]
            self._group.communicator.transfer(transfers).wait()
            terms = [others.get(peer, own) for peer in holders]
            own.copy_(torch.stack(terms).sum(dim=0) if len(terms) > 2 else terms[0] + terms[1])


def _holders(model: StagedModel, rank_of: RankOf) -> Iterator[tuple[str, list[int]]]:
    """Yield parameters with copies on several ranks, with these ranks in the order of their stages."""
    for name, stages in sorted(model.tied.items()):
        holders = list(dict.fromkeys(rank_of(stage) for stage in stages))
        if len(holders) > 1:
            yield name, holders


def _trained(units: Sequence[FlatUnit]) -> Iterator[tuple[str, tuple[UnitGradients, int]]]:
    for unit in units:
        if unit.grads is not None:
            for slot in unit.layout.slots:
                yield slot.name, (unit.grads, slot.index)
