"""`deepspeed.moe`: mixtures of experts."""

from . import layer, utils

__all__ = ["layer", "utils"]
