"""Rules between the keys of precision, of how gradients travel, of optimizers that decide it, and of experts."""

from __future__ import annotations

import re

from launcher.config.fields import AUTO, KeyPath, shown
from launcher.config.schema import FLOAT16, Config, OffloadOptimizer, OffloadParam
from launcher.config.schema_parallel import Pipeline
from launcher.config.schema_params import ONE_BIT_OPTIMIZERS
from launcher.sharding.pipeline import DEFAULT_SCHEDULE, SCHEDULES, PipelinePlan, virtual_problem

Problem = tuple[KeyPath, str, str]  # the key, what is wrong, what to do


def precision_problems(config: Config) -> list[Problem]:
    """Return what contradicts itself among the keys of precision."""
    return [*_one_precision(config), *_scale(config), *_kept_types(config), *_reduction(config)]


def _one_precision(config: Config) -> list[Problem]:
    names = ("fp16", "bf16", "torch_autocast", "amp")
    first, *others = [name for name in names if getattr(config, name).enabled is True] or [""]
    if first == "bf16" and others == ["torch_autocast"] and config.torch_autocast.dtype not in FLOAT16:
        others = []  # autocast computes norms and losses of a bf16 model in fp32
    problems: list[Problem] = [
        ((other, "enabled"), f"{first} and {other} are both enabled", "enable one of them") for other in others
    ]
    if config.amp.enabled is True and config.amp.opt_level == "O3":
        message = "amp.opt_level O3 keeps no fp32 weights, which does not train"
        problems.append((("amp", "opt_level"), message, "use O1 or O2, or the fp16 section"))
    return problems


def _scale(config: Config) -> list[Problem]:
    if config.fp16.enabled is True and config.fp16.loss_scale == 0 and config.fp16.min_loss_scale == 0:
        path = ("fp16", "min_loss_scale")
        return [(path, "min_loss_scale 0 would end in a loss scale of 0", "use 1, the default")]
    return []


def _kept_types(config: Config) -> list[Problem]:
    """Check what masters, gradient sums and states are kept in."""
    problems: list[Problem] = []
    fp16, bf16, sums = config.fp16, config.bf16, config.data_types.grad_accum_dtype
    enabled = {getattr(config, name).enabled for name in ("fp16", "bf16")}
    is_open = AUTO in enabled and True not in enabled
    model = "fp16" if fp16.enabled is True else "bf16" if bf16.enabled is True else "fp32"
    given = config.data_types.param_dtype
    if given not in (None, AUTO, model) and not is_open:
        path = ("data_types", "param_dtype")
        hint = f'enable the {given} section, or remove "param_dtype"' if given != "fp32" else 'remove "param_dtype"'
        problems.append((path, f"param_dtype {given} contradicts the other keys: the model is {model}", hint))
    if sums not in (None, AUTO, "fp32", model) and not is_open:
        path = ("data_types", "grad_accum_dtype")
        problems.append((path, f"gradients of a model in {model} cannot be summed in {sums}", "use fp32"))
    if bf16.enabled is True and bf16.bf16_optimizer_states is True:
        path = ("bf16", "bf16_optimizer_states")
        if bf16.bf16_master_weights_and_grads is False:
            hint = 'add "bf16_master_weights_and_grads": true'
            problems.append((path, "bf16_optimizer_states needs bf16 master weights", hint))
        elif sums == "fp32":
            message = "bf16_optimizer_states needs gradient sums in bf16"
            problems.append((path, message, "remove data_types.grad_accum_dtype"))
    return problems


def _reduction(config: Config) -> list[Problem]:
    factor = config.gradient_predivide_factor
    path = ("gradient_predivide_factor",)
    if factor == 0:
        return [(path, "gradient_predivide_factor 0 divides by zero", "use 1, the default")]
    if factor not in (1.0, AUTO) and config.prescale_gradients is True:
        return [(path, "prescale_gradients divides before sending too", "use one of them")]
    return []


