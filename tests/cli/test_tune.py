"""`launch tune` as users type it: trials and what is made of them, errors of the script, Ctrl-C, hosts over SSH."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner, Result
from harness import scripts
from harness.launch.command import Launch, run_launch, wait_until
from harness.launch.sshd import LoopbackSshd

from launcher.base.errors import LauncherError, UsageError
from launcher.cli.commands import tune
from launcher.cli.main import cli
from launcher.planner.ladder import STANDINGS, Standing, standings_above, standings_below
from launcher.planner.tuning import ConfigFacts, Factors, RankTrial, Trial

TRAIN = """
    import argparse, json, os, torch, launcher
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed")
    model = torch.nn.Linear(16, 16)
    data = torch.utils.data.TensorDataset(torch.ones(64, 16))
    engine, _, loader, _ = launcher.initialize(args=parser.parse_args(), model=model, training_data=data)
    zero = engine._parts.settings.zero_optimization
    with open("seen-" + os.environ["RANK"], "a") as file:
        print(json.dumps([zero.stage, zero.offload_optimizer.device]), file=file)
    print("a line without an end", end="")
    for _ in range(9):
        for (rows,) in loader:
            engine.backward(engine(rows).square().mean())
            engine.step()
"""
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
OFFLOADED = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
SHORT = ("--steps", "2", "--candidates", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script and its config."""
    scripts.write(tmp_path, TRAIN, "train.py")
    (tmp_path / "ds.json").write_text(json.dumps({**CONFIG, "zero_optimization": OFFLOADED}))
    return tmp_path


def assert_tuned(result: Any, folder: Path) -> None:
    assert result.code == 0, result.err + result.out
    assert "trial 1: the script's own config" in result.err
    assert "trial 2: stage 1" in result.err
    found = json.loads((folder / "found.json").read_text())
    assert found["own"]["data_ranks"] == 2
    own, other = found["trials"]
    assert (own["trial"]["micro_batch"], own["trial"]["accumulation"], own["trial"]["patch"]) == (2, 1, {})
    assert other["trial"]["patch"] == {"zero_optimization": {"stage": 1, "offload_optimizer": None}}
    seen = [json.loads(line) for line in (folder / "seen-0").read_text().splitlines()]
    assert seen in ([[1, "cpu"], [1, "none"]], [[1, "cpu"], [1, "none"]] * 2), "the second two are for certainty"
    for each in (own, other):
        assert each["step_s"] > 0
        assert each["samples_per_s"] == pytest.approx(4 / each["step_s"])
    written = json.loads((folder / "tuned.json").read_text())
    assert written == {**CONFIG, "zero_optimization": OFFLOADED if found["best"] == 0 else {"stage": 1}}


@pytest.mark.soak  # the same on two hosts is not
def test_two_settings_on_this_machine(folder: Path) -> None:
    files = ("--json", "found.json", "--write", "tuned.json")
    env = {"XDG_CACHE_HOME": str(folder / "cache")}
    command = ("tune", "--num-gpus", "2", *SHORT, *files, "train.py", "--deepspeed", "ds.json")
    assert_tuned(run_launch(folder, *command, env=env), folder)
    assert not (folder / "runs").exists()


