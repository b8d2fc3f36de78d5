"""What is known of a parameter without its tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ParamInfo:
    """One parameter of a model; tied ones have one name, the first."""

    name: str  # fully qualified; empty for one that is not part of a model yet
    shape: tuple[int, ...]  # of the full parameter, whatever of it a rank holds
    dtype: str  # of the values the forward reads, as torch prints it without "torch.": "bfloat16"
    is_trainable: bool = True
    group: int = 0  # optimizer parameter group, where it is trainable

    @cached_property
    def numel(self) -> int:
        """Elements of the full parameter; 1 for a scalar."""
        return math.prod(self.shape)
