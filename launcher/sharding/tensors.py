"""What is known of a parameter without its tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class TensorSplit:
    """Which part of a parameter the ranks of a tensor- or expert-parallel group hold: the same share of every block.

    A plain parameter is one block, and so are experts that are stacked along dimension 0. A fused one has several along
    `dim`, such as query, key and value of one projection: a rank holds its share of each, one after another.
    """

    shape: tuple[int, ...]  # of the full parameter
    dim: int  # not negative
    index: int  # of this rank in its group
    count: int  # ranks of the group
    blocks: tuple[int, ...]  # sizes along `dim`; each is a multiple of `count`, their sum is shape[dim]

    @property
    def local_numel(self) -> int:
        """Elements that one rank holds."""
        return math.prod(self.local_shape)

    @property
    def is_known(self) -> bool:
        """Whether the numbers fit together: they may come from a file."""
        sizes = (*self.shape, self.dim, self.index, self.count, *self.blocks)
        if not all(type(size) is int and size >= 0 for size in sizes) or not 0 <= self.dim < len(self.shape):
            return False
        is_divided = self.count > 0 and all(block % self.count == 0 for block in self.blocks)
        return is_divided and sum(self.blocks) == self.shape[self.dim] and self.index < self.count

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what one rank holds."""
        return (*self.shape[: self.dim], self.shape[self.dim] // self.count, *self.shape[self.dim + 1 :])

    @property
    def is_in_order(self) -> bool:
        """Whether the parts one after another are the whole, element by element: rows of a matrix, or experts."""
        return self.dim == 0 and len(self.blocks) == 1

    def pieces(self, index: int | None = None) -> list[tuple[int, int]]:
        """Return what a rank holds as (start, stop) along `dim` of the full parameter; None: this rank."""
        found, start = [], 0
        index = self.index if index is None else index
        for block in self.blocks:
            share = block // self.count
            found.append((start + index * share, start + (index + 1) * share))
            start += block
        return found


@dataclass(frozen=True)
class ParamInfo:
    """One parameter of a model; tied ones have one name, the first."""

    name: str  # fully qualified; empty for one that is not part of a model yet
    shape: tuple[int, ...]  # of the full parameter, whatever of it a rank holds; with `split` of this rank's part
    dtype: str  # of the values the forward reads, as torch prints it without "torch.": "bfloat16"
    is_trainable: bool = True
    group: int = 0  # optimizer parameter group, where it is trainable
    split: TensorSplit | None = None  # over tensor- or expert-parallel ranks; None: each of them has all of it

    @cached_property
    def numel(self) -> int:
        """Elements of the parameter; 1 for a scalar."""
        return math.prod(self.shape)
