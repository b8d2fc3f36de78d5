"""`initialize()`: the one place that shows in which order an engine is built."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from launcher.activation.settings import use_section
from launcher.base.errors import ConfigAssertionError, EngineAssertionError, EngineError
from launcher.base.log import get_logger
from launcher.base.progress import phase, tell
from launcher.comm import pending
from launcher.comm.device import offset_seed
from launcher.comm.groups import RankGroup, init_distributed, world_group
from launcher.comm.mesh import ParallelMesh, build_mesh, leave_in_order
from launcher.comm.torch_internals import without_dynamo
from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.equations import BatchPlan, mesh_sizes, solve_batch
from launcher.config.load import load_config
from launcher.config.policies import DType, Place, Precision, ZeroPolicy, zero_policy
from launcher.config.rules import updates_in_parts
from launcher.config.schema import Config
from launcher.engine.announce import announce, announce_disks
from launcher.engine.casting import (
    Casting,
    buffer_dtype,
    buffers_kept,
    has_shared_elements,
    keep_autocast_to,
    mixed_types_hint,
    params_left_out,
    set_tf32,
    widen_batch_norms,
)
from launcher.engine.data import DistributedLoader, build_loader
from launcher.engine.deepspeed_engine import DeepSpeedEngine
from launcher.engine.model_check import check_for_ranks, check_model, check_types, leaves_not_found
from launcher.engine.optimizer import ZeroOptimizer
from launcher.engine.parallel import check_optimizer, sizes_with_experts, split_over_ranks, spread_over_ranks
from launcher.engine.parts import EngineParts, loss_scale_rules, swap_space, verified_kernel
from launcher.engine.pipeline import PipelineEngine
from launcher.engine.sequence import attach_sequence, check_groups, check_sequence, sequence_size
from launcher.engine.sharded import ShardedModel, end_engine_of
from launcher.engine.stages import divide_into_stages
from launcher.kernels.reference import ReferenceKernel
from launcher.kernels.select import kernel_for
from launcher.optim.api import DeviceScaled, FlatOptimizer, UnitOptimizer
from launcher.optim.factory import (
    MUP_TYPES,
    OptimizerBackend,
    OptimizerPlan,
    ZeroRules,
    group_of_parameters,
    mup_plan,
    plan_from_client,
    plan_from_config,
)
from launcher.optim.muon.plan import muon_plan
from launcher.optim.onebit.algorithms import ONE_BIT, one_bit_plan
from launcher.optim.onebit.flat import OneBitFlat
from launcher.optim.rules import COLLECTIVE
from launcher.optim.scaling import LossScaler, LossScaleRules
from launcher.optim.schedules import schedule_from_client, schedule_from_config
from launcher.parallel.expert.share import expert_buffers
from launcher.parallel.pipeline.divide import requested_stages
from launcher.parallel.pipeline.stages import StagedModel
from launcher.sharding.mesh import MeshSizes
from launcher.zero.gathered import register_outside
from launcher.zero.hooks import install_hooks
from launcher.zero.leaves import mark_leaves
from launcher.zero.marks import is_moe_param
from launcher.zero.order import CollectiveOrder
from launcher.zero.parameters import unit_params_of
from launcher.zero.partition import build_units
from launcher.zero.placement import Disks
from launcher.zero.reducer import GradientReducer
from launcher.zero.schedule import ParameterSchedule
from launcher.zero.states import TORCH_DTYPES, dtype_of
from launcher.zero.step import MAX_NAMES, DelayedUpdate
from launcher.zero.tiling import tile_to_fit

ClientOptimizer = torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer]


@without_dynamo()
@phase("building the engine")
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: ClientOptimizer | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, ZeroOptimizer | None, DistributedLoader | None, Any]:
    """Build an engine around `model`. Every rank must call it with the same model and config.

    config: a path, JSON text or dict; or `args.deepspeed` / `args.deepspeed_config` holds the path.
    optimizer: a torch optimizer, or a function from parameters to one; else the config names it. Without any the
    engine is for inference: its parameters are sharded at stage 3, and `backward` is refused.
    mpu: process groups of sequence parallelism, such as `register_with_transformers` of DeepSpeed returns; their size
    is `sequence_parallel_size` where the config has none. Those of model parallelism must be the config's. mesh_param:
    (data size, sequence size), the same.
    lr_scheduler: an object with `step()`, or a function from the optimizer to one; else the config names it.
    The model's parameters move to this rank's device and the configured precision, rank 0's values go to all
    ranks, and their storage becomes part of flat buffers; the parameter objects stay the same. An engine that the model
    belongs to ends: see `Engine.destroy`.

    Returns (engine, optimizer or None, training loader or None, scheduler or None).
    Raises: ConfigError, EngineError.
    """
    if model is None:
        raise EngineAssertionError("initialize() needs a model", hint="initialize(model=model, config=...)")
    is_list_of_layers = isinstance(model, StagedModel)
    if not is_list_of_layers:  # whose layers have no values yet
        check_model(model)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    world = _world_for(model)
    loaded = load_config(
        _config_source(args, config, config_params),
        world_size=world.world_size,
        model_stages=requested_stages(model),
        sequence_parallel_size=sequence_size(mpu, mesh_param, world.world_size),
    )
    sizes = sizes_with_experts(mesh_sizes(loaded.config, world.world_size), model)
    facts = AutoFacts(world.world_size, sizes.model_size, hidden_size=_hidden_size(model))
    settings, choices = resolve_auto(loaded.config, facts)
    if settings.log_level is not None:
        get_logger().setLevel(settings.log_level.upper())
    batch = _batch(settings, sizes)
    policy = zero_policy(settings, sizes.num_replicas)
    check_types(model, TORCH_DTYPES[policy.precision.param])
    mesh = build_mesh(world, sizes, shard_size=policy.mesh.shard_size, node_size=policy.mesh.node_size)
    check_groups(mpu, mesh)
    group = mesh.data
    use_section(settings.activation_checkpointing)
    _prepare_device(settings, group)
    model_parameters = None if model_parameters is None else list(model_parameters)  # now: layers may be about to go
    staged = divide_into_stages(model, settings, mesh, batch.accumulation_steps)
    split_notices = [] if staged is None else staged.notices
    if staged is not None:
        model, model_parameters = staged.model, staged.own_parameters(optimizer, model_parameters)
    split_notices += split_over_ranks(model, settings, mesh) + check_sequence(model, mesh)
    _offset_seed(mesh)
    expert_notices, model_parameters = spread_over_ranks(model, settings, mesh, optimizer, model_parameters)
    _mark_leaves(model, settings, group)
    _place_buffers(model, settings, policy.precision, mesh)
    casting = _casting(model, settings, policy.precision, group)
    model_parameters = tile_to_fit(model, policy, group, optimizer, model_parameters)
    plan = _optimizer_plan(settings, optimizer, model, model_parameters, mesh.shard)
    check_optimizer(plan, mesh)
    _check_offload(plan, policy, forces_kernel=settings.zero_force_ds_cpu_optimizer and not _wants_torch(settings))
    disks = swap_space(settings)
    built = _shard(model, plan, policy, mesh, loss_scale_rules(settings), disks)
    sequence = attach_sequence(model, built, mesh, mpu)
    scheduler = _scheduler(settings, lr_scheduler, built.optimizer)
    loader = None
    if training_data is not None:  # that of a pipeline is read in order, as by DeepSpeed
        shuffle = not is_list_of_layers
        loader = _loader(training_data, collate_fn, settings, batch, mesh, shuffle=shuffle)
    parts = EngineParts(mesh, policy, built, scheduler, batch, settings, loaded.raw, loader, casting, sequence)
    announce_disks(disks)
    if world.rank == 0:
        announce(parts, loaded.notices, choices, plan, [*split_notices, *expert_notices])
    engine = DeepSpeedEngine(model, parts) if staged is None else PipelineEngine(staged.model, parts, staged.plan)
    if built.optimizer is not None:
        built.optimizer.run_by(engine, settings, is_of_pipeline=staged is not None)
    engine.begin_in_folder()
    return engine, built.optimizer, loader, scheduler


def _world_for(model: nn.Module) -> RankGroup:
    """Return all ranks, after the end of an engine that `model` belongs to. Raises: EngineError."""
    leave_in_order()
    pending.drain()
    world = world_group()
    check_for_ranks(model, world.world_size)
    if end_engine_of(model) and world.rank == 0:
        get_logger().warning(
            "initialize() was called again on this model: its first engine has ended, and its optimizer states with it"
        )
    return world


def _prepare_device(settings: Config, group: RankGroup) -> None:
    """Set what holds for the whole process: the precision of multiplications on a GPU, the allocator on a CPU."""
    if group.device.type == "cuda":
        set_tf32(settings.tf32)
    elif group.device.type == "cpu":
        keep_freed_memory()


def _batch(settings: Config, sizes: MeshSizes) -> BatchPlan:
    return solve_batch(
        settings.train_batch_size,
        settings.train_micro_batch_size_per_gpu,
        settings.gradient_accumulation_steps,
        sizes.data,
        sizes.model_size,
    )


def _loader(
    data: Dataset[Any],
    collate_fn: Callable[[list[Any]], Any] | None,
    settings: Config,
    batch: BatchPlan,
    mesh: ParallelMesh,
    *,
    shuffle: bool,
) -> DistributedLoader:
    return build_loader(
        data,
        batch_size=batch.micro_batch_size,
        rank=mesh.sample_rank,
        world_size=mesh.sizes.data,
        collate_fn=collate_fn,
        drop_last=settings.dataloader_drop_last,
        shuffle=shuffle,
        pin_memory=mesh.world.device.type != "cpu",
    )


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    """Return the one config that was given. Raises: ConfigError for none, or for two that differ."""
    from_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)  # its oldest name
    if from_args is None and isinstance(getattr(args, "deepspeed", None), str | Mapping):
        from_args = args.deepspeed
    given = [source for source in (config, config_params, from_args) if source is not None]
    if not given:
        raise ConfigAssertionError("no config was given", hint="initialize(config=...) or --deepspeed ds_config.json")
    if any(source != given[0] for source in given[1:]):
        raise ConfigAssertionError(
            "two different configs were given", hint="give config, config_params or args, not several"
        )
    return given[0]


def _hidden_size(model: nn.Module) -> int | None:
    """Return the width a Hugging Face style model states in its config, None for other models."""
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    return hidden if isinstance(hidden, int) else None


def _check_offload(plan: OptimizerPlan | None, policy: ZeroPolicy, *, forces_kernel: bool) -> None:
    """Raises: EngineError for an optimizer that cannot, or should not, be updated away from the device."""
    place = policy.offload.optimizer
    if plan is None or place is Place.DEVICE:
        return
    if policy.offload.is_delayed and (plan.kind is None or plan.kind in COLLECTIVE):
        raise EngineError(
            f"offload_optimizer: delayed_update is not possible with {plan.name}: its steps are not the engine's own,"
            " or ranks take them together",
            hint='remove "delayed_update", or use AdamW, Adagrad, Lion or SGD with ordinary options',
        )
    if plan.kind is not None:
        return
    remedy = "use AdamW, Adagrad, Lamb, Lion or SGD with ordinary options"
    if place is Place.DISK:
        raise EngineError(f"optimizer {plan.name} cannot be updated from disk", hint=remedy)
    if forces_kernel:
        raise EngineError(
            f"offload_optimizer: {plan.why_torch}, so that torch's own {plan.name} would run on the CPU",
            hint=f'accept that with "zero_force_ds_cpu_optimizer": false, or {remedy}',
        )


def _mark_leaves(model: nn.Module, settings: Config, group: RankGroup) -> None:
    leaves = settings.zero_optimization.leaf_module
    if group.rank == 0 and settings.zero_optimization.stage == 3:
        for sentence in leaves_not_found(model, leaves):
            get_logger().warning("%s", sentence)
    mark_leaves(model, leaves.classes, leaves.names, leaves.name_suffixes)


def _offset_seed(mesh: ParallelMesh) -> None:
    """Have ranks with other positions, heads or layers of the same samples drop out others, too."""
    for axis in filter(None, (mesh.sequence, mesh.pipeline)):
        offset_seed(mesh.world.device, axis.rank)


def _place_buffers(model: nn.Module, settings: Config, precision: Precision, mesh: ParallelMesh) -> None:
    """Bring everything but parameters to the device, buffers in their configured type and with rank 0's values.

    Those of experts get the values of the first rank that has the same experts. Parameters stay where they are until
    their unit is built: the device may not hold them all.
    """
    buffers = settings.data_types.buffer_dtype
    configured = None if buffers is None else TORCH_DTYPES[DType(buffers)]
    with (
        params_left_out(model),
        buffers_kept(model, mesh.data.device, lambda buffer: buffer_dtype(buffer.dtype, configured)),
    ):
        model.to(device=mesh.data.device, dtype=TORCH_DTYPES[precision.param])
    widen_batch_norms(model, partial(dtype_of, precision))
    for buffer in model.buffers():
        if has_shared_elements(buffer):  # as `expand` makes them: nothing can be written to one of them alone
            buffer.data = buffer.data.contiguous()
    of_experts = expert_buffers(model)
    others = [buffer for buffer in model.buffers() if all(buffer is not each for each in of_experts)]
    (mesh.layers or mesh.world).communicator.broadcast([buffer.data for buffer in others])
    (mesh.of_experts or mesh).data.communicator.broadcast([buffer.data for buffer in of_experts])


def _place_others(model: nn.Module, precision: Precision, mesh: ParallelMesh) -> None:
    """Bring parameters that are in no unit to the device, in their type and with rank 0's values: frozen ones."""
    others = [param for param in model.parameters() if unit_params_of(param) is None]
    for param in others:
        param.data = param.data.to(device=mesh.data.device, dtype=dtype_of(precision, param))
    of_experts = [param for param in others if is_moe_param(param)]
    of_all = [param for param in others if not is_moe_param(param)]
    for params, own_mesh in ((of_all, mesh), (of_experts, mesh.of_experts or mesh)):
        own_mesh.data.communicator.broadcast([param.data for param in params])
        register_outside(params, own_mesh)


