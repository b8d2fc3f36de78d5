"""From a config section or a client's optimizer to parameter groups and a flat optimizer."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import ConfigError, EngineAssertionError, EngineError, did_you_mean
from launcher.comm.buffers import BufferPool
from launcher.comm.groups import RankGroup
from launcher.config.schema_params import OPTIMIZER_PARAMS
from launcher.kernels.api import Kernel
from launcher.kernels.reference import ReferenceKernel
from launcher.optim.api import FlatOptimizer, ParamShard
from launcher.optim.catalog import (
    BY_NAME,
    NEVER,
    WHOLE_PARAMETERS,
    construct,
    has_stepped,
    is_known,
    kind_of,
    retarget,
)
from launcher.optim.flat import TorchFlat
from launcher.optim.kernel_flat import KernelFlat, KernelSet
from launcher.optim.rules import torch_can, why_no_rule
from launcher.optim.staged import StagedFlat

SUPPORTED_TYPES = tuple(BY_NAME)


@dataclass(frozen=True)
class ZeroRules:
    """What the config says about the optimizers a client may bring."""

    stage: int  # the configured one, whatever the world size: a run must not fail only once it gets a second rank
    allow_untested: bool = False  # zero_allow_untested_optimizer


@dataclass(frozen=True)
class OptimizerBackend:
    """With what shards can be updated."""

    kernels: Mapping[str, Kernel]  # by kind of device; where one is missing torch's own optimizers serve
    buffers: BufferPool
    state_dtype: torch.dtype = torch.float32
    # Sums fp64 [n, 2] over the ranks that each own a part of every parameter; None: each rank owns them whole.
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    ranks: RankGroup | None = None  # None: this process alone


@dataclass(frozen=True)
class OptimizerPlan:
    """Which optimizer to build, over which groups of the user's parameters."""

    name: str
    param_groups: list[dict[str, Any]]  # live: "params" and every option of the optimizer
    defaults: dict[str, Any]
    build: Callable[[list[ParamShard], OptimizerBackend], FlatOptimizer]  # over this rank's shards
    client: torch.optim.Optimizer | None = None
    kind: type[torch.optim.Optimizer] | None = None  # whose steps kernels can take; None: only the class itself can
    why_torch: str | None = None  # why kernels cannot, for the start line
    notice: str | None = None  # what to warn of at start
    summary: str | None = None  # what to say at start


def build_of_kind(
    name: str,
    param_groups: list[dict[str, Any]],
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    kind: type[torch.optim.Optimizer] | None,
    shards: list[ParamShard],
    backend: OptimizerBackend,
) -> FlatOptimizer:
    """Build an optimizer of a torch class, by kernels where they are there and can take its steps."""
    if kind is not None:
        devices = {shard.master.device.type for shard in shards}
        kernels = {device: backend.kernels.get(device, ReferenceKernel()) for device in devices}
        if devices <= set(backend.kernels) or not torch_can(kind, param_groups):
            choice = KernelSet(kernels, backend.state_dtype, backend.sum_over_ranks, backend.ranks)
            return KernelFlat(kind, shards, param_groups, choice)

    def build(over: list[ParamShard]) -> FlatOptimizer:
        return TorchFlat(name, over, param_groups, make)

    in_fp32 = all(kept.dtype == torch.float32 for shard in shards for kept in (shard.master, shard.grad))
    if in_fp32 or backend.state_dtype != torch.float32:
        return build(shards)
    return StagedFlat(shards, backend.buffers, build)


def without_names(parameters: Iterable[Any]) -> list[Any]:
    """Return parameters, and groups of them, without the names that `named_parameters()` has before each."""
    found: list[Any] = []
    for entry in parameters:
        if isinstance(entry, Mapping):
            params = entry["params"]
            found.append({**entry, "params": params if isinstance(params, Tensor) else without_names(params)})
        else:
            found.append(entry[1] if isinstance(entry, tuple) else entry)
    return found


