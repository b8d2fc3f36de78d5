"""Generate text with a model of transformers whose parameters are sharded over all ranks: ZeRO inference.

    launch --num_gpus 2 examples/hf_zero3_inference.py
    launch --num_gpus 2 examples/hf_zero3_inference.py --model bigscience/T0_3B --offload cpu

Every rank has an input of its own. Without `--model`, which is for one machine, a small T5 learns the answers to these
inputs first, in seconds and on rank 0 alone, and is saved, so that nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, ByT5Tokenizer, T5Config
from transformers.integrations import HfDeepSpeedConfig

os.environ["TOKENIZERS_PARALLELISM"] = "false"

ANSWERS = {
    "Is this review positive or negative? Review: this is the best cast iron skillet you will ever buy": "Positive",
    "Is this review positive or negative? Review: this is the worst restaurant ever": "negative",
}
TEXTS = tuple(ANSWERS)


def save_small_model(folder: Path) -> None:
    """Teach a T5 of two layers, which reads and writes bytes, the answers, and save it."""
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer()
    config = T5Config(
        vocab_size=len(tokenizer), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs = tokenizer(list(TEXTS), padding=True, return_tensors="pt")
    labels = tokenizer(list(ANSWERS.values()), padding=True, return_tensors="pt").input_ids
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ds_config(hidden_size: int, world_size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the config that the guide of transformers gives for ZeRO inference."""
    offload: dict[str, Any] = {"device": args.offload}
    if args.offload == "nvme":
        offload.update(nvme_path=args.nvme_path, max_in_cpu=0)
    return {
        "fp16": {"enabled": False},
        "bf16": {"enabled": args.bf16},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": hidden_size * hidden_size,
            "stage3_prefetch_bucket_size": 0.9 * hidden_size * hidden_size,
            "stage3_param_persistence_threshold": 10 * hidden_size,
        },
        "steps_per_print": 2000,
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "wall_clock_breakdown": False,
    }


def generate(name: str | Path, args: argparse.Namespace) -> None:
    """Load the model in shards, and have each rank answer its own text."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = ds_config(AutoConfig.from_pretrained(name).d_model, world_size, args)
    # While this object is alive from_pretrained() puts each parameter into shards as it builds the model. Without it
    # every rank loads the whole model first.
    dschf = HfDeepSpeedConfig(config)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype=dtype)
    engine = deepspeed.initialize(model=model, config_params=config)[0]
    engine.module.eval()

    text = TEXTS[rank % len(TEXTS)]
    tokenizer = AutoTokenizer.from_pretrained(name)
    inputs = tokenizer.encode(text, return_tensors="pt").to(engine.device)
    with torch.no_grad():
        # Ranks whose text has ended run along until the last one has: each forward needs the shards of all.
        outputs = engine.module.generate(inputs, synced_gpus=True, max_new_tokens=args.max_new_tokens)
    answer = tokenizer.decode(outputs[0], skip_special_tokens=True)
    print(f"rank{rank}:\n   in={text}\n  out={answer}")
    del dschf


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; None: of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="name or folder of a model with an encoder and a decoder")
    parser.add_argument("--offload", choices=("none", "cpu", "nvme"), default="none", help="where the shards are")
    parser.add_argument("--nvme_path", default=tempfile.gettempdir(), help="folder on a fast disk, for --offload nvme")
    parser.add_argument("--bf16", action="store_true", help="half the memory")
    parser.add_argument("--max_new_tokens", type=int, default=20, help="length of the answers")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """Make the small model where none is named, and generate."""
    args = parse()
    deepspeed.init_distributed()
    if args.model is not None:
        generate(args.model, args)
        return
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ.get("WORLD_SIZE", "1"):
        raise SystemExit("the small model is saved on one machine: on several give --model")
    folder: list[str | None] = [None]
    with tempfile.TemporaryDirectory() as own:
        if torch.distributed.get_rank() == 0:
            save_small_model(Path(own))
            folder[0] = own
        torch.distributed.broadcast_object_list(folder)
        generate(Path(str(folder[0])), args)
        torch.distributed.barrier()  # rank 0 removes the folder


if __name__ == "__main__":
    main()
