"""The example as a user runs it: on this machine, and over two SSH hosts, with the same losses."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from harness.launch.command import ROOT, Result, run_forked, run_launch
from harness.launch.forked_ranks import in_forks
from harness.launch.sshd import LoopbackSshd
from harness.train.forked import run_ranks

pytestmark = pytest.mark.cluster
EXAMPLE = ROOT / "examples" / "train_gpt.py"
CONFIG = ROOT / "examples/configs/zero2.json"
SHORT = ("--steps", "6", "--print_every", "1", "--evaluate_every", "3", "--sample_bytes", "4", "--context", "16")


def training(folder: Path, config: Path = CONFIG) -> tuple[str | Path, ...]:
    """Return the example with arguments for a short run that draws its plot in `folder`."""
    return (EXAMPLE, "--deepspeed", config, *SHORT, "--plot", folder / "loss.png")


def losses(result: Result) -> list[str]:
    assert result.code == 0, result.out + result.err
    return re.findall(r"step +\d+/6  loss (\d+\.\d+)", result.out)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Where the example ran on this machine, and how."""
    folder = tmp_path_factory.mktemp("local")
    return folder, run_launch(folder, "--num_gpus", "2", *in_forks(*training(folder)))


@pytest.mark.long
def test_same_losses_on_this_machine_and_over_ssh(
    sshd: LoopbackSshd, tmp_path: Path, local: tuple[Path, Result]
) -> None:
    options = ("--hostfile", ROOT / "hostfiles/loopback", "--ssh_config", sshd.ssh_config)
    over_ssh = run_launch(tmp_path, *options, *in_forks(*training(tmp_path)))
    found = losses(local[1])
    assert found == losses(over_ssh)
    assert len(found) == 6
    assert float(found[-1]) < float(found[0]) < 5.8
    for folder, result in (local, (tmp_path, over_ssh)):
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert "--- sample ---" in result.out
        assert "zero stage 2" in result.out


@pytest.mark.long
def test_same_losses_at_stage_3(tmp_path: Path, local: tuple[Path, Result]) -> None:
    command = in_forks(*training(tmp_path, ROOT / "examples/configs/zero3.json"))
    assert losses(run_launch(tmp_path, "--num_gpus", "2", *command)) == losses(local[1])


def test_optimizer_and_parameters_in_host_memory(tmp_path: Path) -> None:
    config = ROOT / "examples/configs/zero3_offload.json"
    result = run_ranks(tmp_path, 2, EXAMPLE, "--deepspeed", config, *SHORT)
    assert float(losses(result)[-1]) < float(losses(result)[0])
    assert "offload: optimizer → cpu · parameters → cpu" in result.out


def test_a_mistake_is_one_clear_error(tmp_path: Path) -> None:
    arguments = [EXAMPLE, "--deepspeed", CONFIG, "--data", "/no/such/text"]
    result = run_forked(tmp_path, arguments, lambda: runpy.run_path(str(EXAMPLE), run_name="__main__"))
    assert result.code == 1
    assert "cannot read /no/such/text" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "give the engine's config"), (("--deepspeed", str(CONFIG), "--steps", "0"), "must be at least 1")],
)
def test_wrong_arguments_are_one_clear_error(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert end.value.code == 2
    assert message in capsys.readouterr().err
