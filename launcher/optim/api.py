"""What an optimizer updates, what this rank owns of each parameter, and the one protocol to do it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.kernels.api import GradScale

# ---- Optimizer states that travel: pieces of parameters by name, cut anywhere ----


class LiveState:
    """Marks what a client's optimizer shows as `state` while an engine takes its steps: no steps of its own."""


def options_of(group: Mapping[str, Any], *, copies: bool = False) -> dict[str, Any]:
    """Return the hyper-parameters of a group; what is left out stays as the wrapped optimizer has it.

    copies: of their values too, some of which may be tensors.
    """
    options = {key: value for key, value in group.items() if key not in ("params", "fused", "foreach")}
    return copy.deepcopy(options) if copies else options


def check_state(state: Mapping[str, Any], name: str, num_groups: int) -> None:
    """Raises: EngineError for the state of another optimizer, or of other groups."""
    found, expected = (state["name"], len(state["groups"])), (name, num_groups)
    if found != expected:
        shown = ["{} with {} groups".format(*facts) for facts in (found, expected)]
        raise EngineError(f"the optimizer state is of {shown[0]}, this run has {shown[1]}")


def saved_piece(owned: range, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of elements `owned` of a parameter as a piece: by element 1-D, whatever its shape was."""
    flat = {name: value.view(-1) if _is_by_element(value, len(owned)) else value for name, value in state.items()}
    return {"start": owned.start, "stop": owned.stop, "state": flat}


def state_of(name: str, owned: range, states: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the state of elements `owned` of a parameter, put together from pieces of it.

    What all elements share is taken from the first piece. states: parameter name -> pieces, which may overlap.
    Raises: EngineError where they leave out an element.
    """
    found: list[dict[str, Any]] = []
    reached = owned.start
    for piece in sorted(states.get(name, ()), key=lambda piece: int(piece["start"])):
        if piece["start"] <= reached < min(piece["stop"], owned.stop):
            stop = min(piece["stop"], owned.stop)
            found.append(_cut(piece, slice(reached - piece["start"], stop - piece["start"])))
            reached = stop
    if reached < owned.stop:
        raise EngineError(
            f"the optimizer state has nothing of elements {reached} to {owned.stop} of {name}",
            hint="load the state that this rank saved with as many ranks at the same stage, or the pieces of all ranks",
        )
    if len(found) == 1:
        return found[0]
    return {
        key: torch.cat([each[key] for each in found]) if isinstance(value, Tensor) and value.dim() > 0 else value
        for key, value in found[0].items()
    }


def _cut(piece: Mapping[str, Any], part: slice) -> dict[str, Any]:
    numel = piece["stop"] - piece["start"]
    return {name: value[part] if _is_by_element(value, numel) else value for name, value in piece["state"].items()}


def _is_by_element(value: Any, numel: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == numel


# ---- What an optimizer updates ----


@dataclass(eq=False)
class ParamShard:
    """What this rank owns of one parameter, all of it or nothing included, and the optimizer's state of that.

    All tensors are 1-D and of one length: views of the unit's memory, in which its shards follow one another.
    """

    name: str  # the parameter's fully qualified name
    shape: torch.Size  # of the whole parameter
    owned: range  # elements of the flattened parameter
    master: Tensor  # updated in place; fp32 unless masters are kept in 16 bits
    grad: Tensor  # fp32 unless sums are kept in 16 bits; what is in it after the step is undefined
    group: int  # optimizer group
    unit: int = 0  # index of the unit it is part of
    start: int = 0  # of its first element, within the owned range of that unit
    param: Tensor | None = None  # the 16-bit copy of an fp32 master that the forward reads
    offset: int = 0  # of the parameter in the unit's flat buffer
    chunks: tuple[range, ...] = ()  # what each rank owns of that buffer, by rank; empty: this process is alone
    # As torch has it: name -> tensor of the shard's elements, or one value such as `step`. Empty before the first step.
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return self.shape.numel()

    @property
    def place(self) -> slice:
        """Where the shard is in the owned range of its unit."""
        return slice(self.start, self.start + len(self.owned))

    @property
    def is_split(self) -> bool:
        """Whether each rank owns elements of its own."""
        return len(self.chunks) > 1 and self.chunks[0] != self.chunks[1]

    @cached_property
    def parts(self) -> tuple[range, ...]:
        """The elements of the parameter each rank owns, by rank."""
        bounds = ((chunk.start - self.offset, chunk.stop - self.offset) for chunk in self.chunks)
        return tuple(range(*(min(max(at, 0), self.numel) for at in both)) for both in bounds)


def by_unit(shards: Sequence[ParamShard]) -> dict[int, list[ParamShard]]:
    """Return the shards of each unit."""
    found: dict[int, list[ParamShard]] = {}
    for shard in shards:
        found.setdefault(shard.unit, []).append(shard)
    return found


class FlatOptimizer(ABC):
    """Updates shards in place. States are those of this rank's shards only, in `ParamShard.state`."""

    # A step writes `ParamShard.param` too; else whoever reads it copies the master.
    writes_params: ClassVar[bool] = False
    # Steps are queued on the device before the host knows their scale. Set once, alike on every rank, where the engine
    # is built: what this rank owns must not decide which collectives of a step it takes part in.
    steps_behind_host = False
    # Parameters have the same values on every rank before each step.
    keeps_ranks_alike: ClassVar[bool] = True

    def __init__(self, name: str, shards: Sequence[ParamShard], param_groups: list[dict[str, Any]]) -> None:
        """name: of the class whose steps are taken. param_groups: live, what is written there holds from then on."""
        self.name = name
        self.shards = shards
        self.param_groups = param_groups
        self._of_unit = by_unit(shards)

    @property
    @abstractmethod
    def label(self) -> str:
        """Name and kernel for the start line, such as `AdamW[torch fused]`."""

    @abstractmethod
    def step(self, grad_scale: float = 1.0, unused: Collection[str] = ()) -> None:
        """Update every shard from its gradient times `grad_scale`, all units in as few calls of a kernel as can be.

        unused: names of parameters that had no gradient on any rank. They keep their values and states, weight decay
        and step counters included, as torch has it.
        """

    def state_numel(self) -> int:
        """Return how many elements of optimizer state this rank holds (step counters left out)."""
        states = (value for shard in self.shards for value in shard.state.values())
        return sum(value.numel() for value in states if isinstance(value, Tensor) and value.dim() > 0)

    def state_dict(self) -> dict[str, Any]:
        """Return `name`, `groups` (hyper-parameters) and `states`: what `states_of_unit` returns, of all units.

        Tensors are live, not copies.
        """
        groups = [options_of(group) for group in self.param_groups]
        states = {name: pieces for unit in self._of_unit for name, pieces in self.states_of_unit(unit).items()}
        return {"name": self.name, "groups": groups, "states": states}

    def saved_groups(self) -> list[dict[str, Any]]:
        """Return copies of the groups' hyper-parameters."""
        return [options_of(group, copies=True) for group in self.param_groups]

    def load_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take hyper-parameters over, of as many groups. Raises: EngineError for some that no step can take."""
        for mine, given in zip(self.param_groups, groups, strict=True):
            mine.update(options_of(given, copies=True))

    def rank_state(self) -> dict[str, Any]:
        """Return what a rank has beside the states of its shards; of use to the same rank of as many only."""
        return {}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `rank_state()` returned; empty where another number of ranks saved it."""
        del state  # here there is nothing

    def states_of_unit(self, unit: int) -> dict[str, list[dict[str, Any]]]:
        """Return parameter name -> pieces of its state: here one, with `start` and `stop` within the parameter.

        Tensors are live, not copies. The pieces of several ranks, in one list, are a state too.
        """
        owned = (shard for shard in self._of_unit.get(unit, ()) if shard.owned)
        return {shard.name: [saved_piece(shard.owned, self._saved(shard))] for shard in owned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict()`, also of other ranges where its pieces cover this rank's.

        Tensors are copied. Raises: as `accept`.
        """
        found = self.accept(state)
        for unit in self._of_unit:
            self.load_unit(unit, found)

    def accept(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Take over all but the states of shards; return these by name, for `load_unit` of every unit.

        Raises: EngineError for the state of another optimizer, of other groups, or without the elements of a shard.
        """
        check_state(state, self.name, len(self.param_groups))
        found = {shard.name: state_of(shard.name, shard.owned, state["states"]) for shard in self.shards if shard.owned}
        self.load_groups(state["groups"])
        return found

    def room_of(self, shard: ParamShard, name: str) -> Tensor | None:
        """Return the memory that a state by element will have, 1-D; None where that is not known yet.

        What was written there may be given to `load_unit` of this shard, which then copies nothing.
        """
        state = shard.state.get(name)
        if not isinstance(state, Tensor) or state.numel() != len(shard.owned) or not state.untyped_storage().nbytes():
            return None
        return state.view(-1) if state.dim() > 0 and state.is_contiguous() else None

    def load_unit(self, unit: int, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the states of a unit's shards by copies of `states`, by name."""
        for shard in self._of_unit.get(unit, ()):
            if shard.owned:
                self.load_state(shard, states[shard.name])

    def _saved(self, shard: ParamShard) -> dict[str, Any]:
        """Return the live state of a shard as torch's optimizers would have it."""
        return shard.state

    @abstractmethod
    def load_state(self, shard: ParamShard, state: Mapping[str, Any]) -> None:
        """Replace the state of a shard by a copy of `state`, of the same elements; empty: as before the first step."""


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Tell whether two contiguous tensors are one, in whatever shapes."""
    return one.data_ptr() == other.data_ptr() and one.nbytes == other.nbytes and one.dtype == other.dtype


@runtime_checkable
class DeviceScaled(Protocol):
    """An optimizer whose steps the host can begin before it knows what gradients are multiplied by."""

    writes_params: ClassVar[bool]  # as `FlatOptimizer` has it

    @property
    def takes_device_scale(self) -> bool:
        """Whether it can with what this rank owns; see `FlatOptimizer.steps_behind_host` for what is done."""
        ...

    def step(self, grad_scale: GradScale = 1.0, unused: Collection[str] = ()) -> None:
        """Do what `FlatOptimizer.step` does. With a `DeviceScale` the host waits for nothing."""
        ...

    def take_back(self) -> None:
        """Uncount the last step, which the device has skipped: values and states are those from before it."""
        ...


@dataclass(frozen=True)
class PreparedUpdate:
    """A step of one unit that is counted and not taken yet."""

    written: Sequence[Tensor]  # 1-D each: masters and states, all that `take` writes but for 16-bit copies
    take: Callable[[], None]  # in any thread
    uncount: Callable[[], None]  # once `written` has its values of before again


class UnitOptimizer(FlatOptimizer):
    """An optimizer that can also update one unit after another, and later or earlier than a step is decided."""

    @abstractmethod
    def step_unit(self, unit: int, grad: Tensor, grad_scale: float, unused: Collection[str] = ()) -> None:
        """Update the shards of one unit as `step` does. Every rank must call it, in the same order of units.

        grad: 1-D [owned], perhaps in 16 bits, what is read in place of the shards' own gradients.
        """

    @abstractmethod
    def prepare(self, grad_scale: float, unused: Collection[str], grads: Mapping[int, Tensor]) -> Callable[[], None]:
        """Count a step with the hyper-parameters of now; return what takes it, in any thread.

        grads: unit index -> what `step_unit` reads.
        """

    @abstractmethod
    def prepare_unit(self, unit: int, grad: Tensor, grad_scale: float) -> PreparedUpdate:
        """Count a step of one unit with the hyper-parameters of now, of which every parameter has a gradient.

        grad: as `step_unit` has it. Not for steps that are collective.
        """

    @abstractmethod
    def state_sizes(self, unit: int) -> list[tuple[str, int]]:
        """Return name and bytes of each tensor of states that a unit is going to have."""
