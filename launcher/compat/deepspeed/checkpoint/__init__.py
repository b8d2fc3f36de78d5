"""`deepspeed.checkpoint`: help for saving weights."""

from . import utils

__all__ = ["utils"]