def as_groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameters, and groups of them, as groups with a list of parameters each."""
    entries = list(parameters)
    groups = [dict(entry) for entry in entries if isinstance(entry, Mapping)]
    loose = [entry for entry in entries if not isinstance(entry, Mapping)]
    for group in groups:
        params = group["params"]
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    return ([{"params": loose}] if loose else []) + groups


def replace_parameters(
    optimizer: Any, parameters: Iterable[Any] | None, replaced: Callable[[Any], Iterable[Any]]
) -> list[Any] | None:
    """Put what `replaced(param)` returns in the place of each parameter: in a client's optimizer, and in the result.

    optimizer: changed where it is torch's. parameters: also groups of them, which keep their options; None stays None.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = _replaced(group["params"], replaced)
    return None if parameters is None else _replaced(parameters, replaced)


def _replaced(entries: Iterable[Any], replaced: Callable[[Any], Iterable[Any]]) -> list[Any]:
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, Mapping):
            params = entry["params"]
            params = [params] if isinstance(params, torch.Tensor) else params
            found.append({**entry, "params": _replaced(params, replaced)})
        else:
            found += replaced(entry)
    return found


def plan_from_config(
    type_name: str, params: Mapping[str, Any], model: nn.Module, model_parameters: Iterable[Any] | None
) -> OptimizerPlan:
    """Plan the optimizer of the config's `optimizer` section.

    model_parameters: parameters or groups of them (each may set its own lr, weight_decay, ...); None: all
    trainable parameters of `model`. Raises: ConfigError for a type this release does not have.
    """
    by_lower = {name.lower(): name for name in BY_NAME}
    name = by_lower.get(type_name.lower())
    if name is None:
        hint = did_you_mean(type_name, SUPPORTED_TYPES) or f"use one of {', '.join(SUPPORTED_TYPES)}"
        raise ConfigError(f'optimizer type "{type_name}" is not supported', where="optimizer.type", hint=hint)
    options = dict(OPTIMIZER_PARAMS[name].model_validate(dict(params)))
    # DeepSpeed's "Adam" means AdamW unless adam_w_mode is false; configs in the wild rely on it.
    if name == "Adam" and options["adam_w_mode"]:
        name = "AdamW"
    for key in ("foreach", "fused", "capturable"):  # accepted without effect: `construct` chooses
        options.pop(key, None)
    groups = as_groups(model.parameters() if model_parameters is None else model_parameters)
    # Through the class's own constructor, over stand-ins: it knows its options and completes every group.
    kind = BY_NAME[name]
    stand_ins = [{**group, "params": [torch.zeros(1)]} for group in groups]
    probe = construct(kind, as_tuples(options), stand_ins)
    unset: dict[str, Any] = {key: None for key in ("fused", "foreach") if key in probe.defaults}
    defaults = {**probe.defaults, **unset}
    if "bias_correction" in options:
        defaults["bias_correction"] = options["bias_correction"]
    live = [{**defaults, **full, **unset, **group} for full, group in zip(probe.param_groups, groups, strict=True)]
    make = functools.partial(construct, kind, defaults)
    wants_torch = options.get("torch_adam", False)
    if wants_torch and not torch_can(kind, live):
        raise ConfigError(
            'torch\'s Adam always corrects the bias: "torch_adam" cannot be used with "bias_correction": false',
            where="optimizer.params.torch_adam",
            hint="remove one of them",
        )
    why_torch = "torch_adam was asked for" if wants_torch else why_no_rule(kind, live)
    by_kernel = kind if why_torch is None else None
    build = functools.partial(build_of_kind, name, live, make, by_kernel)
    return OptimizerPlan(name, live, defaults, build, kind=by_kernel, why_torch=why_torch)