def _casting(model: nn.Module, settings: Config, precision: Precision, group: RankGroup) -> Casting:
    device_type = group.device.type
    modules = settings.torch_autocast.lower_precision_safe_modules
    if modules is not None and settings.torch_autocast.enabled:
        keep_autocast_to(model, modules, device_type)
    casts_inputs = settings.fp16.enabled and settings.fp16.auto_cast
    param_dtype = TORCH_DTYPES[precision.param]
    return Casting(
        device_type,
        param_dtype if casts_inputs else None,
        None if precision.autocast is None else TORCH_DTYPES[precision.autocast],
        mixed_types_hint(model, param_dtype),
    )


def _shard(
    model: nn.Module,
    plan: OptimizerPlan | None,
    policy: ZeroPolicy,
    mesh: ParallelMesh,
    scale_rules: LossScaleRules | None,
    disks: Disks,
) -> ShardedModel:
    """Lay the model out in units, tie them to autograd and give the owned ranges to the optimizer."""
    group = mesh.shard
    group_of = {} if plan is None else group_of_parameters(plan, model)
    frozen = [] if plan is None else _freeze_others(model, group_of, mesh.world.rank)
    units = build_units(model, group_of, policy, mesh, disks)
    _place_others(model, policy.precision, mesh)
    shares_group = mesh.data.reduce_group.process_group is mesh.data.process_group
    order = CollectiveOrder([unit.label for unit in units], shares_group=shares_group)
    reducer = GradientReducer(units, policy, mesh.data, order)
    schedule = ParameterSchedule(units, policy.parameters, order, mesh.data)
    hooks = install_hooks(model, units, reducer, schedule)
    if plan is None:
        return ShardedModel(model, units, reducer, schedule, hooks)
    shards = [shard for unit in units for shard in unit.make_shards()]
    is_split = policy.stage.shards_optimizer and group.process_group is not None
    # Torch's optimizers update everything at once, which from a disk would have to be in memory together, and with the
    # hyper-parameters of the moment, which in a thread would be another.
    needs_kernel = policy.offload.optimizer is Place.DISK or policy.offload.is_delayed
    last_resort = ReferenceKernel() if needs_kernel else None
    state_dtype = TORCH_DTYPES[policy.precision.state]
    found = {kind: kernel_for(kind) for kind in (group.device.type, "cpu")}
    if group.device.type != "cpu":
        found[group.device.type] = verified_kernel(found[group.device.type], plan, shards, state_dtype, mesh.world)
    found = {kind: kernel or last_resort for kind, kernel in found.items()}
    backend = OptimizerBackend(
        {kind: kernel for kind, kernel in found.items() if kernel is not None},
        group.buffers,
        state_dtype,
        (lambda sums: group.communicator.sum_scalars(sums.to(group.device))) if is_split else None,
        group,
        needs_kernel,
    )
    flat_optimizer = plan.build(shards, backend)
    flat_optimizer.steps_behind_host = _steps_behind_host(flat_optimizer, policy, scale_rules, mesh)
    if isinstance(flat_optimizer, UnitOptimizer):
        for unit in units:
            unit.reserve_states(flat_optimizer)
    if isinstance(flat_optimizer, OneBitFlat):
        one_bit = flat_optimizer
        reducer.skips_reduction = lambda: one_bit.skips_reduction
    scaler = None if scale_rules is None else LossScaler(scale_rules)
    delayed = None
    if policy.offload.is_delayed and isinstance(flat_optimizer, UnitOptimizer):
        delayed = DelayedUpdate(units, flat_optimizer, policy, mesh)
    optimizer = ZeroOptimizer(
        flat_optimizer,
        plan,
        scaler,
        units,
        max_grad_norm=policy.max_grad_norm,
        is_offloaded=policy.offload.optimizer is not Place.DEVICE,
    )
    sharded = ShardedModel(model, units, reducer, schedule, hooks, optimizer, delayed)
    sharded.thaw_at_end(frozen)
    return sharded


