"""`deepspeed.checkpoint.utils`: tensors that `torch.save` writes without the buffers that they are views of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["clone_tensors_for_torch_save"]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return `item` with every tensor in it copied to `device`; lists, tuples and dicts of any depth are copied.

    A tensor that occurs several times is copied once, so that tied weights stay tied.
    """
    return _cloned(item, torch.device(device), {})


def _cloned(item: Any, device: torch.device, seen: dict[int, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        if id(item) not in seen:
            seen[id(item)] = item.detach().to(device, copy=True)
        return seen[id(item)]
    if isinstance(item, list | tuple):
        values = [_cloned(value, device, seen) for value in item]
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
    if isinstance(item, Mapping):
        return type(item)((key, _cloned(value, device, seen)) for key, value in item.items())  # type: ignore[call-arg]
    return item
