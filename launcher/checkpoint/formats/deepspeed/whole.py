"""Parameters as a run without ZeRO (stage 0) saves them: whole, the optimizer's in an order but without names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from launcher.checkpoint.formats.deepspeed.files import (
    Contents,
    Files,
    Found,
    Place,
    States,
    in_one,
    states_of,
)
from launcher.checkpoint.formats.source import WEIGHT, StoredParam
from launcher.checkpoint.formats.torch_file import load, read
from launcher.checkpoint.values.tree import dtype_name


@dataclass(frozen=True)
class _Sequence:
    """The parameters of one optimizer group, one behind another and without names.

    size: how many positions a weight takes. fits: whether it may be what is at a position. place: of what is there.
    """

    length: int
    size: Callable[[Tensor], int]
    fits: Callable[[int, Tensor], bool]
    place: Callable[[int, Tensor], tuple[Place, States]]


def read_whole(files: Files) -> Contents:
    """Return what a checkpoint of stage 0 holds.

    Raises: CheckpointError where the optimizer's states cannot be told to belong to one parameter each.
    """
    model = files.model()
    weights, tied = _weights(model)
    optimizer = model.get("optimizer")
    if optimizer is None:
        params = {name: in_one(weight, is_trainable=True) for name, weight in weights.items()}
        return Contents(params, [], tied)
    inner = optimizer.get("optimizer_state_dict", optimizer)
    groups: list[Mapping[str, Any]] = inner["param_groups"]
    sequences = _sequences(optimizer, inner, groups)
    taken = _matched(files, weights, sequences)
    params = {}
    for name, weight in weights.items():
        if name not in taken:
            params[name] = in_one(weight, is_trainable=False)
            continue
        index, at = taken[name]
        place, states = sequences[index].place(at, weight)
        shape, dtype = tuple(weight.shape), dtype_name(weight.dtype)
        stored = StoredParam(shape, dtype, True, index, states.by_element, states.scalars)
        params[name] = Found(stored, place)
    return Contents(_without_steps_frozen(params), groups, tied, optimizer)


def _weights(model: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the parameters, those that share memory under the first of their names, and the other names of these."""
    found: dict[str, Tensor] = {}
    first: dict[Any, str] = {}
    tied = {}
    for name, weight in model["module"].items():
        if name in model["buffer_names"] or not isinstance(weight, Tensor):
            continue
        memory = (weight.data_ptr(), weight.dtype, weight.shape, weight.stride())
        if weight.numel() and first.setdefault(memory, name) != name:
            tied[name] = first[memory]
        else:
            found[name] = weight
    return found, tied


def _without_steps_frozen(params: dict[str, Found]) -> dict[str, Found]:
    """Take for frozen what the optimizer has no state of although it has of others."""
    if not any(found.stored.states for found in params.values()):
        return params
    return {name: found if found.stored.states else _frozen(found) for name, found in params.items()}


def _frozen(found: Found) -> Found:
    return replace(found, stored=replace(found.stored, is_trainable=False, group=None))


def _sequences(
    optimizer: Mapping[str, Any], inner: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[_Sequence]:
    states = [[inner["state"].get(number, {}) for number in group["params"]] for group in groups]
    if "fp32_groups_flat" in optimizer:
        flats = zip(optimizer["fp32_groups_flat"], states, groups, strict=True)
        return [_flat(flat, state[0] if state else {}, group) for flat, state, group in flats]
    masters = optimizer.get("fp32_groups") or [[None] * len(of_group) for of_group in states]
    return [_listed(*of_group) for of_group in zip(masters, states, groups, strict=True)]


def _flat(flat: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> _Sequence:
    """A fused optimizer's group: one tensor. Weights are 16-bit copies of its parts, by which they are found."""
    states = states_of(state, flat.numel(), group)

    def fits(at: int, weight: Tensor) -> bool:
        return at + weight.numel() <= flat.numel() and _is_copy(flat, at, weight)

    def place(at: int, weight: Tensor) -> tuple[Place, States]:
        return Place(lambda key, _: flat if key == WEIGHT else state[key], max(1, weight.numel()), base=at), states

    return _Sequence(flat.numel(), lambda weight: weight.numel(), fits, place)


def _listed(
    masters: Sequence[Tensor | None], states: Sequence[Mapping[str, Any]], group: Mapping[str, Any]
) -> _Sequence:
    """Any other optimizer's group: a tensor of each parameter, with states, and fp32 masters in a 16-bit run."""

    def fits(at: int, weight: Tensor) -> bool:
        tensors = (masters[at], *states[at].values()) if at < len(states) else ()
        shape = next((each.shape for each in tensors if isinstance(each, Tensor) and each.shape), weight.shape)
        master = masters[at] if at < len(states) else None
        return at < len(states) and shape == weight.shape and (master is None or _is_copy(master, 0, weight))

    def place(at: int, weight: Tensor) -> tuple[Place, States]:
        master = masters[at]
        tensors = {WEIGHT: weight if master is None else master, **states[at]}
        numel = weight.numel()
        return Place(lambda key, _: tensors[key], max(1, numel)), states_of(states[at], numel, group)

    return _Sequence(len(states), lambda _: 1, fits, place)


def _is_copy(master: Tensor, at: int, weight: Tensor) -> bool:
    """Whether a weight is what rounding a part of a master gives, as it is after every step."""
    rounded = torch.empty(weight.numel(), dtype=weight.dtype)
    read(master, at, rounded)
    return bool(torch.equal(rounded, load(weight).view(-1)))


def _matched(files: Files, weights: Mapping[str, Tensor], sequences: Sequence[_Sequence]) -> dict[str, tuple[int, int]]:
    """Return name -> group and position of each parameter that the optimizer has.

    Both sides are in the model's order, in which the groups interleave. Raises: CheckpointError unless there is
    exactly one way to fit them together.
    """
    ends = tuple(sequence.length for sequence in sequences)
    left = sum(sequences[0].size(weight) for weight in weights.values()) if sequences else 0
    ways: dict[tuple[int, ...], _Ways] = {(0,) * len(sequences): _Ways(1)}  # positions -> ways so far
    for name, weight in weights.items():
        left -= sequences[0].size(weight) if sequences else 0
        following: dict[tuple[int, ...], _Ways] = {}
        for positions, way in ways.items():
            steps = [(positions, way.last)]  # without this one: it is frozen
            for index, sequence in enumerate(sequences):
                at = positions[index]
                if weight.numel() and sequence.fits(at, weight):
                    moved = (*positions[:index], at + sequence.size(weight), *positions[index + 1 :])
                    steps.append((moved, (way.last, name, (index, at))))
            for moved, last in steps:
                if sum(ends) - sum(moved) <= left:  # what follows can fill the rest
                    following.setdefault(moved, _Ways(0, last)).number += way.number
        ways = following
    found = ways.get(ends, _Ways(0))
    if found.number != 1:
        what = "the parameters in more than one way" if found.number else "no parameters of the model"
        raise files.error(
            f"stage 0 saves optimizer states without names, and they fit {what}",
            "save it at stage 1, which has names",
        )
    taken, last = {}, found.last
    while last is not None:
        last, name, place = last
        taken[name] = place
    return taken


@dataclass
class _Ways:
    """How many ways lead to some positions, and the last step of one of them."""

    number: int
    last: Any = None
