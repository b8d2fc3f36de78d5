"""Training loops of a script's own with accelerate's `Accelerator`, for `harness.train.hf_job`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from harness.refused import refused
from huggingface.trainer_cases import WARMUP_DECAY_LR, config_of, model_and_data
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaForCausalLM

MICRO_BATCH, ACCUMULATION, LEARNING_RATE, MAX_NORM = 2, 2, 1e-2, 1.0


def rate_at(step: int) -> float:
    """Return the factor of a schedule, which accelerate steps once for each rank."""
    return 1 / (1 + step)


def prepared(plugin: DeepSpeedPlugin | None, **options: Any) -> tuple[Accelerator, Any, Any, Any, Any]:
    """Return an accelerator with the usual model, torch's AdamW, the data and a schedule, all prepared."""
    accelerator = Accelerator(deepspeed_plugin=plugin, **options)
    model, data = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
    loader = DataLoader(data, batch_size=MICRO_BATCH)
    return (accelerator, *accelerator.prepare(model, optimizer, loader, schedule))


def plugin_of(stage: int, **options: Any) -> DeepSpeedPlugin:
    """Return a plugin by its own arguments, without a config."""
    return DeepSpeedPlugin(
        zero_stage=stage,
        gradient_accumulation_steps=ACCUMULATION,
        gradient_clipping=MAX_NORM,
        zero3_save_16bit_model=True,
        **options,
    )


def train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, schedule: Any, num_steps: int = 3) -> Any:
    """Train as accelerate's guide writes it; return the losses over all ranks, norms and learning rates of steps."""
    losses, norms, rates, step = [], [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        step.append(loss.detach())
        if accelerator.sync_gradients:
            losses.append(float(accelerator.gather(torch.stack(step)).mean()))
            rates.append(schedule.get_last_lr()[0])
            step = []
        if len(losses) == num_steps:
            break
    return {"losses": losses, "norms": norms, "rates": rates}


def alone(num_steps: int = 3) -> dict[str, Any]:
    """Return what plain torch does with the same model and global batch in one process."""
    model, data = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rows = torch.stack([row["input_ids"] for row in data])
    size = MICRO_BATCH * ACCUMULATION * dist.get_world_size()
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(num_steps):
        batch = rows[step * size : (step + 1) * size]
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate_at(step * dist.get_world_size())
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        found["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(float(loss))
    return {**found, "state": model.state_dict()}


def _against_torch(stage: int, **options: Any) -> dict[str, Any]:
    accelerator, model, *rest = prepared(plugin_of(stage, **options))
    found = train(accelerator, model, *rest)
    expected = alone()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        apart = torch.cat([(state[key] - value).flatten() for key, value in expected["state"].items()])
        found["apart"] = float(apart.norm() / apart.numel() ** 0.5)
    found["unwrapped"] = type(accelerator.unwrap_model(model)).__name__
    return {**found, "expected": {"losses": expected["losses"], "norms": expected["norms"]}}


def case_stage_0(folder: Path) -> dict[str, Any]:
    """A plugin made of arguments; torch's optimizer and schedule; `accumulate()` and `clip_grad_norm_`."""
    return _against_torch(0)


def case_stage_2(folder: Path) -> dict[str, Any]:
    """The same at stage 2, with the optimizer in host memory."""
    return _against_torch(2, offload_optimizer_device="cpu")


def case_stage_3(folder: Path) -> dict[str, Any]:
    """The same at stage 3, with optimizer and parameters in host memory."""
    return _against_torch(3, offload_optimizer_device="cpu", offload_param_device="cpu")


def case_config_and_dummies(folder: Path) -> dict[str, Any]:
    """A config file with "auto", `DummyOptim` and `DummyScheduler`: what accelerate writes into it is what is used."""
    config = config_of(3)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    config["scheduler"] = WARMUP_DECAY_LR
    path = folder / f"ds_{dist.get_rank() if dist.is_initialized() else 0}.json"
    path.write_text(json.dumps(config))
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=str(path)), gradient_accumulation_steps=2)
    model, data = model_and_data()
    optimizer = DummyOptim(model.parameters(), lr=LEARNING_RATE)
    schedule = DummyScheduler(optimizer, warmup_num_steps=2, total_num_steps=8)
    loader = DataLoader(data, batch_size=MICRO_BATCH)
    parts = accelerator.prepare(model, optimizer, loader, schedule)
    engine = parts[0]
    return {
        **train(accelerator, *parts),
        "batch": [engine.train_batch_size(), engine.gradient_accumulation_steps()],
        "optimizer": type(parts[1]).__name__,
        "schedule": type(parts[3]).__name__,
    }


def case_bf16(folder: Path) -> dict[str, Any]:
    """`mixed_precision="bf16"`: the forward's type, and fp32 masters."""
    accelerator, model, *rest = prepared(plugin_of(2), mixed_precision="bf16")
    found = train(accelerator, model, *rest)
    return {"losses": found["losses"], "type": str(next(model.parameters()).dtype)}


def case_no_sync(folder: Path) -> dict[str, Any]:
    """`no_sync` for one micro-batch gives the step of the whole batch, at stage 1 and at stage 2."""
    found = {}
    for stage in (1, 2):
        accelerator, model, optimizer, loader, _ = prepared(plugin_of(stage))
        batches = iter(loader)
        with accelerator.no_sync(model):
            accelerator.gradient_state._set_sync_gradients(False)
            accelerator.backward(model(**next(batches)).loss)
        accelerator.gradient_state._set_sync_gradients(True)
        accelerator.backward(model(**next(batches)).loss)
        optimizer.step()
        found[str(stage)] = float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM))
        accelerator.free_memory()
        AcceleratorState._reset_state()
    return {"norms": found, "expected": alone(1)["norms"][0]}


