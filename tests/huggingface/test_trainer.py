"""transformers' Trainer on the engine, unmodified: the losses, norms and rates of a run without DeepSpeed."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness.launch.command import Result
from harness.train.hf_job import launch_cases, returned

CASES = [
    "stages",
    "tensor_parallel",
    "schedules",
    "plateau",
    "a_step_late",
    "adafactor_stage_2",
    "auto",
    "mismatch",
    "hidden_size",
]
CASES += ["fp16", "bf16", "accumulation", "callbacks", "traced"]
# Less common ones, or such as the tests of the engine compare with plain torch as well.
LONG_CASES = ["other_optimizers", "padding", "smoothing_and_clipping", "gradient_checkpointing", "auto_find_batch_size"]
MODULES = "huggingface.trainer_cases,huggingface.trainer_loop_cases"
RANKS = (0, 1)
Log = dict[str, list[Any]]


class Job(NamedTuple):
    """What the cases returned on every rank, and how the job ended."""

    found: dict[str, list[Any]]
    result: Result

    def of(self, name: str) -> list[Any]:
        """Return what a case returned, by rank."""
        return copy.deepcopy(returned(self.found, name))

    def errors(self, name: str) -> list[str]:
        """Return what a case raised, by rank."""
        return [self.found[name][rank]["error"] for rank in RANKS]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The other cases, in one job that ends with an error that no one catches."""
    folder = tmp_path_factory.mktemp("trainer")
    return Job(*launch_cases(folder, MODULES, CASES, last="mismatch"))


