"""One `Trainer` script with DDP, our engine and DeepSpeed: losses, step time and memory.

    python benchmarks/hf_trainer.py [--rounds 3] [--models llama,gpt2,t5,vit] [--engines PREFIX,...] [--steps 10]
        [--width 512] [--output FILE]

Each engine trains the same models, built from configurations, each in a job of two ranks on the CPU, in fp32 and with
the same AdamW, schedule and clipping, all of them the Trainer's own. Jobs take turns, in another order each round.
Losses are compared with those of DDP. Memory is the growth of a rank's resident set from before its model is built, at
its highest. accelerate has no way to run DeepSpeed on CPUs: for DeepSpeed alone the script sets accelerate up itself.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import BIN, NOT_INSTALLED, ROOT, Section, argument_parser, is_installed, median, rounds_text, table

SAMPLES = 256
CLIP = 0.5
MODELS = ("llama", "gpt2", "t5", "vit")


@dataclass(frozen=True)
class Candidate:
    """An engine, and the configuration it is given."""

    engine: str  # of `launch --engine`: "builtin" is ours, "auto" DeepSpeed
    zero: dict[str, Any] | None  # zero_optimization; None: DDP


def _candidates() -> dict[str, Candidate]:
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    zeros: dict[str, dict[str, Any]] = {f"stage {stage}": {"stage": stage} for stage in range(4)}
    zeros["stage 2, optimizer offloaded"] = offload
    found = {"DDP": Candidate("builtin", None)}
    found |= {f"launch {name}": Candidate("builtin", zero) for name, zero in zeros.items()}
    return found | {f"DeepSpeed {name}": Candidate("auto", zero) for name, zero in zeros.items()}


CANDIDATES = _candidates()


# ---- a rank ----


def build_model(name: str, width: int) -> Any:
    """Return a model of two layers, the same on every rank, without dropout."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    heads, words = max(1, width // 64), 32 * width
    if name == "llama":
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(
                hidden_size=width,
                intermediate_size=3 * width,
                num_hidden_layers=2,
                num_attention_heads=heads,
                num_key_value_heads=heads,
                vocab_size=words,
            )
        )
    if name == "gpt2":
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = hf.GPT2Config(n_embd=width, n_layer=2, n_head=heads, vocab_size=words, **dropouts)
        return hf.GPT2LMHeadModel(config)
    if name == "t5":
        config = hf.T5Config(
            d_model=width, d_kv=64, d_ff=3 * width, num_layers=2, num_heads=heads, vocab_size=words, dropout_rate=0.0
        )
        config.decoder_start_token_id = 0
        return hf.T5ForConditionalGeneration(config)
    config = hf.ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        image_size=64,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    return hf.ViTForImageClassification(config)


def examples_of(name: str, width: int) -> list[dict[str, Any]]:
    """Return the examples to train on: tokens, or images with labels."""
    import torch

    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        images = torch.randn(SAMPLES, 3, 64, 64, generator=generator)
        return [{"pixel_values": image, "labels": number % 10} for number, image in enumerate(images)]
    rows = torch.randint(1, 32 * width, (SAMPLES, 64), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def resident_bytes(name: str) -> int:
    """Return a field of /proc/self/status: VmRSS is what is resident now, VmHWM the most since it was reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def train(name: str, candidate: Candidate, steps: int, width: int, folder: Path) -> dict[str, Any]:
    """Train one model through the Trainer; return its losses, the seconds of its steps and what memory it took."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):  # type: ignore[misc]  # the Trainer's class is untyped
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin_s = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.begin_s)

    Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident set
    before_bytes = resident_bytes("VmRSS")
    options: dict[str, Any] = {}
    if candidate.zero is not None:
        options["deepspeed"] = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": candidate.zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    if candidate.engine == "auto":
        options["accelerator_config"] = {"use_configured_state": True}
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=steps,
        learning_rate=1e-3,
        max_grad_norm=CLIP,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=candidate.zero is None,  # else the Trainer sees no accelerator, and each rank trains alone
        **options,
    )
    clock = Clock()
    trainer = Trainer(
        model=build_model(name, width), args=args, train_dataset=examples_of(name, width), callbacks=[clock]
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = clock.seconds[2:] or clock.seconds
    return {"losses": losses, "step_s": median(seconds), "grown_bytes": resident_bytes("VmHWM") - before_bytes}


def rank_main(name: str, model: str, steps: int, width: int, folder: Path) -> None:
    """Train a model, and write what rank 0 found."""
    from accelerate import PartialState

    candidate = CANDIDATES[name]
    if candidate.engine == "auto":
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
    found = train(model, candidate, steps, width, folder)
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))


