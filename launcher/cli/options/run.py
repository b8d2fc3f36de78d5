"""The options of `launch run`: how they are declared, and the values they become.

An option's name is that of the field it fills: of `Request` (what runs), of `SshOptions` (how hosts are reached) or of
`OutputOptions` (what is shown). So a new option is its declaration, its field, and the code that obeys it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from launcher.base import env
from launcher.base.errors import UsageError
from launcher.base.fields import filled
from launcher.cli.options.accepted import ACCEPTED, with_endpoint
from launcher.cli.options.command import Number, Ranks, core_list, declared, files, signal_list, under
from launcher.cli.options.hosts import HOST_CHOICE, REACHING, ssh_options
from launcher.cli.options.output import OUTPUT, OutputOptions
from launcher.compat import AUTO as AUTO_ENGINE
from launcher.compat import ENGINES
from launcher.journal.faults import KINDS as FAULTS
from launcher.plan.plan import DEFAULT_GRACE_S, DEFAULT_LEASE_S, ON_OOM, REPORT, Command
from launcher.plan.request import DEFAULT_LOG_DIR, LIMITS, Request, resume_from
from launcher.transport.ssh.options import SshOptions

_ranks, _hosts, _failure, _output = map(under, ("Ranks", "Hosts", "Failure", "Output"))
_environment, _compatibility = map(under, ("Environment", "Compatibility"))
_SSH = "pdsh"  # DeepSpeed's name for its way over SSH

_OPTIONS = (
    *HOST_CHOICE,
    *REACHING,
    _hosts(
        "--node-rank",
        also=("--machine-rank",),
        type=Number(LIMITS["node_rank"]),
        help="Start the ranks of this node only: every node runs its own command.",
    ),
    _hosts(
        "--job-id",
        "run_id",
        also=("--rdzv-id",),
        metavar="NAME",
        help="Name of the job where every node runs its own command. Default: made of the master's address.",
    ),
    _hosts("--no-ssh", is_flag=True, help="Like --node-rank; the hostfile says which node this is."),
    _ranks(
        "--num-gpus",
        also=("--num-accelerators", "--nproc-per-node"),
        type=Ranks(LIMITS["num_gpus"]),
        metavar="N|gpu|cpu|auto",
        help="Ranks on each host: a number, gpu (all GPUs), cpu (one for each CPU core) or auto. Default: one for each"
        " slot or GPU; without GPUs 1.",
    ),
    _ranks(
        "--master-addr",
        also=("--main-process-ip",),
        metavar="HOST",
        help="Address of node 0. Default: its name in the hostfile.",
    ),
    _ranks(
        "--master-port",
        also=("--main-process-port",),
        type=Number(LIMITS["master_port"]),
        help="Port on node 0. Default: a free one; needed with --node-rank or --no-ssh on several nodes.",
    ),
    _ranks("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m."),
    _ranks("--no-python", is_flag=True, help="SCRIPT is an executable: run it without Python."),
    _ranks(
        "--pass-local-rank",
        is_flag=True,
        help="Pass --local_rank=N to the script. Default: LOCAL_RANK in the environment only.",
    ),
    _ranks("--bind-cores-to-rank", "bind_cores", is_flag=True, help="Bind each rank to CPU cores."),
    _ranks(
        "--bind-core-list",
        metavar="LIST",
        type=core_list,
        help="CPU cores to bind, such as 0-15,32. Default: all physical cores. Implies --bind-cores-to-rank.",
    ),
    _environment(
        "--env",
        multiple=True,
        metavar="KEY[=VALUE]",
        help="Set a variable for every rank; without a value, this shell's own. Repeatable.",
    ),
    _environment(
        "--env-file",
        "env_files",
        multiple=True,
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="File of KEY=VALUE lines for every rank. Repeatable. .deepspeed_env and .launch_env are always read.",
    ),
    _failure(
        "--grace",
        "grace_s",
        also=("--shutdown-timeout",),
        type=Number(LIMITS["grace_s"]),
        metavar="S",
        default=DEFAULT_GRACE_S,
        help=f"Seconds to wait after SIGTERM before SIGKILL. Default: {DEFAULT_GRACE_S:g}.",
    ),
    _failure(
        "--heartbeat-timeout",
        "--lease",
        "lease_s",
        type=Number(LIMITS["lease_s"]),
        metavar="S",
        default=DEFAULT_LEASE_S,
        help=f"Seconds without a heartbeat of another host before it is lost. Default: {DEFAULT_LEASE_S:g}.",
    ),
    _failure(
        "--max-restarts",
        type=Number(LIMITS["max_restarts"]),
        default=0,
        help="Restart the job after a failure, up to N times. Default: 0.",
    ),
    _failure(
        "--min-nodes",
        type=Number(LIMITS["min_nodes"]),
        help="Restart without lost hosts if at least N are left. Default: all are needed.",
    ),
    _failure(
        "--resume",
        type=resume_from,
        metavar="auto|never|DIR",
        help="Resume from the newest checkpoint in DIR; auto: in checkpoint.folder of the config; never: do not."
        " Default: auto, at restarts only.",
    ),
    _failure(
        "--on-oom",
        type=click.Choice(ON_OOM),
        metavar="|".join(ON_OOM),
        default=REPORT,
        help="When memory ends: report what needs less of it, or ladder: restart with that, from the last checkpoint"
        " and with the same effective batch, until it fits. Default: report.",
    ),
    _failure(
        "--hang-timeout",
        "hang_timeout_s",
        type=Number(LIMITS["hang_timeout_s"]),
        metavar="S",
        help="Stop the job when a rank makes no progress for S seconds. Default: never.",
    ),
    _failure(
        "--fault",
        "faults",
        multiple=True,
        metavar="KIND@STEP[:RANK]",
        help=f"Rehearse a fault after that step, of the last rank unless one is named, at the first start only:"
        f" {', '.join(FAULTS)}. Repeatable.",
    ),
    _failure(
        "--signals-to-handle",
        "stop_signals",
        type=signal_list,
        default="SIGINT,SIGTERM,SIGHUP",
        metavar="LIST",
        help="Signals that shut the job down gracefully. Default: SIGINT,SIGTERM,SIGHUP.",
    ),
    _output(
        "--log-dir",
        also=("--enable-each-rank-log",),
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        envvar="LAUNCH_LOG_DIR",
        default=DEFAULT_LOG_DIR,
        help="Parent folder of the log files: DIR/JOB/rank_N.log. Default: runs.",
    ),
    _output("--no-journal", is_flag=True, help="Do not record steps, times and events in the folder of the logs."),
    _output(
        "--metrics-port",
        type=Number(LIMITS["metrics_port"]),
        metavar="PORT|ADDRESS:PORT",
        help="Serve the figures of the job to Prometheus at http://127.0.0.1:PORT/metrics, or at another address of"
        " this machine; 0: a free port, which is shown. Default: no.",
    ),
    _output(
        "--otlp",
        type=Number(LIMITS["otlp"]),
        metavar="URL|auto",
        help="Push the same figures to a collector of OpenTelemetry every 10 s; auto: where OTEL_EXPORTER_OTLP_ENDPOINT"
        " says. Default: no.",
    ),
    *OUTPUT,
    _compatibility(
        "--engine",
        type=click.Choice(ENGINES),
        metavar="|".join(ENGINES),
        envvar=env.ENGINE.name,
        default=AUTO_ENGINE,
        help="What `import deepspeed` finds. auto: DeepSpeed if it is installed, else the built-in engine; builtin:"
        " always the built-in engine. Default: auto.",
    ),
    _compatibility(
        "--standalone",
        is_flag=True,
        help="Use this machine only, also inside a job of Slurm or another scheduler.",
    ),
    _compatibility("--no-local-rank", is_flag=True, help="The default; for old scripts."),
    _compatibility(
        "--launcher",
        metavar=_SSH,
        help="Accepted for scripts of DeepSpeed and accelerate; hosts of a hostfile are always reached over SSH.",
    ),
    _compatibility(
        "--save-pid",
        "saves_pid",
        is_flag=True,
        help="Write the process id of launch to launch.pid in the folder of the logs.",
    ),
    *ACCEPTED,
)


@dataclass(frozen=True)
class RunOptions:
    """The options of one `launch run` as values."""

    request: Request
    ssh: SshOptions
    output: OutputOptions
    dry_run: bool
    as_json: bool

    @property
    def wants_panel(self) -> bool:
        """Whether a terminal may show the panel."""
        return self.output.wants_panel and not self.ssh.verbose


def read_options(values: Mapping[str, Any], notes: Sequence[str] = (), *, in_slurm: bool) -> RunOptions:
    """Return what the values of the options, by name, ask for. notes: what to tell the user. in_slurm: the
    hosts are those of a Slurm allocation. Raises: UsageError for options that contradict each other.
    """
    values = dict(values)
    _refuse_contradictions(values)
    script, arguments = values["script"], values["script_args"]
    values["command"] = Command(_kind(values), script, arguments, values["pass_local_rank"])
    values["in_slurm"] = in_slurm
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
    values["has_journal"] = not values["no_journal"]
    values["verbose"] = values["verbose"] or values["log_level"] == "debug"
    return RunOptions(
        filled(Request, values),
        ssh_options(values),
        filled(OutputOptions, values),
        dry_run=values["dry_run"],
        as_json=values["as_json"],
    )


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


run_options = declared(
    (
        *_OPTIONS,
        click.argument("script", shell_complete=files),
        click.argument("script_args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...", shell_complete=files),
    )
)
