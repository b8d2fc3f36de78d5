"""The example as a user runs it: on this machine, and over two SSH hosts, with the same losses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness.launching import ROOT, Result, run_launch
from harness.sshd import LoopbackSshd

pytestmark = pytest.mark.cluster
EXAMPLE = ROOT / "examples" / "train_gpt.py"
CONFIG = ROOT / "examples/configs/zero2.json"
SHORT = ("--steps", "6", "--print_every", "1", "--evaluate_every", "3", "--sample_bytes", "4", "--context", "16")


def train(folder: Path, *options: str, config: Path = CONFIG) -> Result:
    arguments = ("--deepspeed", str(config), *SHORT, "--plot", str(folder / "loss.png"))
    return run_launch(folder, *options, EXAMPLE, *arguments)


def losses(result: Result) -> list[str]:
    assert result.code == 0, result.out + result.err
    return re.findall(r"step +\d+/6  loss (\d+\.\d+)", result.out)


def test_same_losses_on_this_machine_over_ssh_and_at_stage_3(sshd: LoopbackSshd, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("local", "ssh", "stage 3")]
    for folder in folders:
        folder.mkdir()
    local = train(folders[0], "--num_gpus", "2")
    over_ssh = train(folders[1], "--hostfile", str(ROOT / "hostfiles/loopback"), "--ssh_config", str(sshd.ssh_config))
    assert losses(local) == losses(over_ssh)
    sharded = train(folders[2], "--num_gpus", "2", config=ROOT / "examples/configs/zero3.json")
    assert losses(sharded) == losses(local)
    assert len(losses(local)) == 6
    assert float(losses(local)[-1]) < float(losses(local)[0]) < 5.8
    for folder, result in zip(folders[:2], (local, over_ssh), strict=True):
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert "--- sample ---" in result.out
        assert "zero stage 2" in result.out


def test_optimizer_and_parameters_in_host_memory(tmp_path: Path) -> None:
    result = train(tmp_path, "--num_gpus", "2", config=ROOT / "examples/configs/zero3_offload.json")
    assert float(losses(result)[-1]) < float(losses(result)[0])
    assert "offload: optimizer → cpu · parameters → cpu" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give the engine's config"),
        (("--deepspeed", str(CONFIG), "--data", "/no/such/text"), "cannot read /no/such/text"),
        (("--deepspeed", str(CONFIG), "--steps", "0"), "must be at least 1"),
    ],
)
def test_mistakes_are_one_clear_error(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run_launch(tmp_path, EXAMPLE, *arguments)
    assert result.code != 0
    assert message in result.err
    assert "Traceback" not in result.err