def one_bit_problems(config: Config) -> list[Problem]:
    """Return what an optimizer with one-bit communication cannot do with the other keys."""
    name = "" if config.optimizer is None else config.optimizer.type
    if name not in ONE_BIT_OPTIMIZERS:
        return []
    problems: list[Problem] = []
    if config.zero_optimization.stage not in (0, AUTO):
        message = f"{name} cannot run at ZeRO stage {config.zero_optimization.stage}: every rank needs whole momenta"
        problems.append((("zero_optimization", "stage"), message, "use stage 0, or an optimizer such as AdamW"))
    fp16, bf16, sums = config.fp16, config.bf16, config.data_types.grad_accum_dtype
    for section, kept in (("fp16", fp16.fp16_master_weights_and_grads), ("bf16", bf16.bf16_master_weights_and_grads)):
        if kept is True and getattr(config, section).enabled is True:
            path = (section, f"{section}_master_weights_and_grads")
            problems.append((path, f"{name} needs fp32 masters: its errors are corrected in small steps", "remove it"))
    if sums not in (None, "fp32", AUTO):
        problems.append((("data_types", "grad_accum_dtype"), f"{name} needs gradient sums in fp32", "use fp32"))
    if name == "OneBitLamb" and fp16.enabled is True and fp16.loss_scale not in (0, AUTO):
        path = ("fp16", "loss_scale")
        problems.append((path, f"{name} needs a dynamic loss scale, as in DeepSpeed", 'use "loss_scale": 0'))
    return problems


def unused_expert_size(config: Config) -> list[tuple[KeyPath, str]]:
    """Return that a number of ranks for experts has no effect, where no experts are sharded."""
    size = config.expert_parallel.autoep_size
    if config.expert_parallel.enabled is True or size in (1, AUTO):
        return []
    message = f"expert_parallel.autoep_size {size} has no effect: expert_parallel.enabled is not true"
    return [(("expert_parallel", "autoep_size"), message)]


def unused_compile(config: Config) -> list[tuple[KeyPath, str]]:
    """Return that `engine.compile()` leaves no layers out, where it is asked to: that needs no `deepcompile`."""
    if getattr(config.compile, "autoep_non_moe", False) is not True:
        return []
    message = "compile.autoep_non_moe true has no effect: engine.compile() compiles the whole model"
    return [(("compile", "autoep_non_moe"), message)]


# ---- checkpoint ----


def checkpoint_problems(config: Config) -> list[Problem]:
    """Return which keys about checkpoints lack another one that they need."""
    section = config.checkpoint
    problems: list[Problem] = []
    save_every, keep_last = _number(section.save_every), _number(section.keep_last)
    if save_every is not None and not section.folder:
        message = f"save_every {save_every} needs a folder to save into"
        problems.append((("checkpoint", "save_every"), message, 'add "folder" to checkpoint'))
    if keep_last is not None and section.save_every is None:
        message = f"keep_last {keep_last} needs save_every: only the engine's own saves remove checkpoints"
        hint = 'add "save_every", or call `launch checkpoint prune` yourself'
        problems.append((("checkpoint", "keep_last"), message, hint))
    if section.format == "deepspeed" and section.use_node_local_storage is True:
        message = "DeepSpeed's files are made of those of all ranks, which use_node_local_storage keeps on their hosts"
        hint = "remove format, and use `launch checkpoint export --format deepspeed` on the files in one folder"
        problems.append((("checkpoint", "format"), message, hint))
    return problems + _kept_steps(config)


def _kept_steps(config: Config) -> list[Problem]:
    section, path = config.checkpoint, ("checkpoint", "keep_every")
    keep_every, save_every = _number(section.keep_every), _number(section.save_every)
    if keep_every is None:
        return []
    if section.keep_last is None:
        message = f"keep_every {keep_every} has nothing to protect: without keep_last all checkpoints are kept"
        return [(path, message, 'add "keep_last", or remove keep_every')]
    if save_every is not None and keep_every % save_every:
        message = f"keep_every {keep_every} is not a multiple of save_every {save_every}: many steps are never saved"
        return [(path, message, f"use a multiple of {save_every}")]
    return []


def _number(value: object) -> int | None:
    """Return the value of a key; None where it has none, or "auto"."""
    return value if isinstance(value, int) else None


# ---- Offload ----


# Types whose step the engine's own kernels take, range by range as a disk delivers them.
KERNEL_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "MuAdam", "MuAdamW", "MuSGD", "Muon", "SGD")
# Those of them whose steps ranks take together.
_COLLECTIVE = ("Lamb", "Muon")


