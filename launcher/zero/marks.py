"""What is noted on parameters: which part or copy of a whole a rank has, and which belong to experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from launcher.sharding.layout import TensorSplit

_SPLIT = "_launch_tensor_split"
_COPY = "_launch_copy"


def full_numel(param: nn.Parameter) -> int:
    """Return the elements of a parameter, also of one that is sharded."""
    return int(getattr(param, "ds_numel", param.numel()))


def split_of(param: nn.Parameter) -> TensorSplit | None:
    """Return which part of a parameter this rank has; None for all of it."""
    found: TensorSplit | None = getattr(param, _SPLIT, None)
    return found


def mark_split(param: nn.Parameter, split: TensorSplit) -> None:
    """Note that a parameter is this rank's part of a larger one. Its shape must be `split.local_shape`."""
    setattr(param, _SPLIT, split)


def mark_copy(param: nn.Parameter) -> None:
    """Note that a parameter is a copy: a rank of an earlier pipeline stage has it too, counts and saves it."""
    setattr(param, _COPY, True)


def is_copy(param: nn.Parameter) -> bool:
    """Whether a rank of an earlier pipeline stage counts and saves this parameter, which both have and train."""
    return getattr(param, _COPY, False)


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
    """Whether a parameter belongs to an expert of a mixture whose experts may be spread over ranks."""
    return not getattr(param, "allreduce", True)
