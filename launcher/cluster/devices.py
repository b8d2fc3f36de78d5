"""Count the GPUs of this machine without torch, and choose those of a rank.

A slot is a position 0..n-1 among the devices this process may use; its token is what the vendor's variable must say for
it. Between the launcher and its agents CUDA_VISIBLE_DEVICES carries the tokens, whatever the vendor; each agent renames
it for its own host (`rank_devices`).

| vendor | counted by | variable |
|---|---|---|
| NVIDIA | /dev/nvidiaN; MIG: /proc/driver/nvidia | CUDA_VISIBLE_DEVICES |
| AMD | /sys/class/kfd | HIP_VISIBLE_DEVICES |
| Intel | /sys/class/drm/renderD* | ZE_AFFINITY_MASK |
| Ascend | /dev/davinciN | ASCEND_RT_VISIBLE_DEVICES |
"""

from __future__ import annotations

import os
import sys

from launcher.base import env
from launcher.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MAX_INDEX_DIGITS = 9
_INTEL = "0x8086"
_INTEGRATED = "0000:00:02.0"  # where Intel's processors have their own graphics
_MIG = "MIG-"


class Vendor(Record):
    """Who makes the devices of a machine."""

    name: str
    variable: str  # tells a process which devices are its own
    prefixes: tuple[str, ...] = ()  # of tokens that are no index


NVIDIA = Vendor("NVIDIA", env.CUDA_VISIBLE_DEVICES.name, ("GPU-", _MIG))
AMD = Vendor("AMD", env.HIP_VISIBLE_DEVICES.name, ("GPU-",))
INTEL = Vendor("Intel", env.ZE_AFFINITY_MASK.name)
ASCEND = Vendor("Ascend", env.ASCEND_RT_VISIBLE_DEVICES.name)


class Devices(Record):
    """The devices of this machine that a variable does not hide."""

    vendor: Vendor
    tokens: tuple[str, ...]


def all_devices(root: str = "/") -> Devices:
    """Return every device of this machine. root: of /dev, /proc and /sys."""
    nvidia = _nvidia_tokens(root)
    if nvidia:
        return Devices(NVIDIA, nvidia)
    for vendor, count, build in (
        (ASCEND, _num_files(os.path.join(root, "dev"), "davinci"), ""),
        (AMD, _num_amd(root), "hip"),
        (INTEL, _num_intel(root), "xpu"),
    ):
        # Processors with graphics of AMD or Intel are everywhere; they count only for a torch that can use them.
        if count and (not build or _torch_has(build)):
            return Devices(vendor, _indices(count))
    return Devices(NVIDIA, ())


def local_devices(environ: Mapping[str, str], *, root: str = "/") -> Devices:
    """Return the devices of this machine that this process may use."""
    found = all_devices(root)
    for name in _variables_of(found.vendor):
        value = environ.get(name)
        if value is None:
            continue
        tokens = _visible(value, found.vendor)  # what says so for NVIDIA counts without device files, too
        # HIP numbers what ROCR_VISIBLE_DEVICES leaves from 0.
        return Devices(found.vendor, _indices(len(tokens)) if name == env.ROCR_VISIBLE_DEVICES.name else tokens)
    return found


def local_device_tokens(environ: Mapping[str, str], *, root: str = "/") -> tuple[str, ...]:
    """Return the token of each local slot, () without a GPU."""
    return local_devices(environ, root=root).tokens


def given_devices(environ: Mapping[str, str], *, root: str = "/") -> list[str] | None:
    """Return the tokens that this process was given, None when no variable says so. Slurm sets it to the job's GPUs."""
    vendor = all_devices(root).vendor
    for name in _variables_of(vendor):
        if name in environ and name != env.ROCR_VISIBLE_DEVICES.name:
            return list(_visible(environ[name], vendor))
    return None


def visible_devices(slots: Sequence[int], tokens: Sequence[str]) -> str:
    """Return the tokens of `slots`, joined; without tokens slots are device indices. An empty token hides the device.

    Raises: IndexError when a slot has no token.
    """
    return ",".join(filter(None, (tokens[slot] if tokens else str(slot) for slot in slots)))


