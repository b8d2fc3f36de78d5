"""`launch rehearse` as users type it: the user's script as ranks of a world that is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import run_launch

TRAIN = """
    import os, sys, torch, torch.distributed as dist, launcher
    width, stage = int(sys.argv[1]), int(sys.argv[2])
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8))).to("cuda")
    engine, *_ = launcher.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    })
    for step in range(100):
        x = torch.ones(4, width, device="cuda", dtype=torch.bfloat16)
        loss = engine(x).float().pow(2).mean()
        EXTRA
        engine.backward(loss)
        engine.step()
        print("loss", loss.item())
    raise SystemExit("it went on for too long")
"""


def script(folder: Path, extra: str = "pass") -> Path:
    return scripts.write(folder, TRAIN.replace("EXTRA", extra))


def test_a_model_that_fits_nowhere_here(tmp_path: Path) -> None:
    """Eight layers of 32,768² are 17 GB in bf16, and 137 GB with all their states."""
    arguments = ("--ranks", "1024", "--rank", "5", "--json", tmp_path / "found.json", "--gpu-memory", "80GB")
    result = run_launch(tmp_path, "rehearse", *arguments, script(tmp_path), "32768", "3")
    assert result.code == 0, result.err + result.out
    assert "rank 5 of 1024 · 1024 (data) = 1024 · at most 3.5 GiB · 2 steps rehearsed in" in result.out
    assert "fits 74.5 GiB" in result.out
    (found,) = json.loads((tmp_path / "found.json").read_text())["ranks"]
    assert found["resident_bytes"] < 2 * 2**30
    forward = found["peaks"]["forward"]
    numel = 8 * (32768 + 1) * 32768
    assert forward["gradients"] == pytest.approx(4 * numel / 1024, rel=0.001)
    assert forward["optimizer"] == pytest.approx(12 * numel / 1024, rel=0.001)
    assert forward["parameters"] == pytest.approx(2 * numel / 1024 + 2 * 8 * 32768, rel=0.001)  # small ones stay whole
    gathers = [call for call in found["calls"] if call[0] == "all_gather" and call[5] == 2 and call[4] == "forward"]
    assert sum(call[2] for call in gathers) == 2 * 8 * 32768**2
    assert any("32768" not in call[3] and "gather of" in call[3] for call in gathers)


def test_ranks_of_all_roles_are_held_against_each_other(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "rehearse", "--ranks", "16", script(tmp_path), "64", "2")
    assert result.code == 0, result.err + result.out
    assert "the 2 rehearsed ranks issue the same collectives in the same order" in result.out
    parted = script(tmp_path, "dist.get_rank() == 0 and dist.all_reduce(torch.ones(3))")
    result = run_launch(tmp_path, "rehearse", "--ranks", "16", parted, "64", "2")
    assert result.code == 1
    assert "ranks would wait for each other: collective " in result.out
    assert "rank 0 begins all_reduce of 12 bytes" in result.out


def test_a_branch_that_needs_values_is_named(tmp_path: Path) -> None:
    steered = script(tmp_path, "loss = loss if loss < 5 else 2 * loss")
    assert (
        run_launch(tmp_path, "rehearse", "--ranks", "4", "--rank", "0", steered, "64", "1").code == 0
    )  # it is computed
    result = run_launch(tmp_path, "rehearse", "--ranks", "4", "--rank", "0", steered, "1024", "1")
    assert result.code == 1
    assert f"{steered}:12: a condition depends on values that the model computes" in result.out


def test_a_script_that_fails_shows_its_own_traceback(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "rehearse", "--ranks", "4", "--rank", "0", script(tmp_path, "1 / 0"), "64", "1")
    assert result.code == 1
    assert "ZeroDivisionError: division by zero" in result.out
    assert "launcher/rehearse" not in result.out


def test_what_cannot_be_rehearsed_is_one_line(tmp_path: Path) -> None:
    for arguments, text in (
        (("--ranks", "4", "--rank", "4", "train.py"), "--rank 4 is not one of 4 ranks"),
        (("--ranks", "4", "--rank", "1", "--all-roles", "train.py"), "--rank and --all-roles exclude each other"),
        (("--ranks", "4", "nowhere.py"), "nowhere.py: no such script"),
        (("--ranks", "0", "train.py"), "--ranks"),
        (("--gpu-memory", "much", "--ranks", "4", "train.py"), "is not a size of a memory"),
    ):
        result = run_launch(tmp_path, "rehearse", *arguments)
        assert result.code == 2
        assert text in result.err
    empty = scripts.write(tmp_path, "print('nothing')")
    result = run_launch(tmp_path, "rehearse", "--ranks", "2", empty)
    assert result.code == 1
    assert "the script has ended without a step of an engine" in result.out


def test_too_little_memory_is_an_exit_code(tmp_path: Path) -> None:
    arguments = ("--ranks", "2", "--rank", "1", "--gpu-memory", "1MiB")
    result = run_launch(tmp_path, "rehearse", *arguments, script(tmp_path), "512", "1")
    assert result.code == 1
    assert "does not fit 1.0 MiB" in result.out
