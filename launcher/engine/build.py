"""`initialize()`: the one place that shows in which order an engine is built."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from launcher.activation.blocks import keep_activations, recompute_blocks
from launcher.activation.settings import use_section
from launcher.base.errors import ConfigAssertionError, EngineAssertionError, EngineError
from launcher.base.log import get_logger
from launcher.base.progress import phase, update_progress
from launcher.comm import pending
from launcher.comm.device import keep_freed_memory, offset_seed
from launcher.comm.groups import RankGroup, init_distributed, world_group
from launcher.comm.mesh import ParallelMesh, build_mesh, leave_in_order
from launcher.comm.torch_internals import without_dynamo
from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.equations import BatchPlan, mesh_sizes, solve_batch
from launcher.config.load import load_config
from launcher.config.policies import Place, ZeroPolicy, zero_policy
from launcher.config.schema import Config
from launcher.engine.announce import announce, announce_disks, record_engine
from launcher.engine.casting import (
    casting_of,
    place_buffers,
    place_frozen,
    set_tf32,
)
from launcher.engine.data import DistributedLoader, build_loader
from launcher.engine.deepspeed_engine import DeepSpeedEngine
from launcher.engine.facts import facts_of, leave_facts, leave_refused
from launcher.engine.model_check import (
    check_for_ranks,
    check_model,
    check_types,
    mark_leaf_modules,
    warn_of_cuda_graphs,
)
from launcher.engine.optimizer import ZeroOptimizer
from launcher.engine.optimizer_plan import ClientOptimizer, check_offload, flat_optimizer, optimizer_plan
from launcher.engine.parallel import check_optimizer, sizes_with_experts, split_over_ranks, spread_over_ranks
from launcher.engine.parts import EngineParts, loss_scale_rules, swap_space
from launcher.engine.pipeline import PipelineEngine
from launcher.engine.sequence import attach_sequence, check_groups, check_sequence, sequence_size
from launcher.engine.sharded import ShardedModel, end_engine_of
from launcher.engine.stages import divide_into_stages
from launcher.journal.rank import own_journal
from launcher.optim.api import UnitOptimizer
from launcher.optim.factory import OptimizerPlan, group_of_parameters, without_names
from launcher.optim.onebit.flat import OneBitFlat
from launcher.optim.scaling import LossScaler, LossScaleRules
from launcher.optim.schedules import schedule_from_client, schedule_from_config
from launcher.parallel.pipeline.divide import requested_stages
from launcher.parallel.pipeline.stages import StagedModel
from launcher.sharding.mesh import MeshSizes
from launcher.zero.hooks import install_hooks
from launcher.zero.order import CollectiveOrder
from launcher.zero.partition import build_units
from launcher.zero.placement import Disks
from launcher.zero.reducer import GradientReducer
from launcher.zero.schedule import ParameterSchedule
from launcher.zero.speculative_update import SpeculativeUpdate
from launcher.zero.states import TORCH_DTYPES
from launcher.zero.step import MAX_NAMES, DelayedUpdate
from launcher.zero.tiling import tile_to_fit


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

    # The config and the mesh.
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    world = _world_for(model)
    loaded = load_config(
        _config_source(args, config, config_params),
        world_size=world.world_size,
        model_stages=requested_stages(model),
        sequence_parallel_size=sequence_size(mpu, mesh_param, world.world_size),
        is_of_engine=True,
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
    has_pipeline = is_list_of_layers or sizes.pipeline > 1
    _check_recomputation(settings, has_pipeline=has_pipeline)
    trains = optimizer is not None or settings.optimizer is not None
    has_loader = training_data is not None
    leave_facts(facts_of(model, settings, batch, mesh, trains=trains, has_loader=has_loader, has_pipeline=has_pipeline))
    _prepare_device(settings, group)

    # The model: its layers, experts, types and places, before any parameter is sharded.
    if model_parameters is not None:  # now: layers may be about to go. A function gets what was given, with its names
        model_parameters = without_names(model_parameters) if optimizer is None else list(model_parameters)
    staged = divide_into_stages(model, settings, mesh, batch.accumulation_steps)
    split_notices = [] if staged is None else staged.notices
    if staged is not None:
        model, model_parameters = staged.model, staged.own_parameters(optimizer, model_parameters)
    split_notices += split_over_ranks(model, settings, mesh) + check_sequence(model, mesh)
    _offset_seed(mesh)
    expert_notices, model_parameters = spread_over_ranks(model, settings, mesh, optimizer, model_parameters)
    mark_leaf_modules(model, settings, group)
    place_buffers(model, settings, policy.precision, mesh)
    casting = casting_of(model, settings, policy.precision, group)
    model_parameters = tile_to_fit(model, policy, group, optimizer, model_parameters)
    if settings.activation_checkpointing.blocks:
        recompute_blocks(model)

    # Units and optimizer.
    plan = optimizer_plan(settings, optimizer, model, model_parameters, mesh.shard)
    check_optimizer(plan, mesh)
    check_offload(plan, policy, settings)
    leave_refused(loaded.raw, settings, mesh, plan, trains=trains)
    disks = swap_space(settings)
    built = _shard(model, plan, policy, mesh, loss_scale_rules(settings), disks)
    warn_of_cuda_graphs(model, built.units)
    sequence = attach_sequence(model, built, mesh, mpu)

    # What runs them.
    scheduler = _scheduler(settings, lr_scheduler, built.optimizer)
    loader = None
    if training_data is not None:
        loader = build_loader(
            training_data,
            batch_size=batch.micro_batch_size,
            rank=mesh.sample_rank,
            world_size=mesh.sizes.data,
            collate_fn=collate_fn,
            drop_last=settings.dataloader_drop_last,
            shuffle=not is_list_of_layers,  # the data of a pipeline are read in order, as by DeepSpeed
            pin_memory=mesh.world.device.type != "cpu",
        )
    parts = EngineParts(mesh, policy, built, scheduler, batch, settings, loaded.raw, loader, casting, sequence)
    announce_disks(disks)
    if world.rank == 0:
        announce(parts, loaded.notices, choices, plan, [*split_notices, *expert_notices])
        if (journal := own_journal()) is not None:
            record_engine(journal, parts, choices)
    engine = DeepSpeedEngine(model, parts) if staged is None else PipelineEngine(staged.model, parts, staged.plan)
    if built.optimizer is not None:
        built.optimizer.run_by(engine, settings, is_of_pipeline=staged is not None)
    engine.begin_in_folder()
    return engine, built.optimizer, loader, scheduler


def _check_recomputation(settings: Config, *, has_pipeline: bool) -> None:
    """Raise EngineError for a pipeline whose blocks the config wants recomputed: its layers have a key of their own."""
    if settings.activation_checkpointing.blocks and has_pipeline:
        raise EngineError(
            "activation_checkpointing.blocks is not for a pipeline, whose layers say themselves what is recomputed",
            hint="remove the key; give PipelineModule(activation_checkpoint_interval=1), or call"
            " model.gradient_checkpointing_enable() before initialize()",
        )


def _world_for(model: nn.Module) -> RankGroup:
    """Return all ranks, after the end of an engine that `model` belongs to. Raises: EngineError."""
    leave_in_order()
    pending.drain()
    world = world_group()
    check_for_ranks(model, world.world_size)
    keep_activations(model)
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


def _offset_seed(mesh: ParallelMesh) -> None:
    """Have ranks with other positions, heads or layers of the same samples drop out others, too."""
    for axis in filter(None, (mesh.sequence, mesh.pipeline)):
        offset_seed(mesh.world.device, axis.rank)


def _shard(
    model: nn.Module,
    plan: OptimizerPlan | None,
    policy: ZeroPolicy,
    mesh: ParallelMesh,
    scale_rules: LossScaleRules | None,
    disks: Disks,
) -> ShardedModel:
    """Lay the model out in units, tie them to autograd and give the owned ranges to the optimizer."""
    group_of = {} if plan is None else group_of_parameters(plan, model)
    frozen = [] if plan is None else _freeze_others(model, group_of, mesh.world.rank)
    units = build_units(model, group_of, policy, mesh, disks)
    place_frozen(model, policy.precision, mesh)
    shares_group = mesh.data.reduce_group.process_group is mesh.data.process_group
    order = CollectiveOrder([unit.label for unit in units], shares_group=shares_group)
    reducer = GradientReducer(units, policy, mesh.data, order)
    schedule = ParameterSchedule(units, policy.parameters, order, mesh.data)
    hooks = install_hooks(model, units, reducer, schedule)
    if plan is None:
        return ShardedModel(model, units, reducer, schedule, hooks)
    shards = [shard for unit in units for shard in unit.make_shards()]
    optimizer = flat_optimizer(plan, shards, policy, mesh)
    if isinstance(optimizer, UnitOptimizer):
        for unit in units:
            unit.prepare_for(optimizer)
    if isinstance(optimizer, OneBitFlat):
        one_bit = optimizer
        reducer.skips_reduction = lambda: one_bit.skips_reduction
    if optimizer.steps_behind_host:
        for unit in units:
            if unit.grads is not None:
                unit.grads.give_sum_back()
    delayed = None
    if policy.offload.is_delayed and isinstance(optimizer, UnitOptimizer):
        delayed = DelayedUpdate(units, optimizer, policy, mesh)
    stepped = ZeroOptimizer(
        optimizer,
        plan,
        None if scale_rules is None else LossScaler(scale_rules),
        units,
        max_grad_norm=policy.max_grad_norm,
        is_offloaded=policy.offload.optimizer is not Place.DEVICE,
    )
    if policy.offload.is_speculative and isinstance(optimizer, UnitOptimizer):
        fraction = policy.offload.cores_fraction
        reducer.speculative = SpeculativeUpdate(units, optimizer, lambda: stepped.loss_scale, fraction)
    sharded = ShardedModel(model, units, reducer, schedule, hooks, stepped, delayed)
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


def _scheduler(settings: Config, client: Any, optimizer: ZeroOptimizer | None) -> Any:
    if optimizer is None:
        return None
    if client is not None:
        return schedule_from_client(client, optimizer)
    section = settings.scheduler
    if section is None:
        return None
    schedule = schedule_from_config(section.type, section.params, optimizer)
    update_progress(total_steps=section.params.get("total_num_steps"))
    return schedule
