"""`launch estimate` as users type it: every kind of model, every bad input, no torch in the command's own process."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
from click.testing import CliRunner
from harness.launch.command import ROOT, run_forked, run_here
from harness.launch.terminal import TerminalLaunch

from launcher.base.errors import Diagnostic
from launcher.cli.commands.estimate import estimate
from launcher.cli.main import cli

SURFACE = {
    "num_gpus": ("--num-gpus",),
    "num_nodes": ("--num-nodes",),
    "config": ("--config", "--deepspeed"),
    "stage": ("--stage",),
    "precision": ("--precision",),
    "inference": ("--inference",),
    "offload_optimizer": ("--offload-optimizer",),
    "offload_param": ("--offload-param",),
    "has_16bit_master": ("--16bit-master",),
    "has_16bit_states": ("--16bit-states",),
    "batch": ("--batch", "--micro-batch"),
    "seq": ("--seq",),
    "checkpointing": ("--checkpointing", "--activation-checkpointing"),
    "attention": ("--attention",),
    "dropout": ("--dropout",),
    "layers": ("--layers",),
    "hidden": ("--hidden",),
    "heads": ("--heads",),
    "vocab": ("--vocab",),
    "largest": ("--largest",),
    "gpu_memory": ("--gpu-memory",),
    "cpu_memory": ("--cpu-memory",),
    "cuda_context": ("--cuda-context",),
    "deepspeed_tables": ("--deepspeed-tables",),
    "as_json": ("--json",),
}
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12,
    "vocab_size": 50257, "n_positions": 1024,
}  # fmt: skip
GPT2_COUNT = 124_439_808
MODELS = """\
import torch
from torch import nn

def build():
    print("noise on standard output")
    assert nn.Linear(2, 2).weight.device.type == "meta"
    return nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(4)))

def frozen():
    model = build()
    model[0].weight.requires_grad_(False)
    return model

def needs_more(size): ...
def breaks(): raise ValueError("no such size")
def leaves(): raise SystemExit(7)
def gives_a_number(): return 3
def nothing_to_train(): return nn.ReLU()
"""


def estimated(folder: Path, *args: str | Path) -> dict[str, Any]:
    result = run_here(folder, "estimate", *args, "--json")
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


@contextlib.contextmanager
def asked_here() -> Iterator[None]:
    """Read models in the process of the command in place of one more process, which would import torch again."""

    def ask(kind: str, target: str, *_: Any) -> dict[str, Any]:
        with contextlib.redirect_stdout(sys.stderr):  # what a model prints is no part of the command's output
            return facts_of(kind, target)

    from launcher.probes.model import facts_of  # here: the forks of this process have torch then

    with mock.patch("launcher.cli.model_source._ask", ask):
        yield


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


def test_the_options_are_the_frozen_ones() -> None:
    found = {p.name: tuple(p.opts) for p in estimate.params if isinstance(p, click.Option)}
    assert found == SURFACE
    text = CliRunner().invoke(cli, ["estimate", "--help"]).output
    assert all(spellings[0] in text for spellings in SURFACE.values())
    assert "launch estimate 7B" in text


@pytest.mark.parametrize(
    "args",
    [["7B"], ["."], ["7B", "--config", "ds.json"], ["350M", "--deepspeed-tables"]],
    ids=" ".join,
)
def test_numbers_and_headers_need_no_torch(tmp_path: Path, args: list[str]) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    code = (
        "import sys; from launcher.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "assert not {'torch', 'numpy', 'launcher.engine'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "estimate", *args],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def write_checkpoint(folder: Path) -> None:
    """Write gpt2's config and a checkpoint that says so in its header."""
    (folder / "config.json").write_text(json.dumps(GPT2))
    header = {"wte.weight": {"dtype": "F32", "shape": [1000, 768], "data_offsets": [0, 3_072_000]}}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 3_072_000)


def test_a_count_gives_every_stage_and_the_first_that_fits(tmp_path: Path) -> None:
    found = estimated(tmp_path, "7B", "--num_gpus", "4", "--num_nodes", "2", "--gpu-memory", "80GB")
    assert found["model"]["num_params"] == 7 * 10**9
    assert found["machines"]["world_size"] == 8
    assert [row["stage"] for row in found["rows"]] == [0, 1, 2, 2, 3, 3, 3, 3]
    for row in found["rows"]:
        assert row["gpu_bytes"] == sum(row["parts"].values())
        assert row["fits"] == (row["gpu_bytes"] <= 80 * 10**9)
    assert found["rows"][0]["parts"]["parameters"] == 14 * 10**9
    assert found["rows"][4]["parts"]["optimizer"] == 12 * 7 * 10**9 // 8
    assert found["first_fit"]["stage"] == 1
    assert found["first_fit"]["config"] == {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}


