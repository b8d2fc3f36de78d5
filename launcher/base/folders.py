"""The two folders a process takes for granted, and may not have."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.base.errors import UsageError


def working_folder() -> str:
    """Return the working directory. Raises: UsageError when it has been removed."""
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory cannot be used: {error.strerror}", hint="change to one that exists"
        ) from None


def home_folder() -> Path | None:
    """Return the user's home folder, None for a user without one, as containers have them."""
    try:
        return Path.home()
    except RuntimeError:
        return None
