"""The building blocks of the schema: sections, keys, their types and their status.

A key is one line: `name: Type = key(default, "meaning", status)`. `status` says what this release does with it:
WORKS (the default), AT_STAGE_3, WITH_NVME, `old_name_of(key)`, `inert(why)`, or `unsupported(use what instead)`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, PlainValidator, create_model
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import nullable_schema

KeyPath = tuple[str | int, ...]  # the names of sections and of a key, and places in lists


@dataclass(frozen=True)
class Finding:
    """One thing to say about the key at `path`."""

    path: KeyPath
    message: str
    hint: str | None = None
    at_key: bool = False  # it is about the key itself, not its value
    is_refusal: bool = False  # the config is sound, this release does not do what it asks for
    is_asserted: bool = False  # DeepSpeed asserts it: keys that do not fit together, batch sizes

    @property
    def dotted(self) -> str:
        return ".".join(str(part) for part in self.path)


class Auto(str):
    """The type of the value `"auto"`: decided at start by `config.auto`, which says what it became.

    Keys are annotated with the type they have after that.
    """

    __slots__ = ()


AUTO = Auto("auto")


class Support(Enum):
    """What this release does with a key."""

    WORKS = "works"
    AT_STAGE_3 = "works at stage 3"  # setting it at another stage is reported at start
    WITH_NVME = "works with offload to nvme"  # setting it without is reported at start
    RENAMED = "works under its new name"  # `config.check` turns it into that one
    INERT = "accepted without effect here"  # setting it is reported at start
    UNSUPPORTED = "not supported"  # setting it to anything but its default, or a section that is on, is an error


@dataclass(frozen=True)
class Status:
    """The support of a key, and why or what to use instead."""

    support: Support
    note: str = ""
    is_off: Callable[[Any], bool] | None = None  # of a value that asks for nothing, though it is not the default

    def __str__(self) -> str:
        return f"{self.support.value}: {self.note}" if self.note else self.support.value


WORKS = Status(Support.WORKS)
AT_STAGE_3 = Status(Support.AT_STAGE_3)
WITH_NVME = Status(Support.WITH_NVME)


def old_name_of(name: str) -> Status:
    """Turned into the key `name`, relative to the section, as the config is read."""
    return Status(Support.RENAMED, name)


def inert(why: str) -> Status:
    """Accepted without effect here, because `why`."""
    return Status(Support.INERT, why)


def unsupported(instead: str, *, is_off: Callable[[Any], bool] | None = None) -> Status:
    """Not supported; `instead` says what to do. is_off: whether a value asks for nothing."""
    return Status(Support.UNSUPPORTED, instead, is_off)


def key(default: Any, doc: str, status: Status | None = None, *, alias: tuple[str, ...] = ()) -> Any:
    """Declare a key. A section is its own default when `default` is its class. None: the section's status."""
    extra: Any = {"status": status, "aliases": alias}
    if isinstance(default, Unused):
        default = default.section
    if isinstance(default, type) and issubclass(default, Section):
        return Field(default_factory=default, description=doc, json_schema_extra=extra)
    if isinstance(default, list | dict):
        return Field(default_factory=default.copy, description=doc, json_schema_extra=extra)
    return Field(default=default, description=doc, json_schema_extra=extra)


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are never converted by guesswork."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), arbitrary_types_allowed=True, defer_build=True
    )

    status: ClassVar[Status] = WORKS  # of every key that does not state its own
    switch: ClassVar[tuple[str, Any] | None] = None  # key and value that turn the whole section off


@functools.cache
def status_of(section: type[Section], name: str) -> Status:
    """Return the status of one key of a section."""
    extra = section.model_fields[name].json_schema_extra
    own = extra.get("status") if isinstance(extra, dict) else None
    return own if isinstance(own, Status) else section.status


@functools.cache
def section_of(parent: type[Section], name: str) -> type[Section] | None:
    """Return the section class of a key, None when it holds a plain value."""
    field = parent.model_fields[name]
    unused = [each.section for each in field.metadata if isinstance(each, Unused)]
    for candidate in (*unused, field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


@functools.cache
def is_list_of_sections(parent: type[Section], name: str) -> bool:
    """Whether a key holds a list of sections of the class that `section_of` returns."""
    return get_origin(parent.model_fields[name].annotation) is list and section_of(parent, name) is not None


@functools.cache
def is_rounded(section: type[Section], name: str) -> bool:
    """Whether a key counts elements: formulas give them, and what they leave of a fraction is rounded."""
    return _Rounded in section.model_fields[name].metadata


def aliases_of(section: type[Section]) -> dict[str, str]:
    """Return other accepted names of a section's keys -> the name."""
    found = {}
    for name, field in section.model_fields.items():
        extra = field.json_schema_extra
        for alias in extra["aliases"] if isinstance(extra, dict) else ():  # type: ignore[union-attr]
            found[str(alias)] = name
    return found


# ---- types ----


def shown(value: Any) -> str:
    """Return a value as JSON would write it, shortened."""
    text = {None: "null", True: "true", False: "false"}.get(value) if not _is_container(value) else None
    if text is None:
        text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict) or (isinstance(value, int | float) and not isinstance(value, bool))


