"""`make gpu` without a GPU: its steps run at a tiny size, and its page and its JSON have what they wrote."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.launch.command import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))  # which is not a package
from gpu import __main__ as gpu_path
from gpu.steps import Runner, Step, page_of
from gpu.tracing import summary

A_STEP_OF_EACH_PART = "kernels and the reference,short steps: ours,optimizer on disk"


def run_gpu_path(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as `make gpu` does, where no GPU can be seen."""
    environment = {**os.environ, "PYTHONPATH": "benchmarks", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "only",
    [
        pytest.param(A_STEP_OF_EACH_PART, id="a step of each part"),
        pytest.param("", id="all steps", marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_a_dry_run_writes_the_page_and_the_json(only: str, tmp_path: Path) -> None:
    done = run_gpu_path("--device", "cpu", "--only", only, "--out", str(tmp_path))
    page, results = (tmp_path / "gpu.md").read_text(), json.loads((tmp_path / "gpu.json").read_text())
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{page}"
    for number, part in results["parts"].items():
        assert re.search(r"Measured .+ at commit .+\nOn .+ torch [\d.]+.*\n\*\*A dry run on a CPU", part["provenance"])
        assert f"Command: `make gpu PART={number} DEVICE=cpu`" in page
        steps = [step for step in part["steps"] if not step["outcome"].startswith("not run")]
        assert {step["outcome"] for step in steps} == {"ok"}
        for step in steps:
            assert f"| {step['name']} |" in page
            assert all(f"| {row['case']} |" in page for row in step["rows"])
        assert any(step["rows"] for step in steps)
    assert results["parts"].keys() == {"1", "2", "3"}
    assert "## Goals" not in page, "a CPU says nothing of them"


def test_without_a_gpu_it_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = run_gpu_path("--out", str(tmp_path))
    assert done.returncode == 2
    assert re.fullmatch(r"no GPU to prove the GPU path on: torch \S+ (has no CUDA|finds no GPU): .+\n", done.stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_step_is_a_command_that_can_be_given(device: str, tmp_path: Path) -> None:
    """Those that are no part of this folder are run by tests of their own."""
    steps = [step for part in gpu_path.PARTS.values() for step in part(device, tmp_path)]
    assert len({step.name for step in steps}) == len(steps)
    own = [list(step.argv[1:]) for step in steps if step.argv[1] == "-m" and step.argv[2].startswith("gpu.")]
    assert len(own) > 30
    for _, name, *words in own:
        options = importlib.import_module(name).parser().parse_args(words)
        assert options.device == device
    named = {word for step in steps for word in step.argv if word.startswith(("tests/", "examples/"))}
    assert all((ROOT / path).is_file() for path in named)


def test_all_tests_for_gpus_are_run() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(pytestmark = .*|@)pytest\.mark\.gpu\b", path.read_text(), re.MULTILINE)
    }
    assert marked == set(gpu_path.GPU_TESTS)


# ---- The runner ----


def step_of(name: str, script: str, limit_s: float = 600.0, **facts: Any) -> Step:
    """Return a step that a shell does."""
    return Step(name, ("sh", "-c", script), limit_s, **facts)


def write(case: str, **facts: Any) -> str:
    """Return a shell command that writes a row."""
    return f"echo '{json.dumps({'case': case, **facts})}' >> $STEP_ROWS"


def runner_in(folder: Path, part: int = 1, budget_s: float = 600.0) -> Runner:
    return Runner(folder, part, {"title": "some", "provenance": "Measured.", "device": "cpu"}, budget_s, gpu_path.goals)


def outcomes(folder: Path, part: int = 1) -> dict[str, str]:
    steps = json.loads((folder / "gpu.json").read_text())["parts"][str(part)]["steps"]
    return {step["name"]: step["outcome"] for step in steps}


def test_a_failure_loses_nothing(tmp_path: Path) -> None:
    steps = [
        step_of("first", f"{write('a', figure=1.25)}; sleep 1000 & echo $! > {tmp_path}/left.pid"),
        step_of("wrong", f"{write('b', ok=False)}; {write('c', ok=True)}"),
        step_of("broken", f"{write('d')}; echo why >&2; exit 3"),
        step_of(
            "endless",
            f"{write('half')}; sleep 1000 & echo $! > {tmp_path}/waiting.pid; wait",
            limit_s=3.0,
            is_alone=True,
        ),
        step_of("absent", "exit 1", lacks="a thing is not installed"),
        step_of("last", write("e")),
    ]
    failed = runner_in(tmp_path).run(steps, 2, keeps=False)
    assert sorted(failed) == ["broken", "endless", "wrong"]
    assert outcomes(tmp_path) == {
        "first": "ok",
        "wrong": "1 of 2 rows are wrong",
        "broken": "failed, exit code 3",
        "endless": "killed after 3 s",
        "absent": "not run: a thing is not installed",
        "last": "ok",
    }
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"| {case} |" in page for case in ("a", "b", "c", "d", "half", "e"))
    assert "| a | 1.25 |" in page
    assert "### broken: the end of its output\n\n```\nwhy\n```" in page
    for child in tmp_path.glob("*.pid"):
        status = Path(f"/proc/{child.read_text().strip()}/status")
        assert not status.exists() or "State:\tZ" in status.read_text(), f"{child.stem}: it outlived its step"


def test_no_step_begins_without_time_and_that_is_a_failure(tmp_path: Path) -> None:
    assert runner_in(tmp_path, budget_s=1.0).run([step_of("late", "exit 0")], 1, keeps=False) == ["late"]
    assert outcomes(tmp_path) == {"late": "not run: no time is left"}


def test_parts_and_chosen_steps_join_what_is_there(tmp_path: Path) -> None:
    runner_in(tmp_path).run([step_of("one", "exit 1"), step_of("two", "exit 0")], 1, keeps=False)
    runner_in(tmp_path, part=2).run([step_of("three", "exit 0")], 1, keeps=False)
    assert runner_in(tmp_path).run([step_of("one", "exit 0")], 1, keeps=True) == []
    assert outcomes(tmp_path) == {"two": "ok", "one": "ok"}
    assert outcomes(tmp_path, 2) == {"three": "ok"}
    runner_in(tmp_path).run([step_of("four", "exit 0")], 1, keeps=False)
    assert outcomes(tmp_path) == {"four": "ok"}


def test_goals_are_met_or_missed_by_what_was_measured() -> None:
    def step(name: str, **row: Any) -> dict[str, Any]:
        return {"name": name, "group": name, "outcome": "ok", "output": "", "seconds": 1.0, "rows": [row]}

    steps = [
        step("optimizer kernels", case="Triton 3.6.0, AdamW, fp32, 24 spans", of_copy=0.85),
        step("GPT 1.3b: ours, round 1", case="ours, 1.3b", ms=100.0),
        step("GPT 1.3b: ours, round 2", case="ours, 1.3b", ms=99.0),
        step("GPT 1.3b: plain, round 1", case="plain, 1.3b", ms=110.0),
    ]
    results = {"parts": {"2": {"title": "speed", "provenance": "", "device": "cuda", "steps": steps}}}
    found = {goal.name: (goal.measured, goal.is_met) for goal in gpu_path.goals(results)}
    assert found == {"AdamW's part of copy bandwidth": ("0.85", False), "step of 1.3b over plain": ("0.9", True)}
    assert "| step of 1.3b over plain | ≤ 1.02 | 0.9 | met |" in page_of(results, gpu_path.goals(results))


# ---- Profiles ----


def test_a_trace_says_what_overlaps(tmp_path: Path) -> None:
    """Two steps of 10 ms each: a kernel of 6 ms, a copy of 4 ms of which 3 lie beside it, and a wait."""
    events = []
    for start_us in (0, 10_000):
        events += [
            {"cat": "kernel", "name": "gemm", "ts": start_us, "dur": 6000},
            {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": start_us + 3000, "dur": 4000, "args": {"bytes": 5e9}},
            {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": start_us, "dur": 500},
            {"cat": "kernel", "name": "ncclDevKernel_AllGather", "ts": start_us + 9000, "dur": 1000},
        ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [{"ph": "X", **event} for event in events]}))
    found = summary(tmp_path / "trace.json", 2)
    expected = {"wall_ms": 10.0, "compute_ms": 6.0, "bus_ms": 4.0, "bus_hidden": 0.75, "H2D_GB": 5.0, "D2H_GB": 0.0}
    expected |= {"idle_of_compute": 0.4, "collectives_ms": 1.0, "collectives_hidden": 0.0, "kernels": 2.0}
    assert {key: pytest.approx(found[key]) for key in expected} == expected
    assert found["waits_ms"] == {"cudaStreamSynchronize": 0.5}
    assert found["calls"] == {"cudaStreamSynchronize": 1.0}
