"""Learning-rate schedules of the DeepSpeed vocabulary, as classes over the groups of an optimizer.

A schedule counts optimizer steps in `last_batch_iteration`, t below, from -1 before the first one. The engine calls
`step()` once after each optimizer step, so the first optimizer step runs at the rate of t = -1, the second at t = 0, as
scripts written for DeepSpeed expect. Formulas: DeepSpeed's documentation of "Learning Rate Schedulers".

Arguments are in DeepSpeed's order and have the types of the config's `scheduler.params`; attributes have its names.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.base import env
from launcher.base.errors import ConfigError, EngineError, did_you_mean
from launcher.base.log import get_logger
from launcher.config.check import check_params
from launcher.config.schema_params import TORCH_SCHEDULER_PARAMS

WARMUP_TYPES = ("log", "linear")
CYCLED_SECOND_BETA = 0.99  # OneCycle's, while it cycles the first one
PerGroup = float | Sequence[float]  # one value, or one for each group of the optimizer


def _say(text: str, *values: object) -> None:
    """Warn once of all ranks."""
    if os.environ.get(env.RANK.name, "0") == "0":
        get_logger().warning(text, *values)


class LRSchedule(ABC):
    """Writes `lr`, and the momentum where one is cycled, into every parameter group.

    It does so at construction and after each optimizer step. A rate that is a tensor keeps its identity.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int, kind: str, params: Mapping[str, Any]) -> None:
        """optimizer: has `param_groups`, or an `optimizer` that has. kind, params: as in the config's `scheduler`.

        Raises: ConfigError for a parameter that the config would not take.
        """
        check_params("scheduler", kind, params)
        self.optimizer = optimizer if hasattr(optimizer, "param_groups") else optimizer.optimizer
        self.last_batch_iteration = last_batch_iteration
        groups = self.optimizer.param_groups
        first = next((group["lr"] for group in groups if "lr" in group), 0.0)  # for a group that has none
        self.org_lrs = [float(group.get("lr", first)) for group in groups]

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at the current step."""

    def get_last_lr(self) -> list[float]:
        """Return the learning rates last written into the groups."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one optimizer step, or jump to `last_batch_iteration`, and write the new rates."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def state_dict(self) -> dict[str, int]:
        """Return `{"last_batch_iteration": t}`; everything else comes from the config."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a state of `state_dict()`, writing its rates at once."""
        self.step(state["last_batch_iteration"])

    def _of_groups(self, name: str, value: PerGroup) -> list[float]:
        """Return a parameter as one value for each group."""
        num_groups = len(self.optimizer.param_groups)
        if not isinstance(value, Sequence):
            return [float(value)] * num_groups
        if len(value) != num_groups:
            raise ConfigError(
                f"{type(self).__name__}: {name} has {len(value)} values, and the optimizer {num_groups} groups",
                where=f"scheduler.params.{name}",
                hint="give one value, or one for each group",
            )
        return [float(each) for each in value]

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group.get("lr"), Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


class _Warmup(LRSchedule):
    """What schedules share that begin with a rise: a gain from 0 to 1 over `warmup_num_steps`."""

    def _set_warmup(self, num_steps: int, warmup_type: str) -> None:
        # A logarithm to base 1 does not exist: two steps is the shortest warm-up.
        self.warmup_num_steps = max(2, int(num_steps))
        self.warmup_type = warmup_type.lower()
        if self.warmup_type not in WARMUP_TYPES:
            hint = did_you_mean(warmup_type, WARMUP_TYPES) or 'it is "log" or "linear"'
            _say('scheduler: the warmup_type "%s" is unknown, and "log" is used (%s)', warmup_type, hint)
            self.warmup_type = "log"

    def _gain(self) -> float:
        """Return the gain for 0 <= t < warmup_num_steps."""
        t = self.last_batch_iteration
        if self.warmup_type == "log":
            return math.log(t + 1) / math.log(self.warmup_num_steps)
        return t / self.warmup_num_steps


