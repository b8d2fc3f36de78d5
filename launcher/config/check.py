"""From plain data to a `Config`: one spelling of every key, every rule, all findings at once. Knows no files.

Other names, older forms and older places of keys become the schema's own first: only `normalise` knows them. What is
checked, resolved or translated after it reads the new keys alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from launcher.base.errors import ConfigError, Diagnostic, did_you_mean, nearest
from launcher.config.elastic import elastic_batch_of
from launcher.config.equations import BATCH_KEYS, mesh_sizes, solve_batch
from launcher.config.fields import (
    AUTO,
    Auto,
    Finding,
    KeyPath,
    Section,
    Status,
    Support,
    aliases_of,
    is_flag,
    is_list_of_sections,
    is_rounded,
    section_of,
    shown,
    status_of,
)
from launcher.config.rules import (
    checkpoint_problems,
    micro_batch_problems,
    offload_problems,
    one_bit_problems,
    pipeline_problems,
    precision_problems,
    unused_compile,
    unused_expert_size,
    unused_offload,
    unused_schedule,
)
from launcher.config.schema import Config
from launcher.config.schema_params import (
    OPTIMIZER_PARAMS,
    REFUSED_OPTIMIZERS,
    REFUSED_SCHEDULERS,
    SCHEDULER_PARAMS,
    TORCHS_WEIGHT_DECAY,
    WORKING_OPTIMIZERS,
    WORKING_SCHEDULERS,
)
from launcher.sharding.mesh import MeshSizes

# Old switch -> the section that has taken its place, with "device": "cpu".
_OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_OLD_PINNING = "cpu_offload_use_pin_memory"
_ZERO = "zero_optimization"


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


def check(
    data: Mapping[str, Any],
    world_size: int | None,
    *,
    for_planning: bool = False,
    model_stages: int | None = None,
) -> Checked:
    """Check plain data against the schema and the rules between keys.

    world_size: all ranks, where known; the mesh and the batch equation are checked with it.
    for_planning: what this release does not do is a notice, because nothing is going to run.
    model_stages: pipeline ranks that the model was built for; they are `pipeline.stages` where that is open.
    """
    known = normalise(data)
    config, errors = _validated(known)
    support = _Support(known.data, [], [])
    _check_support(Config, known.data, (), support)
    for types in (_OPTIMIZERS, _SCHEDULERS):
        errors += _check_typed_params(known.data, types, support)
    config, contradiction = _with_stages(_fill_params(config), model_stages)
    errors += contradiction
    between, notices = _between_keys(config, world_size, errors)
    unused = unused_offload(config) + unused_compile(config)
    notices += [Finding(path, message, None, True) for path, message in unused]
    broken = {finding.path for finding in errors}  # there is nothing more to say about a value of the wrong type
    between = [replace(finding, is_asserted=True) for finding in between]
    errors += [finding for finding in dict.fromkeys(support.errors + between) if finding.path not in broken]
    errors = known.errors + [replace(finding, path=known.as_written(finding.path)) for finding in errors]
    notices = [replace(finding, path=known.as_written(finding.path)) for finding in support.notices + notices]
    notices = known.notices + notices
    errors.sort(key=lambda finding: finding.dotted)
    if for_planning:
        notices += [finding for finding in errors if finding.is_refusal]
        errors = [finding for finding in errors if not finding.is_refusal]
    return Checked(None if errors else config, errors, notices)


# ---- One spelling of every setting ----


@dataclass
class Normalised:
    """Plain data under the schema's names, and where its keys stood before."""

    data: dict[str, Any]
    origins: dict[KeyPath, KeyPath] = field(default_factory=dict)  # where a key is, if not as written -> as written
    errors: list[Finding] = field(default_factory=list)
    notices: list[Finding] = field(default_factory=list)

    def as_written(self, path: KeyPath) -> KeyPath:
        """Return the path under which the config's author wrote what is now at `path`."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]] + path[length:]
        return path


def normalise(data: Mapping[str, Any]) -> Normalised:
    """Return the data with one spelling of every key. Values of a wrong type stay as they are, for the schema."""
    found = Normalised({})
    found.data = _renamed(Config, _undotted(data, found), (), found)
    if found.data.get("steps_per_print") == math.inf:  # as accelerate says that it wants no lines
        found.data["steps_per_print"] = 0
    zero = found.data.get(_ZERO)
    if isinstance(zero, dict):
        _lift_aio(zero, found)
        for old, name in _OLD_OFFLOAD.items():
            _replace_offload_switch(zero, old, name, found)
        _replace_pinning(zero, found)
    return found


def _undotted(data: Mapping[str, Any], found: Normalised) -> dict[str, Any]:
    """Move keys such as "zero_optimization.reduce_bucket_size" into their section, where it does not have them.

    trl writes them so beside a section that has been filled in, whose own values count.
    """
    result = dict(data)
    for dotted, value in data.items():
        name, _, key = dotted.partition(".")
        section = section_of(Config, name) if key and name in Config.model_fields else None
        if section is None or key not in section.model_fields or not isinstance(data.get(name, {}), Mapping):
            continue
        del result[dotted]
        inner = result[name] = dict(result.get(name, {}))
        if key not in inner:
            found.origins[name, key] = (dotted,)
        elif inner[key] != value:
            message = f'"{dotted}" {shown(value)} has no effect: {name} has its own {key}, {shown(inner[key])}'
            found.notices.append(Finding((dotted,), message, None, True))
        inner.setdefault(key, value)
    return result


def _renamed(section: type[Section], data: Mapping[str, Any], path: KeyPath, found: Normalised) -> dict[str, Any]:
    """Return a section's data under the schema's own names, at every depth. path: of the section, in those names."""
    aliases = aliases_of(section)
    result: dict[str, Any] = {}
    for name, value in data.items():
        target = name if name in section.model_fields else aliases.get(name, name)
        here, written = (*path, target), (*found.as_written(path), name)
        if target != name:
            if target in data or target in result:
                message = f'"{name}" and "{target}" are the same key'
                found.errors.append(Finding(written, message, "remove one", True, is_asserted=True))
                continue
            found.origins[here] = written
        inner = section_of(section, target) if target in section.model_fields else None
        if here == (_ZERO,) and isinstance(value, bool):
            value = {"stage": int(value)}  # the oldest form: true is stage 1
        if inner is not None and value is None:
            continue  # null for a section: as if it were not there
        if inner is not None and isinstance(value, Mapping):
            value = _renamed(inner, value, here, found)
        elif target in section.model_fields and is_rounded(section, target):
            value = _rounded(value, written, found)
        result[target] = value
    return result


def _rounded(value: Any, written: KeyPath, found: Normalised) -> Any:
    """Return a number of elements that a formula gave, such as 0.9 × hidden size², as the nearest integer."""
    if not isinstance(value, float) or not 1 <= value < 2**63 or value.is_integer():
        return value
    message = f"{'.'.join(str(part) for part in written)} {value!r} is rounded to {round(value)}"
    found.notices.append(Finding(written, message))
    return round(value)


def _lift_aio(zero: dict[str, Any], found: Normalised) -> None:
    """Move an `aio` section inside `zero_optimization`, as in older guides, to the top level."""
    if "aio" not in zero:
        return
    written: KeyPath = (*found.as_written((_ZERO,)), "aio")
    if "aio" in found.data:
        message = "aio is given twice, at the top level and inside zero_optimization"
        found.errors.append(Finding(written, message, "remove the one inside zero_optimization", True))
        zero.pop("aio")
        return
    value = zero.pop("aio")
    if value is None:
        return
    found.origins[("aio",)] = written
    if isinstance(value, Mapping):
        inner = section_of(Config, "aio")
        value = value if inner is None else _renamed(inner, value, ("aio",), found)
    found.data["aio"] = value
    message = "zero_optimization.aio is read as the section aio of the top level, where it belongs"
    found.notices.append(Finding(written, message, None, True))


def _replace_offload_switch(zero: dict[str, Any], old: str, name: str, found: Normalised) -> None:
    """Turn `"cpu_offload": true` into `"offload_optimizer": {"device": "cpu"}`, and its twin of parameters."""
    if zero.get(old) is not None and not is_flag(zero[old]):
        return
    is_on, written = zero.pop(old, None), found.as_written((_ZERO, old))
    if not is_on or not isinstance(zero.get(name, {}), dict):
        return
    if name not in zero:
        found.origins[(_ZERO, name)] = written
    section = zero.setdefault(name, {})
    device = section.get("device", AUTO)
    if device == AUTO:
        found.origins[(_ZERO, name, "device")] = written
        section["device"] = "cpu"
    elif isinstance(device, str) and device.lower() != "cpu":
        message = f"{written[-1]} true contradicts {name}.device {shown(device)}"
        found.errors.append(Finding(written, message, f'remove it: it is the old name of {name}.device "cpu"', True))


def _replace_pinning(zero: dict[str, Any], found: Normalised) -> None:
    """Turn `cpu_offload_use_pin_memory` into the `pin_memory` of what is offloaded."""
    if zero.get(_OLD_PINNING) is not None and not is_flag(zero[_OLD_PINNING]):
        return
    pins, written = zero.pop(_OLD_PINNING, None), found.as_written((_ZERO, _OLD_PINNING))
    if pins is None:
        return
    sections = {name: zero.get(name) for name in _OLD_OFFLOAD.values()}
    offloaded = {
        name: section
        for name, section in sections.items()
        if isinstance(section, dict) and str(section.get("device", "none")).lower() != "none"
    }
    if not offloaded:
        message = f"{'.'.join(str(part) for part in written)} {shown(pins)} has no effect: nothing is offloaded"
        found.notices.append(Finding(written, message, None, True))
    for name, section in offloaded.items():
        if "pin_memory" not in section:
            found.origins[(_ZERO, name, "pin_memory")] = written
        if section.setdefault("pin_memory", pins) != pins:
            message = f"{written[-1]} {shown(pins)} contradicts {name}.pin_memory {shown(section['pin_memory'])}"
            found.errors.append(Finding(written, message, "remove it: it is the old name of pin_memory", True))


# ---- Single keys ----


def _validated(known: Normalised) -> tuple[Config, list[Finding]]:
    """Return the config, and what is wrong with single keys of it.

    A key that is wrong counts as `"auto"`, so that the rules between keys can be checked for the others: no rule holds
    anything against a value that is not decided yet.
    """
    try:
        return Config.model_validate(known.data), []
    except ValidationError as error:
        items = error.errors(include_url=False)
    sound = _copied(known.data)
    for item in items:
        _leave_open(sound, tuple(item["loc"]))
    return Config.model_validate(sound), [_from_pydantic(item, known) for item in items]


def _copied(data: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a section and of those inside; values may be anything and are not copied."""
    return {name: _copied_value(value) for name, value in data.items()}


