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
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from launcher.base.errors import Diagnostic, UsageError, did_you_mean

_SECTIONS = ("cluster", "resources", "options")
_KEYS = (*_SECTIONS, "environment", "script", "args", "config")
_NOT_IN_A_FILE = ("script", "script_args", "env", "dry_run", "as_json")
_OF_WORDS = (*_SECTIONS, "environment", "args")  # what a command line would hold: no numbers, no dates
_TEXT_TAG = "tag:yaml.org,2002:str"
_MAX_NESTING = 3  # of words: a list in a section, or one that `<<` joins
_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+\Z")  # YAML 1.1 takes 1e-3 for a text, see `config.load`


def with_job_file(ctx: click.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the job file `script` under those given on the command line. Raises: UsageError."""
    found = read_job_file(Path(values["script"]), ctx)
    given = {name for name in found if _is_given(ctx, name)}
    joined = {name: (*found[name], *values[name]) for name in ("script_args", "env")}
    return values | {name: found[name] for name in found.keys() - given} | joined | {"script": found["script"]}


def _is_given(ctx: click.Context, name: str) -> bool:
    """Whether the command line or the environment gives an option."""
    return ctx.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def read_job_file(path: Path, ctx: click.Context) -> dict[str, Any]:
    """Return the option values of the command of `ctx` that a job file gives, with `script` and `script_args`.

    What options have to say goes into `ctx.meta`, as from the command line.
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
            values |= _options(part, section, path, ctx, problems)
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

        def get_single_node(self) -> yaml.Node | None:
            root = super().get_single_node()
            if isinstance(root, yaml.MappingNode):
                texts: dict[tuple[int, int], yaml.Node] = {}
                root.value = [
                    (key, self._as_text(value, _MAX_NESTING, texts) if key.value in _OF_WORDS else value)
                    for key, value in root.value
                ]
            return root

        def _as_text(self, node: yaml.Node, nesting: int, texts: dict[tuple[int, int], yaml.Node]) -> yaml.Node:
            """Return a copy whose scalars are the texts that stand in the file: 0123 is no octal number, `on` no flag.

            A copy, as an anchor may be used in the config, too. texts: the copies so far, by node and nesting.
            """
            if isinstance(node, yaml.ScalarNode):
                is_plain = node.style is None
                implied = self.resolve(yaml.ScalarNode, node.value, (is_plain, not is_plain))  # type: ignore[no-untyped-call]
                keeps_tag = node.tag != implied or node.tag.endswith((":null", ":merge"))
                return node if keeps_tag else yaml.ScalarNode(_TEXT_TAG, node.value, node.start_mark, node.end_mark)
            if not nesting:
                return node
            if (id(node), nesting) not in texts:
                value: list[Any]
                if isinstance(node, yaml.MappingNode):
                    pairs = node.value
                    value = [(self._as_text(k, 0, texts), self._as_text(v, nesting - 1, texts)) for k, v in pairs]
                else:
                    value = [self._as_text(item, nesting - 1, texts) for item in node.value]
                texts[id(node), nesting] = type(node)(node.tag, value, node.start_mark, node.end_mark)
            return texts[id(node), nesting]

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))
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
    part: Mapping[Any, Any], section: str, path: Path, ctx: click.Context, problems: list[Diagnostic]
) -> dict[str, Any]:
    """Return the values of one section, converted and checked as the command line does it."""
    by_name = {
        spelling.lstrip("-").replace("-", "_"): parameter
        for parameter in ctx.command.params
        if isinstance(parameter, click.Option) and parameter.name not in _NOT_IN_A_FILE
        for spelling in (*parameter.opts, *getattr(parameter, "also", ()), parameter.name or "")
        if spelling.startswith("--") or spelling == parameter.name
    }
    values: dict[str, Any] = {}
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
            # One that the command line overrules is converted only: its callback would speak of what is not used.
            read = parameter.type_cast_value if _is_given(ctx, parameter.name) else parameter.process_value
            value = read(ctx, given)
            if parameter.expose_value:
                values[parameter.name] = value
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
