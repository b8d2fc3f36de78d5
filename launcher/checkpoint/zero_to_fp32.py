#!/usr/bin/env python3
"""Put the weights of a sharded checkpoint together in fp32. This file needs nothing but Python and torch.

    python zero_to_fp32.py . out                         out/pytorch_model.bin, in files of at most 5 GB
    python zero_to_fp32.py . out --safe_serialization    out/model.safetensors, too
    python zero_to_fp32.py . weights.safetensors         this one file

Weights go from the ranks' files to the output a few megabytes at a time. With the package `xxhash` installed, all that
is read is compared with the checksums in the checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import pickle
import re
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

_xxhash: Any = None  # nothing is compared with checksums then
with contextlib.suppress(ImportError):
    _xxhash = importlib.import_module("xxhash")

_log = logging.getLogger("launcher.zero_to_fp32")
DEFAULT_SHARD_SIZE = "5GB"
_FORMAT = ("launch checkpoint", 1)  # and its version
_BLOCK_BYTES = 4 << 20  # of a tensor in a file, that one checksum is for
_MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as its own library has it
_ALIGNMENT_BYTES = 64  # of a tensor in an output file
TORCH_DTYPES = {  # by the names of safetensors
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
FILE_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class UnreadableCheckpoint(ValueError):
    """A checkpoint that is incomplete, damaged or of another kind. The message names the file."""


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Name the file whose contents are other than expected."""
    try:
        yield
    except UnreadableCheckpoint:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise UnreadableCheckpoint(f"{path}: it is damaged, or no file of a checkpoint: {error!r}") from error


# ---- what a checkpoint has ----


