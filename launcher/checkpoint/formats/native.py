"""Our own checkpoints, read: any range of any parameter, from the files that have it."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats.source import WEIGHT, RunState, StoredParam, checked
from launcher.checkpoint.values import tree
from launcher.checkpoint.values.layout_json import layouts_from_json
from launcher.checkpoint.values.tree import DAMAGE, bytes_of, dtype_name
from launcher.checkpoint.zero_to_fp32 import TORCH_DTYPES
from launcher.checkpoint_files.blocks import TensorFile, TensorSums
from launcher.checkpoint_files.manifest import Manifest, read_json, read_manifest
from launcher.checkpoint_files.place import Place
from launcher.sharding.layout import ParamSlot, ShardMap
from launcher.zero.marks import joined

_MAX_OPEN_FILES = 32
# Elements that are converted at a time where a file has another type than what is asked for.
_CONVERTED_NUMEL = 2**20
_DTYPE_NAMES = {dtype_name(dtype): dtype for dtype in TORCH_DTYPES.values()}


class NativeSource:
    """A committed checkpoint. Files are opened when something of them is read."""

    def __init__(self, folder: Place, manifest: Manifest | None = None) -> None:
        """folder: of one tag. manifest: of one that is not committed yet; None: the file's.

        Raises: CheckpointError where it is not a checkpoint, or is damaged.
        """
        self._folder = folder
        self.manifest = read_manifest(folder) if manifest is None else manifest
        self.unpickle: Callable[[bytes], Any] = tree.Pickled  # what reads pickles in `state`
        self._state_path = where = str(folder / self.manifest.state)
        self._facts = read_json(folder, self.manifest.state, self.manifest)
        self._layouts = layouts_from_json(self._facts.get("units"), len(self.manifest.ranks), where)
        try:
            self._map = ShardMap(self._layouts)
        except ValueError as error:
            raise CheckpointError(str(error), where=where) from None
        self._open: OrderedDict[int, TensorFile] = OrderedDict()
        self._rank_facts: dict[int, dict[str, Any]] = {}
        # What was read last of a parameter in parts, whole: key, name, type, values.
        self._whole: tuple[str, str, torch.dtype, Tensor] | None = None

    @property
    def where(self) -> str:
        return str(self._folder)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the run said of itself: stage, precision, tied names."""
        return self._facts

    @cached_property
    def state(self) -> RunState:
        with _refusing_nonsense(self._state_path):
            plain = tree.decode(self._facts["run"], self._shared_tensors(), self._state_path, self.unpickle)
            known = {each.name for each in fields(RunState)}
            return checked(RunState(**{key: value for key, value in plain.items() if key in known}))

    def _shared_tensors(self) -> dict[str, Tensor]:
        name = self._facts.get("tensors")
        if name is None:
            return {}
        sums = TensorSums.of_plain(self._facts.get("sums", {}), self._state_path)
        record = self.manifest.files[name]  # only files of the manifest are opened: their names have been checked
        with TensorFile(self._folder / name, sums, record.num_bytes) as file:
            return {key: _whole(file, key) for key in file.entries}

    @cached_property
    def params(self) -> Mapping[str, StoredParam]:
        with _refusing_nonsense(self._state_path):
            missing, params = set(self._facts.get("excluded", ())), self._facts["params"]
            names = {slot.name: None for layout in self._layouts for slot in layout.slots if slot.name not in missing}
            return {name: _stored(self._map.slot_of(name), params.get(name, {})) for name in names}

    def read(self, key: str, name: str, start: int, out: Tensor) -> None:
        split = self.params[name].split
        if split is None or split.is_in_order:
            self.read_stored(key, name, start, out)
            return
        if self._whole is None or self._whole[:3] != (key, name, out.dtype):
            stored = torch.empty(self.params[name].numel, dtype=out.dtype)
            self.read_stored(key, name, 0, stored)
            self._whole = key, name, out.dtype, joined(stored, split).view(-1)
        out.copy_(self._whole[3][start : start + out.numel()])

    def read_stored(self, key: str, name: str, start: int, out: Tensor) -> None:
        """As `read`, but elements count in the order in which they are stored: see `StoredParam.split`."""
        prefix = f"{WEIGHT}/" if key == WEIGHT else f"state/{key}/"
        place = 0
        for found in self._map.shards_of(name, start, start + out.numel()):
            file = self._file(found.rank)
            layout, slot = self._layouts[found.unit], self._map.slot_of(name, found.unit)
            owned = layout.chunk_range(layout.chunk_of(found.rank))
            first = slot.first_element + slot.within(owned).start  # that the file has of the parameter
            part = out[place : place + found.numel]
            _read_part(file, prefix + name, start + place - first, part)
            place += found.numel

    def read_whole(self, state: str, name: str, elements: range) -> Tensor | None:
        """Return a state that is not by element; None where no rank had one for just these elements."""
        found = self._map.shards_of(name, elements.start, elements.start + 1)
        if not found:
            return None
        file, key = self._file(found[0].rank), f"whole/{state}/{name}"
        with _refusing_nonsense(str(self._folder / self.manifest.ranks[found[0].rank][0])):
            ranges = json.loads(file.metadata["ranges"])
        return _whole(file, key) if ranges.get(key) == [elements.start, elements.stop] else None

    def whole_states(self, name: str) -> list[str]:
        """Return the names of states that are not by element."""
        return list(self._facts["params"].get(name, {}).get("whole", {}))

    def private(self, rank: int, world_size: int) -> dict[str, Any]:
        with _refusing_nonsense(self._state_path):
            saved_by = self._facts.get("writers", [])
            writer = saved_by.index(rank) if rank in saved_by else 0
            file = self._file(writer)
        where = str(self._folder / self.manifest.ranks[writer][1])
        with _refusing_nonsense(where):
            prefix = "private/"
            tensors = {key.removeprefix(prefix): _whole(file, key) for key in file.entries if key.startswith(prefix)}
            plain: dict[str, Any] = tree.decode(self._rank_facts[writer]["private"], tensors, where)
            if not all(isinstance(plain.get(key) or {}, dict) for key in ("rng", "data", "of_world")):
                raise TypeError("what a rank has of its own is not a dict")
            if rank not in saved_by:
                # A further rank: its random numbers are its own, the position in the data is that of all.
                return {"data": plain.get("data")}
            if world_size != self.manifest.world_size:
                plain.pop("of_world", None)
            return plain

    def _file(self, writer: int) -> TensorFile:
        if writer in self._open:
            self._open.move_to_end(writer)
            return self._open[writer]
        tensors_name, facts_name = self.manifest.ranks[writer]
        if self.manifest.is_node_local and not (self._folder / facts_name).exists():
            raise CheckpointError(
                "another host has it: it was saved with use_node_local_storage",
                where=str(self._folder / facts_name),
                hint="copy the files of all hosts into one folder",
            )
        facts = read_json(self._folder, facts_name, self.manifest)
        where = str(self._folder / facts_name)
        with _refusing_nonsense(where):
            sums = TensorSums.of_plain(facts.get("sums", {}), where)
        self._rank_facts[writer] = facts
        file = TensorFile(self._folder / tensors_name, sums, self.manifest.files[tensors_name].num_bytes)
        self._open[writer] = file
        if len(self._open) > _MAX_OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return file

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for file in self._open.values():
                stack.callback(file.close)
        self._open.clear()


