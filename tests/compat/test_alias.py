"""How `import deepspeed` comes to the built-in engine: by `install()`, in ranks of `launch`, under torchrun."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import scripts
from harness.child import run_python
from harness.launch.command import ROOT, run_forked, run_launch
from harness.scripts import write
from harness.train.forked import run_ranks
from torch.distributed.run import main as torchrun

INSTALL = "import launcher.compat; launcher.compat.install()\n"
# What transformers and accelerate look at to find out whether there is a DeepSpeed.
LOOK = """
import importlib.metadata, importlib.util, sys
spec = importlib.util.find_spec("deepspeed")
print("found", spec.origin if spec else None)
try:
    print("version", importlib.metadata.version("deepspeed"))
except importlib.metadata.PackageNotFoundError:
    print("version none")
"""
OURS = f"found {ROOT}/launcher/compat/names.py\nversion 0.19.8\n"


def installed_deepspeed(folder: Path) -> Path:
    """Make a folder in which another DeepSpeed is installed."""
    (folder / "site" / "deepspeed").mkdir(parents=True)
    (folder / "site" / "deepspeed" / "__init__.py").write_text("__version__ = '0.1'\n")
    metadata = folder / "site" / "deepspeed-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1\n")
    return folder / "site"


def theirs(site: Path) -> str:
    return f"found {site}/deepspeed/__init__.py\nversion 0.1\n"


def output(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_libraries_find_it_and_nothing_is_imported(tmp_path: Path) -> None:
    code = (
        f"{INSTALL}{INSTALL}{LOOK}\nprint([name for name in sys.modules if name.startswith(('torch', 'launcher.e'))])"
    )
    result = run_python(tmp_path, code)
    assert output(result) == OURS + "[]\n"
    assert result.stderr == ""


def test_without_it_there_is_none(tmp_path: Path) -> None:
    assert output(run_python(tmp_path, LOOK)) == "found None\nversion none\n"


def test_an_installed_deepspeed_wins_and_rank_0_says_so(tmp_path: Path) -> None:
    site = installed_deepspeed(tmp_path)
    for rank, num_lines in (("0", 1), ("1", 0)):
        result = run_python(tmp_path, INSTALL + LOOK, path=(site,), env={"RANK": rank})
        assert output(result) == theirs(site)
        assert result.stderr.count("DeepSpeed is installed and is used; --engine builtin") == num_lines
        assert len(result.stderr.splitlines()) == num_lines


@pytest.mark.parametrize(
    ("argument", "variable"), [("'builtin'", None), ("", "builtin"), ("'builtin'", "auto")], ids=str
)
def test_the_builtin_engine_can_be_chosen(tmp_path: Path, argument: str, variable: str | None) -> None:
    site = installed_deepspeed(tmp_path)
    env = {} if variable is None else {"LAUNCH_ENGINE": variable}
    code = f"import launcher.compat; launcher.compat.install({argument})\n{INSTALL}{LOOK}"
    assert output(run_python(tmp_path, code, path=(site,), env=env)) == OURS


def test_a_later_call_can_choose(tmp_path: Path) -> None:
    site = installed_deepspeed(tmp_path)
    code = f"{INSTALL}launcher.compat.install('builtin')\nlauncher.compat.install()\n{LOOK}"
    assert output(run_python(tmp_path, code, path=(site,))) == OURS


def test_a_folder_of_configs_is_no_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "zero2.json").write_text("{}")
    assert output(run_python(tmp_path, INSTALL + LOOK)) == OURS


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("install('fast')", 'there is no engine "fast"; use auto or builtin'),
        ("import deepspeed; install('builtin')", "DeepSpeed was imported before install()"),
    ],
)
def test_what_cannot_have_an_effect_is_refused(tmp_path: Path, code: str, words: str) -> None:
    site = installed_deepspeed(tmp_path)
    result = run_python(tmp_path, f"from launcher.compat import install; {code}", path=(site,))
    assert result.returncode == 1
    assert words in result.stderr


def test_a_call_after_accelerate_is_refused_unless_it_found_a_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "accelerate.py").touch()
    code = f"import accelerate; {INSTALL}"
    result = run_python(tmp_path, code)
    assert "install() was called after the import of accelerate" in result.stderr
    assert run_python(tmp_path, code, path=(installed_deepspeed(tmp_path),)).returncode == 0


def test_a_wrong_variable_is_named(tmp_path: Path) -> None:
    result = run_python(tmp_path, INSTALL, env={"LAUNCH_ENGINE": "fast"})
    assert 'LAUNCH_ENGINE: there is no engine "fast"; use auto or builtin' in result.stderr


def test_an_installed_deepspeed_that_is_in_use_stays(tmp_path: Path) -> None:
    site = installed_deepspeed(tmp_path)
    code = f"import deepspeed; {INSTALL}print(deepspeed.__version__)"
    assert output(run_python(tmp_path, code, path=(site,))) == "0.1\n"


# ---- ranks ----


def test_ranks_of_launch_have_it(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "--num_gpus", "1", "--no-prefix", write(tmp_path, LOOK))
    assert result.code == 0, result.err
    assert OURS in result.out


def test_the_option_chooses_the_engine(tmp_path: Path) -> None:
    site = installed_deepspeed(tmp_path)
    script = write(tmp_path, LOOK)
    for options, expected in (((), theirs(site)), (("--engine", "builtin"), OURS)):
        arguments = ("--num_gpus", "1", "--no-prefix", *options, script)
        result = run_launch(tmp_path, *arguments, env={"PYTHONPATH": f"{site}:{ROOT}"})
        assert result.code == 0, result.err
        assert expected in result.out


@pytest.mark.long  # the import of accelerate
def test_a_rank_with_a_launcher_file_of_its_own_starts_as_before(tmp_path: Path) -> None:
    scripts.write(tmp_path, "VALUE = 3", "launcher.py")
    look = "import launcher; print('own', hasattr(launcher, 'VALUE'))"
    # Where launcher is installed as editable, python finds it in place of the file.
    plain = write(tmp_path, look, "plain.py")
    expected = subprocess.run([sys.executable, plain], capture_output=True, text=True, check=True).stdout.strip()
    script = write(tmp_path, f"{look}; import accelerate.state")
    result = run_launch(tmp_path, "--num_gpus", "1", script)
    assert result.code == 0, result.err
    assert expected in result.out


TRAINING = """
import launcher.compat; launcher.compat.install()
import deepspeed
import deepspeed.comm as dist
import torch

