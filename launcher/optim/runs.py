"""Runs: elements of one shard that have taken the same steps. A run is cut where elements sit out a step."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.optim.api import Around, FlatShard, StateRun, Unused, by_unit


class Run(Protocol):
    """What `Runs` needs to know of a run: its elements within the shard."""

    start: int
    stop: int


R = TypeVar("R", bound=Run)


class Runs(Generic[R]):
    """The runs of one shard, in element order; together they cover it."""

    def __init__(self, whole: R, split: Callable[[R, int], tuple[R, R]]) -> None:
        """split: makes two runs of one, which replace it, cut at an element of the shard."""
        self._runs = [whole]
        self._split = split

    def __iter__(self) -> Iterator[R]:
        return iter(self._runs)

    def within(self, start: int, stop: int) -> list[R]:
        """Cut where elements `start` to `stop` begin and end, and return the runs they are."""
        first = self._cut(start)
        return self._runs[first : self._cut(stop)]

    def _cut(self, at: int) -> int:
        """Make sure that a run begins at element `at`, or all end there; return its index."""
        index = bisect.bisect_right(self._runs, at, key=lambda run: run.start) - 1
        if self._runs[index].start == at:
            return index
        if self._runs[index].stop != at:
            self._runs[index : index + 1] = self._split(self._runs[index], at)
        return index + 1


def resting_runs(shard: FlatShard, runs: Runs[R], unused: Unused | None) -> list[R]:
    """Cut a shard where unused elements begin and end, and return the runs that sit this step out."""
    found: list[R] = []
    for absolute in (unused or {}).get(shard.unit, ()):
        start = max(0, absolute.start - shard.start)
        stop = min(shard.master.numel(), absolute.stop - shard.start)
        if start < stop:
            found += runs.within(start, stop)
    return found


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a group; what is left out stays as the wrapped optimizer has it."""
    return {key: value for key, value in group.items() if key not in ("params", "fused", "foreach")}


def check_state(state: Mapping[str, Any], name: str, num_groups: int, num_shards: int) -> None:
    """Raises: EngineError for the state of another optimizer, or of other groups or shards."""
    found = (state["name"], len(state["groups"]), len(state["shards"]))
    expected = (name, num_groups, num_shards)
    if found != expected:
        shown = ["{} with {} groups over {} shards".format(*facts) for facts in (found, expected)]
        raise EngineError(f"the optimizer state is of {shown[0]}, this run has {shown[1]}")


def saved_runs(
    shards: Sequence[FlatShard], states: Callable[[int], list[StateRun]], around: Around | None
) -> list[list[dict[str, Any]]]:
    """Return the runs of every shard as dicts. around: entered for each unit while its states are copied."""
    saved: list[list[dict[str, Any]]] = [[] for _ in shards]
    for unit, numbers in by_unit(shards).items():
        with contextlib.nullcontext() if around is None else around(unit):
            for number in numbers:
                saved[number] = [
                    {
                        "start": run.start,
                        "stop": run.stop,
                        "state": run.state if around is None else _copied(run.state),
                    }
                    for run in states(number)
                ]
    return saved


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def coalesced(entries: Sequence[Mapping[str, Any]]) -> list[StateRun]:
    """Join neighbours of a saved state that have taken the same steps: a state cut finely does not stay so."""
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
