"""How what a rank writes leaves its device, through page-locked memory beside what the device computes.

A save that is waited for needs two pieces of memory: one is filled while the other is written to the file. An
asynchronous one copies everything before the training goes on, and the device alone waits: the next update, and what
else writes masters and states, joins the stream of these copies (`Side.TO_HOST`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.checkpoint.saving.contents import UnitContents
from launcher.checkpoint.values.tree import bytes_of
from launcher.comm.device import HostDeviceCopier
from launcher.comm.streams import PASSED, StreamEvent

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
