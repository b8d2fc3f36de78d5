"""Older names, forms and places of keys become the new ones, and everything else reads those alone."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import ConfigError
from launcher.config.fields import Support, status_of
from launcher.config.load import LoadedConfig, load_config
from launcher.config.schema import ZeroOptimization

LAUNCHER = Path(__file__).resolve().parents[2] / "launcher"
OLD_KEYS = {
    name for name in ZeroOptimization.model_fields if status_of(ZeroOptimization, name).support is Support.RENAMED
}


def load(zero: dict[str, Any], **others: Any) -> LoadedConfig:
    return load_config(json.dumps({"zero_optimization": zero, **others}))


def said(loaded: LoadedConfig) -> list[str]:
    return [str(notice) for notice in loaded.notices]


def refused(zero: dict[str, Any], **others: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(zero, **others)
    return [str(diagnostic).removeprefix("config:") for diagnostic in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"stage": 2, "cpu_offload": True}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
        ({"stage": 2, "cpu_offload": False}, {"stage": 2}),
        ({"stage": 2, "cpu_offload": None}, {"stage": 2}),
        ({"stage": 3, "cpu_offload_param": True}, {"stage": 3, "offload_param": {"device": "cpu"}}),
        ({"stage": 3, "cpu_offload_params": True}, {"stage": 3, "offload_param": {"device": "cpu"}}),
        (
            {"stage": 2, "cpu_offload": True, "offload_optimizer": {"ratio": 0.5}},
            {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        ),
        (
            {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "auto"}},
            {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        ),
        (
            {"stage": 3, "cpu_offload": True, "cpu_offload_param": True, "cpu_offload_use_pin_memory": False},
            {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
                "offload_param": {"device": "cpu", "pin_memory": False},
            },
        ),
        (
            {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True},
            {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        ),
        (True, {"stage": 1}),
    ],
)
def test_old_forms_are_the_new_ones(old: Any, new: dict[str, Any]) -> None:
    assert load(old).config == load(new).config


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (
            {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "none"}},
            '1:36: cpu_offload true contradicts offload_optimizer.device "none"; '
            'remove it: it is the old name of offload_optimizer.device "cpu"',
        ),
        (
            {
                "stage": 2,
                "cpu_offload_use_pin_memory": True,
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
            },
            "1:36: cpu_offload_use_pin_memory true contradicts offload_optimizer.pin_memory false; "
            "remove it: it is the old name of pin_memory",
        ),
        ({"cpu_offload": 2}, "1:39: cpu_offload: expected true, false or null, got 2"),
        (
            {"stage": 0, "cpu_offload": True},
            '1:51: offload_optimizer "cpu" needs stage 1, 2 or 3, not 0; set "stage": 3, or remove offload_optimizer',
        ),
        ({"max_live_parameters": "x"}, '1:47: max_live_parameters: expected an integer of at least 0, got "x"'),
    ],
)
def test_what_is_wrong_with_an_old_key_is_said_where_it_was_written(zero: dict[str, Any], expected: str) -> None:
    assert refused(zero) == [expected]


def test_a_section_under_its_other_name_has_places_too() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config('{"bfloat16": {\n "enabled": 2}}')
    assert str(caught.value.diagnostics[0]) == "config:2:13: enabled: expected true or false, got 2"


def test_pinning_of_nothing_is_said() -> None:
    (notice,) = said(load({"stage": 2, "cpu_offload_use_pin_memory": False}))
    assert notice.endswith("cpu_offload_use_pin_memory false has no effect: nothing is offloaded")


# ---- aio ----

AIO = {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True}
ON_DISK = {"device": "nvme", "nvme_path": "/nvme"}


def test_aio_inside_zero_optimization_is_the_section_of_the_top_level() -> None:
    """As the guides to ZeRO-Infinity write it."""
    zero = {"stage": 3, "offload_optimizer": ON_DISK, "offload_param": ON_DISK}
    inside = load({**zero, "aio": AIO})
    assert inside.config == load(zero, aio=AIO).config
    assert (inside.config.aio.block_size, inside.config.aio.intra_op_parallelism) == (262144, 1)
    (notice,) = said(inside)
    assert notice.endswith("zero_optimization.aio is read as the section aio of the top level, where it belongs")


def test_what_is_wrong_in_such_an_aio_has_its_place() -> None:
    assert refused({"aio": {"queue_dept": 1}}) == ['1:32: unknown key "queue_dept"; did you mean "queue_depth"?']
    assert refused({"aio": 3}) == ["1:31: expected an object with keys, got 3"]
    (both,) = refused({"aio": AIO}, aio=AIO)
    assert "aio is given twice, at the top level and inside zero_optimization" in both


# ---- counts of elements ----


@pytest.mark.parametrize(
    ("zero", "name", "value"),
    [
        ({"stage": 3, "stage3_prefetch_bucket_size": 0.9 * 2048 * 2048}, "stage3_prefetch_bucket_size", 3774874),
        ({"stage": 3, "prefetch_bucket_size": 0.9 * 2048 * 2048}, "stage3_prefetch_bucket_size", 3774874),
        ({"reduce_bucket_size": 1e6 + 0.25}, "reduce_bucket_size", 1_000_000),
        ({"sub_group_size": 5e8}, "sub_group_size", 500_000_000),
    ],
)
def test_a_fraction_that_a_formula_leaves_of_elements_is_rounded_and_said(
    zero: dict[str, Any], name: str, value: int
) -> None:
    loaded = load(zero)
    found = getattr(loaded.config.zero_optimization, name)
    assert (found, type(found)) == (value, int)
    (key, given), *_ = [(key, given) for key, given in zero.items() if key != "stage"]
    expected = [f"zero_optimization.{key} {given!r} is rounded to {value}"] if given != value else []
    assert [line.partition(": ")[2] for line in said(loaded)] == expected


@pytest.mark.parametrize("value", [0.4, -1.5, "1.5", True])
def test_no_other_number_is_rounded(value: Any) -> None:
    (found,) = refused({"reduce_bucket_size": value})
    assert "reduce_bucket_size: expected an integer of at least 1" in found


def test_numbers_of_samples_and_steps_are_never_rounded() -> None:
    for name in ("train_batch_size", "gradient_accumulation_steps", "steps_per_print"):
        with pytest.raises(ConfigError, match=f"{name}: expected an integer"):
            load_config({name: 2.5})


# ---- the rest of the package ----


def test_nothing_else_reads_an_old_key() -> None:
    sources = {path: path.read_text() for path in LAUNCHER.rglob("*.py")}
    readers = {
        path.relative_to(LAUNCHER).as_posix()
        for path, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Attribute) and node.attr in OLD_KEYS)
        or (isinstance(node, ast.Constant) and node.value in OLD_KEYS)
    }
    assert readers == {"config/check.py"}
    loaded = load({"stage": 3, **dict.fromkeys(OLD_KEYS, True)})
    assert [getattr(loaded.config.zero_optimization, key) for key in OLD_KEYS] == [None, None, None]


def test_infinitely_many_steps_between_lines_are_no_lines() -> None:
    assert load_config({"steps_per_print": float("inf")}).config.steps_per_print == 0


def test_a_dotted_key_beside_its_section_is_a_key_of_the_section() -> None:
    """trl fills in the config of a reference model so."""
    loaded = load(
        {"stage": 3, "reduce_bucket_size": 100},
        **{"zero_optimization.reduce_bucket_size": 64, "zero_optimization.stage3_prefetch_bucket_size": 57.6},
    )
    zero = loaded.config.zero_optimization
    assert (zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size) == (100, 58)
    assert [line for line in said(loaded) if "has no effect" in line] == [
        'config:1:64: "zero_optimization.reduce_bucket_size" 64 has no effect: zero_optimization has its own'
        " reduce_bucket_size, 100"
    ]
    assert load_config({"zero_optimization.stage": 2}).config.zero_optimization.stage == 2


def test_a_dotted_key_that_no_section_has_is_unknown() -> None:
    (message,) = refused({"stage": 3}, **{"zero_optimization.bucket": 64})
    assert 'unknown key "zero_optimization.bucket"' in message
