"""The schema as text: what `launch config explain` says and what `docs/config.md` holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.config.fields import Section, Support, aliases_of, section_of, shown, status_of
from launcher.config.schema import Config
from launcher.config.schema_params import OPTIMIZER_PARAMS, SCHEDULER_PARAMS

_TYPES = {"bool": "true or false", "int": "integer", "float": "number", "str": "string", "dict": "object"}


@dataclass(frozen=True)
class KeyFacts:
    """What there is to know about one key."""

    path: str
    type: str
    default: str
    doc: str
    status: str
    aliases: tuple[str, ...]


def all_keys() -> list[KeyFacts]:
    """Return every key of the vocabulary, sections before their keys, parameters of types last."""
    keys = list(_keys_of(Config, ""))
    for name, known in (("optimizer", OPTIMIZER_PARAMS), ("scheduler", SCHEDULER_PARAMS)):
        for type_name, section in known.items():
            keys += _keys_of(section, f"{name}.params[{type_name}].")
    return keys


def _keys_of(section: type[Section], prefix: str) -> Iterator[KeyFacts]:
    by_target: dict[str, list[str]] = {}
    for alias, target in aliases_of(section).items():
        by_target.setdefault(target, []).append(alias)
    for name, field in section.model_fields.items():
        inner = section_of(section, name)
        aliases = tuple(by_target.get(name, ()))
        path = f"{prefix}{name}"
        doc = field.description or ""
        if inner is not None:
            yield KeyFacts(path, "section", "off" if inner.switch else "", doc, _section_status(inner), aliases)
            yield from _keys_of(inner, f"{path}.")
            continue
        default = "required" if field.is_required() else shown(field.get_default(call_default_factory=True))
        yield KeyFacts(path, _type_name(field.annotation), default, doc, str(status_of(section, name)), aliases)


def _section_status(section: type[Section]) -> str:
    """A section works when any of its keys does."""
    statuses = [status_of(section, name) for name in section.model_fields]
    for best in (Support.WORKS, Support.WITH_NVME):
        if any(status.support is best for status in statuses):
            return str(best.value)
    refused = [status for status in statuses if status.support is Support.UNSUPPORTED]
    return str((refused or statuses)[0])


def _type_name(annotation: Any) -> str:
    text = str(getattr(annotation, "__name__", annotation)).replace("typing.", "")
    is_optional = text.endswith(" | None") or text.startswith("Optional")
    base = text.replace(" | None", "").replace("Optional[", "").rstrip("]") if is_optional else text
    if base.startswith(("list", "float | list")):
        base = "list" if base.startswith("list") else "number or list"
    if base.startswith("dict"):
        base = "object"
    readable = _TYPES.get(base, "any" if base == "Any" else base)
    return f"{readable} or null" if is_optional else readable


def markdown() -> str:
    """Return `docs/config.md`."""
    keys = all_keys()
    counts = {support: sum(1 for k in keys if k.status.partition(":")[0] == support.value) for support in Support}
    lines = [
        "# Config reference",
        "",
        "Generated from the schema by `make docs`; `tests/config/test_reference.py` checks that they agree.",
        "",
        "A config is a JSON or YAML file, a dict, JSON text, or base64 of JSON text. Comments (`//`, `#`, `/* */`) and",
        "trailing commas are accepted; HJSON, which leaves out quotes and commas too, is read where the package hjson",
        "is installed, and its errors name no lines. `true` and `false` may be `1` and `0`. Every key of the DeepSpeed",
        "vocabulary is known:",
        "",
        f"* **works**: {counts[Support.WORKS]} keys;",
        f"* **{Support.AT_STAGE_3.value}**: {counts[Support.AT_STAGE_3]} keys; setting one at another stage is reported"
        " at start;",
        f"* **{Support.WITH_NVME.value}**: {counts[Support.WITH_NVME]} keys; setting one without is reported at start;",
        f"* **{Support.RENAMED.value}**: {counts[Support.RENAMED]} keys, which become that as the config is read;",
        f"* **{Support.INERT.value}**: {counts[Support.INERT]} keys; setting one is reported at start;",
        f"* **{Support.UNSUPPORTED.value}**: {counts[Support.UNSUPPORTED]} keys; setting one to anything but its"
        " default is an error that says what to use instead. So is naming a type that is refused, and writing a section"
        " that DeepSpeed turns on where it stands (`zenflow`, `sparse_attention`, ...), even an empty one.",
        "",
        "Any other key, at any depth, is an error with the nearest known name. Plain keys also accept the value",
        '`"auto"`; what it became is printed at start. Numbers of elements, such as bucket sizes, may have a fraction,',
        "as formulas give them: they are rounded, and what they became is printed. `launch config check FILE` says",
        "everything that is wrong with a file at once, and `launch config explain KEY` explains a key.",
        "",
        "A key belongs to the section whose name is above its table.",
    ]
    sections: dict[str, list[KeyFacts]] = {}
    for fact in keys:
        sections.setdefault(fact.path.rpartition(".")[0], []).append(fact)
    for section, facts in sections.items():
        lines += ["", f"## {section or 'Top level'}", "", "| key | type | default | meaning | status |"]
        lines.append("|---|---|---|---|---|")
        for fact in facts:
            names = " ".join(f"`{name}`" for name in (fact.path.rpartition(".")[2], *fact.aliases))
            cells = (names, fact.type, f"`{fact.default}`" if fact.default else "", fact.doc, fact.status)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
