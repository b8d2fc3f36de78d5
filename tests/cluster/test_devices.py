"""Local devices are counted without torch, whatever form CUDA_VISIBLE_DEVICES has."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.agent import spawn
from launcher.agent.wire import Spawn
from launcher.cluster import devices
from launcher.cluster.devices import (
    AMD,
    ASCEND,
    INTEL,
    NVIDIA,
    Devices,
    all_devices,
    given_devices,
    local_device_tokens,
    local_devices,
    rank_devices,
    visible_devices,
)


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


def test_device_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "sda"):
        (tmp_path / "dev" / name).touch()
    assert local_device_tokens({}, root=str(tmp_path)) == ("0", "1")
    assert local_device_tokens({}, root=str(tmp_path / "none")) == ()


def test_a_slot_leads_back_to_its_token() -> None:
    assert visible_devices((1,), ("GPU-a", "GPU-b")) == "GPU-b"
    assert visible_devices((0, 3), ()) == "0,3"
    assert visible_devices((0, 1), ("", "")) == ""


def write(root: Path, files: dict[str, str]) -> str:
    """Make a folder that looks like the root of a machine. Returns its path."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


KFD = "sys/class/kfd/kfd/topology/nodes"
DRM = "sys/class/drm"
AMD_MACHINE = {
    f"{KFD}/0/properties": "cpu_cores_count 64\nsimd_count 0\n",
    f"{KFD}/1/properties": "cpu_cores_count 0\nsimd_count 416\n",
    f"{KFD}/2/properties": "cpu_cores_count 0\nsimd_count 416\n",
}
INTEL_MACHINE = {
    f"{DRM}/renderD128/device/vendor": "0x8086\n",
    f"{DRM}/renderD129/device/vendor": "0x8086\n",
    f"{DRM}/renderD130/device/vendor": "0x1a03\n",  # the graphics of a server's management controller
    f"{DRM}/card0/device/vendor": "0x8086\n",
}
ASCEND_MACHINE = {"dev/davinci0": "", "dev/davinci1": "", "dev/davinci_manager": ""}
UUIDS = {0: "GPU-00000000-aaaa", 1: "GPU-00000000-bbbb"}
MIG_MACHINE = {
    "dev/nvidia0": "",
    "dev/nvidia1": "",
    **{
        f"proc/driver/nvidia/gpus/0000:{n}:00.0/information": f"GPU UUID:\t {uuid}\nDevice Minor:\t {n}\n"
        for n, uuid in UUIDS.items()
    },
    "proc/driver/nvidia/capabilities/mig/config": "",
    "proc/driver/nvidia/capabilities/gpu0/mig/gi9/ci0/access": "",
    "proc/driver/nvidia/capabilities/gpu0/mig/gi9/access": "",
    "proc/driver/nvidia/capabilities/gpu0/mig/gi10/ci0/access": "",
    "proc/driver/nvidia/capabilities/gpu1/mig/other": "",
}
MIG_TOKENS = (f"MIG-{UUIDS[0]}/9/0", f"MIG-{UUIDS[0]}/10/0", UUIDS[1])


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (AMD_MACHINE, Devices(AMD, ("0", "1"))),
        (INTEL_MACHINE, Devices(INTEL, ("0", "1"))),
        (ASCEND_MACHINE, Devices(ASCEND, ("0", "1"))),
        (MIG_MACHINE, Devices(NVIDIA, MIG_TOKENS)),
        (AMD_MACHINE | {"dev/nvidia0": ""}, Devices(NVIDIA, ("0",))),  # the processor has graphics of AMD
        ({}, Devices(NVIDIA, ())),
    ],
)
def test_devices_of_each_vendor_are_counted(
    machine: dict[str, str], expected: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_torch_has", lambda build: True)
    assert all_devices(write(tmp_path, machine)) == expected


def test_intel_s_integrated_graphics_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_torch_has", lambda build: True)
    device = tmp_path / "sys/devices/pci0000:00/0000:00:02.0"
    write(tmp_path, {"sys/devices/pci0000:00/0000:00:02.0/vendor": "0x8086\n"})
    (tmp_path / DRM / "renderD128").mkdir(parents=True)
    (tmp_path / DRM / "renderD128/device").symlink_to(device)
    assert all_devices(str(tmp_path)).tokens == ()


def test_graphics_of_a_processor_count_for_a_torch_that_can_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path / "root", AMD_MACHINE)
    version = tmp_path / "site/torch/version.py"
    version.parent.mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    for line, count in (("hip: Optional[str] = '6.4.43482'", 2), ("hip: Optional[str] = None", 0)):
        version.write_text(f"cuda: Optional[str] = None\n{line}\nxpu: Optional[str] = None\n")
        assert len(all_devices(root).tokens) == count
    monkeypatch.setattr("sys.path", [str(tmp_path)])  # no torch in this Python: ranks may have another
    assert len(all_devices(root).tokens) == 2


