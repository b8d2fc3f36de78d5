"""Find the tensors in what modules take and return, compare tensors between ranks, and with their masters."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from launcher.kernels.triton_kernels import take_edits

# Objects within objects: a cache of keys and values holds layers, which hold tensors.
_MAX_OBJECT_DEPTH = 3


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, sets, mappings and the attributes of objects."""
    if isinstance(value, Tensor):
        yield value
    else:
        yield from _search(value, set(), 0)


def digest(values: Tensor) -> Tensor:
    """Return a number of all bits of a tensor, fp64 [] on its device: the same on ranks with the same values.

    A sum of integers: it does not depend on the order in which a device adds. Read at the speed of memory.
    """
    raw = values.detach().contiguous().view(-1).view(torch.uint8)
    num_whole = raw.numel() // 8 * 8
    whole, rest = raw[:num_whole], raw[num_whole:]
    total = (whole if whole.storage_offset() % 8 == 0 else whole.clone()).view(torch.int64).sum() + rest.sum()
    return ((total ^ (total >> 12)) & (2**52 - 1)).double()  # fp64 holds 53 bits


def take_over_edits(master: Tensor, values: Tensor, *, asks: bool) -> bool:
    """Write to a master the values that differ from it rounded to their type; return whether it may have changed.

    1-D, of one length, on one device. asks: whether there are any, for which the host waits.
    """
    if take_edits(master, values):
        return True
    is_edited = values != master.to(values.dtype)
    if asks and not is_edited.any():
        return False
    master.copy_(torch.where(is_edited, values.to(master.dtype), master))
    return True


def _search(value: Any, seen: set[int], object_depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if value is None or isinstance(value, str | bytes | int | float | nn.Module | type) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):  # also the dict-like outputs of Hugging Face models
        items: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | Set | deque):
        items = value
    elif object_depth < _MAX_OBJECT_DEPTH:
        items, object_depth = _attributes(value), object_depth + 1
    else:
        return
    for item in items:
        yield from _search(item, seen, object_depth)


def _attributes(value: Any) -> list[Any]:
    """Return the values of a dataclass's fields, or of an object's attributes."""
    if dataclasses.is_dataclass(value):  # also one with slots
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    attributes = getattr(value, "__dict__", None)
    found = list(attributes.values()) if isinstance(attributes, dict) else []
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        found += [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    return found