@pytest.fixture(scope="module")
def long_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The cases of the long tests."""
    return Job(*launch_cases(tmp_path_factory.mktemp("trainer_long"), MODULES, LONG_CASES))


def assert_same(log: Log, reference: Log, *, but: tuple[str, ...] = (), rel: float = 1e-5) -> None:
    """Assert that two runs are the same to rounding in fp32. but: what may differ."""
    for what in {"losses", "norms", "rates"} - set(but):
        assert len(reference[what]) > 1
        assert log[what] == pytest.approx(reference[what], rel=rel), what


# ---- stages, optimizers, schedules ----


def test_each_stage_with_and_without_offload_trains_as_ddp_does(job: Job) -> None:
    for logs in job.of("stages"):
        plain = logs.pop("plain")
        assert len(plain["losses"]) == len(plain["norms"]) == 4
        assert len(logs) == 8
        for log in logs.values():
            assert_same(log, plain)


def test_ranks_that_share_layers_train_as_ddp_does(job: Job) -> None:
    found = job.of("tensor_parallel")
    means = [sum(losses) / len(losses) for losses in zip(*(logs["plain"]["losses"] for logs in found), strict=True)]
    for logs in found:
        plain = logs.pop("plain")
        assert len(logs) == 2
        for log in logs.values():
            assert log["losses"] == pytest.approx(means, rel=1e-5)
            assert_same(log, plain, but=("losses",))


def test_a_schedule_of_transformers_has_the_rates_it_has_without_deepspeed(job: Job) -> None:
    for logs in job.of("schedules"):
        plain = logs["plain"]
        assert_same(logs["theirs, theirs"], plain)
        # The engine steps this one, before the Trainer logs its rate: those logged are of the next step.
        assert_same(logs["config, theirs"], plain, but=("rates",))
        assert logs["config, theirs"]["rates"] == pytest.approx([*plain["rates"][1:], 0.0])


def test_a_schedule_of_the_config_logs_the_rates_of_transformers(job: Job) -> None:
    """DeepSpeed's first step runs at the schedule's lower end, each later one at the rate that was logged before."""
    for logs, late in zip(job.of("schedules"), job.of("a_step_late"), strict=True):
        for name in ("theirs, config", "config, config"):
            assert logs[name]["rates"] == pytest.approx(logs["plain"]["rates"])
            assert_same(logs[name], late["linear"], but=("rates",))
        assert logs["config, constant"]["rates"] == pytest.approx(logs["plain, constant"]["rates"])
        assert_same(logs["config, constant"], late["constant_with_warmup"], but=("rates",))


def test_a_schedule_by_what_was_evaluated_is_stepped_by_the_trainer(job: Job) -> None:
    for found in job.of("plateau"):
        plain = found["plain"]
        assert plain["rates"][-1] < plain["rates"][0]
        for name in ("theirs", "config"):
            assert_same(found[name], plain)


@pytest.mark.long
def test_other_optimizers_train_as_ddp_does(long_job: Job) -> None:
    pairs = {
        **{f"{optim}, stage 2": optim for optim in ("sgd", "adagrad", "adamw_torch")},
        "own, stage 3": "own",
        "adagrad, offload": "adagrad",
        "sgd, offload, kept": "sgd",
        "adafactor, stage 0": "adafactor",
    }
    for logs in long_job.of("other_optimizers"):
        for name, reference in pairs.items():
            assert_same(logs[name], logs[reference])


def test_an_optimizer_of_whole_matrices_is_refused_with_a_remedy(job: Job) -> None:
    for error in job.errors("adafactor_stage_2"):
        assert error.startswith("EngineAssertionError: optimizer Adafactor cannot be sharded by ZeRO stage 2")
        assert "use stage 0" in error


# ---- what "auto" becomes ----


def test_auto_becomes_what_the_arguments_say(job: Job) -> None:
    expected = {
        "batch": [12, 3, 2],
        "clipping": 0.7,
        "16 bit": [False, False],
        "buckets": [32 * 32, int(0.9 * 32 * 32), 10 * 32],
        "gathers on save": False,
        "optimizer": {"betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.03},
        "scheduler": {
            "last_batch_iteration": -1,
            "warmup_min_lr": 0,
            "warmup_max_lr": 3e-4,
            "warmup_num_steps": 2,
            "warmup_type": "linear",
            "total_num_steps": 3,
        },
        "steps_per_print": 0,
    }
    for found in job.of("auto"):
        for stage in (2, 3):
            assert found[f"stage {stage}"] == {**expected, "stage": stage}


MISMATCHES = [
    "Please correct the following DeepSpeed config values that mismatch TrainingArguments values:",
    "- ds train_micro_batch_size_per_gpu=5 vs hf per_device_train_batch_size=2",
    "- ds gradient_accumulation_steps=7 vs hf gradient_accumulation_steps=1",
    "- ds train_batch_size=70 vs hf train_batch_size (calculated)=4",
    "- ds gradient_clipping=0.125 vs hf max_grad_norm=1.0",
    "- ds optimizer.params.lr=0.5 vs hf learning_rate=0.01",
    "- ds optimizer.params.betas=[0.5, 0.5] vs hf adam_beta1+adam_beta2=[0.9, 0.999]",
    "- ds optimizer.params.eps=0.5 vs hf adam_epsilon=1e-08",
    "- ds optimizer.params.weight_decay=0.5 vs hf weight_decay=0.0",
    "- ds scheduler.params.warmup_max_lr=0.25 vs hf learning_rate=0.01",
    "- ds fp16.enabled=True vs hf fp16|fp16_full_eval",
    "- ds bf16.enabled=True vs hf bf16|bf16_full_eval=False",
    "- ds scheduler.params.total_num_steps=88 vs hf num_training_steps (calculated)=4",
    "- ds scheduler.params.warmup_num_steps=77 vs hf warmup_steps=",
    "The easiest method is to set these DeepSpeed config values to 'auto'.",
]


def test_values_that_contradict_the_arguments_are_named_by_transformers(job: Job) -> None:
    for error in job.errors("mismatch"):
        for sentence in MISMATCHES:
            assert sentence in error


def test_their_error_ends_the_job_and_is_its_last_word(job: Job) -> None:
    assert job.result.code == 1
    head, _, closing = job.result.err.rpartition("✗ rank ")
    assert "failed" in closing.splitlines()[0]
    for sentence in MISMATCHES:
        assert sentence in closing or ("(its traceback is above)" in closing and sentence in head)


def test_a_width_that_is_stated_elsewhere_is_found_and_one_that_is_nowhere_is_asked_for(job: Job) -> None:
    for found in job.of("hidden_size"):
        assert found["bucket"] == 16 * 16
        assert "has neither `hidden_size` nor `hidden_sizes` entry" in found["without"]


# ---- precision ----


def test_a_step_that_fp16_skips_leaves_the_schedule_of_transformers_where_it_was(job: Job) -> None:
    for logs in job.of("fp16"):
        first = logs["stage 2"]
        for name, log in logs.items():
            assert (log["skipped"], log["dtypes"], log["scale"]) == (1, ["torch.float16"], 2.0**17)
            assert log["losses"] == pytest.approx(first["losses"], rel=1e-3)
            skipped = [not math.isfinite(norm) for norm in log["norms"]].index(True)
            # Rates are logged before the Trainer steps its schedule, and after the engine steps the one it has.
            stays = (skipped - 1, skipped) if name == "optimizer of the config" else (skipped, skipped + 1)
            assert log["rates"][stays[0]] == log["rates"][stays[1]]
            assert len(set(log["rates"])) == len(log["rates"]) - 1


def test_bf16_is_the_same_at_all_stages(job: Job) -> None:
    for (rank, logs), plain in zip(enumerate(job.of("bf16")), job.of("stages"), strict=True):
        for log in logs.values():
            assert (log["skipped"], log["dtypes"]) == (0, ["torch.bfloat16"]), rank
            assert log["losses"] == pytest.approx(logs["stage 1"]["losses"], rel=1e-3)
            assert log["losses"] == pytest.approx(plain["plain"]["losses"], rel=1e-2)


# ---- batches ----


def test_an_epoch_may_end_within_an_accumulation(job: Job) -> None:
    for logs in job.of("accumulation"):
        assert logs.pop("boundaries") == [False, False, True, False, True] * 2
        plain = logs.pop("plain")
        assert (len(plain["losses"]), len(plain["norms"])) == (10, 4)
        for log in logs.values():
            assert_same(log, plain)


@pytest.mark.long
def test_batches_of_many_lengths_count_by_their_tokens(long_job: Job) -> None:
    for logs in long_job.of("padding"):
        for name in ("stage 2", "stage 3"):
            assert_same(logs[name], logs["plain"])
        assert_same(logs["stage 3, by rank"], logs["plain, by rank"])
        assert logs["plain"]["norms"] != pytest.approx(logs["plain, by rank"]["norms"], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["smoothed", "not clipped", "clipped"])
def test_smoothed_labels_and_clipping_are_as_without_deepspeed(kind: str, long_job: Job) -> None:
    for logs in long_job.of("smoothing_and_clipping"):
        log, plain = logs[f"stage 3, {kind}"], logs[f"plain, {kind}"]
        # transformers 4 logs no norm where it does not clip.
        assert_same(log, plain, but=() if any(plain["norms"]) else ("norms",))


@pytest.mark.long
def test_gradient_checkpointing_changes_nothing(long_job: Job) -> None:
    for logs in long_job.of("gradient_checkpointing"):
        plain = logs.pop("plain")
        assert len(logs) == 4
        for log in logs.values():
            assert_same(log, plain)


@pytest.mark.long
def test_a_batch_size_that_fits_is_found(long_job: Job) -> None:
    for logs in long_job.of("auto_find_batch_size"):
        plain = logs.pop("plain")
        of_config = logs.pop("optimizer of the config")
        assert_same(of_config, plain, but=("rates",))
        for log in logs.values():
            assert_same(log, plain)


# ---- the loop around ----


def test_callbacks_are_called_in_order_and_may_end_the_training(job: Job) -> None:
    for found in job.of("callbacks"):
        assert found["stage 3"]["seen"] == found["plain"]["seen"] == ["before", "after", "end"] * 2
        assert_same(found["stage 3"]["log"], found["plain"]["log"])
        assert_same(found["stage 3, again"], found["plain, again"])


# accelerate asks each optimizer for these, which those have that keep two sets of weights ("schedule-free").
PROBES = {"ZeroOptimizer.train (accelerate: train)", "ZeroOptimizer.eval (accelerate: eval)"}


def test_nothing_that_the_libraries_ask_for_is_missing(job: Job) -> None:
    for found in job.of("traced"):
        found.remove("deepspeed.not_there (accelerate: <module>)")  # the trace sees what is asked
        assert set(found) <= PROBES


@pytest.mark.soak
def test_a_compiled_model_trains_as_it_would_otherwise(tmp_path: Path) -> None:
    found, result = launch_cases(tmp_path, MODULES, ["compiled"])
    for logs in returned(found, "compiled"):
        plain = logs.pop("plain")
        for log in logs.values():
            assert_same(log, plain)
    assert "recompile_limit" not in result.err
