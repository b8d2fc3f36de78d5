"""`deepspeed.sequence.layer`: attention around which ranks exchange heads for sequences."""

from launcher.compat.sequence_layers import DistributedAttention

__all__ = ["DistributedAttention"]
