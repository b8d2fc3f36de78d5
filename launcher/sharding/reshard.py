"""From one sharding to another: the intersection of two maps, whatever their worlds and units are."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.base.errors import EngineError
from launcher.sharding.shard_map import ShardMap, ShardRange


@dataclass(frozen=True)
class Transfer:
    """Elements of one parameter that a rank takes over from one shard of the source."""

    name: str
    start: int  # first element within the parameter
    source: ShardRange
    unit: int  # of the target
    offset: int  # first element, within the rank's shard of that unit

    @property
    def numel(self) -> int:
        return self.source.numel


def transfers_to(rank: int, source: ShardMap, target: ShardMap) -> list[Transfer]:
    """Return what fills the shards of one rank of `target` from those of `source`, by target unit and offset.

    Every element of a parameter that the rank holds comes exactly once; padding comes from nowhere. Parameters that
    only the source has are left out. The cost follows from the number of transfers, not from that of ranks.

    Raises: EngineError for a parameter that the source does not have, or has in another shape.
    """
    transfers = []
    for unit in range(len(target.layouts)):
        for wanted, offset in target.params_of(unit, rank):
            _check(wanted.name, source, target)
            start = wanted.start
            for found in source.shards_of(wanted.name, start, wanted.stop):
                transfers.append(Transfer(wanted.name, start, found, unit, offset + start - wanted.start))
                start += found.numel
    return transfers


def _check(name: str, source: ShardMap, target: ShardMap) -> None:
    have, want = source.param(name), target.param(name)
    if have is None:
        raise EngineError(f"the source has no parameter {name}", hint="take it from the same model")
    if want is not None and have.shape != want.shape:
        raise EngineError(
            f"the parameter {name} has the shape {have.shape} in the source and {want.shape} in the model",
            hint="build the model as the source was built",
        )
