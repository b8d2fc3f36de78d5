"""From plain data to a `Config`: every rule, all findings at once. Knows key paths, not files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from launcher.base.errors import ConfigError
from launcher.base.suggest import did_you_mean
from launcher.config.batch import BATCH_KEYS, solve_batch
from launcher.config.elastic import elastic_batch_of
from launcher.config.fields import AUTO, Auto, Section, Status, Support, aliases_of, shown, status_of
from launcher.config.positions import Path
from launcher.config.rules import one_bit_problems, precision_problems
from launcher.config.rules_offload import offload_problems
from launcher.config.schema import Config
from launcher.config.schema_optimizers import OPTIMIZER_PARAMS, REFUSED_OPTIMIZERS, WORKING_OPTIMIZERS
from launcher.config.schema_schedules import REFUSED_SCHEDULERS, SCHEDULER_PARAMS, WORKING_SCHEDULERS


@dataclass(frozen=True)
class Finding:
    """One thing to say about the key at `path`."""

    path: Path
    message: str
    hint: str | None = None
    at_key: bool = False  # it is about the key itself, not its value
    is_refusal: bool = False  # the config is sound, this release does not do what it asks for

    @property
    def dotted(self) -> str:
        return ".".join(str(part) for part in self.path)


@dataclass
class Checked:
    """The result of a check; `config` is None when there are errors."""

    config: Config | None
    errors: list[Finding]
    notices: list[Finding]


@dataclass(frozen=True)
class _Types:
    """What a section's `type` may be."""

    name: str  # of the section
    known: Mapping[str, type[Section]]
    working: tuple[str, ...]
    refused: Mapping[str, str]  # type -> why, and what to do


_OPTIMIZERS = _Types("optimizer", OPTIMIZER_PARAMS, WORKING_OPTIMIZERS, REFUSED_OPTIMIZERS)
_SCHEDULERS = _Types("scheduler", SCHEDULER_PARAMS, WORKING_SCHEDULERS, REFUSED_SCHEDULERS)


def check(data: Mapping[str, Any], world_size: int | None, *, for_planning: bool = False) -> Checked:
    """Check plain data against the schema and the rules between keys.

    world_size: data-parallel ranks, where known; the batch equation is checked with it.
    for_planning: what this release does not do is a notice, because nothing is going to run.
    """
    errors: list[Finding] = []
    notices: list[Finding] = []
    renamed = _rename_aliases(Config, dict(data), (), errors)
    config: Config | None = None
    try:
        config = Config.model_validate(renamed)
    except ValidationError as error:
        errors += [_from_pydantic(item) for item in error.errors(include_url=False)]
    _check_support(Config, renamed, (), _Support(renamed, errors, notices))
    for types in (_OPTIMIZERS, _SCHEDULERS):
        _check_typed_params(renamed, types, errors, notices)
    if config is not None:
        config = _fill_params(config)
        errors += _between_keys(config, world_size)
        notices += _elastic_notices(config)
    errors = list({finding.path: finding for finding in reversed(errors)}.values())  # the first of each key: its type
    errors.sort(key=lambda finding: finding.dotted)
    if for_planning:
        notices += [finding for finding in errors if finding.is_refusal]
        errors = [finding for finding in errors if not finding.is_refusal]
    return Checked(None if errors else config, errors, notices)


def section_of(parent: type[Section], name: str) -> type[Section] | None:
    """Return the section class of a key, None when it holds a plain value."""
    annotation = parent.model_fields[name].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _rename_aliases(section: type[Section], data: dict[str, Any], path: Path, errors: list[Finding]) -> dict[str, Any]:
    """Return the data under the schema's own names, at every depth."""
    aliases = aliases_of(section)
    result: dict[str, Any] = {}
    for name, value in data.items():
        target = aliases.get(name, name) if name not in section.model_fields else name
        if target != name and target in data:
            errors.append(Finding((*path, name), f'"{name}" and "{target}" are the same key', "remove one", True))
            continue
        inner = section_of(section, target) if target in section.model_fields else None
        if name == "zero_optimization" and isinstance(value, bool):
            value = {"stage": int(value)}  # the oldest form: true is stage 1
        if inner is not None and isinstance(value, Mapping):
            value = _rename_aliases(inner, dict(value), (*path, name), errors)
        if inner is not None and value is None:
            continue  # null for a section: as if it were not there
        result[target] = value
    return result


