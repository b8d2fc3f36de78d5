"""Adapters of peft and the trainers of trl on the engine, for `harness.train.hf_job`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface.pretrained_cases import differing, llama, plain, saved
from huggingface.trainer_cases import config_of, losses_of

STEPS = 3


def rows() -> list[dict[str, Any]]:
    """Return 64 examples of 16 tokens, the same on every rank."""
    found = torch.randint(1, 128, (64, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in found]


def arguments(folder: Path, stage: int, **values: Any) -> dict[str, Any]:
    """Return the arguments of a Trainer that takes a few steps at a stage of ZeRO; 0: none."""
    return {
        "output_dir": str(folder),
        "deepspeed": config_of(stage) if stage else None,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        **({} if stage else {"use_cpu": True}),
        **values,
    }


def start_anew() -> None:
    """Let the next Trainer begin as in a new process: it may be of another kind."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def base_model(folder: Path) -> Path:
    """Return the folder of a saved causal language model."""
    from transformers import LlamaForCausalLM

    return saved(plain(lambda: LlamaForCausalLM(llama())), folder, "base")


def lora(**values: Any) -> Any:
    """Return the config of an adapter on the attention."""
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **values)


def train_adapter(folder: Path, path: Path, stage: int, adapter: Any, **values: Any) -> Any:
    """Train an adapter of the model in `path`, which is loaded sharded at stage 3; return the Trainer."""
    from peft import get_peft_model
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    args = TrainingArguments(**arguments(folder, stage, **values))  # it keeps the config alive
    model = LlamaForCausalLM.from_pretrained(path)
    torch.manual_seed(0)
    model = get_peft_model(model, adapter)
    trainer = Trainer(model=model, args=args, train_dataset=rows())
    trainer.train()
    return trainer


def case_lora(folder: Path) -> Any:
    """LoRA at stages 2 and 3, saved by the Trainer and loaded again."""
    import deepspeed
    from peft import PeftModel
    from transformers import LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    path = base_model(folder)
    found: dict[str, Any] = {}
    found["losses plain"] = losses_of(train_adapter(folder / "lora_plain", path, 0, lora(modules_to_save=["lm_head"])))
    start_anew()
    for stage in (2, 3):
        trainer = train_adapter(folder / f"lora_{stage}", path, stage, lora(modules_to_save=["lm_head"]))
        trainer.save_model(str(folder / f"adapter_{stage}"))
        torch.distributed.barrier()
        states = trainer.deepspeed.optimizer.state_dict()["states"]
        found[f"losses {stage}"] = losses_of(trainer)
        found[f"trained {stage}"] = sorted({"lora" if "lora_" in name else name.split(".")[-3] for name in states})
        if stage == 3:
            params = list(trainer.model.parameters())
            with deepspeed.zero.GatheredParameters(params):
                trained = {name: param.clone() for name, param in trainer.model.named_parameters()}
        del trainer
    unset_hf_deepspeed_config()  # args of the Trainer keep it alive
    again = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(path), folder / "adapter_3", is_trainable=True)
    found["equal"] = all(torch.equal(param, trained[name]) for name, param in again.named_parameters())
    alive = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    sharded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(path), folder / "adapter_3")
    with deepspeed.zero.GatheredParameters(list(sharded.parameters())):
        found["sharded equal"] = [
            name for name, param in sharded.named_parameters() if not torch.equal(param, trained[name])
        ]
    with deepspeed.zero.GatheredParameters(list(sharded.parameters()), modifier_rank=0):
        merged = sharded.merge_and_unload()
    found["merged"] = differing(merged, again.merge_and_unload())
    del alive
    return found


def case_lora_checkpointed(folder: Path) -> Any:
    """LoRA with activation checkpointing, whose losses are those without."""
    path = base_model(folder)
    found = {}
    for name, use_reentrant in (("none", None), ("not reentrant", False), ("reentrant", True)):
        values: dict[str, Any] = {}
        if use_reentrant is not None:
            values = {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant},
            }
        found[name] = losses_of(train_adapter(folder / f"checkpointed_{use_reentrant}", path, 3, lora(), **values))
    return found


def case_prompt_tuning(folder: Path) -> Any:
    """Prompt tuning at stages 2 and 3."""
    from peft import PromptTuningConfig

    path = base_model(folder)
    return [
        losses_of(
            train_adapter(
                folder / f"prompt_{stage}", path, stage, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
            )
        )
        for stage in (2, 3)
    ]


