"""`deepspeed.runtime.sequence_parallel`: models of transformers whose ranks have parts of sequences."""

from . import parallel_state_sp, ulysses_sp

__all__ = ["parallel_state_sp", "ulysses_sp"]