def case_metrics(folder: Path) -> dict[str, Any]:
    """`gather_for_metrics` of 9 rows on two ranks gives 9, in their order; `reduce` and `pad_across_processes`."""
    accelerator, model, _, _, _ = prepared(plugin_of(3))
    _, data = model_and_data()
    loader = accelerator.prepare_data_loader(DataLoader(data[:9], batch_size=MICRO_BATCH))
    model.eval()
    gathered = []
    with torch.no_grad():
        for batch in loader:
            model(**batch)
            gathered.append(accelerator.gather_for_metrics(batch["labels"]))
    rank = accelerator.process_index
    padded = accelerator.pad_across_processes(torch.ones(1 + rank), dim=0)
    return {
        "rows": torch.equal(torch.cat(gathered), torch.stack([row["labels"] for row in data[:9]])),
        "sum": float(accelerator.reduce(torch.tensor(float(rank + 1)))),
        "padded": list(padded.shape),
    }


def case_save_state(folder: Path) -> dict[str, Any]:
    """`save_state`, two more steps, `load_state`, and the same two steps again; an object registered beside them."""

    class Counter:
        count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    accelerator, model, optimizer, loader, schedule = prepared(plugin_of(3))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    parts = (accelerator, model, optimizer, loader, schedule)
    train(*parts, num_steps=1)
    counter.count = 1
    path = folder / "saved"
    accelerator.save_state(str(path))
    first = train(*parts, num_steps=2)
    counter.count = 3
    accelerator.load_state(str(path))
    count = counter.count
    again = train(*parts, num_steps=2)
    names = sorted(entry.name for entry in path.iterdir())
    return {"first": first, "again": again, "count": count, "names": names}


def case_save_model(folder: Path) -> dict[str, Any]:
    """The ways that accelerate's guides save a model for use elsewhere: each file holds the engine's weights."""
    accelerator, model, *rest = prepared(plugin_of(3))
    train(accelerator, model, *rest, num_steps=1)
    state = model.state_dict()
    accelerator.save_model(model, str(folder / "save_model"))
    accelerator.unwrap_model(model).save_pretrained(
        folder / "save_pretrained",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    model.save_checkpoint(str(folder / "shards"))
    model.save_16bit_model(str(folder / "file"), "pytorch_model.bin")
    accelerator.wait_for_everyone()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import load_file
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    found = {
        "save_model": load_file(folder / "save_model" / "model.safetensors"),
        "save_pretrained": AutoModelForCausalLM.from_pretrained(folder / "save_pretrained").state_dict(),
        "shards": get_fp32_state_dict_from_zero_checkpoint(str(folder / "shards")),
        "file": torch.load(folder / "file" / "pytorch_model.bin"),
    }
    return {
        name: weights.keys() == state.keys() and all(torch.equal(weights[key], state[key]) for key in state)
        for name, weights in found.items()
    }


def case_not_gathered(folder: Path) -> str:
    """`get_state_dict` at stage 3 without `zero3_save_16bit_model`."""
    accelerator, model, *_ = prepared(DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2))
    return refused(lambda: accelerator.get_state_dict(model))


def case_two_plugins(folder: Path) -> dict[str, Any]:
    """A student that is trained at stage 2 and a teacher that is only asked, at stage 3: a plugin for each."""
    teacher_config = {**config_of(3), "train_micro_batch_size_per_gpu": MICRO_BATCH}
    teacher_config["gradient_accumulation_steps"] = ACCUMULATION  # accelerate keeps one number for all accelerators
    del teacher_config["train_batch_size"], teacher_config["gradient_clipping"]
    plugins = {"student": plugin_of(2), "teacher": DeepSpeedPlugin(hf_ds_config=teacher_config)}
    student_accelerator = Accelerator(deepspeed_plugins=plugins)
    model, data = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
    parts = student_accelerator.prepare(model, optimizer, DataLoader(data, batch_size=MICRO_BATCH), schedule)

    student_accelerator.state.select_deepspeed_plugin("teacher")
    teacher_accelerator = Accelerator()
    torch.manual_seed(1)
    teacher = LlamaForCausalLM._from_config(model.config)
    is_sharded = any(hasattr(param, "ds_id") for param in teacher.parameters())
    teacher = teacher_accelerator.prepare(teacher)
    with torch.no_grad():
        before = float(teacher(**{key: value[None] for key, value in data[0].items()}).loss)
    student_accelerator.state.select_deepspeed_plugin("student")
    found = train(student_accelerator, *parts)
    with torch.no_grad():
        after = float(teacher(**{key: value[None] for key, value in data[0].items()}).loss)
    return {
        "student": found,
        "expected": alone()["losses"],
        "stages": [parts[0].zero_optimization_stage(), teacher.zero_optimization_stage()],
        "teacher": [before, after],
        "is_sharded": is_sharded,
    }


def case_from_environment(folder: Path) -> dict[str, Any]:
    """An `Accelerator` without a plugin, as the only case: `accelerate launch` has set variables from its file."""
    accelerator, model, *rest = prepared(None)
    found = train(accelerator, model, *rest)
    is_of_launch = any(name.startswith("LAUNCH_") for name in os.environ)
    facts = {"stage": model.zero_optimization_stage(), "is_of_launch": is_of_launch}
    return {"losses": found["losses"], "expected": alone()["losses"], **facts}