@dataclass(frozen=True)
class Piece:
    """A tensor of a file, which is all of a tensor of the model or some consecutive elements of it."""

    path: Path
    offset: int  # byte of the first element in the file
    num_bytes: int
    dtype: torch.dtype
    start: int  # first element, in the order of the flattened tensor
    digests: bytes  # of its blocks; empty where there is nothing to compare with

    def blocks(self) -> Iterator[memoryview]:
        """Read and verify block after block. Each is overwritten by the next one. Raises: UnreadableCheckpoint."""
        buffer = memoryview(bytearray(min(_BLOCK_BYTES, self.num_bytes)))
        with open(self.path, "rb") as file:
            for begin in range(0, self.num_bytes, _BLOCK_BYTES):
                block = buffer[: self.num_bytes - begin]
                file.seek(self.offset + begin)
                if file.readinto(block) != len(block):
                    raise UnreadableCheckpoint(
                        f"{self.path}: the file ends before byte {self.offset + begin + len(block)}"
                    )
                index = begin // _BLOCK_BYTES * 8
                if self.digests and _xxhash.xxh3_64_digest(block) != self.digests[index : index + 8]:
                    first = self.offset + begin
                    raise UnreadableCheckpoint(f"{self.path}: damaged in the bytes {first} to {first + len(block)}")
                yield block


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor that is read when it is needed. Tied parameters are one such object."""

    shape: torch.Size
    dtype: torch.dtype  # it is read as
    stored_dtype: torch.dtype  # the model has
    pieces: tuple[Piece, ...]
    split: Mapping[str, Any] | None = None  # what tensor-parallel ranks had in parts is stored part after part

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def as_dtype(self, dtype: torch.dtype) -> StoredTensor:
        """Return the same tensor, read as another type if it is one of floating-point numbers."""
        return replace(self, dtype=dtype if self.stored_dtype.is_floating_point else self.stored_dtype)

    def chunks(self) -> Iterator[memoryview]:
        """Read the tensor; yield its bytes in order. Each chunk is overwritten by the next one."""
        if self.split is not None:
            whole = bytearray(self.nbytes)
            torch.frombuffer(whole, dtype=self.dtype).copy_(self.contiguous().view(-1))
            yield memoryview(whole)
            return
        for piece in self.pieces:
            converted = bytearray(0)
            for block in piece.blocks():
                if piece.dtype == self.dtype:
                    yield block
                    continue
                source = torch.frombuffer(block, dtype=piece.dtype)
                converted = converted or bytearray(source.numel() * self.dtype.itemsize)  # the first is the largest
                torch.frombuffer(converted, dtype=self.dtype, count=source.numel()).copy_(source)
                yield memoryview(converted)[: source.numel() * self.dtype.itemsize]

    def contiguous(self) -> Tensor:
        """Read the tensor and return it."""
        if self.split is not None:
            return _joined(replace(self, split=None).contiguous(), self.split)
        flat, start = torch.empty(self.shape.numel(), dtype=self.dtype), 0
        for chunk in self.chunks():
            values = torch.frombuffer(chunk, dtype=self.dtype)
            flat[start : start + values.numel()].copy_(values)
            start += values.numel()
        return flat.view(self.shape)


def _joined(stored: Tensor, split: Mapping[str, Any]) -> Tensor:
    """Return a tensor whose parts are stored one after another. Each has the same share of every block along `dim`."""
    dim, count = split["dim"], split["count"]
    shape = [size // count if axis == dim else size for axis, size in enumerate(stored.shape)]
    shares = [block // count for block in split["blocks"]]
    by_part = [part.split(shares, dim) for part in stored.view(count, *shape).unbind()]
    return torch.cat([share for block in zip(*by_part, strict=True) for share in block], dim)


class Checkpoint:
    """The weights and buffers in the folder of one tag."""

    def __init__(self, folder: Path) -> None:
        """Read what describes the weights. Raises: UnreadableCheckpoint."""
        self._folder = folder
        if _xxhash is None:
            _log.warning("checksums are not compared: that needs the package xxhash (pip install xxhash)")
        with _readable(folder / "manifest.json"):
            outer = json.loads((folder / "manifest.json").read_bytes())
            manifest = outer["manifest"]
            if (manifest["format"], manifest["version"]) != _FORMAT:
                raise ValueError(f"{manifest['format']}, version {manifest['version']}")
            text = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
            if _xxhash is not None and _xxhash.xxh3_128_hexdigest(text) != outer["checksum"]:
                raise ValueError("its checksum is another one")
            self._files: dict[str, dict[str, Any]] = manifest["files"]
            state_name, ranks = manifest["state"], manifest["ranks"]
        self._state, self._state_name = self._json(state_name), state_name
        self._pieces: dict[str, list[Piece]] = {}
        for tensors_name, facts_name in ranks:
            for key, piece in self._tensors_of(tensors_name, self._json(facts_name)).items():
                if key.startswith("weight/"):
                    self._pieces.setdefault(key.removeprefix("weight/"), []).append(piece)

    def _path(self, name: str) -> Path:
        """Return the path of a file that the manifest names, after comparing its size."""
        path, num_bytes = self._folder / name, self._files[name]["num_bytes"]
        if path.parent != self._folder or path.name != name:
            raise UnreadableCheckpoint(f"{self._folder / 'manifest.json'}: {name!r} is not the name of a file")
        found = path.stat().st_size if path.is_file() else None
        if found != num_bytes:
            problem = "the file is missing" if found is None else f"it has {found} bytes instead of {num_bytes}"
            raise UnreadableCheckpoint(f"{path}: {problem}")
        return path

    def _json(self, name: str) -> dict[str, Any]:
        with _readable(self._folder / name):
            text = self._path(name).read_bytes()
            if _xxhash is not None and _xxhash.xxh3_128_hexdigest(text) != self._files[name]["checksum"]:
                raise ValueError("its checksum is another one than the manifest's")
            return dict(json.loads(text))

    def _tensors_of(self, name: str, facts: Mapping[str, Any]) -> dict[str, Piece]:
        """Return what a safetensors file has, by key. facts: the JSON object with its checksums."""
        with _readable(self._folder / name):
            path, sums, size = self._path(name), facts["sums"], self._files[name]["num_bytes"]
            with open(path, "rb") as file:
                prefix = file.read(8)
                data_start = 8 + int.from_bytes(prefix, "little")
                if not 8 <= data_start <= min(_MAX_HEADER_BYTES, size):
                    raise ValueError("this is not a safetensors file")
                text = file.read(data_start - 8)
            if _xxhash is not None and _xxhash.xxh3_128_hexdigest(prefix + text) != sums["header"]:
                raise ValueError("its header has another checksum")
            header = json.loads(text)
            ranges = json.loads(header.pop("__metadata__", {}).get("ranges", "{}"))
            found = {}
            for key, entry in header.items():
                (begin, end), dtype = entry["data_offsets"], TORCH_DTYPES[entry["dtype"]]
                digests = bytes.fromhex(sums["blocks"][key]) if _xxhash is not None else b""
                is_summed = _xxhash is None or len(digests) == 8 * -(-(end - begin) // _BLOCK_BYTES)
                start, _ = ranges.get(key, (0, 0))
                if not is_summed or not 0 <= begin <= end <= size - data_start or (end - begin) % dtype.itemsize:
                    raise ValueError(f"the place of {key} is not one in this file")
                found[key] = Piece(path, data_start + begin, end - begin, dtype, start, digests)
            return found

    def tensors(self, *, exclude_frozen: bool = False) -> dict[str, StoredTensor]:
        """Return the tensors of the model's state dict by name, in fp32 where they are of floating point.

        A tied parameter is one object under several names. Raises: UnreadableCheckpoint for one that is incomplete.
        """
        found: dict[str, StoredTensor] = {}
        with _readable(self._folder / self._state_name):
            left_out = set(self._state.get("excluded", ()))
            for param in [param for unit in self._state["units"] for param in unit["params"]]:
                name = param["name"]
                if name not in left_out and (param["is_trainable"] or not exclude_frozen):
                    found[name] = _stored(name, param, self._pieces.get(name, []))
            found |= {alias: found[name] for alias, name in self._state.get("tied", {}).items() if name in found}
            buffers = {name: plain["of"] for name, plain in self._state["run"]["buffers"].items()}
            pieces = self._tensors_of(self._state["tensors"], self._state) if buffers else {}
            for name, plain in buffers.items():
                piece = replace(pieces[plain["key"]], dtype=getattr(torch, plain["dtype"]))
                found[name] = _stored(name, plain, [piece])
        if left_out:
            _log.warning("%d parameters are left out, which this checkpoint was saved without", len(left_out))
        return found


def _stored(name: str, described: Mapping[str, Any], pieces: Sequence[Piece]) -> StoredTensor:
    """Return a tensor that is in files piece by piece. described: its shape and dtype. Raises: ValueError."""
    split = described.get("split")
    shape, dtype, end = torch.Size((split or described)["shape"]), getattr(torch, described["dtype"]), 0
    ordered = sorted((piece for piece in pieces if piece.num_bytes), key=lambda piece: piece.start)
    for piece in ordered:
        if piece.start != end:
            raise ValueError(f"the element {end} of {name} is missing")
        end += piece.num_bytes // piece.dtype.itemsize
    if end != shape.numel():
        raise ValueError(f"{name} has {shape.numel()} elements, and {end} are there")
    return StoredTensor(shape, dtype, dtype, tuple(ordered), split).as_dtype(torch.float32)


def open_checkpoint(checkpoint_dir: str | Path, tag: str | None = None) -> Checkpoint:
    """Open the checkpoint `tag` of a folder, by default the one `latest` names; the folder of a tag is opened itself.

    Raises: UnreadableCheckpoint.
    """
    folder = Path(checkpoint_dir)
    is_tag = (folder / "manifest.json").is_file()
    if tag is None and not is_tag:
        if not (folder / "latest").is_file():
            raise UnreadableCheckpoint(f"{folder}: there is neither a file `latest` nor a manifest.json; name a tag")
        tag = (folder / "latest").read_text().strip()
    if tag is not None and not (is_tag and tag == folder.resolve().name):
        folder /= tag
    if (folder / "manifest.json").is_file():
        return Checkpoint(folder)
    if any(folder.glob("*_model_states.pt")):
        raise UnreadableCheckpoint(f"{folder}: DeepSpeed wrote this checkpoint; `launch checkpoint import` reads it")
    raise UnreadableCheckpoint(f"{folder}: there is no manifest.json, so this is not a complete checkpoint")


# ---- files of weights ----


@contextlib.contextmanager
def _new_files(folder: Path, names: Sequence[str]) -> Iterator[Sequence[BinaryIO]]:
    """Open files that appear in a folder all together when the block ends well, and else not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = [folder / f".{name}.{os.getpid()}.tmp" for name in names]
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb")) for path in temporary]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for path, name in zip(temporary, names, strict=True):
            path.replace(folder / name)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def write_weights(tensors: Mapping[str, StoredTensor], output: Path, max_bytes: int | None) -> None:
    """Write tensors to the file `output`, or to numbered ones and an index where they have more than `max_bytes`.

    The suffix `.safetensors` stands for that format, any other for `torch.save`'s. Raises: UnreadableCheckpoint,
    FileExistsError for a folder with files of earlier weights that would not be replaced.
    """
    folder, stem, suffix = output.parent, output.stem, output.suffix
    parts = _split(tensors, max_bytes)
    names, index = [output.name], []
    if len(parts) > 1:
        names = [f"{stem}-{number:05d}-of-{len(parts):05d}{suffix}" for number in range(1, len(parts) + 1)]
        index = [f"{output.name}.index.json"]
    pattern = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}(\.index\.json)?")
    others = {path.name for path in folder.glob("*") if pattern.fullmatch(path.name)} - {*names, *index}
    if others:
        raise FileExistsError(f"{folder} has weights that would stay beside the new ones, {min(others)}; remove them")
    with _new_files(folder, names + index) as files:
        for name, file, part in zip(names, files, parts, strict=False):
            (write_safetensors if suffix == ".safetensors" else _write_torch)(file, part)
            for key, tensor in part.items():
                _log.debug("%s: %s %s from %d places", key, tensor.dtype, list(tensor.shape), len(tensor.pieces))
            _log.info("%s: %d tensors, %.1f MB", folder / name, len(part), file.tell() / 1e6)
        if index:
            total = sum(tensor.nbytes for tensor in dict.fromkeys(tensors.values()))
            places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
            content = {"metadata": {"total_size": total}, "weight_map": places}
            files[-1].write((json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def _split(tensors: Mapping[str, StoredTensor], max_bytes: int | None) -> list[dict[str, StoredTensor]]:
    """Fill one part after another, in order; a tensor under several names is in one part under all of them."""
    names: dict[StoredTensor, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(tensor, []).append(name)
    parts: list[dict[str, StoredTensor]] = [{}]
    filled = 0
    for tensor, same in names.items():
        if max_bytes is not None and parts[-1] and filled + tensor.nbytes * len(same) > max_bytes:
            parts.append({})
            filled = 0
        parts[-1] |= dict.fromkeys(same, tensor)
        filled += tensor.nbytes * len(same)
    return parts


def write_safetensors(file: BinaryIO, tensors: Mapping[str, Any]) -> None:
    """Write one file of the safetensors format. A tensor under several names is there under each.

    tensors: `StoredTensor`, or what has its dtype, shape, nbytes and chunks().
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # so that all are aligned
    for name, tensor in ordered:
        if tensor.dtype not in FILE_DTYPES:
            raise ValueError(f"{name} is of {tensor.dtype}, which safetensors has no name for; write a *.bin file")
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": FILE_DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, tensor in ordered:
        for chunk in tensor.chunks():
            file.write(chunk)


class _Storage(tuple[Any, ...]):
    """What a file of `torch.save` has in place of the memory of a tensor."""


class _Pickler(pickle.Pickler):
    """Describes tensors as `torch.save` does."""

    def __init__(self, file: Any, keys: Mapping[StoredTensor, str]) -> None:
        super().__init__(file, protocol=2)
        self._keys = keys

    def persistent_id(self, obj: Any) -> Any:
        return tuple(obj) if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, StoredTensor):
            return NotImplemented
        name = torch.storage._dtype_to_storage_type_map().get(obj.dtype)
        kind, numel = (torch.UntypedStorage, obj.nbytes) if name is None else (getattr(torch, name), obj.shape.numel())
        storage = _Storage(("storage", kind, self._keys[obj], "cpu", numel))
        stride = torch.empty(obj.shape, device="meta").stride()
        values: tuple[Any, ...] = (storage, 0, tuple(obj.shape), stride, False, OrderedDict())
        if name is None:
            return torch._utils._rebuild_tensor_v3, (*values, obj.dtype)
        return torch._utils._rebuild_tensor_v2, values


def _write_torch(file: BinaryIO, tensors: Mapping[str, StoredTensor]) -> None:
    """Write one file as `torch.save` of a dictionary does, for which all of it would have to be in memory."""
    keys = {tensor: f"{number}" for number, tensor in enumerate(dict.fromkeys(tensors.values()))}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("archive/data.pkl", "w") as entry:
            _Pickler(entry, keys).dump(dict(tensors))
        archive.writestr("archive/byteorder", sys.byteorder)
        for tensor, key in keys.items():
            info = zipfile.ZipInfo(f"archive/data/{key}")
            # The entry's header (30 bytes, the name, 20 for long sizes) is filled up to where values may begin.
            padding = -(file.tell() + 30 + len(info.filename) + 20 + 4) % _ALIGNMENT_BYTES
            info.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
            with archive.open(info, "w", force_zip64=True) as entry:
                for chunk in tensor.chunks():
                    entry.write(chunk)
        archive.writestr("archive/version", "3\n")


# ---- what scripts call ----


def parse_size(value: int | str) -> int:
    """Return the bytes that `5GB` means. Raises: ValueError."""
    found = re.fullmatch(r"(\d*[1-9]\d*) *([KMGT]?)B?", str(value).strip().upper())
    if found is None:
        raise ValueError(f"{value!r} is not a size; write 5GB")
    return int(found[1]) * int(1000 ** " KMGT".index(found[2] or " "))


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """Return the model's state dict in fp32, in host memory.

    checkpoint_dir: the folder with `latest`, or the one of a tag. lazy_mode: values are read by their `contiguous()`.
    Raises: UnreadableCheckpoint.
    """
    stored = open_checkpoint(checkpoint_dir, tag).tensors(exclude_frozen=exclude_frozen_parameters)
    if lazy_mode:
        return dict(stored)
    read = {tensor: tensor.contiguous() for tensor in dict.fromkeys(stored.values())}
    return {name: read[tensor] for name, tensor in stored.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str | None = DEFAULT_SHARD_SIZE,
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the model's state dict in fp32 to files, a few megabytes of it in memory at a time.

    output_dir: a folder, which gets `pytorch_model.bin`, or `model.safetensors` with `safe_serialization`; or one file,
    if its name ends in `.bin` or `.safetensors`. max_shard_size: of a file of a folder (`5GB`); None: one file.
    Raises: UnreadableCheckpoint, FileExistsError for a folder with other files of such names.
    """
    output, max_bytes = Path(output_dir), None if max_shard_size is None else parse_size(max_shard_size)
    if output.suffix in (".bin", ".safetensors") and not output.is_dir():
        if max_shard_size not in (None, DEFAULT_SHARD_SIZE) or (safe_serialization and output.suffix == ".bin"):
            raise ValueError(f"{output} is one file: max_shard_size and safe_serialization are for a folder")
        max_bytes = None
    else:
        output /= "model.safetensors" if safe_serialization else "pytorch_model.bin"
    tensors = open_checkpoint(checkpoint_dir, tag).tensors(exclude_frozen=exclude_frozen_parameters)
    write_weights(tensors, output, max_bytes)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> torch.nn.Module:
    """Move a model to host memory and load the checkpoint's weights into it; return it. For a model without engine.

    Names that only one of them has are passed over. Raises: UnreadableCheckpoint.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def run(arguments: Sequence[str]) -> None:
    """Run the command line, whose options are those of DeepSpeed's script. Raises: what converting does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint_dir", help="folder with the file `latest`, or the folder of a tag")
    parser.add_argument("output_dir", help="folder for the weights, or a file: *.bin, *.safetensors")
    size_help = f"most bytes of one file in a folder (default {DEFAULT_SHARD_SIZE})"
    parser.add_argument("--max_shard_size", default=DEFAULT_SHARD_SIZE, help=size_help)
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors, not files to unpickle")
    parser.add_argument("-t", "--tag", help="the checkpoint (default: the one that `latest` names)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what is not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="list the tensors")
    given = vars(parser.parse_args(arguments))
    _log.setLevel(logging.DEBUG if given.pop("debug") else logging.INFO)
    convert_zero_checkpoint_to_fp32_state_dict(**given)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    try:
        run(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
