"""No input ends in anything but a config or a ConfigError."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.base.errors import ConfigError
from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.load import load_config, read_json
from launcher.config.reference import all_keys

PLAIN_PATHS = [tuple(fact.path.split(".")) for fact in all_keys() if "[" not in fact.path]
GOOD = {
    "train_batch_size": 32,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
odd = values | st.sampled_from(["auto", "cpu", -1, 0, 1e308, 10**400, [0.9, 0.999], {"enabled": True}])


def load(source: Any) -> None:
    """Load; a valid config must also resolve, or say why not."""
    try:
        loaded = load_config(source, world_size=2)
        resolve_auto(loaded.config, AutoFacts(world_size=2))
    except ConfigError as error:
        str(error)  # the only way to fail, and it can be shown


@given(values)
def test_any_json_value(value: Any) -> None:
    load(json.dumps({"x": value}))
    if isinstance(value, dict):
        load(value)


@given(st.text(max_size=80))
def test_any_text(text: str) -> None:
    load("{" + text)
    load(text)


@given(st.lists(st.tuples(st.sampled_from(PLAIN_PATHS), st.sampled_from(["", "e"]), odd), min_size=1, max_size=3))
@settings(max_examples=400, deadline=None)
def test_any_values_at_any_keys(changes: list[tuple[tuple[str, ...], str, Any]]) -> None:
    """A letter behind a key makes it one that is not known."""
    data: dict[str, Any] = copy.deepcopy(GOOD)
    for path, letter, value in changes:
        inner: Any = data
        for part in path[:-1]:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner[path[-1] + letter] = copy.deepcopy(value)
    load(data)
    load(json.dumps(data))


@given(st.integers(0, 200), st.text(max_size=3), st.integers(0, 10))
def test_damaged_files(position: int, insert: str, cut: int) -> None:
    text = json.dumps(GOOD, indent=2)
    load(text[:position] + insert + text[position + cut :])


@given(st.binary(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_in_a_file(tmp_path: Path, data: bytes) -> None:
    for suffix in (".json", ".yaml"):
        path = tmp_path / f"config{suffix}"
        path.write_bytes(data)
        load(path)


@given(values)
def test_the_reader_agrees_with_the_standard_library(value: Any) -> None:
    text = json.dumps(value, indent=1)
    assert read_json(text, "x").value == json.loads(text)
