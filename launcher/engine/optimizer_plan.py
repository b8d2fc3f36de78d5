"""What updates an engine's parameters: the optimizer's plan, whether it can be offloaded, which kernels are trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.comm.groups import RankGroup
from launcher.comm.mesh import ParallelMesh
from launcher.config.policies import Place, ZeroPolicy
from launcher.config.rules import updates_in_parts
from launcher.config.schema import Config
from launcher.kernels.api import Kernel, Rule
from launcher.kernels.check import SpanTypes, update_problem
from launcher.kernels.program_shape import LEAST_NUMEL
from launcher.kernels.reference import ReferenceKernel
from launcher.kernels.select import kernel_for
from launcher.kernels.triton_kernels import TritonKernel
from launcher.optim.api import DeviceScaled, FlatOptimizer, ParamShard
from launcher.optim.factory import (
    MUP_TYPES,
    OptimizerBackend,
    OptimizerPlan,
    ZeroRules,
    mup_plan,
    plan_from_client,
    plan_from_config,
)
from launcher.optim.muon.plan import muon_plan
from launcher.optim.onebit.algorithms import ONE_BIT, one_bit_plan
from launcher.optim.rules import COLLECTIVE, RULES, states_of
from launcher.zero.states import TORCH_DTYPES

ClientOptimizer = torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer]


def optimizer_plan(
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


def check_offload(plan: OptimizerPlan | None, policy: ZeroPolicy, settings: Config) -> None:
    """Raises: EngineError for an optimizer that cannot, or should not, be updated away from the device."""
    place = policy.offload.optimizer
    if plan is None or place is Place.DEVICE:
        return
    if policy.offload.updates_beside and (plan.kind is None or plan.kind in COLLECTIVE):
        name = "delayed_update" if policy.offload.is_delayed else "super_offload"
        raise EngineError(
            f"offload_optimizer: {name} is not possible with {plan.name}: its steps are not the engine's own, or ranks"
            " take them together",
            hint=f'remove "{name}", or use AdamW, Adagrad, Lion or SGD with ordinary options',
        )
    if plan.kind is not None:
        return
    remedy = "use AdamW, Adagrad, Lamb, Lion or SGD with ordinary options"
    if place is Place.DISK:
        raise EngineError(f"optimizer {plan.name} cannot be updated from disk", hint=remedy)
    if settings.zero_force_ds_cpu_optimizer and not _wants_torch(settings):
        raise EngineError(
            f"offload_optimizer: {plan.why_torch}, so that torch's own {plan.name} would run on the CPU",
            hint=f'accept that with "zero_force_ds_cpu_optimizer": false, or {remedy}',
        )


def flat_optimizer(
    plan: OptimizerPlan, shards: list[ParamShard], policy: ZeroPolicy, mesh: ParallelMesh
) -> FlatOptimizer:
    """Return what updates the owned ranges, with the kernels that serve here. Every rank must call it."""
    group = mesh.shard
    is_split = policy.stage.shards_optimizer and group.process_group is not None
    # Torch's optimizers update everything at once, which from a disk would have to be in memory together, and with the
    # hyper-parameters of the moment, which in a thread would be another.
    needs_kernel = policy.offload.optimizer is Place.DISK or policy.offload.updates_beside
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
    )
    optimizer = plan.build(shards, backend)
    optimizer.steps_behind_host = _steps_behind_host(optimizer, policy, mesh)
    return optimizer


def _steps_behind_host(optimizer: FlatOptimizer, policy: ZeroPolicy, mesh: ParallelMesh) -> bool:
    """Decide whether the host queues steps without knowing their norm, alike on every rank. Collective.

    An optimizer in host memory is the host's to step.
    """
    if policy.offload.optimizer is not Place.DEVICE or not mesh.world.runtime.is_async_device:
        return False
    can = isinstance(optimizer, DeviceScaled) and optimizer.takes_device_scale
    return all(mesh.world.communicator.gather_scalars(float(can)))


# ---- Which kernels an engine trusts on its device ----


def verified_kernel(
    kernel: Kernel | None,
    plan: OptimizerPlan,
    shards: Sequence[ParamShard],
    state_dtype: torch.dtype,
    group: RankGroup,
) -> Kernel | None:
    """Return a kernel of the group's device if it takes the plan's steps as the reference does on every rank.

    group: all ranks, of other stages and tensor parts too: what they have alike must be updated alike.
    Else None: torch's own optimizer or the reference serves, which rank 0 says. Every rank must call it.
    """
    if plan.kind is None:
        return kernel
    rules = {type(rule): rule for rule in (RULES[plan.kind](each, 2) for each in plan.param_groups)}
    numels = _numels_by_types(shards, state_dtype, group.device)
    problem = None if kernel is None else _problem(kernel, rules.values(), numels, group.device)
    num_wrong = sum(group.communicator.gather_scalars(float(kernel is None or problem is not None)))
    if num_wrong and group.rank == 0 and kernel is not None:
        why = problem or f"is missing or computes other steps than the reference on {num_wrong:.0f} other ranks"
        get_logger().warning("the kernel %s %s: it is not used, torch updates the parameters", kernel.name, why)
    if num_wrong:
        return None
    if isinstance(kernel, TritonKernel) and not kernel.is_interpreted:
        for types in [types for types, numel in numels.items() if numel >= LEAST_NUMEL]:
            for rule in rules.values():
                kernel.choose_shape(rule, len(states_of(rule)), types, group.device)
    return kernel


def _numels_by_types(
    shards: Sequence[ParamShard], state_dtype: torch.dtype, device: torch.device
) -> Counter[SpanTypes]:
    """Return how many elements on the device this rank updates, by the types of their tensors."""
    numels: Counter[SpanTypes] = Counter()
    for shard in shards:
        if shard.owned and shard.master.device.type == device.type:
            param_dtype = None if shard.param is None else shard.param.dtype
            numels[SpanTypes(shard.master.dtype, shard.grad.dtype, state_dtype, param_dtype)] += len(shard.owned)
    return numels


def _problem(kernel: Kernel, rules: Iterable[Rule], types: Iterable[SpanTypes], device: torch.device) -> str | None:
    """Say what is wrong with the kernel for the rules and the types of this rank's shards on the device."""
    try:
        for rule in rules:
            for each in types:
                problem = update_problem(kernel, rule, len(states_of(rule)), each, device)
                if problem is not None:
                    return problem
    except Exception as error:  # noqa: BLE001  # compiled at its first call; all ranks wait for what this one has found
        return f"does not run here: {(str(error) or type(error).__name__).splitlines()[0]}"
    return None
