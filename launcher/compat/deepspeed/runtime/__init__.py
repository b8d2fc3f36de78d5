"""`deepspeed.runtime`: configs, schedules, ZeRO, pipelines, checkpointing, loss scales, loaders, the engine class."""

from . import activation_checkpointing, config, dataloader, engine, fp16, lr_schedules, pipe, utils, zero

__all__ = [
    "activation_checkpointing",
    "config",
    "dataloader",
    "engine",
    "fp16",
    "lr_schedules",
    "pipe",
    "utils",
    "zero",
]
