"""From an optimizer's parameter group, as users write it, to the rule a kernel takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from launcher.base.errors import EngineError
from launcher.kernels.api import Adagrad, Adam, Lion, Rule, Sgd
from launcher.optim import classes
from launcher.optim.classes import Lamb, lamb_rule, moment_options
from launcher.optim.muon.muon import MUON_KINDS, muon_rule

Group = Mapping[str, Any]
# From a group and the number of the step being taken, from 1, to the rule of that step.
MakeRule = Callable[[Group, int], Rule]


def _adam(group: Group, step: int, *, is_decoupled: bool = False) -> Adam:
    return Adam(
        *moment_options(group),
        step,
        is_decoupled=is_decoupled or bool(group.get("decoupled_weight_decay")),
        corrects_bias=group.get("bias_correction", True),
    )


def _adamw(group: Group, step: int) -> Adam:
    return _adam(group, step, is_decoupled=True)


def _adagrad(group: Group, step: int) -> Adagrad:
    lr, eps, weight_decay, lr_decay = (float(group[key]) for key in ("lr", "eps", "weight_decay", "lr_decay"))
    return Adagrad(lr, eps, weight_decay, lr_decay, step)


def _lion(group: Group, step: int) -> Lion:
    beta1, beta2 = map(float, group["betas"])
    return Lion(float(group["lr"]), beta1, beta2, float(group["weight_decay"]))


def _sgd(group: Group, step: int) -> Sgd:
    lr, momentum, dampening, weight_decay = (
        float(group[key]) for key in ("lr", "momentum", "dampening", "weight_decay")
    )
    return Sgd(lr, momentum, dampening, weight_decay, is_nesterov=group["nesterov"], is_first=step == 1)


RULES: dict[type[torch.optim.Optimizer], MakeRule] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
    torch.optim.Adagrad: _adagrad,
    torch.optim.SGD: _sgd,
    classes.Lion: _lion,
    Lamb: lamb_rule,
    **dict.fromkeys(MUON_KINDS, muon_rule),
}
# Their steps need norms or matrices of whole parameters: ranks take them together.
COLLECTIVE = (Lamb, *MUON_KINDS)
# Options that ask for something no rule has, when they are set. `fused` does not: kernels are that, with the same bits.
_OTHER_STEPS = ("amsgrad", "maximize", "differentiable", "capturable", "foreach")


def why_no_rule(kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> str | None:
    """Say why kernels cannot take the steps that a class would with these groups; None where they can, exactly."""
    if kind not in RULES:
        return f"there is no kernel for {kind.__name__}"
    asked = [option for option in _OTHER_STEPS if any(group.get(option) for group in groups)]
    return f"{asked[0]} was asked for" if asked else None


def check_steps(groups: Sequence[Group]) -> None:
    """Raises: EngineError for an option that no rule knows, set after the optimizer was built."""
    for index, group in enumerate(groups):
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise EngineError(
                    f"optimizer group {index} sets {option}, which the kernel that was chosen at start does not know",
                    hint=f"set {option} before initialize(), which then takes torch's own optimizer",
                )


def check_torch_steps(kind: type[torch.optim.Optimizer], groups: Sequence[Group]) -> None:
    """Raises: EngineError for an option that kernels know and torch's class does not, set after the start."""
    for index, group in enumerate(groups):
        if issubclass(kind, torch.optim.Adam | torch.optim.AdamW) and not group.get("bias_correction", True):
            raise EngineError(
                f"optimizer group {index} turns bias_correction off, but torch's {kind.__name__}, chosen at start,"
                " always corrects",
                hint="turn it off before initialize(), which then takes a kernel",
            )


def torch_can(kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> bool:
    """Whether the class itself takes the same steps over flat shards."""
    return kind not in COLLECTIVE and all(group.get("bias_correction", True) for group in groups)


def state_names(kind: type[torch.optim.Optimizer], group: Group) -> tuple[str, ...]:
    """Return the names of the states of a group's elements, as torch names them."""
    return states_of(RULES[kind](group, 1))


def states_of(rule: Rule) -> tuple[str, ...]:
    """Return the names of the states that a step reads and writes."""
    return () if isinstance(rule, Sgd) and not rule.momentum else rule.STATES


def counts_steps(kind: type[torch.optim.Optimizer], group: Group) -> bool:
    """Whether torch keeps a `step` beside the states of a group's elements."""
    return not isinstance(RULES[kind](group, 1), Lion | Sgd)
