"""Schedules on the command line, by the functions of `deepspeed.runtime.lr_schedules` and with its options."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from launcher.compat import words

# Schedule -> option -> default, whose type is the option's. The types of one family share theirs.
_RANGE_TEST: dict[str, Any] = {
    words.LR_RANGE_TEST_MIN_LR: 0.001,
    words.LR_RANGE_TEST_STEP_RATE: 1.0,
    words.LR_RANGE_TEST_STEP_SIZE: 1000,
    words.LR_RANGE_TEST_STAIRCASE: False,
}
_ONE_CYCLE: dict[str, Any] = {
    words.CYCLE_FIRST_STEP_SIZE: 1000,
    words.CYCLE_FIRST_STAIR_COUNT: -1,
    words.CYCLE_SECOND_STEP_SIZE: -1,
    words.CYCLE_SECOND_STAIR_COUNT: -1,
    words.DECAY_STEP_SIZE: 1000,
    words.CYCLE_MIN_LR: 0.01,
    words.CYCLE_MAX_LR: 0.1,
    words.DECAY_LR_RATE: 0.0,
    words.CYCLE_MIN_MOM: 0.8,
    words.CYCLE_MAX_MOM: 0.9,
    words.DECAY_MOM_RATE: 0.0,
}
_WARMUP: dict[str, Any] = {
    words.WARMUP_MIN_LR: 0.0,
    words.WARMUP_MAX_LR: 0.001,
    words.WARMUP_NUM_STEPS: 1000,
    words.WARMUP_TYPE: words.WARMUP_LOG_RATE,
}
_COSINE: dict[str, Any] = {words.WARMUP_MIN_RATIO: 0.01, words.COS_MIN_RATIO: 0.01}
# What tells the learning rate of a schedule.
_RATE_OF = {words.LR_RANGE_TEST: words.LR_RANGE_TEST_MIN_LR, words.ONE_CYCLE: words.CYCLE_MAX_LR}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add an option for each parameter of DeepSpeed's schedules, and `--lr_schedule`; return the parser."""
    group = parser.add_argument_group("Convergence Tuning", "parameters of learning rate schedules")
    group.add_argument("--lr_schedule", help=f"one of {', '.join(words.VALID_LR_SCHEDULES)}")
    for name, default in {**_RANGE_TEST, **_ONE_CYCLE, **_WARMUP, **_COSINE}.items():
        kind = _is_true if isinstance(default, bool) else type(default)
        group.add_argument(f"--{name}", type=kind, default=default, help="default: %(default)s")
    group.add_argument(f"--{words.CYCLE_MOMENTUM}", action="store_true", help="let the momentum follow the cycle")
    return parser


def _is_true(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of schedules on this process's command line, and the other words there."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Take the parameters of LRRangeTest over from parsed options."""
    _override(args, params, _RANGE_TEST)


def override_1cycle_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Take the parameters of OneCycle over from parsed options."""
    _override(args, params, (*_ONE_CYCLE, words.CYCLE_MOMENTUM))


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:  # DeepSpeed's spelling
    """Take the parameters of WarmupLR over from parsed options."""
    _override(args, params, _WARMUP)


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Take the parameters of these three schedules over from parsed options."""
    for override in (override_lr_range_test_params, override_1cycle_params, override_warmupLR_params):
        override(args, params)


def _override(args: argparse.Namespace, params: dict[str, Any], names: Iterable[str]) -> None:
    given = vars(args)
    params.update({name: given[name] for name in names if given.get(name) is not None})


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return the section `scheduler` that options ask for, or None and why there is none."""
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in words.VALID_LR_SCHEDULES:
        return None, f"{name} is not supported LR schedule"
    families = {words.LR_RANGE_TEST: override_lr_range_test_params, words.ONE_CYCLE: override_1cycle_params}
    params: dict[str, Any] = {}
    families.get(name, override_warmupLR_params)(args, params)
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the learning rate that a section `scheduler` begins or ends with; None and why, where it says none."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    if config["type"] not in words.VALID_LR_SCHEDULES:
        return None, f"{config['type']} is not a valid LR schedule"
    return config["params"][_RATE_OF.get(config["type"], words.WARMUP_MAX_LR)], ""


def update_lr(param_groups: Sequence[dict[str, Any]], lrs: Sequence[Any]) -> list[Any]:
    """Set the learning rate of each group, in place where it is a tensor; return the rates."""
    for group, rate in zip(param_groups, lrs, strict=False):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate.squeeze() if isinstance(rate, Tensor) else rate)
        else:
            group["lr"] = rate
    return [group["lr"] for group in param_groups]
