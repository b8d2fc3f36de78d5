"""The layouts of units as JSON: which rank's file has which elements of which parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from launcher.base.errors import CheckpointError
from launcher.sharding.layout import ParamInfo, ParamSlot, TensorSplit, UnitLayout

_MAX_NUMEL = 2**63


def layouts_to_json(layouts: Sequence[UnitLayout]) -> list[dict[str, Any]]:
    """Return layouts as plain data."""
    return [
        {
            "world_size": layout.world_size,
            "first_rank": layout.first_rank,
            **({} if layout.rank_step == 1 else {"rank_step": layout.rank_step}),
            "padded_numel": layout.padded_numel,
            "params": [
                {
                    "name": slot.name,
                    "shape": list(slot.shape),
                    "dtype": slot.param.dtype,
                    "is_trainable": slot.param.is_trainable,
                    "group": slot.param.group,
                    **({} if slot.param.split is None else {"split": asdict(slot.param.split)}),
                }
                for slot in layout.slots
            ],
        }
        for layout in layouts
    ]


def layouts_from_json(plain: Any, num_writers: int, where: str) -> list[UnitLayout]:
    """Return the layouts that `layouts_to_json` was given. Raises: CheckpointError for anything else."""
    try:
        layouts = [_layout(each, num_writers) for each in plain]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the layout of its units cannot be read ({error})", where=where) from None
    return layouts


def _layout(plain: Mapping[str, Any], num_writers: int) -> UnitLayout:
    slots, offset = [], 0
    for index, param in enumerate(plain["params"]):
        shape = tuple(param["shape"])
        if not all(type(size) is int and 0 <= size < _MAX_NUMEL for size in shape):
            raise ValueError(f"{param['name']} has no shape")
        info = ParamInfo(
            str(param["name"]),
            shape,
            str(param["dtype"]),
            bool(param["is_trainable"]),
            int(param["group"]),
            _split(param.get("split"), shape),
        )
        slots.append(ParamSlot(index, offset, info))
        offset += info.numel
    world_size, padded_numel = plain["world_size"], plain["padded_numel"]
    first_rank, rank_step = plain.get("first_rank", 0), plain.get("rank_step", 1)
    is_right = all(type(number) is int for number in (world_size, padded_numel, first_rank, rank_step))
    is_right = is_right and offset <= padded_numel < _MAX_NUMEL and world_size > 0 and rank_step > 0
    # Ranks with other parts of the model are as many; those between two with the same experts have other experts.
    is_right = is_right and num_writers % (world_size * rank_step) == 0
    if not slots or not is_right or padded_numel % world_size:
        raise ValueError("a unit that no rank could have had")
    part, place = divmod(first_rank, world_size * rank_step)
    if not 0 <= part < num_writers // (world_size * rank_step) or place >= rank_step:
        raise ValueError("a unit that no rank could have had")
    return UnitLayout(tuple(slots), world_size, padded_numel, first_rank, rank_step)


def _split(plain: Mapping[str, Any] | None, local_shape: tuple[int, ...]) -> TensorSplit | None:
    if plain is None:
        return None
    split = TensorSplit(tuple(plain["shape"]), plain["dim"], plain["index"], plain["count"], tuple(plain["blocks"]))
    if not split.is_known or split.local_shape != local_shape:
        raise ValueError("a part of a parameter that no rank could have had")
    return split