@pytest.mark.parametrize(
    ("machine", "environ", "tokens", "given"),
    [
        (AMD_MACHINE, {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, ("1",), ["1"]),
        (AMD_MACHINE, {"CUDA_VISIBLE_DEVICES": "1"}, ("1",), ["1"]),
        (AMD_MACHINE, {"ROCR_VISIBLE_DEVICES": "1,GPU-77"}, ("0", "1"), None),
        (INTEL_MACHINE, {"ZE_AFFINITY_MASK": "0.1,1"}, ("0.1", "1"), ["0.1", "1"]),
        (ASCEND_MACHINE, {"ASCEND_RT_VISIBLE_DEVICES": "1"}, ("1",), ["1"]),
        (ASCEND_MACHINE, {"ASCEND_RT_VISIBLE_DEVICES": ""}, (), []),
        (MIG_MACHINE, {"CUDA_VISIBLE_DEVICES": "MIG-77"}, ("MIG-77",), ["MIG-77"]),
    ],
)
def test_the_vendor_s_variable_hides_devices(
    machine: dict[str, str],
    environ: dict[str, str],
    tokens: tuple[str, ...],
    given: list[str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "_torch_has", lambda build: True)
    root = write(tmp_path, machine)
    assert local_devices(environ, root=root).tokens == tokens
    assert given_devices(environ, root=root) == given


def test_ranks_get_the_variable_of_their_host_s_vendor() -> None:
    assert rank_devices("0,2", 1, Devices(NVIDIA, ("0", "1", "2"))) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert rank_devices("0,1", 1, Devices(AMD, ("0", "1"))) == {"HIP_VISIBLE_DEVICES": "0,1"}
    assert rank_devices("1", 0, Devices(INTEL, ("0", "1"))) == {"ZE_AFFINITY_MASK": "1"}
    assert rank_devices("1", 0, Devices(ASCEND, ("0", "1"))) == {"ASCEND_RT_VISIBLE_DEVICES": "1"}
    # CUDA opens one MIG instance in a process.
    mig = Devices(NVIDIA, MIG_TOKENS)
    assert rank_devices("0,1", 1, mig) == {"CUDA_VISIBLE_DEVICES": MIG_TOKENS[1]}  # slots of a hostfile
    assert rank_devices(",".join(MIG_TOKENS), 2, mig) == {"CUDA_VISIBLE_DEVICES": UUIDS[1]}
    assert rank_devices("", 0, Devices(NVIDIA, ())) == {"CUDA_VISIBLE_DEVICES": ""}


def test_a_rank_s_environment_has_one_variable_for_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Devices(AMD, ("0", "1"))
    monkeypatch.setattr(spawn, "_devices_here", lambda: here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    rank_env = {"RANK": "0", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"}
    spec = Spawn("a-b-0000", [], "/", {}, [rank_env], None, 1.0)
    environment = spawn.rank_environment(spec, rank_env, {}, None)
    assert environment["HIP_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environment


@pytest.mark.parametrize(
    ("slots", "given", "seen"),
    [
        ("0,1", None, None),  # numbers of ranks, of no device
        ("0,1", "", ""),
        ("1", "0,1", "1"),  # this process was given devices that have no files
        ("", None, ""),  # they are to be hidden
    ],
)
def test_ranks_without_a_gpu_find_what_was_set_before(
    monkeypatch: pytest.MonkeyPatch, slots: str, given: str | None, seen: str | None
) -> None:
    monkeypatch.setattr(spawn, "_devices_here", lambda: Devices(NVIDIA, ()))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    rank_env = {"RANK": "0", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": slots}
    spec = Spawn("a-b-0000", [], "/", {}, [rank_env], None, 1.0)
    assert spawn.rank_environment(spec, rank_env, {}, None).get("CUDA_VISIBLE_DEVICES") == seen


@pytest.mark.parametrize("value", ["0,1,2", "MIG-a/1/0,MIG-a/2/0,MIG-b/1/0"])
def test_a_rank_sees_its_own_mig_instance_alone(value: str) -> None:
    tokens = ("MIG-a/1/0", "MIG-a/2/0", "MIG-b/1/0")
    shown = [rank_devices(value, local_rank, Devices(NVIDIA, tokens)) for local_rank in range(3)]
    assert shown == [{"CUDA_VISIBLE_DEVICES": token} for token in tokens]


@pytest.mark.parametrize(("value", "seen"), [("0,1,1,2", ["0", "1"]), ("0,x,1", ["0"]), ("2,0", ["2", "0"])])
def test_a_repeated_or_wrong_entry_ends_the_list_as_cuda_has_it(value: str, seen: list[str], tmp_path: Path) -> None:
    assert given_devices({"CUDA_VISIBLE_DEVICES": value}, root=str(tmp_path)) == seen
