"""Adam and AdamW over flat shard views, by torch's fused implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def build_adam(
    views_by_group: Sequence[Sequence[torch.Tensor]],
    options_by_group: Sequence[Mapping[str, Any]],
    adam_w_mode: bool = True,
) -> torch.optim.Optimizer:
    """Build fused Adam(W) whose parameters are 1-D fp32 views of this rank's shards.

    A group may own nothing on this rank; it stays in `param_groups` so that schedules see all groups.
    """
    groups = [
        {"params": list(views), **options}
        for views, options in zip(views_by_group, options_by_group, strict=True)
    ]
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return kind(groups, fused=True)