class WarmupLR(_Warmup):
    """Rises from `warmup_min_lr` to `warmup_max_lr` (None: each group's own rate), then stays."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Raises: ConfigError."""
        params = {
            "warmup_min_lr": warmup_min_lr,
            "warmup_max_lr": warmup_max_lr,
            "warmup_num_steps": warmup_num_steps,
            "warmup_type": warmup_type,
        }
        super().__init__(optimizer, last_batch_iteration, "WarmupLR", params)
        self._set_warmup(warmup_num_steps, warmup_type)
        self.min_lrs = self._of_groups("warmup_min_lr", warmup_min_lr)
        highest: PerGroup = self.org_lrs if warmup_max_lr is None else warmup_max_lr
        self.max_lrs = self._of_groups("warmup_max_lr", highest)
        self.delta_lrs = [high - low for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        self._apply()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at the current step."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        gain = self._gain() if self.last_batch_iteration < self.warmup_num_steps else self._gain_after()
        return [low + delta * gain for low, delta in zip(self.min_lrs, self.delta_lrs, strict=True)]

    def _gain_after(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Rises as WarmupLR, then falls linearly to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: float,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Raises: ConfigError."""
        check_params("scheduler", "WarmupDecayLR", {"total_num_steps": total_num_steps})
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _gain_after(self) -> float:
        num_left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, num_left / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Rises from `warmup_min_ratio` to 1, then falls on a half cosine to `cos_min_ratio`, times each group's rate."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: float,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Raises: ConfigError."""
        params = {
            "total_num_steps": total_num_steps,
            "warmup_min_ratio": warmup_min_ratio,
            "warmup_num_steps": warmup_num_steps,
            "cos_min_ratio": cos_min_ratio,
            "warmup_type": warmup_type,
        }
        super().__init__(optimizer, last_batch_iteration, "WarmupCosineLR", params)
        self._set_warmup(warmup_num_steps, warmup_type)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self._apply()

    def get_lr_ratio(self) -> float:
        """Return the part of the groups' own rates at the current step."""
        t = self.last_batch_iteration
        if t < 0:
            return 0.0
        if t < self.warmup_num_steps:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self._gain()
        decay_steps = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (t - self.warmup_num_steps + 1) / decay_steps)
        cosine = (1.0 + math.cos(math.pi * progress)) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at the current step."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


class LRRangeTest(LRSchedule):
    """Rises without end, by `step_rate` times the first rate in each `step_size` steps, until training fails."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        """Raises: ConfigError."""
        params = {
            "lr_range_test_min_lr": lr_range_test_min_lr,
            "lr_range_test_step_size": lr_range_test_step_size,
            "lr_range_test_step_rate": lr_range_test_step_rate,
            "lr_range_test_staircase": lr_range_test_staircase,
        }
        super().__init__(optimizer, last_batch_iteration, "LRRangeTest", params)
        self.min_lr = self._of_groups("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._apply()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at the current step."""
        num_intervals = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            num_intervals = math.floor(num_intervals)
        return [low * (1.0 + self.step_rate * num_intervals) for low in self.min_lr]


class OneCycle(LRSchedule):
    """Cycles the rate once from low to high and back, the momentum the other way, then lets both decay."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        """0 stairs: a straight line. None of the second part: as of the first. Raises: ConfigError."""
        params = {name: value for name, value in locals().items() if name.startswith(("cycle_", "decay_"))}
        super().__init__(optimizer, last_batch_iteration, "OneCycle", params)
        self.first_step_size = cycle_first_step_size
        self.second_step_size = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.first_stair_count = cycle_first_stair_count
        no_second = cycle_second_stair_count is None
        self.second_stair_count = cycle_first_stair_count if no_second else cycle_second_stair_count
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs = self._of_groups("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._of_groups("cycle_max_lr", cycle_max_lr)
        self.cycle_momentum = cycle_momentum and self._has_momentum()
        self.min_moms = [(each, CYCLED_SECOND_BETA) for each in self._of_groups("cycle_min_mom", cycle_min_mom)]
        self.max_moms = [(each, CYCLED_SECOND_BETA) for each in self._of_groups("cycle_max_mom", cycle_max_mom)]
        self._apply()

    def _has_momentum(self) -> bool:
        if any("betas" in group or group.get("momentum") for group in self.optimizer.param_groups):
            return True
        _say("scheduler.params.cycle_momentum has no effect: the optimizer has no momentum")
        return False

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at the current step."""
        if self.last_batch_iteration >= self.total_size:
            factor = 1.0 + self.decay_lr_rate * self._num_decays()
            return [low / factor for low in self.min_lrs]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return both betas of each group at the current step; None when the momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration >= self.total_size:
            factor = 1.0 + self.decay_mom_rate * self._num_decays()
            return [(high * factor, second) for high, second in self.max_moms]
        height = self._height()
        pairs = zip(self.min_moms, self.max_moms, strict=True)
        return [(high - (high - low) * height, second) for (low, second), (high, _) in pairs]

    def _height(self) -> float:
        """Return 0 at the ends of the cycle, 1 at its top; within the cycle."""
        position = (self.last_batch_iteration + 1) % self.total_size
        is_rising = position <= self.first_step_size
        stairs = self.first_stair_count if is_rising else self.second_stair_count
        size = self.first_step_size if is_rising else self.second_step_size
        done = position if is_rising else self.total_size - position
        return done * stairs // size / stairs if stairs else done / size

    def _num_decays(self) -> float:
        """Return how many decay intervals have passed since the cycle."""
        num_steps = self.last_batch_iteration - self.total_size + 1
        return num_steps / self.decay_step_size if self.decay_step_size else 0.0

    def _apply(self) -> None:
        super()._apply()
        # DeepSpeed's first step runs at the lower end of the momentum, against the direction of the cycle.
        moments = self.min_moms if self.cycle_momentum and self.last_batch_iteration < 0 else self.get_mom()
        for group, (momentum, second) in zip(self.optimizer.param_groups, moments or [], strict=False):
            if "betas" in group:
                group["betas"] = (momentum, second)
            elif group.get("momentum"):
                group["momentum"] = momentum


SCHEDULES: dict[str, type[LRSchedule]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


def build_schedule(type_name: str, params: Mapping[str, Any], optimizer: Any) -> LRSchedule:
    """Build the schedule named `type_name` over the groups of `optimizer`, whose `lr` it owns from now on.

    Raises: ConfigError for an unknown type or parameter, a missing one, or a training of 0 steps.
    """
    kind = SCHEDULES.get(type_name)
    if kind is None:
        hint = did_you_mean(type_name, SCHEDULES) or f"expected one of {', '.join(SCHEDULES)}"
        raise ConfigError(f'unknown scheduler type "{type_name}"', where="scheduler.type", hint=hint)
    check_params("scheduler", type_name, params)
    if params.get("total_num_steps") == 0:  # transformers' Trainer writes it where it only evaluates
        raise ConfigError(
            f"{type_name}: a training of 0 steps has no learning rate",
            where="scheduler.params.total_num_steps",
            hint="state the number of optimizer steps",
        )
    return kind(optimizer, **params)


# ---- Schedules of torch, and a client's own ----


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_METRICS = frozenset({"metrics", "metric"})  # arguments whose value only the script has


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
    is_function = isinstance(client, type) or (callable(client) and not hasattr(client, "step"))
    schedule = client(optimizer) if is_function else client
    if not callable(getattr(schedule, "step", None)):
        raise EngineError(
            f"lr_scheduler is a {type(schedule).__name__} without step()",
            hint="give a schedule object, or a function from the optimizer to one",
        )
    if missing := _METRICS & _needed(schedule):
        _say(
            "%s is not stepped by the engine: its step() needs %s. Call it where that is known, as a Trainer"
            " does when it has evaluated, or engine.step(lr_kwargs=...)",
            type(schedule).__name__,
            ", ".join(missing),
        )
    return schedule


@dataclass(frozen=True)
class ScheduleStep:
    """What the engine does with a schedule after an optimizer step."""

    schedule: Any  # None: there is none
    arguments: Mapping[str, Any]  # of `engine.step(lr_kwargs=...)`
    batch_size: int  # samples of the optimizer step

    @functools.cached_property
    def _missing(self) -> set[str]:
        return _needed(self.schedule) - self.arguments.keys()

    @property
    def is_taken(self) -> bool:
        """Whether the engine steps it: one that needs a metric is stepped by who has that."""
        return self.schedule is not None and _METRICS.isdisjoint(self._missing)

    def take(self) -> None:
        """Step the schedule. One that needs an argument of another name gets the samples of the step, as Megatron's."""
        if not self.is_taken:
            return
        if self._missing:
            self.schedule.step(self.batch_size)
        else:
            self.schedule.step(**self.arguments)

    def check(self) -> None:
        """Refuse arguments that `step()` of the schedule does not take. Raises: EngineError."""
        if self.schedule is None or not self.arguments:
            return
        try:
            inspect.signature(self.schedule.step).bind_partial(**self.arguments)
        except TypeError as error:
            raise EngineError(
                f"engine.step(lr_kwargs=...): step() of {type(self.schedule).__name__}: {error}",
                hint="give arguments that it has, or leave lr_kwargs out",
            ) from None


def _needed(schedule: Any) -> set[str]:
    """Return the arguments that `step()` of a schedule does not do without."""
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):  # also where a subclass has a default
        return {"metrics"}
    try:
        found = inspect.signature(schedule.step).parameters.values()
    except (TypeError, ValueError):  # of a class that is not written in Python
        return set()
    return {each.name for each in found if each.default is each.empty and each.kind not in _VARIADIC}