def _freeze_others(model: nn.Module, group_of: Collection[nn.Parameter], rank: int) -> list[nn.Parameter]:
    """Freeze and return what no optimizer group has: at stage 3 gradients would have no place. Rank 0 says it."""
    others = {name: param for name, param in model.named_parameters() if param.requires_grad and param not in group_of}
    for param in others.values():
        param.requires_grad_(False)
    if others and rank == 0:
        names = [*others][:MAX_NAMES] + ([f"and {len(others) - MAX_NAMES} more"] if len(others) > MAX_NAMES else [])
        get_logger().warning("not trained, for they are in no optimizer group: %s", ", ".join(names))
    return list(others.values())


def _steps_behind_host(
    optimizer: FlatOptimizer, policy: ZeroPolicy, scale_rules: LossScaleRules | None, mesh: ParallelMesh
) -> bool:
    """Decide whether the host queues steps without knowing their norm, alike on every rank. Collective.

    A loss scale follows every norm, and an optimizer in host memory is the host's to step.
    """
    if (
        not mesh.world.runtime.is_async_device
        or policy.offload.optimizer is not Place.DEVICE
        or scale_rules is not None
    ):
        return False
    can = isinstance(optimizer, DeviceScaled) and optimizer.takes_device_scale
    return all(mesh.world.communicator.gather_scalars(float(can)))


