"""Parameters of a checkpoint from the headers of its safetensors files: a few kilobytes are read, no tensor is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from launcher.base.errors import UsageError
from launcher.planner.model import Parameter

_MAX_HEADER_BYTES = 100 * 2**20  # the format's own bound
_SAFETENSORS = ("model.safetensors.index.json", "model.safetensors")
_TORCH = ("pytorch_model.bin.index.json", "pytorch_model.bin")
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a folder: safetensors before PyTorch's; empty when there are none.

    Raises: UsageError for an index that cannot be read or that names a file which is not there.
    """
    for name in (*_SAFETENSORS, *_TORCH):
        if (folder / name).is_file():
            return _of_index(folder / name) if name.endswith(".json") else [folder / name]
    found = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors" and path.is_file())
    if found:
        return found
    torch_files = sorted(path for path in folder.iterdir() if path.suffix in _TORCH_SUFFIXES and path.is_file())
    return torch_files if len(torch_files) == 1 else []  # several may be optimizer states, schedules, random states


def is_torch_file(path: Path) -> bool:
    """Whether the file's name is that of one PyTorch saved."""
    return path.suffix in _TORCH_SUFFIXES


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises: UsageError."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path), hint="check the path") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"no JSON: {error}", where=str(path), hint="download or copy the file again") from None
    if not isinstance(data, dict):
        raise UsageError("no JSON object", where=str(path), hint="download or copy the file again")
    return data


def _of_index(index: Path) -> list[Path]:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise UsageError("no weight_map", where=str(index), hint="it maps each parameter to its file")
    files = [index.parent / name for name in sorted(set(table.values()))]
    for path in files:
        if path.parent != index.parent:
            raise UsageError(
                f"{path.name} is not beside its index", where=str(index), hint="put all shards into one folder"
            )
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        hint = "download the rest, or give config.json alone"
        raise UsageError(f"{len(missing)} of {len(files)} files are missing: {some}", where=str(index), hint=hint)
    return files


def safetensors_parameters(files: list[Path]) -> tuple[Parameter, ...]:
    """Return the tensors of safetensors files, buffers included. Raises: UsageError."""
    return tuple(param for path in files for param in _read_header(path))


def _read_header(path: Path) -> list[Parameter]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length:,} bytes")
            text = file.read(length)
            if len(text) < length or not text:
                raise ValueError("it ends within its header")
        header = json.loads(text)
        shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
        if not all(isinstance(size, int) and size >= 0 for shape in shapes.values() for size in shape):
            raise ValueError("a shape is not a list of sizes")
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path), hint="check the path") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        hint = "download or copy the file again"
        raise UsageError(f"no safetensors file: {error}", where=str(path), hint=hint) from None
    return [Parameter(name, math.prod(shape)) for name, shape in shapes.items()]
