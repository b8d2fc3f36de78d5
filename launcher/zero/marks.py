"""What is noted on parameters, modules and tensors: the one way to do it, and what is noted of parameters.

Which part or copy of a whole a rank has, and which belong to experts.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from launcher.sharding.layout import TensorSplit

Value = TypeVar("Value")


class Mark(Generic[Value]):
    """A thing that may be noted on parameters, modules and other tensors, as an attribute of no other use.

    Of no module: the note is no part of what a model registers, counts and saves.
    """

    def __init__(self, name: str) -> None:
        self._name = f"_launch_{name}"

    def of(self, owner: Any) -> Value | None:
        """Return what is noted; None where nothing is. Of a wrapper that passes attributes on: what is noted inside."""
        value: Value | None = getattr(owner, self._name, None)
        return value

    def own_of(self, owner: Any) -> Value | None:
        """Return what is noted on this object itself, whatever it wraps; None where nothing is."""
        value: Value | None = vars(owner).get(self._name)
        return value

    def put(self, owner: Any, value: Value) -> None:
        """Note something, in place of what was noted before."""
        object.__setattr__(owner, self._name, value)

    def remove(self, owner: Any) -> None:
        """Note nothing any more."""
        vars(owner).pop(self._name, None)


_SPLIT: Mark[TensorSplit] = Mark("tensor_split")
_COPY: Mark[bool] = Mark("copy")


def split_of(param: nn.Parameter) -> TensorSplit | None:
    """Return which part of a parameter this rank has; None for all of it."""
    return _SPLIT.of(param)


def mark_split(param: nn.Parameter, split: TensorSplit) -> None:
    """Note that a parameter is this rank's part of a larger one. Its shape must be `split.local_shape`."""
    _SPLIT.put(param, split)


def mark_copy(param: nn.Parameter) -> None:
    """Note that a parameter is a copy: a rank of an earlier pipeline stage has it too, counts and saves it."""
    _COPY.put(param, True)


def is_copy(param: nn.Parameter) -> bool:
    """Whether a rank of an earlier pipeline stage counts and saves this parameter, which both have and train."""
    return _COPY.of(param) is True


def slice_of(full: Tensor, split: TensorSplit) -> Tensor:
    """Return a copy of the part of a whole parameter that a rank has, contiguous."""
    pieces = [full.narrow(split.dim, start, stop - start) for start, stop in split.pieces()]
    return (
        torch.cat(pieces, dim=split.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
    )


def joined(parts: Tensor, split: TensorSplit) -> Tensor:
    """Return a whole parameter from all its parts: [count * local numel], or [count, *local shape]."""
    shares = [block // split.count for block in split.blocks]
    by_part = [part.split(shares, split.dim) for part in parts.view(split.count, *split.local_shape).unbind()]
    return torch.cat([share for block in zip(*by_part, strict=True) for share in block], split.dim)


# ---- Experts ----


def mark_expert(param: nn.Parameter, ep_size: int) -> None:
    """Note that a parameter belongs to an expert, of a set that `ep_size` ranks have together.

    By DeepSpeed's attributes, which scripts and other libraries read: `allreduce` and `group_name`.
    """
    param.allreduce = False  # type: ignore[attr-defined]
    param.group_name = f"ep_size_{ep_size}"  # type: ignore[attr-defined]


def is_moe_param(param: nn.Parameter) -> bool:
    """Whether a parameter belongs to an expert of a mixture whose experts may be sharded over ranks."""
    return not getattr(param, "allreduce", True)
