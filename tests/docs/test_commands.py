"""Every command that the pages show runs here or in a test that a table names, and prints what the page says."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner
from harness.checkpoints import write_checkpoint
from harness.launch.command import run_launch
from harness.launch.forked_ranks import in_forks
from harness.launch.sshd import LoopbackSshd
from harness.pages import PAGES, ROOT, Shown, blocks_of, commands, resolved, words_of
from harness.train import rehearsed

from launcher.cli import script_plan
from launcher.cli.commands import plan, probe, rehearse, tune
from launcher.cli.main import cli
from launcher.config.load import load_config
from launcher.planner.ladder import EngineFacts
from launcher.planner.rehearsal import DeviceWork, RankRehearsal
from launcher.planner.speed import CollectiveSpeed, RankSpeed, Speed
from launcher.planner.tuning import ConfigFacts, RankTrial, Trial
from launcher.probes.model import facts_of

BASH, EXEC, FIRST = "tests/cli/test_completion.py", "tests/hosts/test_exec.py", "test_the_first_command_of_the_readme"
COMPLETION = f"{BASH}::test_each_shell_gets_a_script"
DEEPSPEED_COMMAND = "tests/huggingface/test_deepspeed_command.py"
TO_DEEPSPEED = "tests/checkpoint/test_to_deepspeed.py"
EXPORT, TO_FP32 = "tests/checkpoint/test_export.py", "tests/checkpoint/test_to_fp32.py"
IMPORT = "tests/checkpoint/test_deepspeed.py::test_the_command_imports_a_tag_once"
REPORT = "tests/cli/test_report.py::test_the_text_names_every_section"
HANG = "tests/job/test_collectives.py::test_a_plain_job_says_who_is_missing_in_which_collective"
SHOW = "tests/cli/test_show.py"
TOP = "tests/cli/test_top.py::test_in_a_terminal"
TOP_ONCE = "tests/cli/test_top.py::test_a_job_without_a_journal_has_its_logs"
TRACE = "tests/cli/test_trace.py::test_an_engines_job_is_traced_again_and_again_and_trains_on"
STACKS = "tests/job/test_hang.py::test_stacks_on_demand_leave_the_job_alone"
TRAIN_GPT = "tests/e2e/test_train_gpt.py"
TRAINER = "tests/huggingface/test_example.py::test_its_loss_falls_and_its_model_is_saved"
BUILT = "tests/cli/test_estimate.py::test_functions_build_on_the_meta_device"

# What takes long, needs torch, or changes the machine -> where the same runs.
ELSEWHERE = {
    "make demo": ".ci/run",
    "make test": ".ci/run",
    "make install": ".ci/run",
    "make numerics": ".ci/run",
    "make soak-short": ".ci/run",
    "make gpu": "tests/test_gpu_path.py::test_a_dry_run_writes_the_page_and_the_json",
    ".ci/system-packages": ".ci/run",
    "python -m pytest tests/cluster": "tests/cluster/test_hostfile.py",
    "python -m pytest tests/job/test_hang.py -k progress -x": (
        "tests/job/test_hang.py::test_output_counts_as_progress_for_scripts_without_heartbeats"
    ),
    "python -m pytest tests/job/test_run_local.py::test_stdout_and_stderr_stay_apart": (
        "tests/job/test_run_local.py::test_stdout_and_stderr_stay_apart"
    ),
    "launch --num-gpus 2 examples/ddp.py": f"tests/docs/test_commands.py::{FIRST}",
    "launch --num-gpus 2 examples/train_gpt.py --deepspeed examples/configs/zero2.json": (
        f"{TRAIN_GPT}::test_same_losses_on_this_machine_and_over_ssh"
    ),
    "launch --hostfile hostfiles/loopback examples/train_gpt.py --deepspeed examples/configs/zero2.json": (
        f"{TRAIN_GPT}::test_same_losses_on_this_machine_and_over_ssh"
    ),
    "launch --num-gpus 2 examples/train_gpt.py --deepspeed examples/configs/zero3_offload.json": (
        f"{TRAIN_GPT}::test_optimizer_and_parameters_in_host_memory"
    ),
    "launch --num-gpus 2 examples/pipeline.py --deepspeed examples/configs/pipeline.json": (
        "tests/e2e/test_pipeline_example.py::test_two_stages_train"
    ),
    "launch --num-gpus 8 examples/pipeline.py --deepspeed examples/configs/3d.json": (
        "tests/e2e/test_pipeline_example.py::test_three_axes_train_together"
    ),
    "launch --num-gpus 2 examples/hf_trainer.py --deepspeed examples/configs/hf_zero2.json"
    " --output_dir out --max_steps 20": TRAINER,
    "launch --num-gpus 2 examples/hf_trainer.py --deepspeed examples/configs/hf_zero2.json"
    " --output_dir runs/hf --max_steps 20": TRAINER,
    "launch --num-gpus 2 examples/hf_no_trainer.py --zero-stage 3 --output model": (
        "tests/huggingface/evaluating_cases.py::case_example"
    ),
    "launch --num-gpus 2 examples/hf_zero3_inference.py": (
        "tests/huggingface/test_pretrained.py::test_the_example_answers_with_parameters_in_memory_and_on_disk"
    ),
    "%%launch --num-gpus 2 --hostfile hosts -- --epochs 3": (
        "tests/notebook/test_kernel.py::test_the_cell_magic_runs_the_cell_on_ranks"
    ),
    "accelerate launch --config_file accelerate.yaml train.py": (
        "tests/huggingface/test_accelerator.py::test_the_config_file_of_accelerate_is_what_counts"
    ),
    "accelerate launch --use_deepspeed --num_processes 8 train.py": (
        f"{DEEPSPEED_COMMAND}::test_accelerate_launch_on_two_nodes_runs_it"
    ),
    "launch deepspeed-command install": f"{DEEPSPEED_COMMAND}::test_it_is_installed_and_removed",
    "launch deepspeed-command remove": f"{DEEPSPEED_COMMAND}::test_it_is_installed_and_removed",
    **dict.fromkeys(
        (
            "launch show JOB",
            "launch show JOB --json",
            "launch show calm-otter-4f2a",
            "launch show runs/calm-otter-4f2a --json",
            "launch show lucid-wren",
        ),
        f"{SHOW}::test_show_says_what_a_job_did",
    ),
    **dict.fromkeys(
        (
            "launch report JOB",
            "launch report JOB -o run.html",
            "launch report calm-otter-4f2a -o run.html",
        ),
        f"{SHOW}::test_the_page_of_a_job_is_written",
    ),
    **dict.fromkeys(
        (
            "launch report JOB JOB2 -o both.html",
            "launch report calm-otter-4f2a bold-lynx-77c1",
            "launch report bold-lynx calm-otter -o both.html",
        ),
        "tests/cli/test_run_page.py::test_only_what_differs_is_in_the_table",
    ),
    "launch trace JOB": TRACE,
    "launch trace calm-otter-4f2a": TRACE,
    "launch trace calm --steps 5 --ranks 0,8-11 -o trace.json.gz": TRACE,
    "launch stacks JOB": STACKS,
    **dict.fromkeys(("launch top", "launch top calm-otter", "launch top JOB"), TOP),
    **dict.fromkeys(("launch top calm-otter --once", "launch top JOB --once"), TOP_ONCE),
    "launch stacks calm-otter-4f2a": STACKS,
    "launch stacks --native calm": HANG,
    "launch stacks --native JOB": HANG,
    "launch stacks --all calm": "tests/job/test_hang.py::test_launch_stacks_folds_ranks_that_stand_alike",
    "launch sbatch --nodes 2 --gpus-per-node 8 --time 20:00:00 --submit train.py": (
        "tests/slurm/test_sbatch.py::test_a_chain_runs_one_after_the_other"
    ),
    "cd checkpoints && python zero_to_fp32.py . out": f"{TO_FP32}::test_the_script_needs_nothing_of_the_package",
    "launch checkpoint to-fp32 DIR OUT": f"{EXPORT}::test_to_fp32_on_the_command_line",
    "launch checkpoint to-fp32 checkpoints out": f"{EXPORT}::test_to_fp32_on_the_command_line",
    "launch checkpoint to-fp32 checkpoints/global_step500 weights.safetensors": (
        f"{TO_FP32}::test_every_form_of_output_has_the_same_weights"
    ),
    "launch checkpoint export DIR OUT": f"{EXPORT}::test_the_weights_are_those_of_the_run",
    "launch checkpoint export output/checkpoint-500 model": f"{EXPORT}::test_the_weights_are_those_of_the_run",
    "launch checkpoint export checkpoints model --config gpt2/ --dtype bf16": (
        f"{EXPORT}::test_the_config_may_be_elsewhere"
    ),
    "launch checkpoint export DIR OUT --format deepspeed": f"{TO_DEEPSPEED}::test_the_command_exports",
    "launch checkpoint export DIR OUT --format deepspeed --ranks N --stage S": (
        f"{TO_DEEPSPEED}::test_the_command_exports"
    ),
    "launch checkpoint export checkpoints out --format deepspeed --ranks 16 --stage 3": (
        f"{TO_DEEPSPEED}::test_the_command_exports"
    ),
    "launch checkpoint export DIR OUT --format dcp": "tests/checkpoint/test_stores.py::test_the_command_exports",
    "launch checkpoint export s3://bucket/run out --format dcp": (
        "tests/checkpoint/test_stores.py::test_the_commands_take_urls"
    ),
    "launch checkpoint import SRC DST": IMPORT,
    "launch checkpoint import deepspeed_checkpoints checkpoints": IMPORT,
    "launch checkpoint import deepspeed_checkpoints checkpoints --tag global_step500": IMPORT,
    "launch report": REPORT,
    "launch report --job JOB": "tests/cli/test_report.py::test_a_bug_report_has_arguments_config_and_how_the_job_ended",
    "launch report --job calm-otter --config ds_config.json > report.txt": (
        "tests/cli/test_report.py::test_a_bug_report_has_arguments_config_and_how_the_job_ended"
    ),
    'launch exec --hostfile hosts -- "$(command -v launch)" report': REPORT,
    'launch exec --hostfile hosts -- "$(command -v launch)" io /local_nvme': "tests/cli/test_io.py",
    'launch exec -H hosts -- "$(command -v launch)" io /local_nvme': "tests/cli/test_io.py",
    "launch exec --hostfile hosts nvidia-smi -L": (
        f"{EXEC}::test_options_of_the_command_and_odd_words_reach_it_untouched"
    ),
    "launch estimate my_package.model:build": BUILT,
    "launch estimate model.py:build": BUILT,
    "launch estimate my_package.model:build --stage 3 --offload-optimizer cpu": BUILT,
    'eval "$(launch completion bash)"': f"{BASH}::test_the_script_works_in_bash",
    'eval "$(launch completion zsh)"': COMPLETION,
    "launch completion fish | source": COMPLETION,
}
# Other programs, which nothing here stands behind.
OTHERS = {
    "pip install .",
    "pip install 'launch-zero @ git+https://...'",
    "pip install '.[notebook]'",
    "pip install 'launch-zero[top]'",
    "source .venv/bin/activate",
}
BENCHMARK = re.compile(r"((?:benchmarks|tests/soak)/(\w+))\.py")
# Words that the pages use where a reader writes his own -> those of the sandbox, in this order.
PLACEHOLDERS = {
    r"--lint FILE": "--lint train.slurm",
    r"--hostfile FILE": "--hostfile hosts",
    r"\bFILE": "ds_config.json",
    r"\bKEY": "zero_optimization.stage",
    r"\bMODEL": "7B",
    r"\b(DIR|PATH)": "checkpoints",
    r"\bCOMMAND": "uname",
    r"\bN\b": "1",
    r"(?<= )\.\.\.": "train.py",
    r"(?<= )/(local_nvme|data)\b": r"\1",
}
JOB, HOSTS = "calm-otter-4f2a", {"node-a": "127.0.0.2", "node-b": "127.0.0.3", "node[01-04]": "127.0.0.[5-8]"}
# Not the disk is measured here.
QUICK = ["--size", "64MiB", "--seconds", "1"]
CONFIG = {
    "elasticity": {"enabled": True, "max_train_batch_size": 48, "micro_batch_sizes": [1], "min_gpus": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
MODEL = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


def unique() -> list[Shown]:
    """Return each command once: the place that shows its output, else the first."""
    found: dict[str, Shown] = {}
    for shown in commands():
        if shown.text not in found or not found[shown.text].output:
            found[shown.text] = shown
    return list(found.values())


SHOWN = unique()
LEFT = [each for each in SHOWN if each.text not in {*ELSEWHERE, *OTHERS} and not BENCHMARK.search(each.text)]
RUN = [each for each in LEFT if each.text.startswith("launch ")]


def name_of(command: str) -> str:
    """Return the name of a `launch` command: "run", "check", "config check"."""
    return resolved(words_of(command))[0].command_path.removeprefix("launch ")


def on_hosts(shown: Shown) -> bool:
    return name_of(shown.text) in ("check", "exec") and shown.text != "launch check"


def of_jobs(shown: Shown) -> bool:
    return name_of(shown.text) in ("ps", "logs", "kill")


def test_every_page_with_commands_is_read() -> None:
    pages = {shown.page for shown in commands()}
    assert {
        "README.md",
        "CONTRIBUTING.md",
        "launch.md",
        "output.md",
        "failures.md",
        "tools.md",
        "options.md",
        "slurm.md",
        "guides.md",
    } < pages
    assert len(RUN) > 90


def test_a_command_of_another_program_is_in_a_table() -> None:
    assert [f"{each.place}: {each.text}" for each in LEFT if each not in RUN] == [], "name the test that runs it"


def test_no_table_names_a_command_that_no_page_shows() -> None:
    assert (ELSEWHERE.keys() | OTHERS) - {shown.text for shown in SHOWN} == set()


@pytest.mark.parametrize(("command", "place"), ELSEWHERE.items())
def test_what_runs_elsewhere_runs_there(command: str, place: str) -> None:
    path, _, test = place.partition("::")
    text = (ROOT / path).read_text()
    if test:
        assert f"def {test}(" in text
    else:
        assert path.startswith("tests/") or re.search(rf"{re.escape(command)}(?![\w-])", text), command
    for example in re.findall(r"examples/(\w+)\.py", command):
        assert example in text


@pytest.mark.parametrize("shown", [each for each in SHOWN if BENCHMARK.search(each.text)], ids=lambda each: each.place)
def test_a_benchmark_has_the_options_that_a_page_gives_it(shown: Shown) -> None:
    """Each runs in its short form in tests/test_benchmarks.py, or in a test of its own."""
    ((path, name),) = BENCHMARK.findall(shown.text)
    short_forms = (ROOT / "tests/test_benchmarks.py").read_text()
    assert re.search(rf'^    "{name}": \(|^    elsewhere = .*"{name}"', short_forms, re.MULTILINE)
    sources = [(ROOT / f"{each}.py").read_text() for each in (path, "benchmarks/common")]
    behind = shown.text.partition(".py")[2]
    assert [word for word in re.findall(r" (--[\w-]+)", behind) if f'"{word}"' not in "".join(sources)] == []


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the pages speak of."""
    (tmp_path / "hosts").write_text("node-a slots=8\nnode-b slots=8\n")
    (tmp_path / "hostfile").write_text("node-a slots=8\nnode-b slots=8\n")
    for name in ["train", "gen", "run_translation", "run_clm", "your_program", "package/train"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "train.sh").write_text("")
    (tmp_path / "train.sh").chmod(0o755)
    for name in ("ds_config.json", "ds.json"):
        (tmp_path / name).write_text(json.dumps(CONFIG))
    (tmp_path / "job.yaml").write_text(next(b.text for b in blocks_of(ROOT / "docs/launch.md") if b.language == "yaml"))
    for name in ("llama", "checkpoint"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(MODEL))
    for name in ("examples", "hostfiles"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("local_nvme", "data"):
        (tmp_path / name).mkdir()
    for step in (100, 500):
        write_checkpoint(tmp_path / "checkpoints", step)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


_FLOPS = {"fp32": 1e11, "bf16": 1e12, "fp16": 1e11}
SPEED = Speed(
    "2026-11-28 19:30:00",
    "gloo",
    [RankSpeed(rank, 0, "vm", "cpu", _FLOPS, 1e10) for rank in range(2)],
    [
        CollectiveSpeed(kind, "all ranks", 2, 2**power, 1e-3)
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        for power in (12, 15, 18, 21, 24, 26)
    ],
)


REHEARSED = RankRehearsal(
    0, 2, 2,
    work={phase: DeviceWork(1e9, 1e6, 1e6, 10) for phase in ("forward", "backward")},
    peaks={phase: {"parameters": 1 << 20, "activations": 1 << 20} for phase in ("forward", "backward", "step")},
    engine=EngineFacts(device="cuda", stage=1, micro_batch=2, accumulation=1), params=[("0.weight", 1 << 16, True)],
    config=load_config({"train_micro_batch_size_per_gpu": 2}).config.model_dump(mode="json"),
)  # fmt: skip


def trial_of(_options: tune.TuneOptions, trial: Trial) -> list[RankTrial]:
    """Return what a rank would report: stage 0 with 37 samples is quickest, and 44 are the most that fit."""
    stage = trial.patch.get("zero_optimization", {}).get("stage", 2)
    size = trial.patch.get("train_micro_batch_size_per_gpu", 8)
    facts = ConfigFacts(stage, "none", "none", size, 1, 2, has_pipeline=False, keeps_batch=False)
    found = RankTrial(0, 0, "vm", "cpu", facts, peak_bytes=2**26, has_loader=True)
    if size > 44:
        found.oom_phase = "forward" if size >= 48 else "backward"
    else:
        found.steps_s = [0.1 + 0.01 * size + 0.01 * stage + (0.25 if size > 40 else 0)]
    return [found]


def run(command: str) -> str:
    """Run a command of a page in this process; return what it printed. Ranks and disks are not waited for."""
    for pattern, value in PLACEHOLDERS.items():
        command = re.sub(pattern, value, command)
    words, name = words_of(command), name_of(command)
    if name == "run" and "--dry-run" not in words and "--help" not in words:
        words.insert(words[0] == "run", "--dry-run")
    elif name == "io":
        words += QUICK
    with contextlib.ExitStack() as stack:
        if name == "probe":
            stack.enter_context(mock.patch.object(probe, "_measure", return_value=SPEED))
        # In this process, which imports torch and transformers once.
        stack.enter_context(
            mock.patch("launcher.cli.model_source._ask", lambda kind, target, *_: facts_of(kind, target))
        )
        if name == "plan":
            stack.enter_context(mock.patch.object(plan, "_probed", return_value=SPEED))
            stack.enter_context(mock.patch.object(script_plan, "rehearsed", return_value=REHEARSED))
        if name == "tune":
            stack.enter_context(mock.patch.object(tune, "run_trial", side_effect=trial_of))
        if name == "rehearse":  # a script that is not there is not run
            in_fork, result = rehearsed.in_forks(Path.cwd()), RankRehearsal(0, 64, 8)
            run_rank = in_fork if "examples/" in command else mock.Mock(return_value=result)
            stack.enter_context(mock.patch.object(rehearse, "run_rank", run_rank))
        done = CliRunner().invoke(cli, words, prog_name="launch")
    assert done.exit_code == 0, (words, done.exception, done.output)
    return done.output


def assert_like(output: str, printed: str) -> None:
    """Find the lines that a page shows among those printed, in their order; numbers and sizes are not compared."""

    def shapes(text: str) -> list[str]:
        plain = re.sub(r"[\d,.]*\d( [KMGT]iB)?", "N", re.sub(r"─+", "─", text))
        return [" ".join(line.split()) for line in plain.splitlines() if line.strip() not in ("", "...")]

    rest = iter(shapes(printed))
    assert [line for line in shapes(output) if line not in rest] == [], printed


@pytest.mark.parametrize(
    "shown", [each for each in RUN if not on_hosts(each) and not of_jobs(each)], ids=lambda each: each.place
)
def test_a_command_does_what_it_is_shown_for(sandbox: Path, shown: Shown) -> None:
    if "--lint" in shown.text:
        (written,) = (each.text for each in SHOWN if each.text.endswith("> train.slurm"))
        (sandbox / "train.slurm").write_text(run(written))
    printed = run(shown.text)
    assert printed
    if name_of(shown.text) == "estimate" and shown.output:  # numbers alone: nothing of this machine is in it
        assert printed.splitlines() == shown.output.splitlines()
    elif shown.output:
        assert_like(shown.output.replace("/local_nvme", "local_nvme"), printed)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The id of a job of four ranks that has ended."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    done = run_launch(folder, "--num-gpus", "4", "train.py")
    assert done.code == 0, done.err
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        yield done.job_id


@pytest.mark.parametrize("shown", [each for each in RUN if of_jobs(each)], ids=lambda each: each.place)
def test_a_command_finds_the_job_again(sandbox: Path, job: str, shown: Shown) -> None:
    command = re.sub(rf"\bJOB\b|\b{JOB}", job, shown.text)
    printed = run(re.sub(rf"\b{JOB.partition('-')[0]}\b", job[: job.index("-")], command))
    if name_of(command) == "logs":
        assert re.fullmatch(r"(\[\d\] )?rank \d\n", printed.splitlines(keepends=True)[0])
    else:
        assert job in printed


@pytest.mark.cluster
@pytest.mark.parametrize("shown", [each for each in RUN if on_hosts(each)], ids=lambda each: each.place)
def test_a_command_reaches_all_hosts(sandbox: Path, sshd: LoopbackSshd, shown: Shown) -> None:
    command = re.sub(r"^launch \w+", rf"\g<0> -F {sshd.ssh_config}", shown.text)
    for name, address in HOSTS.items():
        command = command.replace(name, address)
    names = [HOSTS["node[01-04]"]] if HOSTS["node[01-04]"] in command else [HOSTS["node-a"], HOSTS["node-b"]]
    (sandbox / "hosts").write_text("".join(f"{name} slots=8\n" for name in names))
    printed = run(command)
    assert printed or command.endswith("-- true")
    if shown.output:
        assert_shown(shown, printed)


def assert_shown(shown: Shown, printed: str) -> None:
    """Compare what is printed of hosts with a page: the facts of the first one and the summary, or the heading."""
    lines = [line for line in printed.splitlines() if not line.startswith("waiting for ")]
    (first, *_, last), (first_printed, *_, last_printed) = shown.output.splitlines(), lines
    if shown.text.startswith("launch check"):
        names = [re.findall(r"· ([a-z]\w+) [^\s]*\d", line) for line in (first, first_printed)]
        assert names[0] == names[1] == ["python", "torch", "memory", "disk", "clock"]
        summary = r"\d+ hosts: \d+ ok(, \d+ ✗)? · TCP: \d+ of \d+ connections between hosts"
        assert re.fullmatch(summary, last)
        assert re.fullmatch(summary, last_printed)
    else:
        heading = r"[\w.]+\[\d+-\d+\]:"
        assert re.fullmatch(heading, first)
        assert re.fullmatch(heading, first_printed)


def test_the_first_command_of_the_readme(tmp_path: Path) -> None:
    words = words_of(next(each.text for each in SHOWN if each.text.startswith("launch --")))
    assert words[-1] == "examples/ddp.py"
    result = run_launch(tmp_path, "--log-dir", tmp_path, *words[:-1], *in_forks(ROOT / words[-1]))
    assert result.code == 0, result.err
    assert re.search(r"2 ranks, loss 0\.0", result.out)


def test_extras_that_pages_install_exist() -> None:
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    named = {name for page in PAGES for name in re.findall(r"'\.\[(\w+)\]", page.read_text())}
    assert {"hf", "notebook"} <= named <= set(known)
