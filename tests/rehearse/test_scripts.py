"""A rehearsed script: what it does as on a GPU, where it is ended, and what cannot be rehearsed."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import scripts
from harness.train.rehearsed import rehearse_script

from launcher.planner.ladder import Standing, standing_keys
from launcher.planner.rehearsal import first_differences

TRAIN = """
    import os, sys, torch, torch.distributed as dist, launcher
    width, stage = int(sys.argv[1]), int(sys.argv[2])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
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
        engine.save_checkpoint("saved")
        print(f"step {step} loss {loss.item()} of rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
    raise SystemExit("it ran for too long")
"""


def script(folder: Path, extra: str = "pass") -> Path:
    return scripts.write(folder, TRAIN.replace("EXTRA", extra))


def test_it_ends_after_its_steps_and_saves_nothing(tmp_path: Path) -> None:
    found, result = rehearse_script(tmp_path, script(tmp_path), "1024", "3", rank=9, world_size=16)
    assert result.code == 0, result.err
    assert result.out == "".join(f"step {step} loss 1.0 of rank 9 of 16\n" for step in range(2))
    assert (found.error, found.num_steps, found.sizes["data"]) == (None, 2, 16)
    assert not (tmp_path / "saved").exists()
    assert [place.rpartition("/")[2] for place in found.reads] == ["script.py:17"]
    assert found.work["forward"].num_kernels == 8


def test_a_rank_that_issues_another_collective_is_found(tmp_path: Path) -> None:
    parted = script(tmp_path, "dist.get_rank() == 0 and dist.all_reduce(torch.ones(3))")
    ranks = [rehearse_script(tmp_path, parted, "64", "2", rank=rank, world_size=16)[0] for rank in (0, 15)]
    (difference,) = first_differences(ranks)
    assert "rank 0 begins all_reduce of 12 bytes" in str(difference)
    assert f"({parted}:13)" in str(difference)
    alike = script(tmp_path, "dist.all_reduce(torch.ones(3))")
    ranks = [rehearse_script(tmp_path, alike, "64", "2", rank=rank, world_size=16)[0] for rank in (0, 15)]
    assert first_differences(ranks) == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("loss = loss if loss < 5 else 2 * loss", "a condition"),
        ("x[model[0].weight.sum(dim=0) > 0 if False else loss.expand(4) > 0]", "the shape of what index() returns"),
    ],
)
def test_what_depends_on_values_names_its_line(tmp_path: Path, line: str, what: str) -> None:
    steered = script(tmp_path, line)
    found, result = rehearse_script(tmp_path, steered, "1024", "1", rank=0, world_size=4)
    assert result.code == 1
    assert found.error is not None
    assert f"{steered}:13: {what} depends on values that the model computes" in found.error
    small, _ = rehearse_script(tmp_path, steered, "64", "1", rank=0, world_size=4)
    assert small.error is None  # so small a model is computed


def test_an_error_of_the_script_is_its_own(tmp_path: Path) -> None:
    found, result = rehearse_script(tmp_path, script(tmp_path, "1 / 0"), "64", "1", rank=0, world_size=4)
    assert result.code == 1
    assert found.error is not None
    assert "ZeroDivisionError: division by zero" in found.error
    assert "rehearse" not in found.error
    empty = scripts.write(tmp_path, "print('nothing')")
    assert "without a step" in (rehearse_script(tmp_path, empty, rank=0, world_size=2)[0].error or "")


def test_a_config_that_the_ranks_do_not_divide(tmp_path: Path) -> None:
    wrong = script(tmp_path).read_text().replace('"bf16"', '"tensor_parallel": {"autotp_size": 3}, "bf16"')
    (tmp_path / "wrong.py").write_text(wrong)
    found, _ = rehearse_script(tmp_path, tmp_path / "wrong.py", "64", "1", rank=0, world_size=4)
    assert found.error is not None
    assert "autotp_size" in found.error
    assert "Traceback" not in found.error


def test_another_rung_of_the_ladder(tmp_path: Path) -> None:
    train = script(tmp_path)
    whole, _ = rehearse_script(tmp_path, train, "1024", "1", rank=0, world_size=8)
    assert whole.engine is not None
    assert whole.engine.standing == Standing(1)
    keys = standing_keys(Standing(3, "cpu"))
    sharded, result = rehearse_script(tmp_path, train, "1024", "1", rank=0, world_size=8, patch=keys)
    assert sharded.error is None, result.err
    assert sharded.engine is not None
    assert sharded.engine.standing == Standing(3, "cpu")
    numel = 8 * (1024 + 1) * 1024
    assert whole.peaks["step"]["parameters"] == pytest.approx(2 * numel, rel=0.01)
    assert sharded.peaks["step"]["parameters"] == pytest.approx(2 * numel / 8, rel=0.02)
    assert "optimizer" not in sharded.peaks["step"]
    assert sharded.host_bytes == pytest.approx(18 * numel / 8, rel=0.02)  # a copy in 16 bits, too