# ---- the page ----


@dataclass
class Measured:
    """What the jobs of one engine found for one model."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    grown_mib: list[float] = field(default_factory=list)


def run_job(name: str, model: str, steps: int, width: int) -> dict[str, Any]:
    """Run one job; return what its rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--rank", name, "--models", model, "--steps", str(steps), "--width", str(width)]
        done = subprocess.run(
            [
                BIN / "launch",
                "--num_gpus=2",
                f"--engine={CANDIDATES[name].engine}",
                __file__,
                *words,
                f"--folder={folder}",
            ],
            cwd=folder,
            env={
                **os.environ,
                "PATH": f"{BIN}:{os.environ['PATH']}",  # another ninja would build DeepSpeed's operators again
                "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
        )
        figures = Path(folder, "found.json")
        # DeepSpeed's ranks sometimes abort in the end of their interpreter, when all is measured.
        if done.returncode and (CANDIDATES[name].engine == "builtin" or not figures.exists()):
            sys.exit(f"{name}: exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(figures.read_text())
        return found


def measure(
    names: list[str], models: list[str], rounds: int, job: Callable[..., dict[str, Any]]
) -> dict[str, dict[str, Measured]]:
    """Run every job once a round, in another order each round."""
    found = {name: {model: Measured() for model in models} for name in names}
    order = list(names)
    chance = random.Random(0)
    for number in range(rounds):
        chance.shuffle(order)
        for name in order:
            for model in models:
                print(f"round {number + 1}: {name}, {model}", file=sys.stderr, flush=True)
                figures, measured = job(name, model), found[name][model]
                measured.losses = figures["losses"]
                measured.step_s.append(figures["step_s"])
                measured.grown_mib.append(figures["grown_bytes"] / 2**20)
    return found


def section_of(model: str, found: dict[str, dict[str, Measured]]) -> str:
    """Return the table of one model."""
    base = found["DDP"][model]
    rows = []
    for name, of_models in found.items():
        measured = of_models[model]
        difference = max(abs(a - b) / abs(b) for a, b in zip(measured.losses, base.losses, strict=True))
        step_s, grown_mib = median(measured.step_s), median(measured.grown_mib)
        ratios = [ours / ddps for ours, ddps in zip(measured.step_s, base.step_s, strict=True)]
        rows.append(
            [
                name,
                f"{measured.losses[0]:.6f} … {measured.losses[-1]:.6f}",
                f"{difference:.1e}",
                f"{1000 * step_s:.0f} ms",
                f"{median(ratios):.2f}",
                f"{grown_mib:.0f} MiB",
                f"{grown_mib / median(base.grown_mib):.2f}",
            ]
        )
    header = ["engine", "losses", "apart from DDP's", "step", "over DDP", "memory", "over DDP"]
    return f"### {model}\n\n{table(header, rows)}"


def main() -> None:
    """Measure, and write the section; as a rank, train."""
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--engines", default="DDP,launch,DeepSpeed", help="those whose names begin so")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rank", help="engine: be a rank of its job")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    models = options.models.split(",")
    if options.rank:
        rank_main(options.rank, options.models, options.steps, options.width, options.folder)
        return
    page = Section("The Trainer of transformers", "torch", "transformers", "accelerate", "deepspeed")
    prefixes = tuple(options.engines.split(","))
    names = [name for name in CANDIDATES if name == "DDP" or name.startswith(prefixes)]
    missing = [name for name in names if CANDIDATES[name].engine == "auto" and not is_installed("deepspeed")]
    names = [name for name in names if name not in missing]
    job = functools.partial(run_job, steps=options.steps, width=options.width)
    found = measure(names, models, options.rounds, job)
    about = (
        "2 ranks on the CPU, one thread each, fp32; 4 samples a rank and step; torch's AdamW, linear schedule and\n"
        f"clipping to {CLIP} as the Trainer sets them. Apart: the largest relative difference of a loss to DDP's at\n"
        "the same step."
    )
    left_out = f"\n\nDeepSpeed: {NOT_INSTALLED}." if missing else ""
    text = "\n\n".join([about + left_out, *(section_of(model, found) for model in models)])
    page.write(rounds_text(options.rounds, "jobs in turns"), text, options.output)


if __name__ == "__main__":
    main()