def _optimizer_plan(
    settings: Config,
    optimizer: ClientOptimizer | None,
    model: nn.Module,
    model_parameters: Iterable[Any] | None,
    group: RankGroup,
) -> OptimizerPlan | None:
    """Return what trains the model; None when nothing was given that could: the engine is for inference."""
    if optimizer is not None:
        rules = ZeroRules(int(settings.zero_optimization.stage), settings.zero_allow_untested_optimizer)
        return plan_from_client(optimizer, model, model_parameters, rules)
    section = settings.optimizer
    if section is None:
        return None
    if section.type in ONE_BIT:
        return one_bit_plan(section.type, section.params, model, model_parameters, group)
    if section.type == "Muon":
        return muon_plan(section.params, model, model_parameters)
    if section.type in MUP_TYPES:
        return mup_plan(section.type, section.params, model, model_parameters)
    params = section.params
    if updates_in_parts(settings):  # by the kernel, whatever was asked for
        params = {name: value for name, value in params.items() if name != "torch_adam"}
    return plan_from_config(section.type, params, model, model_parameters)


def _wants_torch(settings: Config) -> bool:
    """Whether the config asks for torch's own optimizer, also where its states are offloaded."""
    return settings.optimizer is not None and settings.optimizer.params.get("torch_adam", False) is True


