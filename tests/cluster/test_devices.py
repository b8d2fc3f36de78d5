"""Local devices are counted without torch, whatever form CUDA_VISIBLE_DEVICES has."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cluster.devices import local_device_tokens, local_slots, visible_devices


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0,2", ("0", "2")),
        (" 3 , 1", ("3", "1")),
        ("0,-1,2", ("0",)),
        ("GPU-8f2,MIG-77/1/0", ("GPU-8f2", "MIG-77/1/0")),
    ],
)
def test_visible_devices_are_slots_by_position(value: str, tokens: tuple[str, ...]) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": value}
    assert local_device_tokens(environ) == tokens
    assert local_slots(environ) == tuple(range(len(tokens)))


def test_device_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "sda"):
        (tmp_path / "dev" / name).touch()
    assert local_slots({}, root=str(tmp_path)) == (0, 1)
    assert local_slots({}, root=str(tmp_path / "none")) == ()


def test_a_slot_leads_back_to_its_token() -> None:
    assert visible_devices((1,), ("GPU-a", "GPU-b")) == "GPU-b"
    assert visible_devices((0, 3), ()) == "0,3"


def test_a_rank_on_the_cpu_has_no_gpu_to_offer_a_launch_of_its_own(tmp_path: Path) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "3", "LAUNCH_JOB_ID": "calm-otter-0001"}
    assert local_device_tokens(environ, root=str(tmp_path)) == ()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert local_device_tokens(environ, root=str(tmp_path)) == ("3",)
