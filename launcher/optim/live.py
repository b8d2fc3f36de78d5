"""The torch optimizer that an engine's optimizer stands on, for who looks at one: its class, groups and states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.optim.api import FlatOptimizer, LiveState, ParamShard
from launcher.optim.classes import Lamb, Lion
from launcher.optim.factory import OptimizerPlan

# The classes of DeepSpeed's own implementations: on the device, in host memory.
_STANDS_FOR: dict[type[torch.optim.Optimizer], tuple[str, str]] = {
    torch.optim.Adam: ("FusedAdam", "DeepSpeedCPUAdam"),
    torch.optim.AdamW: ("FusedAdam", "DeepSpeedCPUAdam"),
    torch.optim.Adagrad: ("", "DeepSpeedCPUAdagrad"),
    Lion: ("FusedLion", "DeepSpeedCPULion"),
    Lamb: ("FusedLamb", ""),
}


class LiveStates(LiveState, Mapping[nn.Parameter, dict[str, Any]]):
    """The states of parameters on this rank, as torch has them, read where the engine keeps them.

    Of a parameter of which this rank owns a part they are 1-D. Empty before the first step. Those that are on disk
    between steps are left out.
    """

    def __init__(
        self, shards: Mapping[nn.Parameter, ParamShard], flat: FlatOptimizer, wait_for_update: Callable[[], None]
    ) -> None:
        """shards: those whose states stay in memory. wait_for_update: called before they are read."""
        self._shards = shards
        self._flat = flat
        self._wait_for_update = wait_for_update

    def __getitem__(self, param: nn.Parameter) -> dict[str, Any]:
        self._wait_for_update()
        shard = self._shards[param]
        pieces = self._flat.states_of_unit(shard.unit).get(shard.name, [])
        state: dict[str, Any] = pieces[0]["state"] if pieces else {}
        is_whole = len(shard.owned) == shard.numel
        return {
            name: value.view(shard.shape) if is_whole and _is_by_element(value, shard) else value
            for name, value in state.items()
        }

    def __iter__(self) -> Iterator[nn.Parameter]:
        self._wait_for_update()
        return (param for param, shard in self._shards.items() if shard.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self.items()),))  # a copy belongs to no engine

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[nn.Parameter, dict[str, Any]]:
        return copy.deepcopy(dict(self.items()), memo)


def _is_by_element(value: Any, shard: ParamShard) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == shard.numel


class _OfEngine(torch.optim.Optimizer):
    """What the optimizer of a config is an instance of, besides the class of torch whose steps are taken."""

    stands_for = ""  # the class of DeepSpeed that would be here

    def step(self, closure: Any = None) -> NoReturn:
        """Refuse: the engine takes the steps. Raises: EngineError."""
        raise EngineError("engine.optimizer.optimizer.step() was called", hint="call engine.step()")


def base_optimizer(
    plan: OptimizerPlan, flat: FlatOptimizer, states: LiveStates, *, is_offloaded: bool
) -> torch.optim.Optimizer:
    """Return the optimizer that a client has brought, or an instance of the class that the config names.

    Its groups are the live ones, and its `state` is `states`.
    """
    base = plan.client
    if base is None:
        kind: Any = plan.kind or getattr(torch.optim, plan.name, torch.optim.Optimizer)
        names = _STANDS_FOR.get(kind, ("", ""))
        facts: dict[str, Any] = {"stands_for": names[is_offloaded]}
        if kind in (torch.optim.Adam, torch.optim.AdamW):
            facts["adam_w_mode"] = kind is torch.optim.AdamW
        made: Any = type(kind.__name__, (_OfEngine, kind), facts)
        made_base: torch.optim.Optimizer = object.__new__(made)
        torch.optim.Optimizer.__init__(made_base, plan.param_groups, dict(plan.defaults))
        base = made_base
        base.param_groups = flat.param_groups
    if "state" in vars(base):
        base.state = states  # type: ignore[assignment]  # torch's is a defaultdict, which is a mapping
    return base
