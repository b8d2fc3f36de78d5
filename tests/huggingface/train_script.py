"""A script as users of transformers have it, with the arguments of the Trainer: it knows nothing of the engine.

With INSTALL in the environment it has the one line that other launchers need.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

if "INSTALL" in os.environ:
    import launcher.compat

    launcher.compat.install()

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


@dataclass
class DataArguments:
    """What to train on."""

    num_rows: int = field(default=8)


def main() -> None:
    """Train, and leave the losses in the folder of the output."""
    data, args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))
    tokens = torch.randint(0, 128, (data.num_rows, 16), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    trainer.train()
    losses = [str(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    engine = trainer.model_wrapped
    facts = [type(engine).__module__, str(engine.world_size), str(engine.zero_optimization_stage())]
    if trainer.is_world_process_zero():
        Path(args.output_dir, "told.txt").write_text("\n".join([" ".join(facts), *losses]))


if __name__ == "__main__":
    main()
