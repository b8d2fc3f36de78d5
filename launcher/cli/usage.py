"""Mistakes on the command line in the form of all our errors: what is wrong, where, what to write instead."""

from __future__ import annotations

import click

from launcher.base.errors import UsageError
from launcher.base.suggest import nearest
from launcher.cli.options.command import Option, spelled

_MASTER = "write --master-addr HOST --master-port PORT; without, `launch` finds both"
_LOGS = "each rank's whole output is in LOG_DIR/JOB/rank_N.log, and on the console; --log-dir says where"
# Options of torchrun, deepspeed and accelerate that have no counterpart here, and what to do.
_ELSEWHERE = {
    "--rdzv-endpoint": _MASTER,
    "--rdzv-backend": f"leave it out: nodes meet at the master address. {_MASTER}",
    "--rdzv-id": "leave it out: every job has an id of its own",
    "--rdzv-conf": "leave it out: nodes meet at the master address",
    "--local-addr": "leave it out, or write --master-addr HOST",
    "--monitor-interval": "leave it out: the end of a rank is seen at once",
    "--role": "leave it out",
    "--start-method": "leave it out",
    "--run-path": "leave it out: give the script's path",
    "--use-env": "leave it out: LOCAL_RANK is in the environment always",
    "--tee": f"leave it out: {_LOGS}",
    "--redirects": f"leave it out: {_LOGS}",
    "--local-ranks-filter": "leave it out, or filter the lines by their prefix: [0]",
    "--launcher-args": "leave it out; SSH options belong into ~/.ssh/config or a file for --ssh-config",
    "--elastic-training": "write --max-restarts N --min-nodes N",
    "--min-elastic-nodes": "write --min-nodes N --max-restarts N",
    "--max-elastic-nodes": "write --num-nodes N",
    "--autotuning": "leave it out; `launch estimate` says which settings fit into memory",
    "--num-processes": "write --num-gpus N, the ranks of each host",
    "--num-machines": "write --num-nodes N",
    "--machine-rank": "write --node-rank N",
    "--main-process-ip": "write --master-addr HOST",
    "--main-process-port": "write --master-port PORT",
    "--config-file": "options of a run can stand in a job file: `launch job.yaml`",
}


def as_usage_error(error: click.ClickException) -> UsageError:
    """Return what click has found wrong, as an error of ours."""
    if isinstance(error, click.NoSuchOption):
        return _no_such_option(error)
    if isinstance(error, click.MissingParameter):
        return UsageError(f"{_name(error) or 'an argument'} is missing", hint=_usage(error))
    if isinstance(error, click.BadOptionUsage):
        _, _, problem = error.message.rstrip(".").rpartition("' ")
        return UsageError(problem, where=spelled(error.option_name), hint=_usage(error))
    message = error.message[:1].lower() + error.message[1:].rstrip(".")
    if isinstance(error, click.BadParameter):
        expected, _, remedy = message.partition("; ")
        return UsageError(expected, where=_name(error), hint=remedy or None)
    return UsageError(message, hint=_usage(error) if isinstance(error, click.UsageError) else None)


def _no_such_option(error: click.NoSuchOption) -> UsageError:
    name = spelled(error.option_name)
    known = [spelled(option) for option in _spellings(error.ctx)]
    near = nearest(name, known, cutoff=0.7)
    hint = _ELSEWHERE.get(name) or (f"did you mean {near}?" if near else _usage(error))
    return UsageError(f"there is no option {error.option_name}", hint=hint)


def _spellings(ctx: click.Context | None) -> list[str]:
    """Return the long options of a command, those that are shown."""
    parameters = ctx.command.params if ctx is not None else []
    return [spelling for one in parameters for spelling in one.opts if spelling.startswith("--")]


def _name(error: click.BadParameter) -> str | None:
    if isinstance(error.param, click.Option):
        return error.param.spelling if isinstance(error.param, Option) else max(error.param.opts, key=len)
    return error.param.make_metavar(error.ctx) if error.param is not None and error.ctx is not None else None


def _usage(error: click.UsageError) -> str | None:
    if error.ctx is None:
        return None
    path = error.ctx.command_path
    return f"{path} --help lists what there is"