def _error(expected: str, value: Any) -> PydanticCustomError:
    return PydanticCustomError("launch", "expected {expected}, got {got}", {"expected": expected, "got": shown(value)})


class _Rounded:
    """Marks the type of a key that `config.check` rounds to an integer."""


def _checked(expected: str, convert: Callable[[Any], Any]) -> PlainValidator:
    """Build a validator: `convert` returns the value, or raises ValueError; `"auto"` and defaults pass."""

    def validate(value: Any) -> Any:
        if isinstance(value, str) and value == AUTO:
            return AUTO
        try:
            return convert(value)
        except (ValueError, OverflowError):  # an integer of 400 digits fits no float
            raise _error(expected, value) from None

    return PlainValidator(validate)


def _integer(low: int, high: float = math.inf) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not math.isfinite(value) or value != int(value) or not low <= value <= high:  # 5e8 is an integer
            raise ValueError
        return int(value)

    return convert


def _number(low: float, high: float = math.inf) -> Callable[[Any], float]:
    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not math.isfinite(value) or not low <= value <= high:
            raise ValueError
        return value

    return convert


def _loss_scale(value: Any) -> Any:
    return value if value == "dynamic" else _number(5e-324)(value)


def _instance(kind: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError
        return value

    return convert


def _or_null(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _list_of(convert: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    def convert_all(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise ValueError
        return [convert(item) for item in value]

    return convert_all


def choice(*options: str, null: bool = False, keeps_case: bool = False) -> PlainValidator:
    """Accept one of `options`, in any case; keeps_case: as it is given, else as it is here."""
    by_lower = {option.lower(): option for option in options}

    def convert(value: Any) -> str | None:
        if value is None and null:
            return None
        if not isinstance(value, str) or value.lower() not in by_lower:
            raise ValueError
        return value if keeps_case else by_lower[value.lower()]

    expected = "one of " + ", ".join(f'"{option}"' for option in options)
    return _checked(expected + (" or null" if null else ""), convert)


Flag = Annotated[bool, _checked("true or false", lambda value: _flag(value))]
Count = Annotated[int, _checked("an integer of at least 0", _integer(0))]
PositiveInt = Annotated[int, _checked("an integer of at least 1", _integer(1))]
Elements = Annotated[int, _checked("an integer of at least 0", _integer(0)), _Rounded]
PositiveElements = Annotated[int, _checked("an integer of at least 1", _integer(1)), _Rounded]
StageNumber = Annotated[int, _checked("a stage: 0, 1, 2 or 3", _integer(0, 3))]
AnyInt = Annotated[int, _checked("an integer", _integer(-(2**63)))]
Number = Annotated[float, _checked("a number", _number(-math.inf))]
NonNegative = Annotated[float, _checked("a number of at least 0", _number(0.0))]
Fraction = Annotated[float, _checked("a number from 0 to 1", _number(0.0, 1.0))]
LossScaleValue = Annotated[Any, _checked('"dynamic" or a number above 0', _loss_scale)]
Text = Annotated[str, _checked("a string", _instance(str))]
OptFlag = Annotated[bool | None, _checked("true, false or null", _or_null(lambda value: _flag(value)))]
OptInt = Annotated[int | None, _checked("an integer of at least 1, or null", _or_null(_integer(1)))]
OptCount = Annotated[int | None, _checked("an integer of at least 0, or null", _or_null(_integer(0)))]
OptNumber = Annotated[float | None, _checked("a number or null", _or_null(_number(-math.inf)))]
OptText = Annotated[str | None, _checked("a string or null", _or_null(_instance(str)))]
TextList = Annotated[list[str], _checked("a list of strings", _list_of(_instance(str)))]
TextOrList = Annotated[list[str], _checked("a string or a list of strings", lambda value: _text_or_list(value))]
OptTextList = Annotated[list[str] | None, _checked("a list of strings or null", _or_null(_list_of(_instance(str))))]
IntList = Annotated[list[int], _checked("a list of integers of at least 1", _list_of(_integer(1)))]
CountList = Annotated[list[int], _checked("a list of integers", _list_of(_integer(0)))]
OptCountList = Annotated[list[int] | None, _checked("a list of integers or null", _or_null(_list_of(_integer(0))))]
Mapping_ = Annotated[dict[str, Any], _checked("an object", _instance(dict))]
OptMapping = Annotated[dict[str, Any] | None, _checked("an object or null", _or_null(_instance(dict)))]
WeightShape = Annotated[
    list[Any] | None,
    _checked("a list of integers, one of which may be a list of sizes, or null", lambda value: _weight_shape(value)),
]
Anything = Annotated[Any, PlainValidator(lambda value: value)]
Betas = Annotated[list[float], _checked("two numbers, each at least 0 and below 1", lambda value: _betas(value))]
NumberOrList = Annotated[
    float | list[float] | None,
    _checked("a number, a list of numbers or null", lambda value: _number_or_list(value)),
]
PerGroup = Annotated[
    float | list[float],
    _checked("a number of at least 0, or a list of these", lambda value: _per_group(value)),
]


def is_flag(value: Any) -> bool:
    """Whether a value is true or false, also as the number 1 or 0 that older configs have."""
    return isinstance(value, bool | int | float) and value in (0, 1)


def _flag(value: Any) -> bool:
    if not is_flag(value):
        raise ValueError
    return bool(value)


def _text_or_list(value: Any) -> list[str]:
    return _list_of(_instance(str))([value] if isinstance(value, str) else value)


def _per_group(value: Any) -> Any:
    return _list_of(_number(0.0))(value) if isinstance(value, list | tuple) else _number(0.0)(value)


def _betas(value: Any) -> list[float]:
    numbers = _list_of(_number(0.0))(value)
    if len(numbers) != 2 or any(number >= 1.0 for number in numbers):
        raise ValueError
    return numbers


def _number_or_list(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return _list_of(_number(-math.inf))(value)
    return _or_null(_number(-math.inf))(value)


def _weight_shape(value: Any) -> list[Any] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise ValueError
    of_layers = _list_of(_integer(1))
    sizes = [of_layers(entry) if isinstance(entry, list | tuple) else _integer(-1)(entry) for entry in value]
    if any(entry in (0, []) for entry in sizes) or sum(isinstance(entry, list) for entry in sizes) > 1:
        raise ValueError
    return sizes


# ---- sections without effect ----


class Unused:
    """A section that this release does nothing with; `Annotated[Section, row]` is the type of the key that holds it.

    Its keys are known all the same: names, types and defaults, so that a config that is wrong there is wrong here.
    """

    def __init__(self, name: str, status: Status, switch: Status | None = None, /, **keys: Any) -> None:
        """status: of the keys. switch: of the first key, without which all others are off; None: there is no such key.

        keys: the default, whose type says what else it may be; a tuple of choices, the default first; a type, whose
        default is null; a type and a default; or a section inside.
        """
        fields: dict[str, Any] = {}
        for at, (each, value) in enumerate(keys.items()):
            kind, default = _kind_and_default(value)
            fields[each] = kind, key(default, f"a setting of {name}", switch if at == 0 else None)
        self.section: type[Section] = create_model(name, __base__=Section, __module__=__name__, **fields)
        self.section.status = status
        self.section.switch = None if switch is None else (next(iter(keys)), False)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return nullable_schema(handler.generate_schema(self.section))


# The first that fits: True is an int, too.
_KIND_OF_DEFAULT = ((bool, Flag), (int, PositiveInt), (float, Fraction), (str, Text), (list, IntList), (dict, Mapping_))


def _kind_and_default(value: Any) -> tuple[Any, Any]:
    if isinstance(value, Unused):
        return Annotated[Section, value], value
    if hasattr(value, "__metadata__"):  # a type, as they are above: Annotated[...]
        return value, None
    if isinstance(value, tuple) and hasattr(value[0], "__metadata__"):
        kind, default = value
        return kind, default
    if isinstance(value, tuple):
        options = [option for option in value if option is not None]
        return Annotated[str | None if None in value else str, choice(*options, null=None in value)], value[0]
    kind = next(kind for of_default, kind in _KIND_OF_DEFAULT if isinstance(value, of_default))
    return Count if kind is PositiveInt and value == 0 else kind, value
