"""Options of torchrun, deepspeed and accelerate that `launch` takes for what they mean there, and what it says of them.

Options with a name of their own here are `also=` spellings of it. These have none: some work, some have no effect and
one sentence says so, so that a command line that works elsewhere works here.
"""

from __future__ import annotations

from typing import Any

import click

from launcher.base.errors import UsageError
from launcher.cli.options.command import option

# Option -> why it has no effect. Each takes a value.
_WITHOUT_EFFECT = {
    "--rdzv-conf": "nodes meet at the master address, which needs no settings",
    "--monitor-interval": "the end of a rank is seen at once",
    "--start-method": "every rank is a program of its own, which is neither forked nor spawned",
    "--role": "all ranks have one role",
    "--local-addr": "nodes meet at the master address; --master-addr names it",
}
# Flags that ask for what `launch` does in any case.
_ALWAYS = ("--run-path", "--use-env", "--multi-gpu")
_BACKENDS = ("c10d", "static")
NOTES = "launcher.notes"  # key of click's `Context.meta`
_PLUGIN = "write it into the config, and give the script that: --deepspeed FILE behind SCRIPT, or a DeepSpeedPlugin"
_FSDP = "leave it out: FSDP is set up in the script, by FullyShardedDataParallelPlugin"
# Options that have no counterpart, and what to do.
_ELSEWHERE = {
    "--virtual-local-rank": "leave it out: scripts read LOCAL_RANK",
    "--numa-binding": "write --bind-cores-to-rank",
    "--launcher-args": "leave it out; SSH options belong into ~/.ssh/config or a file for --ssh-config",
    "--elastic-training": "write --nnodes MIN:MAX --max-restarts N",
    "--min-elastic-nodes": "write --nnodes MIN:MAX --max-restarts N",
    "--max-elastic-nodes": "write --nnodes MIN:MAX --max-restarts N",
    "--autotuning": "leave it out; `launch tune` finds the quickest setting",
    "--num-processes": "accelerate counts the ranks of all machines; write --num-gpus N with those of one",
    "--mixed-precision": "write --env ACCELERATE_MIXED_PRECISION=bf16, which Accelerator() reads",
    "--gpu-ids": "write --include localhost:0,1 with their numbers",
    "--cpu": "write --num-gpus N --env ACCELERATE_USE_CPU=true",
    "--use-deepspeed": _PLUGIN,
    "--deepspeed-config-file": _PLUGIN,
    "--use-fsdp": _FSDP,
    "--use-megatron-lm": "leave it out: tensor_parallel and pipeline are sections of the config",
    "--use-parallelism-config": "leave it out: give Accelerator a ParallelismConfig",
    "--fp8-backend": "leave it out: the engine does not train in fp8",
    "--tpu": "leave it out: TPUs are not supported",
    "--dynamo-backend": "write --env ACCELERATE_DYNAMO_BACKEND=INDUCTOR",
    "--dynamo-mode": "write --env ACCELERATE_DYNAMO_MODE=max-autotune",
    "--gradient-accumulation-steps": "write --env ACCELERATE_GRADIENT_ACCUMULATION_STEPS=N",
    "--num-cpu-threads-per-process": "write --env OMP_NUM_THREADS=N",
    "--enable-cpu-affinity": "write --bind-cores-to-rank",
    "--same-network": "leave it out: hosts are reached over SSH",
    "--no-ssh-check": "leave it out: hosts are connected once, and errors name them",
    "--logs-specs": "leave it out: --log-dir, --redirects and --tee say what is kept and shown",
    "--event-log-handler": "leave it out: what happened is in report.json of the run folder",
    "--config-file": "options of a run can be in a job file: `launch job.yaml`",
}
# The same for all options that begin so.
_ELSEWHERE_BY_PREFIX = {
    "--deepspeed-": _PLUGIN,
    "--zero-": _PLUGIN,
    "--zero3-": _PLUGIN,
    "--offload-": _PLUGIN,
    "--fsdp-": _FSDP,
    "--megatron-lm-": "leave it out: tensor_parallel and pipeline are sections of the config",
    "--duplicate-": "leave it out, and filter the logs of the run folder with grep",
}


def without_counterpart(name: str) -> str | None:
    """Return what to do in place of an option of another launcher, of which `launch` has none; None for others."""
    by_prefix = (hint for prefix, hint in _ELSEWHERE_BY_PREFIX.items() if name.startswith(prefix))
    return _ELSEWHERE.get(name) or next(by_prefix, None)


def _note(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    name = max(parameter.opts, key=len)
    if value is not None:
        ctx.meta.setdefault(NOTES, []).append(f"{name} has no effect: {_WITHOUT_EFFECT[name]}")


def _check_backend(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value not in (None, "", *_BACKENDS):
        raise UsageError(
            f"there is no rendezvous by {value}: nodes meet at the master address",
            where="--rdzv-backend",
            hint="leave it out; --master-addr and --master-port, or --rdzv-endpoint, say where",
        )


ACCEPTED = (
    option(
        "--rdzv-endpoint",
        hidden=True,
        metavar="HOST[:PORT]",
        help="With --node-rank the master's address and port; on one machine the port.",
    ),
    option("--rdzv-backend", hidden=True, expose_value=False, callback=_check_backend, help="c10d or static."),
    *(option(name, hidden=True, expose_value=False, callback=_note, help=why) for name, why in _WITHOUT_EFFECT.items()),
    *(option(name, hidden=True, expose_value=False, is_flag=True, help="The default.") for name in _ALWAYS),
)


def with_endpoint(values: dict[str, Any], endpoint: str | None, notes: list[str]) -> dict[str, Any]:
    """Return option values with the master that torchrun's --rdzv-endpoint names. Raises: UsageError."""
    if endpoint is None:
        return values
    host, port = _split(endpoint)
    if values["hostfile"] is not None or values["in_slurm"]:
        notes.append("--rdzv-endpoint has no effect: one `launch` starts all nodes, and they meet at node 0")
        return values
    is_one_machine = values["node_rank"] is None and not values["no_ssh"]
    if is_one_machine and values["num_nodes"] is not None and values["num_nodes"].most > 1 and not _is_here(host):
        raise UsageError(
            "--rdzv-endpoint does not say which node this is",
            hint="add --node-rank N, from 0 on the endpoint's host; or start once, with --hostfile",
        )
    given = {"master_port": port} if is_one_machine else {"master_addr": host, "master_port": port or 29500}
    return values | {name: value for name, value in given.items() if values[name] is None}


def _is_here(host: str) -> bool:
    from launcher.cluster.nodeset import is_loopback

    return is_loopback(host)


def _split(endpoint: str) -> tuple[str, int | None]:
    """Return host and port of `HOST[:PORT]`, `[::1]:29500`; port None where there is none, or 0: a free one."""
    from launcher.cluster.nodeset import split_endpoint

    host, given = split_endpoint(endpoint)
    port = "0" if given is None else given
    if not host or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError(f'"{endpoint}" is not HOST or HOST:PORT', where="--rdzv-endpoint", hint="such as node-a:29500")
    return host, int(port) or None
