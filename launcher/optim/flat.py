"""Any elementwise torch optimizer over flat shards."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.optim.api import Around, FlatShard, StateRun, Unused, all_at_once
from launcher.optim.catalog import kernel_of, ready_fused_sgd
from launcher.optim.rules import check_torch_steps
from launcher.optim.runs import Runs, check_state, coalesced, options_of, resting_runs, saved_runs


@dataclass(eq=False)
class _Run:
    """Elements of one shard that have taken the same steps, as one parameter of the wrapped optimizer."""

    start: int  # within the shard
    stop: int
    param: Tensor
    grad: Tensor


class TorchFlat:
    """One torch optimizer whose parameters are the flat shards themselves, or runs of them.

    A shard is one run until some of its elements sit out a step: then it is cut there for good, and so are its
    states (as views), because torch counts steps by parameter.
    """

    writes_params = False

    def __init__(
        self,
        name: str,
        shards: list[FlatShard],
        param_groups: list[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    ) -> None:
        """param_groups: the user's groups, read before every step; make: from groups of shards to an optimizer."""
        self._name = name
        self._shards = shards
        self._outer = param_groups
        wholes = [_run_of(shard, 0, shard.master.numel()) for shard in shards]
        self._runs = [Runs(whole, functools.partial(self._split, number)) for number, whole in enumerate(wholes)]
        groups = [{**group, "params": []} for group in param_groups]
        for shard, whole in zip(shards, wholes, strict=True):
            groups[shard.group]["params"].append(whole.param)
        self._inner = make(groups)

    @property
    def label(self) -> str:
        return f"{self._name}[{kernel_of(self._inner)}]"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._outer

    # ---- the step ----

    def step(self, unused: Unused | None = None, grad_scale: float = 1.0, around: Around | None = None) -> None:
        """Update every shard from its gradient times `grad_scale`, except the `unused` elements.

        Raises: EngineError for an option set since, that the class does not know.
        """
        with all_at_once(self._shards, around):
            self._step(unused, grad_scale)

    def _step(self, unused: Unused | None, grad_scale: float) -> None:
        if grad_scale != 1.0 and self._shards:
            torch._foreach_mul_([shard.grad for shard in self._shards], grad_scale)
        resting = [
            run
            for shard, runs in zip(self._shards, self._runs, strict=True)
            for run in resting_runs(shard, runs, unused)
        ]
        for run in resting:
            run.param.grad = None
        check_torch_steps(type(self._inner), self._outer)
        self._copy_options(self._outer, self._inner.param_groups)
        if type(self._inner) is torch.optim.SGD:
            ready_fused_sgd(self._inner)
        type(self._inner).step(self._inner)
        self._copy_options(self._inner.param_groups, self._outer)  # some classes keep counters in their groups
        for run in resting:
            run.param.grad = run.grad

    @staticmethod
    def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for given, taken in zip(source, target, strict=True):
            taken.update(options_of(given))

    def _split(self, number: int, old: _Run, at: int) -> tuple[_Run, _Run]:
        """Make two parameters of the wrapped optimizer out of one, with views of its states."""
        shard = self._shards[number]
        parts = _run_of(shard, old.start, at), _run_of(shard, at, old.stop)
        params = self._inner.param_groups[shard.group]["params"]
        place = next(i for i, param in enumerate(params) if param is old.param)
        params[place : place + 1] = [part.param for part in parts]
        state = self._inner.state.pop(old.param, None)
        if state:
            for part in parts:
                piece = slice(part.start - old.start, part.stop - old.start)
                self._inner.state[part.param] = _part_of(state, old.stop - old.start, piece)
        return parts

    # ---- states ----

    def state_numel(self) -> int:
        """Return how many elements of optimizer state this rank holds (step counters left out)."""
        states = (value for state in self._inner.state.values() for value in state.values())
        return sum(value.numel() for value in states if isinstance(value, Tensor) and value.dim() > 0)

    def sizes_of_states(self, shard: int) -> dict[str, int]:
        """Return nothing: what states torch's classes make is known after their first step."""
        return {}

    def states(self, shard: int) -> list[StateRun]:
        """Return the live states of one shard, in element order; runs that have not taken a step have none."""
        return [
            StateRun(run.start, run.stop, dict(self._inner.state[run.param]))
            for run in self._runs[shard]
            if self._inner.state.get(run.param)
        ]

    def state_dict(self, around: Around | None = None) -> dict[str, Any]:
        """Return `name`, `groups` (hyper-parameters) and `shards` (lists of `StateRun` as dicts)."""
        return {
            "name": self._name,
            "groups": [options_of(group) for group in self._outer],
            "shards": saved_runs(self._shards, self.states, around),
        }

    def load_state_dict(self, state: Mapping[str, Any], around: Around | None = None) -> None:
        """Continue from a state of `state_dict()`; its runs may be cut elsewhere. Tensors are copied.

        Raises: EngineError for the state of another optimizer, or of other groups or shards.
        """
        check_state(state, self._name, len(self._outer), len(self._shards))
        for mine, given in zip(self._outer, state["groups"], strict=True):
            mine.update(copy.deepcopy(given))  # a learning rate may be a tensor
        with all_at_once(self._shards, around):
            for number, entries in enumerate(state["shards"]):
                for run in self._runs[number]:
                    self._inner.state.pop(run.param, None)
                for entry in coalesced(entries):
                    self._load(number, entry)

    def _load(self, number: int, entry: StateRun) -> None:
        group = self._inner.param_groups[self._shards[number].group]
        for run in self._runs[number].within(entry.start, entry.stop):
            piece = slice(run.start - entry.start, run.stop - entry.start)
            part = _part_of(entry.state, entry.stop - entry.start, piece)
            placed = {name: _placed(value, run.param, bool(group.get("fused"))) for name, value in part.items()}
            self._inner.state[run.param] = placed


def _placed(value: Any, param: Tensor, fused: bool) -> Any:
    """Return a copy of a state's value where the optimizer expects it: counters beside a fused kernel, else on CPU."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.to(param.device if fused else "cpu").clone()
    return value.to(param.device).reshape(param.shape).clone()


def _run_of(shard: FlatShard, start: int, stop: int) -> _Run:
    is_whole = (start, stop) == (0, shard.master.numel())
    master = shard.master.detach() if is_whole else shard.master.detach()[start:stop]
    grad = shard.grad if is_whole else shard.grad[start:stop]
    master.requires_grad_(False)
    master.grad = grad
    return _Run(start, stop, master, grad)


def _part_of(state: Mapping[str, Any], numel: int, piece: slice) -> dict[str, Any]:
    """Return the state of a part of a run: views of its tensors, own copies of what all elements share."""
    part: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            is_by_element = value.dim() > 0 and value.numel() == numel
            is_all = piece == slice(0, numel)
            part[name] = (value if is_all else value[piece]) if is_by_element else value.clone()
        else:
            part[name] = value
    return part