def _copied_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied_value(item) for item in value]
    return _copied(value) if isinstance(value, dict) else value


def _leave_open(data: dict[Any, Any], path: KeyPath) -> None:
    """Make the value at `path` undecided; of a key that is not known, that of the nearest one that is."""
    section: type[Section] = Config
    for part in path[:-1]:
        inner = section if isinstance(part, int) else section_of(section, part)
        if inner is None:
            return
        section, data = inner, data[part]
    if isinstance(path[-1], int):  # an item of a list that is no section
        data[path[-1]] = {}
        return
    name = str(path[-1])
    data.pop(path[-1], None)
    meant: str | None = name
    if name not in section.model_fields:
        aliases = aliases_of(section)
        near = nearest(name, [*section.model_fields, *aliases])
        meant = None if near is None else aliases.get(near, near)
    if meant is not None and meant not in data:
        data[meant] = _open(section, meant)


def _all_open(section: type[Section]) -> dict[str, Any]:
    """Return a section none of whose keys is decided."""
    return {name: _open(section, name) for name in section.model_fields}


def _open(section: type[Section], name: str) -> Any:
    """Return what a key holds that is not decided."""
    inner = section_of(section, name)
    if inner is None:
        return AUTO
    return [] if is_list_of_sections(section, name) else _all_open(inner)


