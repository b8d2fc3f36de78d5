"""The layouts of units as JSON: which rank's file has which elements of which parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.base.errors import CheckpointError
from launcher.sharding.layout import ParamSlot, UnitLayout
from launcher.sharding.tensors import ParamInfo

_MAX_NUMEL = 2**63


def layouts_to_json(layouts: Sequence[UnitLayout]) -> list[dict[str, Any]]:
    """Return layouts as plain data."""
    return [
        {
            "world_size": layout.world_size,
            "padded_numel": layout.padded_numel,
            "params": [
                {
                    "name": slot.name,
                    "shape": list(slot.shape),
                    "dtype": slot.param.dtype,
                    "is_trainable": slot.param.is_trainable,
                    "group": slot.param.group,
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
            str(param["name"]), shape, str(param["dtype"]), bool(param["is_trainable"]), int(param["group"])
        )
        slots.append(ParamSlot(index, offset, info))
        offset += info.numel
    world_size, padded_numel = plain["world_size"], plain["padded_numel"]
    is_right = type(padded_numel) is int and offset <= padded_numel < _MAX_NUMEL and world_size == num_writers
    if not slots or not is_right or padded_numel % world_size:
        raise ValueError("a unit that no rank could have had")
    return UnitLayout(tuple(slots), world_size, padded_numel)
