"""The table of names of `deepspeed`: each is there, and importing the package imports nothing behind them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from harness.child import run_python

from launcher.compat import words
from launcher.compat.changes import change_trainer
from launcher.config.load import load_config

READ_ALL = """
import importlib, sys
import launcher.compat
launcher.compat.install("builtin")
import deepspeed
from launcher.compat.alias import targets_of
from launcher.compat.names import NAMES, REFUSED
print("torch" in sys.modules, "launcher.engine" in sys.modules)
for path in NAMES:
    module = importlib.import_module(f"deepspeed.{path}".rstrip("."))
    for name in targets_of(path):
        getattr(module, name)
print([path for path in REFUSED if path in NAMES])
"""


def test_every_name_is_there_and_is_imported_when_it_is_read(tmp_path: Path) -> None:
    result = run_python(tmp_path, READ_ALL)
    assert (result.stdout, result.stderr) == ("False False\n[]\n", "")


def test_words_are_those_of_the_schema() -> None:
    params: dict[str, dict[str, float]] = {
        words.WARMUP_LR: {words.WARMUP_MIN_LR: 0, words.WARMUP_MAX_LR: 1e-3, words.WARMUP_NUM_STEPS: 3},
        words.WARMUP_DECAY_LR: {words.TOTAL_NUM_STEPS: 10},
        words.WARMUP_COSINE_LR: {words.TOTAL_NUM_STEPS: 10, words.COS_MIN_RATIO: 0.1, words.WARMUP_MIN_RATIO: 0},
        words.LR_RANGE_TEST: {words.LR_RANGE_TEST_STEP_SIZE: 5, words.LR_RANGE_TEST_MIN_LR: 1e-4},
        words.ONE_CYCLE: {words.CYCLE_MIN_LR: 1e-4, words.CYCLE_MAX_LR: 1e-3, words.CYCLE_FIRST_STEP_SIZE: 5},
    }
    for kind, given in params.items():
        schedule = {words.TYPE: kind, words.SCHEDULER_PARAMS: given}
        config = load_config({words.GRADIENT_CLIPPING: 0.5, words.SCHEDULER: schedule}).config
        assert config.gradient_clipping == 0.5
        assert config.scheduler is not None
        assert config.scheduler.type == kind


def test_a_trainer_without_accelerate_or_of_another_version_is_changed_as_far_as_it_goes() -> None:
    """A script may import it and not use it."""

    class Trainer:
        lr_scheduler = None

        def _evaluate(self, epoch: int) -> int:
            return epoch

    change_trainer(SimpleNamespace(Trainer=Trainer))
    assert Trainer()._evaluate(epoch=3) == 3