def as_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with lists, as JSON has them, as the tuples torch expects."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def plan_from_client(
    optimizer: torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer],
    model: nn.Module,
    model_parameters: Iterable[Any] | None,
    rules: ZeroRules,
) -> OptimizerPlan:
    """Take over a torch optimizer, or what a function from parameters to one builds.

    Its `param_groups` stay the live ones, so that a schedule built on it keeps working.
    Raises: EngineError for one that cannot be sharded or may not be (`zero_allow_untested_optimizer`), or that has
    taken steps.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model.parameters() if model_parameters is None else model_parameters))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise EngineAssertionError(
            f"the optimizer is a {type(optimizer).__name__}",
            hint="give a torch.optim.Optimizer, or a function from parameters to one",
        )
    known = kind_of(optimizer)
    name = known.__name__
    if has_stepped(optimizer):
        raise EngineError(
            f"the optimizer {name} holds state already", hint="call launcher.initialize before the first step"
        )
    _check_client(name, is_known(optimizer), rules)
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    if is_known(optimizer):
        make = functools.partial(construct, known, dict(optimizer.defaults))
    else:
        make = functools.partial(retarget, optimizer)
    why_torch = why_no_rule(known, optimizer.param_groups)
    kind = known if why_torch is None else None
    untested = not is_known(optimizer)
    notice = f"optimizer {name} is untested: its update must treat each element by itself"
    return OptimizerPlan(
        name,
        optimizer.param_groups,
        optimizer.defaults,
        functools.partial(build_of_kind, name, optimizer.param_groups, make, kind),
        client=optimizer,
        kind=kind,
        why_torch=why_torch,
        notice=notice if untested and rules.stage > 0 else None,
    )


def _check_client(name: str, is_tested: bool, rules: ZeroRules) -> None:
    if name in NEVER:
        why, remedy = NEVER[name]
        raise EngineAssertionError(f"optimizer {name} cannot be used: it {why}", hint=remedy)
    if is_tested or rules.stage == 0:
        return
    if name.lower() in WHOLE_PARAMETERS:
        why = WHOLE_PARAMETERS[name.lower()]
        instead = "or an elementwise optimizer such as AdamW or Lion"
        if "muon" in name.lower():
            instead = 'torch.optim.Muon, or "optimizer": {"type": "Muon"} in the config'
        raise EngineAssertionError(
            f"optimizer {name} cannot be sharded by ZeRO stage {rules.stage}: it {why}, and shards are flat",
            hint=f"use stage 0, {instead}",
        )
    if not rules.allow_untested:
        raise EngineAssertionError(
            f"optimizer {name} is untested with ZeRO stage {rules.stage}",
            hint='if its update treats each element by itself, add "zero_allow_untested_optimizer": true to the config',
        )


def group_of_parameters(plan: OptimizerPlan, model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the group of every trainable parameter that has one; frozen ones are left out of all groups.

    Raises: EngineError for a parameter in two groups, or of another model.
    """
    names = {param: name for name, param in model.named_parameters()}
    found: dict[nn.Parameter, int] = {}
    for index, group in enumerate(plan.param_groups):
        for param in group["params"]:
            if param not in names:
                raise EngineError(
                    f"optimizer group {index} holds a parameter of shape {tuple(param.shape)} that is not the model's"
                )
            if found.setdefault(param, index) != index:
                raise EngineAssertionError(f"parameter {names[param]} is in two optimizer groups")
    return {param: index for param, index in found.items() if param.requires_grad}


# ---- Optimizers of µP ----


MUP_TYPES = ("MuAdam", "MuAdamW", "MuSGD")


def mup_plan(
    type_name: str, params: Mapping[str, Any], model: nn.Module, model_parameters: Iterable[Any] | None
) -> OptimizerPlan:
    """Plan the optimizer that mup builds: torch's Adam, AdamW or SGD, with a group for each width.

    Its rates are of the parameters' shapes as `mup.set_base_shapes(model, ...)` has noted them, before `initialize`.
    Raises: ConfigError where mup is not installed, or the model has no base shapes.
    """
    try:
        build = getattr(importlib.import_module("mup"), type_name)
    except ImportError as error:
        raise ConfigError(
            f"optimizer type {type_name} is of the package mup, which cannot be imported: {error}",
            where="optimizer.type",
            hint="pip install mup",
        ) from None
    trained = list(model.parameters() if model_parameters is None else model_parameters)
    try:
        built = build(trained, **as_tuples(params))
    except AssertionError as error:  # mup asserts that each parameter has the mark of set_base_shapes
        raise ConfigError(str(error), where="optimizer.type", hint="call mup.set_base_shapes(model, ...)") from None
    return plan_from_client(built, model, None, ZeroRules(stage=0))
