"""Prove the GPU path on the first NVIDIA GPU of this machine.

    make gpu [PART=1|2|3] [OUT=DIR] [DEVICE=cpu]
    PYTHONPATH=benchmarks python -m gpu [--part 1] [--only WORD,...]

Part 1 says whether it is right, part 2 how fast it is, part 3 what models that do not fit cost. Each has nine minutes.
Every step is a process with a limit of its own. DIR gets gpu.md, a page, gpu.json, all rows, and gpu_steps, all output;
parts that ran before stay in them. With `--device cpu` the same steps run at a tiny size: that shows that they work,
and nothing of a GPU. The exit code is 1 where a step failed, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import ROOT, Goal, Section, is_installed
from gpu.steps import Row, Runner, Step, module

RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "triton", "transformers", "accelerate", "deepspeed")
TITLES = {1: "correctness", 2: "speed", 3: "what does not fit"}
BUDGET_S = 540.0
DRY_PATIENCE = 10.0  # a dry run measures nothing, maybe on a machine that is busy: its limits are so many times as long
JOBS = 5  # steps of part 1 at once: they share the GPU and measure nothing
ENGINES = ("ours", "plain", "DDP", "FSDP2", "DeepSpeed")
GPU_TESTS = (
    *("tests/optim/test_gpu.py", "tests/zero/test_offload_gpu.py", "tests/activation/test_checkpointing.py"),
    *("tests/monitor/test_loss.py", "tests/checkpoint/test_rng.py", "tests/comm/test_compressed.py"),
    *("tests/kernels/test_triton.py", "tests/parallel/test_grouped_experts.py"),
)
HOST = {"device": "cpu"}
OPTIMIZER = {"stage": 2, "offload_optimizer": HOST}
BOTH = {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}
LATE = {"stage": 2, "offload_optimizer": {**HOST, "delayed_update": True, "delayed_update_warmup_steps": 1}}
BESIDE = {"stage": 2, "offload_optimizer": {**HOST, "super_offload": True}}
SUMS_BF16 = {"data_types": {"grad_accum_dtype": "bf16"}}
ALL_BF16 = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


# ---- The steps ----


def _missing(*packages: str) -> str | None:
    lacking = [name for name in packages if not is_installed(name)]
    return f"{' and '.join(lacking)} not installed" if lacking else None


def correctness(device: str, work: Path) -> list[Step]:
    """Return the steps of part 1. work: for what they write."""
    is_cpu, on = device == "cpu", ("--device", device)
    quick, few = ["--quick"] * is_cpu, {"OMP_NUM_THREADS": "1" if is_cpu else "3"}
    found = [
        Step("page-locked memory", module("correct", "pinned", *on), 60),
        Step("kernels and the reference", module("kernels", "parity", *quick, *on), 200),
    ]
    for precision in ("bf16",) if is_cpu else ("fp32", "bf16", "fp16"):
        argv = module("correct", "engine", "--precision", precision, *on)
        found.append(Step(f"one rank, {precision}", argv, 240))
    in_a_group, on_disk = ("--places", "none", "--group"), ("--places", "nvme", "--disk", str(work))
    found += [
        Step("one rank in a group", module("correct", "engine", *in_a_group, *on), 120),
        Step("one rank, disk", module("correct", "engine", *on_disk, *on), 200),
        Step("what the host waits for", module("correct", "waits", *on), 120),
        Step("late streams, one rank", module("ranks", "late", *on, *(["--seeds", "1"] if is_cpu else [])), 150),
        Step("checkpoints", module("correct", "checkpoints", *on), 120),
        Step("another stream", module("correct", "stream", *on), 80),
        *_launched(work),
    ]
    # Alone: ranks that wait for each other and for the same GPU end in time only without others beside them.
    for transport in ("gloo", "staged") if is_cpu else ("nccl", "staged"):
        for precision in ("bf16", "fp32", "fp16") if transport == "nccl" else ("bf16",):
            argv = module("ranks", "two", "--transport", transport, "--precision", precision, *on)
            found.append(Step(f"two ranks by {transport}, {precision}", argv, 120, is_alone=True))
    late = ("--transport", "gloo" if is_cpu else "nccl", "--seeds", "1" if is_cpu else "2")
    found.append(Step("late streams, two ranks", module("ranks", "late", *late, *on), 110, is_alone=True))
    found.append(Step("torch.compile", module("correct", "compiled", *on), 240))
    collect = ["--collect-only"] * is_cpu
    tests = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *collect, *GPU_TESTS)
    found.append(Step("the tests for GPUs", tests, 330, lacks=_missing("pytest", "pytest-timeout", "hypothesis")))
    found += [] if is_cpu else _sanitized()
    return [replace(step, env={**few, **step.env}) for step in found]


def _launched(work: Path) -> list[Step]:
    launch = (sys.executable, "-m", "launcher", "--log-dir", str(work / "runs"), "--num_gpus", "1")
    gpt = (*launch, "examples/train_gpt.py", "--steps", "20", "--sample_bytes", "0", "--plot", str(work / "loss.png"))
    trainer = (*launch, "examples/hf_trainer.py", "--max_steps", "8", "--output_dir", str(work / "trained"))
    needs = _missing("transformers", "accelerate")
    configs = "examples/configs"
    return [
        Step("launch: a GPT", (*gpt, "--deepspeed", f"{configs}/zero2_bf16.json"), 120),
        Step("launch: a GPT offloaded", (*gpt, "--deepspeed", f"{configs}/zero3_offload.json"), 120),
        Step("launch: a Trainer", (*trainer, "--deepspeed", f"{configs}/hf_zero2.json"), 150, lacks=needs),
        Step(
            "launch: a Trainer offloaded",
            (*trainer, "--deepspeed", f"{configs}/hf_zero3_offload.json"),
            150,
            lacks=needs,
        ),
    ]


def _sanitized() -> list[Step]:
    tool = shutil.which("compute-sanitizer")
    lacks = None if tool else "compute-sanitizer not installed; it comes with the CUDA toolkit"
    # Without torch's caching allocator each tensor is an allocation whose bounds the tool knows.
    bare = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TORCH_COMPILE_DISABLE": "1"}
    programs = [
        (kind, "kernels", module("kernels", "parity", "--quick")) for kind in ("memcheck", "racecheck", "initcheck")
    ]
    programs.append(("memcheck", "an engine", module("ranks", "late", "--seeds", "1", "--sleep-ms", "0")))
    return [
        Step(
            f"compute-sanitizer {kind}: {what}",
            (str(tool), "--tool", kind, "--error-exitcode", "9", *argv),
            200,
            env=bare,
            lacks=lacks,
        )
        for kind, what, argv in programs
    ]


def _sizes(device: str, size: str, *words: str) -> tuple[str, ...]:
    few = ("--size", "tiny", "--samples", "2", "--steps", "2", "--warmup", "1")
    return ("--device", device, *(few if device == "cpu" else ("--size", size, *words)))


def speed(device: str, work: Path) -> list[Step]:
    """Return the steps of part 2. Each engine has a process of its own, and its turn in two rounds."""
    rates = ("--numel", "100000", "--rounds", "3") if device == "cpu" else ("--sweep",)
    found = [
        Step("ceilings", module("speed", "ceilings", "--device", device), 70),
        Step("optimizer kernels", module("kernels", "rates", "--device", device, *rates), 110),
    ]

    def turn(engine: str, number: int) -> Step:
        argv = module("speed", "steps", "--engine", engine, *_sizes(device, "1.3b"))
        lacks = _missing("deepspeed") if engine == "DeepSpeed" else None
        return Step(f"GPT 1.3b: {engine}, round {number}", argv, 75, "GPT 1.3b, 8 × 1024 tokens", lacks=lacks)

    found += [turn(engine, 1) for engine in ENGINES]
    for engine in ("ours", "plain"):
        argv = module("speed", "profile", "--engine", engine, *_sizes(device, "1.3b", "--steps", "3"))
        trace = ["--trace", str(work / "trace.json.gz")] * (engine == "ours")
        found.append(Step(f"profile: {engine}", (*argv, *trace), 80, "Profiles"))
    for engine in ("ours", "plain"):
        argv = module("speed", "steps", "--engine", engine, *_sizes(device, "22m"))
        found.append(Step(f"short steps: {engine}", argv, 40, "Short steps, which the host bounds"))
    for name, zero in (("stage 0", {"stage": 0}), ("stage 2 offloaded", OPTIMIZER), ("stage 3 offloaded", BOTH)):
        words = ("--case", name, "--zero", json.dumps(zero), "--estimate", "--recompute")
        argv = module("speed", "steps", *words, *_sizes(device, "350m"))
        found.append(Step(f"memory: {name}", argv, 60, "Memory of 350m and its estimate, blocks recomputed"))
    found += [turn(engine, 2) for engine in reversed(ENGINES)]  # last: without time the figures of one round are left
    return [replace(step, is_alone=True) for step in found]


def large(device: str, work: Path) -> list[Step]:
    """Return the steps of part 3."""
    place = {"device": "nvme", "nvme_path": str(work), "pipeline_read": True, "pipeline_write": True}
    cases: tuple[tuple[str, str, Row, Row, float], ...] = (
        ("1.3b: optimizer", "1.3b", OPTIMIZER, {}, 90),
        ("1.3b: optimizer, sums in bf16", "1.3b", OPTIMIZER, SUMS_BF16, 80),
        ("1.3b: updates a step late", "1.3b", LATE, {}, 80),
        ("1.3b: updates beside backward", "1.3b", BESIDE, {"gradient_clipping": 0.0}, 90),
        ("1.3b: parameters, too", "1.3b", BOTH, {}, 90),
        ("6.7b: optimizer, sums in bf16", "6.7b", OPTIMIZER, SUMS_BF16, 240),
        ("13b: all in bf16", "13b", BOTH, ALL_BF16, 260),
        ("350m: optimizer on disk", "350m", {"stage": 3, "offload_optimizer": place}, {}, 90),
    )
    found = []
    for name, size, zero, settings, limit_s in cases:
        sizes = _sizes(device, size, "--steps", "3", "--warmup", "2")
        words = ("--case", name, "--zero", json.dumps(zero), "--settings", json.dumps(settings), "--recompute")
        estimate = ["--estimate"] * (not settings and zero in (OPTIMIZER, BOTH))  # which knows no other settings
        found.append(Step(name, module("speed", "offload", *words, *estimate, *sizes), limit_s, "Offload"))
    few = ("--steps", "2", "--warmup", "1")
    saves = module("speed", "saves", "--recompute", "--folder", str(work), *_sizes(device, "1.3b", *few))
    found.append(Step("saves of 1.3b", saves, 110))
    return [replace(step, is_alone=True) for step in found]


PARTS: dict[int, Callable[[str, Path], list[Step]]] = {1: correctness, 2: speed, 3: large}


# ---- Goals ----


def goals(results: Row) -> list[Goal]:
    """Return what is asked of a GPU, each with the worst figure that was measured; what was not measured has none."""
    steps = {done["name"]: done for part in results["parts"].values() for done in part["steps"]}
    if any(part["device"] == "cpu" for part in results["parts"].values()):
        return []

    def figures(names: str, cases: str, key: str) -> list[float]:
        rows = [each for name, done in steps.items() if re.match(names, name) for each in done["rows"]]
        return [each[key] for each in rows if re.match(cases, each["case"]) and each.get(key) is not None]

    found: list[Goal] = []

    def ask(name: str, values: list[float], limit: float, *, is_least: bool = False) -> None:
        if values:
            worst = min(values) if is_least else max(values)
            is_met = worst >= limit if is_least else worst <= limit
            asked = f"{'≥' if is_least else '≤'} {limit:g}"
            found.append(Goal(name, asked, f"{worst:.3g}", is_met, "" if is_met else "see the table below"))

    ask("AdamW's part of copy bandwidth", figures("optimizer kernels", "Triton .*AdamW", "of_copy"), 0.9, is_least=True)
    own = figures("GPT 1.3b: ours", "ours", "ms")
    for peer in ENGINES[1:]:
        others = figures(f"GPT 1.3b: {peer},", peer, "ms")
        ask(f"step of 1.3b over {peer}", [min(own) / min(others)] if own and others else [], 1.02)
    for precision in ("bf16", "fp32"):
        ask(
            f"host waits in a step, {precision}", figures("what the host waits for", f"{precision}$", "waits_a_step"), 0
        )
    ask("idle part of a step", figures("profile: ours", "ours", "idle_of_compute"), 0.02)
    ask("peak over the estimate", figures("memory", "stage", "peak_over_estimate"), 1.05)
    ask("hidden part of the bus", figures("1.3b: optimizer", "1.3b", "bus_hidden"), 0.9, is_least=True)
    return found


# ---- The command ----


def machine_facts(device: str) -> dict[str, Any]:
    """Return versions and devices, asked of a process of its own. Exits with 2 where there is no GPU to prove."""
    command = [sys.executable, "-c", "from launcher.probes import environment; environment.main()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.stderr.write(f"torch or the package does not start here:\n{done.stderr[-2000:]}")
        sys.exit(2)
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if device == "cuda" and not facts["devices"]:
        cause = "has no CUDA: install a build with it" if facts["cuda"] is None else "finds no GPU: see nvidia-smi"
        dry = "`make gpu DEVICE=cpu` runs the steps at a tiny size without one"
        sys.stderr.write(f"no GPU to prove the GPU path on: torch {facts['version']} {cause}. {dry}.\n")
        sys.exit(2)
    if device == "cuda" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0]
    return facts


def provenance(section: Section, device: str, facts: dict[str, Any]) -> str:
    """Return how a part was measured."""
    if device == "cpu":
        return section.provenance("**A dry run on a CPU at a tiny size: no figure says anything of a GPU**")
    gpu = facts["devices"][0]
    where = f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, CUDA {facts['cuda']}, NCCL {facts['nccl']}"
    where += f", driver, power and clock {facts['driver']}" if facts.get("driver") else ""
    return section.provenance(f"{where}; optimizer kernel {facts['kernels']['cuda']}")


def main() -> int:
    """Run the parts; return 1 where a step failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=list(PARTS), help="default: all three")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results, of a dry run build/gpu")
    parser.add_argument("--only", default="", metavar="WORD,...", help="steps with one of these in their names")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="for each part; default: %(default)g")
    options = parser.parse_args()
    words = options.only.split(",")
    folder = (options.out or (RESULTS if options.device == "cuda" else ROOT / "build" / "gpu")).resolve()
    is_dry = options.device == "cpu"
    patience = DRY_PATIENCE if is_dry else 1.0
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    paths = [str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ.update(PYTHONPATH=os.pathsep.join(paths).strip(os.pathsep), HF_HUB_OFFLINE="1")
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if is_dry else first
    facts, failed, num_steps = machine_facts(options.device), [], 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the steps end with this
    with tempfile.TemporaryDirectory(prefix="gpu-") as work:
        for part in [options.part] if options.part else PARTS:
            steps = [
                replace(step, limit_s=step.limit_s * patience)
                for step in PARTS[part](options.device, Path(work))
                if any(word in step.name for word in words)
            ]
            if not steps:
                continue
            section = Section("", *PACKAGES, command=f"make gpu PART={part}{' DEVICE=cpu' * is_dry}")
            about = {
                "title": TITLES[part],
                "device": options.device,
                "provenance": provenance(section, options.device, facts),
                "machine": facts,
            }
            runner = Runner(folder, part, about, options.seconds * patience, goals)
            print(f"part {part}, {TITLES[part]}: {len(steps)} steps", flush=True)
            failed += runner.run(steps, 1 if is_dry else JOBS, keeps=bool(options.only))
            num_steps += len(steps)
            if Path(work, "trace.json.gz").exists():
                shutil.copy(Path(work, "trace.json.gz"), folder / "gpu_steps")
    if not num_steps:
        parser.error(f"no step has one of {', '.join(words)} in its name")
    print(f"{num_steps} steps, {len(failed)} failed: {folder / 'gpu.md'}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
