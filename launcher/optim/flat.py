"""Any elementwise torch optimizer over flat shards."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.optim.api import FlatShard, StateRun, Unused
from launcher.optim.catalog import kernel_of, ready_fused_sgd

# Keys of a group that are not hyper-parameters: they stay as the wrapped optimizer has them.
OWN_KEYS = ("params", "fused", "foreach")


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
        self._runs = [[_run_of(shard, 0, shard.master.numel())] for shard in shards]
        groups = [{**group, "params": []} for group in param_groups]
        for shard, runs in zip(shards, self._runs, strict=True):
            groups[shard.group]["params"].append(runs[0].param)
        self._inner = make(groups)

    @property
    def label(self) -> str:
        return f"{self._name}[{kernel_of(self._inner)}]"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._outer

    # ---- the step ----

    def step(self, unused: Unused | None = None, grad_scale: float = 1.0) -> None:
        """Update every shard from its gradient times `grad_scale`, except the `unused` elements."""
        if grad_scale != 1.0 and self._shards:
            torch._foreach_mul_([shard.grad for shard in self._shards], grad_scale)
        resting = self._runs_in(unused) if unused else []
        for run in resting:
            run.param.grad = None
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
            taken.update(_options(given))

    def _runs_in(self, unused: Unused) -> list[_Run]:
        """Cut shards where unused elements begin and end, and return the runs that lie within them."""
        found = []
        for number, shard in enumerate(self._shards):
            numel = shard.master.numel()
            for absolute in unused.get(shard.unit, ()):
                start, stop = max(0, absolute.start - shard.start), min(numel, absolute.stop - shard.start)
                if start < stop:
                    first, end = self._cut(number, start), self._cut(number, stop)
                    found += self._runs[number][first:end]
        return found

    def _cut(self, number: int, at: int) -> int:
        """Make sure that a run of shard `number` begins at element `at`, or all end there; return its index."""
        runs = self._runs[number]
        index = bisect.bisect_right(runs, at, key=lambda run: run.start) - 1
        if runs[index].start == at:
            return index
        if runs[index].stop == at:
            return index + 1
        self._cut_run(number, index, at)
        return index + 1

    def _cut_run(self, number: int, index: int, at: int) -> None:
        runs = self._runs[number]
        old = runs[index]
        parts = [_run_of(self._shards[number], old.start, at), _run_of(self._shards[number], at, old.stop)]
        params = self._inner.param_groups[self._shards[number].group]["params"]
        place = next(i for i, param in enumerate(params) if param is old.param)
        params[place : place + 1] = [part.param for part in parts]
        state = self._inner.state.pop(old.param, None)
        if state:
            for part in parts:
                piece = slice(part.start - old.start, part.stop - old.start)
                self._inner.state[part.param] = _part_of(state, old.stop - old.start, piece)
        runs[index : index + 1] = parts

    # ---- states ----

    def state_numel(self) -> int:
        """Return how many elements of optimizer state this rank holds (step counters left out)."""
        states = (value for state in self._inner.state.values() for value in state.values())
        return sum(value.numel() for value in states if isinstance(value, Tensor) and value.dim() > 0)

    def states(self, shard: int) -> list[StateRun]:
        """Return the live states of one shard, in element order; runs that have not taken a step have none."""
        return [
            StateRun(run.start, run.stop, dict(self._inner.state[run.param]))
            for run in self._runs[shard]
            if self._inner.state.get(run.param)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return `name`, `groups` (hyper-parameters) and `shards` (lists of `StateRun` as dicts)."""
        return {
            "name": self._name,
            "groups": [_options(group) for group in self._outer],
            "shards": [
                [{"start": run.start, "stop": run.stop, "state": run.state} for run in self.states(number)]
                for number in range(len(self._shards))
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict()`; its runs may be cut elsewhere. Tensors are copied.

        Raises: EngineError for the state of another optimizer, or of other groups or shards.
        """
        found = (state["name"], len(state["groups"]), len(state["shards"]))
        expected = (self._name, len(self._outer), len(self._shards))
        if found != expected:
            shown = ["{} with {} groups over {} shards".format(*facts) for facts in (found, expected)]
            raise EngineError(f"the optimizer state is of {shown[0]}, this run has {shown[1]}")
        for mine, given in zip(self._outer, state["groups"], strict=True):
            mine.update(given)
        for number, entries in enumerate(state["shards"]):
            for run in self._runs[number]:
                self._inner.state.pop(run.param, None)
            for entry in _coalesced(entries):
                self._load(number, entry)

    def _load(self, number: int, entry: StateRun) -> None:
        first, end = self._cut(number, entry.start), self._cut(number, entry.stop)
        group = self._inner.param_groups[self._shards[number].group]
        for run in self._runs[number][first:end]:
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


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in OWN_KEYS}


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


def _coalesced(entries: list[Mapping[str, Any]]) -> list[StateRun]:
    """Join neighbours that have taken the same steps, so that a state cut finely does not stay so."""
    alike: list[list[StateRun]] = []
    for entry in entries:
        run = StateRun(entry["start"], entry["stop"], dict(entry["state"]))
        last = alike[-1][-1] if alike else None
        if last is not None and last.stop == run.start and _shared(last) == _shared(run):
            alike[-1].append(run)
        else:
            alike.append([run])
    return [_joined(runs) for runs in alike]


def _joined(runs: list[StateRun]) -> StateRun:
    first = runs[0]
    if len(runs) == 1:
        return first
    tensors = {name: torch.cat([run.state[name] for run in runs]) for name in _by_element(first)}
    return StateRun(first.start, runs[-1].stop, {**first.state, **tensors})


def _by_element(run: StateRun) -> set[str]:
    return {name for name, value in run.state.items() if isinstance(value, Tensor) and value.dim() > 0}


def _shared(run: StateRun) -> dict[str, Any]:
    """Return what all elements of a run share, comparable; of tensors by element only the names."""
    by_element = _by_element(run)
    return {
        name: None if name in by_element else (value.item() if isinstance(value, Tensor) else value)
        for name, value in run.state.items()
    }