def _from_pydantic(item: Any, known: Normalised) -> Finding:
    path: KeyPath = tuple(item["loc"])
    if item["type"] == "extra_forbidden":
        return unknown_key(path)
    if item["type"] == "missing":
        return Finding(path[:-1], f'"{path[-1]}" is missing')
    if item["type"] == "list_type":
        return Finding(path, f"expected a list of objects, got {shown(item['input'])}")
    if item["type"].startswith(("model_", "dict_")):
        return Finding(path, f"expected an object with keys, got {shown(item['input'])}")
    message = f"{known.as_written(path)[-1] if path else 'config'}: {item['msg']}"
    return Finding(path, message, is_asserted=path[:1] in [(name,) for name in BATCH_KEYS])


def unknown_key(path: KeyPath) -> Finding:
    """Say that the last part of `path` is not a key of its section, with the nearest that is."""
    section: type[Section] = Config
    for part in path[:-1]:
        inner = section if isinstance(part, int) else section_of(section, part)
        if inner is None:
            break
        section = inner
    choices = [*section.model_fields, *aliases_of(section)]
    return Finding(path, f'unknown key "{path[-1]}"', did_you_mean(str(path[-1]), choices), True)


# ---- What has no effect, and what is not supported ----


@dataclass
class _Support:
    """Collects what is set without effect, or not supported."""

    data: Mapping[str, Any]  # the whole config
    errors: list[Finding]
    notices: list[Finding]

    def report(self, status: Status, path: KeyPath, value: Any) -> None:
        what = ".".join(str(part) for part in path) + ("" if isinstance(value, Mapping) else f" {shown(value)}")
        if status.support is Support.UNSUPPORTED:
            self.errors.append(Finding(path, f"{what} is not supported", status.note, True, True))
        elif status.support is Support.INERT:
            self.notices.append(Finding(path, f"{what} has no effect: {status.note}", None, True))
        elif status.support is Support.AT_STAGE_3 and _zero_key(self.data, "stage", 0) not in (3, AUTO):
            self.notices.append(Finding(path, f"{what} has no effect: it tunes stage 3", None, True))
        elif status.support is Support.WITH_NVME and not _uses_disk(self.data):
            self.notices.append(Finding(path, f"{what} has no effect: nothing is offloaded to nvme", None, True))


