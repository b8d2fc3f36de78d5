"""The header of a safetensors file: which tensor is where. https://huggingface.co/docs/safetensors"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.base.errors import CheckpointError

# By the names of safetensors.
DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # as the format has it
METADATA = "__metadata__"
# Data begins at a multiple of this, so that every element is aligned.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # first byte, from the beginning of the file
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def header_of(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return the first bytes of a file of these tensors, and where each goes. tensors: key -> dtype, shape.

    Wider types come first, so that every element is aligned; else they keep their order.
    """
    keys = sorted(tensors, key=lambda key: -DTYPE_BYTES[tensors[key][0]])
    plain: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    places, offset = {}, 0
    for key in keys:
        dtype, shape = tensors[key]
        stop = offset + DTYPE_BYTES[dtype] * math.prod(shape)
        plain[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        places[key], offset = (offset, stop), stop
    text = json.dumps(plain, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT_BYTES)
    begin = len(text) + 8
    entries = {key: TensorEntry(*tensors[key], start + begin, stop + begin) for key, (start, stop) in places.items()}
    return len(text).to_bytes(8, "little") + text, entries


def parse_header(text: bytes, num_file_bytes: int, where: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return tensors and metadata of a header. text: from the ninth byte of the file on; where: the file, for errors.

    Raises: CheckpointError for anything that the format does not allow, such as tensors that overlap.
    """
    try:
        plain = json.loads(text, object_pairs_hook=_without_repetition)
        metadata = plain.pop(METADATA, {})
        begin = len(text) + 8
        entries = {key: _entry(value, begin) for key, value in plain.items()}
        if not all(isinstance(word, str) for pair in metadata.items() for word in pair):
            raise ValueError("metadata that is not text")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(f"its header cannot be read ({error})", where) from None
    end = begin
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise _damaged(f"the tensor {key} does not begin where the one before it ends", where)
        end = entry.stop
    if end != num_file_bytes:
        raise _damaged(f"it has {num_file_bytes} bytes, its header describes {end}", where)
    return entries, metadata


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _entry(plain: Mapping[str, Any], begin: int) -> TensorEntry:
    dtype, shape, (start, stop) = plain["dtype"], plain["shape"], plain["data_offsets"]
    numbers = [*shape, start, stop]
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError("a size that is not a number")
    if DTYPE_BYTES[dtype] * math.prod(shape) != stop - start:
        raise ValueError(f"the shape {shape} does not fit {stop - start} bytes of {dtype}")
    return TensorEntry(dtype, tuple(shape), start + begin, stop + begin)


def _damaged(what: str, where: str) -> CheckpointError:
    return CheckpointError(f"this is not a safetensors file, or it is damaged: {what}", where=where)
