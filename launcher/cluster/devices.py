"""Count the GPUs of this machine without torch, and map a slot to what CUDA_VISIBLE_DEVICES must say.

Slots are positions 0..n-1 among the devices this process may use. When CUDA_VISIBLE_DEVICES is set, slot i
is its i-th entry, which may be an index, a `GPU-<uuid>` or a `MIG-<uuid>`.
"""

from __future__ import annotations

import os

from launcher.base.env import CUDA_VISIBLE_DEVICES, JOB_ID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DEVICE_FILE = "nvidia"  # and a number
_MAX_INDEX_DIGITS = 9


def local_device_tokens(environ: Mapping[str, str], *, device_dir: str = "/dev") -> tuple[str, ...]:
    """Return the entry of CUDA_VISIBLE_DEVICES that stands for each local slot, () without a GPU."""
    value = environ.get(CUDA_VISIBLE_DEVICES.name)
    # In a rank on the CPU its entries are slots that `launch` has counted, of a machine without any GPU.
    if value is not None and JOB_ID.name not in environ:
        return _visible(value)
    try:
        names = os.listdir(device_dir)
    except OSError:
        return ()
    # Device files may have gaps inside a container (nvidia3 alone); CUDA numbers what it finds from 0.
    count = sum(1 for name in names if name.startswith(_DEVICE_FILE) and _is_number(name[len(_DEVICE_FILE) :]))
    if value is not None:
        return _visible(value) if count else ()
    return tuple(str(index) for index in range(count))


def given_devices(environ: Mapping[str, str]) -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES, None when it is not set. Slurm sets it to the job's GPUs."""
    value = environ.get(CUDA_VISIBLE_DEVICES.name)
    return None if value is None else list(_visible(value))


def local_slots(environ: Mapping[str, str], *, device_dir: str = "/dev") -> tuple[int, ...]:
    """Return the slots of this machine, 0..n-1, one for each GPU this process may use."""
    return tuple(range(len(local_device_tokens(environ, device_dir=device_dir))))


def visible_devices(slots: Sequence[int], tokens: Sequence[str]) -> str:
    """Return the CUDA_VISIBLE_DEVICES value for `slots`; without tokens slots are device indices.

    Raises: IndexError when a slot has no token.
    """
    return ",".join(tokens[slot] if tokens else str(slot) for slot in slots)


def _visible(value: str) -> tuple[str, ...]:
    """Read a CUDA_VISIBLE_DEVICES value as CUDA does: the first invalid or repeated entry ends the list."""
    tokens: list[str] = []
    for raw in value.split(","):
        token = raw.strip()
        is_index = _is_number(token) and len(token) <= _MAX_INDEX_DIGITS
        if not (is_index or token.startswith(("GPU-", "MIG-"))) or token in tokens:
            break
        tokens.append(token)
    return tuple(tokens)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