def test_the_screen_says_what_fits_and_how_to_ask_for_it(tmp_path: Path) -> None:
    result = run_here(tmp_path, "estimate", "7B", "--num_gpus", "8", "--gpu-memory", "80GB")
    assert result.code == 0
    assert "first setting that fits: stage 1" in result.out
    assert '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}' in result.out
    assert "\x1b" not in result.out
    assert all(line == line.rstrip() for line in result.out.splitlines())
    result = run_here(tmp_path, "estimate", "7B")
    assert "first setting that fits a GPU of" in result.out
    assert "   8 GB  none" in result.out


def test_a_narrow_terminal_gets_fewer_columns_and_no_row_is_cut(tmp_path: Path) -> None:
    launch = TerminalLaunch(tmp_path, "estimate", "7B", "--gpu-memory", "24GB", size=(110, 40))
    launch.wait()
    text = "\n".join(launch.everything)
    assert "states" in text
    assert "in flight" not in text
    assert "…" not in text
    assert "optimizer + param nvme" in text


def test_nothing_fits_is_exit_code_1_with_what_would_help(tmp_path: Path) -> None:
    result = run_here(tmp_path, "estimate", "70B", "--gpu-memory", "16GiB", "--cpu-memory", "64GB")
    assert result.code == 1
    assert "nothing fits: stage 3" in result.out
    assert "with --checkpointing: stage 3, offload optimizer + param nvme fits (" in result.out
    assert run_here(tmp_path, "estimate", "70B", "--cpu-memory", "2GB").code == 0  # stage 0 asks for no host memory


def test_what_this_release_does_not_do_is_marked(tmp_path: Path) -> None:
    from launcher.config.check import check

    found = estimated(tmp_path, "7B")
    for row in found["rows"]:
        problems = check({"train_micro_batch_size_per_gpu": 1, **row["config"]}, None).errors
        assert bool(row["refused_by_this_release"]) == bool(problems)


def test_options_narrow_the_table(tmp_path: Path) -> None:
    rows = estimated(tmp_path, "7B", "--stage", "3", "--offload-optimizer", "cpu", "--precision", "fp16")["rows"]
    assert [(row["offload_optimizer"], row["offload_param"]) for row in rows] == [("cpu", "none"), ("cpu", "cpu")]
    assert {row["precision"] for row in rows} == {"fp16"}
    (row,) = estimated(tmp_path, "7B", "--stage", "1", "--offload-optimizer", "nvme")["rows"]
    assert (row["stage"], row["offload_optimizer"]) == (1, "nvme")
    assert row["disk_bytes_per_node"] == 16 * 7 * 10**9


def test_activations_follow_batch_length_and_checkpointing(tmp_path: Path) -> None:
    def activations(*args: str) -> int:
        row = estimated(tmp_path, "350M", "--stage", "0", *args)["rows"][0]
        return int(row["parts"]["activations"])

    one = activations("--seq", "512")
    assert activations("--seq", "512", "--batch", "4") == 4 * one
    assert activations("--seq", "512", "--checkpointing") < one / 2
    assert activations("--seq", "512", "--attention", "eager", "--dropout") > one
    assert activations("--seq", "512", "--layers", "1", "--hidden", "64", "--heads", "1") < one / 100
    blocks = {"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {"blocks": True}}
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}, **blocks}))
    (row,) = estimated(tmp_path, "350M", "--config", "ds.json", "--seq", "512")["rows"]
    assert row["parts"]["activations"] == activations("--seq", "512", "--checkpointing")


