"""Environment files and `--env` options: variables for every rank of a job.

`.deepspeed_env` and `.launch_env` are read from the home folder and from the working directory, then the files of
`--env-file`, then `--env`; later ones win.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.base.errors import Diagnostic, UsageError

STANDARD_FILES = (".deepspeed_env", ".launch_env")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_env_file(text: str, source: str) -> dict[str, str]:
    """Return the variables of `KEY=VALUE` lines; blank lines, comments, `export` and quotes are understood.

    An unquoted value goes to the end of the line or to ` #`. Nothing is expanded.
    Raises: UsageError with every bad line.
    """
    values: dict[str, str] = {}
    problems: list[Diagnostic] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        name, equals, rest = line.partition("=")
        name = name.strip()
        value = _value(rest.strip())
        if not equals or not _NAME.fullmatch(name):
            problems.append(Diagnostic("expected KEY=VALUE", f"{source}:{number}", "such as NCCL_DEBUG=INFO"))
        elif value is None or "\0" in value:
            problems.append(Diagnostic(f"the quotes of {name} do not match", f"{source}:{number}", "close the quote"))
        else:
            values[name] = value
    if problems:
        raise UsageError.from_diagnostics(problems)
    return values


def _value(text: str) -> str | None:
    """Return the value a line gives, None for quotes that do not match."""
    if text[:1] in ("'", '"'):
        try:
            words = shlex.split(text, comments=True)
        except ValueError:
            return None
        return words[0] if len(words) == 1 else None
    return re.split(r"\s#", text, maxsplit=1)[0].rstrip()


def job_environment(
    options: Sequence[str], files: Sequence[Path], environ: Mapping[str, str], folders: Sequence[Path]
) -> dict[str, str]:
    """Return the variables that the files and options give to every rank.

    options: `KEY=VALUE`, or `KEY` for this process's own value. files: must exist. folders: where standard files are
    looked for. Raises: UsageError.
    """
    values: dict[str, str] = {}
    standard = [folder / name for folder in dict.fromkeys(folders) for name in STANDARD_FILES]
    for path in [*(path for path in standard if path.is_file()), *files]:
        try:
            values |= parse_env_file(path.read_text(encoding="utf-8", errors="surrogateescape"), str(path))
        except OSError as error:
            raise UsageError(f"the environment file cannot be read: {error.strerror}", where=str(path)) from None
    for option in options:
        name, equals, value = option.partition("=")
        if not _NAME.fullmatch(name):
            raise UsageError(f"--env {option!r} names no variable", hint="--env KEY=VALUE, or --env KEY")
        if not equals and name not in environ:
            raise UsageError(f"--env {name}: the variable is not set here", hint=f"set it, or give --env {name}=VALUE")
        values[name] = value if equals else environ[name]
    return values
