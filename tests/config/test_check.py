"""What a config may say and what is said about mistakes: each with its place, all at once."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import ConfigError
from launcher.config.fields import AUTO, Auto
from launcher.config.load import load_config
from launcher.config.schema_params import REFUSED_OPTIMIZERS, WORKING_OPTIMIZERS

GOOD: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}},
}


def findings(text: str, *, world_size: int | None = None) -> list[str]:
    """Load JSON text and return its errors, "config:" left out."""
    with pytest.raises(ConfigError) as caught:
        load_config(text, world_size=world_size)
    return [str(diagnostic).removeprefix("config:") for diagnostic in caught.value.diagnostics]


def test_a_good_config_keeps_its_values_and_fills_in_the_rest() -> None:
    config = load_config(GOOD, world_size=4).config
    assert config.zero_optimization.stage == 2
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.bf16.enabled is True
    assert config.gradient_clipping == 1.0
    assert config.steps_per_print == 10
    assert config.optimizer is not None
    assert config.optimizer.params["weight_decay"] == 0.0
    assert config.scheduler is not None
    assert config.scheduler.params["warmup_max_lr"] == 0.001


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  "zero_optimzation": {}\n}', '2:3: unknown key "zero_optimzation"; did you mean "zero_optimization"?'),
        (
            '{"zero_optimization": {"stage": 2,\n "reduce_bucket_sise": 3}}',
            '2:2: unknown key "reduce_bucket_sise"; did you mean "reduce_bucket_size"?',
        ),
        (
            '{"zero_optimization": {"offload_param": {"devise": "cpu"}}}',
            '1:42: unknown key "devise"; did you mean "device"?',
        ),
        (
            '{"optimizer": {"type": "AdamW", "params": {"lrr": 1}}}',
            '1:44: optimizer.params: unknown key "lrr"; did you mean "lr"?',
        ),
        (
            '{"optimizer": {"type": "AdmW"}}',
            '1:24: unknown optimizer type "AdmW"; did you mean "AdamW"?',
        ),
        (
            '{"scheduler": {"type": "WarmupLRR"}}',
            '1:24: unknown scheduler type "WarmupLRR"; did you mean "WarmupLR"?',
        ),
        (
            '{"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}}',
            '1:47: scheduler.params: unknown key "warmup_steps"; did you mean "warmup_num_steps"?',
        ),
        (
            '{"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}',
            '1:43: optimizer.params: unknown key "max_grad_norm"; use gradient_clipping',
        ),
        (
            '{"scheduler": {"type": "WarmupDecayLR", "params": {}}}',
            '1:51: WarmupDecayLR needs "total_num_steps"; add "total_num_steps" to scheduler.params',
        ),
        (
            '{"optimizer": {"params": {}}}',
            '1:15: optimizer: "type" is missing; one of ' + ", ".join(WORKING_OPTIMIZERS),
        ),
        (
            '{"train_batch_size": 1,\n "train_batch_size": 2}',
            '2:2: duplicate key "train_batch_size"; the first one is on line 1; remove one of them',
        ),
        ('{"train_batch_size": "8"}', '1:22: train_batch_size: expected an integer of at least 1, or null, got "8"'),
        ('{"train_batch_size": true}', "1:22: train_batch_size: expected an integer of at least 1, or null, got true"),
        ('{"train_batch_size": 1.5}', "1:22: train_batch_size: expected an integer of at least 1, or null, got 1.5"),
        ('{"gradient_clipping": -1}', "1:23: gradient_clipping: expected a number of at least 0, got -1"),
        ('{"bf16": {"enabled": 2}}', "1:22: enabled: expected true or false, got 2"),
        ('{"bf16": 3}', "1:10: expected an object with keys, got 3"),
        ('{"zero_optimization": {"stage": 4}}', "1:33: stage: expected a stage: 0, 1, 2 or 3, got 4"),
        (
            '{"fp16": {"enabled": true}, "amp": {"enabled": true}}',
            "1:48: fp16 and amp are both enabled; enable one of them",
        ),
        (
            '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}',
            '1:56: offload_optimizer "cpu" needs stage 1, 2 or 3, not 0; set "stage": 3, or remove offload_optimizer',
        ),
        (
            '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}',
            '1:68: offload_optimizer "nvme" needs a folder; add "nvme_path" to offload_optimizer: a folder on the fast'
            " disk of each host",
        ),
        (
            '{"optimizer": {"type": "Adafactor"}}',
            "1:24: optimizer type Adafactor is not supported: it keeps sums of whole rows and columns; "
            "pass it as an object under stage 0, or use an elementwise one such as AdamW or Lion",
        ),
        (
            '{"bf16": {}, "bfloat16": {}}',
            '1:14: "bfloat16" and "bf16" are the same key; remove one',
        ),
        ("{} x", "1:4: text after the end of the config"),
        ('{"a": NaN}', "1:7: unexpected NaN; strings need double quotes; true, false and null are small letters"),
        ('{"a" 1}', '1:6: expected : after key "a"'),
        ('{"a": 1 "b": 2}', "1:9: expected , or }; a comma may be missing on the line before"),
        (
            "{'a': 1}",
            "1:2: expected a key in double quotes or }; HJSON, which needs no quotes, is read"
            " where the package hjson is installed: pip install hjson",
        ),
        ('{"a": "x\n"}', "1:7: a string that does not end on its line"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "1:71: nested deeper than 64 levels"),
        ('{"a":', "1:6: the text ends where a value is expected"),
    ],
)
def test_one_mistake_is_one_finding_with_its_place(text: str, expected: str) -> None:
    assert findings(text) == [expected]


@pytest.mark.parametrize(
    ("type_name", "params", "expected"),
    [
        ("AdmW", '{"lrr": 1}', ['1:43: optimizer.params: unknown key "lrr"; did you mean "lr"?']),
        ("AdmW", '{"lr": "x"}', ["1:49: lr: expected a number"]),
        (
            "Zebra",
            '{"lr": 1, "stripes_": 1}',
            ['1:53: optimizer.params: unknown key "stripes_"; no optimizer takes it'],
        ),
        ("Zebra", '{"lr": 1, "betas": [1, 2]}', []),
    ],
)
def test_params_of_an_unknown_type_are_looked_at(type_name: str, params: str, expected: list[str]) -> None:
    first, *others = findings(f'{{"optimizer": {{"type": "{type_name}", "params": {params}}}}}')
    assert f'unknown optimizer type "{type_name}"' in first
    assert [finding[: len(wanted)] for finding, wanted in zip(others, expected, strict=True)] == expected


def test_all_mistakes_of_a_text_come_together_in_its_order() -> None:
    text = """{
      "fp16": {"enabled": 2},
      "bf16": {"enabled": true},
      "gradient_cliping": 1.0,
      "zero_optimization": {"stage": "two", "stage3_max_live_parameter": 1},
      "optimizer": {"type": "AdamW", "params": {"lr": "fast", "decay": 1}}
    }"""
    found = findings(text)
    assert [line.split(":")[0] for line in found] == ["2", "4", "5", "5", "6", "6"]
    assert "enabled: expected true or false" in found[0]
    assert "gradient_clipping" in found[1]


RULES = [  # two keys that contradict each other, and what is said
    ('"fp16": {"enabled": true}, "amp": {"enabled": true}', "fp16 and amp are both enabled"),
    ('"zero_optimization": {"offload_optimizer": {"device": "cpu"}}', 'offload_optimizer "cpu" needs stage 1, 2 or 3'),
    ('"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}', 'offload_param "nvme" needs a folder'),
    ('"gradient_predivide_factor": 2, "prescale_gradients": true', "prescale_gradients divides before sending too"),
    ('"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": 2}', "OneBitAdam cannot run at ZeRO stage 2"),
    ('"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2', "train_batch_size 3 is not divisible"),
]
WRONG_KEYS = [  # a mistake in one key, and what is said
    ('"nothing_like_it": 1', 'unknown key "nothing_like_it"'),
    ('"steps_per_print": "many"', "steps_per_print: expected an integer"),
    ('"csv_monitor": 3', "expected an object with keys, got 3"),
    ('"sparse_attention": {}', "sparse_attention is not supported"),
    ('"scheduler": {"type": "WarmupLRR"}', 'unknown scheduler type "WarmupLRR"'),
    ('"scheduler": {"type": "WarmupLR", "params": {"warmup": 1}}', 'scheduler.params: unknown key "warmup"'),
]


@pytest.mark.parametrize(("rule", "broken"), RULES)
@pytest.mark.parametrize(("wrong", "expected"), WRONG_KEYS)
def test_rules_between_keys_are_checked_beside_wrong_keys(wrong: str, expected: str, rule: str, broken: str) -> None:
    size = "" if "train_batch" in rule else '"train_micro_batch_size_per_gpu": 1,\n'
    found = findings("{" + size + wrong + ",\n" + rule + "}", world_size=4)
    assert len(found) == 2, found
    assert expected in found[0]
    assert broken in found[1]


@pytest.mark.parametrize(
    ("wrong", "others"),
    [
        ('"zero_optimization": {"stage": "three", "offload_param": {"device": "cpu"}}', ""),
        ('"zero_optimization": {"stagee": 3, "offload_param": {"device": "cpu"}}', ""),
        ('"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_pth": "/nvme"}}', ""),
        ('"zero_optimization": {"stage": 3, "offload_optimizer": {"devise": "cpu", "delayed_update": true}}', ""),
        (
            '"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "delayed_update": true}}, ',
            "wrong",
        ),
        ('"fp16": 3', '"data_types": {"param_dtype": "fp16", "grad_accum_dtype": "fp16"}'),
        ('"fp61": {"enabled": true}', '"data_types": {"param_dtype": "fp16"}'),
        ('"bf16": {"enabled": true, "bf16_master_weights_and_grad": true, "bf16_optimizer_states": true}', ""),
        ('"gradient_predivide_factor": "2"', '"prescale_gradients": true'),
        ('"train_micro_batch_size_per_gpu": "2"', ""),
        ('"train_batch_sise": 8', ""),
        ('"elastcity": {"enabled": true, "max_train_batch_size": 8, "micro_batch_sizes": [2]}', ""),
        ('"elasticity": {"enabled": true, "max_train_batch_size": "8", "micro_batch_sizes": [3]}', ""),
    ],
)
def test_no_rule_holds_a_default_against_a_key_that_is_wrong(wrong: str, others: str) -> None:
    """What the author meant by it is not known."""
    if others == "wrong":
        wrong, others = wrong.rstrip(", "), '"optimizer": {"type": "Lmb"}'
    sizes = "" if "batch_si" in wrong else '"train_micro_batch_size_per_gpu": 1'
    found = findings("{" + ", ".join(part for part in (wrong, others, sizes) if part) + "}", world_size=4)
    assert len(found) == 1, found


def test_values_left_to_a_trainer_contradict_nothing() -> None:
    load_config(
        {
            "fp16": {"enabled": "auto"},
            "bf16": {"enabled": "auto"},
            "data_types": {"param_dtype": "fp16", "grad_accum_dtype": "auto"},
            "gradient_predivide_factor": "auto",
            "prescale_gradients": True,
            "zero_optimization": {"stage": 2, "offload_param": {"device": "auto"}},
        }
    )


def test_every_problem_of_one_key_is_said() -> None:
    found = findings('{"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "nvme"}}}')
    assert len(found) == 2
    assert "needs stage 1, 2 or 3" in found[0]
    assert "needs a folder" in found[1]


def test_fp16_together_with_bf16_is_named() -> None:
    found = findings('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}')
    assert any("fp16 and bf16 are both enabled" in line for line in found)


def test_autocast_may_be_that_of_a_bf16_model() -> None:
    def both(precision: str, dtype: str) -> str:
        return json.dumps({precision: {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": dtype}})

    load_config({"train_micro_batch_size_per_gpu": 1, **json.loads(both("bf16", "torch.bfloat16"))})
    for precision, dtype in (("bf16", "half"), ("fp16", "torch.float16")):
        assert any("are both enabled" in line for line in findings(both(precision, dtype)))


@pytest.mark.parametrize(
    ("sizes", "world_size", "expected"),
    [
        ((100, 8, 4), 4, "train_batch_size 100 ≠ 8 (micro) × 4 (accumulation) × 4 (ranks) = 128"),
        ((100, 8, None), 4, "train_batch_size 100 is not divisible by 8 (micro) × 4 (ranks) = 32"),
        ((3, None, None), 4, "train_batch_size 3 is not divisible by 1 (accumulation) × 4 (ranks) = 4"),
        ((None, None, 4), 4, "neither train_batch_size nor train_micro_batch_size_per_gpu is given"),
        ((100, 8, 4), None, "train_batch_size 100 is not a multiple of 8 (micro) × 4 (accumulation)"),
        ((32, 8, 8), None, "train_batch_size 32 is not a multiple of 8 (micro) × 8 (accumulation)"),
    ],
)
def test_a_broken_batch_equation_is_printed(
    sizes: tuple[int | None, ...], world_size: int | None, expected: str
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    data = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    (found,) = findings(json.dumps(data), world_size=world_size)
    assert expected in found


def test_keys_without_effect_are_reported_and_only_those() -> None:
    text = '{"zero_optimization": {"stage": 2,\n "contiguous_gradients": false, "overlap_comm": true}}'
    (notice,) = load_config(text).notices
    assert notice.where == "config:2:2"
    assert "contiguous_gradients false has no effect" in notice.message


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_key_that_tunes_stage_3_is_reported_at_another_stage(stage: int) -> None:
    (notice,) = load_config({"zero_optimization": {"stage": stage, "stage3_max_live_parameters": 5}}).notices
    expected = "zero_optimization.stage3_max_live_parameters 5 has no effect: it tunes stage 3"
    assert notice.message == expected
    assert load_config({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 5}}).notices == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"sparse_attention": {"mode": "fixed"}}', "sparse_attention is not supported"),
        ('{"sparse_attention": {}}', "sparse_attention is not supported"),
        ('{"weight_quantization": {"num_bits": 8}}', "weight_quantization is not supported"),
        ('{"quantize_training": {}}', "quantize_training is not supported"),
        ('{"datastates_ckpt": {}}', "datastates_ckpt is not supported"),
        ('{"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}', "zero_optimization.zenflow is not supported"),
        ('{"zero_optimization": {"zenflow": {}}}', "zero_optimization.zenflow is not supported"),
        ('{"zero_optimization": {"zeropp_loco_param": {"err_beta": 0.8}}}', "zeropp_loco_param is not supported"),
        (
            '{"compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": true}}}}',
            "compression_training.sparse_pruning is not supported",
        ),
        (
            '{"compression_training": {"layer_reduction": {"enabled": true, "keep_number_layer": 5}}}',
            "compression_training.layer_reduction is not supported",
        ),
    ],
)
def test_a_section_whose_presence_turns_it_on_is_refused_whatever_it_holds(text: str, expected: str) -> None:
    (found,) = findings(text)
    assert expected in found
    assert "remove the" in found
    (notice,) = load_config(text, for_planning=True).notices
    assert expected in notice.message


@pytest.mark.parametrize(
    "data",
    [
        {"sparse_attention": None},
        {"weight_quantization": {"enabled": False, "num_bits": 4}},
        {"zero_optimization": {"zenflow": None, "zeropp_loco_param": None}},
        {"compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": False}, "different_groups": {}}}},
        {"compression_training": {"layer_reduction": {"enabled": False}, "row_pruning": {}}},
        {"compression_training": {}},
    ],
)
def test_a_section_that_is_off_is_not_refused(data: dict[str, Any]) -> None:
    assert load_config(data).notices == ()


def test_a_section_without_effect_that_its_presence_turns_on_is_said() -> None:
    (notice,) = load_config({"checkpoint": {"writer": {}}}).notices
    assert notice.message.startswith("checkpoint.writer has no effect: every rank writes its file itself")


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"save_every": 5}, "save_every 5 needs a folder"),
        ({"save_every": 5, "folder": ""}, "save_every 5 needs a folder"),
        ({"folder": "d", "keep_last": 2}, "keep_last 2 needs save_every"),
        ({"folder": "d", "save_every": 5, "keep_every": 10}, "keep_every 10 has nothing to protect"),
        ({"folder": "d", "save_every": 5, "keep_last": 2, "keep_every": 12}, "is not a multiple of save_every 5"),
        ({"folder": "d", "save_every": 0}, "expected an integer of at least 1"),
    ],
)
def test_keys_about_checkpoints_that_need_others(section: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config({"checkpoint": section})


def test_keys_about_checkpoints_that_fit_together() -> None:
    section = {"folder": "d", "save_every": 5, "keep_last": 2, "keep_every": 10, "async": True}
    loaded = load_config({"checkpoint": section})
    assert loaded.config.checkpoint.asynchronous is True
    assert loaded.notices == ()
    assert load_config({"checkpoint": {"folder": "d"}}).config.checkpoint.save_every is None
    assert load_config({"checkpoint": {"load_universal": True}}).notices[0].message == (
        "checkpoint.load_universal true has no effect: every checkpoint loads at any world size"
    )


def test_auto_on_a_key_without_effect_is_not_reported() -> None:
    zero = {"stage": 2, "contiguous_gradients": "auto", "stage3_max_live_parameters": "auto"}
    assert load_config({"zero_optimization": zero}).notices == ()


def test_of_several_errors_of_a_key_its_type_is_said() -> None:
    """A key that is not supported and has a value of the wrong type: two errors at one place."""
    assert findings('{"zero_optimization": {"stage": 2, "legacy_stage1": 3}}') == [
        "1:53: legacy_stage1: expected true or false, got 3"
    ]


@pytest.mark.parametrize("name", REFUSED_OPTIMIZERS)
def test_a_refused_type_is_never_proposed(name: str) -> None:
    for wrong in (f"{name}X", f"Fused{name}", name[:-1]):
        (found,) = findings(json.dumps({"optimizer": {"type": wrong}}))
        assert name not in re.findall(r'did you mean "(.*)"', found)


def test_a_section_that_is_off_may_hold_anything_known() -> None:
    load_config({"fp16": {"enabled": False, "loss_scale": 128}, "flops_profiler": {"enabled": False, "top_modules": 3}})


def test_other_names_of_keys() -> None:
    config = load_config({"bfloat16": {"enabled": True}, "zero_optimization": {"max_live_parameters": 5}}).config
    assert config.bf16.enabled is True
    assert config.zero_optimization.stage3_max_live_parameters == 5
    assert load_config({"zero_optimization": True}).config.zero_optimization.stage == 1


def test_auto_is_a_value_of_its_own_type() -> None:
    value = load_config({"train_micro_batch_size_per_gpu": "auto"}).config.train_micro_batch_size_per_gpu
    assert isinstance(value, Auto)
    assert value == AUTO


@pytest.mark.parametrize("name", ["c.json", "c.yaml", "c.yml"])
def test_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(GOOD))
    assert load_config(path).config == load_config(str(path)).config == load_config(GOOD).config


def test_yaml_places_and_numbers(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("optimizer:\n  type: AdamW\n  params:\n    lr: 1e-3\n    betta: [0.9, 0.9]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (finding,) = caught.value.diagnostics
    assert finding.where == f"{path}:5:5"
    path.write_text("a: [1\n")
    with pytest.raises(ConfigError, match="invalid YAML"):
        load_config(path)


def test_text_and_base64() -> None:
    text = json.dumps(GOOD)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert load_config(text).config == load_config(encoded).config


def test_comments_tabs_and_windows_files(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b'\xef\xbb\xbf{\r\n\t"bf16": {"enabled": true}, // mixed\r\n\t/* more */ # more\r\n}\r\n')
    assert load_config(path).config.bf16.enabled is True


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"", "is empty"), (b"\xff\xfe\x00", "not UTF-8"), (b"[1]", "an object with keys")],
)
def test_files_that_hold_no_config(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "c.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"amp": {"enabled": true, "opt_level": "O3"}}',
            "amp.opt_level O3 keeps no fp32 weights, which does not train; use O1 or O2, or the fp16 section",
        ),
        (
            '{"fp16": {"enabled": true, "min_loss_scale": 0}}',
            "min_loss_scale 0 would end in a loss scale of 0; use 1, the default",
        ),
        (
            '{"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16"}}',
            "gradients of a model in bf16 cannot be summed in fp16; use fp32",
        ),
        (
            '{"bf16": {"enabled": true, "bf16_optimizer_states": true}}',
            'bf16_optimizer_states needs bf16 master weights; add "bf16_master_weights_and_grads": true',
        ),
        (
            '{"bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true},'
            ' "data_types": {"grad_accum_dtype": "fp32"}}',
            "bf16_optimizer_states needs gradient sums in bf16; remove data_types.grad_accum_dtype",
        ),
        (
            '{"data_types": {"param_dtype": "bf16"}}',
            "param_dtype bf16 contradicts the other keys: the model is fp32; "
            'enable the bf16 section, or remove "param_dtype"',
        ),
        ('{"gradient_predivide_factor": 0}', "gradient_predivide_factor 0 divides by zero; use 1, the default"),
        (
            '{"gradient_predivide_factor": 2, "prescale_gradients": true}',
            "prescale_gradients divides before sending too; use one of them",
        ),
        ('{"amp": {"loss_scale": 0}}', 'loss_scale: expected "dynamic" or a number above 0, got 0'),
    ],
)
def test_precisions_that_contradict_each_other(text: str, expected: str) -> None:
    (found,) = findings(text)
    assert found.split(": ", 1)[1] == expected
