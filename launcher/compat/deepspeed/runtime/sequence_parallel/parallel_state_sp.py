"""`deepspeed.runtime.sequence_parallel.parallel_state_sp`: groups of sequence parallelism, as `mpu`."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from launcher.compat import ranks, ulysses


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Make the groups. Every rank must call it. Raises: EngineError for a size that does not divide the ranks."""
    ulysses.SequenceGroups(sequence_parallel_size)


def get_sequence_parallel_group() -> ProcessGroup:
    """Return the ranks that have parts of this rank's sequences. Raises: EngineError where it is alone."""
    return ulysses.existing(ulysses.sequence_axis()[0])


def get_sequence_parallel_world_size() -> int:
    """Return how many these are."""
    return ulysses.sequence_axis()[1]


def get_sequence_parallel_rank() -> int:
    """Return which part of a sequence this rank has."""
    return ulysses.sequence_axis()[2]


get_sequence_data_parallel_group = ranks.get_world_group
get_sequence_data_parallel_world_size = ranks.get_world_size
get_sequence_data_parallel_rank = ranks.get_rank
