"""The functions of the package `deepspeed` itself, and what this machine has by `launch report`."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import launcher
from launcher.base.errors import EngineError
from launcher.compat.logs import log_dist
from launcher.compat.names import VERSION
from launcher.compat.ranks import init_distributed
from launcher.engine import build


@functools.wraps(build.initialize)
def initialize(*args: Any, **kwargs: Any) -> Any:
    """Do what `launcher.initialize` does; a process that is alone gets a process group of its own, too.

    `load_checkpoint` of its engine restores neither random numbers nor the position in the data, as that of DeepSpeed.
    Libraries gather over the group what they log. The log says whose engine answers to DeepSpeed's name, in a line that
    begins as the one of DeepSpeed, by which tools tell that it trains. Raises: as `launcher.initialize`.
    """
    given = inspect.signature(build.initialize).bind(*args, **kwargs).arguments
    wanted = {name: given[name] for name in ("distributed_port", "dist_init_required") if name in given}
    init_distributed(**wanted)
    answering = f"the built-in engine of launch {launcher.__version__}"
    log_dist(f"DeepSpeed info: version={VERSION}, answered by {answering}", [0])
    engine, *others = build.initialize(*args, **kwargs)
    engine.load_as_deepspeed()
    return (engine, *others)


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


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report. Both options: part of DeepSpeed's signature. Raises: CalledProcessError where it fails."""
    # Not -m: no file of the working folder may take the package's place.
    subprocess.run([sys.executable, Path(launcher.__file__).with_name("__main__.py"), "report"], check=True)
