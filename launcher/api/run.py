"""`launcher.run`: a function or a script on ranks, as `torchrun`'s `elastic_launch(config, fn)(*args)` is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from launcher.api.execute import execute
from launcher.api.outcome import Outcome
from launcher.api.output import TakeLine, output_for
from launcher.api.parameters import Options, Parameters, StrPath, command_for, in_python_words

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class _Values(TypedDict, total=False):
        ranks: int | str | None
        hosts: Sequence[str] | None
        hostfile: StrPath | None
        include: str
        exclude: str
        env: Mapping[str, str] | None
        max_restarts: int
        log_dir: StrPath | None
        timeout_s: float | None
        output: Literal["console", "files"] | TakeLine
        options: Options


_T = TypeVar("_T")


@overload
def run(target: Callable[..., _T], /, *args: Any, **values: Unpack[_Values]) -> list[_T]: ...
@overload
def run(target: StrPath, /, *args: Any, **values: Unpack[_Values]) -> Outcome: ...
def run(
    target: Callable[..., Any] | StrPath,
    /,
    *args: Any,
    ranks: int | str | None = None,
    hosts: Sequence[str] | None = None,
    hostfile: StrPath | None = None,
    include: str = "",
    exclude: str = "",
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    log_dir: StrPath | None = None,
    timeout_s: float | None = None,
    output: str | TakeLine = "console",
    options: Options = Options(),  # noqa: B008  # immutable
) -> list[Any] | Outcome:
    """Run a function, or the script at a path, on ranks; return what the function returned on each, or the outcome.

    Every rank is a fresh process with the environment of `launch`. args: of the function, or of the script. They and
    the results are pickled, at most 1 GiB each; what cannot be imported, such as a lambda, needs cloudpickle.
    The first rank that fails ends all others. Works on any thread; two calls at once are two jobs.

    ranks: on each host, or "gpu", "cpu", "auto" as torchrun means them; None: one for each GPU, 1 without GPUs, or the
    slots that a hostfile or Slurm gives.
    hosts, hostfile: hosts to use over SSH, lines such as "node-a" or "node-a slots=8" or a file of them. Without either
    the nodes of the Slurm allocation that this process is in, else this machine.
    include, exclude: choose hosts and slots, as `launch --include` does.
    env: variables for every rank.
    max_restarts: start again after a failure, so often.
    log_dir: parent of the run folder with all output; default $LAUNCH_LOG_DIR, else `runs`.
    timeout_s: end the job when it takes longer, its start included.
    output: "console" shows lines of ranks, prefixed with `[rank]`, on sys.stdout and sys.stderr; "files" shows nothing;
    a function gets rank, stream and line of each.
    options: what is seldom needed.

    Raises: RankFailed for the first rank that failed, its own exception as the cause; JobTimeout; UsageError when the
    call is wrong or cannot be sent; TransportError when a host cannot be reached; KeyboardInterrupt after an interrupt,
    when all ranks have ended.
    """
    with in_python_words():
        parameters = Parameters(
            command=command_for(target, args),
            ranks=ranks,
            hosts=hosts,
            hostfile=hostfile,
            include=include,
            exclude=exclude,
            env=env or {},
            max_restarts=max_restarts,
            log_dir=log_dir,
            timeout_s=timeout_s,
            options=options,
        )
        ended = execute(parameters, output_for(output))
    return ended.results() if parameters.is_call else ended.outcome()
