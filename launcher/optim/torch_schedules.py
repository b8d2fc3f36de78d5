"""Schedules of `torch.optim.lr_scheduler`, by name, and what a client brings as schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from launcher.base.errors import ConfigError, EngineError
from launcher.config.schema_schedules import TORCH_SCHEDULER_PARAMS
from launcher.optim.schedules import build_schedule


def schedule_from_config(type_name: str, params: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """Build the schedule of the config's `scheduler` section over the groups of `optimizer`.

    Raises: ConfigError for an unknown type, or parameters torch refuses.
    """
    if type_name not in TORCH_SCHEDULER_PARAMS:
        return build_schedule(type_name, params, optimizer)
    try:
        return getattr(torch.optim.lr_scheduler, type_name)(optimizer, **params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{type_name}: {error}", where="scheduler.params") from error


def schedule_from_client(client: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return the client's schedule: an object with `step()`, or what a function from the optimizer to one builds.

    Raises: EngineError for anything else.
    """
    schedule = client(optimizer) if callable(client) and not hasattr(client, "step") else client
    if not callable(getattr(schedule, "step", None)):
        raise EngineError(
            f"lr_scheduler is a {type(schedule).__name__} without step()",
            hint="give a schedule object, or a function from the optimizer to one",
        )
    return schedule


def steps_by_itself(schedule: Any) -> bool:
    """Whether the engine is to step it: one that needs a metric is stepped by the script that has it."""
    return schedule is not None and not isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
