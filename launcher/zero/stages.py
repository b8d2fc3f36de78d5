"""The stages as a table: what is sharded at each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StagePolicy:
    """What one stage shards over the ranks; parameters stay whole at all of these."""

    shard_optimizer: bool
    shard_gradients: bool


STAGES = {
    0: StagePolicy(shard_optimizer=False, shard_gradients=False),
    1: StagePolicy(shard_optimizer=True, shard_gradients=False),
    2: StagePolicy(shard_optimizer=True, shard_gradients=True),
}
