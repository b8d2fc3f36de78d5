"""Runs of transformers' Trainer that train, for `harness.train.hf_job`. What a case returns is compared by its test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.train.hf_job import begin_anew

Log = dict[str, list[Any]]  # of a rank: losses by micro-batch; norms and learning rates that were logged, by step

ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
WARMUP_LR = {"type": "WarmupLR", "params": WARMUP}
WARMUP_DECAY_LR = {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": "auto"}}
OFFLOAD = {"device": "cpu"}


# ---- one run ----


def small_model() -> Any:
    """Return a causal language model of two layers, the same on every rank."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=128,
        )
    )


def rows(num_rows: int = 64) -> list[dict[str, Any]]:
    """Return examples of 16 tokens."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (num_rows, 16), generator=generator)]


def model_and_data() -> tuple[Any, list[dict[str, Any]]]:
    """Return the model, the same on every rank, and 64 examples."""
    return small_model(), rows()


def config_of(stage: int, zero: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """Return a config in which all that the Trainer knows is "auto", at a stage of ZeRO; zero: more of that section."""
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
            **(zero or {}),
        },
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        **sections,
    }


def trainer_of(folder: Path, config: dict[str, Any] | None, model: Any = None, **options: Any) -> Any:
    """Return a Trainer that has not trained. config: None for one without DeepSpeed, whose ranks are torch's DDP.

    options: those of Trainer that are named here, all others of TrainingArguments.
    """
    from transformers import Trainer, TrainingArguments

    class Recording(Trainer):
        """The Trainer as it is, which keeps the loss of each micro-batch: logged ones are rounded, and means."""

        micro_losses: list[float]

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.micro_losses.append(loss.item())
            return loss

    begin_anew()
    names = ("train_dataset", "eval_dataset", "data_collator", "callbacks", "optimizer_cls_and_kwargs")
    of_trainer = {name: options.pop(name) for name in names if name in options}
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
    }
    if config is None:
        defaults["use_cpu"] = True  # without it Trainer finds no way to train with several ranks
    args = TrainingArguments(deepspeed=config, **{**defaults, **options})
    model = small_model() if model is None else model
    trainer = Recording(model=model, args=args, **{"train_dataset": rows(), **of_trainer})
    trainer.micro_losses = []
    return trainer


def train(folder: Path, config: dict[str, Any] | None, model: Any = None, **options: Any) -> Any:
    """Train; return the Trainer. The arguments are those of `trainer_of`."""
    trainer = trainer_of(folder, config, model, **options)
    trainer.train()
    return trainer


def losses_of(trainer: Any) -> list[float]:
    """Return the losses that were logged, step by step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def log_of(trainer: Any) -> Log:
    """Return what a run of this rank was like."""
    entries = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    return {
        "losses": trainer.micro_losses,
        "norms": [entry.get("grad_norm") for entry in entries],
        "rates": [entry["learning_rate"] for entry in entries],
    }


def logs(folder: Path, configs: dict[str, dict[str, Any] | None], **options: Any) -> dict[str, Log]:
    """Return the logs of runs with the same options, by name."""
    return {name: log_of(train(folder, config, **options)) for name, config in configs.items()}


def with_engine(trainer: Any) -> dict[str, Any]:
    """Return the log of a run, with what became of steps and of the parameters' type."""
    engine = trainer.deepspeed
    dtypes = sorted({str(param.dtype) for param in trainer.model.parameters()})
    return {**log_of(trainer), "skipped": engine.skipped_steps, "dtypes": dtypes, "scale": engine.optimizer.cur_scale}


# ---- stages, optimizers, schedules ----


def case_stages(folder: Path) -> dict[str, Log]:
    """Return the logs of all stages, with and without offload."""
    offload = {"offload_optimizer": OFFLOAD}
    configs = {
        "plain": None,
        **{f"stage {stage}": config_of(stage) for stage in range(4)},
        **{f"stage {stage}, offload": config_of(stage, offload) for stage in (1, 2, 3)},
        "stage 3, offload of parameters": config_of(3, {**offload, "offload_param": OFFLOAD}),
    }
    return logs(folder, configs)


