"""A script's own training loop with accelerate's `Accelerator` on the engine, and under `accelerate launch`.

The environment of the latter has the command named deepspeed: nothing in its rank is of `launch` but the engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.environments import make_environment, run_in
from harness.launch.command import ROOT
from harness.ports import free_port
from harness.train.hf_job import environment, returned, run_cases

pytestmark = pytest.mark.long  # the Trainer, which calls the same of accelerate, is tested each time
# As `accelerate config` writes it.
CONFIG = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 1
use_cpu: false
"""
CASES = [
    *[
        "stage_0",
        "stage_2",
        "stage_3",
        "config_and_dummies",
        "bf16",
        "no_sync",
        "metrics",
        "save_state",
        "save_model",
    ],
    *["not_gathered", "two_plugins"],
]
Found = dict[str, list[Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the cases returned, on every rank."""
    return run_cases(tmp_path_factory.mktemp("accelerator"), "huggingface.accelerator_cases", CASES)


@pytest.mark.parametrize("name", ["stage_0", "stage_2", "stage_3"])
def test_a_loop_takes_the_steps_of_plain_torch(found: Found, name: str) -> None:
    for rank in returned(found, name):
        assert rank["losses"] == pytest.approx(rank["expected"]["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(rank["expected"]["norms"], rel=1e-4)
        assert rank["rates"] == pytest.approx([1e-2 / (1 + 2 * step) for step in (1, 2, 3)])
        assert rank["unwrapped"] == "LlamaForCausalLM"
    assert found[name][0]["apart"] < 1e-4


def test_a_config_file_with_auto_and_dummies(found: Found) -> None:
    for rank in returned(found, "config_and_dummies"):
        assert rank["batch"] == [8, 2]
        assert rank["rates"] == [0.0, 5e-3, 1e-2]
        assert rank["optimizer"] == "DeepSpeedOptimizerWrapper"
        assert rank["schedule"] == "DeepSpeedSchedulerWrapper"
        assert rank["losses"][0] == pytest.approx(found["stage_3"][0]["losses"][0])


def test_mixed_precision(found: Found) -> None:
    for rank in returned(found, "bf16"):
        assert rank["type"] == "torch.bfloat16"
        assert rank["losses"] == pytest.approx(found["stage_2"][0]["losses"], rel=1e-3)


def test_a_micro_batch_in_no_sync_counts_in_the_step(found: Found) -> None:
    for rank in returned(found, "no_sync"):
        assert rank["norms"] == pytest.approx({"1": rank["expected"], "2": rank["expected"]}, rel=1e-5)


def test_what_ranks_gather_has_each_row_once(found: Found) -> None:
    for rank in returned(found, "metrics"):
        assert rank == {"rows": True, "sum": 3.0, "padded": [2]}


def test_a_saved_state_continues_where_it_was(found: Found) -> None:
    for rank in returned(found, "save_state"):
        assert rank["again"] == rank["first"]
        assert rank["count"] == 1
        assert {"custom_checkpoint_0.pkl", "pytorch_model", "scheduler.bin", "zero_to_fp32.py"} <= set(rank["names"])


def test_each_way_to_save_a_model_saves_its_weights(found: Found) -> None:
    for rank in returned(found, "save_model"):
        assert rank == {"save_model": True, "save_pretrained": True, "shards": True, "file": True}
    for said in returned(found, "not_gathered"):
        assert "set `zero3_save_16bit_model` to True" in said


def test_two_models_with_a_plugin_each(found: Found) -> None:
    for rank in returned(found, "two_plugins"):
        assert rank["stages"] == [2, 3]
        assert rank["is_sharded"]
        assert rank["student"]["losses"] == pytest.approx(rank["expected"], rel=1e-5)
        assert rank["teacher"][0] == rank["teacher"][1]


def test_the_config_file_of_accelerate_is_what_counts(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment")
    run_in(tmp_path, python, ROOT / "launcher" / "__main__.py", "deepspeed-command", "install")
    (tmp_path / "accelerate.yaml").write_text(CONFIG)
    options = ["--config_file", "accelerate.yaml", "--main_process_port", str(free_port()), "--module"]
    job = ["harness.train.hf_job", "huggingface.accelerator_cases", "from_environment"]
    done = run_in(tmp_path, python, "-m", "accelerate.commands.launch", *options, *job, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    rank = json.loads((tmp_path / "cases_of_rank_0.json").read_text())["from_environment"]
    assert rank["stage"] == 3
    assert not rank["is_of_launch"]
    assert rank["losses"] == pytest.approx(rank["expected"], rel=1e-5)
