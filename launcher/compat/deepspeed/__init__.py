"""The package `deepspeed` as scripts and Hugging Face libraries see it, backed by the built-in engine.

Loaded under that name by `launcher.compat`: the modules here import each other by relative names alone, so that none of
them exists twice.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NoReturn

from launcher.base.errors import EngineError
from launcher.engine import build
from launcher.engine.arguments import add_config_arguments
from launcher.engine.engine import Engine as DeepSpeedEngine
from launcher.engine.pipeline import PipelineEngine
from launcher.parallel.tensor.init import tp_model_init

from . import accelerator, checkpoint, comm, launcher, monitor, ops, pipe, profiling, runtime, utils
from .accelerator import get_accelerator
from .comm import init_distributed
from .pipe import PipelineModule
from .runtime import zero
from .runtime.activation_checkpointing import checkpointing
from .runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from .utils import OnDevice, log_dist, logger

# The release whose interface this is. Libraries ask for a version before they use a part of it: every part that they
# use was there in this one.
__version__ = "0.19.8"

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "InferenceEngine",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "launcher",
    "log_dist",
    "logger",
    "monitor",
    "ops",
    "pipe",
    "profiling",
    "runtime",
    "tp_model_init",
    "utils",
    "zero",
]


@functools.wraps(build.initialize)
def initialize(*args: Any, **kwargs: Any) -> Any:
    """Do what `launcher.initialize` does; a process that is alone gets a process group of its own, too.

    Libraries gather over it what they log. Raises: as `launcher.initialize`.
    """
    given = inspect.signature(build.initialize).bind(*args, **kwargs).arguments
    wanted = {name: given[name] for name in ("distributed_port", "dist_init_required") if name in given}
    init_distributed(**wanted)
    return build.initialize(*args, **kwargs)


def init_inference(*_: Any, **__: Any) -> NoReturn:
    """Refuse. Raises: EngineError."""
    raise EngineError(
        "init_inference(): the built-in engine has no inference kernels",
        hint="call initialize() without an optimizer, or install DeepSpeed",
    )


class InferenceEngine:
    """For `isinstance`, which libraries ask: no model is one. Raises: EngineError when it is constructed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        init_inference()


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"module 'deepspeed' has no attribute {name!r}: it is the built-in engine of launch, whose docs/huggingface.md"
        " lists what there is"
    )
