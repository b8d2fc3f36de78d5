"""The process behind `%launch`: `launch ARGS...` that ends with the kernel it serves.

It is started with the arguments KERNEL_PID ARGS...

A kernel that is restarted is killed. Its `launch` leads a session of its own, so that an interrupt reaches it once
and not twice, and would continue with nobody to read its output.
"""

from __future__ import annotations

import sys

from launcher.base.processes import die_with_parent


def main() -> None:
    """Serve the kernel whose pid is the first argument."""
    die_with_parent(int(sys.argv.pop(1)))
    from launcher.cli.main import main as launch

    launch()