def _zero_key(data: Mapping[str, Any], name: str, default: Any) -> Any:
    zero = data.get("zero_optimization")
    return zero.get(name, default) if isinstance(zero, Mapping) else default


def _uses_disk(data: Mapping[str, Any]) -> bool:
    parts = (_zero_key(data, name, None) for name in ("offload_param", "offload_optimizer"))
    return any(isinstance(part, Mapping) and str(part.get("device")).lower() == "nvme" for part in parts)


def _check_support(section: type[Section], data: Mapping[str, Any], path: KeyPath, findings: _Support) -> None:
    """Report keys that were set and have no effect, and refuse keys that are not supported."""
    if path and _is_switched_off(section, data):
        return
    for name, value in data.items():
        if name not in section.model_fields:
            continue
        inner, field = section_of(section, name), section.model_fields[name]
        if inner is None:
            status, default = status_of(section, name), field.get_default(call_default_factory=True)
            if value not in (default, None, AUTO) and not (status.is_off is not None and status.is_off(value)):
                findings.report(status, (*path, name), value)
        elif not isinstance(value, Mapping):
            continue
        elif field.default is None and inner.status.support is not Support.WORKS:  # to be there is what turns it on
            if not _is_switched_off(inner, value):
                findings.report(inner.status, (*path, name), value)
        else:
            _check_support(inner, value, (*path, name), findings)


