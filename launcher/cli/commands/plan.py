"""`launch plan`: every way to train a model on machines that are named, ranked by the time of a step."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.base.errors import LauncherError, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.fields import Whole
from launcher.base.units import counted
from launcher.cli.console import streams
from launcher.cli.options.command import Number, declared, files, memory_size, option
from launcher.cli.script_plan import facts_of_script, rehearse_rows

if TYPE_CHECKING:
    from launcher.config.schema import Config
    from launcher.planner.computing import Script, Transformer
    from launcher.planner.estimate import Machines
    from launcher.planner.hardware import Hardware
    from launcher.planner.model import ModelFacts, TransformerShape
    from launcher.planner.plan import Plan, Question, Row
    from launcher.planner.speed import Speed

_DEFAULT_LENGTH, _DEFAULT_BATCH = 4096, 256
_MAX_NODES = 2**17
_AXES = ("tensor", "pipeline", "sequence", "expert")
_EPILOG = """\b
examples:
  launch plan 7B --gpu H100-80GB --num-gpus 8
  launch plan ./llama/config.json --gpu A100-80GB --num-gpus 8 --num-nodes 16 --seq 8192
  launch plan 7B --gpu H100 --num-gpus 8 --tokens 100B --days 4
  launch plan 7B --gpu A100-40GB --num-gpus 8 --what-if memory=2 --what-if gpu=H100
  launch plan --hostfile hosts --write ds_config.json train.py --data corpus
"""


def is_script(model: str) -> bool:
    """Whether MODEL is the path of a script."""
    return model.endswith(".py") and Path(model).exists()


class _Command(click.Command):
    """Takes options behind a MODEL, too; what stands behind a script is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        model, arguments = values.get("model"), values.get("arguments")
        if isinstance(model, str) and isinstance(arguments, (tuple, list)) and arguments:  # else click's own sentinels
            is_about_script = bool(values.get("module")) or is_script(model)
            if arguments[0].startswith("-") and not is_about_script:
                args = [*args[: len(args) - 1 - len(arguments)], *arguments, model]
        return super().parse_args(ctx, args)


@dataclass(frozen=True)
class PlanOptions:
    """The options of one `launch plan`, by name."""

    model: str
    arguments: tuple[str, ...]
    module: bool
    gpu: str | None
    num_gpus: int | None
    num_nodes: int | None
    hostfile: str | None
    gpu_memory: int | None
    cpu_memory: int | None
    network: float | None
    config: str | None
    precision: str | None
    seq: int | None
    attention: str
    dropout: bool
    layers: int | None
    hidden: int | None
    heads: int | None
    vocab: int | None
    global_batch: int | None
    axes: str | None
    nvme: str | None
    tokens: float | None
    days: float | None
    what_if: tuple[tuple[str, str], ...]
    rows: int
    row: int
    write: str | None
    as_json: bool

    def __post_init__(self) -> None:
        if self.arguments and not self.is_script:
            hint = "arguments are for a script"
            raise UsageError(f"{self.model} takes no argument {self.arguments[0]}", hint=hint)
        if self.days is not None and self.tokens is None:
            raise UsageError("--days needs --tokens", hint="say how many are to be trained on: --tokens 1T")
        if self.hostfile is not None and (self.gpu or self.num_gpus or self.num_nodes):
            raise UsageError(
                "--hostfile says which machines there are", hint="leave --gpu, --num-gpus, --num-nodes out"
            )
        has_shape = self.shape is not None
        if self.is_script and (self.config is not None or has_shape or self.axes):
            hint = "a script says its own model and config; a mesh is chosen for a MODEL"
            raise UsageError("--config, --axes, --layers, --hidden and --heads are for a MODEL", hint=hint)

    @property
    def shape(self) -> TransformerShape | None:
        """The shape that the options give."""
        from launcher.cli.model_source import given_shape

        return given_shape(self.layers, self.hidden, self.heads, self.vocab)

    @property
    def is_script(self) -> bool:
        return self.module or is_script(self.model)

    @property
    def command(self) -> list[str]:
        """What a rehearsal runs."""
        return ["module" if self.module else "script", self.model, *self.arguments]


