"""What the .pth file of `launch deepspeed-command install` calls at each start of python: standard library only."""

from __future__ import annotations

import sys

from launcher import compat


def install() -> None:
    """Let `import deepspeed` find the built-in engine, and leave no other trace.

    A script may have a launcher.py of its own, which must not find this package in its place.
    """
    try:
        compat.install()
    except Exception as error:  # noqa: BLE001  # LAUNCH_ENGINE has no known word: python starts all the same
        sys.stderr.write(f"launch: {error}\n")
    for name in [name for name in sys.modules if name == "launcher" or name.startswith("launcher.")]:
        del sys.modules[name]
