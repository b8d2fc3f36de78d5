"""One spelling of every setting: other names, older forms and older places of keys become the schema's own.

This is the only module that knows them. What is checked, resolved or translated after it reads the new keys alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.config.fields import AUTO, Section, aliases_of, is_flag, is_rounded, section_of, shown
from launcher.config.positions import Finding, Path
from launcher.config.schema import Config

# Old switch -> the section that has taken its place, with "device": "cpu".
_OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_OLD_PINNING = "cpu_offload_use_pin_memory"
_ZERO = "zero_optimization"


@dataclass
class Normalised:
    """Plain data under the schema's names, and where its keys stood before."""

    data: dict[str, Any]
    origins: dict[Path, Path] = field(default_factory=dict)  # path of a key that was renamed or moved -> as written
    errors: list[Finding] = field(default_factory=list)
    notices: list[Finding] = field(default_factory=list)

    def as_written(self, path: Path) -> Path:
        """Return the path under which the config's author wrote what is now at `path`."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]] + path[length:]
        return path


def normalise(data: Mapping[str, Any]) -> Normalised:
    """Return the data with one spelling of every key. Values of a wrong type stay as they are, for the schema."""
    found = Normalised({})
    found.data = _renamed(Config, _undotted(data, found), (), found)
    if found.data.get("steps_per_print") == math.inf:  # as accelerate says that it wants no lines
        found.data["steps_per_print"] = 0
    zero = found.data.get(_ZERO)
    if isinstance(zero, dict):
        _lift_aio(zero, found)
        for old, name in _OLD_OFFLOAD.items():
            _replace_offload_switch(zero, old, name, found)
        _replace_pinning(zero, found)
    return found


def _undotted(data: Mapping[str, Any], found: Normalised) -> dict[str, Any]:
    """Move keys such as "zero_optimization.reduce_bucket_size" into their section, where it does not have them.

    trl writes them so beside a section that has been filled in, whose own values count.
    """
    result = dict(data)
    for dotted, value in data.items():
        name, _, key = dotted.partition(".")
        section = section_of(Config, name) if key and name in Config.model_fields else None
        if section is None or key not in section.model_fields or not isinstance(data.get(name, {}), Mapping):
            continue
        del result[dotted]
        inner = result[name] = dict(result.get(name, {}))
        if key not in inner:
            found.origins[name, key] = (dotted,)
        elif inner[key] != value:
            message = f'"{dotted}" {shown(value)} has no effect: {name} has its own {key}, {shown(inner[key])}'
            found.notices.append(Finding((dotted,), message, None, True))
        inner.setdefault(key, value)
    return result


def _renamed(section: type[Section], data: Mapping[str, Any], path: Path, found: Normalised) -> dict[str, Any]:
    """Return a section's data under the schema's own names, at every depth. path: of the section, in those names."""
    aliases = aliases_of(section)
    result: dict[str, Any] = {}
    for name, value in data.items():
        target = name if name in section.model_fields else aliases.get(name, name)
        here, written = (*path, target), (*found.as_written(path), name)
        if target != name:
            if target in data or target in result:
                message = f'"{name}" and "{target}" are the same key'
                found.errors.append(Finding(written, message, "remove one", True, is_asserted=True))
                continue
            found.origins[here] = written
        inner = section_of(section, target) if target in section.model_fields else None
        if here == (_ZERO,) and isinstance(value, bool):
            value = {"stage": int(value)}  # the oldest form: true is stage 1
        if inner is not None and value is None:
            continue  # null for a section: as if it were not there
        if inner is not None and isinstance(value, Mapping):
            value = _renamed(inner, value, here, found)
        elif target in section.model_fields and is_rounded(section, target):
            value = _rounded(value, written, found)
        result[target] = value
    return result


def _rounded(value: Any, written: Path, found: Normalised) -> Any:
    """Return a number of elements that a formula gave, such as 0.9 × hidden size², as the nearest integer."""
    if not isinstance(value, float) or not 1 <= value < 2**63 or value.is_integer():
        return value
    message = f"{'.'.join(str(part) for part in written)} {value!r} is rounded to {round(value)}"
    found.notices.append(Finding(written, message))
    return round(value)


def _lift_aio(zero: dict[str, Any], found: Normalised) -> None:
    """Move an `aio` section inside `zero_optimization`, as in older guides, to the top level."""
    if "aio" not in zero:
        return
    written: Path = (*found.as_written((_ZERO,)), "aio")
    if "aio" in found.data:
        message = "aio is given twice, at the top level and inside zero_optimization"
        found.errors.append(Finding(written, message, "remove the one inside zero_optimization", True))
        zero.pop("aio")
        return
    value = zero.pop("aio")
    if value is None:
        return
    found.origins[("aio",)] = written
    if isinstance(value, Mapping):
        inner = section_of(Config, "aio")
        value = value if inner is None else _renamed(inner, value, ("aio",), found)
    found.data["aio"] = value
    message = "zero_optimization.aio is read as the section aio of the top level, where it belongs"
    found.notices.append(Finding(written, message, None, True))


def _replace_offload_switch(zero: dict[str, Any], old: str, name: str, found: Normalised) -> None:
    """Turn `"cpu_offload": true` into `"offload_optimizer": {"device": "cpu"}`, and its twin of parameters."""
    if zero.get(old) is not None and not is_flag(zero[old]):
        return
    is_on, written = zero.pop(old, None), found.as_written((_ZERO, old))
    if not is_on or not isinstance(zero.get(name, {}), dict):
        return
    if name not in zero:
        found.origins[(_ZERO, name)] = written
    section = zero.setdefault(name, {})
    device = section.get("device", AUTO)
    if device == AUTO:
        found.origins[(_ZERO, name, "device")] = written
        section["device"] = "cpu"
    elif isinstance(device, str) and device.lower() != "cpu":
        message = f"{written[-1]} true contradicts {name}.device {shown(device)}"
        found.errors.append(Finding(written, message, f'remove it: it is the old name of {name}.device "cpu"', True))


def _replace_pinning(zero: dict[str, Any], found: Normalised) -> None:
    """Turn `cpu_offload_use_pin_memory` into the `pin_memory` of what is offloaded."""
    if zero.get(_OLD_PINNING) is not None and not is_flag(zero[_OLD_PINNING]):
        return
    pins, written = zero.pop(_OLD_PINNING, None), found.as_written((_ZERO, _OLD_PINNING))
    if pins is None:
        return
    sections = {name: zero.get(name) for name in _OLD_OFFLOAD.values()}
    offloaded = {
        name: section
        for name, section in sections.items()
        if isinstance(section, dict) and str(section.get("device", "none")).lower() != "none"
    }
    if not offloaded:
        message = f"{'.'.join(str(part) for part in written)} {shown(pins)} has no effect: nothing is offloaded"
        found.notices.append(Finding(written, message, None, True))
    for name, section in offloaded.items():
        if "pin_memory" not in section:
            found.origins[(_ZERO, name, "pin_memory")] = written
        if section.setdefault("pin_memory", pins) != pins:
            message = f"{written[-1]} {shown(pins)} contradicts {name}.pin_memory {shown(section['pin_memory'])}"
            found.errors.append(Finding(written, message, "remove it: it is the old name of pin_memory", True))