def _from_pydantic(item: Any) -> Finding:
    path: Path = tuple(item["loc"])
    if item["type"] == "extra_forbidden":
        return unknown_key(path)
    if item["type"] == "missing":
        return Finding(path[:-1], f'"{path[-1]}" is missing')
    if item["type"].startswith(("model_", "dict_")):
        return Finding(path, f"expected an object with keys, got {shown(item['input'])}")
    return Finding(path, f"{path[-1] if path else 'config'}: {item['msg']}")


def unknown_key(path: Path) -> Finding:
    """Say that the last part of `path` is not a key of its section, with the nearest that is."""
    section: type[Section] = Config
    for part in path[:-1]:
        inner = section_of(section, str(part))
        if inner is None:
            break
        section = inner
    choices = [*section.model_fields, *aliases_of(section)]
    return Finding(path, f'unknown key "{path[-1]}"', did_you_mean(str(path[-1]), choices), True)


@dataclass
class _Support:
    """Collects what is set without effect, or not supported."""

    data: Mapping[str, Any]  # the whole config
    errors: list[Finding]
    notices: list[Finding]

    def report(self, status: Status, path: Path, value: Any) -> None:
        name = ".".join(str(part) for part in path)
        if status.support is Support.UNSUPPORTED:
            self.errors.append(Finding(path, f"{name} {shown(value)} is not supported", status.note, True, True))
        elif status.support is Support.INERT:
            self.notices.append(Finding(path, f"{name} {shown(value)} has no effect: {status.note}", None, True))
        elif status.support is Support.AT_STAGE_3 and _zero_key(self.data, "stage", 0) not in (3, AUTO):
            self.notices.append(Finding(path, f"{name} {shown(value)} has no effect: it tunes stage 3", None, True))
        elif status.support is Support.WITH_NVME and not _uses_disk(self.data):
            why = "nothing is offloaded to nvme"
            self.notices.append(Finding(path, f"{name} {shown(value)} has no effect: {why}", None, True))


def _zero_key(data: Mapping[str, Any], name: str, default: Any) -> Any:
    zero = data.get("zero_optimization")
    return zero.get(name, default) if isinstance(zero, Mapping) else default


def _uses_disk(data: Mapping[str, Any]) -> bool:
    parts = (_zero_key(data, name, None) for name in ("offload_param", "offload_optimizer"))
    return any(isinstance(part, Mapping) and str(part.get("device")).lower() == "nvme" for part in parts)


def _check_support(section: type[Section], data: Mapping[str, Any], path: Path, findings: _Support) -> None:
    """Report keys that were set and have no effect, and refuse keys that are not supported."""
    if section.switch is not None and path and data.get(section.switch[0], section.switch[1]) == section.switch[1]:
        return  # the whole section is off
    for name, value in data.items():
        if name not in section.model_fields:
            continue
        inner = section_of(section, name)
        if inner is not None:
            if isinstance(value, Mapping):
                _check_support(inner, value, (*path, name), findings)
            continue
        default = section.model_fields[name].get_default(call_default_factory=True)
        if value in (default, None, AUTO):
            continue
        findings.report(status_of(section, name), (*path, name), value)


def _check_typed_params(data: Mapping[str, Any], types: _Types, errors: list[Finding], notices: list[Finding]) -> None:
    """Check `optimizer` or `scheduler`: its type, and its params against that type."""
    name, working = types.name, types.working
    part = data.get(name)
    if not isinstance(part, Mapping) or not isinstance(part.get("type", ""), str):
        return
    if "type" not in part:
        errors.append(Finding((name,), f'{name}: "type" is missing', f"one of {', '.join(working)}"))
        return
    type_name = canonical_type(str(part["type"]), {**types.known, **types.refused})
    params = part.get("params") or {}
    if type_name is None:
        hint = did_you_mean(str(part["type"]), working) or f"one of {', '.join(working)}"
        errors.append(Finding((name, "type"), f'unknown {name} type "{part["type"]}"', hint))
        return
    if type_name in types.refused:
        why, _, remedy = types.refused[type_name].partition("; ")
        message = f"{name} type {type_name} is not supported" + (f": {why}" if remedy else "")
        errors.append(Finding((name, "type"), message, remedy or why, is_refusal=True))
    if type_name not in types.known:
        return
    if not isinstance(params, Mapping):
        return
    section = types.known[type_name]
    try:
        section.model_validate(dict(params))
    except ValidationError as error:
        errors += [_param_finding(name, type_name, section, item) for item in error.errors(include_url=False)]
    _check_support(section, params, (name, "params"), _Support(data, errors, notices))


