"""Runs of transformers' Trainer, for `harness.hf_job`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def model_and_data() -> tuple[Any, list[dict[str, Any]]]:
    """Return a causal language model of two layers, the same on every rank, and 64 examples of 16 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=128,
        )
    )
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 128, (64, 16), generator=generator)
    return model, [{"input_ids": row, "labels": row} for row in rows]


def config_of(stage: int) -> dict[str, Any]:
    """Return a config in which all that the Trainer knows is "auto", at a stage of ZeRO."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
    }


def train(folder: Path, config: dict[str, Any], **arguments: Any) -> Any:
    """Train a few steps with a config; return the Trainer."""
    from transformers import Trainer, TrainingArguments

    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "report_to": [],
        "disable_tqdm": True,
    }
    args = TrainingArguments(deepspeed=config, **{**options, **arguments})
    model, data = model_and_data()
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    return trainer


def losses_of(trainer: Any) -> list[float]:
    """Return the losses that were logged, step by step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def case_stage_2(folder: Path) -> list[float]:
    """Return the losses of an unmodified Trainer at stage 2."""
    return losses_of(train(folder / "stage_2", config_of(2)))


def case_stage_3(folder: Path) -> list[float]:
    """Return the losses at stage 3."""
    return losses_of(train(folder / "stage_3", config_of(3)))
