"""Checkpoints of `torch.distributed.checkpoint`, as FSDP2's scripts and torchtitan save them, as a source to load from.

[Note: what is what in a DCP checkpoint] It is a nested state dict and says nothing of its meaning. What has
`param_groups` is the optimizer, in either of the two forms of `get_optimizer_state_dict`. The model is beside it, as
`model` or, as torchtitan has it, as the tensors that are in no other dict. Whatever else is there becomes client state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats.dcp.files import ChunkedTensor, PieceReader, read_contents
from launcher.checkpoint.formats.source import UNKNOWN_OPTIMIZER, WEIGHT, RunState, StoredParam
from launcher.checkpoint.values.tree import dtype_name
from launcher.checkpoint_files.place import Place

_Path = tuple[str | int, ...]
_MODEL_NAMES = ("model", "module", "state_dict", "model_state_dict", "model_state")
_GROUPS, _STATE = "param_groups", "state"
_EXTRA_STATE = "_extra_state"
# Larger tensors beside model and optimizer are left out of the client state: they may be a second model.
_MAX_CLIENT_NUMEL = 2**16


@dataclass
class _Optimizer:
    """The parts of an optimizer's state, by key of the checkpoint."""

    states: dict[str, dict[str, str]] = field(default_factory=dict)  # parameter -> state -> key
    groups: dict[int, dict[str, str]] = field(default_factory=dict)  # group -> option -> key
    options: dict[str, dict[str, str]] = field(default_factory=dict)  # parameter -> option -> key