def _param_finding(name: str, type_name: str, section: type[Section], item: Any) -> Finding:
    path: Path = (name, "params", *item["loc"])
    if item["type"] == "extra_forbidden":
        wrong = str(path[-1])
        if wrong == "max_grad_norm":
            return Finding(path, f'{name}.params: unknown key "max_grad_norm"', "use gradient_clipping", True)
        hint = did_you_mean(wrong, section.model_fields) or f"{type_name} takes {', '.join(section.model_fields)}"
        return Finding(path, f'{name}.params: unknown key "{wrong}"', hint, True)
    if item["type"] == "missing":
        return Finding(path[:-1], f'{type_name} needs "{path[-1]}"', f'add "{path[-1]}" to {name}.params')
    return Finding(path, f"{path[-1]}: {item['msg']}")


def canonical_type(name: str, known: Mapping[str, Any]) -> str | None:
    """Return the known type of this name, case ignored; None when there is none."""
    return {candidate.lower(): candidate for candidate in known}.get(name.lower())


def _fill_params(config: Config) -> Config:
    """Replace the params of optimizer and scheduler by complete ones, defaults filled in."""
    updates: dict[str, Any] = {}
    for name, known in (("optimizer", OPTIMIZER_PARAMS), ("scheduler", SCHEDULER_PARAMS)):
        part = getattr(config, name)
        type_name = canonical_type(part.type, known) if part is not None else None
        if part is None or type_name is None:
            continue
        try:
            params = dict(known[type_name].model_validate(part.params))
        except ValidationError:  # reported already
            continue
        updates[name] = part.model_copy(update={"type": type_name, "params": params})
    return config.model_copy(update=updates)


def _between_keys(config: Config, world_size: int | None) -> list[Finding]:
    """Check the rules that hold between keys."""
    problems = (*precision_problems(config), *one_bit_problems(config), *offload_problems(config))
    findings = [Finding(*problem) for problem in problems]
    if config.elasticity.enabled is True:
        return findings + _elastic_findings(config, world_size)
    return findings + _batch_findings(config, world_size)


def _elastic_findings(config: Config, world_size: int | None) -> list[Finding]:
    """Check that `elasticity` alone decides the batch, that it can, and that the batch fits this world."""
    findings = []
    if config.elasticity.ignore_non_elastic_batch_info is not True:
        hint = "remove it, or set elasticity.ignore_non_elastic_batch_info to true"
        findings = [Finding((name,), f"{name}: elasticity decides it", hint, True) for name in _given_sizes(config)]
    try:
        batch = elastic_batch_of(config)
        if batch is not None and world_size is not None:
            batch.plan_for(world_size)
    except ConfigError as error:
        findings += [Finding(tuple((d.where or "").split(".")), d.message, d.hint) for d in error.diagnostics]
    return findings


def _elastic_notices(config: Config) -> list[Finding]:
    """Say which keys an enabled `elasticity` leaves without effect."""
    elasticity = config.elasticity
    if elasticity.enabled is not True:
        return []
    notices = []
    if elasticity.ignore_non_elastic_batch_info is True:
        for name in _given_sizes(config):
            message = f"{name} {shown(getattr(config, name))} has no effect: elasticity decides it"
            notices.append(Finding((name,), message, None, True))
    if elasticity.version == 0.1 and elasticity.num_gpus_per_node != 1:
        path = ("elasticity", "num_gpus_per_node")
        notices.append(Finding(path, f"{'.'.join(path)} has no effect: version 0.1 counts ranks", None, True))
    return notices


def _given_sizes(config: Config) -> list[str]:
    """Return the batch keys that hold a number; `"auto"` leaves the decision to others."""
    sizes = {name: getattr(config, name) for name in BATCH_KEYS}
    return [name for name, size in sizes.items() if size is not None and not isinstance(size, Auto)]


def _batch_findings(config: Config, world_size: int | None) -> list[Finding]:
    train, micro, steps = (getattr(config, name) for name in BATCH_KEYS)
    if any(isinstance(size, Auto) for size in (train, micro, steps)):
        return []
    path: Path = next(((name,) for name in BATCH_KEYS if getattr(config, name) is not None), ())
    if world_size is not None:
        try:
            solve_batch(train, micro, steps, world_size)
        except ConfigError as error:
            problem = error.diagnostics[0]
            return [Finding(path, problem.message, problem.hint)]
    elif train and micro and steps and train % (micro * steps):
        message = f"train_batch_size {train} is not a multiple of {micro} (micro) × {steps} (accumulation)"
        return [Finding(path, message, "no number of ranks makes them equal")]
    return []