def rank_devices(value: str, local_rank: int, machine: Devices) -> dict[str, str]:
    """Return the variable that shows a rank its devices on `machine`, of which `all_devices` is to be given.

    value: the tokens of all ranks of the host. A rank sees all of them, and takes the one of its LOCAL_RANK; of MIG
    instances CUDA opens one in a process, so that a rank sees its own alone.
    """
    tokens = value.split(",")
    if any(token.startswith(_MIG) for token in machine.tokens):
        tokens = [machine.tokens[int(t)] if _is_index(t) and int(t) < len(machine.tokens) else t for t in tokens]
    if any(token.startswith(_MIG) for token in tokens):
        tokens = tokens[local_rank : local_rank + 1]
    return {machine.vendor.variable: ",".join(tokens)}


def _variables_of(vendor: Vendor) -> tuple[str, ...]:
    """Return the variables that hide devices, the one that decides first."""
    if vendor is AMD:  # HIP reads CUDA's variable where its own is not set
        return (vendor.variable, NVIDIA.variable, env.ROCR_VISIBLE_DEVICES.name)
    return (vendor.variable,)


def _visible(value: str, vendor: Vendor) -> tuple[str, ...]:
    """Read a list of devices as CUDA does: the first invalid or repeated entry ends it."""
    tokens: list[str] = []
    for raw in value.split(","):
        token = raw.strip()
        is_tile = vendor is INTEL and all(_is_index(part) for part in token.split(".", 1))
        if not (_is_index(token) or is_tile or token.startswith(vendor.prefixes)) or token in tokens:
            break
        tokens.append(token)
    return tuple(tokens)


def _nvidia_tokens(root: str) -> tuple[str, ...]:
    """Return a token for each GPU, and for each MIG instance in place of its GPU."""
    count = _num_files(os.path.join(root, "dev"), "nvidia")
    if not count:
        return ()
    capabilities = os.path.join(root, "proc/driver/nvidia/capabilities")
    instances = {name: _mig_instances(os.path.join(capabilities, name, "mig")) for name in _names(capabilities)}
    if not any(instances.values()):
        # Device files may have gaps inside a container (nvidia3 alone); CUDA numbers what it finds from 0.
        return _indices(count)
    return tuple(
        token
        for minor, uuid in sorted(_nvidia_uuids(root))
        for token in ([f"{_MIG}{uuid}/{place}" for place in instances.get(f"gpu{minor}", ())] or [uuid])
    )


def _mig_instances(folder: str) -> list[str]:
    """Return `GI/CI` of each compute instance of a GPU."""
    pairs = [
        (int(gi[2:]), int(ci[2:]))
        for gi in _names(folder)
        if gi.startswith("gi") and _is_index(gi[2:])
        for ci in _names(os.path.join(folder, gi))
        if ci.startswith("ci") and _is_index(ci[2:])
    ]
    return [f"{gi}/{ci}" for gi, ci in sorted(pairs)]


def _nvidia_uuids(root: str) -> Iterator[tuple[int, str]]:
    """Yield the minor number and the UUID of each GPU that the driver knows."""
    folder = os.path.join(root, "proc/driver/nvidia/gpus")
    for name in _names(folder):
        lines = (line.partition(":") for line in _text(os.path.join(folder, name, "information")).splitlines())
        facts = {key.strip(): value.strip() for key, _, value in lines}
        minor, uuid = facts.get("Device Minor", ""), facts.get("GPU UUID", "")
        if _is_index(minor) and uuid:
            yield int(minor), uuid


def _num_amd(root: str) -> int:
    """Count the nodes of the kernel's topology that compute: processors have no SIMD units there."""
    folder = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    units = (
        line.split()[1]
        for name in _names(folder)
        for line in _text(os.path.join(folder, name, "properties")).splitlines()
        if line.startswith("simd_count ")
    )
    return sum(_is_index(count) and int(count) > 0 for count in units)


def _num_intel(root: str) -> int:
    folder = os.path.join(root, "sys/class/drm")
    count = 0
    for name in _names(folder):
        device = os.path.join(folder, name, "device")
        if name.startswith("renderD") and _text(os.path.join(device, "vendor")).strip() == _INTEL:
            count += os.path.basename(os.path.realpath(device)) != _INTEGRATED
    return count


def _torch_has(build: str) -> bool:
    """Whether the torch of this Python is built for "hip" or "xpu"; True where there is no torch."""
    for folder in sys.path:
        text = _text(os.path.join(folder, "torch", "version.py"))
        if text:
            return any(line.startswith(build) and not line.endswith("None") for line in text.splitlines())
    return True


def _indices(count: int) -> tuple[str, ...]:
    return tuple(str(index) for index in range(count))


def _num_files(folder: str, prefix: str) -> int:
    return sum(name.startswith(prefix) and _is_index(name[len(prefix) :]) for name in _names(folder))


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_INDEX_DIGITS
