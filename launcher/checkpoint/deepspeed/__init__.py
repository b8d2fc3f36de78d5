"""Checkpoints that DeepSpeed wrote, read without DeepSpeed."""

from launcher.checkpoint.deepspeed.source import DeepSpeedCheckpoint
from launcher.checkpoint.deepspeed.source import open_deepspeed as open_deepspeed

__all__ = ["DeepSpeedCheckpoint", "open_deepspeed"]