dist.init_distributed(dist_backend=None, auto_mpi_discovery=False)
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=0.5)
zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
config = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": float("inf"), "zero_optimization": zero}
engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config_params=config, optimizer=optimizer)
loss = engine(torch.ones(2, 4)).mean()
engine.backward(loss)
engine.step()
assert scheduler is None and isinstance(engine, deepspeed.DeepSpeedEngine)
ones = torch.ones(1)
dist.all_reduce(ones)
dist.barrier()
with open(f"rank_{dist.get_rank()}", "w") as file:
    num_params = sum(getattr(param, "ds_numel", param.numel()) for param in engine.parameters())
    print(dist.get_world_size(), dist.get_local_rank(), int(ones), engine.global_steps, num_params, file=file)
"""


@pytest.mark.long
def test_a_script_under_torchrun_needs_one_line(tmp_path: Path) -> None:
    command = ["torchrun", "--standalone", "--nproc_per_node", "1", write(tmp_path, TRAINING)]
    result = run_forked(tmp_path, command, torchrun, env={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert result.code == 0, result.err
    assert (tmp_path / "rank_0").read_text() == "1 0 1 1 5\n"


def test_two_ranks_that_another_launcher_started_are_one_world(tmp_path: Path) -> None:
    result = run_ranks(tmp_path, 2, write(tmp_path, TRAINING), env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.code == 0, result.err
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in range(2)] == ["2 0 2 1 5\n", "2 1 2 1 5\n"]


def test_plain_python_is_a_world_of_one_rank(tmp_path: Path) -> None:
    result = run_ranks(tmp_path, 0, write(tmp_path, TRAINING), env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.code == 0, result.err
    assert (tmp_path / "rank_0").read_text() == "1 0 1 1 5\n"


def test_initialize_alone_leaves_a_process_group(tmp_path: Path) -> None:
    script = "\n".join(line for line in TRAINING.splitlines() if "init_distributed" not in line)
    result = run_ranks(tmp_path, 0, write(tmp_path, script), env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.code == 0, result.err
    assert (tmp_path / "rank_0").read_text() == "1 0 1 1 5\n"


@pytest.mark.long
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_finds_it(tmp_path: Path) -> None:
    code = f"{INSTALL}from transformers.integrations import is_deepspeed_available; print(is_deepspeed_available())"
    assert output(run_python(tmp_path, code)).splitlines()[-1] == "True"
