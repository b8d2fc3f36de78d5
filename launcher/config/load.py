"""Read a config from wherever it is, and say everything that is wrong with it at once.

JSON may hold `//`, `/* */` and `#` comments and trailing commas, as many config files in use do. All errors of
a text that can be read on are collected; the first one that cannot ends the reading. HJSON, which DeepSpeed reads,
leaves out more: braces, quotes and commas. The package hjson reads it, and says no places.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.base import env
from launcher.base.errors import ConfigAssertionError, ConfigError, Diagnostic
from launcher.config.check import check
from launcher.config.fields import Finding, KeyPath
from launcher.config.schema import Config

Source = str | os.PathLike[str] | Mapping[str, Any]
Position = tuple[int, int]  # line and column, from 1

MAX_DEPTH = 64
_SKIP = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_WORD = re.compile(r"[A-Za-z_][\w.+-]*|[^\s,\]}]")
_HJSON = "HJSON, which needs no quotes, is read where the package hjson is installed: pip install hjson"
_CONSTANTS = {"true": True, "false": False, "null": None}
_YAML_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class LoadedConfig:
    """A valid config, and what its user should know about it."""

    config: Config
    notices: tuple[Diagnostic, ...]  # keys without effect, and values that were read as others
    raw: dict[str, Any]  # the data as it was given


def load_config(
    source: Source,
    *,
    world_size: int | None = None,
    for_planning: bool = False,
    model_stages: int | None = None,
    sequence_parallel_size: int | None = None,
    is_of_engine: bool = False,
) -> LoadedConfig:
    """Load and check a config: a path (JSON or YAML), a dict, JSON text, or base64 of JSON text.

    is_of_engine: LAUNCH_CONFIG_PATCH changes it, as it does every config that an engine is built with.
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
    if is_of_engine and (patch := patch_of_environment()):
        raw, name = patched(raw, patch), f"{name} with {env.CONFIG_PATCH.name}"
    given = raw if sequence_parallel_size is None else _with_sequence_size(raw, sequence_parallel_size)
    checked = check(given, world_size, for_planning=for_planning, model_stages=model_stages)
    errors = duplicates + [_locate(finding, located, name) for finding in checked.errors]
    if errors or checked.config is None:
        kind = ConfigAssertionError if any(finding.is_asserted for finding in checked.errors) else ConfigError
        raise kind.from_diagnostics(sorted(errors, key=_in_file_order))
    notices = tuple(_locate(finding, located, name) for finding in checked.notices)
    return LoadedConfig(checked.config, notices, raw)


