"""`dump_state`: everything that shapes a run, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.config.check import section_of
from launcher.config.fields import Section, Support, shown, status_of
from launcher.config.schema import Config
from launcher.zero.stages import ZeroPolicy
from launcher.zero.unit import FlatUnit

SECRETS = ("api_key",)


def state_text(settings: Config, policy: ZeroPolicy, units: list[FlatUnit]) -> str:
    """Return the config in force and the units, one line each.

    Of the config: keys that work, of sections that are on, with "auto" resolved and secrets hidden.
    """
    lines = ["config in force:"]
    lines += [f"  {path} = {shown(value)}" for path, value in _keys_in_force(settings, "")]
    lines.append(f"stage {policy.stage.number}, {policy.precision.param_dtype}, {len(units)} units:")
    for number, unit in enumerate(units):
        names = unit.layout.names
        lines.append(
            f"  unit {number}: {len(names)} parameters from {names[0]} to {names[-1]},"
            f" {unit.layout.padded_numel:,} elements, {len(unit.owned):,} here"
        )
    return "\n".join(lines)


def _keys_in_force(section: Section, prefix: str) -> Iterator[tuple[str, Any]]:
    kind = type(section)
    if kind.switch is not None and getattr(section, kind.switch[0]) == kind.switch[1]:
        return
    for name in kind.model_fields:
        value = getattr(section, name)
        if section_of(kind, name) is not None:
            if value is not None:
                yield from _keys_in_force(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            yield from ((f"{prefix}{name}.{part}", inner) for part, inner in value.items())
        elif status_of(kind, name).support is Support.WORKS:
            yield f"{prefix}{name}", "***" if name in SECRETS and value else value