def _is_switched_off(section: type[Section], data: Mapping[str, Any]) -> bool:
    if section.switch is None:
        return False
    name, off = section.switch
    return bool(data.get(name, section.model_fields[name].get_default()) == off)


# ---- The params of optimizers and schedules ----


def _check_typed_params(data: Mapping[str, Any], types: _Types, support: _Support) -> list[Finding]:
    """Check `optimizer` or `scheduler`: its type, and its params against that type. Returns what is wrong."""
    name, working = types.name, types.working
    part = data.get(name)
    if not isinstance(part, Mapping) or not isinstance(part.get("type", ""), str):
        return []
    if "type" not in part:
        return [Finding((name,), f'{name}: "type" is missing', f"one of {', '.join(working)}")]
    type_name = canonical_type(str(part["type"]), {**types.known, **types.refused})
    errors = []
    if type_name is None:
        type_name = nearest(str(part["type"]), working)  # whose params these are, most probably
        hint = f'did you mean "{type_name}"?' if type_name else f"one of {', '.join(working)}"
        errors.append(Finding((name, "type"), f'unknown {name} type "{part["type"]}"', hint))
    elif type_name in types.refused:
        why, _, remedy = types.refused[type_name].partition("; ")
        message = f"{name} type {type_name} is not supported" + (f": {why}" if remedy else "")
        errors.append(Finding((name, "type"), message, remedy or why, is_refusal=True))
    params = part.get("params") or {}
    if not isinstance(params, Mapping):
        return errors
    if type_name is None:
        known = {key for each in types.known.values() for key in (*each.model_fields, *aliases_of(each))}
        return errors + [_unknown_param(name, key, known) for key in params if key not in known]
    if type_name not in types.known:
        return errors
    _check_support(types.known[type_name], params, (name, "params"), support)
    return errors + _param_findings(types, type_name, params)


def check_params(name: str, type_name: str, params: Mapping[str, Any]) -> None:
    """Check the params of a known type of `optimizer` or `scheduler` alone. Raises: ConfigError with all findings."""
    findings = _param_findings(_OPTIMIZERS if name == "optimizer" else _SCHEDULERS, type_name, params)
    if findings:
        raise ConfigError.from_diagnostics(
            [Diagnostic(f"{type_name}: {found.message}", found.dotted, found.hint) for found in findings]
        )


def _param_findings(types: _Types, type_name: str, params: Mapping[str, Any]) -> list[Finding]:
    section = types.known[type_name]
    try:
        section.model_validate(dict(params))
    except ValidationError as error:
        return [_param_finding(types.name, type_name, section, item) for item in error.errors(include_url=False)]
    return []


def _unknown_param(name: str, key: Any, known: Iterable[str]) -> Finding:
    hint = did_you_mean(str(key), known) or f"no {name} takes it"
    return Finding((name, "params", key), f'{name}.params: unknown key "{key}"', hint, True)


def _param_finding(name: str, type_name: str, section: type[Section], item: Any) -> Finding:
    path: KeyPath = (name, "params", *item["loc"])
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
    """Replace the params of optimizer and scheduler by complete ones, defaults filled in.

    One whose type is not known, which is reported elsewhere, is left out: no rule between keys can be about it.
    """
    updates: dict[str, Any] = {}
    for name, known in (("optimizer", OPTIMIZER_PARAMS), ("scheduler", SCHEDULER_PARAMS)):
        part = getattr(config, name)
        if part is None:
            continue
        type_name = canonical_type(part.type, known)
        try:
            params = dict(known[type_name].model_validate(part.params)) if type_name is not None else {}
        except ValidationError:  # reported already
            params = part.params
        else:
            is_adamw = type_name == "AdamW" or (type_name == "Adam" and params["adam_w_mode"])
            if is_adamw and params["torch_adam"] is True and "weight_decay" not in part.params:
                params["weight_decay"] = TORCHS_WEIGHT_DECAY
        updates[name] = None if type_name is None else part.model_copy(update={"type": type_name, "params": params})
    return config.model_copy(update=updates)


