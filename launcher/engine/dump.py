"""`dump_state`: everything that shapes a run, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.config.batch import BATCH_KEYS, BatchPlan
from launcher.config.fields import Section, Status, Support, is_list_of_sections, section_of, shown, status_of
from launcher.config.schema import Config
from launcher.config.schema_optimizers import OPTIMIZER_PARAMS
from launcher.config.schema_schedules import SCHEDULER_PARAMS
from launcher.zero.stages import Place, Precision, ZeroPolicy
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
