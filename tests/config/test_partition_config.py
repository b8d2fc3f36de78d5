"""`tensor_parallel.partition_config`: the one section with a list of sections in it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import ConfigError
from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.load import load_config
from launcher.config.schema_parallel import LayerSpec

SPEC: dict[str, Any] = {"patterns": [".*\\.qkv\\.weight$"], "shape": [[8, 4, 4], -1], "partition_dim": 0}


def config_of(*specs: Any, **partition: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"partition_config": {"layer_specs": list(specs), **partition}}}


def test_specs_are_sections_with_defaults() -> None:
    partition = load_config(config_of(SPEC)).config.tensor_parallel.partition_config
    assert partition is not None
    assert partition.use_default_specs
    assert partition.layer_specs == [LayerSpec(patterns=[".*\\.qkv\\.weight$"], shape=[[8, 4, 4], -1], partition_dim=0)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"pattern": ["x"]}, 'unknown key "pattern"; did you mean "patterns"?'),
        ({"patterns": "x"}, 'expected a list of strings, got "x"'),
        ({"partition_type": "both"}, 'expected one of "column", "row", "skip", got "both"'),
        ({"shape": [0, -1]}, "expected a list of integers, one of which may be a list of sizes, or null"),
        ({"shape": [[1, 2], [3]]}, "expected a list of integers, one of which may be a list of sizes, or null"),
        ("x", 'expected an object with keys, got "x"'),
    ],
)
def test_findings_name_the_spec_and_leave_the_given_config_alone(spec: Any, message: str) -> None:
    given = config_of(SPEC, spec)
    before = copy.deepcopy(given)
    with pytest.raises(ConfigError) as error:
        load_config(given)
    assert message in str(error.value)
    assert "tensor_parallel.partition_config.layer_specs.1" in str(error.value)
    assert given == before


def test_a_list_is_expected() -> None:
    with pytest.raises(ConfigError, match="expected a list of objects, got true"):
        load_config({"tensor_parallel": {"partition_config": {"layer_specs": True}}})


def test_findings_have_a_place_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"tensor_parallel": {"partition_config": {"layer_specs": [\n  {"patterns": 3}]}}}')
    with pytest.raises(ConfigError, match=r"ds\.json:2:16"):
        load_config(path)


def test_auto_within_a_spec_is_resolved() -> None:
    given = {**config_of({"gather_output": "auto"}), "train_batch_size": 2}
    config, choices = resolve_auto(load_config(given).config, AutoFacts(world_size=2))
    partition = config.tensor_parallel.partition_config
    assert partition is not None
    assert partition.layer_specs[0].gather_output is False
    assert "tensor_parallel.partition_config.layer_specs[0].gather_output" in [choice.key for choice in choices]
