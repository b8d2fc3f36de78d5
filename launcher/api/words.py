"""Errors in the words of Python: what the launcher says of its options, said of parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator

from launcher.api.parameters import Options, Parameters
from launcher.base.errors import Diagnostic, JobError, LauncherError

_OPTION = re.compile(r"--([a-z]+(?:[-_][a-z]+)*)")


@contextlib.contextmanager
def in_python_words() -> Iterator[None]:
    """Name the parameter where an error of the block names the option of `launch` that means the same."""
    try:
        yield
    except JobError:
        raise
    except LauncherError as error:
        found = [
            Diagnostic(str(_said(each.message)), _said(each.where), _said(each.hint)) for each in error.diagnostics
        ]
        raise type(error).from_diagnostics(found) from error.__cause__


def _said(text: str | None) -> str | None:
    return None if text is None else _OPTION.sub(_parameter, text)


def _parameter(match: re.Match[str]) -> str:
    name = match[1].replace("-", "_")
    own = {field.name for field in dataclasses.fields(Parameters)}
    options = {field.name for field in dataclasses.fields(Options)}
    for spelled in ("ranks" if name == "num_gpus" else name, f"{name}_s"):  # seconds are in the names of parameters
        if spelled in own:
            return f"{spelled}="
        if spelled in options:
            return f"Options({spelled}=)"
    return match[0]