# ---- Rules between keys ----


def _with_stages(config: Config, model_stages: int | None) -> tuple[Config, list[Finding]]:
    """Give `pipeline.stages` the value that the model asks for. Returns what contradicts it, too."""
    given: object = config.pipeline.stages
    if model_stages is None or given == model_stages:
        return config, []
    if given not in (None, AUTO):
        message = f"pipeline.stages {given} contradicts the model, which was built for {model_stages}"
        return config, [Finding(("pipeline", "stages"), message, 'remove it, or use "auto"')]
    section = config.pipeline.model_copy(update={"stages": model_stages})
    return config.model_copy(update={"pipeline": section}), []


def _between_keys(
    config: Config, world_size: int | None, wrong: Sequence[Finding]
) -> tuple[list[Finding], list[Finding]]:
    """Check the rules that hold between keys. wrong: about single keys. Returns errors and notices."""
    problems = (
        *precision_problems(config),
        *one_bit_problems(config),
        *offload_problems(config),
        *checkpoint_problems(config),
        *pipeline_problems(config),
    )
    errors = [Finding(*problem) for problem in problems]
    if any("elasticity" in finding.path[:1] for finding in wrong):
        return errors, []
    sizes = None
    if world_size is not None:
        try:
            sizes = mesh_sizes(config, world_size)
        except ConfigError as error:
            return errors + [
                Finding(tuple((d.where or "").split(".")), d.message, d.hint) for d in error.diagnostics
            ], []
    if config.elasticity.enabled is True:
        return errors + _elastic_findings(config, world_size), _elastic_notices(config)
    num_micro_batches, wrong_batch = _batch(config, sizes)
    wrong_number, slow = micro_batch_problems(config, num_micro_batches)
    notices = [Finding(*problem) for problem in slow]
    if world_size is not None:
        unused = unused_schedule(config) + unused_expert_size(config)
        notices += [Finding(path, message, None, True) for path, message in unused]
    return errors + wrong_batch + [Finding(*problem) for problem in wrong_number], notices


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
        findings += _findings(error)
    return findings


def _findings(error: ConfigError) -> list[Finding]:
    return [Finding(tuple((found.where or "").split(".")), found.message, found.hint) for found in error.diagnostics]


def _elastic_notices(config: Config) -> list[Finding]:
    """Say which keys an enabled `elasticity` leaves without effect."""
    elasticity = config.elasticity
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


def _batch(config: Config, sizes: MeshSizes | None) -> tuple[int | None, list[Finding]]:
    """Return the micro-batches of a step, None where they are not known, and what is wrong with the sizes."""
    train, micro, steps = (getattr(config, name) for name in BATCH_KEYS)
    elastic: bool | Auto = config.elasticity.enabled
    if any(isinstance(value, Auto) for value in (train, micro, steps, elastic)):
        return None, []
    path: KeyPath = next(((name,) for name in BATCH_KEYS if getattr(config, name) is not None), ())
    if sizes is not None:
        try:
            return solve_batch(train, micro, steps, sizes.data, sizes.model_size).accumulation_steps, []
        except ConfigError as error:
            problem = error.diagnostics[0]
            return None, [Finding(path, problem.message, problem.hint)]
    if train and micro and steps and train % (micro * steps):
        message = f"train_batch_size {train} is not a multiple of {micro} (micro) × {steps} (accumulation)"
        return None, [Finding(path, message, "no number of ranks makes them equal")]
    return None, []
