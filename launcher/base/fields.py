"""Dataclasses whose fields have the names of options: an option needs no line that copies it from one to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


def filled(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Return a dataclass with those of `values` that are fields of it; of the others its defaults hold."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names if name in values})
