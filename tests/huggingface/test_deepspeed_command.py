"""The command named deepspeed: what it writes into an environment, and `accelerate launch` on several nodes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from harness.environments import make_environment, packages_of, run_in
from harness.launch.command import ROOT
from harness.launch.sshd import LoopbackSshd, available
from harness.needs import need
from harness.ports import free_port
from harness.scripts import write

FIND = "import importlib.util as u; spec = u.find_spec('deepspeed'); print(spec and spec.origin)"
OURS = f"{ROOT}/launcher/compat/names.py\n"
# As accelerate's guide writes a script: nothing in it knows of `launch`.
SCRIPT = """
import json, os, sys
import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
found = {
    "ranks": accelerator.num_processes,
    "stage": model.zero_optimization_stage(),
    "falls": losses[-1] < losses[0],
    "arguments": sys.argv[1:],
    "word": os.environ.get("WORD"),
}
with open(f"found_{accelerator.process_index}.json", "w") as file:
    json.dump(found, file)
"""


def command_of(folder: Path, *words: str) -> list[str | Path]:
    """Return `launch deepspeed-command WORDS` of an environment."""
    return [folder / "bin" / "python", ROOT / "launcher" / "__main__.py", "deepspeed-command", *words]


def test_it_is_installed_and_removed(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    python = make_environment(environment)
    files = [environment / "bin" / "deepspeed", packages_of(environment) / "launch_deepspeed.pth"]
    assert run_in(tmp_path, python, "-c", FIND).stdout == "None\n"
    for _ in range(2):  # a second time it is renewed
        done = run_in(tmp_path, *command_of(environment, "install"))
        assert (done.stdout, done.stderr) == ("".join(f"wrote {path}\n" for path in files), "")
    # A script's own launcher.py is what it finds, as without the command.
    (tmp_path / "launcher.py").write_text("mine = True\n")
    script = write(tmp_path, f"import launcher; print(launcher.mine); {FIND}")
    assert run_in(tmp_path, python, script).stdout == f"True\n{OURS}"
    shown = run_in(tmp_path, files[0], "--dry-run", "--no_local_rank", "--launcher", "pdsh", "--num_gpus", "2", script)
    assert "world 2" in shown.stdout, shown.stderr
    removed = run_in(tmp_path, *command_of(environment, "remove"))
    assert removed.stdout == "".join(f"removed {path}\n" for path in files)
    assert run_in(tmp_path, python, "-c", FIND).stdout == "None\n"
    assert run_in(tmp_path, *command_of(environment, "remove")).stdout == "there is none in this environment\n"


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    make_environment(environment)
    theirs = environment / "bin" / "deepspeed"
    theirs.write_text("#!/bin/sh\n")
    refused = run_in(tmp_path, *command_of(environment, "install"))
    assert refused.returncode == 2
    assert f"{theirs}: this file is another program's" in refused.stderr
    assert run_in(tmp_path, *command_of(environment, "remove")).stdout == "there is none in this environment\n"
    assert theirs.read_text() == "#!/bin/sh\n"
    theirs.unlink()
    package = packages_of(environment) / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("")
    refused = run_in(tmp_path, *command_of(environment, "install"))
    assert refused.returncode == 2
    assert "DeepSpeed is installed, with a command of its own" in refused.stderr
    assert not theirs.exists()


def test_an_environment_without_the_package_starts_as_before(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    python = make_environment(environment)
    run_in(tmp_path, *command_of(environment, "install"))
    (packages_of(environment) / "_shared.pth").unlink()
    started = run_in(tmp_path, python, "-c", FIND)
    assert (started.stdout, started.stderr) == ("None\n", "")


def test_what_is_on_the_path_of_python_is_not_run(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    python = make_environment(environment)
    run_in(tmp_path, *command_of(environment, "install"))
    (tmp_path / "launcher.py").write_text("print('it runs')\n")
    started = run_in(tmp_path, python, "-c", "print('end')", env={"PYTHONPATH": str(tmp_path)})
    assert (started.stdout, started.stderr) == ("end\n", "")


def test_a_wrong_word_in_the_variable_is_named_and_python_starts(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    python = make_environment(environment)
    run_in(tmp_path, *command_of(environment, "install"))
    started = run_in(tmp_path, python, "-c", "print('end')", env={"LAUNCH_ENGINE": "biultin"})
    assert (started.returncode, started.stdout) == (0, "end\n")
    # An environment reads its .pth files twice.
    assert set(started.stderr.splitlines()) == {
        'launch: LAUNCH_ENGINE: there is no engine "biultin"; use auto or builtin'
    }


def test_the_folder_of_a_user_serves_as_well(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    python = make_environment(environment, with_user_site=True)
    run_in(tmp_path, *command_of(environment, "install"))
    # Python reads the user's file before it reads which further folders this environment has.
    packages = packages_of(environment)
    (packages / "launcher").symlink_to(ROOT / "launcher")
    (packages / "_shared.pth").unlink()
    env = {"PYTHONUSERBASE": str(tmp_path / "user")}
    users = Path(run_in(tmp_path, python, "-m", "site", "--user-site", env=env).stdout.strip())
    users.mkdir(parents=True)
    (packages / "launch_deepspeed.pth").rename(users / "launch_deepspeed.pth")
    assert run_in(tmp_path, python, "-c", FIND, env=env).stdout == f"{packages}/launcher/compat/names.py\n"


@pytest.mark.soak
@pytest.mark.cluster
def test_accelerate_launch_on_two_nodes_runs_it(tmp_path: Path) -> None:
    need(available())
    environment = tmp_path / "environment"
    python = make_environment(environment)
    run_in(tmp_path, *command_of(environment, "install"))
    with LoopbackSshd() as sshd:
        (tmp_path / "hosts").write_text("127.0.0.11 slots=1\n127.0.0.12 slots=1\n")
        options = ["--use_deepspeed", "--num_machines", "2", "--machine_rank", "0", "--num_processes", "2"]
        options += ["--zero_stage", "2", "--deepspeed_hostfile", "hosts", "--main_process_port", str(free_port())]
        (tmp_path / ".ssh").mkdir()
        shutil.copy(sshd.ssh_config, tmp_path / ".ssh" / "config")
        # WORD reaches the nodes through the file .deepspeed_env, which accelerate writes.
        env = {"HOME": str(tmp_path), "PATH": f"{environment}/bin:{os.environ['PATH']}", "WORD": "of-this-shell"}
        script = write(tmp_path, SCRIPT)
        done = run_in(tmp_path, python, "-m", "accelerate.commands.launch", *options, script, "--x", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((tmp_path / f"found_{rank}.json").read_text()) for rank in range(2)]
    assert found == [{"ranks": 2, "stage": 2, "falls": True, "arguments": ["--x"], "word": "of-this-shell"}] * 2
