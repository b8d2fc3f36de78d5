"""Layer 1: process groups and collectives on flat buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.comm.observe import log_summary

__all__ = ["log_summary"]


def __getattr__(name: str) -> object:
    """Import what is asked for: every rank with torch imports this package, to answer its agent."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from launcher.comm import observe

    return getattr(observe, name)
