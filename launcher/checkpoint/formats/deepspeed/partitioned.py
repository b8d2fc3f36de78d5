"""Parameters as ZeRO stages 1, 2 and 3 save them: cut over the ranks' files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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
from launcher.checkpoint.values.tree import dtype_name

_FLAT = "single_partition_of_fp32_groups"
_FLAT_STAGE3 = "fp32_flat_groups"


def read_partitioned(files: Files) -> Contents:
    """Return what a checkpoint of stage 1, 2 or 3 holds.

    Raises: CheckpointError for one that contradicts itself.
    """
    zero, model = files.zero(0), files.model()
    count = zero.get("partition_count")
    files.expect_ranks(max(count) if isinstance(count, list) else int(count or 0))
    shapes: list[Mapping[str, Sequence[int]]] = model.get("param_shapes") or []
    flats = zero.get(_FLAT_STAGE3 if files.is_stage3 else _FLAT)
    if not isinstance(flats, list) or len(flats) != len(shapes):
        raise files.error(f"{len(shapes)} groups of parameters have {len(flats or [])} groups of fp32 weights")
    trainable = _of_stage3(files, shapes) if files.is_stage3 else _of_groups(files, shapes)
    params = {**dict(trainable), **dict(_frozen(files, {name for group in shapes for name in group}))}
    order = {name: position for position, name in enumerate(model["module"])}
    in_order = sorted(params, key=lambda name: order.get(name, len(order)))
    tied = dict(model.get("shared_params") or {})
    groups = _groups(zero, files.is_stage3)
    return Contents({name: params[name] for name in in_order}, groups, tied, zero.get("loss_scaler"))


def _of_groups(files: Files, shapes: list[Mapping[str, Sequence[int]]]) -> Iterator[tuple[str, Found]]:
    """Stages 1 and 2: a group's parameters follow one another; each rank has an equal part of the sequence."""
    zero = files.zero(0)
    groups, paddings = _groups(zero, False), zero.get("param_alignment_paddings")
    for index, of_group in enumerate(shapes):
        # Later ranks' parts may be shorter: what is missing there is padding. Only the first one's size is a rule.
        part = zero[_FLAT][index].numel()
        states = states_of(_group_state(zero, index), part, groups[index])
        gaps = paddings[index] if paddings else [0] * len(of_group)
        if len(gaps) != len(of_group) or part * files.num_ranks < sum(map(math.prod, of_group.values())) + sum(gaps):
            raise files.error(f"the fp32 weights of group {index} are fewer than its parameters have elements")
        first = 0
        for (name, shape), gap in zip(of_group.items(), gaps, strict=True):
            place = Place(_flat(files, index), max(1, part), first=first)
            yield name, Found(_stored(files, name, shape, index, states), place)
            first += math.prod(shape) + gap


def _of_stage3(files: Files, shapes: list[Mapping[str, Sequence[int]]]) -> Iterator[tuple[str, Found]]:
    """Stage 3: each rank has an equal part of every parameter; a sub group's parts follow one another."""
    zero = files.zero(0)
    # An optimizer numbers its tensors, here sub groups, through all of its groups.
    groups = _groups(zero, True)
    group_of = [index for index, group in enumerate(groups) for _ in group["params"]]
    if len(group_of) != len(shapes):
        raise files.error(f"{len(shapes)} sub groups of parameters, of which the optimizer has {len(group_of)}")
    for index, of_group in enumerate(shapes):
        parts = {name: -(-math.prod(shape) // files.num_ranks) for name, shape in of_group.items()}
        numel = zero[_FLAT_STAGE3][index].numel()
        if numel != sum(parts.values()):
            raise files.error(f"sub group {index} has {numel} fp32 weights, its parameters {sum(parts.values())}")
        group = group_of[index]
        states = states_of(_sub_group_state(zero, index), numel, groups[group])
        base = 0
        for name, shape in of_group.items():
            place = Place(_flat(files, index), max(1, parts[name]), base=base)
            yield name, Found(_stored(files, name, shape, group, states), place)
            base += parts[name]


def _frozen(files: Files, trainable: set[str]) -> Iterator[tuple[str, Found]]:
    model = files.model()
    if not files.is_stage3:
        aside = {*trainable, *model["buffer_names"], *(model.get("shared_params") or {})}
        for name, weight in model["module"].items():
            if name not in aside and isinstance(weight, Tensor):
                yield name, in_one(weight, is_trainable=False)
        return
    shapes = model.get("frozen_param_shapes") or {}
    if shapes:
        files.expect_models()
    for name, shape in shapes.items():
        part = -(-math.prod(shape) // files.num_ranks)
        yield name, Found(_stored(files, name, shape, None, States()), Place(_fragment(files, name), max(1, part)))


def _stored(files: Files, name: str, shape: Sequence[int], group: int | None, states: States) -> StoredParam:
    weight = files.model()["module"].get(name)  # at stage 3 it is empty, but has the weight's type
    dtype = dtype_name(weight.dtype) if isinstance(weight, Tensor) else "float32"
    return StoredParam(tuple(shape), dtype, group is not None, group, states.by_element, states.scalars)


def _flat(files: Files, index: int) -> Callable[[str, int], Tensor]:
    """Return what gives the tensors of a group, at stage 3 of a sub group."""
    weights, state_of = (_FLAT_STAGE3, _sub_group_state) if files.is_stage3 else (_FLAT, _group_state)

    def tensor(key: str, rank: int) -> Tensor:
        zero = files.zero(rank)
        found = zero[weights][index] if key == WEIGHT else state_of(zero, index).get(key)
        if not isinstance(found, Tensor):
            raise files.error(f"rank {rank} saved no {key} where rank 0 did: {files.zero_path(rank)}")
        return found

    return tensor


def _fragment(files: Files, name: str) -> Callable[[str, int], Tensor]:
    def tensor(_key: str, rank: int) -> Tensor:
        found: Tensor = files.model(rank)["frozen_param_fragments"][name]
        return found

    return tensor


def _group_state(zero: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    base = zero["base_optimizer_state"]
    if isinstance(base, list):  # with "elastic_checkpoint"
        step = zero.get("base_optimizer_state_step")
        return base[index] if step is None else {"step": step, **base[index]}
    numbers = base["param_groups"][index]["params"]
    state: Mapping[str, Any] = base["state"].get(numbers[0], {}) if numbers else {}
    return state


def _sub_group_state(zero: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    inner = zero["optimizer_state_dict"]
    numbers = [number for group in inner["param_groups"] for number in group["params"]]
    state: Mapping[str, Any] = inner["state"].get(numbers[index], {})
    return state


def _groups(zero: Mapping[str, Any], is_stage3: bool) -> list[Mapping[str, Any]]:
    base = zero["optimizer_state_dict" if is_stage3 else "base_optimizer_state"]
    return [{} for _ in base] if isinstance(base, list) else base["param_groups"]
