"""Real control groups with a memory limit, where this machine lets us make them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

_KINDS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))


@contextlib.contextmanager
def memory_groups(count: int, limit_bytes: int) -> Iterator[list[Path]]:
    """Make groups of either version, each with a limit; yields an empty list where that is not possible."""
    made: list[Path] = []
    try:
        for root, limit in _KINDS:
            with contextlib.suppress(OSError):
                for _ in range(count):
                    group = Path(root) / f"launch-test-{uuid.uuid4().hex[:8]}"
                    group.mkdir()
                    made.append(group)
                    (group / limit).write_text(str(limit_bytes))
                yield made
                return
            _remove(made)
        yield []
    finally:
        _remove(made)


def _remove(groups: list[Path]) -> None:
    while groups:
        with contextlib.suppress(OSError):
            groups.pop().rmdir()
