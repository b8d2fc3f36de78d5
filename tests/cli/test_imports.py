"""What a job on this machine imports: each process of it loads what it uses, and nothing for the other ways to start.

A module that comes back here costs every start of every user: `python -X importtime -m launcher ...` shows what for.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from harness import scripts
from harness.launch.command import ROOT, run_launch

# Leaves what each process had imported when it ended, under a name that says which it was.
RECORDER = """
import atexit, os, sys
def leave():
    names = sorted(sys.modules)
    words = [word for word in sys.orig_argv if word in ("launcher.agent.main", "launcher.worker")]
    words = words or ["launcher" for word in sys.orig_argv if word.endswith("launcher/__main__.py")]
    import json
    with open(os.path.join(os.environ["IMPORTS_FOLDER"], words[0] if words else "other"), "w") as file:
        json.dump(names, file)
atexit.register(leave)
"""
ANY_PROCESS = {"torch", "numpy", "paramiko", "pydantic", "yaml", "jinja2", "rich", "tempfile", "random", "asyncio"}
UNWANTED = {
    "launcher": ANY_PROCESS
    | {
        "launcher.cli.task",
        "launcher.cli.options.jobfile",
        "launcher.cli.console.live",
        "launcher.cli.console.terminal",
        "launcher.config",
    }
    | {
        "launcher.transport.ssh.transport",
        "launcher.transport.ssh.config",
        "launcher.slurm.srun",
    }
    | {
        "launcher.cluster.hostfile",
        "launcher.cluster.filters",
        "launcher.schedulers.slurm",
        "launcher.cluster.cores",
    }
    | {"launcher.metrics.figures", "prometheus_client", "opentelemetry", "http.server"},
    "launcher.agent.main": ANY_PROCESS | {"typing", "dataclasses", "inspect", "click", "launcher.cluster.cores"},
    "launcher.worker": ANY_PROCESS
    | {"typing", "dataclasses", "inspect", "pathlib", "json", "re", "socket", "threading", "subprocess", "ctypes"}
    | {"traceback", "logging", "click", "launcher.base.errors", "launcher.base.processes"},
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The modules of each process of one job, those of an interpreter that does nothing left out."""
    folder = tmp_path_factory.mktemp("imports")
    scripts.write(folder, RECORDER, "sitecustomize.py")
    found = folder / "found"
    found.mkdir()
    env = {"PYTHONPATH": f"{folder}:{ROOT}", "IMPORTS_FOLDER": str(found)}
    subprocess.run([sys.executable, "-c", ""], env=env, check=True)
    result = run_launch(folder, "--num_gpus", "1", scripts.write(folder, ""), env=env)
    assert result.code == 0, result.err
    modules = {path.name: set(json.loads(path.read_text())) for path in found.iterdir()}
    return {name: names - modules["other"] for name, names in modules.items()}


@pytest.mark.parametrize("process", UNWANTED)
def test_a_job_on_this_machine_imports_nothing_it_does_not_use(imported: dict[str, set[str]], process: str) -> None:
    assert imported[process] & UNWANTED[process] == set()


RUN = {"commands", "commands.run", *(f"options.{name}" for name in ("accepted", "output", "run"))}


@pytest.mark.parametrize(("words", "of_command"), [(["--help"], set()), (["run", "--help"], RUN)])
def test_help_loads_no_other_command(words: list[str], of_command: set[str]) -> None:
    code = (
        "import sys; from launcher.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = {name for name in done.stderr.split() if name.startswith("launcher.cli.")}
    wanted = {
        "main",
        "console",
        "console.streams",
        "options",
        *(f"options.{name}" for name in ("command", "hosts")),
    }
    assert loaded == {f"launcher.cli.{name}" for name in wanted | of_command}