def offload_problems(config: Config) -> list[Problem]:
    """Return what cannot be offloaded as asked for."""
    zero = config.zero_optimization
    problems: list[Problem] = []
    for name in ("offload_optimizer", "offload_param"):
        section: OffloadOptimizer | OffloadParam = getattr(zero, name)
        if section.device in ("none", AUTO) or (name == "offload_param" and zero.stage not in (3, AUTO)):
            continue
        path: KeyPath = ("zero_optimization", name, "device")
        if zero.stage == 0:
            message = f"{name} {shown(section.device)} needs stage 1, 2 or 3, not 0"
            problems.append((path, message, f'set "stage": 3, or remove {name}'))
        if section.device == "nvme" and not section.nvme_path:
            hint = f'add "nvme_path" to {name}: a folder on the fast disk of each host'
            problems.append((path, f'{name} "nvme" needs a folder', hint))
    kind = config.optimizer.type if config.optimizer is not None else None
    problems += _beside_problems(zero.offload_optimizer, kind)
    if zero.offload_optimizer.device == "nvme" and kind is not None and kind not in KERNEL_OPTIMIZERS:
        message = f"optimizer type {kind} cannot be updated from disk"
        problems.append((("optimizer", "type"), message, f"use one of {', '.join(KERNEL_OPTIMIZERS)}"))
    return problems


def unused_offload(config: Config) -> list[tuple[KeyPath, str]]:
    """Return what is asked for without effect, together with what is offloaded or is not."""
    zero, optimizer = config.zero_optimization, config.optimizer
    found: list[tuple[KeyPath, str]] = []
    if zero.offload_param.device not in ("none", AUTO) and zero.stage not in (3, AUTO):
        place = shown(zero.offload_param.device)
        message = f"offload_param {place} has no effect: at stage {zero.stage} every rank keeps whole parameters"
        found.append((("zero_optimization", "offload_param"), message))
    params = {} if optimizer is None or not isinstance(optimizer.params, dict) else optimizer.params  # may be "auto"
    if params.get("torch_adam") is True and updates_in_parts(config):
        message = (
            "torch_adam true has no effect: states on disk, and with delayed_update or super_offload, are updated in"
            " parts, which the engine's kernel does"
        )
        found.append((("optimizer", "params", "torch_adam"), message))
    return found


def updates_in_parts(config: Config) -> bool:
    """Whether optimizer states are updated as they come from a disk, or beside forward or backward."""
    section = config.zero_optimization.offload_optimizer
    is_beside = section.delayed_update is True or section.super_offload is True
    return section.device == "nvme" or (section.device == "cpu" and is_beside)


def _beside_problems(section: OffloadOptimizer, kind: str | None) -> list[Problem]:
    """Return why an update cannot be taken beside forward or backward. kind: as `Config.optimizer.type` has it.

    None where a script brings its own optimizer.
    """
    keys = ("delayed_update", "super_offload")
    asked = [name for name in keys if getattr(section, name) is True]
    problems: list[Problem] = []
    for name in asked:
        path: KeyPath = ("zero_optimization", "offload_optimizer", name)
        if section.device not in ("cpu", AUTO):
            message = f"{name} needs the optimizer in host memory, not {shown(section.device)}"
            problems.append((path, message, f'set "device": "cpu", or remove {name}'))
        if section.ratio not in (1.0, AUTO) and name == "delayed_update":
            message = f"delayed_update needs all of the optimizer in host memory, not {shown(section.ratio)} of it"
            problems.append((path, message, "remove ratio or delayed_update"))
        if kind is not None and (kind not in KERNEL_OPTIMIZERS or kind in _COLLECTIVE):
            possible = ", ".join(name for name in KERNEL_OPTIMIZERS if name not in _COLLECTIVE)
            problems.append((path, f"{name} is not possible with {kind}", f"remove it, or use {possible}"))
    if len(asked) == len(keys):
        message = "super_offload and delayed_update exclude each other: an update is taken beside one pass"
        problems.append((path, message, "remove delayed_update, whose weights are one step behind"))
    return problems


# ---- Pipelines ----


_METHODS = ("best", "parameters", "uniform", "profile")


