"""The real DeepSpeed loads what is written for it, at any number of ranks, and continues as this engine does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.train import deepspeed, deepspeed_experts
from harness.train.deepspeed_loads import BATCHES, groups_of, trained
from harness.train.deepspeed_runs import (
    CLIENT_STATE,
    NUM_RANKS,
    NUM_STEPS,
    NUM_STEPS_AFTER,
    build_model,
    config_of,
)
from harness.train.ranks import run_on_ranks

import launcher
from launcher.checkpoint.convert.to_deepspeed import export_deepspeed
from launcher.moe import MoE

pytestmark = pytest.mark.soak  # the real DeepSpeed takes long to import: minutes on two cores
SMALL_PARTS: dict[str, Any] = {"zero": {"sub_group_size": 100, "stage3_param_persistence_threshold": 0}}
# Name -> stage, precision, options of the config.
RUNS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "0-fp32": (0, "fp32", {}),
    "0-bf16": (0, "bf16", {}),
    "1-fp32": (1, "fp32", {}),
    "1-bf16": (1, "bf16", {}),
    "2-fp32": (2, "fp32", {}),
    "1-bf16-sums": (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),  # by an optimizer class of its own
    "2-bf16": (2, "bf16", {}),
    "2-bf16-robin": (2, "bf16", {"zero": {"round_robin_gradients": True}}),
    "2-fp16": (2, "fp16", {}),
    "3-fp32": (3, "fp32", {}),
    "3-bf16": (3, "bf16", SMALL_PARTS),
    "3-one-group": (3, "fp32", {}),
}
# At stage 3 DeepSpeed gives all groups one step counter: torch's Adam then counts each step once for each of them.
UNIVERSAL = ("1-fp32", "1-bf16", "1-bf16-sums", "2-fp32", "2-bf16", "2-fp16", "3-one-group")
# Of losses, relative; in 16 bits at least twice what the engines are apart where neither loads anything.
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}


def _run(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Any]]:
    found = {}
    for name, (stage, precision, options) in RUNS.items():
        model = build_model()
        config = {**config_of(stage, precision, options), "checkpoint": {"format": "deepspeed"}}
        engine, *_ = launcher.initialize(model=model, model_parameters=groups_of(name, model), config=config)
        before = trained(engine, rank, world_size, range(NUM_STEPS))
        engine.save_checkpoint(f"{folder}/{name}", client_state=CLIENT_STATE)
        facts = {"lrs": engine.get_lr(), "schedule": engine.lr_scheduler.state_dict()}
        facts["scale"] = engine.optimizer.loss_scale
        after = trained(engine, rank, world_size, range(NUM_STEPS, NUM_STEPS + NUM_STEPS_AFTER))
        found[name] = {**facts, "before": before, "after": after}
        engine.destroy()
    return found


def _case(name: str, folder: Path | None, *, is_universal: bool = False) -> dict[str, Any]:
    stage, precision, options = RUNS[name]
    return {
        "name": name, "stage": stage, "precision": precision, "options": options, "is_universal": is_universal,
        "folder": None if folder is None else str(folder),
    }  # fmt: skip


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """All of `RUNS` here, each saved; what they had then, and the mean losses of the steps before and after."""
    folder = tmp_path_factory.mktemp("ours")
    of_ranks = run_on_ranks(NUM_RANKS, _run, str(folder))
    found = of_ranks[0]
    for name in RUNS:
        for part in ("before", "after"):
            columns = zip(*(of_rank[name][part] for of_rank in of_ranks), strict=True)
            found[name][part] = [sum(each) / NUM_RANKS for each in columns]
    return folder, found


@pytest.fixture(scope="module", params=BATCHES)
def theirs(
    request: pytest.FixtureRequest, ours: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What the real DeepSpeed makes of the exports, on each number of ranks."""
    num_ranks, (saved, _) = request.param, ours
    folder = tmp_path_factory.mktemp(f"theirs-{num_ranks}")
    cases = {}
    for name in RUNS:
        export_deepspeed(saved / name, folder / name, num_ranks=num_ranks)
        cases[name] = _case(name, folder / name)
        if num_ranks == NUM_RANKS:
            cases[f"{name}-beside"] = _case(name, saved / name)  # as `save_checkpoint` left it
        if name in UNIVERSAL:
            export_deepspeed(saved / name, folder / f"{name}-universal", is_universal=True)
            cases[f"{name}-universal"] = _case(name, folder / f"{name}-universal", is_universal=True)
        if RUNS[name][1] != "fp32":
            cases[f"{name}-alone"] = _case(name, None)  # from the beginning
    (folder / "cases").write_text(json.dumps(cases))
    deepspeed.run_module(num_ranks, "harness.train.deepspeed_loads", str(folder / "cases"))
    found: dict[str, dict[str, Any]] = json.loads((folder / "cases.found").read_text())
    return found


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "") for name in RUNS), *((name, "-universal") for name in UNIVERSAL)]
)
def test_deepspeed_continues_as_this_engine_does(
    ours: tuple[Path, dict[str, dict[str, Any]]], theirs: dict[str, dict[str, Any]], name: str, form: str
) -> None:
    expected = ours[1][name]
    apart = _apart(expected, theirs[f"{name}-alone"]["losses"]) if f"{name}-alone" in theirs else 0.0
    tolerance = max(TOLERANCE[RUNS[name][1]], 2 * apart)
    for found in (theirs[key] for key in (name + form, f"{name}{form}-beside") if key in theirs):
        assert found["path"].endswith(f"global_step{NUM_STEPS}/" + Path(found["path"]).name)
        assert found["epoch"] == CLIENT_STATE["epoch"]
        assert found["counters"] == [NUM_STEPS, 0]
        assert found["lrs"] == pytest.approx(expected["lrs"])
        assert found["schedule"] == expected["schedule"]
        assert found["scale"] == expected["scale"]
        assert found["losses"] == pytest.approx(expected["after"], rel=tolerance), apart