def _read_part(file: TensorFile, key: str, first: int, out: Tensor) -> None:
    """Read elements of a 1-D tensor, from `first` on, in the type of `out`."""
    dtype = TORCH_DTYPES[file.entry(key).dtype]
    size = dtype.itemsize
    if dtype == out.dtype and out.is_contiguous():
        file.read_into(key, first * size, bytes_of(out))
        return
    for start in range(0, out.numel(), _CONVERTED_NUMEL):
        part = out[start : start + _CONVERTED_NUMEL]
        read = torch.empty(part.numel(), dtype=dtype)
        file.read_into(key, (first + start) * size, bytes_of(read))
        part.copy_(read)


def _whole(file: TensorFile, key: str) -> Tensor:
    entry = file.entry(key)
    found = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
    file.read_into(key, 0, bytes_of(found))
    return found


def _stored(slot: ParamSlot, facts: Mapping[str, Any]) -> StoredParam:
    """Return what is known of a parameter. facts: of its states."""
    states, scalars = facts.get("states", {}), facts.get("scalars", {})
    unknown = [dtype for dtype in (slot.param.dtype, *states.values()) if dtype not in _DTYPE_NAMES]
    if unknown:
        raise ValueError(f"{slot.name} is of no type that there is: {unknown[0]!r:.80}")
    found = {state: _scalar(value) for state, value in scalars.items()}
    group, split = slot.group if slot.param.is_trainable else None, slot.param.split
    shape = slot.shape if split is None else split.shape
    return StoredParam(shape, slot.param.dtype, slot.param.is_trainable, group, dict(states), found, split)


def _scalar(plain: Any) -> Any:
    if isinstance(plain, dict):
        return torch.tensor(plain["value"], dtype=_DTYPE_NAMES[plain["dtype"]])
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    raise TypeError("a state of one value has several")


@contextlib.contextmanager
def _refusing_nonsense(where: str) -> Iterator[None]:
    """Have what a file says that no save writes, though its checksum fits, end in an error that names the file."""
    try:
        yield
    except DAMAGE as error:
        said = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"no save writes this: {said[:200]}", where=where, hint="load another one") from None