class DcpSource:
    """A folder with `.metadata` and `*.distcp`. What it holds in memory is one chunk, and the small values."""

    def __init__(self, folder: Place) -> None:
        """Raises: CheckpointError where it is not such a folder, or is damaged."""
        self._folder = folder
        self._contents = read_contents(folder)
        self._reader = PieceReader(folder)
        root = self._optimizer_root()
        above = () if root is None else root[:-1]
        self._optimizer = _Optimizer() if root is None else self._read_optimizer(root)
        self._weights = self._find_model(above)
        of_optimizer = (key for key, path in self._contents.paths.items() if root is not None and _is_below(path, root))
        self._used = {*self._weights.values(), *of_optimizer}
        if not self._weights:
            raise CheckpointError(
                f"it has no model: only {', '.join(sorted({str(path[0]) for path in self._contents.paths.values()}))}",
                where=str(folder),
                hint='save it as {"model": ..., "optimizer": ...}',
            )

    @property
    def where(self) -> str:
        return str(self._folder)

    # ---- what is what ----

    def _optimizer_root(self) -> _Path | None:
        """Return the path of the dict that has `param_groups`."""
        found = dict.fromkeys(
            path[:index]
            for path in self._contents.paths.values()
            for index, part in enumerate(path)
            if index and (part == _GROUPS or str(part).startswith(f"{_GROUPS}."))
        )
        if len(found) > 1:
            names = ", ".join(".".join(map(str, path)) for path in found)
            raise CheckpointError(f"it has several optimizers ({names}); an engine has one", where=self.where)
        return next(iter(found), None)

    def _read_optimizer(self, root: _Path) -> _Optimizer:
        found = _Optimizer()
        for key, path in self._contents.paths.items():
            if not _is_below(path, root):
                continue
            first, *rest = path[len(root) :]
            if first == _GROUPS and len(rest) >= 2 and isinstance(rest[0], int):
                found.groups.setdefault(rest[0], {})[".".join(map(str, rest[1:]))] = key
                continue
            kind, _, text = ".".join(map(str, (first, *rest))).partition(".")
            name, _, last = text.rpartition(".")
            if kind in (_STATE, _GROUPS):
                (found.states if kind == _STATE else found.options).setdefault(name, {})[last] = key
        return found

    def _find_model(self, above: _Path) -> dict[str, str]:
        """Return the tensors of the model, and extra state: name -> key."""
        paths = self._contents.paths
        for name in _MODEL_NAMES:
            root = (*above, name)
            found = {".".join(map(str, path[len(root) :])): key for key, path in paths.items() if _is_below(path, root)}
            if any(key in self._contents.tensors for key in found.values()):
                return found
        return {
            str(path[-1]): key
            for key, path in paths.items()
            if len(path) == len(above) + 1
            and path[:-1] == above
            and (key in self._contents.tensors or key.endswith(_EXTRA_STATE))
        }

    # ---- a source ----

    @cached_property
    def params(self) -> Mapping[str, StoredParam]:
        """Every tensor of the model: a checkpoint of DCP does not tell parameters and buffers apart."""
        group_of = self._group_of
        found = {}
        for name, key in self._weights.items():
            tensor = self._contents.tensors.get(key)
            if tensor is None:
                continue
            states, scalars = {}, {}
            for state, state_key in self._optimizer.states.get(name, {}).items():
                stored = self._contents.tensors.get(state_key)
                if stored is not None and stored.shape:
                    states[state] = dtype_name(stored.dtype)
                else:
                    scalars[state] = self._value(state_key)
            is_trained = name in group_of or not self.state.groups
            found[name] = StoredParam(
                tensor.shape, dtype_name(tensor.dtype), is_trained, group_of.get(name), states, scalars
            )
        return found

    @property
    def _group_of(self) -> dict[str, int]:
        return {name: index for index, (_, names) in enumerate(self._groups) for name in names}

    @cached_property
    def _groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Return each group's options and parameters. Parameters with options of their own become groups of equals."""
        if self._optimizer.groups:
            found = []
            for _, keys in sorted(self._optimizer.groups.items()):
                options = {option: self._value(key) for option, key in keys.items()}
                found.append((options, [str(name) for name in options.pop("params", None) or ()]))
            return found
        groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for name, keys in self._optimizer.options.items():
            options = {option: self._value(key) for option, key in keys.items()}
            groups.setdefault(repr(sorted(options.items())), (options, []))[1].append(name)
        return list(groups.values())

    @cached_property
    def state(self) -> RunState:
        groups = [options for options, _ in self._groups]
        extra = {name: self._value(key) for name, key in self._weights.items() if name.endswith(_EXTRA_STATE)}
        client_state = self._client_state()
        steps = self._num_steps(client_state)
        return RunState(
            global_steps=steps,
            micro_steps=steps,
            optimizer=_class_of(groups[0]) if groups else None,
            groups=groups,
            client_state=client_state,
            extra_state=extra,
        )

    def _num_steps(self, client_state: Mapping[str, Any]) -> int:
        """Return how many steps the optimizer took: as torchtitan says, or as its counters have it."""
        train_state = client_state.get("train_state")
        said = train_state.get("step") if isinstance(train_state, dict) else None
        if said is None:
            keys = [states["step"] for states in self._optimizer.states.values() if "step" in states]
            said = max((int(self._value(key)) for key in keys), default=0)
        return int(said)

    def _client_state(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, path in self._contents.paths.items():
            tensor = self._contents.tensors.get(key)
            if key in self._used or (tensor is not None and math.prod(tensor.shape) > _MAX_CLIENT_NUMEL):
                continue
            try:
                value = self._value(key)
            except CheckpointError:
                continue  # a pickle of more than plain data: whoever needs it reads it with torch
            place = found
            for part in path[:-1]:
                below = place.setdefault(str(part), {})
                place = below if isinstance(below, dict) else {}
            place[str(path[-1])] = value
        return found

    def _value(self, key: str) -> Any:
        """Return a value, or all of a small tensor."""
        tensor = self._contents.tensors.get(key)
        if tensor is None:
            return self._reader.value(self._contents.values[key])
        out = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._fill(tensor, key, 0, out.view(-1))
        return out

    def read(self, key: str, name: str, start: int, out: Tensor) -> None:
        at = self._weights.get(name) if key == WEIGHT else self._optimizer.states.get(name, {}).get(key)
        weight = self._contents.tensors.get(self._weights.get(name, ""))
        tensor = self._contents.tensors.get(at or "")
        if tensor is None or weight is None:
            raise CheckpointError(f"there is no {key} of {name}", where=self.where)
        if tensor.shape != weight.shape:
            raise CheckpointError(
                f"the state {key} of {name} has the shape {list(tensor.shape)}, not one value for each element",
                where=self.where,
                hint="load_optimizer_states=False loads the parameters alone",
            )
        self._fill(tensor, f"{key} of {name}", start, out)

    def _fill(self, tensor: ChunkedTensor, what: str, start: int, out: Tensor) -> None:
        """Fill a 1-D tensor with elements of a tensor in boxes, row-major from `start` on."""
        place = 0
        for lows, sizes in boxes(tensor.shape, start, start + out.numel()):
            numel = math.prod(sizes)
            part, num_missing = out[place : place + numel].view(sizes), numel
            for chunk in tensor.chunks:
                shared = _overlap(lows, sizes, chunk.offsets, chunk.sizes)
                if shared is not None:
                    to, source = shared
                    values = self._reader.tensor(tensor, chunk)[source]
                    part[to].copy_(values)
                    num_missing -= values.numel()
            if num_missing:
                raise CheckpointError(
                    f"it does not have all elements of {what}", where=self.where, hint="the save did not end"
                )
            place += numel

    def private(self, rank: int, world_size: int) -> dict[str, Any]:
        """DCP keeps nothing of single ranks."""
        del rank, world_size
        return {}

    def close(self) -> None:
        self._reader.close()


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the elements [start, stop) of a row-major tensor as boxes, in order: lowest indices and sizes of each."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # within one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * inner)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * inner, stop)


def _in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    begin = row * math.prod(shape[1:])
    for lows, sizes in boxes(shape[1:], start - begin, stop - begin):
        yield (row, *lows), (1, *sizes)


def _overlap(
    lows: tuple[int, ...], sizes: tuple[int, ...], others: tuple[int, ...], other_sizes: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return what two boxes share, as slices of each; None where they share nothing."""
    mine, theirs = [], []
    for low, size, other, other_size in zip(lows, sizes, others, other_sizes, strict=True):
        first, last = max(low, other), min(low + size, other + other_size)
        if first >= last:
            return None
        mine.append(slice(first - low, last - low))
        theirs.append(slice(first - other, last - other))
    return tuple(mine), tuple(theirs)


def _is_below(path: _Path, root: _Path) -> bool:
    return len(path) > len(root) and path[: len(root)] == root


def _class_of(group: Mapping[str, Any]) -> str:
    """Return the optimizer's class as far as its options tell: DCP does not keep it."""
    if "decoupled_weight_decay" in group and "amsgrad" in group:
        return "AdamW" if group["decoupled_weight_decay"] else "Adam"
    return UNKNOWN_OPTIMIZER
