"""The reference page, the schema and the code agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from harness.section_reads import keys_read

from launcher.cli.commands.config import config_group
from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.elastic import ElasticRules
from launcher.config.fields import Section, Support, section_of, status_of
from launcher.config.load import load_config
from launcher.config.reference import all_keys, markdown
from launcher.config.schema import Config
from launcher.config.schema_other import FlopsProfiler
from launcher.config.schema_params import (
    ONE_BIT_OPTIMIZERS,
    OPTIMIZER_PARAMS,
    REFUSED_OPTIMIZERS,
    SCHEDULER_PARAMS,
    WORKING_OPTIMIZERS,
    WORKING_SCHEDULERS,
)
from launcher.optim.catalog import BY_NAME
from launcher.optim.factory import MUP_TYPES
from launcher.optim.onebit.algorithms import ONE_BIT
from launcher.optim.schedules import SCHEDULES, schedule_from_config

ROOT = Path(__file__).resolve().parents[2]
READERS = ("config/policies.py", "activation", "comm", "engine", "monitor", "optim", "parallel", "storage", "zero")
COMET_NAMES = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
# Keys whose owner has no type that an annotation or an assignment shows: the file that reads each, and its words there.
READ_ELSEWHERE = {
    "dump_state": ("engine/announce.py", "if parts.settings.dump_state:"),
    "tf32": ("engine/build.py", "set_tf32(settings.tf32)"),
    "zero_force_ds_cpu_optimizer": ("engine/optimizer_plan.py", "settings.zero_force_ds_cpu_optimizer"),
    "data_types.param_dtype": ("config/rules.py", "given = config.data_types.param_dtype"),
    **{f"comet.{name}": ("monitor/curves.py", f'"{name}"') for name in COMET_NAMES},
    **{f"elasticity.{name}": ("config/elastic.py", name) for name in ElasticRules.__dataclass_fields__},
    "data_parallel_size": ("config/equations.py", "config.data_parallel_size"),
    "tensor_parallel.autotp_size": ("config/equations.py", "tensor.autotp_size"),
    "tensor_parallel.tp.tp_size": ("config/equations.py", "tensor.tp.tp_size"),
    "expert_parallel.enabled": ("config/equations.py", "section.enabled is True"),
    "expert_parallel.autoep_size": ("config/equations.py", "section.autoep_size"),
    "tensor_parallel.across_nodes": ("config/equations.py", "config.tensor_parallel.across_nodes"),
    "pipeline.stages": ("config/equations.py", "_decided(config.pipeline.stages)"),
    "pipeline.schedule": (
        "config/rules.py",
        "PipelinePlan(section.stages, section.virtual_stages, section.sch",
    ),
    "pipeline.virtual_stages": ("config/rules.py", "PipelinePlan(section.stages, section.virtual_stages"),
    "elasticity.enabled": ("config/elastic.py", "config.elasticity.enabled is True"),
    "elasticity.ignore_non_elastic_batch_info": ("config/check.py", "config.elasticity.ignore_non_elastic_batch_info"),
    "log_level": ("engine/build.py", "setLevel(settings.log_level.upper())"),
}


def test_the_page_is_generated_from_the_schema() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == markdown(), "run `make docs`"


def test_every_key_has_a_meaning_and_a_status() -> None:
    for fact in all_keys():
        assert fact.doc, fact.path
        assert fact.status.startswith(tuple(support.value for support in Support)), fact.path


def _working(section: type[Section], prefix: str) -> Iterator[tuple[type[Section], str, str]]:
    """Yield section, key and dotted path of every key that works."""
    for name in section.model_fields:
        inner = section_of(section, name)
        if inner is not None:
            yield from _working(inner, f"{prefix}{name}.")
        elif status_of(section, name).support is Support.WORKS:
            yield section, name, f"{prefix}{name}"


def test_every_key_that_works_is_read_by_the_engine() -> None:
    read = set().union(*(keys_read(ROOT / "launcher" / room) for room in READERS))
    assert [
        path
        for section, name, path in _working(Config, "")
        if path not in READ_ELSEWHERE and (section, name) not in read
    ] == []


@pytest.mark.parametrize("path", READ_ELSEWHERE)
def test_keys_without_a_visible_owner_are_read_where_the_table_says(path: str) -> None:
    file, words = READ_ELSEWHERE[path]
    assert words in (ROOT / "launcher" / file).read_text()


def test_a_key_of_another_section_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "def profile(section: FlopsProfiler, config: Config):\n    return section.enabled\n"
    )
    assert keys_read(tmp_path) == {(FlopsProfiler, "enabled")}


def test_schedules_that_work_exist_and_take_their_parameters() -> None:
    assert set(SCHEDULES) < set(WORKING_SCHEDULERS)
    for name in WORKING_SCHEDULERS:
        section = SCHEDULER_PARAMS[name]
        given: dict[str, Any] = {key: 10 for key, field in section.model_fields.items() if field.is_required()}
        given |= {"milestones": [3, 5]} if "milestones" in given else {}
        given |= {"total_steps": 20} if "total_steps" in section.model_fields else {}
        params = dict(section.model_validate(given))
        optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.1)
        schedule = schedule_from_config(name, params, optimizer)
        optimizer.step()
        schedule.step()


def test_optimizers_that_work_exist_and_every_other_one_is_refused_with_a_reason() -> None:
    assert set(WORKING_OPTIMIZERS) == set(BY_NAME) | set(ONE_BIT) | {"Muon"} | set(MUP_TYPES)
    assert set(ONE_BIT_OPTIMIZERS) == set(ONE_BIT)
    assert set(OPTIMIZER_PARAMS) == set(WORKING_OPTIMIZERS)
    assert not set(OPTIMIZER_PARAMS) & set(REFUSED_OPTIMIZERS)
    classes = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)} - {"Optimizer"}
    assert classes <= set(WORKING_OPTIMIZERS) | set(REFUSED_OPTIMIZERS)


def test_auto_becomes_facts_or_defaults_and_says_so() -> None:
    text = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "auto"}},
    }
    config, choices = resolve_auto(load_config(text).config, AutoFacts(micro_batch_size=4, hidden_size=1024, lr=2e-5))
    chosen = {choice.key: choice.value for choice in choices}
    assert chosen == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization.reduce_bucket_size": 1024 * 1024,
        "zero_optimization.overlap_comm": None,
        "optimizer.params.lr": 2e-5,
        "optimizer.params.eps": 1e-8,
    }
    assert config.zero_optimization.reduce_bucket_size == 1024 * 1024
    assert config.optimizer is not None
    assert config.optimizer.params["lr"] == 2e-5
    assert all(choice.reason for choice in choices)


def test_auto_without_a_value_is_an_error() -> None:
    config = load_config({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}).config
    with pytest.raises(Exception, match=r"scheduler\.params\.total_num_steps"):
        resolve_auto(config, AutoFacts())


def test_auto_sizes_follow_from_the_batch_equation() -> None:
    sizes = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}
    config, choices = resolve_auto(load_config(sizes).config, AutoFacts(world_size=3, accumulation_steps=2))
    assert config.train_batch_size == 24
    assert {choice.key: choice.reason for choice in choices} == {
        "train_batch_size": "the batch equation",
        "gradient_accumulation_steps": "the trainer's accumulation",
    }


def test_ranks_of_one_model_count_once_in_an_automatic_batch() -> None:
    sizes = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4}
    config, _ = resolve_auto(load_config(sizes).config, AutoFacts(world_size=8, model_size=2))
    assert config.train_batch_size == 16


@pytest.mark.parametrize(
    "key", ["scheduler.params.total_num_steps", "optimizer.params.lr", "optimizer.params[AdamW].lr"]
)
def test_a_key_of_params_is_explained_by_the_path_that_errors_print(key: str) -> None:
    found = CliRunner().invoke(config_group, ["explain", key])
    assert found.exit_code == 0, found.output
    assert "[" in found.output.splitlines()[0]
    headings = [line for line in found.output.splitlines() if not line.startswith(" ")]
    facts = json.loads(CliRunner().invoke(config_group, ["explain", key, "--json"]).output)
    assert len(headings) < len(facts) or "AdamW" in key, "what is the same for several types is said once"


def test_a_key_is_explained_by_the_end_of_its_path() -> None:
    found = CliRunner().invoke(config_group, ["explain", "offload_param.device", "--json"])
    assert [fact["path"] for fact in json.loads(found.output)] == ["zero_optimization.offload_param.device"]
    several = CliRunner().invoke(config_group, ["explain", "device", "--json"])
    paths = [fact["path"] for fact in json.loads(several.output)]
    assert {"zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.device"} <= set(paths)
    assert all(path.endswith(".device") for path in paths)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}', 'the batch size is "auto"'),
        ("{}", "the batch size is not given"),
        ('{"train_batch_size": 8}', None),
        ('{"train_micro_batch_size_per_gpu": 8, "train_batch_size": "auto"}', None),
        ('{"elasticity": {"enabled": true, "max_train_batch_size": 8, "micro_batch_sizes": [2]}}', None),
    ],
)
def test_check_says_what_a_trainer_must_fill_in(tmp_path: Path, text: str, message: str | None) -> None:
    (tmp_path / "ds.json").write_text(text)
    result = CliRunner().invoke(config_group, ["check", str(tmp_path / "ds.json")])
    assert result.exit_code == 0, result.output
    assert ("for a Trainer to fill in" in result.output) == (message is not None)
    assert (message or "ok") in result.output


def test_check_lists_errors_of_all_kinds_and_notes(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"aio": {}, "zenflow": {}, "cpu_offload": true},\n "bogus": 1}')
    found = CliRunner().invoke(config_group, ["check", str(path)])
    assert found.exit_code == 2
    *errors, count = found.output.splitlines()
    places = [line.split(": ")[0] for line in errors if not line.startswith("  → ")]
    assert places == [f"✗ {path}:1:35", f"✗ {path}:1:65", f"✗ {path}:2:2"]
    assert any(line.startswith("  → ") for line in errors), "a remedy has a line of its own"
    assert count == f"{path}: 3 errors"
    path.write_text('{"train_batch_size": 1, "zero_optimization": {"aio": {}, "reduce_bucket_size": 10.5}}')
    found = CliRunner().invoke(config_group, ["check", str(path)])
    assert found.exit_code == 0
    assert found.output.splitlines()[-1] == f"✓ {path}: ok, 2 notes"
