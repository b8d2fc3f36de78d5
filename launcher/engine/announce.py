"""What is said when an engine starts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from launcher.base import env
from launcher.base.errors import Diagnostic
from launcher.base.log import get_logger
from launcher.comm.device import accelerator_type, device_module
from launcher.config.auto import AutoChoice
from launcher.config.equations import BATCH_KEYS, BatchPlan
from launcher.config.fields import Section, Status, Support, is_list_of_sections, section_of, shown, status_of
from launcher.config.policies import Place, Precision, ZeroPolicy
from launcher.config.schema import Config
from launcher.config.schema_params import OPTIMIZER_PARAMS, SCHEDULER_PARAMS
from launcher.engine.parts import EngineParts, precision_notice
from launcher.journal.rank import RankJournal
from launcher.kernels.select import describe_kernel
from launcher.monitor.flops import peak_flops
from launcher.optim.api import UnitOptimizer
from launcher.optim.factory import OptimizerPlan
from launcher.zero.placement import Disks
from launcher.zero.states import TORCH_DTYPES
from launcher.zero.unit import FlatUnit

SECRETS = ("api_key",)


def state_text(settings: Config, batch: BatchPlan, policy: ZeroPolicy, units: list[FlatUnit]) -> str:
    """Return the config in force and the units, one line each.

    Of the config: keys that act in this run, of sections that are on, with "auto" and the batch equation resolved and
    secrets hidden.
    """
    acting = {Support.WORKS}
    acting |= {Support.AT_STAGE_3} if settings.zero_optimization.stage == 3 else set()
    acting |= {Support.WITH_NVME} if Place.DISK in (policy.offload.optimizer, policy.offload.params) else set()
    solved = settings.model_copy(update=dict(zip(BATCH_KEYS, batch.sizes, strict=True)))
    lines = ["config in force:"]
    lines += [f"  {path} = {shown(value)}" for path, value, status in _keys(solved, "") if status.support in acting]
    is_trained = any(unit.grads is not None for unit in units)
    lines += ["precision in force:", *(f"  {what}: {name}" for what, name in _dtypes(policy.precision, is_trained))]
    lines.append(f"stage {policy.stage.number}, {len(units)} units:")
    for index, unit in enumerate(units):
        names = unit.layout.names
        lines.append(
            f"  unit {index}: {len(names)} parameters from {names[0]} to {names[-1]},"
            f" {unit.layout.padded_numel:,} elements, {len(unit.owned):,} here"
        )
    return "\n".join(lines)


def _dtypes(precision: Precision, is_trained: bool) -> Iterator[tuple[str, str]]:
    """Yield what is kept, and in which precision."""
    param = precision.param.value
    yield "parameters", param
    if precision.autocast is not None:
        yield "autocast", precision.autocast.value
    if is_trained:
        yield "master weights", "fp32" if precision.has_master else f"the parameters, {param}"
        yield "gradient sums", precision.grad.value
        yield "optimizer states", precision.state.value


def _keys(section: Section, prefix: str) -> Iterator[tuple[str, Any, Status]]:
    """Yield every key of the sections that are on: path, value, status."""
    kind = type(section)
    if kind.switch is not None and getattr(section, kind.switch[0]) == kind.switch[1]:
        return
    for name in kind.model_fields:
        value, path = getattr(section, name), f"{prefix}{name}"
        if is_list_of_sections(kind, name):
            for index, item in enumerate(value):
                yield from _keys(item, f"{path}[{index}].")
        elif section_of(kind, name) is not None:
            if value is not None:
                yield from _keys(value, f"{path}.")
        elif path in ("optimizer.params", "scheduler.params"):
            known = OPTIMIZER_PARAMS if prefix == "optimizer." else SCHEDULER_PARAMS
            params = known[section.type]  # type: ignore[attr-defined]  # only these two sections have params
            yield from ((f"{path}.{part}", inner, status_of(params, part)) for part, inner in value.items())
        else:
            yield path, "***" if name in SECRETS and value else value, status_of(kind, name)


def announce_disks(disks: Disks) -> None:
    """Say what is on the disks of this host. For the first rank of each host: every host has its own disks."""
    if int(os.environ.get(env.LOCAL_RANK.name, "0")) == 0:
        for notice in disks.notices:
            get_logger().info("disk: %s", notice)


def announce(
    parts: EngineParts,
    notices: Sequence[Diagnostic],
    choices: Sequence[AutoChoice],
    plan: OptimizerPlan | None,
    split_notices: Sequence[str],
) -> None:
    """Say in a few lines what this run will do.

    notices: of the config; choices: what "auto" became; split_notices: of how the model was split over ranks.
    """
    log = get_logger()
    policy, batch, optimizer = parts.policy, parts.batch, parts.sharded.optimizer
    log.info(
        "zero stage %s · %s · %s · %s · micro %d × accumulation %d × dp %d = batch %d",
        int(parts.settings.zero_optimization.stage),
        policy.precision.label,
        "no optimizer: inference only" if optimizer is None else optimizer.flat.label,
        f"clip {policy.max_grad_norm:g}" if policy.max_grad_norm else "no clipping",
        batch.micro_batch_size,
        batch.accumulation_steps,
        batch.world_size,
        batch.train_batch_size,
    )
    if plan is not None and (plan.kind is not None or plan.why_torch is not None):
        log.info("optimizer kernel: %s", _kernel_text(plan, parts))
    if parts.mesh.label is not None:
        log.info("mesh: %s", parts.mesh.label)
    for text in split_notices:
        log.info("%s", text)
    if parts.group.device.type == "cpu" and accelerator_type() is not None:
        log.warning(
            "the process group is gloo's, which sends no GPU memory: this engine trains on the CPU, and the GPUs stay"
            " idle (start the group with nccl, or leave it to the engine)"
        )
    if policy.offload.is_any:
        log.info("offload: %s", policy.offload.label)
    for reason, together in itertools.groupby(sorted(choices, key=lambda c: c.reason), key=lambda c: c.reason):
        log.info("auto: %s (%s)", " · ".join(f"{choice.key} = {choice.value}" for choice in together), reason)
    for notice in notices:
        log.info("note: %s", notice)
    precision = precision_notice(parts.settings)
    if precision is not None:
        log.info("note: %s", precision)
    if plan is not None and plan.summary is not None:
        log.info("%s", plan.summary)
    if plan is not None and plan.notice is not None:
        log.warning("%s", plan.notice)
    if parts.settings.dump_state:
        log.info("%s", state_text(parts.settings, batch, policy, parts.sharded.units))


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, list, dict, type(None))) else shown(value)


def record_engine(journal: RankJournal, parts: EngineParts, choices: Sequence[AutoChoice]) -> None:
    """Add to the journal what this engine is: its config in force, its units, its device."""
    settings, device = parts.settings, parts.group.device
    solved = settings.model_copy(update=dict(zip(BATCH_KEYS, parts.batch.sizes, strict=True)))
    compute = TORCH_DTYPES[parts.policy.precision.compute]
    journal.add(
        "engine",
        config={path: _plain(value) for path, value, _ in _keys(solved, "")},
        auto=[[choice.key, choice.value, choice.reason] for choice in choices],
        units=[
            [unit.label, unit.layout.padded_numel, unit.layout.padded_numel * compute.itemsize]
            for unit in parts.sharded.units
        ],
        device="cpu" if device.type == "cpu" else device_module(device).get_device_name(device),
        torch=torch.__version__,
        peak_flops=peak_flops(device, compute),
    )


def _kernel_text(plan: OptimizerPlan, parts: EngineParts) -> str:
    """Say what updates the shards, and why it is that."""
    device_type, optimizer = parts.group.device.type, parts.sharded.optimizer
    if plan.why_torch is not None:
        return f"torch's own ({plan.why_torch})"
    kernel = describe_kernel(device_type)
    is_torch = optimizer is not None and not isinstance(optimizer.flat, UnitOptimizer)
    return f"torch's own, in place of {kernel}" if is_torch and not kernel.startswith("torch") else kernel