def case_tensor_parallel(folder: Path) -> dict[str, Log]:
    """Return the logs of plain ranks, and of ranks that share layers and so have the samples of both."""
    shared = {"tensor_parallel": {"autotp_size": 2}}
    return {
        "plain": log_of(train(folder, None)),
        **{
            f"stage {stage}": log_of(train(folder, config_of(stage, **shared), per_device_train_batch_size=4))
            for stage in (1, 3)
        },
    }


def case_schedules(folder: Path) -> dict[str, Log]:
    """Return the logs of optimizers and schedules of transformers and of DeepSpeed's config, in all combinations."""
    options = {"max_steps": 6, "warmup_steps": 2}
    configs = {
        "plain": None,
        "theirs, theirs": config_of(2),
        "config, theirs": config_of(2, optimizer=ADAMW),
        "theirs, config": config_of(3, scheduler=WARMUP_DECAY_LR),
        "config, config": config_of(2, optimizer=ADAMW, scheduler=WARMUP_DECAY_LR),
    }
    found = logs(folder, configs, **options)
    constant = config_of(2, optimizer=ADAMW, scheduler=WARMUP_LR)
    kind = "constant_with_warmup"
    found["plain, constant"] = log_of(train(folder, None, lr_scheduler_type=kind, **options))
    found["config, constant"] = log_of(train(folder, constant, lr_scheduler_type=kind, **options))
    return found


def case_plateau(folder: Path) -> dict[str, Log]:
    """Return the logs of a schedule that the Trainer steps by what it has evaluated."""
    configs = {"plain": None, "theirs": config_of(2), "config": config_of(3, optimizer=ADAMW)}
    options: dict[str, Any] = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"mode": "max", "factor": 0.5, "patience": 0},  # a loss that falls is no progress then
        "metric_for_best_model": "loss",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_dataset": rows(4),
    }
    return logs(folder, configs, **options)


def case_a_step_late(folder: Path) -> dict[str, Log]:
    """Return the logs without DeepSpeed of schedules whose rates come a step late, as those of the config do."""
    found = {}
    for kind in ("linear", "constant_with_warmup"):
        trainer = trainer_of(folder, None, max_steps=6, warmup_steps=2, lr_scheduler_type=kind)
        schedule = trainer.create_scheduler(num_training_steps=6, optimizer=trainer.create_optimizer())
        on_time = schedule.lr_lambdas[0]
        schedule.lr_lambdas = [lambda step, on_time=on_time: on_time(max(0, step - 1))] * len(schedule.lr_lambdas)
        trainer._created_lr_scheduler = False  # it is a client's then, which train() keeps
        trainer.train()
        found[kind] = log_of(trainer)
    return found


def case_other_optimizers(folder: Path) -> dict[str, Log]:
    """Return the logs of what transformers calls optim, and of an optimizer class that is the script's own."""
    import torch

    class Own(torch.optim.SGD):
        """No class that the engine knows."""

    found = {}
    for optim in ("sgd", "adagrad", "adamw_torch"):
        found[optim] = log_of(train(folder, None, optim=optim))
        found[f"{optim}, stage 2"] = log_of(train(folder, config_of(2), optim=optim))
    own = {"optimizer_cls_and_kwargs": (Own, {"lr": 1e-2, "momentum": 0.9})}
    found["own"] = log_of(train(folder, None, **own))
    found["own, stage 3"] = log_of(train(folder, config_of(3), **own))
    offload = config_of(2, {"offload_optimizer": OFFLOAD})
    found["adagrad, offload"] = log_of(train(folder, offload, optim="adagrad"))
    kept = {**offload, "zero_force_ds_cpu_optimizer": False}
    found["sgd, offload, kept"] = log_of(train(folder, kept, optim="sgd"))
    found["adafactor"] = log_of(train(folder, None, optim="adafactor"))
    found["adafactor, stage 0"] = log_of(train(folder, config_of(0), optim="adafactor"))
    return found


def case_adafactor_stage_2(folder: Path) -> None:
    """Raise what the engine says of an optimizer that it cannot shard."""
    train(folder, config_of(2), optim="adafactor")


# ---- what "auto" becomes ----


