"""Behaviours that Hugging Face's own tests of DeepSpeed name and no other module has; for `harness.train.hf_job`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from huggingface.trainer_cases import config_of, losses_of, model_and_data, train


def case_disk(folder: Path) -> dict[str, Any]:
    """Return the losses at stage 3 with everything on disk, and in memory."""
    on_disk = {"device": "nvme", "nvme_path": str(folder)}
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    config = {**config_of(3), "optimizer": optimizer}
    memory = losses_of(train(folder / "memory", config))
    config["zero_optimization"] |= {"offload_optimizer": on_disk, "offload_param": {**on_disk, "max_in_cpu": 0}}
    return {"memory": memory, "disk": losses_of(train(folder / "disk", {**config_of(3), **config}))}


def case_config_object(folder: Path) -> list[Any]:
    """Return what transformers says of the config in force, while TrainingArguments with one come and go."""
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments
    from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled

    found: list[Any] = []
    for stage in (3, 3, 2):
        model, data = model_and_data()
        args = TrainingArguments(str(folder), deepspeed=config_of(stage), report_to=[])
        trainer = Trainer(model=model, args=args, train_dataset=data)
        found.append((is_deepspeed_zero3_enabled(), deepspeed_config()["zero_optimization"]["stage"]))
        AcceleratorState._reset_state()
        del trainer, args
        gc.collect()
    return [*found, (is_deepspeed_zero3_enabled(), deepspeed_config())]


def case_plugin(folder: Path) -> dict[str, Any]:
    """Return what accelerate's plugin makes of its arguments and of a config, and what it refuses."""
    from accelerate.utils import DeepSpeedPlugin

    flags = [
        DeepSpeedPlugin(zero_stage=stage, zero3_init_flag=True, offload_optimizer_device="cpu").zero3_init_flag
        for stage in (2, 3)
    ]
    plugin = DeepSpeedPlugin(hf_ds_config=config_of(2))
    refused = {}
    try:
        DeepSpeedPlugin(hf_ds_config={"train_batch_size": "auto"})
    except ValueError as error:
        refused["no section"] = str(error)
    try:
        plugin.deepspeed_config_process(train_micro_batch_size_per_gpu=16)
    except ValueError as error:
        refused["auto"] = str(error)
    return {"flags": flags, "stage": plugin.zero_stage, "refused": refused}


def case_prepared(folder: Path) -> dict[str, Any]:
    """Return the classes of what `Accelerator.prepare` gives, and the config that it has filled in."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch.utils.data import DataLoader

    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1, gradient_clipping=1.0)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model, data = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(data, batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    config = accelerator.deepspeed_config
    return {
        "is engine": type(model) is DeepSpeedEngine,
        "classes": [type(optimizer).__name__, type(schedule).__name__],
        "batch": [config["train_batch_size"], config["train_micro_batch_size_per_gpu"]],
        "untested": config["zero_allow_untested_optimizer"],
    }


def case_arange(folder: Path) -> list[float]:
    """Return how far the rotary table of a bf16 model at stage 3 is from that of plain torch."""
    import torch
    from transformers import AutoModel, GPTJConfig
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions

    zero = {"stage": 3}
    keep = HfDeepSpeedConfig({"train_batch_size": 2, "zero_optimization": zero, "bf16": {"enabled": True}})
    config = GPTJConfig(n_embd=32, n_layer=1, n_head=2, rotary_dim=4, n_positions=512, vocab_size=64)
    model = AutoModel.from_config(config)
    assert keep is not None
    expected = create_sinusoidal_positions(512, 4)
    found = model.h[0].attn.embed_positions
    return [float((found.float() - expected).abs().max()), float(model.h[0].attn.q_proj.weight.dtype == torch.bfloat16)]
