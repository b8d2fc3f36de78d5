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
from launcher.sharding.layout import ParamSlot, UnitLayout, layout_unit
from launcher.zero.marks import is_copy, is_moe_param
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
    is_exposed: bool = False  # memory of a parameter, which a script may write to at any time

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    @property
    def shape(self) -> torch.Size:
        return self.held.shape if self.part is None else torch.Size((self.part.stop - self.part.start,))

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
    """Return the place of this rank among those that write: by part of the model, and then by chunk of the units."""
    copy = 0 if mesh.replicate is None else mesh.replicate.rank
    return mesh.model_part * mesh.data.world_size + mesh.shard.rank * mesh.num_copies + copy


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
    found = [_of_unit(unit, optimizer, mesh) for unit in units]
    found += _others(model, mesh)
    is_first = mesh.tensor is None or mesh.tensor.rank == 0
    copies = {name for name, param in model.named_parameters() if is_copy(param)}
    for contents in found:
        in_parts = {slot.name for slot in contents.layout.slots if slot.param.split is not None}
        own = {name for name in contents.layout.names if is_first or name in in_parts} - copies
        names = {name for name in own if is_wanted(name)}
        contents.items = [item for item in contents.items if _name_of(item.key) in names]
        contents.scalars = {name: values for name, values in contents.scalars.items() if name in names}
    return found


def _name_of(key: str) -> str:
    kind, _, rest = key.partition("/")
    return rest if kind == "weight" else rest.partition("/")[2]


def _stored_layout(layout: UnitLayout, mesh: ParallelMesh, *, is_expert: bool) -> UnitLayout:
    """Return the layout of a unit in the files: every rank with this part of the model writes a chunk."""
    num_writers, first = mesh.data.world_size, mesh.model_part * mesh.data.world_size
    if not is_expert or mesh.expert is None or mesh.of_experts is None:
        return UnitLayout(layout.slots, num_writers, layout.padded_numel, first)
    num_sets, num_replicas = mesh.expert.world_size, mesh.of_experts.data.world_size
    return UnitLayout(layout.slots, num_replicas, layout.padded_numel, first + mesh.expert.rank, num_sets)


def _of_unit(unit: FlatUnit, optimizer: FlatOptimizer | None, mesh: ParallelMesh) -> UnitContents:
    layout = _stored_layout(unit.layout, mesh, is_expert=unit.members.is_expert)
    contents = UnitContents(layout, in_memory=unit.readable)
    is_trained = unit.grads is not None and optimizer is not None
    values = unit.params.master
    is_exposed = values is unit.params.shard and not unit.params.placement.is_offloaded
    states = optimizer.states_of_unit(unit.index) if is_trained and optimizer is not None else {}
    for slot, shared in _written(layout, mesh):
        elements = _elements(slot, shared)
        place = slice(shared.start - unit.owned.start, shared.stop - unit.owned.start)
        contents.items.append(Item(f"weight/{slot.name}", values, place, elements, is_exposed))
        for piece in states.get(slot.name, ()):
            _add_states(contents, slot, piece, elements)
    return contents


def _written(layout: UnitLayout, mesh: ParallelMesh) -> list[tuple[ParamSlot, range]]:
    return layout.slots_in(layout.chunk_range(layout.chunk_of(writer_index(mesh))))


def _elements(slot: ParamSlot, shared: range) -> range:
    """Return elements of a unit as elements of a parameter, in the order in which they are stored."""
    before = slot.first_element - slot.offset
    return range(shared.start + before, shared.stop + before)


def _add_states(contents: UnitContents, slot: ParamSlot, piece: dict[str, Any], elements: range) -> None:
    """Add the states of one parameter. piece: of the elements this rank holds, of which it writes `elements`."""
    name, held = slot.name, range(piece["start"] + slot.first_element, piece["stop"] + slot.first_element)
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


def _others(model: nn.Module, mesh: ParallelMesh) -> Iterator[UnitContents]:
    """Yield the parameters that are in no unit, as one, and those of experts: frozen ones, which no rank shards."""
    others = {name: param for name, param in model.named_parameters() if unit_params_of(param) is None}
    for is_expert in (False, True):
        params = {name: param for name, param in others.items() if is_moe_param(param) == is_expert}
        if not params:
            continue
        infos = [param_info(name, param, param.dtype) for name, param in params.items()]
        num_ranks = ((mesh.of_experts or mesh) if is_expert else mesh).data.world_size
        layout = _stored_layout(layout_unit(infos, num_ranks), mesh, is_expert=is_expert)
        contents = UnitContents(layout)
        for slot, shared in _written(layout, mesh):
            flat, part = (
                params[slot.name].detach().reshape(-1),
                slice(shared.start - slot.offset, shared.stop - slot.offset),
            )
            contents.items.append(Item(f"weight/{slot.name}", flat, part, _elements(slot, shared), is_exposed=True))
        yield contents