def patched(config: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the values of a patch, sections merged key by key; null removes a key (RFC 7396)."""
    merged = dict(config)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            section = config.get(key)
            changed = patched(section if isinstance(section, Mapping) else {}, value)
            if changed or key in config:  # what only removes adds no section
                merged[key] = changed
        else:
            merged[key] = value
    return merged


def patch_of_environment() -> dict[str, Any]:
    """Return what LAUNCH_CONFIG_PATCH changes in the config of every engine of this process. Raises: ConfigError."""
    text = os.environ.get(env.CONFIG_PATCH.name) or "{}"
    patch = read_json(text, env.CONFIG_PATCH.name).value
    if not isinstance(patch, dict):
        raise ConfigError("a patch is an object with keys", where=env.CONFIG_PATCH.name, hint='{"bf16": ...}, or unset')
    return patch


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


# ---- Text to plain data, with the line and column of every key and value ----


@dataclass
class Located:
    """Plain data and where everything in it stood."""

    value: Any
    keys: dict[KeyPath, Position] = field(default_factory=dict)
    values: dict[KeyPath, Position] = field(default_factory=dict)
    duplicates: list[tuple[KeyPath, Position, Position]] = field(default_factory=list)  # path, second, first


class _NotJsonError(ConfigError):
    """A text that is no JSON; it may be HJSON."""


class _JsonReader:
    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._at = 0
        self.result = Located(None)

    def read(self) -> Located:
        self.result.value = self._value((), 0)
        self._skip()
        if self._at < len(self._text):
            raise self._error("text after the end of the config")
        return self.result

    def _position(self, offset: int) -> Position:
        start = self._text.rfind("\n", 0, offset) + 1
        return self._text.count("\n", 0, offset) + 1, offset - start + 1

    def _error(self, message: str, hint: str | None = None, kind: type[ConfigError] = _NotJsonError) -> ConfigError:
        line, column = self._position(self._at)
        return kind(message, where=f"{self._source}:{line}:{column}", hint=hint)

    def _skip(self) -> str:
        match = _SKIP.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return self._text[self._at : self._at + 1]

    def _value(self, path: KeyPath, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self._error(f"nested deeper than {MAX_DEPTH} levels", kind=ConfigError)
        first = self._skip()
        self.result.values[path] = self._position(self._at)
        if first == "{":
            return self._object(path, depth)
        if first == "[":
            return self._array(path, depth)
        if first == '"':
            return self._string()
        number = _NUMBER.match(self._text, self._at)
        if number is not None:
            return self._number(number)
        word = _WORD.match(self._text, self._at)
        if word is not None and word.group() in _CONSTANTS:
            self._at = word.end()
            return _CONSTANTS[word.group()]
        if word is None:
            raise self._error("the text ends where a value is expected")
        hint = "strings need double quotes; true, false and null are small letters"
        raise self._error(f"unexpected {word.group()[:40]}", hint)

    def _number(self, match: re.Match[str]) -> int | float:
        self._at = match.end()
        text = match.group()
        if match.group(1) is None and match.group(2) is None:
            if len(text) > 400:  # int() of huge texts is slow, and refused by newer Pythons
                raise self._error("a number of more than 400 digits", kind=ConfigError)
            return int(text)
        return float(text)

    def _string(self) -> str:
        match = _STRING.match(self._text, self._at)
        if match is None:
            raise self._error("a string that does not end on its line")
        try:
            value: str = json.loads(match.group())
        except ValueError:
            raise self._error("a string with an invalid escape", r"write \\ for a backslash") from None
        self._at = match.end()
        return value

    def _object(self, path: KeyPath, depth: int) -> dict[str, Any]:
        self._at += 1
        found: dict[str, Any] = {}
        while self._skip() != "}":
            position = self._position(self._at)
            if self._text[self._at : self._at + 1] != '"':
                raise self._error("expected a key in double quotes or }", _HJSON)
            name = self._string()
            inner = (*path, name)
            if name in found:
                self.result.duplicates.append((inner, position, self.result.keys[inner]))
            else:
                self.result.keys[inner] = position
            if self._skip() != ":":
                raise self._error(f'expected : after key "{name}"')
            self._at += 1
            found[name] = self._value(inner, depth + 1)
            self._separator("}")
        self._at += 1
        return found

    def _array(self, path: KeyPath, depth: int) -> list[Any]:
        self._at += 1
        found: list[Any] = []
        while self._skip() != "]":
            found.append(self._value((*path, len(found)), depth + 1))
            self._separator("]")
        self._at += 1
        return found

    def _separator(self, end: str) -> None:
        following = self._skip()
        if following == ",":
            self._at += 1
        elif following != end:
            raise self._error(f"expected , or {end}", "a comma may be missing on the line before")


def read_json(text: str, source: str) -> Located:
    """Parse JSON text, or HJSON where it is none. Raises: ConfigError with the place of what cannot be read."""
    try:
        return _JsonReader(text, source).read()
    except _NotJsonError as error:
        found = _read_hjson(text, source)
        if found is None:
            raise error from None
        return found


def _read_hjson(text: str, source: str) -> Located | None:
    """Parse HJSON text; None for what is none, or where the package hjson is missing. Raises: ConfigError."""
    try:
        hjson: Any = importlib.import_module("hjson")
    except ImportError:
        return None

    def of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f'duplicate key "{twice}"', where=source, hint="remove one of them")
        return dict(pairs)

    try:
        value = hjson.loads(text, object_pairs_hook=of_pairs)
    except (hjson.HjsonDecodeError, RecursionError):
        return None
    return Located(value) if isinstance(value, dict) else None


def read_yaml(text: str, source: str) -> Located:
    """Parse YAML text. Raises: ConfigError with the place of what cannot be read."""
    import yaml  # 30 ms that JSON users need not pay

    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            result = Located(None)
            if node is not None:
                result.value = _yaml_value(loader, node, (), result, source)
            return result
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise ConfigError(f"invalid YAML: {error.problem}", where=where) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"invalid YAML: {error}", where=source) from None


def _yaml_value(loader: Any, node: Any, path: KeyPath, result: Located, source: str) -> Any:
    import yaml

    position = (node.start_mark.line + 1, node.start_mark.column + 1)
    result.values[path] = position
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"nested deeper than {MAX_DEPTH} levels", where=f"{source}:{position[0]}:{position[1]}")
    if isinstance(node, yaml.SequenceNode):
        return [_yaml_value(loader, n, (*path, i), result, source) for i, n in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        value = loader.construct_object(node)
        # YAML 1.1 takes 1e-3 for a string; in a config it is a number.
        if isinstance(value, str) and not node.style and _YAML_FLOAT.fullmatch(value):
            return float(value)
        return value
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        name = str(loader.construct_object(key_node))
        inner = (*path, name)
        key_position = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
        if name in found:
            result.duplicates.append((inner, key_position, result.keys[inner]))
        else:
            result.keys[inner] = key_position
        found[name] = _yaml_value(loader, value_node, inner, result, source)
    return found
