"""`launch rehearse` as users type it: the user's script as ranks of a world that is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner, Result
from harness import scripts
from harness.launch.command import Launch, run_launch, wait_until

from launcher.base.errors import UsageError
from launcher.cli.commands import rehearse
from launcher.cli.main import cli
from launcher.planner.ladder import EngineFacts
from launcher.planner.rehearsal import Call, Group, RankRehearsal

TRAIN = """
    import sys, torch, launcher
    width = int(sys.argv[1])
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
    engine, *_ = launcher.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    })
    while True:
        engine.backward(engine(torch.ones(4, width, dtype=torch.bfloat16)).float().mean())
        engine.step()
"""


def test_a_model_that_fits_nowhere_here(tmp_path: Path) -> None:
    """Eight layers of 32,768² are 17 GB in bf16, and 137 GB with all their states."""
    arguments = ("--ranks", "1024", "--rank", "5", "--json", tmp_path / "found.json", "--gpu-memory", "80GB")
    result = run_launch(tmp_path, "rehearse", *arguments, scripts.write(tmp_path, TRAIN), "32768")
    assert result.code == 0, result.err + result.out
    assert "rank 5 of 1024 · 1024 (data) = 1024 · at most 3.5 GiB · 2 steps rehearsed in" in result.out
    assert "fits 74.5 GiB: 3.5 GiB on rank 5" in result.out
    (found,) = json.loads((tmp_path / "found.json").read_text())["ranks"]
    assert found["resident_bytes"] < 2 * 2**30
    forward = found["peaks"]["forward"]
    numel = 8 * (32768 + 1) * 32768
    assert forward["gradients"] == pytest.approx(4 * numel / 1024, rel=0.001)
    assert forward["optimizer"] == pytest.approx(12 * numel / 1024, rel=0.001)
    assert forward["parameters"] == pytest.approx(2 * numel / 1024 + 2 * 8 * 32768, rel=0.001)  # small ones stay whole
    gathers = [call for call in found["calls"] if call[0] == "all_gather" and call[5] == 2 and call[4] == "forward"]
    assert sum(call[2] for call in gathers) == 2 * 8 * 32768**2


def test_a_killed_command_leaves_no_rank(tmp_path: Path) -> None:
    waiting = """
        import os, time
        open("pid.part", "w").write(str(os.getpid()))
        os.rename("pid.part", "pid")
        time.sleep(600)
    """
    job = Launch(tmp_path, "rehearse", "--ranks", "4", scripts.write(tmp_path, waiting))
    wait_until((tmp_path / "pid").exists, "the rehearsed rank")
    rank = Path("/proc", (tmp_path / "pid").read_text())
    assert rank.exists()
    job.process.kill()
    job.process.wait()
    wait_until(lambda: not rank.exists(), "the end of the rank")


# ---- without a rehearsal ----

MESH = {"pipeline": 4, "data": 1, "sequence": 1, "tensor": 1, "expert": 1}


def found_by(rank: int, *kinds: str, **facts: object) -> RankRehearsal:
    calls = [Call(kind, 0, 64, "the gather of weight", "forward", 1, None, True) for kind in kinds]
    groups = [Group("all ranks", (0, 1, 2, 3))]
    return RankRehearsal(rank, 4, 2, num_steps=1, groups=groups, calls=calls, **facts)  # type: ignore[arg-type]


def run(folder: Path, *words: str, found: dict[int, RankRehearsal] | None = None) -> Result:
    (folder / "train.py").write_text("")
    with mock.patch.object(rehearse, "run_rank", side_effect=lambda wanted, *_, **__: (found or {})[wanted["rank"]]):
        return CliRunner().invoke(cli, ["rehearse", *words], prog_name="launch")


def test_ranks_that_would_wait_for_each_other_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ranks = {0: found_by(0, "all_gather"), 3: found_by(3, "all_reduce")}
    result = run(tmp_path, "--ranks", "4", "train.py", found=ranks)
    assert result.exit_code == 1
    assert '✗ ranks would wait for each other: collective 1 of "all ranks" (4 ranks, 0 to 3): rank 0' in result.output
    assert run(tmp_path, "--ranks", "4", "--rank", "3", "train.py", found=ranks).exit_code == 0


def test_a_file_that_cannot_be_written_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(tmp_path, "--ranks", "4", "--rank", "0", "--json", "no/such.json", "train.py", found={0: found_by(0)})
    assert isinstance(result.exception, OSError)
    assert "rank 0 of 4" in result.output


def test_memory_of_every_rank_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    peaks = {"forward": {"parameters": 3 << 20, "host": 1 << 30}}
    ranks = {0: found_by(0), 3: found_by(3, peaks=peaks, host_bytes=1 << 30, disk_bytes=1 << 20)}
    fits = run(tmp_path, "--ranks", "4", "--gpu-memory", "4MiB", "train.py", found=ranks)
    assert (fits.exit_code, "fits 4.0 MiB: 3.0 MiB on rank 3" in fits.output) == (0, True), fits.output
    assert "each host: 2.0 GiB page-locked, 2.0 MiB on disk" in fits.output
    result = run(tmp_path, "--ranks", "4", "--gpu-memory", "2MiB", "train.py", found=ranks)
    assert (result.exit_code, "✗ does not fit 2.0 MiB" in result.output) == (1, True), result.output


def test_the_ladder_ends_at_the_first_setting_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    needed = {"": 9, "0none": 8, "1none": 7, "2none": 6, "2cpu": 5, "3none": 4, "3cpu": 3, "3nvme": 2}

    def rehearsed(_wanted: object, _command: object, patch: dict[str, Any], **_: object) -> RankRehearsal:
        zero = patch.get("zero_optimization", {})
        places = [zero.get(name, {"device": "none"})["device"] for name in ("offload_optimizer", "offload_param")]
        stage, recomputes = zero.get("stage", 0), "activation_checkpointing" in patch
        engine = EngineFacts(
            device="cuda", stage=stage, optimizer=places[0], param=places[1], num_shards=4, micro_batch=2,
            accumulation=1, recomputes=recomputes, can_recompute=True,
        )  # fmt: skip
        size = needed[f"{stage}{places[0]}" if recomputes else ""]
        return found_by(0, engine=engine, peaks={"forward": {"parameters": size << 20}})

    words = ["rehearse", "--ranks", "4", "--rank", "0", "--ladder"]
    with mock.patch.object(rehearse, "run_rank", side_effect=rehearsed):
        result = CliRunner().invoke(cli, [*words, "--gpu-memory", "4MiB", "train.py"], prog_name="launch")
        assert result.exit_code == 1, "the config as it is does not fit"
        assert "micro-batch 2 → 1, accumulation 1 → 2: left out, the script would have to take" in result.output
        assert "the blocks of the model are recomputed in backward: 8.0 MiB on the GPU" in result.output
        assert "ZeRO stage 0 → 1: 7.0 MiB on the GPU" in result.output
        assert "ZeRO stage 2 → 3, optimizer → device" not in result.output
        found = json.loads(result.output.partition("fits 4.0 MiB with: ")[2].splitlines()[0])
        assert found["activation_checkpointing"] == {"blocks": True}
        assert found["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "cpu"}}
        result = CliRunner().invoke(cli, [*words, "--gpu-memory", "1MiB", "train.py"], prog_name="launch")
        assert "optimizer and parameters → disk: 2.0 MiB on the GPU" in result.output
        assert "the ladder ends here" in result.output
        fits = CliRunner().invoke(cli, [*words, "--gpu-memory", "9MiB", "train.py"], prog_name="launch")
        assert (fits.exit_code, "stage 2" in fits.output) == (0, False)


def test_a_rank_that_fails_is_shown_and_no_other_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(tmp_path, "--ranks", "4", "train.py", found={0: found_by(0, error="the data is bad")})
    assert (result.exit_code, "✗ the data is bad" in result.output) == (1, True)


def test_a_stage_is_rehearsed_after_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    tried: list[tuple[int, dict[str, str]]] = []

    def rehearsed(wanted: dict[str, Any], *_: object, **__: object) -> RankRehearsal:
        rank, known = wanted["rank"], dict(wanted["announced"])
        tried.append((rank, known))
        if rank > 0 and str(rank - 1) not in known:
            return found_by(rank, sizes=MESH, needs_earlier_stages=True)
        return found_by(rank, sizes=MESH, announced={**known, str(rank): "[]"})

    with mock.patch.object(rehearse, "run_rank", side_effect=rehearsed):
        words = ["rehearse", "--ranks", "4", "--rank", "2", "train.py"]
        assert CliRunner().invoke(cli, words, prog_name="launch").exit_code == 0
    assert tried == [(2, {}), (0, {}), (1, {"0": "[]"}), (2, {"0": "[]", "1": "[]"})]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--ranks", "4", "--rank", "4", "train.py"), "--rank 4 is not one of 4 ranks; use 0 to 3"),
        (("--ranks", "4", "--rank", "1", "--all-roles", "train.py"), "--rank and --all-roles exclude each other"),
        (("--ranks", "4", "nowhere.py"), "nowhere.py: no such script"),
        (("--ranks", "4", "--ladder", "train.py"), "--ladder needs --gpu-memory"),
        (("--ranks", "0", "train.py"), "'0'"),
        (("--gpu-memory", "much", "--ranks", "4", "train.py"), "is not a size of a memory"),
        (("train.py",), "--ranks"),
    ],
)
def test_what_cannot_be_rehearsed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(tmp_path, *words)
    assert result.exit_code in (1, 2)
    told = str(result.exception) if isinstance(result.exception, UsageError) else result.output
    assert text in told
