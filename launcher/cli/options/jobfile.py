"""`launch run job.yaml`: a whole run in one file.

    cluster:      {hostfile: hosts, include: "node-a@node-b:0,2"}
    resources:    {num_nodes: 2, num_gpus: 8}
    environment:  {NCCL_DEBUG: INFO}
    script:       train.py
    args:         [--lr, 3e-4]
    config:       ds_config.json        # or the config itself; the script gets it as --deepspeed
    options:      {max_restarts: 2}     # every option of `launch run`, also those of `cluster` and `resources`

Options on the command line win over the file.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from launcher.base.errors import Diagnostic, UsageError, did_you_mean

_SECTIONS = ("cluster", "resources", "options")
_KEYS = (*_SECTIONS, "environment", "script", "args", "config")
_NOT_IN_A_FILE = ("script", "script_args", "env", "dry_run", "as_json")


def with_job_file(ctx: click.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the job file `script` under those given on the command line. Raises: UsageError."""
    found = read_job_file(Path(values["script"]), ctx.command)
    given = {name for name in found if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}
    joined = {name: (*found[name], *values[name]) for name in ("script_args", "env")}
    return values | {name: found[name] for name in found.keys() - given} | joined | {"script": found["script"]}


def read_job_file(path: Path, command: click.Command) -> dict[str, Any]:
    """Return the option values of `command` that a job file gives, with `script` and `script_args`.

    Raises: UsageError with everything that is wrong with the file.
    """
    data = _load(path)
    problems: list[Diagnostic] = []
    for key in data:
        if key not in _KEYS:
            problems.append(Diagnostic(f'unknown key "{key}"', str(path), did_you_mean(str(key), _KEYS)))
    if not isinstance(data.get("script"), str):
        problems.append(Diagnostic('"script" is missing', str(path), "script: train.py"))
    values: dict[str, Any] = {}
    for section in _SECTIONS:
        part = data.get(section) or {}
        if isinstance(part, Mapping):
            values |= _options(part, section, path, command, problems)
        else:
            problems.append(Diagnostic(f"{section}: expected keys", str(path)))
    arguments = data.get("args") or []
    if not isinstance(arguments, list) or not all(map(_is_word, arguments)):
        problems.append(Diagnostic("args: expected a list of words", str(path), "args: [--lr, 3e-4]"))
    environment = data.get("environment") or {}
    if not isinstance(environment, Mapping) or not all(map(_is_word, environment.values())):
        problems.append(Diagnostic("environment: expected KEY: value lines", str(path)))
    if problems:
        raise UsageError.from_diagnostics(problems)
    values["env"] = tuple(f"{key}={_word(value)}" for key, value in environment.items())
    values["script"] = data["script"]
    values["script_args"] = (*(_word(item) for item in arguments), *_config_arguments(data.get("config")))
    return values


def _load(path: Path) -> Mapping[str, Any]:
    import yaml  # 15 ms that only this command pays

    class Loader(yaml.SafeLoader):
        """Refuses a key that is twice in one mapping, of which YAML takes the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if key.value in seen:
                    place = f"{path}:{key.start_mark.line + 1}:{key.start_mark.column + 1}"
                    raise UsageError(f'duplicate key "{key.value}"', where=place, hint="keep one of them")
                seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the job file cannot be read: {error}", where=str(path)) from None
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError, TypeError, OverflowError) as error:
        # PyYAML lets through what its tags stumble over: `!!bool x` is a KeyError, `!!timestamp x` an AttributeError.
        raise UsageError(f"the job file is not YAML: {' '.join(str(error).split())}", where=str(path)) from None
    if not isinstance(data, Mapping):
        raise UsageError("a job file holds keys", where=str(path), hint="script: train.py")
    return data


def _options(
    part: Mapping[Any, Any], section: str, path: Path, command: click.Command, problems: list[Diagnostic]
) -> dict[str, Any]:
    """Return the values of one section, converted as the command line converts them."""
    by_name = {
        spelling.lstrip("-").replace("-", "_"): parameter
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name not in _NOT_IN_A_FILE
        for spelling in (*parameter.opts, *getattr(parameter, "also", ()), parameter.name or "")
        if spelling.startswith("--") or spelling == parameter.name
    }
    values: dict[str, Any] = {}
    context = click.Context(command)
    for key, value in part.items():
        parameter = by_name.get(str(key).replace("-", "_"))
        if parameter is None or parameter.name is None:
            problems.append(Diagnostic(f'{section}: unknown key "{key}"', str(path), did_you_mean(str(key), by_name)))
            continue
        if not all(map(_is_word, value if isinstance(value, list) else [value])):
            problems.append(Diagnostic(f"{section}.{key}: expected a value", str(path)))
            continue
        try:
            given = [_word(item) for item in value] if isinstance(value, list) else _word(value)
            if parameter.multiple and isinstance(given, str):
                given = [given]
            values[parameter.name] = parameter.type_cast_value(context, given)
        except UsageError as error:
            found = error.diagnostics[0]
            problems.append(Diagnostic(f"{section}.{key}: {found.message}", str(path), found.hint))
        except (click.ClickException, TypeError, ValueError) as error:
            shown = error.message if isinstance(error, click.ClickException) else str(error)
            problems.append(Diagnostic(f"{section}.{key}: {shown}", str(path)))
    return values


def _is_word(value: Any) -> bool:
    return not isinstance(value, list | dict | None)


def _word(value: Any) -> str:
    """Return a YAML value as it would stand on a command line. Raises: UsageError."""
    try:
        return str(value).lower() if isinstance(value, bool) else str(value)
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(f"a value cannot be written down: {error}") from None


def _config_arguments(config: Any) -> list[str]:
    """Return the arguments that hand the config to the script. Raises: UsageError."""
    if config is None:
        return []
    if isinstance(config, Mapping):
        try:
            return ["--deepspeed", base64.b64encode(json.dumps(config).encode()).decode()]
        except (TypeError, ValueError) as error:  # dates, sets and bytes, which JSON does not have
            raise UsageError(f"config: {error}") from None
    return ["--deepspeed", _word(config)]
