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

from launcher.activation.settings import ActivationSettings
from launcher.base.errors import EngineAssertionError, EngineError
from launcher.comm.groups import RankGroup


@dataclass(eq=False)
class _Kept:
    """An input as it is kept, with what makes a tensor of it again."""

    elements: Tensor  # 1-D: all of them, or the group's part of this rank
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device


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
        self._in_cpu = settings.checkpoint_in_cpu
        self._buffers = ContiguousBuffers(settings.num_checkpoints or 0) if settings.contiguous_checkpointing else None

    @property
    def is_partitioned(self) -> bool:
        """Whether the ranks of a group keep a part of each input."""
        return self._group is not None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Return the context of one call of `torch.utils.checkpoint`: what it saves inside are the inputs."""
        if self._group is None and self._buffers is None and not self._in_cpu:
            yield
            return
        positions = itertools.count()
        with saved_tensors_hooks(lambda tensor: self._pack(tensor, positions), self._unpack):
            yield

    def _pack(self, tensor: Tensor, positions: Iterator[int]) -> Tensor | _Kept:
        if not tensor.is_floating_point() or isinstance(tensor, nn.Parameter) or not tensor.numel():
            return tensor
        with torch.no_grad():
            elements, stride = _in_memory_order(tensor)
            if self._group is not None:
                elements = _own_part(self._group, elements)
            in_cpu = self._in_cpu and tensor.device.type != "cpu"
            device = torch.device("cpu") if in_cpu else tensor.device
            if self._buffers is not None:
                key = _Key(next(positions), elements.numel(), elements.dtype, device, is_pinned=in_cpu)
                row = self._buffers.take(key)
                kept = _Kept(row.copy_(elements, non_blocking=True), tensor.shape, stride, tensor.device)
                self._buffers.give_back_after(kept, key)
                return kept
            if in_cpu:
                elements = torch.empty_like(elements, device=device, pin_memory=True).copy_(elements, non_blocking=True)
            elif self._group is None:
                return tensor  # it is in host memory already
            return _Kept(elements, tensor.shape, stride, tensor.device)

    def _unpack(self, kept: Tensor | _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            elements = kept.elements.to(kept.device, non_blocking=True)
            if self._group is not None:
                elements = _whole(self._group, elements)
            elif elements is kept.elements:
                elements = elements.clone()  # a function may change its input, or keep it longer than we keep the row
            return elements.as_strided(kept.shape, kept.stride)


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
    is_pinned: bool


class ContiguousBuffers:
    """One piece of memory for each kind of input, with a row for each checkpoint: none of it fragments the rest."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._free: dict[_Key, list[Tensor]] = {}

    def take(self, key: _Key) -> Tensor:
        """Return a free row, 1-D. Raises: EngineError when there is none."""
        if key not in self._free:
            shape = (self._num_rows, key.numel)
            buffer = torch.empty(shape, dtype=key.dtype, device=key.device, pin_memory=key.is_pinned)
            self._free[key] = list(buffer)
        if not self._free[key]:
            raise EngineError(
                f"activation_checkpointing: number_checkpoints is {self._num_rows}, and one more input of"
                f" {key.numel:,} elements is to be kept",
                hint="set number_checkpoints to the checkpoints of all forwards before a backward",
            )
        return self._free[key].pop()

    def give_back_after(self, kept: _Kept, key: _Key) -> None:
        """Free the row of `kept` once autograd has dropped it."""
        weakref.finalize(kept, self._free[key].append, kept.elements).atexit = False
