"""The command line as users know it: its options are frozen here, so that none is lost or renamed unnoticed."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from harness.launch.command import ROOT, run_here, run_launch

from launcher.base.errors import UsageError
from launcher.cli.commands.run import run
from launcher.cli.console import streams
from launcher.cli.console.lines import LineAssembler, ShownOutput
from launcher.cli.main import COMMANDS, cli, main
from launcher.cli.options.command import Option

# Every spelling that works. The first one of two dashes is shown; `_` stands for `-` in all of them.
SURFACE = {
    "engine": ("--engine",),
    "standalone": ("--standalone",),
    "hostfile": ("-H", "--hostfile"),
    "include": ("-i", "--include"),
    "exclude": ("-e", "--exclude"),
    "num_nodes": ("--num-nodes",),
    "num_gpus": ("--num-gpus",),
    "master_addr": ("--master-addr",),
    "master_port": ("--master-port",),
    "module": ("-m", "--module"),
    "no_python": ("--no-python",),
    "pass_local_rank": ("--pass-local-rank",),
    "no_local_rank": ("--no-local-rank",),
    "launcher": ("--launcher",),
    "ssh": ("--ssh",),
    "ssh_port": ("--ssh-port",),
    "ssh_config": ("-F", "--ssh-config"),
    "remote_python": ("--remote-python",),
    "accept_new_host_keys": ("--accept-new-host-keys",),
    "setup": ("--setup",),
    "venv_script": ("--venv-script",),
    "no_ssh": ("--no-ssh",),
    "node_rank": ("--node-rank",),
    "run_id": ("--job-id",),
    "redirects": ("-r", "--redirects"),
    "tee": ("-t", "--tee"),
    "local_ranks_filter": ("--local-ranks-filter",),
    "force_multi": ("--force-multi",),
    "log_dir": ("--log-dir",),
    "no_journal": ("--no-journal",),
    "metrics_port": ("--metrics-port",),
    "otlp": ("--otlp",),
    "grace_s": ("--grace",),
    "lease_s": ("--heartbeat-timeout", "--lease"),
    "max_restarts": ("--max-restarts",),
    "min_nodes": ("--min-nodes",),
    "resume": ("--resume",),
    "on_oom": ("--on-oom",),
    "faults": ("--fault",),
    "hang_timeout_s": ("--hang-timeout",),
    "env": ("--env",),
    "env_files": ("--env-file",),
    "bind_cores": ("--bind-cores-to-rank",),
    "bind_core_list": ("--bind-core-list",),
    "saves_pid": ("--save-pid",),
    "stop_signals": ("--signals-to-handle",),
    "no_prefix": ("--no-prefix",),
    "verbose": ("-v", "--verbose"),
    "log_level": ("--log-level",),
    "quiet": ("-q", "--quiet"),
    "plain": ("--plain",),
    "dry_run": ("--dry-run",),
    "as_json": ("--json",),
}
# Options of torchrun and accelerate that `--help` does not show.
ACCEPTED = {
    "--rdzv-endpoint", "--rdzv-backend", "--rdzv-conf", "--monitor-interval", "--start-method", "--role",
    "--local-addr", "--run-path", "--use-env", "--multi-gpu",
}  # fmt: skip
# Spellings that work and that `--help` does not show.
ALSO = {
    "num_nodes": ("--nnodes", "--nnode", "--num-machines"),
    "node_rank": ("--machine-rank",),
    "run_id": ("--rdzv-id",),
    "master_addr": ("--main-process-ip",),
    "master_port": ("--main-process-port",),
    "verbose": ("--debug",),
    "num_gpus": ("--num-accelerators", "--nproc-per-node"),
    "log_dir": ("--enable-each-rank-log",),
    "grace_s": ("--shutdown-timeout",),
}

HOSTS_SURFACE = {
    name: SURFACE[name]
    for name in (
        "hostfile", "include", "exclude", "num_nodes", "ssh", "ssh_port", "ssh_config", "remote_python", "force_multi",
        "accept_new_host_keys", "setup", "venv_script", "verbose",
    )
}  # fmt: skip
TOOLS_SURFACE: dict[str, dict[str, tuple[str, ...]]] = {
    "check": HOSTS_SURFACE | {"as_json": ("--json",)},
    "exec": HOSTS_SURFACE | {"timeout_s": ("--timeout",), "supervise": ("--supervise",), "as_json": ("--json",)},
    "ps": {"as_json": ("--json",)},
    "logs": {"rank": ("--rank",), "follow": ("-f", "--follow"), "num_lines": ("--tail",)},
    "kill": {"now": ("--now",)},
    "completion": {},
    "deepspeed-command": {},
    "io": {"size_bytes": ("--size",), "seconds": ("--seconds",), "as_json": ("--json",)},
    "report": {
        "output": ("-o", "--output"),
        "job": ("--job",),
        "config": ("--config",),
        "as_json": ("--json",),
    },
    "show": {"as_json": ("--json",)},
}


def usage_error(*words: str) -> str:
    """Run a line that is wrong in this process; returns what it shows."""
    stderr = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["launch", *words])
        patch.setattr(streams, "say", lambda text: stderr.write(click.unstyle(text) + "\n"))
        with contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 2
    return stderr.getvalue()


def plan_here(folder: Path, *words: str) -> dict[str, object]:
    """Return the plan of a run, made in this process."""
    (folder / "t.py").write_text("")
    result = CliRunner().invoke(cli, ["run", "--dry-run", "--json", *words, str(folder / "t.py")])
    assert result.exit_code == 0, result.output
    plan: dict[str, object] = json.loads(result.output)
    return plan


def plan_of(folder: Path, *args: str) -> dict[str, object]:
    result = run_here(folder, "--dry-run", "--json", *args)
    assert result.code == 0, result.err
    plan: dict[str, object] = json.loads(result.out)
    return plan


def test_the_options_are_the_frozen_ones() -> None:
    options = [p for p in run.params if isinstance(p, Option)]
    shown = {p.name: set(p.opts) for p in options if not p.hidden}
    assert shown == {name: set(spellings) for name, spellings in SURFACE.items()}
    assert {spelling for p in options if p.hidden for spelling in p.opts} == ACCEPTED
    assert {p.name: p.also for p in options if p.also} == ALSO


@pytest.mark.parametrize(
    "words",
    [
        ["--num_gpus", "2"],
        ["--num_accelerators=2"],
        ["--nproc_per_node", "2"],
        ["--nproc-per-node=2"],
    ],
)
def test_other_launchers_spellings_mean_the_same(tmp_path: Path, words: list[str]) -> None:
    plan = plan_here(tmp_path, *words)
    assert plan["world_size"] == 2


@pytest.mark.parametrize("word", ["--num_nodes", "--nnodes", "--nnode", "--num-nodes"])
def test_every_spelling_of_the_number_of_nodes(tmp_path: Path, word: str) -> None:
    (tmp_path / "hosts").write_text("node-[1-3] slots=2\n")
    assert plan_here(tmp_path, "--hostfile", str(tmp_path / "hosts"), word, "2")["world_size"] == 4


def test_torchrun_s_words_for_a_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert plan_here(tmp_path, "--nproc_per_node", "cpu")["world_size"] == len(os.sched_getaffinity(0))
    assert plan_here(tmp_path, "--nproc_per_node", "auto")["world_size"] == len(os.sched_getaffinity(0))
    assert "this machine has no GPU" in usage_error("--nproc_per_node", "gpu", "t.py")
    (tmp_path / "hosts").write_text("node-[1-3] slots=2\n")
    hosts = ["--hostfile", str(tmp_path / "hosts")]
    assert plan_here(tmp_path, *hosts, "--nproc_per_node", "gpu")["world_size"] == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--rdzv_endpoint", "a:1", "--nnodes=2"],
            "--rdzv-endpoint does not say which node this is\n  → add --node-rank",
        ),
        (["--rdzv_endpoint", "a:b"], '--rdzv-endpoint: "a:b" is not HOST or HOST:PORT'),
        (["--rdzv-backend=etcd"], "there is no rendezvous by etcd: nodes meet at the master address"),
        (["--tee", "4"], "--tee: expected 0 to 3, or such as 0:1,1:3 by local rank, got '4'"),
        (["--redirects", "0:1,x"], "--redirects: expected 0 to 3, or such as 0:1,1:3 by local rank"),
        (
            ["--redirects", "0:1,7:1", "--num-gpus", "2", "--dry-run", __file__],
            "--redirects: no node has a local rank 7",
        ),
        (
            ["--local_ranks_filter", "5", "--num-gpus", "2", "--dry-run", __file__],
            "--local-ranks-filter: no node has a local rank 5\n  → use 0 to 1",
        ),
        (["--local_ranks_filter", "0;1"], "--local-ranks-filter: expected whole numbers such as 0,1, got '0;1'"),
        (["--num_processes", "8"], "no option --num-processes\n  → accelerate counts the ranks of all machines"),
        (["--mixed_precision", "bf16"], "write --env ACCELERATE_MIXED_PRECISION=bf16"),
        (["--resume="], "--resume: names no folder\n  → give auto, never or a folder"),
        (["--nnodes", "1:4", "--node_rank", "0"], "--num-nodes 1:4 needs one `launch` that starts all nodes"),
        (["--nnodes", "2", "--node_rank", "0", "--on-oom", "ladder"], "--on-oom ladder needs one `launch` that starts"),
        (["--on-oom", "retry"], "--on-oom: 'retry' is not one of 'report', 'ladder'"),
        (["--nnodes", "4:1"], "--num-nodes: expected MIN:MAX, got '4:1'"),
        (["--launcher", "openmpi", "t.py"], "hosts of a hostfile are reached over SSH"),
        (["--nnodes", "2:4"], "--num-nodes 2:4 needs a --hostfile"),
        (["--num_gpu", "2"], "there is no option --num-gpu\n  → did you mean --num-gpus?"),
        (["--num_gpus", "0"], "--num-gpus: expected a whole number from 1 to 1024, or gpu, cpu, auto, got '0'"),
        (["--num-gpus", "two"], "--num-gpus: expected a whole number from 1 to 1024, or gpu, cpu, auto, got 'two'"),
        (["--max_restarts", "-1"], "--max-restarts: expected a whole number of at least 0, got '-1'"),
        (["--grace", "inf"], "--grace: expected seconds, at least 0, got 'inf'"),
        (["--hang_timeout", "0"], "--hang-timeout: expected seconds, more than 0, got '0'"),
        (["--log-level", "loud"], "--log-level: 'loud' is not one of 'debug'"),
        (
            ["--signals_to_handle", "SIGKILL", "--dry-run", __file__],
            "SIGKILL cannot stop a job: no program can handle it",
        ),
        (["--plain=1"], "--plain: does not take a value"),
        (["--hostfile"], "--hostfile: requires an argument"),
    ],
)
def test_mistakes_are_one_line_and_a_remedy(words: list[str], message: str) -> None:
    shown = usage_error(*words, *(["t.py"] if words != ["--hostfile"] else []))
    assert message in shown
    assert "Usage:" not in shown
    assert "Did you mean" not in shown


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["help"], "launch --help"),
        (["stop", "calm"], 'did you mean "kill"?'),
        (["list"], 'did you mean "ps"?'),
        (["python", "train.py", "--lr", "1"], "leave python out: launch train.py --lr 1"),
        ([sys.executable, "train.py"], "leave python out: launch train.py"),
        (["run.sh"], "--no-python runs it as it is: launch --no-python ./run.sh"),
        (["/bin/ls"], "--no-python runs it as it is: launch --no-python /bin/ls"),
    ],
)
def test_what_a_newcomer_types_is_told_in_one_line(tmp_path: Path, words: list[str], hint: str) -> None:
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho hi\n")
    result = run_here(tmp_path, *words)
    assert result.code == 2
    assert result.err.endswith(f"\n  → {hint}\n"), result.err


def test_a_python_script_that_begins_as_one_of_sh_is_run(tmp_path: Path) -> None:
    script = tmp_path / "installed"
    script.write_text(f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''\nprint('it runs')\n")
    assert "it runs" in run_launch(tmp_path, script).out


def test_options_behind_the_script_that_are_ours_are_noted(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    line = "--num_gpus goes to t.py: options of launch stand before the script"
    assert line in run_here(tmp_path, "--dry-run", "t.py", "--num_gpus=2").out
    assert "goes to t.py" not in run_here(tmp_path, "--dry-run", "t.py", "--include", "a", "--seed", "1").out


def test_a_folder_that_cannot_be_written_has_its_logs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, mode: int) -> bool:  # as root, every folder can be written
        return Path(path) != tmp_path and access(path, mode)

    access = os.access
    (tmp_path / "t.py").write_text("print('it runs')")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(os, "access", refuse)
    result = run_here(tmp_path, "t.py")
    assert (result.code, "it runs" in result.out) == (0, True), result.err
    (log,) = (tmp_path / "tmp").glob("launch-runs-*/*/rank_0.log")
    assert f"{tmp_path} cannot be written: the logs are in {log.parents[1]}" in result.err
    assert not (tmp_path / "runs").exists()
    assert run_here(tmp_path, "--log-dir", "mine", "t.py").code == 0
    assert (tmp_path / "mine").exists(), "what a user names is not replaced"


def test_a_missing_argument_comes_with_an_example() -> None:
    assert "MODEL is missing\n  → such as: launch estimate " in usage_error("estimate")
    assert "COMMAND is missing\n  → such as: launch exec --hostfile hosts nvidia-smi -L" in usage_error("exec")


@pytest.mark.parametrize("word", ["chekc", "exce", "sbacth", "deepspeed-comand"])
def test_a_mistyped_command_is_told(word: str) -> None:
    assert f"there is no command {word}, and no script of that name\n  → did you mean " in usage_error(word)
    assert 'there is no command chekc\n  → did you mean "check"?' in usage_error("config", "chekc")


def test_what_a_file_says_does_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node\x1b]0;owned\x07 slots=2\n")
    shown = usage_error("--hostfile", str(tmp_path / "hosts"), "t.py")
    assert "\\x1b]0;owned\\x07" in shown
    assert "\x1b" not in shown


def test_help_shows_one_spelling_and_no_limits_under_headings() -> None:
    text = CliRunner().invoke(cli, ["run", "--help-all"]).output
    headings = ("Ranks:", "Hosts:", "Failure:", "Output:", "Environment:", "SSH:", "Compatibility:")
    assert [line for line in text.splitlines() if line in headings] == [*headings]
    assert CliRunner().invoke(cli, ["--help-all"]).output == text
    common = CliRunner().invoke(cli, ["run", "--help"]).output
    assert [line for line in common.splitlines() if line in headings] == [*headings[:-2]]
    assert "--help-all" in common
    for unwanted in ("--num_gpus", "--nnodes", "--nproc-per-node", "<=", "RANGE", "--shutdown-timeout"):
        assert unwanted not in text


@pytest.mark.parametrize("name", TOOLS_SURFACE)
def test_the_options_of_the_tools_are_the_frozen_ones(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    found = {p.name: set(p.opts) for p in command.params if isinstance(p, click.Option)}
    assert found == {option: set(spellings) for option, spellings in TOOLS_SURFACE[name].items()}
    assert command.help


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["config", "check", "--help"],
        ["config", "elastic", "--help"],
        ["config", "explain", "bf16.enabled"],
        ["ps"],
        ["check", "--help"],
        ["io", ".", "--size", "64MiB", "--seconds", "1"],
        ["completion", "bash"],
    ],
)
def test_commands_that_start_nothing_import_no_torch(command: list[str]) -> None:
    code = (
        "import sys; from launcher.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: print('EXIT', end.code, file=sys.stderr)\n"
        "print(sorted(m for m in ('torch', 'numpy', 'paramiko', 'transformers') if m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.splitlines()[-2:] == ["EXIT 0", "[]"], done.stderr


def test_config_check_of_a_file_imports_no_torch() -> None:
    code = (
        "import sys; from launcher.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    command = ["config", "check", "examples/configs/zero2.json"]
    subprocess.run([sys.executable, "-c", code, *command], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_help_names_every_option_and_example() -> None:
    text = CliRunner().invoke(cli, ["run", "--help-all"]).output
    for spellings in SURFACE.values():
        assert spellings[-1] in text
    for words in ("N|gpu|cpu|auto", "N|MIN:MAX", "auto|never|DIR"):
        assert words in text


def test_launch_alone_shows_commands_and_examples_on_one_screen() -> None:
    text = CliRunner().invoke(cli, ["--help"]).output
    lines = text.splitlines()
    assert len(lines) <= 47
    assert lines[:2] == ["Usage: launch [OPTIONS] SCRIPT [ARGS]...", "       launch COMMAND [OPTIONS] ..."]
    places = [text.index(f"\n{heading}:\n") for heading in ("Examples", "Jobs and hosts", "Engine", "Options")]
    assert places == sorted(places)
    for needed in (*COMMANDS, "--version", "launch run --help", "exit codes: "):
        assert needed in text
    assert CliRunner().invoke(cli, ["--version"]).output.startswith("launch ")


def test_a_subcommand_and_a_script_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("")
    assert CliRunner().invoke(cli, ["config", "--help"]).output.startswith("Usage: cli config")
    plan = plan_of(tmp_path, "./config")
    assert plan["command"] == {"kind": "script", "target": "./config", "arguments": []}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--hostfil", "x", "t.py"], "did you mean --hostfile?"),
        (["--master_port", "70000", "t.py"], "70000"),
        (["--module", "--no_python", "t.py"], "--module and --no-python exclude each other"),
        (["--json", "t.py"], "--json goes with --dry-run"),
        (["--num_nodes", "2", "t.py"], "--num-nodes 2 needs a --hostfile"),
        (["missing.py"], "script missing.py does not exist"),
        (["t.py", "--deepspeed", "nofile.json"], "config nofile.json does not exist\n  → check the path"),
        (["--dry-run", "t.py", "--deepspeed=nofile.yaml"], "config nofile.yaml does not exist"),
        (["-F", "nowhere", "t.py"], "-F nowhere: the SSH config does not exist"),
        (["--hostfile", "nowhere", "t.py"], "nowhere"),
        ([], "Usage: launch"),
    ],
)
def test_wrong_usage_ends_with_2_and_one_clear_message(tmp_path: Path, args: list[str], expected: str) -> None:
    (tmp_path / "t.py").write_text("")
    result = run_here(tmp_path, *args)
    assert result.code == 2
    assert expected in result.err + result.out
    assert "Traceback" not in result.err
    assert not (tmp_path / "runs").exists()


def test_a_script_in_a_folder_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, **options: Any) -> os.stat_result:
        if "locked" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)  # type: ignore[arg-type]

    stat = os.stat
    monkeypatch.setattr(os, "stat", refuse)  # as root, every folder can be searched
    result = run_here(tmp_path, "locked/train.py")
    assert result.code == 2
    assert "script locked/train.py cannot be read: one of its folders may not be entered" in result.err


def test_the_arguments_of_the_script_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    plan = plan_of(tmp_path, "--num_gpus", "1", "t.py", "--num_gpus", "7", "--help", "--", "-x")
    assert plan["command"] == {
        "kind": "script",
        "target": "t.py",
        "arguments": ["--num_gpus", "7", "--help", "--", "-x"],
    }


def test_a_dry_run_shows_hosts_and_ranks_and_keeps_values_secret(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    (tmp_path / "hosts").write_text("node-a slots=2\nnode-b slots=3\n")
    args = ("--hostfile", "hosts", "--exclude", "node-b:1", "--dry-run", "t.py", "--lr", "1 e")
    result = run_here(tmp_path, *args, env={"HF_TOKEN": "hf_very_secret"})
    assert result.code == 0
    assert "2 hosts" in result.out
    assert "node-a" in result.out
    assert "ranks 2-3" in result.out
    assert "'1 e'" in result.out
    assert "HF_TOKEN" in result.out
    assert "hf_very_secret" not in result.out + result.err
    assert "nothing was started" in result.out
    assert not (tmp_path / "runs").exists()


def test_a_plan_as_json_has_every_rank_once(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    (tmp_path / "hosts").write_text("node[01-03] slots=4\n")
    plan = plan_of(tmp_path, "--hostfile", "hosts", "--num_nodes", "2", "--num_gpus", "3", "t.py")
    nodes = plan["nodes"]
    assert isinstance(nodes, list)
    assert [node["host"] for node in nodes] == ["node01", "node02"]
    assert [rank for node in nodes for rank in node["ranks"]] == list(range(6))
    assert plan["world_size"] == 6


def test_a_bad_config_ends_before_any_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("open('ran', 'w')")
    (tmp_path / "ds.json").write_text('{\n  "zero_optimzation": {}\n}')
    result = run_launch(tmp_path, "t.py", "--deepspeed", "ds.json")
    assert result.code == 2
    assert 'ds.json:2:3: unknown key "zero_optimzation"' in result.err
    assert 'did you mean "zero_optimization"?' in result.err
    assert not (tmp_path / "ran").exists()


def test_version() -> None:
    import launcher

    assert CliRunner().invoke(cli, ["--version"]).output == f"launch {launcher.__version__}\n"


def test_lines_are_prefixed_whole_however_they_arrive() -> None:
    lines = LineAssembler(b"[3] ")
    assert lines.feed(b"one\ntw") == b"[3] one\n"
    assert lines.feed(b"o\n\nlast") == b"[3] two\n[3] \n"
    assert lines.flush() == b"[3] last\n"
    assert lines.flush() == b""


def test_progress_bars_keep_their_carriage_returns() -> None:
    lines = LineAssembler(b"[0] ")
    assert lines.feed(b"10%\r20%\r") == b"[0] 10%\r"
    assert lines.feed(b"done\r\n") == b"[0] 20%\r[0] done\r\n"


def test_a_line_without_an_end_does_not_grow_for_ever() -> None:
    lines = LineAssembler(b"[0] ")
    shown = b"".join(lines.feed(b"x" * 10_000) for _ in range(20)) + lines.flush()
    assert shown.replace(b"[0] ", b"").rstrip() == b"x" * 200_000
    assert len(lines.feed(b"")) == 0


@pytest.mark.parametrize("options", [[], ["--hostfile", "hosts"]])
def test_launch_started_several_times_by_mpirun_is_refused(tmp_path: Path, options: list[str]) -> None:
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    result = CliRunner().invoke(cli, ["run", *options, "t.py"], env=mpi)
    assert isinstance(result.exception, UsageError)
    assert "mpirun (Open MPI) has started this `launch` as process 1 of 4" in str(result.exception)
    assert "mpirun python train.py" in str(result.exception)


def test_one_launch_on_each_node_may_be_started_by_mpirun(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    here = ["--node_rank", "1", "--num_nodes", "2", "--master_addr", "a", "--master_port", "4000"]
    result = CliRunner().invoke(cli, ["run", "--dry-run", *here, str(tmp_path / "t.py")], env=mpi)
    assert result.exit_code == 0, result.output


def test_output_counts_as_shown_until_it_may_have_scrolled_away() -> None:
    shown = ShownOutput()
    assert not shown.has(0, "why")
    shown.add(0, b"first\nwh")
    shown.add(0, b"y\n")
    assert shown.has(0, "first\nwhy")
    assert not shown.has(1, "why")
    assert not shown.has(0, " ")
    shown.add(1, b"line\n" * 25)
    assert shown.has(0, "why\n")
    shown.add(1, b"line\n" * 25)
    assert not shown.has(0, "why")


def test_a_reader_that_leaves_early_is_no_failure_of_ours(tmp_path: Path) -> None:
    """With the code of a program that SIGPIPE has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
    with open(writer, "wb") as stdout:
        command = [sys.executable, "-m", "launcher", "ps"]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=environment)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_encoding_that_lacks_our_signs_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    result = run_launch(tmp_path, "--dry-run", "t.py", env={"PYTHONIOENCODING": "latin-1"})
    assert result.code == 0, result.err
    assert "1 host \xd7 1 rank" in result.out.replace("\ufffd", "\xd7")
    result = run_launch(tmp_path, "--help", env={"PYTHONIOENCODING": "ascii"})
    assert result.code == 0, result.err
