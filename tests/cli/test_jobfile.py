"""A run in one file."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import click
import pytest
from harness.launch.command import run_launch

from launcher.base.errors import UsageError
from launcher.cli.commands.run import run
from launcher.cli.options.accepted import NOTES
from launcher.cli.options.hosts import DEBUGGING
from launcher.cli.options.jobfile import read_job_file

JOB = """
cluster: {hostfile: hosts, exclude: "b:1"}
environment: {NCCL_DEBUG: INFO, N: 3, FLAG: true}
script: train.py
args: [--lr, 3.0e-4, --name, "a b"]
config: {train_batch_size: 8, bf16: {enabled: true}}
options: {max-restarts: 2, grace: 1.5, quiet: true}
"""


def read(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return read_job_file(path, click.Context(run))


def test_every_section(tmp_path: Path) -> None:
    values = read(tmp_path, JOB)
    arguments = values.pop("script_args")
    assert values == {
        "hostfile": "hosts",
        "exclude": "b:1",
        "env": ("NCCL_DEBUG=INFO", "N=3", "FLAG=true"),
        "script": "train.py",
        "max_restarts": 2,
        "grace_s": 1.5,
        "quiet": True,
    }
    assert arguments[:5] == ("--lr", "3.0e-4", "--name", "a b", "--deepspeed")
    from launcher.config.load import load_config

    assert load_config(arguments[5]).config.train_batch_size == 8


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("scrip: t.py\n", ['unknown key "scrip"', 'did you mean "script"?', '"script" is missing']),
        ("script: t.py\noptions: {max_restart: 1}\n", ['unknown key "max_restart"', 'did you mean "max_restarts"?']),
        ("script: t.py\nresources: {num_gpus: two}\n", ["resources.num_gpus", "two"]),
        (
            'script: t.py\nresources: {num_nodes: "4:1"}\n'
            "options: {grace: -1, bind_core_list: x, signals_to_handle: KILL}\n",
            [
                "resources.num_nodes: expected MIN:MAX, got '4:1'",
                "options.grace: expected seconds, at least 0, got '-1'",
                'options.bind_core_list: "x" is not a CPU number',
                "options.signals_to_handle: SIGKILL cannot stop a job",
            ],
        ),
        ("script: t.py\noptions: {rdzv_backend: etcd}\n", ["options.rdzv_backend: there is no rendezvous by etcd"]),
        ("script: t.py\nargs: {a: 1}\n", ["args: expected a list"]),
        ("script: t.py\nenvironment: [A]\n", ["environment: expected"]),
        ("script: [\n", ["not YAML"]),
        ("script: t.py\nargs: [null]\n", ["args: expected a list of words"]),
        ("script: t.py\noptions: {hostfile: }\n", ["options.hostfile: expected a value"]),
        ("script: t.py\nargs: [a]\nscript: u.py\n", ['job.yaml:3:1: duplicate key "script"']),
        ("script: t.py\nresources: {num_gpus: 1, num_gpus: 2}\n", ['job.yaml:2:26: duplicate key "num_gpus"']),
        ("- 1\n", ["a job file holds keys"]),
        ("script: t.py\noptions: {dry_run: true}\n", ['unknown key "dry_run"']),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, messages: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    for message in messages:
        assert message in str(caught.value)


def test_words_are_those_of_the_file(tmp_path: Path) -> None:
    words = ["--amp", "on", "--id", "0123456", "--tag", "1.10", "--at", "12:30:00", "--n", "1_000", "2001-99-99"]
    values = read(
        tmp_path,
        f"config: {{a: &rate 1e-4, b: [+2.5E3, '1e-4', 1e-4x]}}\nscript: t.py\nargs: [{', '.join(words)}, *rate]\n"
        "environment: {NO: 1_000, ON: yes}\ncluster: {include: 007}\n",
    )
    assert values["script_args"][: len(words) + 1] == (*words, "1e-4")
    assert values["env"] == ("NO=1_000", "ON=yes")
    assert values["include"] == "007"
    assert json.loads(base64.b64decode(values["script_args"][-1])) == {"a": 1e-4, "b": [2500.0, "1e-4", "1e-4x"]}


def test_options_speak_as_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("script: t.py\noptions: {monitor_interval: 5, log_level: debug}\n")
    ctx = click.Context(run)
    assert "monitor_interval" not in read_job_file(tmp_path / "job.yaml", ctx)
    assert ctx.meta[NOTES] == ["--monitor-interval has no effect: the end of a rank is seen at once"]
    assert ctx.meta[DEBUGGING]


def test_one_value_of_a_repeatable_option_needs_no_list(tmp_path: Path) -> None:
    assert read(tmp_path, "script: t.py\noptions: {env_file: x}\n")["env_files"] == (Path("x"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('script: s.py\noptions: {log_dir: "a\\0b"}\n', "options.log_dir: embedded null byte"),
        ("script: s.py\nargs: &a [*a]\n", "args: expected a list of words"),
        ("script: s.py\nargs: [!!bool x]\n", "is not YAML"),
        ("script: s.py\nargs: [!!timestamp x]\n", "is not YAML"),
        (f"script: s.py\nargs: [!!int 0x{'f' * 9999}]\nconfig: 0x{'f' * 9999}\n", "cannot be written down"),
        ("script: s.py\nconfig: {a: 2001-01-01}\n", "config: Object of type date is not JSON serializable"),
        (
            "l0: &l0 [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"l{i + 1}: &l{i + 1} [{', '.join([f'*l{i}'] * 10)}]\n" for i in range(9))
            + "script: s.py\noptions: {log_dir: *l9}\n",
            "options.log_dir: expected a value",
        ),
    ],
)
def test_hostile_files_are_one_message(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.py").write_text("pass")
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_job_file(path, click.Context(run))


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    (tmp_path / "job.yaml").write_text(JOB)
    arguments = ("run", "--max-restarts", "5", "--env", "N=4", "--dry-run", "--json", "job.yaml", "--more")
    result = run_launch(tmp_path, *arguments)
    assert result.code == 0, result.err
    plan = json.loads(result.out)
    assert plan["max_restarts"] == 5
    assert plan["world_size"] == 3
    assert plan["grace_s"] == 1.5
    assert plan["environment"] == ["FLAG", "N", "NCCL_DEBUG"]
    assert plan["command"]["arguments"][-1] == "--more"


def test_a_job_file_runs(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import os, sys; print('GOT', os.environ['A'], sys.argv[1:])")
    (tmp_path / "job.yaml").write_text("script: t.py\nresources: {num_gpus: 2}\nenvironment: {A: x y}\nargs: [1, b]\n")
    result = run_launch(tmp_path, "job.yaml")
    assert result.code == 0
    for rank in range(2):
        assert f"[{rank}] GOT x y ['1', 'b']" in result.out
