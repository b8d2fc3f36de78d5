"""The options of `launch run`: how they are declared, and the values they become.

An option's name is that of the field it fills: of `Request` (what runs), of `Reaching` (how hosts are reached) or of
`OutputOptions` (what is shown). So a new option is its declaration, its field, and the code that obeys it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from launcher.base import env
from launcher.base.errors import UsageError
from launcher.cli.options.accepted import ACCEPTED, with_endpoint
from launcher.cli.options.command import option
from launcher.cli.options.hosts import HOST_CHOICE, HOSTS, REACHING, Reaching
from launcher.cli.options.output import OUTPUT, OutputOptions
from launcher.cli.options.types import CoreList, Ranks, ResumeFrom, Seconds, SignalList, Whole, files
from launcher.cluster.limits import MAX_SLOTS
from launcher.compat import AUTO as AUTO_ENGINE
from launcher.compat import ENGINES
from launcher.job.plan import DEFAULT_GRACE_S, DEFAULT_LEASE_S, Command
from launcher.job.request import Request
from launcher.slurm.allocation import in_allocation

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

_RANKS, _ENVIRONMENT, _FAILURE, _OUTPUT = "Ranks", "Environment", "Failure", "Output"
_COMPATIBILITY = "Compatibility"
_SSH = "pdsh"  # DeepSpeed's name for its way over SSH

_OPTIONS = (
    *HOST_CHOICE,
    *REACHING,
    option(
        "--node-rank",
        heading=HOSTS,
        also=("--machine-rank",),
        type=Whole(0),
        help="Start the ranks of this node only: every node runs its own command.",
    ),
    option(
        "--job-id",
        "run_id",
        heading=HOSTS,
        also=("--rdzv-id",),
        metavar="NAME",
        help="Name of the job where every node runs its own command. Default: made of the master's address.",
    ),
    option(
        "--no-ssh",
        heading=HOSTS,
        is_flag=True,
        help="Like --node-rank; the hostfile says which node this is.",
    ),
    option(
        "--num-gpus",
        heading=_RANKS,
        also=("--num-accelerators", "--nproc-per-node"),
        type=Ranks(1, MAX_SLOTS),
        help="Ranks on each host: a number, gpu (all GPUs), cpu (one for each CPU core) or auto. Default: one for each"
        " slot or GPU; without GPUs 1.",
    ),
    option(
        "--master-addr",
        heading=_RANKS,
        also=("--main-process-ip",),
        metavar="HOST",
        help="Address of node 0. Default: its name in the hostfile.",
    ),
    option(
        "--master-port",
        heading=_RANKS,
        also=("--main-process-port",),
        type=Whole(1, 65535),
        help="Port on node 0. Default: a free one.",
    ),
    option("-m", "--module", heading=_RANKS, is_flag=True, help="SCRIPT is a module, as in python -m."),
    option("--no-python", heading=_RANKS, is_flag=True, help="SCRIPT is an executable: run it without Python."),
    option(
        "--pass-local-rank",
        heading=_RANKS,
        is_flag=True,
        help="Pass --local_rank=N to the script. Default: LOCAL_RANK in the environment only.",
    ),
    option("--bind-cores-to-rank", "bind_cores", heading=_RANKS, is_flag=True, help="Bind each rank to CPU cores."),
    option(
        "--bind-core-list",
        heading=_RANKS,
        metavar="LIST",
        type=CoreList(),
        help="CPU cores to bind, such as 0-15,32. Default: all physical cores. Implies --bind-cores-to-rank.",
    ),
    option(
        "--env",
        heading=_ENVIRONMENT,
        multiple=True,
        metavar="KEY[=VALUE]",
        help="Set a variable for every rank; without a value, this shell's own. Repeatable.",
    ),
    option(
        "--env-file",
        "env_files",
        heading=_ENVIRONMENT,
        multiple=True,
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="File of KEY=VALUE lines for every rank. Repeatable. .deepspeed_env and .launch_env are always read.",
    ),
    option(
        "--grace",
        "grace_s",
        heading=_FAILURE,
        also=("--shutdown-timeout",),
        type=Seconds(0),
        metavar="S",
        default=DEFAULT_GRACE_S,
        help=f"Seconds to wait after SIGTERM before SIGKILL. Default: {DEFAULT_GRACE_S:g}.",
    ),
    option(
        "--lease",
        "lease_s",
        heading=_FAILURE,
        also=("--heartbeat-timeout",),
        type=Seconds(2),
        metavar="S",
        default=DEFAULT_LEASE_S,
        help=f"Heartbeat timeout of remote hosts, in seconds. Default: {DEFAULT_LEASE_S:g}.",
    ),
    option(
        "--max-restarts",
        heading=_FAILURE,
        type=Whole(0),
        default=0,
        help="Restart the job after a failure, up to N times. Default: 0.",
    ),
    option(
        "--min-nodes",
        heading=_FAILURE,
        type=Whole(1),
        help="Restart without lost hosts if at least N are left. Default: all are needed.",
    ),
    option(
        "--resume",
        heading=_FAILURE,
        type=ResumeFrom(),
        metavar="DIR",
        help="Resume from the newest checkpoint in DIR; auto: in checkpoint.folder of the config; never: do not."
        " Default: auto, at restarts only.",
    ),
    option(
        "--hang-timeout",
        "hang_timeout_s",
        heading=_FAILURE,
        type=Seconds(0, min_open=True),
        metavar="S",
        help="Stop the job when a rank makes no progress for S seconds. Default: never.",
    ),
    option(
        "--signals-to-handle",
        "stop_signals",
        heading=_FAILURE,
        type=SignalList(),
        default="SIGINT,SIGTERM,SIGHUP",
        metavar="LIST",
        help="Signals that stop the job in order. Default: SIGINT,SIGTERM,SIGHUP.",
    ),
    option(
        "--log-dir",
        heading=_OUTPUT,
        also=("--enable-each-rank-log",),
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        envvar="LAUNCH_LOG_DIR",
        default=Path("runs"),
        help="Parent folder of the log files: DIR/JOB/rank_N.log. Default: runs.",
    ),
    *OUTPUT,
    option(
        "--engine",
        heading=_COMPATIBILITY,
        type=click.Choice(ENGINES),
        metavar="NAME",
        envvar=env.ENGINE.name,
        default=AUTO_ENGINE,
        help="What `import deepspeed` finds. auto: DeepSpeed if it is installed, else the built-in engine; builtin:"
        " always the built-in engine. Default: auto.",
    ),
    option(
        "--standalone",
        heading=_COMPATIBILITY,
        is_flag=True,
        help="Use this machine only, also inside a job of Slurm or another scheduler.",
    ),
    option("--no-local-rank", heading=_COMPATIBILITY, is_flag=True, help="The default; for old scripts."),
    option(
        "--launcher",
        heading=_COMPATIBILITY,
        metavar=_SSH,
        help="SSH, the default with a hostfile; for old scripts and accelerate.",
    ),
    option(
        "--save-pid",
        "saves_pid",
        heading=_COMPATIBILITY,
        is_flag=True,
        help="Write the process id of launch to launch.pid in the folder of the logs.",
    ),
    *ACCEPTED,
)


@dataclass(frozen=True)
class RunOptions:
    """The options of one `launch run` as values."""

    request: Request
    reaching: Reaching
    output: OutputOptions
    dry_run: bool
    as_json: bool

    @property
    def wants_panel(self) -> bool:
        """Whether a terminal may show the panel."""
        return self.output.wants_panel and not self.reaching.verbose


def read_options(values: Mapping[str, Any], environ: Mapping[str, str], notes: Sequence[str] = ()) -> RunOptions:
    """Return what the values of the options, by name, ask for. notes: what to tell the user.

    Raises: UsageError for options that contradict each other.
    """
    values = dict(values)
    _refuse_contradictions(values)
    script, arguments = values["script"], values["script_args"]
    values["command"] = Command(_kind(values), script, arguments, values["pass_local_rank"])
    is_chosen = values["hostfile"] is not None or values["standalone"] or values["no_ssh"]
    values["in_slurm"] = not is_chosen and values["node_rank"] is None and in_allocation(environ)
    if values["launcher"] not in (None, _SSH) or (values["launcher"] is not None and values["in_slurm"]):
        raise UsageError(
            f"--launcher {values['launcher']}: hosts of a hostfile are reached over SSH, those of a Slurm job by srun",
            hint=f"leave it out; --launcher {_SSH} with a --hostfile means SSH",
        )
    all_notes = list(notes)
    values = with_endpoint(values, values["rdzv_endpoint"], all_notes)
    values["notes"] = tuple(all_notes)
    values["bound_cores"] = values["bind_core_list"] or (() if values["bind_cores"] else None)
    values["resume"] = values["resume"] or ""
    values["verbose"] = values["verbose"] or values["log_level"] == "debug"
    return RunOptions(
        _fill(Request, values),
        _fill(Reaching, values),
        _fill(OutputOptions, values),
        dry_run=values["dry_run"],
        as_json=values["as_json"],
    )


def _fill(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Return a value of a dataclass whose fields have the names of options."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names if name in values})


def _kind(values: Mapping[str, Any]) -> str:
    """Return what SCRIPT is: "script", "module" or "program"."""
    return "module" if values["module"] else "program" if values["no_python"] else "script"


def _refuse_contradictions(values: Mapping[str, Any]) -> None:
    if values["module"] and values["no_python"]:
        raise UsageError("--module and --no-python exclude each other", hint="give one of them")
    if values["pass_local_rank"] and values["no_local_rank"]:
        raise UsageError("--pass-local-rank and --no-local-rank exclude each other", hint="give one of them")
    if values["as_json"] and not values["dry_run"]:
        raise UsageError("--json goes with --dry-run", hint="add --dry-run")


def run_options(function: _F) -> _F:
    """Add all options and the arguments SCRIPT and ARGS to a click command."""
    decorated: Any = click.argument(
        "script_args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...", shell_complete=files
    )(function)
    decorated = click.argument("script", shell_complete=files)(decorated)
    for declare in reversed(_OPTIONS):
        decorated = declare(decorated)
    result: _F = decorated
    return result
