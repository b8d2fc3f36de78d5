"""What tests of activation checkpointing share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher import checkpointing
from launcher.activation import settings


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have no configuration, and nothing kept, of another test."""
    monkeypatch.setattr(settings, "_sources", settings._Sources())
    checkpointing.reset()
    yield
    checkpointing.reset()