def pipeline_problems(config: Config) -> list[Problem]:
    """Return what cannot be done with the pipeline that a config asks for."""
    section = config.pipeline
    problems = _partition_problems(section.partition)
    num_virtual, path = section.virtual_stages, ("pipeline", "virtual_stages")
    if _are_decided(section):
        found = virtual_problem(section.schedule, num_virtual)
        if found is not None:
            problems.append((path, *found))
        elif section.stages == 1 and num_virtual > 1:
            message = f"virtual_stages {num_virtual} divides the stages of several ranks, and pipeline.stages is 1"
            problems.append((path, message, "remove virtual_stages"))
    stages = section.stages
    if not _is_on(config):
        return problems
    if not config.managed_gradient_accumulation:
        message = (
            "managed_gradient_accumulation false is not supported with pipeline parallelism: train_batch() runs all"
            " micro-batches of a step"
        )
        problems.append((("managed_gradient_accumulation",), message, "remove it"))
    zero = config.zero_optimization.stage
    if zero in (2, 3):
        what = "sums" if zero == 2 else "gathers parameters and sums"
        message = (
            f"ZeRO stage {zero} {what} gradients over the ranks in every micro-batch, which a pipeline has many of in"
            f" one step; its stages divide parameters and gradients by {stages} already"
        )
        problems.append((("zero_optimization", "stage"), message, "use stage 0 or 1 with pipeline parallelism"))
    return problems


def unused_schedule(config: Config) -> list[tuple[KeyPath, str]]:
    """Return that a schedule has no effect, where there is one stage."""
    schedule = config.pipeline.schedule
    if schedule in (DEFAULT_SCHEDULE, AUTO) or _is_on(config):
        return []
    return [(("pipeline", "schedule"), f'pipeline.schedule "{schedule}" has no effect: the model is one stage')]


def micro_batch_problems(config: Config, num_micro_batches: int | None) -> tuple[list[Problem], list[Problem]]:
    """Return what is wrong, and what is slow, with a number of micro-batches a step; None: not known."""
    steps = num_micro_batches if num_micro_batches is not None else config.gradient_accumulation_steps
    plan = pipeline_plan(config, steps if isinstance(steps, int) else None)
    if plan is None or not isinstance(steps, int):
        return [], []
    path: KeyPath = ("gradient_accumulation_steps",)
    problem = plan.problem()
    if problem is not None:
        return [(path, *problem)], []
    wanted = 2 * plan.num_ranks if SCHEDULES[plan.schedule].is_v_shaped else plan.num_ranks
    if steps >= wanted:
        return [], []
    message = (
        f"{steps} micro-batches a step leave the {plan.num_ranks} ranks of a pipeline idle for"
        f" {plan.idle_fraction:.0%} of it or more"
    )
    return [], [(path, message, f"use {wanted} or more")]


def pipeline_plan(config: Config, num_micro_batches: int | None) -> PipelinePlan | None:
    """Return the pipeline that a config asks for; None where it asks for none, or leaves its size open.

    num_micro_batches: of one step; None: 1.
    """
    section = config.pipeline
    if section.stages is None or not _is_on(config) or not _are_decided(section):
        return None
    if virtual_problem(section.schedule, section.virtual_stages) is not None:
        return None
    return PipelinePlan(section.stages, section.virtual_stages, section.schedule, num_micro_batches or 1)


def _are_decided(section: Pipeline) -> bool:
    """Whether schedule and virtual stages have values: neither is "auto", nor was it wrong and reported."""
    return section.schedule in SCHEDULES and type(section.virtual_stages) is int


def _is_on(config: Config) -> bool:
    stages = config.pipeline.stages
    return type(stages) is int and stages > 1


def _partition_problems(method: str) -> list[Problem]:
    kind, _, pattern = method.partition(":")
    path: KeyPath = ("pipeline", "partition")
    if method == AUTO or kind.lower() in _METHODS:
        return []
    if kind.lower() != "type":
        hint = 'use "best", "parameters", "uniform", "profile", or "type:" and a regular expression'
        return [(path, f'there is no partition by "{method}"', hint)]
    try:
        re.compile(pattern)
    except re.error as error:
        return [(path, f'"{pattern}" is not a regular expression: {error}', "names of classes are searched with it")]
    return []
