"""Run a function of the notebook on ranks of this machine: `launcher.run` with its output in the cell."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from launcher.agent.wire import STDERR, STDOUT
from launcher.api.execute import execute
from launcher.api.output import ConsoleOutput, write
from launcher.api.parameters import Options, Parameters, command_for, in_python_words
from launcher.base.errors import UsageError
from launcher.plan.plan import DEFAULT_GRACE_S

_T = TypeVar("_T")


class CellOutput(ConsoleOutput):
    """Shows a run in a cell as `launch` shows it on a console."""

    def say(self, text: str) -> None:
        write(STDOUT, f"{text}\n")

    def warning(self, text: str) -> None:
        write(STDERR, f"! {text}\n")


def run(
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_gpus: int = 2,
    *,
    log_dir: str | os.PathLike[str] | None = None,
    grace_s: float = DEFAULT_GRACE_S,
) -> list[_T]:
    """Run `fn(*args, **kwargs)` on `num_gpus` ranks of this machine and return what each returned, by rank.

    Every rank is a fresh process with the environment of `launch`; its output appears in the cell as it comes. The
    first rank that fails stops the others. log_dir: parent of the run folder, default as for `launch`. grace_s:
    seconds between SIGTERM and SIGKILL.

    Raises: RankFailed, a JobError, when a rank failed, with its traceback, and its exception as the cause where that
    can be pickled; UsageError when the call cannot be sent or there are fewer GPUs; KeyboardInterrupt after an
    interrupt, when all ranks have ended.
    """
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise UsageError(f"args is {args!r}, no tuple of arguments", hint="one argument x is given as (x,)")
    if num_gpus < 1:
        raise UsageError(f"num_gpus is {num_gpus}", hint="give 1 or more")
    with in_python_words():
        command = command_for(fn, args, kwargs)
        # This machine, inside a Slurm job too.
        parameters = Parameters(
            command=command, hosts=["localhost"], ranks=num_gpus, log_dir=log_dir, options=Options(grace_s=grace_s)
        )
        ended = execute(parameters, CellOutput())
    results: list[_T] = ended.results()
    return results