@pytest.mark.cluster
def test_two_hosts(sshd: LoopbackSshd, folder: Path) -> None:
    (folder / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    options = ("--hostfile", "hosts", "--ssh-config", sshd.ssh_config, "--force-multi")
    files = ("--json", "found.json", "--write", "tuned.json")
    assert_tuned(run_launch(folder, "tune", *options, *SHORT, *files, "train.py", "--deepspeed", "ds.json"), folder)


WAITING = """
    import os, time
    open("pid.part", "w").write(str(os.getpid()))
    os.rename("pid.part", "pid")
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_of_the_command_is_the_end_of_the_trial(tmp_path: Path, number: int) -> None:
    job = Launch(tmp_path, "tune", "--num-gpus", "1", scripts.write(tmp_path, WAITING))
    wait_until((tmp_path / "pid").exists, "the rank of the trial")
    rank = Path("/proc", (tmp_path / "pid").read_text())
    assert rank.exists()
    job.process.send_signal(number)
    result = job.wait()
    assert result.code == (130 if number == signal.SIGINT else -number), result.err
    wait_until(lambda: not rank.exists(), "the end of the rank")


def test_an_error_of_the_script_is_shown_once(tmp_path: Path) -> None:
    result = run_launch(
        tmp_path, "tune", "--num-gpus", "1", scripts.write(tmp_path, "raise ValueError('the data is bad')")
    )
    assert result.code == 1
    assert result.err.count("ValueError: the data is bad") == 1
    assert "trial.py" not in result.err, "frames of launch are not the user's"
    assert "✗ the script's own config: the script fails: rank 0 on " in result.err


def test_hosts_that_are_wrong_are_said_as_launch_run_says_it(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "tune", "--hostfile", "nowhere", scripts.write(tmp_path, ""))
    assert result.code == 2
    assert "nowhere" in result.err
    assert "the job of the trial has ended with 2" in result.err


def test_a_rank_that_is_killed_for_lack_of_memory_is_a_result(tmp_path: Path) -> None:
    dies = """
        import os, sys
        sys.stderr.write("terminate called after throwing an instance of 'std::bad_alloc'\\n")
        sys.stderr.flush()
        os.abort()
    """
    result = run_launch(tmp_path, "tune", "--num-gpus", "1", scripts.write(tmp_path, dies))
    assert result.code == 1
    assert "out of memory in an unknown phase" in result.out
    assert "✗ no setting fits" in result.out


def test_what_the_kernel_counts_is_a_result(tmp_path: Path) -> None:
    failure = {
        "rank": 1,
        "host": "node-a",
        "oom": "the memory limit of the cgroup was reached",
        "signal_name": "SIGKILL",
    }
    *others, killed = tune._killed([reported()], failure, Trial("stage 1", {}, 4, 2), tmp_path / "said", 137)
    assert (others, killed.rank, killed.oom_phase, killed.facts) == ([reported()], 1, "an unknown phase", FACTS)


# ---- without ranks ----

FACTS = ConfigFacts(1, "none", "none", 4, 2, 2, has_pipeline=False, keeps_batch=False)


def reported(facts: ConfigFacts | None = FACTS, step_s: float = 1.0, **changes: Any) -> RankTrial:
    times = [] if changes.get("oom_phase") or changes.get("refused") else [step_s]
    shape = None if facts is None else [facts.micro_batch, 16]
    return replace(RankTrial(0, 0, "node-a", "cpu", facts, times, 2**20, input_shape=shape), **changes)


def engine_of(facts: ConfigFacts, patch: Any) -> ConfigFacts:
    """Return what an engine makes of a patch."""
    zero = patch.get("zero_optimization", {})
    return replace(
        facts,
        stage=zero.get("stage", facts.stage),
        micro_batch=patch.get("train_micro_batch_size_per_gpu", facts.micro_batch),
        accumulation=patch.get("gradient_accumulation_steps", facts.accumulation),
    )


def run(
    folder: Path, *words: str, trial: Callable[[ConfigFacts], RankTrial | Exception], own: ConfigFacts = FACTS
) -> Result:
    """Run the command. trial: what a rank reports of an engine with these settings, or how the script fails."""

    def run_trial(_options: object, tried: Trial) -> list[RankTrial]:
        found = trial(engine_of(own, tried.patch))
        if isinstance(found, Exception):
            raise found
        return [found]

    (folder / "script.py").write_text("")
    with mock.patch.object(tune, "run_trial", side_effect=run_trial):
        env = {"XDG_CACHE_HOME": str(folder / "cache")}
        words = ("tune", *words, str(folder / "script.py"))
        return CliRunner().invoke(cli, words, prog_name="launch", env=env)


def test_the_quickest_is_named_with_its_patch(tmp_path: Path) -> None:
    result = run(tmp_path, trial=lambda facts: reported(facts, 1.0 if facts.stage == 1 else 0.5 + facts.stage))
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if " × " in line]
    labels = ["the script's own config", "stage 0", "stage 2", "stage 2, optimizer on the CPU", "stage 3"]
    assert [row.split("  ")[0].strip() for row in rows[1:6]] == labels
    assert "the quickest: stage 0, 32 samples/s; 2.00 × as quick as the script's own config" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1]) == {"zero_optimization": {"stage": 0}}
    assert "predicted" not in result.stdout, "columns without a value are left out"


def test_what_the_user_has_is_kept_unless_another_is_quicker(tmp_path: Path) -> None:
    result = run(tmp_path, "--write", str(tmp_path / "best.json"), trial=lambda facts: reported(facts, 1 + facts.stage))
    own = run(
        tmp_path, "--write", str(tmp_path / "own.json"), trial=lambda facts: reported(facts, abs(1 - facts.stage) + 1)
    )
    assert "the quickest: stage 0" in result.stdout
    assert "the script's own config is the quickest of what was tried" in own.stdout
    patches = [json.loads((tmp_path / name).read_text()) for name in ("best.json", "own.json")]
    assert patches == [{"zero_optimization": {"stage": 0}}, {}], "the script names no config"


def test_after_an_own_config_that_does_not_fit_smaller_ones_are_tried(tmp_path: Path) -> None:
    def trial(facts: ConfigFacts) -> RankTrial:
        return reported(facts, oom_phase="backward") if facts.stage < 3 else reported(facts)

    result = run(tmp_path, trial=trial)
    assert result.exit_code == 0
    assert "stage 0" not in result.output
    assert result.stdout.count("out of memory in backward") == 3
    assert "the quickest: stage 3, 16 samples/s; the script's own config does not fit" in result.stdout
    nothing = run(tmp_path, trial=lambda facts: reported(facts, oom_phase="forward"))
    assert (nothing.exit_code, "✗ no setting fits" in nothing.stdout) == (1, True)


def test_what_the_engine_refuses_is_a_row_unless_it_is_the_users_own(tmp_path: Path) -> None:
    result = run(tmp_path, trial=lambda facts: reported(facts, refused=None if facts.stage == 1 else "it has 2 stages"))
    assert result.exit_code == 0
    assert result.stdout.count("not run by the engine: it has 2 stages") == 4
    own = run(tmp_path, trial=lambda facts: reported(None, refused="a bad key"))
    assert isinstance(own.exception, LauncherError)
    assert str(own.exception) == "a bad key"


def test_an_error_of_the_script_leaves_what_was_measured(tmp_path: Path) -> None:
    error = tune.TrialError("the script fails", where="stage 2", exit_code=1, details="ValueError: no stage 2")
    result = run(tmp_path, trial=lambda facts: reported(facts) if facts.stage < 2 else error)
    assert result.exception is error
    assert "ValueError: no stage 2" in result.output
    assert "stage 0" in result.stdout


def test_ctrl_c_leaves_what_was_measured(tmp_path: Path) -> None:
    def trial(facts: ConfigFacts) -> RankTrial:
        if facts.stage > 1:
            raise KeyboardInterrupt
        return reported(facts, 2 - 0.5 * (facts.stage == 0))

    result = run(tmp_path, trial=trial)
    assert result.exit_code != 0
    assert "the quickest: stage 0" in result.stdout


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (reported(None), "the script has ended without an engine"),
        (replace(reported(), steps_s=[]), "the script has ended before its second optimizer step"),
    ],
)
def test_a_script_that_takes_no_steps_is_an_error(tmp_path: Path, report: RankTrial, text: str) -> None:
    result = run(tmp_path, trial=lambda _: report)
    assert isinstance(result.exception, LauncherError)
    assert text in str(result.exception)
    assert "×" not in result.stdout, "there is nothing to show"


# ---- the micro-batch ----


def micro_batches_of(result: Result, path: Path) -> list[tuple[int, int]]:
    assert result.exit_code == 0, result.output
    trials = json.loads(path.read_text())["trials"]
    return [(each["trial"]["micro_batch"], each["trial"]["accumulation"]) for each in trials]


@pytest.mark.parametrize("largest", [4, 5, 11, 16])
def test_the_largest_micro_batch_is_looked_for_at_the_quickest_setting(tmp_path: Path, largest: int) -> None:
    def trial(facts: ConfigFacts) -> RankTrial:
        quick = 0.5 if facts.stage == 0 else 1.0
        fits = facts.micro_batch <= largest
        return reported(facts, quick) if fits else reported(facts, oom_phase="backward")

    found = tmp_path / "found.json"
    result = run(tmp_path, "--largest-micro-batch", "--most", "16", "--json", str(found), trial=trial)
    sizes = micro_batches_of(result, found)
    assert "micro-batches above 4 at stage 0: 12 to choose from, at most 4 trials" in result.output
    assert len(sizes) <= 5 + 4
    assert {steps for _, steps in sizes} == {2}, "the accumulation stays where the config names no batch"
    assert f"the largest micro-batch that fits: {largest}" in result.stdout
    if largest > 4:
        keys = {"train_micro_batch_size_per_gpu": largest, "gradient_accumulation_steps": 2}
        assert json.loads(result.stdout.splitlines()[-1]) == {"zero_optimization": {"stage": 0}, **keys}
        assert f"it changes the global batch from 16 to {4 * largest} samples" in result.stdout


def test_a_batch_that_the_config_names_is_kept_exactly(tmp_path: Path) -> None:
    own = replace(FACTS, micro_batch=2, accumulation=6, keeps_batch=True)
    found = tmp_path / "found.json"
    words = ("--candidates", "0", "--largest-micro-batch", "--json", str(found))
    result = run(tmp_path, *words, own=own, trial=lambda facts: reported(facts, 1 / facts.micro_batch))
    assert all(micro * steps == 12 for micro, steps in micro_batches_of(result, found))
    assert "4 to choose from, at most 3 trials; train_batch_size stays 24" in result.output
    assert "the largest micro-batch that fits: 12" in result.stdout
    assert "changes the global batch" not in result.stdout


def test_below_an_own_micro_batch_that_does_not_fit(tmp_path: Path) -> None:
    def trial(facts: ConfigFacts) -> RankTrial:
        return reported(facts) if facts.micro_batch <= 3 else reported(facts, oom_phase="forward")

    result = run(tmp_path, "--candidates", "0", "--largest-micro-batch", trial=trial)
    assert "micro-batches below 4 at the script's own config: 3 to choose from, at most 2 trials" in result.output
    assert "the largest micro-batch that fits: 3" in result.stdout
    alone = run(
        tmp_path,
        "--candidates",
        "0",
        "--largest-micro-batch",
        own=replace(FACTS, micro_batch=1),
        trial=lambda facts: reported(facts, oom_phase="forward"),
    )
    assert (alone.exit_code, "largest" in alone.stdout) == (1, False)


def test_a_script_that_does_not_follow_is_told_so(tmp_path: Path) -> None:
    words = ("--candidates", "0", "--largest-micro-batch")
    result = run(tmp_path, *words, trial=lambda facts: reported(facts, input_shape=[4, 16]))
    assert result.exit_code == 0
    assert "! no micro-batch is looked for: the script's batches do not follow" in result.output
    assert "batch_size=engine.train_micro_batch_size_per_gpu()" in result.output
    assert "micro-batch 5" not in result.stdout, "what was not trained on is not shown as a result"
    error = tune.TrialError(
        "the script fails", where="stage 2", exit_code=1, details="Traceback\nValueError: 8 is not 4"
    )
    fails = run(tmp_path, *words, trial=lambda facts: reported(facts) if facts.micro_batch == 4 else error)
    assert fails.exit_code == 0
    assert "the script fails: ValueError: 8 is not 4" in fails.output


# ---- candidates ----


def test_candidates_remove_the_offload_that_they_have_not() -> None:
    facts = replace(FACTS, stage=3, optimizer="cpu", param="nvme")
    found = {each.label: each.patch["zero_optimization"] for each in tune.candidates(facts, 99, fits=True)}
    assert found["stage 3"] == {"stage": 3, "offload_optimizer": None, "offload_param": None}
    on_cpu = {"device": "cpu"}
    assert found["stage 3, optimizer on the CPU, parameters on the CPU"] == {
        "stage": 3, "offload_optimizer": on_cpu, "offload_param": {**on_cpu, "nvme_path": None},
    }  # fmt: skip
    assert len(tune.candidates(facts, 2, fits=True)) == 2
    assert tune.candidates(facts, 99, fits=False) == [], "the next rung is NVMe, whose folder only the user knows"
    pipeline = tune.candidates(replace(FACTS, has_pipeline=True), 99, fits=True)
    assert [each.label for each in pipeline] == ["stage 0", "stage 1, optimizer on the CPU"]


def test_standings_above_are_those_that_one_is_below_of() -> None:
    for one in STANDINGS:
        assert all(one in standings_below(above) for above in standings_above(one))
    assert standings_above(Standing(2)) == [Standing(1), Standing(0)]


def test_measured_times_of_predicted_trials_are_kept(tmp_path: Path) -> None:
    trials = [Trial("stage 3", {}, 4, 2, 2**20, 0.5, {"compute": 0.5})]
    with mock.patch.object(tune, "candidates", return_value=trials):
        result = run(tmp_path, trial=reported)
    assert "predicted step" in result.stdout
    kept = tmp_path / "cache/launch/speed/node-a-1xcpu.factors.json"
    factors = Factors.from_json(kept.read_text())
    assert (factors.common, factors.num_outcomes) == (2.0, 1)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--memory", "much", "script.py"), "is not a size of a memory"),
        (("--steps", "0", "script.py"), "'0'"),
        (("nowhere.py",), "nowhere.py: no such script"),
        ((), "SCRIPT"),
    ],
)
def test_what_cannot_be_tuned_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["tune", *words], prog_name="launch")
    assert result.exit_code in (1, 2)
    assert text in (str(result.exception) if isinstance(result.exception, UsageError) else result.output)


def test_options_about_hosts_reach_launch_run(tmp_path: Path) -> None:
    seen: list[tune.TuneOptions] = []

    def run_trial(options: tune.TuneOptions, _: Trial) -> list[RankTrial]:
        seen.append(options)
        return [reported()]

    with mock.patch.object(tune, "run_trial", side_effect=run_trial):
        words = [
            "--hostfile",
            "hosts",
            "--num-nodes",
            "2:3",
            "-v",
            "--candidates",
            "0",
            "--memory",
            "1GiB",
            "-m",
            "package",
        ]
        CliRunner().invoke(cli, ["tune", *words, "--lr", "1"], prog_name="launch")
    (options,) = seen
    assert options.run_words == ("--hostfile", "hosts", "--num-nodes", "2:3", "--verbose")
    assert options.command == ["5", str(2**30), "module", "package", "--lr", "1"]
