#!/usr/bin/env python3
r"""Train a small Llama on bytes of text with Hugging Face's Trainer, on the ZeRO engine.

  launch --num_gpus 2 examples/hf_trainer.py --deepspeed examples/configs/hf_zero2.json \
      --output_dir runs/hf --max_steps 20

Nothing is downloaded: the model is made from a config, the tokenizer has one token a byte, and the text is Python's
standard library. Options are those of transformers' TrainingArguments, and those of `ModelArguments` below.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

# What the command line need not say. TrainingArguments has other defaults for these.
DEFAULTS: dict[str, Any] = {
    "disable_tqdm": True,
    "learning_rate": 3e-3,
    "logging_steps": 5,
    "per_device_train_batch_size": 4,
    "report_to": ["none"],
    "save_strategy": "no",
}


@dataclass
class ModelArguments:
    """The size of the model, and its text."""

    hidden_size: int = field(default=64, metadata={"help": "width of the model"})
    num_layers: int = field(default=2, metadata={"help": "blocks of the model"})
    context: int = field(default=128, metadata={"help": "bytes of a sample"})
    data: Path | None = field(default=None, metadata={"help": "a text file; default: Python's own sources"})


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def samples_of(tokenizer: PreTrainedTokenizerFast, path: Path | None, context: int) -> list[dict[str, list[int]]]:
    """Return the text in pieces of `context` tokens."""
    files = [path] if path else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))
    text = "\n".join(file.read_text(errors="replace") for file in files)
    tokens = tokenizer(text)["input_ids"]
    pieces = [tokens[start : start + context] for start in range(0, len(tokens) - context, context)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    parser.set_defaults(**DEFAULTS)
    model_arguments, training_arguments = parser.parse_args_into_dataclasses()
    set_seed(training_arguments.seed)
    tokenizer = byte_tokenizer()
    # After TrainingArguments, which has read the config: at stage 3 `from_config` builds the model sharded. A call of
    # its class would build it whole on each rank.
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=model_arguments.hidden_size,
            intermediate_size=4 * model_arguments.hidden_size,
            num_hidden_layers=model_arguments.num_layers,
            num_attention_heads=4,
            max_position_embeddings=model_arguments.context,
        )
    )
    data = samples_of(tokenizer, model_arguments.data, model_arguments.context)
    trainer = Trainer(
        model=model,
        args=training_arguments,
        train_dataset=data,
        processing_class=tokenizer,  # saved beside the weights
        data_collator=default_data_collator,  # pieces have one length: nothing to pad
    )
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero() and losses:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, saved to {training_arguments.output_dir}")


if __name__ == "__main__":
    main()
