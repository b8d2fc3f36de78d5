"""Memory that tensors have freed is there for the next ones, unless the user has settings of malloc."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Four blocks of 12 MiB, written and freed, again and again, as gradients are: page faults of each further round.
ROUNDS = """
import ctypes, resource, sys
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
if not hasattr(libc, "mallopt"):
    sys.exit(77)
keeps = False
if sys.argv[1] == "keep":  # it imports torch, which takes seconds
    from launcher.comm.device import keep_freed_memory
    keeps = keep_freed_memory()
def allocate():
    blocks = [libc.malloc(12 << 20) for _ in range(4)]
    for block in blocks:
        libc.memset(block, 1, 12 << 20)
    for block in blocks:
        libc.free(block)
allocate(), allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    allocate()
print(keeps, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)
"""


def page_faults(*arguments: str, **settings: str) -> tuple[str, int]:
    """Return whether freed memory is kept, and the page faults of a round."""
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name} | settings
    environment.pop("GLIBC_TUNABLES", None)
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode == 77:
        pytest.skip("this C library is not glibc")
    assert done.returncode == 0, done.stderr
    keeps, faults = done.stdout.split()
    return keeps, int(faults)


def test_freed_memory_is_kept_for_the_next_tensors() -> None:
    _, without = page_faults("leave")
    keeps, kept = page_faults("keep")
    assert keeps == "True"
    assert kept < 100 < without  # a round has 12,288 pages


def test_settings_of_the_user_are_left_alone() -> None:
    assert page_faults("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
