"""Which optimizers may update flat shards, and the kernel each of them gets.

A shard is a run of elements without shape. An optimizer whose update of an element depends on that element alone
(elementwise: Adam, SGD, ...) does not notice; one that looks at whole matrices or norms of parameters would compute
something else without saying so.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from launcher.optim.api import LiveState
from launcher.optim.classes import Lamb, Lion
from launcher.optim.muon.muon import MUON_KINDS

# Elementwise, each held by a parity test (tests/optim/test_parity.py). Config name -> class.
ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "SGD": torch.optim.SGD,
    "Lion": Lion,
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
}

# Every type a config may name -> class.
BY_NAME: dict[str, type[torch.optim.Optimizer]] = {**ELEMENTWISE, "Lamb": Lamb}

# Class name, in lower case -> why its update of an element depends on others.
WHOLE_PARAMETERS = {
    "adafactor": "keeps row and column sums of whole matrices",
    "muon": "orthogonalises whole matrices",
    "muonwithauxadam": "orthogonalises whole matrices",
    "shampoo": "preconditions whole matrices",
    "soap": "preconditions whole matrices",
    "lamb": "scales each step by norms of whole parameters",
    "fusedlamb": "scales each step by norms of whole parameters",
    "lars": "scales each step by norms of whole parameters",
}
# Class name -> why no stage can run it, and what to do.
NEVER = {
    "LBFGS": ("evaluates the loss again inside its step, which backward over ranks cannot", "use AdamW"),
    "SparseAdam": ("needs sparse gradients; the engine sums dense ones", "use Adam"),
}

# Kinds of device torch has a fused kernel for.
FUSED: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("cpu", "cuda"),
    torch.optim.AdamW: ("cpu", "cuda"),
    torch.optim.SGD: ("cpu", "cuda"),
    torch.optim.Adagrad: ("cpu",),
}


def kind_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class whose steps it takes: its own, or the one that its own class states as `steps_of`.

    A subclass of a class that states one may do anything, and counts as itself.
    """
    if "steps_of" not in type(optimizer).__dict__:
        return type(optimizer)
    stated: type[torch.optim.Optimizer] = optimizer.steps_of  # type: ignore[attr-defined]
    return stated


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it takes exactly the steps of one of `BY_NAME`, or of Muon; a subclass may do anything."""
    return kind_of(optimizer) in (*BY_NAME.values(), *MUON_KINDS)


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it holds state of steps taken; Adagrad makes its state before the first one."""
    if isinstance(optimizer.state, LiveState):  # of an engine that has ended
        return False
    if kind_of(optimizer) is torch.optim.Adagrad:
        return any(float(state["step"]) > 0 for state in optimizer.state.values())
    return bool(optimizer.state)


def construct(
    kind: type[torch.optim.Optimizer], defaults: dict[str, Any], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Build an optimizer of a known class over `groups` of shards, fused by default where torch has a kernel."""
    for group in groups:
        wants_other = group.get("foreach") or group.get("differentiable") or group.get("capturable")
        if kind in FUSED and group.get("fused") is None and not wants_other:
            group["fused"] = all(param.device.type in FUSED[kind] for param in group["params"])
    accepted = Lamb.OPTIONS if kind is Lamb else inspect.signature(kind).parameters
    options = {key: value for key, value in defaults.items() if key in accepted}
    if kind in FUSED:
        options["fused"] = any(group.get("fused") for group in groups)
        if options["fused"]:
            options["foreach"] = None
    return kind(groups, **options)


def retarget(client: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return a twin of an optimizer of any class that updates `groups` of shards; the client stays as it is."""
    twin: torch.optim.Optimizer = object.__new__(type(client))
    twin.__dict__.update(client.__dict__)
    twin.__dict__.pop("step", None)  # a schedule's wrapper around the client's own step
    twin.param_groups = groups
    twin.state = defaultdict(dict)
    return twin


def kernel_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the implementation its step takes, for the start line."""
    groups = [group for group in optimizer.param_groups if group["params"]] or optimizer.param_groups
    if any(group.get("fused") for group in groups):
        return "torch fused"
    return "torch foreach" if isinstance(optimizer, Lion) else "torch"


def ready_fused_sgd(optimizer: torch.optim.Optimizer) -> None:
    """Give fused SGD the momentum buffers it cannot make itself for elements that join in after the first step.

    A buffer of zeros becomes the gradient in the first step, as torch's own first buffer does, unless dampening
    scales it: then the kernel that is not fused serves.
    """
    for group in optimizer.param_groups:
        if not group.get("fused") or not group["momentum"]:
            continue
        params: list[Tensor] = [param for param in group["params"] if param.grad is not None]
        missing = [param for param in params if optimizer.state[param].get("momentum_buffer") is None]
        if missing and group["dampening"]:
            group["fused"] = False
            continue
        for param in missing:
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
