"""`deepspeed.sequence.cross_entropy`: the loss of each token of a whole sequence."""

from launcher.compat.sequence_layers import vocab_sequence_parallel_cross_entropy

__all__ = ["vocab_sequence_parallel_cross_entropy"]
