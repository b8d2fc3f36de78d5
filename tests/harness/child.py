"""Python code in a process of its own, for what changes the process: imports and the import system."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from harness.launch.command import DEADLINE_S, ROOT


def run_python(
    folder: Path, code: str, *, env: dict[str, str] | None = None, path: tuple[Path, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `code` in `folder`, which is first on its module search path, then `path`. No rank's variables but `env`."""
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    search = os.pathsep.join(map(str, (*path, ROOT)))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        env={**own, "PYTHONPATH": search, **(env or {})},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
