"""Runs of transformers' Trainer that evaluate, and the example of a loop without it, for `harness.train.hf_job`."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from harness.launch.command import ROOT
from harness.refused import refused
from huggingface.saving_cases import configured, run, trainer_of
from huggingface.trainer_cases import model_and_data


def case_evaluate_alone(folder: Path) -> dict[str, Any]:
    """`evaluate()` and `predict()` of a Trainer that has not trained; the last batch has one row in all."""
    _, data = model_and_data()
    for row in data:  # nothing predicts the first token: transformers 4 counts its label all the same
        row["labels"] = torch.cat([torch.tensor([-100]), row["labels"][1:]])
    found: dict[str, Any] = {}
    config = configured(3, optimizer=True, schedule=True)
    trainer = trainer_of(folder / "alone", config, eval_dataset=data[:9], per_device_eval_batch_size=1)
    found["loss"] = trainer.evaluate()["eval_loss"]
    found["optimizer"] = trainer.deepspeed.optimizer is not None
    predicted = trainer.predict(data[:5])
    found["rows"] = list(predicted.predictions.shape)
    model, _ = model_and_data()
    model.eval()
    with torch.no_grad():
        each = [model(input_ids=row["input_ids"][None], labels=row["labels"][None]) for row in data[:9]]
    found["expected"] = sum(float(out.loss) for out in each) / len(each)
    logits = torch.cat([out.logits for out in each[:5]])
    found["close"] = bool(torch.allclose(torch.from_numpy(predicted.predictions), logits, atol=1e-5))
    return found


def case_evaluate_alone_stage_2(folder: Path) -> str:
    """`evaluate()` without training, at a stage for which transformers refuses it."""
    return refused(lambda: trainer_of(folder / "alone_2", configured(2)).evaluate())


def case_evaluate_between(folder: Path) -> dict[str, Any]:
    """Evaluation in the middle of training leaves the training as it is; the last batch has one row in all."""
    _, data = model_and_data()
    plain = run(folder / "plain", configured(3), save_strategy="no", dropout=0.0)
    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": data[:9], "per_device_eval_batch_size": 2}
    evaluated = run(folder / "evaluated", configured(3), save_strategy="no", dropout=0.0, **options)
    return {"plain": plain, "evaluated": evaluated}


def case_generate_at_evaluation(folder: Path) -> dict[str, Any]:
    """`predict_with_generate` of a Seq2SeqTrainer at stage 3: ranks end their sentences at different lengths.

    transformers itself drops no row that was added to fill the last batch.
    """
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    def model() -> Any:
        torch.manual_seed(0)
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
        return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))

    rows = torch.randint(2, 64, (8, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row[:4]} for row in rows]
    args = Seq2SeqTrainingArguments(
        output_dir=str(folder / "seq2seq"),
        deepspeed=configured(3),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=1,
        predict_with_generate=True,
        generation_max_length=8,
        max_steps=2,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Seq2SeqTrainer(model=model(), args=args, train_dataset=data, eval_dataset=data[:5])
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    generated = torch.from_numpy(trainer.predict(data[:5]).predictions)[:5]
    alone = model()
    alone.load_state_dict(trainer.deepspeed.state_dict())
    alone.eval()
    expected = alone.generate(rows[:5], max_length=8)
    width = max(generated.shape[1], expected.shape[1])
    pad = torch.nn.functional.pad
    same = torch.equal(pad(generated, (0, width - generated.shape[1])), pad(expected, (0, width - expected.shape[1])))
    return {"loss": loss, "same": same, "generated": generated.tolist(), "expected": expected.tolist()}


def case_example(folder: Path) -> dict[str, Any]:
    """The example that the repository comes with, twice: the second run continues where the first one ended."""
    found = {}
    for name, num_steps in (("first", 10), ("second", 12)):
        sizes = ["--hidden-size", "64", "--layers", "2", "--length", "64", "--learning-rate", "1e-2"]
        sys.argv = ["hf_no_trainer.py", "--zero-stage", "3", "--accumulation", "2", *sizes]
        sys.argv += ["--steps", str(num_steps), "--save", str(folder / "example"), "--output", str(folder / "trained")]
        said = io.StringIO()
        # Its process group lasts: torch cannot start another on the same port while ranks still leave the first.
        with contextlib.redirect_stdout(said), mock.patch.object(Accelerator, "end_training"):
            runpy.run_path(str(ROOT / "examples" / "hf_no_trainer.py"), run_name="__main__")
        found[name] = said.getvalue().splitlines()
        AcceleratorState._reset_state()
    found["files"] = sorted(path.name for path in (folder / "trained").iterdir())
    return found
