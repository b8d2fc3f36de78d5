"""`zero_to_fp32.py`: whole weights out of the ranks' files, without the package, in little memory."""

from __future__ import annotations

import ast
import json
import logging
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from harness.launch.command import Result, run_forked
from harness.train.ranks import run_on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn

import launcher
from launcher.checkpoint import zero_to_fp32
from launcher.checkpoint.zero_to_fp32 import (
    UnreadableCheckpoint,
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

WIDTH = 24
FROZEN = {"frozen.weight", "frozen.bias"}
State = dict[str, Tensor]


class Model(nn.Module):
    """Tied, frozen, and empty parameters; buffers of two types, and one that is not part of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3 * WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("ours", torch.arange(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(self.embedding(tokens))) * self.scale + self.nothing.sum()
        return torch.as_tensor(self.head(hidden))


def _save(rank: int, world_size: int, stage: int, precision: str, folder: str) -> State:
    """Train two steps and save, the second time without frozen parameters; return the engine's own state dict."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True, **({"initial_scale_power": 4} if precision == "fp16" else {})}
    engine = launcher.initialize(model=Model(), config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.arange(4)).float().square().mean())
        engine.step()
    assert engine.save_checkpoint(folder, "trained", save_latest=False, exclude_frozen_parameters=True)
    assert engine.save_checkpoint(folder)
    state: State = engine.state_dict()
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """Return a checkpoint of a bf16 run at stage 2, and the state dict it was saved of."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_on_ranks(2, _save, 2, "bf16", str(folder))[0]


def script(arguments: Sequence[str], folder: Path, *absent: str) -> subprocess.CompletedProcess[str]:
    """Run the script that is in `folder`, there, without this package and those that are `absent`."""
    code = (
        "import runpy, sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(',')));"
        " sys.argv[0] = 'zero_to_fp32.py'; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, ",".join(["launcher", *absent]), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def script_here(arguments: Sequence[str], folder: Path, *absent: str) -> Result:
    """Run the script in the same way in a fork of this process, which has torch."""

    def main() -> None:
        logging.getLogger().handlers.clear()  # of pytest
        logging.getLogger("launcher").propagate = True
        sys.modules.update(dict.fromkeys(["launcher", *absent]))  # type: ignore[arg-type]
        runpy.run_path("zero_to_fp32.py", run_name="__main__")

    return run_forked(folder, ["zero_to_fp32.py", *arguments], main)


def same(left: State, right: State) -> bool:
    return set(left) == set(right) and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (1, "fp32"), (2, "fp16"), (3, "fp32"), (3, "bf16")])
def test_all_stages_give_the_weights_of_the_run(stage: int, precision: str, tmp_path: Path) -> None:
    state = run_on_ranks(2, _save, stage, precision, str(tmp_path))[0]
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert set(found) == set(state)
    for name, value in found.items():
        is_whole = state[name].dtype.is_floating_point
        assert value.dtype == (torch.float32 if is_whole else state[name].dtype)
        assert torch.equal(value.to(state[name].dtype), state[name]), name
    masters = found["embedding.weight"]
    assert torch.equal(masters, masters.to(state["embedding.weight"].dtype).float()) is (precision == "fp32")


def test_the_script_needs_nothing_of_the_package(saved: tuple[Path, State], tmp_path: Path) -> None:
    folder, _ = saved
    expected = get_fp32_state_dict_from_zero_checkpoint(folder)
    ended = script([".", str(tmp_path)], folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"pytorch_model.bin: {len(expected)} tensors" in ended.stdout
    read = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert same(read, expected)
    assert read["head.weight"].data_ptr() == read["embedding.weight"].data_ptr()
    assert same(get_fp32_state_dict_from_zero_checkpoint(folder / "global_step2"), expected)
    assert (folder / "global_step2/zero_to_fp32.py").read_bytes() == Path(zero_to_fp32.__file__).read_bytes()
    names = {
        alias.name.partition(".")[0] if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse(Path(zero_to_fp32.__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert names - sys.stdlib_module_names - {"collections.abc"} == {"torch"}


def test_every_form_of_output_has_the_same_weights(saved: tuple[Path, State], tmp_path: Path) -> None:
    folder, _ = saved
    expected = get_fp32_state_dict_from_zero_checkpoint(folder)
    small = f"{WIDTH * WIDTH * 4 // 1000 + 1}KB"
    for arguments in (
        ["bin"], ["safe", "--safe_serialization"], ["one.safetensors"], ["one.bin"],
        ["bins", "--max_shard_size", small], ["safes", "--max_shard_size", small, "--safe_serialization"],
    ):  # fmt: skip
        zero_to_fp32.run([str(folder), str(tmp_path / arguments[0]), *arguments[1:], "-t", "global_step2"])
    assert same(torch.load(tmp_path / "bin/pytorch_model.bin", weights_only=True, mmap=True), expected)
    assert same(load_file(tmp_path / "safe/model.safetensors"), expected)
    assert same(load_file(tmp_path / "one.safetensors"), expected)
    assert same(torch.load(tmp_path / "one.bin", weights_only=True), expected)
    for place, index in (("bins", "pytorch_model.bin.index.json"), ("safes", "model.safetensors.index.json")):
        weight_map: dict[str, str] = json.loads((tmp_path / place / index).read_text())["weight_map"]
        assert len(set(weight_map.values())) > 1
        assert {path.name for path in (tmp_path / place).iterdir()} == {index, *weight_map.values()}
        read: State = {}
        for name in set(weight_map.values()):
            path = tmp_path / place / name
            part = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
            assert {key for key, file in weight_map.items() if file == name} == set(part)
            read |= part
        assert same(read, expected)


def test_frozen_parameters_can_be_left_out(
    saved: tuple[Path, State], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("launcher"), "propagate", True)
    folder, state = saved
    trained = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert set(trained) == set(state) - FROZEN
    assert same(get_fp32_state_dict_from_zero_checkpoint(folder, "trained"), trained)
    with caplog.at_level("WARNING", "launcher.zero_to_fp32"):
        zero_to_fp32.run([str(folder), str(tmp_path), "--tag", "trained"])
    assert "2 parameters are left out, which this checkpoint was saved without" in caplog.text


def test_from_python(saved: tuple[Path, State]) -> None:
    folder, state = saved
    lazy = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    assert {name: tensor.shape for name, tensor in lazy.items()} == {name: each.shape for name, each in state.items()}
    assert same(
        {name: tensor.contiguous() for name, tensor in lazy.items()}, get_fp32_state_dict_from_zero_checkpoint(folder)
    )
    model = load_state_dict_from_zero_checkpoint(Model(), folder, tag="global_step2")
    assert same(dict(model.state_dict()), get_fp32_state_dict_from_zero_checkpoint(folder))
    assert launcher.checkpoint.get_fp32_state_dict_from_zero_checkpoint is get_fp32_state_dict_from_zero_checkpoint


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["rank-00001.safetensors", "rank-00000.json", "state.json", "state.safetensors", "manifest.json"]
)
@pytest.mark.parametrize("kind", ["damaged", "cut", "missing"])
def test_what_is_wrong_is_named_and_nothing_is_written(
    saved: tuple[Path, State], tmp_path: Path, name: str, kind: str
) -> None:
    place = tmp_path / "copy"
    shutil.copytree(saved[0] / "global_step2", place)
    path = place / name
    if kind == "missing":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-2])  # the last byte of a manifest is the end of its line
    elif name == "manifest.json":
        path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    elif name == "rank-00001.safetensors":
        _damage_weight(path)
    else:
        _damage(path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "pytorch_model.bin").write_text("the old one")
    expected = str(place) if (name, kind) == ("manifest.json", "missing") else str(path)
    with pytest.raises(UnreadableCheckpoint, match=expected):
        convert_zero_checkpoint_to_fp32_state_dict(place, out)
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("pytorch_model.bin", "the old one")]


def _damage_weight(path: Path) -> None:
    """Flip a bit of the last weight of a file; optimizer states are not read."""
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    last = max(entry["data_offsets"][1] for key, entry in entries.items() if key.startswith("weight/"))
    content[8 + length + last - 1] ^= 1
    path.write_bytes(content)


def test_without_xxhash_a_line_says_that_nothing_was_verified(saved: tuple[Path, State], tmp_path: Path) -> None:
    ended = script_here([".", "out.bin"], shutil.copytree(saved[0], tmp_path / "copy"), "xxhash")
    assert ended.code == 0, ended.err
    assert "checksums are not compared: that needs the package xxhash" in ended.out
    assert same(
        torch.load(tmp_path / "copy/out.bin", weights_only=True), get_fp32_state_dict_from_zero_checkpoint(saved[0])
    )


def test_weights_of_two_conversions_are_not_mixed(saved: tuple[Path, State], tmp_path: Path) -> None:
    convert_zero_checkpoint_to_fp32_state_dict(saved[0], tmp_path, max_shard_size="1KB")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(FileExistsError, match="would stay beside the new ones, pytorch_model-00001-of-"):
        convert_zero_checkpoint_to_fp32_state_dict(saved[0], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    convert_zero_checkpoint_to_fp32_state_dict(saved[0], tmp_path, max_shard_size="1KB")  # the same files again


def test_a_type_that_safetensors_does_not_have_is_named(tmp_path: Path) -> None:
    stored, rare = (
        zero_to_fp32.StoredTensor(torch.Size([0, 2]), dtype, dtype, ()) for dtype in (torch.complex128, torch.uint16)
    )
    with pytest.raises(ValueError, match=r"wave is of torch.complex128, .* write a \*.bin file"):
        zero_to_fp32.write_weights({"wave": stored}, tmp_path / "model.safetensors", None)
    assert list(tmp_path.iterdir()) == []
    zero_to_fp32.write_weights({"wave": stored, "rare": rare}, tmp_path / "model.bin", None)
    read = torch.load(tmp_path / "model.bin", weights_only=True)
    assert {name: (value.dtype, value.shape) for name, value in read.items()} == {
        "wave": (torch.complex128, (0, 2)),
        "rare": (torch.uint16, (0, 2)),
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([".", "out", "--tag", "none"], "none: there is no manifest.json"),
        (["nowhere", "out"], "nowhere: there is neither"),
        ([".", "out", "--max_shard_size", "five"], "'five' is not a size"),
        ([".", "out.bin", "--max_shard_size", "2GB"], "out.bin is one file"),
        ([".", "out.bin", "--safe_serialization"], "out.bin is one file"),
    ],
)
def test_errors_say_what_is_wrong(
    saved: tuple[Path, State], arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved[0])
    with pytest.raises(ValueError, match=said):
        zero_to_fp32.run(arguments)
    assert not Path("out").exists()


def test_the_script_shows_an_error_as_one_line(tmp_path: Path) -> None:
    shutil.copy(zero_to_fp32.__file__, tmp_path)
    ended = script_here([".", "out"], tmp_path)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "error: .: there is neither a file `latest` nor a manifest.json; name a tag\n"


def test_a_checkpoint_of_deepspeed_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "global_step1/mp_rank_00_model_states.pt").touch()
    (tmp_path / "latest").write_text("global_step1")
    with pytest.raises(UnreadableCheckpoint, match="DeepSpeed wrote this checkpoint; `launch checkpoint import`"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


NUM_LAYERS, LARGE = 4, 3 << 20  # 12 MiB a layer in fp32


def _save_large(rank: int, world_size: int, folder: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    layers = [nn.Linear(1024, LARGE // 1024, bias=False) for _ in range(NUM_LAYERS)]
    engine = launcher.initialize(model=nn.Sequential(*layers), config=config)[0]
    engine.save_checkpoint(folder)


_PEAK = """
import runpy, sys, torch, zipfile, logging, argparse
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
torch.frombuffer(bytearray(4), dtype=torch.float32).to(torch.bfloat16)
before = peak()
for output in sys.argv[2:]:
    sys.argv[1:] = [".", output]
    runpy.run_path("zero_to_fp32.py", run_name="__main__")
print(peak() - before)
"""


def test_a_few_megabytes_are_in_memory(tmp_path: Path) -> None:
    run_on_ranks(2, _save_large, str(tmp_path))
    command = [sys.executable, "-c", _PEAK, ".", "out.bin", "out.safetensors"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for output in command[-2:]:
        assert (tmp_path / output).stat().st_size > NUM_LAYERS * LARGE * 4
    assert int(ended.stdout.splitlines()[-1]) < 2 * LARGE * 4 // 1024
