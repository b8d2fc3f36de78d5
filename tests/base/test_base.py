"""Errors, suggestions and units."""

from __future__ import annotations

import pytest

from launcher.base import env
from launcher.base.errors import ConfigError, Diagnostic, HostfileError, LauncherError, did_you_mean, nearest
from launcher.base.exit_codes import ExitCode
from launcher.base.units import format_bytes, format_count, format_duration


def test_an_error_says_where_what_and_how() -> None:
    error = HostfileError("slots must be positive", where="hosts:3:8", hint="write slots=1")
    assert str(error) == "hosts:3:8: slots must be positive; write slots=1"
    assert error.exit_code == ExitCode.USAGE


def test_several_findings_are_one_error() -> None:
    error = ConfigError.from_diagnostics([Diagnostic("one"), Diagnostic("two", "f:1:2")])
    assert isinstance(error, ConfigError)
    assert str(error) == "one\nf:1:2: two"
    with pytest.raises(ValueError, match="at least one"):
        LauncherError.from_diagnostics([])


def test_suggestions() -> None:
    assert nearest("zero_optimzation", ["optimizer", "zero_optimization"]) == "zero_optimization"
    assert did_you_mean("adamw", ["AdamW", "SGD"]) == 'did you mean "AdamW"?'
    assert did_you_mean("qqq", ["AdamW"]) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(1536), "1.5 KiB"),
        (format_bytes(5 * 2**50), "5120.0 TiB"),
        (format_count(999), "999"),
        (format_count(41234), "41.2k"),
        (format_count(2.5), "2.5"),
        (format_duration(12.44), "12.4 s"),
        (format_duration(185), "3 min 05 s"),
        (format_duration(3599.9), "1 h 00 min"),
        (format_duration(7620), "2 h 07 min"),
    ],
)
def test_units(text: str, expected: str) -> None:
    assert text == expected


def test_every_variable_is_listed_once() -> None:
    names = [variable.name for variable in env.ALL]
    assert len(names) == len(set(names)) > 10
    assert {variable.direction for variable in env.ALL} == {"set", "read"}
