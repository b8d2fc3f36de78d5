"""No file of the working folder, or of a remote home folder, takes the place of a module of ours or of Python's."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT, run_launch

from launcher.agent.wire import MAGIC
from launcher.slurm.script import Sbatch, render_script
from launcher.transport.command import agent_shell_command

SHADOWS = (
    *("launcher", "json", "types", "signal", "struct", "socket", "selectors", "fcntl", "termios", "marshal", "runpy"),
    *("linecache", "collections", "functools", "tokenize", "re", "contextlib", "errno", "faulthandler", "worker"),
)


@pytest.fixture
def shadowed(tmp_path: Path) -> Path:
    """A folder full of files that end whoever imports them."""
    folder = tmp_path / "shadowed"
    (folder / "launcher" / "agent").mkdir(parents=True)
    for path in ("launcher/__init__.py", "launcher/__main__.py", *(f"{name}.py" for name in SHADOWS)):
        scripts.write(folder, f"raise SystemExit('{path} of the folder was run')", path)
    return folder


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package as pip installs it, in an environment of its own that has what it needs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    # As paths alone: hooks of the environment that the tests run in, such as that of an editable install, stay out.
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    shutil.copytree(ROOT / "launcher", site / "launcher", ignore=shutil.ignore_patterns("__pycache__", "*.so", "csrc"))
    return site


def test_an_installed_launch_runs_nothing_of_the_working_folder(shadowed: Path, installed: Path) -> None:
    (shadowed / "sub").mkdir()
    text = "import json, launcher\nprint(json.dumps('fine'), launcher.__file__)\n"
    script = scripts.write(shadowed / "sub", text)
    python = installed.parents[2] / "bin" / "python"
    command = [str(python), str(installed / "launcher" / "__main__.py"), "--num_gpus", "2", str(script)]
    environ = {**os.environ, "PYTHONPATH": "", "XDG_STATE_HOME": str(shadowed / "state")}
    done = subprocess.run(command, cwd=shadowed, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f'[{rank}] "fine" {installed}/launcher/__init__.py' in done.stdout


def test_a_checkout_runs_nothing_of_the_working_folder(shadowed: Path) -> None:
    (shadowed / "sub").mkdir()
    result = run_launch(shadowed, scripts.write(shadowed / "sub", "print('fine')"), env={"PYTHONPATH": ""})
    assert result.code == 0, result.err
    assert "[0] fine" in result.out


def test_a_path_that_the_user_gives_stays_in_force(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    scripts.write(tmp_path / "lib", "WHERE = 'lib'", "mine.py")
    script = scripts.write(tmp_path, "import mine; print('from', mine.WHERE)", "script.py")
    result = run_launch(tmp_path, script, env={"PYTHONPATH": "lib"})
    assert "[0] from lib" in result.out, result.err


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("is_installed", [False, True], ids=["checkout", "installed"])
def test_an_agent_runs_nothing_of_the_home_folder(
    version: str, is_installed: bool, shadowed: Path, installed: Path
) -> None:
    """The command as sshd runs it: by a shell, in the home folder."""
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"no Python {version} here")
    command = agent_shell_command(python, root=installed if is_installed else ROOT)
    environ = {**os.environ, "PYTHONPATH": str(installed) if is_installed else ""}
    with subprocess.Popen(
        ["sh", "-c", command], cwd=shadowed, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdout is not None
        assert agent.stdout.read(len(MAGIC)) == MAGIC
        agent.communicate()
    assert agent.returncode == 0


def test_a_batch_script_runs_nothing_of_the_folder_it_was_submitted_in(shadowed: Path) -> None:
    script = render_script(Sbatch(job_name="train"), ["--version"])
    (command,) = [line.removeprefix("exec ") for line in script.splitlines() if line.startswith("exec ")]
    done = subprocess.run(shlex.split(command), cwd=shadowed, capture_output=True, text=True)
    assert (done.returncode, done.stdout[:7]) == (0, "launch "), done.stderr
