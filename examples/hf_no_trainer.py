"""Train a Hugging Face causal language model in a loop of one's own, with accelerate on the ZeRO engine.

    launch --num_gpus 2 examples/hf_no_trainer.py --zero-stage 3 --output model

Nothing is downloaded: the model is made from a configuration, a token is a byte, and the text is `--data FILE` or the
sources of the Python standard library. With `--output FOLDER` the model is saved where `from_pretrained` finds it.
`--save FOLDER` keeps a checkpoint there, from which the same command continues.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, get_cosine_schedule_with_warmup

VOCABULARY_SIZE = 256  # one token per byte value
MAX_BYTES = 2_000_000


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """Windows of a text: each is [length] token ids, which are their own labels."""

    def __init__(self, text: bytes, length: int) -> None:
        self.rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // length * length].view(
            -1, length
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index].long()
        return {"input_ids": row, "labels": row}


def read_text(path: Path | None) -> bytes:
    """Return a file's bytes, or of the standard library's sources."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if path is None else [path]
    return b"\n".join(each.read_bytes() for each in paths)[:MAX_BYTES]


def build_model(hidden_size: int, num_layers: int) -> PreTrainedModel:
    """Return a model from a configuration; at stage 3 each rank gets its shard of it from the start."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=max(1, hidden_size // 32),
        num_key_value_heads=max(1, hidden_size // 32),
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero-stage", type=int, choices=range(4), default=2)
    parser.add_argument("--offload", action="store_true", help="optimizer states in host memory")
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], default="no")
    parser.add_argument("--data", type=Path, help="a text file; default: Python's own sources")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8, help="windows of one rank in one forward")
    parser.add_argument("--accumulation", type=int, default=1, help="forwards of one step")
    parser.add_argument("--length", type=int, default=128, help="bytes of a window")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--save", type=Path, help="folder of the checkpoint, from which the next run continues")
    parser.add_argument("--output", type=Path, help="folder for the trained model")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    plugin = DeepSpeedPlugin(
        zero_stage=args.zero_stage,
        gradient_accumulation_steps=args.accumulation,
        gradient_clipping=1.0,
        offload_optimizer_device="cpu" if args.offload else "none",
        zero3_save_16bit_model=True,
    )
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        mixed_precision=args.mixed_precision,
        step_scheduler_with_optimizer=False,  # the schedule counts steps, not steps times ranks
    )
    set_seed(0)
    model = build_model(args.hidden_size, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
    loader = DataLoader(Bytes(read_text(args.data), args.length), args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if len(loader) == 0:
        raise SystemExit("the text is shorter than a batch of each rank: give more --data or a smaller --batch-size")

    step = 0
    if args.save is not None and args.save.exists():
        accelerator.load_state(str(args.save))
        step = model.global_steps
        accelerator.print(f"continuing at step {step}")
    losses: list[torch.Tensor] = []
    while step < args.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if not accelerator.sync_gradients:
                continue
            schedule.step()
            step += 1
            if step % 10 == 0 or step in (1, args.steps):
                mean = accelerator.gather(torch.stack(losses)).mean().item()
                accelerator.print(f"step {step} loss {mean:.3f} lr {schedule.get_last_lr()[0]:.2e}")
                losses = []
            if step >= args.steps:
                break

    if args.save is not None:
        accelerator.save_state(str(args.save))
    if args.output is not None:
        accelerator.unwrap_model(model).save_pretrained(
            args.output,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
