"""What `launch plan` predicts beside what runs: bytes and seconds of many settings, and figures that others published.

    python benchmarks/plan.py [--rounds 5] [--layers 6] [--seconds 15] [--output FILE]

The machine is probed, a script is rehearsed, and all settings of one global batch are planned. Then one job of 2 ranks
builds an engine of each setting in turn, in another order each round, and times its steps; and once it follows each of
them operation by operation, for the bytes that torch allocates.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Goal, Section, argument_parser, goals_table, median, table

from launcher.cli.commands.plan import PlanOptions, question_of
from launcher.cli.commands.plan_view import label
from launcher.cli.model_source import find_model
from launcher.cli.script_plan import rehearse_rows
from launcher.config.load import patched
from launcher.config.schema import Config
from launcher.planner.computing import Transformer
from launcher.planner.estimate import Machines
from launcher.planner.hardware import gpu_named, hardware_of
from launcher.planner.memory import Setting, Workload, rank_memory
from launcher.planner.model import parse_count, typical_model, typical_shape
from launcher.planner.plan import Plan, Question, Row, plan
from launcher.planner.settings import at, in_precision, resolve, setting_of
from launcher.planner.tuning import Outcome, Trial, learned

NUM_RANKS, GLOBAL_BATCH, LENGTH = 2, 16, 128
STEPS_A_TURN = 2
LEARNT_EVERY = 7  # of the settings, one is learnt from
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


def model_of(num_layers: int) -> Any:
    """Return a small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=num_layers, hidden_size=384, intermediate_size=1024, num_attention_heads=6, vocab_size=2048,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(num_layers: int, config: dict[str, Any], num_steps: int) -> list[float]:
    """Train for some steps; return the seconds of each."""
    import torch

    import launcher.engine.build

    torch.manual_seed(0)
    engine, *_ = launcher.engine.build.initialize(model=model_of(num_layers), config=config)
    ids = torch.randint(0, 2048, (engine.train_micro_batch_size_per_gpu(), LENGTH))
    seconds = []
    for _ in range(num_steps):
        begun_s = time.perf_counter()
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        seconds.append(time.perf_counter() - begun_s)
    engine.destroy()
    return seconds


def on_ranks(arguments: Sequence[str]) -> None:
    """Be a rank of the job that measures: time each setting in turns, then follow each; rank 0 writes the result."""
    from launcher.planner.rehearsal import PHASES_OF_STEP, RankRehearsal
    from launcher.rehearse.follow import Follower, RealTensors

    path, num_layers, rounds = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    configs = json.loads(path.read_text())
    seconds: list[list[float]] = [[] for _ in configs]
    order = list(range(len(configs)))
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for index in order:
            times = train(num_layers, configs[index], STEPS_A_TURN + 1)[1:]
            seconds[index] += times
    sizes = []
    for config in configs:
        follower = Follower(RankRehearsal(0, NUM_RANKS, NUM_RANKS), 2)
        with follower.running(RealTensors(follower.ledger)):
            train(num_layers, config, 3)
        peaks = follower.results().peaks
        sizes.append(max(sum(peaks[phase].values()) - peaks[phase].get("host", 0) for phase in PHASES_OF_STEP))
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps({"seconds": seconds, "bytes": sizes}))