def case_auto(folder: Path) -> dict[str, Any]:
    """Return what an engine has of a config that is "auto" wherever it can be, at stages 2 and 3."""
    zero = {"stage3_gather_16bit_weights_on_model_save": "auto"}
    options = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.7,
        "learning_rate": 3e-4,
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-7,
        "weight_decay": 0.03,
        "warmup_steps": 2,
        "max_steps": 3,
    }
    found = {}
    for stage in (2, 3):
        config = config_of(stage, zero, optimizer=ADAMW, scheduler=WARMUP_DECAY_LR)
        trainer = train(folder, config, **options)
        found[f"stage {stage}"] = _settings_of(trainer.deepspeed)
    return found


def _settings_of(engine: Any) -> dict[str, Any]:
    group, zero = engine.optimizer.param_groups[0], engine._parts.settings.zero_optimization
    return {
        "batch": [
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        ],
        "clipping": engine._parts.policy.max_grad_norm,
        "stage": engine.zero_optimization_stage(),
        "16 bit": [engine._parts.settings.fp16.enabled, engine._parts.settings.bf16.enabled],
        "buckets": [
            zero.reduce_bucket_size,
            zero.stage3_prefetch_bucket_size,
            zero.stage3_param_persistence_threshold,
        ],
        "gathers on save": engine.zero_gather_16bit_weights_on_model_save(),
        "optimizer": {name: group[name] for name in ("betas", "eps", "weight_decay")},
        "scheduler": engine._parts.settings.scheduler.params,
        "steps_per_print": engine._parts.settings.steps_per_print,
    }


MISMATCHED = {
    "train_micro_batch_size_per_gpu": 5,
    "gradient_accumulation_steps": 7,
    "train_batch_size": 70,
    "gradient_clipping": 0.125,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "betas": [0.5, 0.5], "eps": 0.5, "weight_decay": 0.5}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.25, "warmup_num_steps": 77, "total_num_steps": 88},
    },
    "fp16": {"enabled": True},
    "bf16": {"enabled": True},
}


def case_mismatch(folder: Path) -> None:
    """Raise what transformers says of values that contradict its arguments, all at once."""
    train(folder, config_of(2, **MISMATCHED))


def case_hidden_size(folder: Path) -> dict[str, Any]:
    """Return what became of sizes of a model whose config states its width elsewhere, and where it states none."""
    from types import SimpleNamespace

    from torch import nn

    class Other(nn.Module):
        """A model of a script's own, which holds one of transformers'."""

        def __init__(self, config: Any) -> None:
            super().__init__()
            self.inner, self.config = small_model(), config

        def forward(self, input_ids: Any, labels: Any) -> Any:
            return self.inner(input_ids=input_ids, labels=labels)

    several = train(folder, config_of(2), Other(SimpleNamespace(hidden_sizes=[8, 16])), max_steps=1).deepspeed
    try:
        train(folder, config_of(2), Other(SimpleNamespace()), max_steps=1)
    except ValueError as error:
        said = str(error)
    return {"bucket": several._parts.settings.zero_optimization.reduce_bucket_size, "without": said}


# ---- precision ----


def case_fp16(folder: Path) -> dict[str, dict[str, Any]]:
    """Return runs whose loss scale is too large for one of their steps."""
    half = {"enabled": "auto", "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 1000}
    configs = {
        "stage 2": config_of(2, fp16=half),
        "stage 3": config_of(3, fp16=half),
        "optimizer of the config": config_of(2, fp16=half, optimizer=ADAMW),
    }
    return {name: with_engine(train(folder, config, fp16=True, max_steps=8)) for name, config in configs.items()}


def case_bf16(folder: Path) -> dict[str, dict[str, Any]]:
    """Return runs in bf16. The Trainer refuses bf16 on a machine without GPU: here it takes this one for another."""
    import transformers.training_args as module

    has_bf16 = module.is_torch_bf16_gpu_available
    module.is_torch_bf16_gpu_available = lambda: True
    try:
        configs = {f"stage {stage}": config_of(stage) for stage in (1, 2, 3)}
        return {name: with_engine(train(folder, config, bf16=True)) for name, config in configs.items()}
    finally:
        module.is_torch_bf16_gpu_available = has_bf16