def _scheduler(settings: Config, client: Any, optimizer: ZeroOptimizer | None) -> Any:
    if optimizer is None:
        return None
    if client is not None:
        return schedule_from_client(client, optimizer)
    section = settings.scheduler
    if section is None:
        return None
    schedule = schedule_from_config(section.type, section.params, optimizer)
    tell(total_steps=section.params.get("total_num_steps"))
    return schedule


# ---- The allocator of the C library ----
# A backward pass allocates a gradient for each parameter and frees it as soon as it has been collected. By default
# glibc returns what is free at the end of its heap to the kernel, from 128 KiB on, and a tensor of more than that is
# a mapping of its own; both bounds grow, up to 64 and 32 MiB, as tensors are freed. The next gradient is then built
# of new pages, each a page fault, and zeroed by the kernel first: `perf stat -e page-faults` shows them.


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 128 * 2**20  # of freed memory at the end of the heap
LARGEST_IN_HEAP_BYTES = 32 * 2**20  # the most that glibc would reach by itself
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have glibc keep up to 128 MiB of freed memory for the next tensors of this process. Returns whether it does.

    It does not where the environment has settings of malloc, which are the user's choice, nor where the C library is
    another one. Memory that is in use does not grow.
    """
    if any(name in os.environ for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    # One of the two ends the growing of both.
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_IN_HEAP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
