"""Small file systems of their own, to be filled up."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from harness.needs import need


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Make `folder` a file system in memory of `size`, such as 16m. Where none can be mounted the test ends here."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "launch-test", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        need("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
