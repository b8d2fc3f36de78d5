"""`launch checkpoint export`: a folder that transformers opens, with the weights of the run."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from harness.launch.command import Result, code_of, run_here
from harness.train.ranks import run_on_ranks
from safetensors import safe_open
from torch import Tensor

import launcher
from launcher.checkpoint.__main__ import main

# Imported by the tests, not by every process that collects them.
pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

State = dict[str, Tensor]


def _model() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=96, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def _save(rank: int, world_size: int, folder: str) -> State:
    """Train as the Trainer does, and save where it does; return the engine's own state dict."""
    model = _model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine = launcher.initialize(model=model, config=config)[0]
    tokens = torch.arange(16).unsqueeze(0)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    if rank == 0:
        model.config.dtype = "bfloat16"
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        (Path(folder) / "tokenizer_config.json").write_text("{}")
        (Path(folder) / "trainer_state.json").write_text("{}")
    engine.save_checkpoint(folder)
    state: State = engine.state_dict()
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """Return a folder as the Trainer leaves it, and the state dict of the run."""
    folder = tmp_path_factory.mktemp("checkpoint-1")
    return folder, run_on_ranks(2, _save, str(folder))[0]


@contextlib.contextmanager
def without_a_process_of_its_own() -> Iterator[None]:
    """Have a command work in the process of `launch`, a fork of this one, in place of one that imports torch again."""

    def work(argv: list[str]) -> SimpleNamespace:
        logging.getLogger().handlers.clear()  # of pytest
        logging.getLogger("launcher").propagate = True
        sys.argv = argv[argv.index(main.__module__) :]
        return SimpleNamespace(returncode=code_of(main))

    with mock.patch("launcher.cli.commands.checkpoint_tools.subprocess", SimpleNamespace(run=work)):
        yield


def run(folder: Path, *arguments: str | Path) -> Result:
    with without_a_process_of_its_own():
        return run_here(folder, "checkpoint", *arguments)


def opened(folder: Path) -> tuple[Any, State]:
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return model, dict(model.state_dict())


def test_the_weights_are_those_of_the_run(saved: tuple[Path, State], tmp_path: Path) -> None:
    folder, state = saved
    out = tmp_path / "out"
    result = run_here(tmp_path, "checkpoint", "export", folder, out)  # in a process of its own, as users run it
    assert result.code == 0, result.err
    model, found = opened(out)
    assert model.dtype == torch.bfloat16
    assert set(found) == set(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert {path.name for path in out.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors",
    }  # fmt: skip
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_another_type_and_several_files(saved: tuple[Path, State], tmp_path: Path) -> None:
    folder, state = saved
    whole = launcher.checkpoint.get_fp32_state_dict_from_zero_checkpoint(folder)
    place = folder / "global_step1"  # what belongs to the model is beside it
    result = run(tmp_path, "export", place, tmp_path, "--dtype", "fp32", "--max-shard-size", "20KB")
    assert result.code == 0, result.err
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    model, found = opened(tmp_path)
    assert model.dtype == torch.float32
    assert all(torch.equal(found[name], whole[name]) for name in state)


def test_the_config_may_be_elsewhere(saved: tuple[Path, State], tmp_path: Path) -> None:
    result = run(tmp_path, "export", saved[0], tmp_path / "out", "--config", tmp_path)
    assert (result.code, result.err) == (
        2, f"✗ {tmp_path}: there is no config.json; name the folder of the model, or its config.json, with --config\n"
    )  # fmt: skip
    assert not (tmp_path / "out").exists()
    config = tmp_path / "tiny.json"
    config.write_text((saved[0] / "config.json").read_text())
    result = run(tmp_path, "export", saved[0], tmp_path / "out", "--config", config)
    assert result.code == 0, result.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    opened(tmp_path / "out")


def test_to_fp32_on_the_command_line(saved: tuple[Path, State], tmp_path: Path) -> None:
    folder, state = saved
    result = run(tmp_path, "to-fp32", folder, tmp_path, "--safe-serialization", "--tag", "global_step1")
    assert result.code == 0, result.err
    assert f"model.safetensors: {len(state)} tensors" in result.out
    result = run(tmp_path, "to-fp32", folder, tmp_path, "--max-shard-size", "nothing")
    assert (result.code, result.err) == (1, "✗ 'nothing' is not a size; write 5GB\n")
