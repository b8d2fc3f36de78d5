"""How many threads update in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def using_part_of_threads(fraction: float) -> Iterator[None]:
    """Let this thread's kernels use a part of the threads that the rank has; all: change nothing."""
    given = torch.get_num_threads()
    if fraction >= 1.0:
        yield
        return
    torch.set_num_threads(max(1, int(given * fraction)))
    try:
        yield
    finally:
        torch.set_num_threads(given)
