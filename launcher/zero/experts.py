"""Which parameters belong to experts that ranks have different ones of."""

from __future__ import annotations

from torch import nn


def mark_expert(param: nn.Parameter, ep_size: int) -> None:
    """Note that a parameter belongs to an expert, of a set that `ep_size` ranks have together.

    By DeepSpeed's attributes, which scripts and other libraries read: `allreduce` and `group_name`.
    """
    param.allreduce = False  # type: ignore[attr-defined]
    param.group_name = f"ep_size_{ep_size}"  # type: ignore[attr-defined]


def is_moe_param(param: nn.Parameter) -> bool:
    """Whether a parameter belongs to an expert of a mixture whose experts may be spread over ranks."""
    return not getattr(param, "allreduce", True)
