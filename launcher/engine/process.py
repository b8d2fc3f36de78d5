"""What `initialize()` changes in its process: no import of torch's compiler, and freed memory is kept.

The compiler takes 1.5 to 2 s of CPU of each rank, where nothing is compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

import torch

_MARK = "__dynamo_disable"


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Keep the construction of optimizers from importing torch._dynamo.

    `Optimizer.add_param_group` imports it only to be left out of compiled code, unless its function has the mark of
    that already (torch/_compile.py). The mark is taken away again: what is compiled later is as in torch. Where
    another torch knows no such mark, the import takes place.
    """
    function = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if function is None or hasattr(function, _MARK) or "torch._dynamo" in sys.modules:
        yield
        return
    setattr(function, _MARK, function)
    try:
        yield
    finally:
        delattr(function, _MARK)


# ---- The allocator of the C library ----
# A backward pass allocates a gradient for each parameter and frees it as soon as it has been collected. By default
# glibc returns what is free at the end of its heap to the kernel, from 128 KiB on, and a tensor of more than that is
# a mapping of its own; both bounds grow, up to 64 and 32 MiB, as tensors are freed. The next gradient is then built
# of new pages, each a page fault, and zeroed by the kernel first: `perf stat -e page-faults` shows them.


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 128 * 2**20  # of freed memory at the end of the heap
LARGEST_IN_HEAP_BYTES = 32 * 2**20  # the most that glibc would reach by itself
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have glibc keep up to 128 MiB of freed memory for the next tensors of this process. Returns whether it does.

    It does not where the environment has settings of malloc, which are the user's choice, nor where the C library is
    another one. Memory that is in use does not grow.
    """
    if any(name in os.environ for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    # One of the two ends the growing of both.
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_IN_HEAP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
