"""What a test needs of its machine."""

from __future__ import annotations

import importlib.util
import os

import pytest


def need(missing: str | None) -> None:
    """Skip the test when something is missing; in CI fail it, for there a skip would pass for a test that ran."""
    if missing is None:
        return
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


def need_module(name: str) -> None:
    """Skip the test where a package of the `dev` extra is not installed; in CI fail it."""
    need(None if importlib.util.find_spec(name) else f"{name} is not installed (pip install -e '.[dev]')")