def main() -> None:
    if sys.argv[1:2] == ["--ranks"]:
        on_ranks(sys.argv[2:])
        return
    if sys.argv[1:2] == ["--script"]:  # what is rehearsed
        train(int(sys.argv[2]), json.loads(sys.argv[3]), 100)
        return
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=15.0, help="of the probe")
    parser.add_argument("--micro-batches", default="1,2,4,8", help="comma-separated divisors of 8")
    parser.add_argument("--raw", help="file for all that was predicted and measured, as JSON")
    arguments = parser.parse_args()
    section = Section("Plans beside runs", "torch", "transformers")
    launch = [sys.executable, "-m", "launcher"]
    subprocess.run(
        [*launch, "probe", "--num-gpus", str(NUM_RANKS), "--seconds", str(arguments.seconds)],
        check=False, stdout=subprocess.DEVNULL,  # a rank that is slow just then is named, and no failure here
    )  # fmt: skip
    words = ["--global-batch", str(GLOBAL_BATCH), __file__, "--script", str(arguments.layers), json.dumps(BASE)]
    options = options_of(words)
    found = plan(question_of(options))
    sizes = [int(size) for size in arguments.micro_batches.split(",")]
    found = rehearse_rows(found, options.command, [row for row in found.rows if is_measured(row, sizes)])
    rows = [row for row in found.rows if is_measured(row, sizes)]
    configs = [patched(BASE, row.config()) for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "configs.json")
        path.write_text(json.dumps(configs))
        job = [*launch, "--num-gpus", str(NUM_RANKS), "--log-dir", folder, "--quiet"]
        words = [__file__, "--ranks", str(path), str(arguments.layers), str(arguments.rounds)]
        subprocess.run([*job, *words], check=True, stdout=subprocess.DEVNULL)
        measured = json.loads(path.read_text())
    # Load of others only adds, and here whole turns take half longer than others of the same setting.
    seconds = [min(each) for each in measured["seconds"]]
    medians = [median(each) for each in measured["seconds"]]
    if arguments.raw is not None:
        parts = [{"label": label(row), "micro": row.micro_batch, **row.time.parts} for row in rows]
        Path(arguments.raw).write_text(json.dumps({"parts": parts, **measured}))
    predicted = [row.seconds for row in rows]
    errors = [row.memory.device / size - 1 for row, size in zip(rows, measured["bytes"], strict=True)]
    first = seconds[predicted.index(min(predicted))]
    correlation = statistics.correlation(ranks_of(predicted), ranks_of(seconds))  # Spearman's
    ratios = [own / real for own, real in zip(predicted, seconds, strict=True)]
    learnt_error = error_after_learning(rows, seconds)
    _, ten_thousand_s = large_plan()
    goals = [
        Goal("settings", "≥ 24", str(len(rows)), len(rows) >= 24),
        Goal(
            "predicted beside allocated bytes",
            "≤ 5 %",
            f"{100 * max(map(abs, errors)):.1f} %",
            max(map(abs, errors)) <= 0.05,
        ),
        Goal("rank correlation of predicted and measured steps", "≥ 0.9", f"{correlation:.3f}", correlation >= 0.9),
        Goal("first choice beside the quickest", "≤ 1.10", f"{first / min(seconds):.2f}", first <= 1.1 * min(seconds)),
        Goal("plan for 10,000 ranks", "< 10 s", f"{ten_thousand_s:.1f} s", ten_thousand_s < 10),
    ]
    lines = [
        [
            label(row), f"{row.micro_batch} × {row.num_micro_batches}", f"{1000 * row.seconds:.0f}",
            f"{1000 * real:.0f}", f"{row.seconds / real:.2f}",
            f"{row.memory.device / 2**20:.1f}", f"{size / 2**20:.1f}",
        ]
        for row, real, size in sorted(zip(rows, seconds, measured["bytes"], strict=True), key=lambda each: each[1])
    ]  # fmt: skip
    text = [
        goals_table(goals),
        f"Measured is the quickest step of each setting. By the medians of its steps the rank correlation is"
        f" {statistics.correlation(ranks_of(predicted), ranks_of(medians)):.3f}, and the first choice takes"
        f" {medians[predicted.index(min(predicted))] / min(medians):.2f} of the quickest.",
        f"Predicted over measured seconds: median {median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}. With"
        f" what `launch tune` learns of {len(rows[::LEARNT_EVERY])} of these settings, the others are predicted to"
        f" within {100 * learnt_error:.0f} % (median).",
        table(
            ["setting", "micro-batch", "predicted, ms", "measured, ms", "ratio", "predicted, MiB", "allocated, MiB"],
            lines,
        ),
        "GB (10⁹) of model states of a rank: Rajbhandari et al. 2020, ZeRO, table 1, and the planner; fp16, Adam:",
        table(*zero_table()),
        "Tokens a second and GPU of torchtitan's pages (December 2024 and June 2025, H100 of 96 GB and 500 W, sequences"
        " of 8,192; selective recomputation is between none and all), and the plan for these ranks and batches at stage"
        " 3:",
        table(*titan_table()),
    ]
    rounds = f"{arguments.rounds} rounds of {STEPS_A_TURN} steps (settings in turns, another order each round)"
    section.write(rounds, "\n\n".join(text), arguments.output)


def error_after_learning(rows: Sequence[Row], seconds: Sequence[float]) -> float:
    """Return the median relative error of the other settings, once some were measured."""
    outcomes = [
        Outcome(Trial(label(row), {}, row.micro_batch, row.num_micro_batches, parts=row.time.parts), real)
        for row, real in zip(rows, seconds, strict=True)
    ]
    factors = learned(outcomes[::LEARNT_EVERY], "")
    assert factors is not None, "there are times"
    others = [each for index, each in enumerate(outcomes) if index % LEARNT_EVERY]
    return median([abs(factors.seconds(each.trial.parts) / (each.step_s or 1.0) - 1) for each in others])


def ranks_of(values: Sequence[float]) -> list[int]:
    """Return the place of each value among all."""
    order = sorted(values)
    return [order.index(value) for value in values]


def is_measured(row: Row, micro_batches: Sequence[int]) -> bool:
    """Whether a planned row is one of those that run."""
    return row.micro_batch in micro_batches and not row.patch and not row.is_checkpointed


def options_of(words: Sequence[str]) -> PlanOptions:
    """Return what the command line would."""
    from launcher.cli.commands.plan import plan as command

    context = command.make_context("plan", list(words))
    return PlanOptions(**context.params)


def large_plan() -> tuple[Plan, float]:
    """Plan a model of 70 B on 10,000 ranks; return the seconds that it takes."""
    begun_s = time.monotonic()
    found = plan(question("70B", 1250, 10_000))
    return found, time.monotonic() - begun_s


