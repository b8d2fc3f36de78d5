"""The remote command under every login shell there is, and what is said when it never gets to run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from harness.launch.command import Result, run_launch
from harness.launch.sshd import LoopbackSshd

from launcher.transport.command import agent_shell_command, with_setup

SHELLS = [
    path
    for name in ("sh", "dash", "bash", "ksh", "ksh93", "mksh", "zsh", "csh", "tcsh", "fish")
    if (path := shutil.which(name)) is not None
]
ODD_WORDS = ["it's \\ odd!", "$HOME", "a  b", "", "*", "`id`", '"', "#", "\\'!\\\\"]
SHOW = ["/usr/bin/env", "python3", "-c", "import json,os,sys; print(json.dumps([os.environ.get('A'), sys.argv[1:]]))"]


def run(shell: str, command: str, login_shell: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "SHELL": login_shell}
    return subprocess.run([shell, "-c", command], env=env, capture_output=True, text=True)


@pytest.mark.parametrize("shell", SHELLS)
def test_words_reach_the_program_as_they_are(shell: str, tmp_path: Path) -> None:
    done = run(shell, with_setup("A='b  c!'; export A # of all", [*SHOW, *ODD_WORDS]), shell)
    assert json.loads(done.stdout) == ["b  c!", ODD_WORDS], done.stderr
    (tmp_path / "env.sh").write_text('A="sourced with $# words"; export A\n')
    done = run(shell, with_setup(f". {tmp_path}/env.sh", [*SHOW]), shell)
    assert json.loads(done.stdout) == ["sourced with 0 words", []], done.stderr
    failed = run(shell, with_setup("no-such-command of mine", SHOW), shell)
    assert (failed.returncode, failed.stdout) == (127, "")
    assert failed.stderr.endswith("launch: the setup failed\n")
    missing = run(shell, agent_shell_command("/no/such/python"), shell)
    assert (missing.returncode, missing.stdout) == (127, ""), "of csh alone it would be 1"
    assert "/no/such/python" in missing.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_a_setup_prints_to_stderr_and_keeps_what_it_sets(shell: str) -> None:
    done = run(shell, with_setup("set_a() { A=$1; export A; }; set_a x; echo said", SHOW), shell)
    assert (json.loads(done.stdout), done.stderr) == (["x", []], "said\n")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_names_that_a_setup_has_changed_follow_it(shell: str) -> None:
    setup = "export C='x  y' B=\"$SHELL\" D='1\n2'; unset SHELL; set -eu; (exit 0)"
    names = ["/bin/sh", "-c", "printf '%s,' $LAUNCH_SETUP_CHANGED"]
    assert {"B", "C", "D", "SHELL"} <= set(run(shell, with_setup(setup, names), shell).stdout.split(","))
    assert "PATH" not in run(shell, with_setup("PATH=$PATH", names), shell).stdout.split(",")


@pytest.mark.parametrize(
    ("login_shell", "runs_it"), [("/bin/bash", "bash"), ("/usr/bin/tcsh", "sh"), ("/x/fish", "sh")]
)
def test_a_setup_is_run_by_the_login_shell_where_that_is_a_posix_shell(login_shell: str, runs_it: str) -> None:
    # bash is shown in place of each of them: the text is the same in all languages.
    command = with_setup("A=${BASH_VERSION:+bash}; export A", SHOW)
    shell = shutil.which("bash")
    if shell is None or os.path.samefile("/bin/sh", shell):
        pytest.skip("bash and /bin/sh cannot be told apart here")
    assert json.loads(run(shell, command, login_shell).stdout)[0] == ("bash" if runs_it == "bash" else "")


def launch(sshd: LoopbackSshd, folder: Path, command: str, *options: str) -> Result:
    (folder / "hosts").write_text("127.0.0.1 slots=1\n")
    (folder / "train.py").touch()
    words = [] if command == "run" else [command]
    target = {"run": ["train.py"], "exec": ["true"], "check": []}[command]
    return run_launch(folder, *words, "-H", "hosts", "-F", sshd.ssh_config, *options, *target)


@pytest.mark.cluster
@pytest.mark.parametrize("command", ["run", "exec"])
def test_a_failed_setup_is_not_blamed_on_python(sshd: LoopbackSshd, tmp_path: Path, command: str) -> None:
    result = launch(sshd, tmp_path, command, "--setup", "no-such-module load cuda")
    assert result.code == 69
    assert "--setup or --venv-script: a command of it was not found (exit status 127)" in result.err
    assert "no-such-module" in result.err
    assert "python" not in result.err
    assert "install" not in result.err


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "python was not found (exit status 127)"),
        (lambda path: path.touch(), "python may not be executed (exit status 126)"),
    ],
)
def test_a_python_that_cannot_run_there(sshd: LoopbackSshd, tmp_path: Path, make: object, words: str) -> None:
    python = tmp_path / "there" / "python"
    python.parent.mkdir()
    assert callable(make)
    make(python)
    result = launch(sshd, tmp_path, "run", "--remote_python", str(python))
    assert result.code == 69
    assert words in result.err
    assert "name another with --remote-python" in result.err


@pytest.mark.cluster
@pytest.mark.parametrize("command", ["run", "exec", "check"])
def test_what_a_shell_that_refuses_says_is_shown(tmp_path: Path, command: str) -> None:
    refusal = tmp_path / "maintenance"
    refusal.write_text("#!/bin/sh\necho 'Maintenance until noon.'\nexit 1\n")
    refusal.chmod(0o755)
    with LoopbackSshd(tmp_path / "server", settings=f"ForceCommand {refusal}\n") as server:
        result = launch(server, tmp_path, command)
    assert result.code == 69
    assert "Maintenance until noon." in result.err + result.out


@pytest.mark.cluster
@pytest.mark.parametrize("command", ["run", "exec", "check"])
@pytest.mark.parametrize(
    ("lines", "words", "hint"),
    [
        ("exit 3", "(exit status 3)", "does a start-up file of its login shell (.bashrc) end it?"),
        ('exec bash -r -c "$SSH_ORIGINAL_COMMAND"', "exec: restricted", "its login shell may not start /bin/sh"),
    ],
    ids=["exit", "rbash"],
)
def test_a_login_shell_that_ends_by_itself_has_a_hint(
    tmp_path: Path, command: str, lines: str, words: str, hint: str
) -> None:
    shell = tmp_path / "shell"
    shell.write_text(f"#!/bin/sh\n{lines}\n")
    shell.chmod(0o755)
    with LoopbackSshd(tmp_path / "server", settings=f"ForceCommand {shell}\n") as server:
        result = launch(server, tmp_path, command)
    assert result.code == 69
    assert words in result.err + result.out
    assert hint in result.err + result.out