# ---- trl ----


def tokenizer() -> Any:
    """Return a tokenizer of bytes, with a template for chats."""
    from transformers import ByT5Tokenizer

    found = ByT5Tokenizer(extra_ids=0)
    found.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return found


def text_model(folder: Path) -> Path:
    """Return the folder of a saved model for `tokenizer`."""
    from transformers import LlamaForCausalLM

    sizes = {"vocab_size": 260, "eos_token_id": 1, "bos_token_id": None}
    return saved(plain(lambda: LlamaForCausalLM(llama(**sizes))), folder, "text_model")


def texts() -> Any:
    """Return texts with an answer that is preferred and one that is not."""
    from datasets import Dataset

    return Dataset.from_list(
        [
            {"prompt": f"{number} and {number} is", "chosen": f" {2 * number}.", "rejected": f" {number}!"}
            for number in range(16)
        ]
    )


def trl_arguments(folder: Path, stage: int, **values: Any) -> dict[str, Any]:
    """Return the arguments of a trainer of trl, which takes the model's dtype and checkpointing for granted."""
    return arguments(folder, stage, bf16=False, gradient_checkpointing=False, learning_rate=1e-3, **values)


def case_sft(folder: Path) -> Any:
    """Supervised fine-tuning at stages 2 and 3, with LoRA and without."""
    from datasets import Dataset
    from transformers import LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    path = text_model(folder)
    data = Dataset.from_list([{"text": f"{number} and {number} is {2 * number}."} for number in range(16)])
    found = {}
    for name, stage, adapter in (
        ("plain", 0, None),
        ("2", 2, None),
        ("3", 3, None),
        ("lora 2", 2, lora()),
        ("lora 3", 3, lora()),
    ):
        start_anew()
        args = SFTConfig(**trl_arguments(folder / f"sft_{name}", stage, max_length=32))
        trainer = SFTTrainer(
            model=LlamaForCausalLM.from_pretrained(path),
            args=args,
            train_dataset=data,
            processing_class=tokenizer(),
            peft_config=adapter,
        )
        trainer.train()
        found[name] = losses_of(trainer)
    return found


def case_dpo(folder: Path) -> Any:
    """Direct preference optimisation at stages 2 and 3, whose reference model has an engine of its own."""
    from transformers import LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer

    path = text_model(folder)
    found = {}
    for stage in (2, 3):
        args = DPOConfig(**trl_arguments(folder / f"dpo_{stage}", stage, max_length=32))
        trainer = DPOTrainer(
            model=LlamaForCausalLM.from_pretrained(path),
            ref_model=LlamaForCausalLM.from_pretrained(path),
            args=args,
            train_dataset=texts(),
            processing_class=tokenizer(),
        )
        trainer.train()
        found[f"losses {stage}"] = losses_of(trainer)
        found[f"reference {stage}"] = type(trainer.ref_model).__name__
    return found


def case_reward(folder: Path) -> Any:
    """A reward model at stages 2 and 3."""
    from transformers import LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    path = text_model(folder)
    found = []
    for stage in (2, 3):
        args = RewardConfig(**trl_arguments(folder / f"reward_{stage}", stage, max_length=32))
        torch.manual_seed(0)
        trainer = RewardTrainer(
            model=LlamaForSequenceClassification.from_pretrained(path, num_labels=1),
            args=args,
            train_dataset=texts(),
            processing_class=tokenizer(),
        )
        trainer.train()
        found.append(losses_of(trainer))
    return found


def case_grpo(folder: Path) -> Any:
    """Group relative policy optimisation at stages 2 and 3, which generates within its steps."""
    from transformers import LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    path = text_model(folder)
    found = {}
    for name, stage, gathers in (("2", 2, True), ("3", 3, True), ("3 sharded", 3, False)):
        args = GRPOConfig(
            **trl_arguments(
                folder / f"grpo_{name}",
                stage,
                max_completion_length=8,
                num_generations=2,
                beta=0.1,
                ds3_gather_for_generation=gathers,
            )
        )
        trainer = GRPOTrainer(
            model=LlamaForCausalLM.from_pretrained(path),
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=args,
            train_dataset=texts().select_columns(["prompt"]),
            processing_class=tokenizer(),
        )
        trainer.train()
        found[name] = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return found
