"""Checkpoints that DeepSpeed wrote, read without DeepSpeed."""

from launcher.checkpoint.formats.deepspeed.files import holds_deepspeed
from launcher.checkpoint.formats.deepspeed.source import DeepSpeedCheckpoint, open_deepspeed

__all__ = ["DeepSpeedCheckpoint", "holds_deepspeed", "open_deepspeed"]
