"""Runs of transformers' Trainer whose batches, passes or loops are special, for `harness.train.hf_job`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface.trainer_cases import ADAMW, OFFLOAD, Log, config_of, log_of, logs, rows, small_model, train

# ---- batches ----


def case_accumulation(folder: Path) -> dict[str, Any]:
    """Return runs of two epochs of 5 micro-batches each, 3 to a step, and what the engine heard of boundaries."""
    from launcher.engine.deepspeed_engine import DeepSpeedEngine

    configs = {"plain": None, **{f"stage {stage}": config_of(stage) for stage in range(4)}}
    seen: list[bool] = []
    told = DeepSpeedEngine.set_gradient_accumulation_boundary

    def note(engine: Any, is_boundary: bool) -> None:
        seen.append(is_boundary)
        told(engine, is_boundary)

    DeepSpeedEngine.set_gradient_accumulation_boundary = note  # type: ignore[method-assign]
    try:
        found: dict[str, Any] = logs(
            folder, configs, train_dataset=rows(19), gradient_accumulation_steps=3, num_train_epochs=2, max_steps=-1
        )
    finally:
        DeepSpeedEngine.set_gradient_accumulation_boundary = told  # type: ignore[method-assign]
    return {**found, "boundaries": seen[:10]}


def case_padding(folder: Path) -> dict[str, Log]:
    """Return runs with batches of different lengths, grouped by length."""
    import transformers

    is_old = transformers.__version__.startswith("4.")
    by_length = {"group_by_length": True} if is_old else {"train_sampling_strategy": "group_by_length"}
    options = {"train_dataset": _rows_of_many_lengths(), "data_collator": _padded, "gradient_accumulation_steps": 2}
    configs = {"plain": None, "stage 2": config_of(2), "stage 3": config_of(3)}
    found = logs(folder, configs, **options, **by_length)
    for name, config in (("plain, by rank", None), ("stage 3, by rank", config_of(3))):
        by_rank = {"average_tokens_across_devices": False}
        found[name] = log_of(train(folder, config, **options, **by_length, **by_rank))
    return found


def _rows_of_many_lengths() -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 17, (32,), generator=generator).tolist()
    tokens = [torch.randint(0, 128, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in tokens]


def _padded(batch: list[dict[str, Any]]) -> dict[str, Any]:
    from torch.nn.utils.rnn import pad_sequence

    def column(name: str, filling: int) -> Any:
        return pad_sequence([row[name] for row in batch], batch_first=True, padding_value=filling)

    labels = column("labels", -100)
    return {"input_ids": column("input_ids", 0), "labels": labels, "attention_mask": (labels != -100).long()}


def case_smoothing_and_clipping(folder: Path) -> dict[str, Log]:
    """Return runs with smoothed labels, without clipping, and with gradients that are clipped a lot."""
    configs = {"plain": None, "stage 3": config_of(3)}
    kinds: dict[str, dict[str, Any]] = {
        "smoothed": {"label_smoothing_factor": 0.1},
        "not clipped": {"max_grad_norm": 0.0},
        "clipped": {"max_grad_norm": 0.1, "optim": "sgd"},
    }
    found: dict[str, Log] = {}
    for kind, options in kinds.items():
        found.update({f"{name}, {kind}": log for name, log in logs(folder, configs, **options).items()})
    return found


def case_gradient_checkpointing(folder: Path) -> dict[str, Log]:
    """Return runs whose blocks are computed twice; at stage 3 every parameter is sharded."""
    sharded = config_of(3, {"stage3_param_persistence_threshold": 0})
    found = logs(folder, {"plain": None})
    for use_reentrant in (True, False):
        options = {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant},
        }
        for name, log in logs(folder, {"stage 2": config_of(2), "stage 3": sharded}, **options).items():
            found[f"{name}, {use_reentrant}"] = log
    return found


def case_auto_find_batch_size(folder: Path) -> dict[str, Log]:
    """Return runs whose first batch sizes do not fit into memory."""
    configs = {
        "plain": None,
        "stage 1": config_of(1),
        "stage 2": config_of(2),
        "optimizer of the config": config_of(2, optimizer=ADAMW),
    }
    options = {"auto_find_batch_size": True, "per_device_train_batch_size": 8}
    return {name: log_of(train(folder, config, _fits_2(), **options)) for name, config in configs.items()}


def _fits_2() -> Any:
    model = small_model()

    def refuse(_module: Any, _args: Any, kwargs: Any) -> None:
        if len(kwargs["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    return model


# ---- the loop around ----


def case_callbacks(folder: Path) -> dict[str, Any]:
    """Return what callbacks saw, one of which ends the training, and a run that is repeated with the same Trainer."""
    from transformers import TrainerCallback

    class Calls(TrainerCallback):
        """Remembers in what order it was called; ends the training after two steps."""

        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.seen.append("before")

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.seen.append("after")

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen.append("end")
            control.should_training_stop = state.global_step == 2

    found: dict[str, Any] = {}
    for name, config in (("plain", None), ("stage 3", config_of(3))):
        calls = Calls()
        trainer = train(folder, config, callbacks=[calls])
        found[name] = {"seen": calls.seen, "log": log_of(trainer)}
        trainer.pop_callback(Calls)
        # Else it takes the engine that it has ended; and without DeepSpeed it would continue with the old optimizer.
        trainer.model_wrapped, trainer.optimizer = trainer.model, None
        trainer.train()
        found[f"{name}, again"] = log_of(trainer)
    return found


def case_compiled(folder: Path) -> dict[str, Log]:
    """Return runs with torch_compile."""
    configs = {"stage 2": config_of(2), "stage 3": config_of(3)}
    found = logs(folder, {"plain": None})
    return {**found, **logs(folder, configs, torch_compile=True, torch_compile_backend="aot_eager")}


def case_traced(folder: Path) -> list[str]:
    """Return what transformers and accelerate asked for that is not there, in training, evaluation and saving."""
    import deepspeed
    from huggingface.missing import noted

    with noted() as missing:
        for stage in range(4):
            trainer = train(folder, config_of(stage, optimizer=ADAMW))
            trainer.evaluate(rows(4))
            trainer.save_model(str(folder / f"saved_{stage}"))
        train(folder, config_of(2, {"offload_optimizer": OFFLOAD}))
        assert not eval("hasattr(deepspeed, 'not_there')", {"__name__": "accelerate", "deepspeed": deepspeed})
    return sorted(missing)