def question(size: str, num_nodes: int, global_batch: int) -> Question:
    """Return the question for a model of a usual shape on nodes of 8 H100."""
    num_params = parse_count(size) or 0
    shape = typical_shape(num_params)
    gpu = gpu_named("H100-80GB")
    machines = Machines(num_nodes, 8, gpu.memory_gb * 10**9)
    base = resolve(in_precision(Config(), "bf16"), machines.world_size, shape.hidden_size)
    model = typical_model(num_params, shape)
    return Question(model, Transformer(shape, Workload(1, 4096)), machines, hardware_of(gpu, 8), base, global_batch)


# Rajbhandari et al. 2020, "ZeRO", table 1: GB of model states of a rank, 16 bytes a parameter without sharding.
ZERO_PAPER = {
    "7.5B": {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
    },
    "128B": {1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32), 256: (518, 263, 8)},
}


def zero_table() -> tuple[list[str], list[list[str]]]:
    """Return ZeRO's table beside the planner's bytes. The engine sums gradients in fp32: two bytes more each."""
    header = ["parameters", "ranks", "stage 1, 2, 3 by the paper", "by the planner, with 16-bit gradients"]
    rows = []
    for size, by_ranks in ZERO_PAPER.items():
        num_params = parse_count(size) or 0
        model = typical_model(num_params, typical_shape(num_params))
        for num_ranks, paper in by_ranks.items():
            own = []
            for stage in (1, 2, 3):
                setting = paper_setting(stage, num_ranks)
                own.append(rank_memory(model, setting, num_ranks).model_states / 1e9)
            rows.append([size, str(num_ranks), _numbers(paper), _numbers(own)])
    return header, rows


# Model, nodes of 8, tensor ranks, micro-batch, global batch, whether all is recomputed: tokens/s and GPU as published,
# plain and with torch.compile; GiB of the plain one.
# https://github.com/pytorch/torchtitan: benchmarks/llama3_h100_202412_torchtitan.md, asyncTP_llama3_h100_2025-06_...md
TITAN = (
    ("8B", 1, 1, 2, 16, False, "5,762; compiled 6,667", 82.4),
    ("8B", 16, 1, 2, 256, False, "5,605; compiled 6,514", 67.0),
    ("8B", 8, 8, 12, 96, False, "compiled 4,378", None),
    ("70B", 32, 8, 16, 512, True, "compiled 597", None),
)
_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128_256, "num_key_value_heads": 8}
LLAMAS = {
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14_336},
    "70B": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28_672},
}


def titan_table() -> tuple[list[str], list[list[str]]]:
    """Return torchtitan's figures beside those of the plan, without and with recomputation."""
    header = ["model", "GPUs", "mesh", "published tokens/s", "plan, none recomputed", "plan, all recomputed",
              "published GiB", "plan's GiB, none to all"]  # fmt: skip
    lines = []
    for size, num_nodes, tensor, micro_batch, global_batch, is_full, published, gib in TITAN:
        rows = titan_rows(size, num_nodes, tensor, micro_batch, global_batch)
        rates = [global_batch * 8192 / row.seconds / (8 * num_nodes) for row in rows]
        sizes = [row.memory.device / 2**30 for row in rows]
        mesh = f"{num_nodes * 8 // tensor} × {tensor}"
        if is_full:
            published += ", all recomputed"
        lines.append([
            size, str(8 * num_nodes), mesh, published, f"{rates[0]:,.0f}", f"{rates[1]:,.0f}",
            "" if gib is None else f"{gib}", f"{sizes[0]:.1f} to {sizes[1]:.1f}",
        ])  # fmt: skip
    return header, lines


def titan_rows(size: str, num_nodes: int, tensor: int, micro_batch: int, global_batch: int) -> list[Row]:
    """Return the rows at stage 3 without and with recomputation."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps({**_LLAMA, **LLAMAS[size]}))
        model = find_model(str(path), lambda _: None)
    shape = model.shape
    assert shape is not None, "the config has it"
    machines = Machines(num_nodes, 8, 96 * 10**9)
    base = resolve(in_precision(Config(), "bf16"), machines.world_size, shape.hidden_size)
    hardware = hardware_of(gpu_named("H100-80GB"), 8)
    own = Question(
        model, Transformer(shape, Workload(1, 8192)), machines, hardware, base, global_batch, frozenset({"tensor"})
    )  # fmt: skip
    found = [
        row
        for row in plan(own).rows
        if (row.setting.stage, row.setting.sizes.tensor, row.micro_batch) == (3, tensor, micro_batch)
        and not row.patch
        and not row.setting.policy.offload.is_any
    ]
    return sorted(found, key=lambda row: row.is_checkpointed)


def paper_setting(stage: int, num_ranks: int) -> Setting:
    """Return the setting of the paper: fp16 gradients, fp32 master weights, Adam; nothing stays unsharded."""
    config = in_precision(Config(), "fp16")
    types = config.data_types.model_copy(update={"grad_accum_dtype": "fp16"})
    zero = config.zero_optimization.model_copy(update={"stage3_param_persistence_threshold": 0})
    config = config.model_copy(update={"data_types": types, "zero_optimization": zero})
    return setting_of(at(resolve(config, num_ranks, None), stage, "none", "none"), num_ranks)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


if __name__ == "__main__":
    main()
