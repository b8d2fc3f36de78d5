"""JSON and YAML text to plain data, with the line and column of every key and value.

JSON may hold `//`, `/* */` and `#` comments and trailing commas, as many config files in use do. All errors of
a text that can be read on are collected; the first one that cannot ends the reading. HJSON, which DeepSpeed reads,
leaves out more: braces, quotes and commas. The package hjson reads it, and says no places.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from launcher.base.errors import ConfigError

Path = tuple[str | int, ...]
Position = tuple[int, int]  # line and column, from 1

MAX_DEPTH = 64
_SKIP = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_WORD = re.compile(r"[A-Za-z_][\w.+-]*|[^\s,\]}]")
_HJSON = "HJSON, which needs no quotes, is read where the package hjson is installed: pip install hjson"
_CONSTANTS = {"true": True, "false": False, "null": None}
_YAML_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclass
class Located:
    """Plain data and where everything in it stood."""

    value: Any
    keys: dict[Path, Position] = field(default_factory=dict)
    values: dict[Path, Position] = field(default_factory=dict)
    duplicates: list[tuple[Path, Position, Position]] = field(default_factory=list)  # path, second, first


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

    def _value(self, path: Path, depth: int) -> Any:
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

    def _object(self, path: Path, depth: int) -> dict[str, Any]:
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

    def _array(self, path: Path, depth: int) -> list[Any]:
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


def _yaml_value(loader: Any, node: Any, path: Path, result: Located, source: str) -> Any:
    import yaml

    position = (node.start_mark.line + 1, node.start_mark.column + 1)
    result.values[path] = position
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"nested deeper than {MAX_DEPTH} levels", where=f"{source}:{position[0]}:{position[1]}")
    if isinstance(node, yaml.SequenceNode):
        return [_yaml_value(loader, n, (*path, i), result, source) for i, n in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        value = loader.construct_object(node)
        # YAML 1.1 takes 1e-3 for a string; nobody means that.
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


# ---- What a check of a config has to say ----


@dataclass(frozen=True)
class Finding:
    """One thing to say about the key at `path`."""

    path: Path
    message: str
    hint: str | None = None
    at_key: bool = False  # it is about the key itself, not its value
    is_refusal: bool = False  # the config is sound, this release does not do what it asks for
    is_asserted: bool = False  # DeepSpeed asserts it: keys that do not fit together, batch sizes

    @property
    def dotted(self) -> str:
        return ".".join(str(part) for part in self.path)
