"""`deepspeed.runtime`: configs, schedules, ZeRO, pipelines, sequence parallelism, loss scales, loaders, and more."""

from . import (
    activation_checkpointing,
    config,
    dataloader,
    engine,
    fp16,
    lr_schedules,
    pipe,
    sequence_parallel,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing",
    "config",
    "dataloader",
    "engine",
    "fp16",
    "lr_schedules",
    "pipe",
    "sequence_parallel",
    "utils",
    "zero",
]
