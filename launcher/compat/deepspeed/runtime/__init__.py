"""`deepspeed.runtime`: schedules, ZeRO, activation checkpointing and the engine class."""

from . import activation_checkpointing, engine, lr_schedules, zero

__all__ = ["activation_checkpointing", "engine", "lr_schedules", "zero"]
