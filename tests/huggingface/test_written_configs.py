"""Configs as accelerate, transformers and Lightning write them, without a word changed: each trains on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.train.ranks import run_on_ranks
from harness.train.zoo import WIDTH, build

import launcher

SAMPLES, STEPS = 8, 3
FP16 = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
SIZES = {"train_batch_size": SAMPLES, "train_micro_batch_size_per_gpu": SAMPLES // 2, "gradient_accumulation_steps": 1}
ON_HOST = {"device": "cpu", "pin_memory": True}
COMMON = {"steps_per_print": 2000, "wall_clock_breakdown": False}


def adamw(**more: Any) -> dict[str, Any]:
    return {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, **more}}


def warmup(type_name: str = "WarmupLR", **more: Any) -> dict[str, Any]:
    params = {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 0}
    return {"type": type_name, "params": {**params, **more}}


BUCKETS = {
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
OF_STAGE_3 = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": WIDTH * WIDTH,
    "stage3_prefetch_bucket_size": 0.9 * WIDTH * WIDTH,
    "stage3_param_persistence_threshold": 10 * WIDTH,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
BF16 = {"fp16": {"enabled": False, **FP16}, "bf16": {"enabled": True}}


def of_plugin(stage: int, optimizer: str | None = None, param: str | None = None, **more: Any) -> dict[str, Any]:
    """What accelerate's plugin makes of its arguments, and `accelerate config` of its answers."""
    return {
        **SIZES,
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": optimizer or "none", "nvme_path": None},
            "offload_param": {"device": param or "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": stage == 3,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "optimizer": adamw(),
        **more,
    }


def of_lightning(stage: int, **more: Any) -> dict[str, Any]:
    """What DeepSpeedStrategy makes of its defaults: it brings the optimizer as an object, a section serves here."""
    zero = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 200_000_000,
        "reduce_bucket_size": 200_000_000,
        "sub_group_size": 1_000_000_000_000,
        **more,
    }
    return {
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": SAMPLES // 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": adamw(),
    }


LIGHTNING_OFFLOAD = {
    "offload_optimizer": {"device": "cpu", "nvme_path": "/local_nvme", "buffer_count": 5, "pin_memory": False},
    "offload_param": {
        "device": "cpu",
        "nvme_path": "/local_nvme",
        "buffer_size": 100_000_000,
        "max_in_cpu": 1_000_000_000,
        "pin_memory": False,
    },
}
WRITTEN: dict[str, dict[str, Any]] = {
    "accelerate's file of stage 2": {
        **SIZES,
        **COMMON,
        **BF16,
        "optimizer": adamw(torch_adam=True, adam_w_mode=True),
        "scheduler": warmup(),
        "zero_optimization": {"stage": 2, "offload_optimizer": ON_HOST, **BUCKETS},
        "gradient_clipping": 1.0,
    },
    "accelerate's file of stage 3": {
        **SIZES,
        **COMMON,
        **BF16,
        "optimizer": adamw(torch_adam=True, adam_w_mode=True),
        "scheduler": warmup(),
        "zero_optimization": {"stage": 3, "offload_optimizer": ON_HOST, "offload_param": ON_HOST, **OF_STAGE_3},
        "gradient_clipping": 1.0,
    },
    "accelerate's plugin": of_plugin(2),
    "accelerate's plugin, parameters offloaded at stage 2": of_plugin(2, param="cpu"),
    "accelerate's plugin, optimizer offloaded": of_plugin(2, "cpu"),
    "the same with torch's Adam": {**of_plugin(2, "cpu"), "optimizer": adamw(torch_adam=True)},
    "accelerate config, stage 2, both": of_plugin(2, "cpu", "cpu"),
    "accelerate config, stage 3, both": of_plugin(3, "cpu", "cpu", bf16={"enabled": True}),
    "transformers' file of stage 2": {
        **SIZES,
        **COMMON,
        **BF16,
        "optimizer": adamw(betas=[0.9, 0.999], eps=1e-8),
        "scheduler": warmup(),
        "zero_optimization": {"stage": 2, "offload_optimizer": ON_HOST, **BUCKETS},
        "gradient_clipping": 1.0,
    },
    "transformers' file of stage 3": {
        **SIZES,
        **COMMON,
        **BF16,
        "optimizer": adamw(betas=[0.9, 0.999], eps=1e-8),
        "scheduler": warmup("WarmupDecayLR", total_num_steps=10),
        "zero_optimization": {"stage": 3, "offload_optimizer": ON_HOST, "offload_param": ON_HOST, **OF_STAGE_3},
        "gradient_clipping": 1.0,
    },
    "Lightning's stage 2": of_lightning(2),
    "Lightning's stage 2 with offload": of_lightning(2, **LIGHTNING_OFFLOAD),
    "Lightning's stage 3 with offload": of_lightning(3, **LIGHTNING_OFFLOAD),
}


def _train(rank: int, world_size: int, name: str) -> list[float]:
    engine = launcher.initialize(model=build("Plain"), config=WRITTEN[name])[0]
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x, y = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES)
        own = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
        dtype = next(engine.module.parameters()).dtype
        loss = engine(x[own].to(dtype), y[own].to(dtype))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    assert engine.global_steps == STEPS
    assert engine.skipped_steps == 0
    engine.destroy()
    return losses


@pytest.mark.parametrize("name", WRITTEN)
def test_what_libraries_write_trains(name: str) -> None:
    for losses in run_on_ranks(2, _train, name):
        assert torch.tensor(losses).isfinite().all()
        assert len(set(losses)) == STEPS


def test_what_has_no_effect_changes_nothing() -> None:
    """`offload_param` below stage 3, and torch's class in place of the kernel of the same rule."""
    plain = run_on_ranks(2, _train, "accelerate's plugin")
    assert run_on_ranks(2, _train, "accelerate's plugin, parameters offloaded at stage 2") == plain
    on_host = run_on_ranks(2, _train, "accelerate's plugin, optimizer offloaded")
    assert run_on_ranks(2, _train, "accelerate config, stage 2, both") == on_host
    for ours, theirs in zip(on_host, run_on_ranks(2, _train, "the same with torch's Adam"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
