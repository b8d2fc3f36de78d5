"""What a rank writes of a model, the part of all it holds that no other rank writes, and how that leaves its device."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from launcher.checkpoint.values.tree import bytes_of
from launcher.comm.device import HostDeviceCopier
from launcher.comm.mesh import ParallelMesh
from launcher.comm.streams import PASSED, StreamEvent
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


# ---- How it leaves the device: through page-locked memory, beside what the device computes ----
# A save that is waited for needs two pieces of memory: one is filled while the other is written to the file. An
# asynchronous one queues all copies before the training continues, and only the device waits for them: the next update,
# and what else writes masters and states, joins their stream (`Side.TO_HOST`).

_PIECE_BYTES = 64 * 2**20  # whole blocks of a file
_NUM_PIECES = 2
_ALIGNMENT_BYTES = 64  # of each tensor in the memory of an asynchronous save


def live_tensors(contents: list[UnitContents], *, is_exposed: bool | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield key and values of what is written, unit by unit: what is on disk is in memory around its own turn only.

    is_exposed: of the items that are so, or are not; None: of all.
    """
    for unit in contents:
        items = [item for item in unit.items if is_exposed in (None, item.is_exposed)]
        if items:
            with unit.in_memory():
                for item in items:
                    yield item.key, item.values


def staged(tensors: Iterable[tuple[str, Tensor]], copier: HostDeviceCopier) -> Iterator[tuple[str, memoryview]]:
    """Yield the bytes of tensors in host memory, in their order, with their keys.

    What is there already is yielded as it is. Of a tensor of the device there are several pieces where it is large:
    each is valid until the next one is asked for, and that one is copied meanwhile.
    """
    rooms: list[Tensor] = []
    turns = itertools.cycle(range(_NUM_PIECES))
    under_way: tuple[str, Tensor, Tensor] | None = None  # key, target, and the source, which is kept until it was read
    for key, source in _pieces(tensors, copier):
        copier.synchronize()
        begun = None
        if _leaves(source, copier):
            turn = next(turns)
            if turn == len(rooms):
                rooms.append(copier.empty(_PIECE_BYTES, torch.uint8, is_pinned=True))
            begun = key, rooms[turn][: source.numel()], source
            copier.copy(begun[1], source)
        if under_way is not None:
            yield under_way[0], bytes_of(under_way[1])
        if begun is None:
            yield key, bytes_of(source)
        under_way = begun
    if under_way is not None:
        copier.synchronize()
        yield under_way[0], bytes_of(under_way[1])


def _leaves(tensor: Tensor, copier: HostDeviceCopier) -> bool:
    return copier.is_async and copier.is_on_device(tensor)


def _pieces(tensors: Iterable[tuple[str, Tensor]], copier: HostDeviceCopier) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the device as bytes, 1-D, cut to what a piece of memory holds; others whole."""
    for key, tensor in tensors:
        if _leaves(tensor, copier) and tensor.numel():
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            yield from ((key, piece) for piece in flat.split(_PIECE_BYTES))
        else:
            yield key, tensor


@dataclass(frozen=True)
class Copies:
    """What an asynchronous save writes, by key, in host memory, and when it is there."""

    tensors: dict[str, Tensor]
    arrival: StreamEvent


class CopyRoom:
    """One piece of host memory for the copies of everything that a rank writes; it is kept for the next save."""

    def __init__(self, copier: HostDeviceCopier) -> None:
        self._copier = copier
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, contents: list[UnitContents]) -> Copies:
        """Have everything copied, and return at once where the device is one that the host does not wait for.

        What the last call returned must be done with. On a device the current stream waits for what scripts can write
        to; what is left must be written by work that has joined `Side.TO_HOST`. `contents` must be kept until then.
        """
        items = [item for unit in contents for item in unit.items]
        sizes = [item.shape.numel() * item.dtype.itemsize for item in items]
        ends = list(itertools.accumulate(-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes))
        num_bytes = ends[-1] if ends else 0
        if self._memory.numel() != num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # first: both would not fit
            self._memory = self._copier.empty(num_bytes, torch.uint8, is_pinned=True)
        starts = (0, *ends)
        targets = {
            item.key: self._memory[start : start + size].view(item.dtype).view(item.shape)
            for item, start, size in zip(items, starts, sizes, strict=False)
        }
        arrival: StreamEvent = PASSED
        for is_exposed in (True, False):
            for key, tensor in live_tensors(contents, is_exposed=is_exposed):
                copied = self._copier.copy(targets[key], tensor)
                arrival = copied if self._copier.is_on_device(tensor) else arrival
            if is_exposed:
                arrival.wait()
        return Copies(targets, arrival)
