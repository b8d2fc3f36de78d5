"""Read a config from wherever it is, and say everything that is wrong with it at once."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base.errors import ConfigAssertionError, ConfigError, Diagnostic
from launcher.config.check import check
from launcher.config.positions import Finding, Located, read_json, read_yaml
from launcher.config.schema import Config

Source = str | os.PathLike[str] | Mapping[str, Any]
_YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class LoadedConfig:
    """A valid config, and what its user should know about it."""

    config: Config
    notices: tuple[Diagnostic, ...]  # keys without effect, and values that were read as others
    source_name: str
    raw: dict[str, Any]  # the data as it was given


def load_config(
    source: Source,
    *,
    world_size: int | None = None,
    for_planning: bool = False,
    model_stages: int | None = None,
    sequence_parallel_size: int | None = None,
) -> LoadedConfig:
    """Load and check a config: a path (JSON or YAML), a dict, JSON text, or base64 of JSON text.

    world_size: all ranks, where known; the mesh and the batch equation are checked with it.
    sequence_parallel_size: of groups that exist already; a config that has the key must have the same size.
    for_planning: what this release does not do is a notice instead of an error.
    model_stages: pipeline ranks that the model was built for; they are `pipeline.stages` where that is open.
    Raises: ConfigError with every finding, each with `file:line:column` or the key's path; where keys do not fit
    together a ConfigAssertionError.
    """
    name, located = _read(source)
    duplicates = [
        Diagnostic(
            f'duplicate key "{path[-1]}"',
            _place(name, second),
            f"the first one is on line {first[0]}; remove one of them",
        )
        for path, second, first in located.duplicates
    ]
    if not isinstance(located.value, Mapping):
        raise ConfigError("a config is an object with keys", where=_place(name, (1, 1)), hint='such as {"bf16": ...}')
    raw = dict(located.value)
    given = raw if sequence_parallel_size is None else _with_sequence_size(raw, sequence_parallel_size)
    checked = check(given, world_size, for_planning=for_planning, model_stages=model_stages)
    errors = duplicates + [_locate(finding, located, name) for finding in checked.errors]
    if errors or checked.config is None:
        kind = ConfigAssertionError if any(finding.is_asserted for finding in checked.errors) else ConfigError
        raise kind.from_diagnostics(sorted(errors, key=_in_file_order))
    notices = tuple(_locate(finding, located, name) for finding in checked.notices)
    return LoadedConfig(checked.config, notices, name, raw)


def _with_sequence_size(raw: dict[str, Any], size: int) -> dict[str, Any]:
    name = "sequence_parallel_size"
    if raw.get(name, size) != size:
        raise ConfigError(
            f"{name} {raw[name]} is not the {size} ranks of the groups that initialize(mpu=...) got",
            where=name,
            hint="give the same size to both, or leave the key out",
        )
    return {**raw, name: size}


def is_readable_here(text: str) -> bool:
    """Return whether `text` is the path of something on this machine, or a config itself: JSON text or its base64."""
    return text.lstrip("\ufeff \t\r\n").startswith("{") or _exists(text) or _from_base64(text) is not None


def _read(source: Source) -> tuple[str, Located]:
    if isinstance(source, Mapping):
        return "config", Located(dict(source))
    text = os.fspath(source)
    if isinstance(source, str) and text.lstrip("\ufeff \t\r\n").startswith("{"):
        return "config", read_json(text.lstrip("\ufeff"), "config")
    if isinstance(source, str) and not _exists(text):
        decoded = _from_base64(text)
        if decoded is not None:
            return "config", read_json(decoded, "config")
    return text, _read_file(Path(text))


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # a text too long or too odd for a file name
        return False


def _from_base64(text: str) -> str | None:
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _read_file(path: Path) -> Located:
    shown = str(path) if len(str(path)) <= 200 else str(path)[:200] + "..."
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError("the config is not UTF-8 text", where=shown) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a file name"
        raise ConfigError(f"the config cannot be read: {reason}", where=shown, hint="check the path") from None
    if not text.strip():
        raise ConfigError("the config is empty", where=shown, hint="an empty config is written {}")
    return read_yaml(text, shown) if path.suffix.lower() in _YAML_SUFFIXES else read_json(text, shown)


def _place(name: str, position: tuple[int, int]) -> str:
    return f"{name}:{position[0]}:{position[1]}"


def _locate(finding: Finding, located: Located, name: str) -> Diagnostic:
    """Give a finding its place: that of its key or value, or of the nearest section around it."""
    path = finding.path
    table = located.keys if finding.at_key else located.values
    while path and path not in table:
        path = path[:-1]
    position = table.get(path) or located.values.get(path)
    if position is None:  # from a dict there are no lines: the path is the place
        message = finding.message
        for prefix in (*finding.path[-1:], finding.dotted.rpartition(".")[0]):
            message = message.removeprefix(f"{prefix}: ")
        is_named = not finding.path or message.startswith(finding.dotted)
        return Diagnostic(message, name if is_named else f"{name}: {finding.dotted}", finding.hint)
    return Diagnostic(finding.message, _place(name, position), finding.hint)


def _in_file_order(diagnostic: Diagnostic) -> tuple[int, int]:
    parts = (diagnostic.where or "").rsplit(":", 2)
    try:
        return int(parts[-2]), int(parts[-1])
    except (ValueError, IndexError):
        return (0, 0)