def _apart(expected: dict[str, Any], alone: list[float]) -> float:
    """Return how far the losses of both engines are apart, relatively, where neither loads anything."""
    pairs = zip([*expected["before"], *expected["after"]], alone, strict=True)
    return max(abs(float(ours) - theirs) / theirs for ours, theirs in pairs)


def _mixtures(rank: int, world_size: int, folder: str) -> dict[int, list[float]]:
    found = {}
    for stage in deepspeed_experts.STAGES:
        model, config = deepspeed_experts.build(MoE), deepspeed_experts.config_of(stage)
        engine, *_ = launcher.initialize(model=model, model_parameters=model.parameters(), config=config)
        deepspeed_experts.trained(engine, rank, range(deepspeed_experts.NUM_STEPS))
        engine.save_checkpoint(f"{folder}/ours-{stage}")
        found[stage] = deepspeed_experts.trained(engine, rank, deepspeed_experts.AFTER)
        engine.destroy()
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_deepspeed_continues_a_mixture_of_experts(tmp_path: Path, num_ranks: int) -> None:
    """On 4 ranks each set of experts is there twice, and their optimizer is divided."""
    expected = run_on_ranks(num_ranks, _mixtures, str(tmp_path))
    for stage in deepspeed_experts.STAGES:
        export_deepspeed(tmp_path / f"ours-{stage}", tmp_path / f"theirs-{stage}")
    deepspeed.run_module(num_ranks, "harness.train.deepspeed_experts", str(tmp_path))
    for rank in range(num_ranks):
        found = json.loads((tmp_path / f"losses-{rank}").read_text())
        for stage in deepspeed_experts.STAGES:
            assert found[str(stage)] == pytest.approx(expected[rank][stage], rel=1e-5), (stage, rank)
