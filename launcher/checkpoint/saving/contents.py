"""What a rank writes of a model: of everything it holds the part that no other rank writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from launcher.comm.mesh import ParallelMesh
from launcher.optim.api import FlatOptimizer
from launcher.sharding.layout import UnitLayout, layout_unit
from launcher.zero.parameters import param_info, unit_params_of
from launcher.zero.unit import FlatUnit

Memory = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Item:
    """One tensor of a rank's file: elements of a parameter, or of a state of it."""

    key: str
    held: Tensor  # what this rank has, live; it may have no memory at the moment
    part: slice | None  # of `held`, 1-D, that is written; None: all of it, in its shape
    elements: range  # of the flattened parameter

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.held.shape) if self.part is None else (self.part.stop - self.part.start,)

    @property
    def values(self) -> Tensor:
        """What is written, live. It must be in memory."""
        return self.held if self.part is None else self.held[self.part]


@dataclass
class UnitContents:
    """What this rank writes of one unit."""

    layout: UnitLayout  # its world size: how many ranks write a part
    items: list[Item] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)  # of parameters whose first element is written
    in_memory: Memory = contextlib.nullcontext  # within it the tensors have values


def writer_index(mesh: ParallelMesh) -> int:
    """Return which of the parts of a unit this rank writes."""
    copy = 0 if mesh.replicate is None else mesh.replicate.rank
    return mesh.shard.rank * mesh.num_copies + copy


def contents_of(
    model: nn.Module,
    units: Sequence[FlatUnit],
    optimizer: FlatOptimizer | None,
    mesh: ParallelMesh,
    *,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> list[UnitContents]:
    """Return what this rank writes of each unit, and of the parameters that are in none. Tensors are live.

    is_wanted: for parameters by name; others are left out.
    """
    writer = writer_index(mesh)
    found = [_of_unit(unit, optimizer, mesh.data.world_size, writer) for unit in units]
    found += _others(model, mesh.data.world_size, writer)
    for contents in found:
        contents.items = [item for item in contents.items if is_wanted(_name_of(item.key))]
    return found


def _name_of(key: str) -> str:
    kind, _, rest = key.partition("/")
    return rest if kind == "weight" else rest.partition("/")[2]


def _of_unit(unit: FlatUnit, optimizer: FlatOptimizer | None, num_writers: int, writer: int) -> UnitContents:
    layout = UnitLayout(unit.layout.slots, num_writers, unit.layout.padded_numel)
    contents = UnitContents(layout, in_memory=unit.readable)
    is_trained = unit.grads is not None and optimizer is not None
    values = unit.params.master
    states = optimizer.states_of_unit(unit.index) if is_trained and optimizer is not None else {}
    for slot, shared in layout.slots_in(layout.chunk_range(writer)):
        elements = range(shared.start - slot.offset, shared.stop - slot.offset)
        place = slice(shared.start - unit.owned.start, shared.stop - unit.owned.start)
        contents.items.append(Item(f"weight/{slot.name}", values, place, elements))
        for piece in states.get(slot.name, ()):
            _add_states(contents, slot.name, piece, elements)
    return contents


def _add_states(contents: UnitContents, name: str, piece: dict[str, Any], elements: range) -> None:
    """Add the states of one parameter. piece: of the elements this rank holds, of which it writes `elements`."""
    held = range(piece["start"], piece["stop"])
    for state, value in piece["state"].items():
        if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == len(held):
            part = slice(elements.start - held.start, elements.stop - held.start)
            contents.items.append(Item(f"state/{state}/{name}", value, part, elements))
        elif isinstance(value, Tensor) and value.dim() > 0:
            if elements.start == held.start:
                contents.items.append(Item(f"whole/{state}/{name}", value, None, held))
        elif elements.start == 0:
            scalars = contents.scalars.setdefault(name, {})
            scalars[state] = value.detach().clone() if isinstance(value, Tensor) else value


def _others(model: nn.Module, num_writers: int, writer: int) -> Iterator[UnitContents]:
    """Yield the parameters that are in no unit, as one: frozen ones, which every rank has."""
    params = {name: param for name, param in model.named_parameters() if unit_params_of(param) is None}
    if not params:
        return
    layout = layout_unit([param_info(name, param, param.dtype) for name, param in params.items()], num_writers)
    contents = UnitContents(layout)
    for slot, shared in layout.slots_in(layout.chunk_range(writer)):
        elements = range(shared.start - slot.offset, shared.stop - slot.offset)
        flat = params[slot.name].detach().reshape(-1)
        contents.items.append(Item(f"weight/{slot.name}", flat, slice(elements.start, elements.stop), elements))
    yield contents
