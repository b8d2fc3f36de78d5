"""`deepspeed.moe.layer`: a mixture of experts as a layer."""

from launcher.moe import MoE

__all__ = ["MoE"]