def _number(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """Read a number of tokens: 1T, 300B, 15e12."""
    from launcher.planner.model import parse_count

    if value is None:
        return None
    found = parse_count(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a number of tokens; write 300B or 1T.")
    return float(found)


def _changes(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Read NAME=VALUE of --what-if."""
    found = []
    for value in values:
        name, _, text = value.partition("=")
        if name not in WHAT_IF or not text:
            raise click.BadParameter(f"{value!r}: write one of {', '.join(f'{each}=…' for each in WHAT_IF)}.")
        found.append((name, text))
    return tuple(found)


WHAT_IF = ("memory", "matmul", "link", "network", "disk", "nodes", "gpu", "seq", "batch")
_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--gpu", metavar="NAME", help="GPU of the ranks: H100-80GB, A100-40GB, L4, ... Default: as probed."),
    option(
        "--num-gpus", also=("--gpus-per-node", "--nproc-per-node"),
        type=Number(Whole(1, 1024)), help="Ranks on each node. Default: 8, or as probed.",
    ),
    option("--num-nodes", also=("--nnodes", "--nnode"), type=Number(Whole(1, 10**5)), help="Default: 1."),
    option("-H", "--hostfile", metavar="FILE", help="Plan for these hosts, as `launch probe` has measured them."),
    click.option("--gpu-memory", callback=memory_size, metavar="SIZE", help="Memory of one GPU. Default: the table's."),
    click.option("--cpu-memory", callback=memory_size, metavar="SIZE", help="Memory of one node, for offload."),
    click.option(
        "--network", type=click.FloatRange(0.01, 10_000), metavar="GB/S",
        help="Of each GPU to other nodes, in each direction. Default: 50, which is 400 Gb/s.",
    ),
    click.option("--config", "--deepspeed", metavar="FILE", help="Engine config: precision, optimizer, batch."),
    click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Default: the config's, else bf16."),
    click.option(
        "--seq", type=Number(Whole(1, 10**8)), help=f"Tokens in a sequence. Default: {_DEFAULT_LENGTH:,} or less."
    ),
    click.option("--attention", type=click.Choice(["fused", "eager"]), default="fused", help="Default: fused."),
    click.option("--dropout", is_flag=True, help="Count the masks of dropout."),
    click.option("--layers", type=Number(Whole(1, 10**5)), help="Number of blocks, if the model does not say."),
    click.option("--hidden", type=Number(Whole(1, 10**6)), help="Hidden size, if the model does not say."),
    click.option("--heads", type=Number(Whole(1, 10**5)), help="Attention heads, if the model does not say."),
    click.option("--vocab", type=Number(Whole(1, 10**8)), help="Size of the vocabulary, if the model does not say."),
    click.option(
        "--global-batch", type=Number(Whole(1, 10**9)),
        help=f"Sequences of an optimizer step. Default: the config's, else {_DEFAULT_BATCH} or one for each rank.",
    ),
    click.option("--axes", metavar="LIST", help=f"Axes beside data: {','.join(_AXES)}, or none. Default: all."),
    click.option("--nvme", metavar="DIR", help="Offload to a disk in DIR may be chosen, too."),
    click.option("--tokens", callback=_number, metavar="COUNT", help="Say how many days so many tokens take: 1T."),
    click.option("--days", type=click.FloatRange(0.001, 10_000), help="Find the fewest nodes that need no more days."),
    click.option(
        "--what-if", callback=_changes, multiple=True, metavar="NAME=VALUE",
        help="Plan again with so many times the memory, matmul, link, network or disk (memory=2), or with other nodes,"
        " gpu, seq or batch (nodes=16). Repeatable.",
    ),
    click.option("--rows", type=Number(Whole(1, 1000)), default=8, help="Rows to show. Default: 8."),
    click.option("--row", type=Number(Whole(1, 1000)), default=1, help="Row to write, counted from 1. Default: 1."),
    click.option("--write", metavar="FILE", help="Write the engine config of a row to FILE."),
    option("-m", "--module", is_flag=True, help="MODEL is a module to run as a script: package.train."),
    click.option("--json", "as_json", is_flag=True, help="Print everything as JSON."),
)  # fmt: skip


@click.command("plan", cls=_Command, epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@declared(_OPTIONS)
@click.argument("model", metavar="MODEL|SCRIPT", shell_complete=files)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def plan(**values: Any) -> None:
    """Rank every way to train MODEL: stage, offload, mesh, micro-batch and recomputation for one global batch.

    Bytes follow from the engine's own layout, seconds from its schedule of computing and communicating, on GPUs of a
    table or on machines that `launch probe` has measured. MODEL is what `launch estimate` takes; a SCRIPT is rehearsed
    once (`launch rehearse`) and planned with data parallelism. Nothing is started. Exit code 1: nothing fits.
    """
    from launcher.cli.commands import plan_view
    from launcher.planner.plan import plan as compute

    options = PlanOptions(**values)
    question = question_of(options)
    found = compute(question)
    if options.is_script:
        found = rehearse_rows(found, options.command, found.of_each_kind()[: options.rows] or found.rows[:1])
    changes = [(name, text, _changed(question, name, text)) for name, text in options.what_if]
    others = [(name, text, compute(changed)) for name, text, changed in changes]
    chosen = _chosen(found, options.row)
    if options.write is not None and chosen is not None:
        _write(Path(options.write), options, chosen)
    fewest = None if options.days is None else _fewest_nodes(question, options.tokens or 0.0, options.days)
    if options.as_json:
        click.echo(json.dumps(plan_view.as_json(found, others, options.tokens), indent=2))
    else:
        plan_view.show(found, options.rows, others, options.tokens)
        if options.days is not None:
            plan_view.show_fewest(fewest, options.tokens or 0.0, options.days, _MAX_NODES)
        if chosen is not None:
            plan_view.show_command(found, chosen, _script_words(options), options.write, options.hostfile)
    if found.best is None or (options.days is not None and fewest is None):
        sys.exit(ExitCode.FAILURE)


def _chosen(found: Plan, number: int) -> Row | None:
    rows = found.of_each_kind()
    if rows and number > len(rows):
        raise UsageError(f"--row {number}: {counted(len(rows), 'row')} fit", hint=f"give 1 to {len(rows)}")
    return rows[number - 1] if rows else None


def _script_words(options: PlanOptions) -> list[str]:
    if not options.is_script:
        return ["train.py"]
    return [*(["-m"] if options.module else []), options.model, *options.arguments]


def _write(path: Path, options: PlanOptions, row: Row) -> None:
    """Write a config: that which was given, with the keys of the row. Raises: LauncherError."""
    from launcher.config.load import load_config, patched
    from launcher.plan.engine_config import config_argument

    given = options.config or config_argument(options.arguments)
    base = {} if given is None else load_config(given, for_planning=True).raw
    try:
        path.write_text(json.dumps(patched(base, row.as_patch()), indent=2) + "\n")
    except OSError as error:
        raise LauncherError(f"the config cannot be written: {error.strerror}", where=str(path)) from None


# ---- what is asked ----


def question_of(options: PlanOptions) -> Question:
    """Return what the options ask. A script is rehearsed for it. Raises: UsageError."""
    from launcher.planner.plan import Question

    machines, hardware = _machines(options)
    model: ModelFacts
    computes: Transformer | Script
    batch: int | None
    if options.is_script:
        model, computes, base, batch = facts_of_script(options.command, machines)
    else:
        model, computes, base, batch = _of_model(options, machines)
    if options.nvme is not None:
        base = _with_nvme(base, options.nvme)
    global_batch = options.global_batch or batch or _default_batch(machines.world_size)
    axes = _AXES if options.axes is None else tuple(filter(None, options.axes.replace("none", "").split(",")))
    wrong = [axis for axis in axes if axis not in _AXES]
    if wrong:
        raise UsageError(
            f"--axes: {wrong[0]!r} is none of {', '.join(_AXES)}", hint="separate them by commas, or: none"
        )
    return Question(model, computes, machines, hardware, base, global_batch, frozenset(axes))


def _default_batch(world_size: int) -> int:
    return -(-max(_DEFAULT_BATCH, world_size) // world_size) * world_size


def _machines(options: PlanOptions) -> tuple[Machines, Hardware]:
    from launcher.planner.estimate import Machines
    from launcher.planner.hardware import GB, NETWORK_BYTES_PER_S, gpu_named, hardware_of, probed_hardware
    from launcher.planner.tuning import kept_factors

    network = NETWORK_BYTES_PER_S if options.network is None else options.network * GB
    if options.gpu is not None:
        gpu, per_node = gpu_named(options.gpu), options.num_gpus or 8
        hardware = hardware_of(gpu, per_node, network)
        memory = options.gpu_memory or gpu.memory_gb * 10**9
        return Machines(options.num_nodes or 1, per_node, memory, options.cpu_memory), hardware
    speed = _probed(options)
    learnt = kept_factors(speed.key)
    nodes = len({each.node for each in speed.ranks})
    per_node = options.num_gpus or len(speed.ranks) // nodes
    if options.network is not None and nodes > 1:
        raise UsageError("--network is known: the probe has measured it", hint="leave it out, or --what-if network=2")
    hardware = replace(probed_hardware(speed, per_node, network), learnt=learnt)
    context_bytes = 0 if hardware.is_cpu else Machines().context_bytes
    machines = Machines(options.num_nodes or nodes, per_node, options.gpu_memory, options.cpu_memory, context_bytes)
    return machines, hardware


def _probed(options: PlanOptions) -> Speed:
    """Return the newest probe of the hosts that are asked for. Raises: UsageError where there is none."""
    import socket

    from launcher.planner.speed import kept_speeds

    hosts = {socket.gethostname()}
    probe = "launch probe"
    if options.hostfile is not None:
        from launcher.cluster.hostfile import read_hostfile

        hosts = {host.name for host in read_hostfile(options.hostfile).hosts}
        probe = f"launch probe --hostfile {options.hostfile}"
    of_hosts = [each for each in kept_speeds() if hosts == {rank.host.partition("/")[0] for rank in each.ranks}]
    if options.num_gpus is not None:
        of_hosts = [each for each in of_hosts if len(each.ranks) == options.num_gpus * len(hosts)]
    if not of_hosts:
        raise UsageError(
            f"it is not known how quick {', '.join(sorted(hosts)[:3])}{' ...' if len(hosts) > 3 else ''} is",
            hint=f"measure it: {probe}; or name GPUs of the table: --gpu H100-80GB",
        )
    return max(of_hosts, key=lambda each: each.measured)


def _of_model(options: PlanOptions, machines: Machines) -> tuple[ModelFacts, Transformer, Config, int | None]:
    from launcher.cli.model_source import find_model
    from launcher.config.schema import Config
    from launcher.planner.computing import Transformer
    from launcher.planner.memory import Workload
    from launcher.planner.settings import DEFAULT_PRECISION, in_precision, resolve

    shape = options.shape
    model = find_model(options.model, streams.say_waiting, shape=shape)
    shape = shape or model.shape
    if shape is None:
        hint = "give --layers, --hidden and --heads, or plan your script: launch plan train.py"
        raise UsageError("the shape of the model's blocks is not known", where=model.name, hint=hint)
    batch = None
    if options.config is None:
        base = in_precision(Config(), options.precision or DEFAULT_PRECISION)
    else:
        from launcher.config.load import load_config

        base = load_config(options.config, world_size=machines.world_size, for_planning=True).config
        batch = base.train_batch_size if isinstance(base.train_batch_size, int) else None
        if options.precision is not None:
            base = in_precision(base, options.precision)
    base = resolve(base, machines.world_size, shape.hidden_size)
    length = options.seq or min(_DEFAULT_LENGTH, shape.max_length or _DEFAULT_LENGTH)
    work = Workload(1, length, is_eager=options.attention == "eager", has_dropout=options.dropout)
    return model, Transformer(shape, work), base, batch


def _with_nvme(base: Config, folder: str) -> Config:
    zero = base.zero_optimization
    optimizer = zero.offload_optimizer.model_copy(update={"nvme_path": folder})
    param = zero.offload_param.model_copy(update={"nvme_path": folder})
    zero = zero.model_copy(update={"offload_optimizer": optimizer, "offload_param": param})
    return base.model_copy(update={"zero_optimization": zero})


# ---- what would be if ----


def _changed(question: Question, name: str, text: str) -> Question:
    """Return the question with one thing changed. Raises: UsageError."""
    from launcher.planner.computing import Transformer
    from launcher.planner.hardware import gpu_named, hardware_of, scaled

    machines = question.machines
    if name == "gpu":
        gpu = gpu_named(text)
        machines = replace(machines, gpu_memory_bytes=gpu.memory_gb * 10**9)
        return replace(question, machines=machines, hardware=hardware_of(gpu, machines.gpus_per_node))
    factor = _positive(name, text)
    if name == "memory":
        if machines.gpu_memory_bytes is None:
            raise UsageError("--what-if memory: the memory of a GPU is not known", hint="give --gpu-memory")
        return replace(question, machines=replace(machines, gpu_memory_bytes=int(machines.gpu_memory_bytes * factor)))
    if name == "nodes":
        return on_nodes(question, int(factor))
    if name == "batch":
        return replace(question, global_batch=int(factor))
    if name == "seq":
        if not isinstance(question.computes, Transformer):
            raise UsageError("--what-if seq: the script decides about its sequences", hint="plan its MODEL")
        samples = replace(question.computes.samples, length=int(factor))
        return replace(question, computes=replace(question.computes, samples=samples))
    return replace(question, hardware=scaled(question.hardware, name, factor))


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9 or (name in ("nodes", "seq", "batch") and value != int(value)):
        hint = "give a number above 0" if name not in ("nodes", "seq", "batch") else "give a whole number above 0"
        raise UsageError(f"--what-if {name}={text[:30]} is not possible", hint=hint)
    return value


def on_nodes(question: Question, num_nodes: int) -> Question:
    """Return the question on another number of nodes; a global batch that they do not divide is rounded up."""
    machines = replace(question.machines, num_nodes=num_nodes)
    batch = -(-question.global_batch // machines.world_size) * machines.world_size
    return replace(question, machines=machines, global_batch=batch)


def _fewest_nodes(question: Question, num_tokens: float, days: float) -> Plan | None:
    """Return the plan for the fewest nodes that train on so many tokens in so many days, None where none do."""
    from launcher.planner.plan import plan as compute

    def meets(num_nodes: int) -> Plan | None:
        found = compute(on_nodes(question, num_nodes))
        needed = found.days(num_tokens)
        return found if needed is not None and needed <= days else None

    too_few, enough, num_nodes = 0, None, 1
    while enough is None and num_nodes <= _MAX_NODES:
        enough = meets(num_nodes)
        too_few, num_nodes = (too_few, num_nodes) if enough else (num_nodes, 2 * num_nodes)
    if enough is None:
        return None
    most = enough.question.machines.num_nodes
    while most - too_few > max(1, most // 32):  # to about 3 %: no forecast is finer
        middle = (most + too_few) // 2
        better = meets(middle)
        if better is None:
            too_few = middle
        else:
            enough, most = better, middle
    return enough
