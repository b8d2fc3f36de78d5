"""`launch estimate`: the memory a model needs, for every stage and offload, before anything is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from launcher.base.errors import Diagnostic, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.fields import Whole
from launcher.cli.console import streams
from launcher.cli.options.command import Number, declared, files, memory_size, option

if TYPE_CHECKING:
    from launcher.config.schema import Config
    from launcher.planner.estimate import Estimate, Machines
    from launcher.planner.memory import Setting, Workload
    from launcher.planner.model import ModelFacts, TransformerShape

_DEFAULT_LENGTH = 2048
_PLACES = click.Choice(["none", "cpu", "nvme"])
_EPILOG = """\b
examples:
  launch estimate 7B --num-gpus 8 --gpu-memory 80GB
  launch estimate ./llama/config.json --num-gpus 8 --batch 4 --seq 4096 --checkpointing
  launch estimate ./checkpoint --config ds_config.json --num-gpus 8 --num-nodes 2
  launch estimate my_package.model:build --stage 3 --offload-optimizer cpu
  launch estimate 70B --inference --num-gpus 4 --gpu-memory 80GB
  launch estimate 2783M --largest 65M --deepspeed-tables
"""


def _count(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """Read a number of parameters: 7B, 65M, 6_700_000_000."""
    from launcher.planner.model import parse_count

    found = None if value is None else parse_count(value)
    if value is not None and found is None:
        raise click.BadParameter(f"{value!r} is not a number of parameters; write 65M or 65_000_000.")
    return found


@dataclass(frozen=True)
class EstimateOptions:
    """The options of one `launch estimate`, by name."""

    model: str
    num_gpus: int
    num_nodes: int
    config: str | None
    stage: int | None
    precision: str | None
    inference: bool
    offload_optimizer: str | None
    offload_param: str | None
    has_16bit_master: bool
    has_16bit_states: bool
    batch: int | None
    seq: int | None
    checkpointing: bool
    attention: str
    dropout: bool
    layers: int | None
    hidden: int | None
    heads: int | None
    vocab: int | None
    largest: int | None
    gpu_memory: int | None
    cpu_memory: int | None
    cuda_context: int | None
    deepspeed_tables: bool
    as_json: bool

    def __post_init__(self) -> None:
        _ = self.shape  # raises for options that do not go together
        fixed_by_config = {
            "--stage": self.stage, "--offload-optimizer": self.offload_optimizer, "--offload-param": self.offload_param,
            "--16bit-master": self.has_16bit_master or None, "--16bit-states": self.has_16bit_states or None,
        }  # fmt: skip
        clash = [name for name, value in fixed_by_config.items() if value is not None]
        if self.config is not None and clash:
            raise UsageError(f"{clash[0]} and --config exclude each other", hint="change the config, or leave it out")
        of_training = {
            "--offload-optimizer": self.offload_optimizer, "--16bit-master": self.has_16bit_master,
            "--16bit-states": self.has_16bit_states, "--checkpointing": self.checkpointing, "--dropout": self.dropout,
        }  # fmt: skip
        useless = [name for name, value in of_training.items() if value]
        if self.inference and useless:
            hint = f"leave {useless[0]} out: a forward without gradients has nothing of it"
            raise UsageError(f"{useless[0]} and --inference exclude each other", hint=hint)
        not_in_tables = fixed_by_config | {
            "--inference": self.inference or None,
            "--config": self.config, "--precision": self.precision, "--batch": self.batch, "--seq": self.seq,
            "--checkpointing": self.checkpointing or None, "--dropout": self.dropout or None,
            "--gpu-memory": self.gpu_memory, "--cpu-memory": self.cpu_memory, "--cuda-context": self.cuda_context,
            "--json": self.as_json or None,
        }  # fmt: skip
        extra = [name for name, value in not_in_tables.items() if value is not None]
        if self.deepspeed_tables and extra:
            raise UsageError(
                f"{extra[0]} and --deepspeed-tables exclude each other",
                hint="DeepSpeed's tables are about model states, for ranks and nodes: --num-gpus, --num-nodes",
            )

    @property
    def shape(self) -> TransformerShape | None:
        """The shape that the options give."""
        from launcher.cli.model_source import given_shape

        return given_shape(self.layers, self.hidden, self.heads, self.vocab)

    @property
    def machines(self) -> Machines:
        from launcher.planner.estimate import Machines

        found = Machines(self.num_nodes, self.num_gpus, self.gpu_memory, self.cpu_memory)
        return found if self.cuda_context is None else replace(found, context_bytes=self.cuda_context)

    def workload(self, model: ModelFacts, config_batch: int | None) -> Workload:
        """The micro-batch of a rank: the option's, else the config's, else one sequence."""
        from launcher.planner.memory import Workload

        longest = None if model.shape is None else model.shape.max_length
        return Workload(
            batch_size=self.batch or config_batch or 1,
            length=self.seq or min(_DEFAULT_LENGTH, longest or _DEFAULT_LENGTH),
            is_checkpointed=self.checkpointing,
            is_eager=self.attention == "eager",
            has_dropout=self.dropout,
            is_inference=self.inference,
        )


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    option(
        "--num-gpus", also=("--gpus-per-node", "--nproc-per-node"),
        type=Number(Whole(1, 1024)), default=1, help="Ranks on each node. Default: 1.",
    ),
    option("--num-nodes", also=("--nnodes", "--nnode"), type=Number(Whole(1, 10**5)), default=1, help="Default: 1."),
    click.option(
        "--config", "--deepspeed", metavar="FILE",
        help="Engine config: stage, precision, offload, optimizer and micro-batch are taken from it.",
    ),
    click.option("--stage", type=Number(Whole(0, 3)), help="Show this ZeRO stage only. Default: all."),
    click.option(
        "--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Default: the config's; without one bf16."
    ),
    click.option("--inference", is_flag=True, help="Forward alone: no gradients and no optimizer."),
    click.option("--offload-optimizer", type=_PLACES, help="Where optimizer states are kept."),
    click.option("--offload-param", type=_PLACES, help="Where parameters are kept between uses (stage 3)."),
    click.option("--16bit-master", "has_16bit_master", is_flag=True, help="No fp32 master weights and gradients."),
    click.option("--16bit-states", "has_16bit_states", is_flag=True, help="Optimizer states in bf16, with bf16."),
    click.option(
        "--batch", "--micro-batch", type=Number(Whole(1, 10**6)), help="Sequences in a micro-batch. Default: 1."
    ),
    click.option(
        "--seq", type=Number(Whole(1, 10**8)), help=f"Tokens in a sequence. Default: {_DEFAULT_LENGTH} or less."
    ),
    click.option("--checkpointing", "--activation-checkpointing", is_flag=True, help="Blocks recompute activations."),
    click.option(
        "--attention", type=click.Choice(["fused", "eager"]), default="fused",
        help="Whether attention keeps its scores (eager). Default: fused.",
    ),
    click.option("--dropout", is_flag=True, help="Count the masks of dropout."),
    click.option("--layers", type=Number(Whole(1, 10**5)), help="Number of blocks, if the model does not say."),
    click.option("--hidden", type=Number(Whole(1, 10**6)), help="Hidden size, if the model does not say."),
    click.option("--heads", type=Number(Whole(1, 10**5)), help="Attention heads, if the model does not say."),
    click.option("--vocab", type=Number(Whole(1, 10**8)), help="Size of the vocabulary, if the model does not say."),
    click.option("--largest", callback=_count, metavar="COUNT", help="Of the largest layer, if MODEL is a count."),
    click.option("--gpu-memory", callback=memory_size, metavar="SIZE", help="Memory of one GPU: shows what fits."),
    click.option("--cpu-memory", callback=memory_size, metavar="SIZE", help="Memory of one node: shows what fits."),
    click.option("--cuda-context", callback=memory_size, metavar="SIZE", help="CUDA's own share. Default: 600MiB."),
    click.option(
        "--deepspeed-tables", is_flag=True, help="Print the tables of DeepSpeed's own estimators instead."
    ),
    click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, sizes in bytes."),
)  # fmt: skip


@click.command("estimate", epilog=_EPILOG)
@click.argument("model", shell_complete=files)
@declared(_OPTIONS)
def estimate(**values: Any) -> None:
    """Show what memory MODEL needs on each GPU and host, for every ZeRO stage and offload, in training or inference.

    MODEL is a count of parameters (7B, 350M), a Hugging Face config or its folder, a checkpoint folder, or
    module:function that returns a model. Nothing is started or downloaded. SIZE is 80GB or 80GiB. Exit code 1:
    nothing fits --gpu-memory and --cpu-memory.
    """
    options = EstimateOptions(**values)
    model = _model(options)
    if options.deepspeed_tables:
        from launcher.planner.guides import zero2_table, zero3_table

        total, largest = model.num_params, model.largest_layer_numel
        click.echo("ZeRO stage 3\n" + zero3_table(total, largest, options.num_gpus, options.num_nodes))
        click.echo("ZeRO stage 2\n" + zero2_table(total, options.num_gpus, options.num_nodes), nl=False)
        return
    found, notices = _estimate(options, model)
    if options.as_json:
        notes = [str(notice) for notice in notices]
        click.echo(json.dumps(found.as_json() | {"notices": notes}, indent=2))
    else:
        from launcher.cli.commands.estimate_view import show

        show(found, notices)
    if found.machines.are_bounded and found.first_fit() is None:
        sys.exit(ExitCode.FAILURE)


def _model(options: EstimateOptions) -> ModelFacts:
    from launcher.cli.model_source import find_model

    shape = options.shape
    model = find_model(options.model, streams.say_waiting, shape=shape, largest_layer_numel=options.largest)
    if options.inference:  # frozen parameters are as all others
        model = replace(model, params=tuple(replace(param, trainable=True) for param in model.params))
    if model.num_trainable == 0:
        hint = "nothing is to be trained; --inference estimates a forward"
        raise UsageError("the model has no trainable parameters", where=model.name, hint=hint)
    return model if shape is None else replace(model, shape=shape)


def _estimate(options: EstimateOptions, model: ModelFacts) -> tuple[Estimate, tuple[Diagnostic, ...]]:
    from launcher.planner import settings
    from launcher.planner.estimate import estimate as compute

    machines = options.machines
    if options.config is None:
        base = _base(options)
        chosen, batch = _chosen(options, base), None
        notices: tuple[Diagnostic, ...] = ()
    else:
        from launcher.config.load import load_config

        loaded = load_config(options.config, world_size=machines.world_size, for_planning=True)
        hidden = None if model.shape is None else model.shape.hidden_size
        base = settings.resolve(loaded.config, machines.world_size, hidden)
        if options.precision is not None:
            base = settings.in_precision(base, options.precision)
        notices = tuple(item for item in loaded.notices if "is not supported" in item.message)
        batch = settings.micro_batch_of(base, machines.world_size)
        chosen = [settings.setting_of(base, machines.world_size, trains=not options.inference)]
    work = options.workload(model, batch)
    if base.activation_checkpointing.blocks is True and not options.inference:
        work = replace(work, is_checkpointed=True)
    return compute(model, machines, chosen, base, work), notices


def _base(options: EstimateOptions) -> Config:
    from launcher.config.schema import Config
    from launcher.planner.settings import DEFAULT_PRECISION, in_precision

    return in_precision(
        Config(),
        options.precision or DEFAULT_PRECISION,
        has_16bit_master=options.has_16bit_master,
        has_16bit_states=options.has_16bit_states,
    )


def _chosen(options: EstimateOptions, base: Config) -> list[Setting]:
    """Return the rungs of the ladder that the options leave, or exactly what they ask for."""
    from launcher.planner.settings import at, ladder, setting_of

    world_size = options.machines.world_size
    rungs = [
        rung
        for rung in ladder(base, world_size, trains=not options.inference)
        if options.stage in (None, rung.stage)
        and options.offload_optimizer in (None, rung.policy.offload.optimizer.value)
        and options.offload_param in (None, rung.policy.offload.params.value)
    ]
    if rungs:
        return rungs
    optimizer, param = options.offload_optimizer or "none", options.offload_param or "none"
    stage = options.stage if options.stage is not None else 3 if param != "none" else 2
    return [setting_of(at(base, stage, optimizer, param), world_size, trains=not options.inference)]
