"""How the inputs of checkpointed functions are kept between the forward and the recomputation."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from launcher.activation.offloaded import CallInputs, HostRows, OffloadedInput, OffloadedInputs
from launcher.activation.settings import ActivationSettings
from launcher.base.errors import EngineAssertionError, EngineError
from launcher.comm.device import DeviceRuntime, HostDeviceCopier, local_device
from launcher.comm.groups import RankGroup


@dataclass(eq=False)
class _Kept:
    """An input as it is kept, with what makes a tensor of it again."""

    elements: Tensor  # 1-D: all of them, or the group's part of this rank
    shape: torch.Size
    stride: tuple[int, ...]
    away: OffloadedInput | None = None  # where the elements are in host memory


class SavedInputs:
    """Keeps floating-point inputs as the settings say; others, and parameters, stay as they are."""

    def __init__(self, settings: ActivationSettings) -> None:
        """Raises: EngineError for contiguous buffers of unknown number."""
        if settings.contiguous_checkpointing and settings.num_checkpoints is None:
            raise EngineAssertionError(
                "activation_checkpointing: contiguous_memory_optimization needs number_checkpoints",
                hint="give the checkpoints of one forward, in the config or by configure(num_checkpoints=...)",
            )
        group = settings.group
        shares = settings.partition_activations and group is not None and group.world_size > 1
        self._group: RankGroup | None = group if shares else None
        runtime = DeviceRuntime(local_device())
        self._offloaded = OffloadedInputs(runtime) if settings.checkpoint_in_cpu else None
        self._host_rows = HostRows(runtime.copier)
        num_rows, is_contiguous = settings.num_checkpoints or 0, settings.contiguous_checkpointing
        self._buffers = ContiguousBuffers(num_rows, runtime.copier) if is_contiguous else None

    @property
    def is_partitioned(self) -> bool:
        """Whether the ranks of a group keep a part of each input."""
        return self._group is not None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Return the context of one call of `torch.utils.checkpoint`: what it saves inside are the inputs."""
        if self._group is None and self._buffers is None and self._offloaded is None:
            yield
            return
        positions = itertools.count()
        call = None if self._offloaded is None else self._offloaded.begin_call()
        with saved_tensors_hooks(lambda tensor: self._pack(tensor, positions, call), self._unpack):
            yield

    def end(self) -> None:
        """Keep nothing more. What is kept stays valid."""
        if self._offloaded is not None:
            self._offloaded.end()

    def _pack(self, tensor: Tensor, positions: Iterator[int], call: CallInputs | None) -> Tensor | _Kept:
        if not tensor.is_floating_point() or isinstance(tensor, nn.Parameter) or not tensor.numel():
            return tensor
        with torch.no_grad():
            elements, stride = _in_memory_order(tensor)
            if self._group is not None:
                elements = _own_part(self._group, elements)
            if call is not None and self._offloaded is not None and self._offloaded.takes(tensor):
                own = elements if self._group is not None else _own_copy(elements)
                return self._sent(self._offloaded, call, own, (tensor.shape, stride), next(positions))
            if self._buffers is not None:
                key = _Key(next(positions), elements.numel(), elements.dtype, tensor.device)
                kept = _Kept(self._buffers.take(key).copy_(elements), tensor.shape, stride)
                self._buffers.give_back_after(kept, kept.elements, key)
                return kept
            if self._group is None:
                return tensor  # it is in host memory already
            return _Kept(elements, tensor.shape, stride)

    def _sent(
        self,
        offloaded: OffloadedInputs,
        call: CallInputs,
        elements: Tensor,
        layout: tuple[torch.Size, tuple[int, ...]],
        position: int,
    ) -> _Kept:
        if self._buffers is None:
            row = self._host_rows.take(elements.numel(), elements.dtype)
            away = offloaded.send(call, elements, row)
            self._host_rows.give_back_after(away, row)
        else:
            key = _Key(position, elements.numel(), elements.dtype, torch.device("cpu"), is_pinned=True)
            row = self._buffers.take(key)
            away = offloaded.send(call, elements, row)
            self._buffers.give_back_after(away, row, key)
        return _Kept(row, *layout, away)

    def _unpack(self, kept: Tensor | _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            elements = kept.elements
            if kept.away is not None and self._offloaded is not None:
                elements = self._offloaded.bring(kept.away)
            if self._group is not None:
                elements = _whole(self._group, elements)
            elif kept.away is None:
                elements = elements.clone()  # a function may change its input, or keep it longer than we keep the row
            return elements.as_strided(kept.shape, kept.stride)


def _own_copy(elements: Tensor) -> Tensor:
    """Return a copy on the device: the function may write to its input before that has been read."""
    return elements.clone()


def _in_memory_order(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the elements, 1-D, and the strides that make a tensor of equal layout of them.

    A recomputation with inputs of another layout may use other kernels, and round differently.
    """
    stride = torch.empty_like(tensor, device="meta").stride()
    if stride != tensor.stride():  # it has gaps, or overlaps itself
        tensor = torch.empty_like(tensor).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,)), stride


def _own_part(group: RankGroup, elements: Tensor) -> Tensor:
    """Return a copy of this rank's equal part of 1-D `elements`; the last parts may end in zeros."""
    numel = -(-elements.numel() // group.world_size)
    part = elements[group.rank * numel : (group.rank + 1) * numel]
    own = elements.new_zeros(numel)
    own[: part.numel()] = part
    return own


def _whole(group: RankGroup, own: Tensor) -> Tensor:
    """Return all ranks' parts, 1-D. Every rank of the group must call it, in the same order."""
    flat = own.new_empty(own.numel() * group.world_size)
    flat[group.rank * own.numel() : (group.rank + 1) * own.numel()] = own
    group.communicator.all_gather(flat).wait()
    return flat


# ---- contiguous buffers ----


@dataclass(frozen=True)
class _Key:
    """What a buffer is for: the inputs at one position of all calls, if they are alike."""

    position: int
    numel: int
    dtype: torch.dtype
    device: torch.device
    is_pinned: bool = False


class ContiguousBuffers:
    """One piece of memory for each kind of input, with a row for each checkpoint: none of it fragments the rest."""

    def __init__(self, num_rows: int, copier: HostDeviceCopier) -> None:
        """copier: has the memory of rows that are pinned."""
        self._num_rows = num_rows
        self._copier = copier
        self._free: dict[_Key, list[Tensor]] = {}

    def take(self, key: _Key) -> Tensor:
        """Return a free row, 1-D. Raises: EngineError when there is none."""
        if key not in self._free:
            numel = self._num_rows * key.numel
            if key.is_pinned:
                buffer = self._copier.empty(numel, key.dtype, is_pinned=True)
            else:
                buffer = torch.empty(numel, dtype=key.dtype, device=key.device)
            self._free[key] = list(buffer.view(self._num_rows, key.numel))
        if not self._free[key]:
            raise EngineError(
                f"activation_checkpointing: number_checkpoints is {self._num_rows}, and one more input of"
                f" {key.numel:,} elements is to be kept",
                hint="set number_checkpoints to the checkpoints of all forwards before a backward",
            )
        return self._free[key].pop()

    def give_back_after(self, owner: object, row: Tensor, key: _Key) -> None:
        """Free a row once its owner has gone, which autograd drops."""
        weakref.finalize(owner, self._free[key].append, row).atexit = False