def test_inference_needs_no_gradients_and_no_optimizer(models: Path) -> None:
    found = estimated(models, "70B", "--inference", "--num_gpus", "4", "--gpu-memory", "80GB", "--seq", "1024")
    settings = [(row["stage"], row["offload_param"]) for row in found["rows"]]
    assert settings == [(0, "none"), (3, "none"), (3, "cpu"), (3, "nvme")]
    assert all(row["parts"]["gradients"] == row["parts"]["optimizer"] == 0 for row in found["rows"])
    assert [row["parts"]["parameters"] for row in found["rows"][:2]] == [140 * 10**9, pytest.approx(35e9, rel=1e-3)]
    assert found["rows"][2]["host_bytes_per_node"] == pytest.approx(140e9, rel=1e-3)
    assert found["first_fit"]["config"] == {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    trained = estimated(models, "70B", "--num_gpus", "4", "--seq", "1024")
    assert found["rows"][1]["parts"]["activations"] < trained["rows"][4]["parts"]["activations"] / 4
    result = run_here(models, "estimate", "70B", "--inference")
    assert "optimizer" not in result.out
    assert "gradients" not in result.out
    (models / "ds.json").write_text(
        '{"train_batch_size": 2, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}'
    )
    (row,) = estimated(models, "7B", "--inference", "--config", "ds.json", "--num_gpus", "2")["rows"]
    assert (row["stage"], row["offload_optimizer"], row["host_bytes_per_node"]) == (3, "none", 0)
    with asked_here():
        frozen = estimated(models, "models.py:frozen", "--inference", "--num_gpus", "2")
    assert frozen["rows"][0]["parts"]["parameters"] == 80_000


def test_a_config_file_of_the_engine(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 4,
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": 0.9}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "reduce_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    found = estimated(tmp_path, "7B", "--num_gpus", "8", "--config", "ds.json")
    (row,) = found["rows"]
    assert (row["stage"], row["precision"], row["offload_optimizer"]) == (3, "fp16", "cpu")
    assert found["workload"]["batch_size"] == 2
    assert row["host_bytes_per_node"] == (4 + 4 + 4 + 2) * 7 * 10**9  # master, momentum, gradient, 16-bit copy
    assert any("is not supported" in notice for notice in found["notices"]) == bool(row["refused_by_this_release"])
    (tmp_path / "ds.json").write_text('{"zero_optimzation": {}}')
    result = run_here(tmp_path, "estimate", "7B", "--config", "ds.json")
    assert result.code == 2
    assert 'ds.json:1:2: unknown key "zero_optimzation"' in result.err


def test_a_pipeline_shows_its_stages_and_its_idle_time(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "zero_optimization": {"stage": 1},
        "pipeline": {"stages": 4, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    result = run_here(tmp_path, "estimate", "7B", "--num-gpus", "8", "--config", "ds.json")
    assert result.code == 0
    assert "4 (pipeline) × 2 (data)" in result.out
    line = (
        "pipeline of 8 stages, 2 on each rank · interleaved_1f1b · 8 micro-batches a step · idle 16% of it, in theory"
    )
    assert line in result.out
    found = estimated(tmp_path, "7B", "--num_gpus", "8", "--config", "ds.json")
    assert found["rows"][0]["pipeline_idle_fraction"] == 3 / 19


def test_a_hugging_face_config_and_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path)
    with asked_here():
        found = estimated(tmp_path, tmp_path / "config.json")["model"]
    assert "built by transformers" in found["source"]
    assert found["num_params"] == GPT2_COUNT
    assert found["largest_layer_params"] == 50257 * 768
    found = estimated(tmp_path, tmp_path)["model"]  # the weights count, the config gives the shape
    assert (found["num_params"], found["shape"]["num_layers"]) == (768_000, 12)
    (tmp_path / "model.safetensors").unlink()
    with asked_here():
        assert estimated(tmp_path, ".")["model"]["num_params"] == GPT2_COUNT
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with asked_here():
        found = estimated(tmp_path, ".")["model"]
    assert found["num_params"] == GPT2_COUNT
    assert "files are missing" in found["notes"][0]
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    (tmp_path / "model.safetensors.index.json").unlink()
    result = run_here(tmp_path, "estimate", "config.json")
    assert "transformers, which builds a gpt2, is not installed" in result.err


def test_functions_build_on_the_meta_device(models: Path) -> None:
    found = estimated(models, "models:build")["model"]
    assert (found["num_params"], found["num_trainable"]) == (40_000, 40_000)
    assert found["shape"] is None
    with asked_here():
        found = estimated(models, "models.py:frozen", "--stage", "0")
    assert (found["model"]["num_params"], found["model"]["num_trainable"]) == (40_000, 30_000)
    assert found["rows"][0]["parts"]["optimizer"] == 12 * 30_000


def test_files_of_torch_save_are_read_and_not_run(tmp_path: Path) -> None:
    import pickle

    import torch

    weight = torch.zeros(30, 10)
    model = {"a.weight": weight, "tied.weight": weight, "b.bias": torch.zeros(7)}
    torch.save({"model": model, "options": argparse.Namespace(width=3)}, tmp_path / "m.pt")
    torch.save({"a.weight": weight}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with asked_here():
        assert estimated(tmp_path, "m.pt")["model"]["num_params"] == 307
        assert estimated(tmp_path, "old.bin")["model"]["num_params"] == 300

    class Trap:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "ran"), "w"))

    with (tmp_path / "trap.bin").open("wb") as file:
        pickle.dump({"a": Trap()}, file)
    with asked_here():
        result = run_here(tmp_path, "estimate", "trap.bin")
    assert result.code == 2
    assert "code in it is not run" in result.err
    assert not (tmp_path / "ran").exists()


def test_the_tables_of_the_guides(tmp_path: Path) -> None:
    result = run_here(tmp_path, "estimate", "2783959040", "--largest", "65798144", "--deepspeed-tables")
    assert "   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=1" in result.out
    assert "   15.56GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=0" in result.out
    assert "ZeRO stage 2" in result.out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "MODEL is missing"),
        (["nothing"], "there is no model nothing"),
        ([""], "there is no model"),
        (["meta-llama/Llama-2-7b"], "nothing is downloaded: fetch it first"),
        (["0"], "not a number of parameters"),
        (["empty"], "empty: no model in this folder"),
        (["models.py"], "models.py:build_model"),
        (["broken.json"], "broken.json: no JSON"),
        (["broken.safetensors"], "broken.safetensors: no safetensors file"),
        (["ds.json"], "ds.json: no model_type"),
        (["unheard.json"], "unheard"),
        (["notes.txt"], "a file of this kind does not describe a model"),
        (["7B", "--stage", "4"], "--stage: expected a whole number from 0 to 3"),
        (["7B", "--stage", "2", "--offload-param", "cpu"], "parameters are offloaded at stage 3 only"),
        (["7B", "--stage", "0", "--offload-optimizer", "cpu"], "stages 1, 2 and 3 only"),
        (["7B", "--gpu-memory", "big"], "write 80GB or 80GiB"),
        (["7B", "--gpu-memory", "80"], "write 80GB or 80GiB"),
        (["7B", "--hidden", "64"], "go together"),
        (["7B", "--layers", "2", "--hidden", "65", "--heads", "2"], "not divisible"),
        (["7B", "--precision", "fp32", "--16bit-states"], "need a 16-bit precision"),
        (["7B", "--precision", "fp16", "--16bit-states"], "optimizer states in 16 bit need bf16"),
        (["7B", "--config", "ds.json", "--stage", "2"], "--stage and --config exclude each other"),
        (["7B", "--config", "nowhere.json"], "nowhere.json: the config cannot be read"),
        (["7B", "--json", "--deepspeed-tables"], "exclude each other"),
        (["7B", "--config", "ds.json", "--16bit-states"], "--16bit-states and --config exclude each other"),
        (["7B", "--deepspeed-tables", "--gpu-memory", "8GB"], "--gpu-memory and --deepspeed-tables exclude"),
        (["7B", "--largest", "x"], "write 65M"),
        (["models.py", "--largest", "5"], "--largest is for a plain count"),
        (["7B", "--num_gpus", "0"], "--num-gpus"),
        (["7B", "--inference", "--checkpointing"], "--checkpointing and --inference exclude each other"),
        (["7B", "--inference", "--offload-optimizer", "cpu"], "--offload-optimizer and --inference exclude"),
    ],
)
def test_a_wrong_line_ends_with_2_and_one_clear_message(models: Path, args: list[str], expected: str) -> None:
    (models / "empty").mkdir()
    (models / "broken.json").write_text("{")
    (models / "broken.safetensors").write_text("x")
    (models / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    (models / "unheard.json").write_text('{"model_type": "unheard"}')
    (models / "notes.txt").touch()
    with asked_here():
        result = run_here(models, "estimate", *args)
    assert result.code == 2
    assert expected in result.err
    assert "Traceback" not in result.err + result.out


WRONG_FUNCTIONS = {
    "models:nowhere": "models has no nowhere",
    "no_module:build": "No module named 'no_module'",
    "nowhere.py:build": "there is no such file",
    "models:needs_more": "without arguments",
    "models:breaks": "models.py:15: ValueError: no such size",
    "models:leaves": "SystemExit: 7",
    "models:gives_a_number": "gave a int, no model",
    "models:torch": "TypeError",
}


def test_a_function_that_builds_no_model_is_told_so(models: Path) -> None:
    result = run_here(models, "estimate", "models:breaks")
    assert result.code == 2
    assert WRONG_FUNCTIONS["models:breaks"] in result.err
    assert "Traceback" not in result.err + result.out
    with asked_here():
        assert "no trainable parameters" in run_here(models, "estimate", "models:nothing_to_train").err

    def tell() -> None:
        for name in WRONG_FUNCTIONS:
            print(Diagnostic(**facts_of("function", name)["error"]), file=sys.stderr)

    from launcher.probes.model import facts_of

    result = run_forked(models, [""], tell)
    said = result.err.splitlines()
    assert len(said) == len(WRONG_FUNCTIONS), result.err
    for line, expected in zip(said, WRONG_FUNCTIONS.values(), strict=True):
        assert expected in line
        assert "; " in line  # and what to do


def test_the_page_shows_what_the_command_prints() -> None:
    blocks = re.findall(
        r"^```\n\$ launch (estimate .*)\n([^`]*)^```", (ROOT / "docs" / "memory.md").read_text(), re.MULTILINE
    )
    assert blocks
    for command, shown in blocks:
        printed = CliRunner().invoke(cli, command.split())
        assert printed.exit_code == 0
        assert shown.strip() == printed.output.strip()
