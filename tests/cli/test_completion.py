"""Shells complete commands, options, files and job ids; the bash script works in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from harness.launch.command import ROOT, run_here, run_launch

from launcher.cli.main import cli


def complete(folder: Path, line: str) -> list[str]:
    """Return what is offered for the last word of `line`, as click hands it to bash."""
    words = line.split(" ")
    env = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_LAUNCH_COMPLETE": "bash_complete"}
    return run_here(folder, env=env).out.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("launch ex", ["plain,exec", "file,ex"]),
        ("launch --hostf", ["plain,--hostfile"]),
        ("launch --num_g", ["plain,--num_gpus"]),
        ("launch exec --ssh_p", ["plain,--ssh_port"]),
        ("launch --num_gpus 2 --log-d", ["plain,--log-dir"]),
        ("launch --num_gpus 2 tr", ["file,tr"]),
        ("launch train.py --deepspeed ds", ["file,ds"]),
        ("launch --hostfile h", ["file,h"]),
        ("launch exec -H hosts l", ["file,l"]),
        ("launch check --inc", ["plain,--include"]),
        ("launch io --si", ["plain,--size"]),
        ("launch config ch", ["plain,check"]),
        ("launch completion f", ["plain,fish"]),
    ],
)
def test_what_is_offered(tmp_path: Path, line: str, expected: list[str]) -> None:
    assert complete(tmp_path, line) == expected


def test_every_command_is_offered(tmp_path: Path) -> None:
    names = cli.list_commands(click.Context(cli))
    assert {"run", "check", "exec", "ps", "logs", "kill", "report", "completion"} <= set(names)
    assert {f"plain,{name}" for name in names} <= set(complete(tmp_path, "launch "))


def test_jobs_are_offered_by_id(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    job_id = run_launch(tmp_path, "t.py").job_id
    for command in ("logs", "kill"):
        assert complete(tmp_path, f"launch {command} {job_id[:3]}") == [f"plain,{job_id}"]
        assert complete(tmp_path, f"launch {command} zzz") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(tmp_path: Path, shell: str) -> None:
    result = run_here(tmp_path, "completion", shell)
    assert result.code == 0
    assert f"_LAUNCH_COMPLETE={shell}_complete" in result.out
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=result.out, text=True).returncode == 0


def test_the_script_works_in_bash(tmp_path: Path) -> None:
    program = tmp_path / "launch"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m launcher "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(launch completion bash)"; COMP_WORDS=(launch --hostf); COMP_CWORD=1;'
        ' _launch_completion launch; echo "${COMPREPLY[@]}"'
    )
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.stdout == "--hostfile\n", done.stderr


def test_another_shell_is_refused(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "completion", "tcsh")
    assert result.code == 2
    assert "tcsh" in result.err
