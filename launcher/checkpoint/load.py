"""Loading: each rank reads the elements it holds, and the parameters follow.

[Note: a rank that cannot read] The parameters of units are gathered together, except those that every rank reads
whole. A rank that meets a damaged file therefore continues with what is left to gather, and says at the end what it
met: then all ranks raise the same error.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import CheckpointError
from launcher.checkpoint.exchange import Exchange, error_text
from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint.formats.source import UNKNOWN_OPTIMIZER, WEIGHT, CheckpointSource, StoredParam
from launcher.optim.api import FlatOptimizer, ParamShard
from launcher.parallel.expert.placement import remote_expert_names
from launcher.sharding.layout import ParamInfo
from launcher.zero.marks import slice_of
from launcher.zero.parameters import full_shape, param_info, unit_params_of
from launcher.zero.unit import FlatUnit

READ_TIMEOUT_S = 6 * 3600.0
_MAX_NAMES = 8


@dataclass(frozen=True)
class Target:
    """What a checkpoint is read into."""

    module: nn.Module
    units: Sequence[FlatUnit]
    optimizer: FlatOptimizer | None  # None: no states are loaded
    loads_weights: bool = True
    names_of_others: frozenset[str] = frozenset()  # of parameters and buffers that other stages of a pipeline load


def load_parameters(source: CheckpointSource, target: Target, exchange: Exchange, *, is_strict: bool) -> None:
    """Read parameters and, where `target` has an optimizer, states. Collective.

    is_strict: every parameter of the model must be there; else those that are not keep their values. Raises:
    CheckpointError on every rank for what is missing, has another shape, or cannot be read by any of them.
    """
    error = exchange.all_succeeded(_misfit(source, target, is_strict=is_strict), timeout_s=READ_TIMEOUT_S)
    if error:
        raise CheckpointError(error, where=source.where)
    is_near = _have_one_folder(exchange, source) and "://" not in source.where
    problem: str | None = None
    for unit in target.units:
        # Of every unit: other ranks gather with this one.
        failed = _tried(source, unit, target, reads_whole=is_near and _is_its_own_master(unit))
        problem = problem or failed
    if target.loads_weights:
        problem = problem or _load_others(source, target.module)
    error = exchange.all_succeeded(problem, timeout_s=READ_TIMEOUT_S)
    if error:
        raise CheckpointError(
            error,
            where=source.where,
            hint="the model has values of two moments now, maybe others on each rank: load another one before a step",
        )


def _have_one_folder(exchange: Exchange, source: CheckpointSource) -> bool:
    """Return whether all ranks run on one host and find all files there, alike on every rank. Collective."""
    is_node_local = isinstance(source, NativeSource) and source.manifest.is_node_local
    folders = exchange.gather(
        f"{socket.gethostname()} {source.where if is_node_local else ''}", timeout_s=READ_TIMEOUT_S
    )
    return bool(exchange.broadcast(folders is not None and len(set(folders)) == 1, timeout_s=READ_TIMEOUT_S))


def _is_its_own_master(unit: FlatUnit) -> bool:
    """Return whether a CPU rank has all parameters of a unit, and updates them in place: in fp32, below stage 3."""
    params = unit.params
    return not params.is_sharded and params.master is params.shard and params.flat.device.type == "cpu"


def _tried(source: CheckpointSource, unit: FlatUnit, target: Target, *, reads_whole: bool) -> str | None:
    """Load a unit, and have its parameters follow even where that fails. Returns what went wrong.

    reads_whole: every rank reads all weights of the unit, instead of its part and then the others' from these ranks.
    Ranks of one host do where they can: the page cache is quicker than a socket.
    """
    problem: str | None = None
    is_trained = unit.grads is not None and target.optimizer is not None
    unit.params.release()
    has_gathered = reads_whole
    try:
        with unit.with_new_states() if is_trained else unit.readable(writes=True):
            problem = _read_unit(source, unit, target, is_trained=is_trained, reads_whole=reads_whole)
            if not reads_whole:
                has_gathered = True
                unit.write_back(is_written=False, overlaps=True)  # gathered while the next unit is read
    except Exception as error:  # noqa: BLE001  # a disk, when the unit comes in or goes out: the others gather all the same
        problem = problem or error_text(error)
    if not has_gathered:
        unit.params.gather_unwritten()
    unit.params.after_load()
    return problem


def _read_unit(
    source: CheckpointSource, unit: FlatUnit, target: Target, *, is_trained: bool, reads_whole: bool
) -> str | None:
    """Read what a rank holds of a unit, whose master and states are in memory. Returns what went wrong."""
    try:
        if target.loads_weights:
            _load_weights(source, unit, reads_whole=reads_whole)
        if target.optimizer is not None and is_trained:
            optimizer = target.optimizer
            infos = {slot.name: slot.param for slot in unit.layout.slots}
            states = {shard.name: _state_of(source, shard, optimizer, infos) for shard in unit.shards if shard.owned}
            optimizer.load_unit(unit.index, states)
    except Exception as error:  # noqa: BLE001  # whatever it is: the other ranks gather with this one
        if unit.swap is not None and is_trained:
            _forget_states(unit, target)
        return error_text(error)
    return None


def _forget_states(unit: FlatUnit, target: Target) -> None:
    """Have the optimizer begin anew: the states of before are gone from the disk, and have no memory to be written."""
    assert target.optimizer is not None
    target.optimizer.load_unit(unit.index, {shard.name: {} for shard in unit.shards if shard.owned})


def _load_weights(source: CheckpointSource, unit: FlatUnit, *, reads_whole: bool) -> None:
    values, held = unit.params.master, unit.owned
    if reads_whole:
        values, held = unit.params.flat, range(unit.layout.padded_numel)
    for slot, shared in unit.layout.slots_in(held):
        if slot.name not in source.params:
            continue
        place = slice(shared.start - held.start, shared.stop - held.start)
        _read(source, WEIGHT, slot.param, shared.start - slot.offset, values[place])
    unit.params.renew_copy()


def _read(source: CheckpointSource, key: str, param: ParamInfo, start: int, out: Tensor) -> None:
    """Fill a 1-D tensor on any device with elements of what this rank has of a parameter, from `start` on."""
    read = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype, device="cpu")
    split, stored = param.split, source.params[param.name].split
    if split is None:
        source.read(key, param.name, start, read)
    elif split.is_in_order and (stored is None or stored.is_in_order):
        source.read(key, param.name, split.index * split.local_numel + start, read)
    elif isinstance(source, NativeSource) and stored is not None and replace(stored, index=split.index) == split:
        source.read_stored(key, param.name, split.index * split.local_numel + start, read)
    else:  # saved in other parts: only the whole can be divided otherwise
        whole = torch.empty(split.shape, dtype=out.dtype)
        source.read(key, param.name, 0, whole.view(-1))
        read.copy_(slice_of(whole, split).view(-1)[start : start + read.numel()])
    if read is not out:
        out.copy_(read)


def _state_of(
    source: CheckpointSource, shard: ParamShard, optimizer: FlatOptimizer, infos: Mapping[str, ParamInfo]
) -> dict[str, Any]:
    """Return the state of what a rank owns of a parameter; empty where nothing is known of it. infos: by name.

    It is read into the optimizer's own memory where that is on the host and of the type that was stored: new memory
    takes longer than reading does.
    """
    stored = source.params.get(shard.name)
    if stored is None:
        return {}
    state: dict[str, Any] = dict(stored.scalars)
    for name, dtype in stored.states.items():
        values = optimizer.room_of(shard, name)
        kind = getattr(torch, dtype)
        if values is None or values.device.type != "cpu" or values.dtype != kind:
            values = torch.empty(len(shard.owned), dtype=kind)
        _read(source, name, infos[shard.name], shard.owned.start, values)
        state[name] = values
    if isinstance(source, NativeSource):
        for name in source.whole_states(shard.name):
            whole = source.read_whole(name, shard.name, shard.owned)
            if whole is None:
                raise CheckpointError(
                    f"the state {name} of {shard.name} has no value for each element: it cannot be divided otherwise",
                    where=source.where,
                    hint="load it with the ranks and the stage it was saved with, or load_optimizer_states=False",
                )
            state[name] = whole
    return state


def _load_others(source: CheckpointSource, module: nn.Module) -> str | None:
    """Load parameters that are in no unit: every rank has all of them."""
    try:
        for name, param in module.named_parameters():
            if unit_params_of(param) is None and name in source.params:
                values = torch.empty(param.numel(), dtype=param.dtype)
                _read(source, WEIGHT, param_info(name, param, param.dtype), 0, values)
                with torch.no_grad():
                    param.copy_(values.view(param.shape))
    except Exception as error:  # noqa: BLE001  # as above
        return error_text(error)
    return None


def _misfit(source: CheckpointSource, target: Target, *, is_strict: bool) -> str | None:
    """Return why the checkpoint is not of this model; None where it is."""
    try:
        stored = source.params
        shapes = {name: full_shape(param) for name, param in target.module.named_parameters()}
        known = {*shapes, *(name for name, _ in _other_tensors(target.module))}
        known |= {*target.names_of_others, *remote_expert_names(target.module)}
        missing = [name for name in shapes if name not in stored]
        unexpected = [name for name in stored if name not in known]
        if is_strict and (missing or unexpected):
            says = [_listed("the model has", missing), _listed("only the checkpoint has", unexpected)]
            return "parameters do not fit: " + "; ".join(each for each in says if each) + _STRICT
        for name, shape in shapes.items():
            is_read = target.loads_weights or target.optimizer is not None
            if is_read and name in stored and stored[name].shape != shape:
                sizes = f"{list(stored[name].shape)} in the checkpoint, {list(shape)} in the model"
                return f"{name} has the shape {sizes}; a checkpoint loads into a model of the same configuration"
        return None if target.optimizer is None else _other_optimizer(source, target.optimizer, stored)
    except Exception as error:  # noqa: BLE001  # as above
        return error_text(error)


def _other_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what some formats keep as they keep parameters: further names of tied ones, and buffers."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers()


_STRICT = "; load_module_strict=False loads what fits"


def _other_optimizer(
    source: CheckpointSource, optimizer: FlatOptimizer, stored: Mapping[str, StoredParam]
) -> str | None:
    hint = "load_optimizer_states=False loads the parameters alone"
    found, num_groups = source.state.optimizer, len(source.state.groups)
    is_same_class = found in (optimizer.name, UNKNOWN_OPTIMIZER)
    if not is_same_class or groups_for(source, optimizer) is None:
        mine = f"{optimizer.name} with {len(optimizer.param_groups)} groups"
        return f"its optimizer is {found} with {num_groups} groups, this run has {mine}; {hint}"
    new = [name for name, group in _trained(optimizer.shards) if name in stored and stored[name].group is None]
    if new:
        return f"{_listed('it has no optimizer states of', new)}, which it did not train; {hint}"
    return None


def groups_for(source: CheckpointSource, optimizer: FlatOptimizer) -> list[dict[str, Any]] | None:
    """Return the hyper-parameters saved for each group of a run; None where its groups are others.

    Other formats have groups in another order, or no groups at all: there the parameters of a group say which it was.
    """
    saved = source.state.groups
    if isinstance(source, NativeSource):
        return saved if len(saved) == len(optimizer.param_groups) else None
    found: list[dict[str, Any] | None] = [None] * len(optimizer.param_groups)
    for name, group in _trained(optimizer.shards):
        index = source.params[name].group if name in source.params else None
        if index is None:
            continue
        if found[group] is not None and found[group] != saved[index]:
            return saved if len(saved) == len(found) else None
        found[group] = saved[index]
    return [{} if each is None else each for each in found]


def _trained(shards: Iterable[ParamShard]) -> Iterable[tuple[str, int]]:
    return ((shard.name, shard.group) for shard in shards)


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{what} {', '.join(names[:_MAX_NAMES])}{more}"
