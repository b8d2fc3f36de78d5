"""Trials as `launch tune` runs them: a script for a few steps, its memory bounded; what ranks report of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner, Result
from harness import scripts
from harness.train.trials import in_forks

from launcher.cli.commands import tune
from launcher.cli.main import cli
from launcher.planner.tuning import RankTrial, Trial

# A sample is 8 MiB, and takes 72 MiB with what the layers keep for backward: what fits is a matter of samples.
TRAIN = """
    import sys, torch, launcher
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4096
        def __getitem__(self, place):
            return torch.full((2**15, 64), 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    engine, _, loader, _ = launcher.initialize(model=model, config=sys.argv[1], training_data=Rows())
    while True:
        for rows in loader:
            engine.backward(engine(rows).square().mean())
            engine.step()
            engine.save_checkpoint("checkpoints")
"""
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def config(folder: Path, **keys: object) -> str:
    (folder / "ds.json").write_text(json.dumps({**CONFIG, **keys}))
    return str(folder / "ds.json")


def options_for(script: Path, *words: str, memory: int | None = None, steps: int = 2) -> tune.TuneOptions:
    return tune.TuneOptions(steps, memory, False, 1, 0, None, None, False, False, str(script), words, ())


def reports(folder: Path, script: str, *words: str, patch: dict[str, object] | None = None) -> Sequence[RankTrial]:
    options = options_for(scripts.write(folder, script), *words)
    return in_forks(folder)(options, Trial("", patch or {}, 1, 1))


def test_each_rank_reports_its_steps_and_nothing_is_saved(tmp_path: Path) -> None:
    keys = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "train_batch_size": 4}
    found = reports(tmp_path, TRAIN, config(tmp_path, **keys))
    assert [each.rank for each in found] == [0, 1]
    for each in found:
        assert len(each.steps_s) == 2
        assert all(seconds > 0 for seconds in each.steps_s)
        assert each.has_loader
        assert each.input_shape == [1, 2**15, 64]
        assert each.peak_bytes > 4 * 2**23, "what the layers keep"
        facts = each.facts
        assert facts is not None
        assert (facts.stage, facts.optimizer, facts.param) == (2, "cpu", "none")
        assert (facts.micro_batch, facts.accumulation, facts.data_ranks) == (1, 2, 2)
        assert facts.keeps_batch
        assert not facts.has_pipeline
    assert not (tmp_path / "checkpoints").exists()


def test_a_patch_is_what_the_report_is_about(tmp_path: Path) -> None:
    patch = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 3}}
    first, _ = reports(tmp_path, TRAIN, config(tmp_path), patch=patch)
    assert first.facts is not None
    assert (first.facts.stage, first.facts.micro_batch, first.facts.keeps_batch) == (3, 3, False)
    assert first.input_shape == [3, 2**15, 64]


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("model = None; raise MemoryError", "building the model"),
        ("engine(torch.ones(1, 4)); raise MemoryError", "the script, between the engine's calls"),
        ("Model.forward = fail; engine(torch.ones(1, 4))", "forward"),
        ("engine.backward(Fails.apply(engine(torch.ones(1, 4))).mean())", "backward"),
        ("engine.optimizer.flat = None; engine.backward(engine(torch.ones(1, 4)).mean()); engine.step()", "step"),
    ],
)
def test_no_memory_is_a_result_that_names_the_phase(tmp_path: Path, line: str, phase: str) -> None:
    script = f"""
        import torch, launcher
        def fail(*_):
            raise torch.OutOfMemoryError("no memory")
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(_, x):
                return x * 1
            backward = staticmethod(fail)
        class Model(torch.nn.Linear):
            pass
        if "building" in {phase!r}:
            {line}
        engine, *_ = launcher.initialize(model=Model(4, 4), config={CONFIG!r})
        if {phase!r} == "step":
            import launcher.engine.engine
            launcher.engine.engine.step_units = fail
        {line}
    """
    found = reports(tmp_path, script)
    assert {each.oom_phase for each in found} == {phase}


def test_what_the_engine_refuses_is_a_result(tmp_path: Path) -> None:
    first, *_ = reports(tmp_path, TRAIN, config(tmp_path, zero_optimization={"stage": 9}))
    assert first.refused is not None
    assert "expected a stage: 0, 1, 2 or 3, got 9" in first.refused


def test_an_error_of_the_script_is_not_a_refusal(tmp_path: Path) -> None:
    script = f"""
        import torch, launcher
        engine, *_ = launcher.initialize(model=torch.nn.Linear(4, 4), config={CONFIG!r})
        with engine.no_sync():
            engine.step()
    """
    with pytest.raises(AssertionError, match=r"script\.py.*line 5(.|\n)*was called within no_sync"):
        reports(tmp_path, script)


def test_a_script_is_the_main_program_as_under_python(tmp_path: Path) -> None:
    script = """
        import sys
        names = {name for name in globals() if not name.startswith("__")}
        assert names == {"sys"}, names
        assert __name__ == "__main__" and __spec__ is None and __file__.endswith("script.py")
        assert sys.argv == [__file__, "--some", "words"], sys.argv
        sys.exit(0)
    """
    first, second = reports(tmp_path, script, "--some", "words")
    assert (first.facts, first.steps_s, second.oom_phase) == (None, [], None)


# ---- the largest micro-batch, held against trying all ----


def tuned(folder: Path, *words: str | Path) -> Result:
    with mock.patch.object(tune, "run_trial", side_effect=in_forks(folder)):
        return CliRunner().invoke(cli, ["tune", "--candidates", "0", "--steps", "1", *map(str, words)])


MEMORY_MIB = 395  # half-way from what 4 samples need to what 5 do


def test_the_largest_micro_batch_is_that_of_trying_all(tmp_path: Path) -> None:
    script, path, found_path = scripts.write(tmp_path, TRAIN), config(tmp_path), tmp_path / "found.json"
    words = ("--memory", f"{MEMORY_MIB}MiB", "--largest-micro-batch", "--most", "8", "--json", found_path)
    result = tuned(tmp_path, *words, script, path)
    assert result.exit_code == 0, result.output
    found = json.loads(found_path.read_text())
    assert len(found["trials"]) <= 1 + 3, "7 values above 1 are decided by 3 trials"
    options = options_for(script, path, memory=MEMORY_MIB << 20, steps=1)
    fits = []
    for size in range(1, 9):
        run = in_forks(tmp_path)(options, Trial("", {"train_micro_batch_size_per_gpu": size}, size, 1))
        fits.append(all(each.oom_phase is None for each in run))
    assert fits == sorted(fits, reverse=True)
    assert found["largest_micro_batch"] == sum(fits)
    assert 1 < sum(fits) < 8, "the limit is between"
    assert "out of memory in" in result.output
