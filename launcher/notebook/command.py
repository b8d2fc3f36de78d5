"""`python -m launcher.notebook.command KERNEL_PID ARGS...`: `launch ARGS...` that ends with the kernel it serves.

A kernel that is restarted is killed. Its `launch` leads a session of its own, so that an interrupt reaches it once
and not twice, and would go on with nobody to read its output.
"""

from __future__ import annotations

import sys

from launcher.base.processes import die_with_parent
from launcher.cli.main import main

if __name__ == "__main__":
    die_with_parent(int(sys.argv.pop(1)))
    main()
