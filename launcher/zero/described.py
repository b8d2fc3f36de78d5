"""What scripts for DeepSpeed read, call and write on a parameter of stage 3: `ds_id`, `ds_tensor`, `all_gather()`."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.comm.torch_internals import as_plain_tensors
from launcher.sharding.layout import ParamSlot
from launcher.zero.parameters import UnitParameters, ZeroParamStatus, own_part, unit_params_of, written_by
from launcher.zero.states import ParameterState

_param_ids = itertools.count()


class OwnPart(Tensor):
    """`param.ds_tensor`: what this rank owns of a parameter, 1-D. A write changes the parameter, or is an error.

    `ds_tensor.data = value` is such a write, too, and `ds_tensor.data` is the part itself.
    """

    unit: UnitParameters
    slot: ParamSlot

    @property
    def data(self) -> Tensor:
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.numel() != self.numel():
            raise EngineError(
                f"ds_tensor of {self.slot.name} has {self.numel()} elements on this rank, the value {value.numel()}"
            )
        self.copy_(value.reshape(-1))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for each in (*args, *kwargs.values()):
            if isinstance(each, OwnPart):
                each.unit.offloaded.check_values()
        parts = [each for each in written_by(func, args, kwargs) if isinstance(each, OwnPart)]
        for part in parts:
            _check_write(part)
        with as_plain_tensors():
            if not parts:
                return func(*args, **kwargs)
            with torch.no_grad():
                result = func(*args, **kwargs)
        for part in parts:
            part.unit.note_own_write(part.slot)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        with as_plain_tensors():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


def describe(unit: UnitParameters) -> None:
    """Give the parameters of a unit the attributes and methods that DeepSpeed's have."""
    for slot, param in unit.slots():
        part = own_part(unit, slot).as_subclass(OwnPart)
        part.unit, part.slot = unit, slot
        facts = {
            "ds_id": getattr(param, "ds_id", None),
            "ds_shape": torch.Size(slot.shape),
            "ds_numel": slot.numel,
            "ds_tensor": part,
            "ds_persist": not unit.is_sharded,
            "ds_status": _status(unit),
            "partition_numel": functools.partial(_numel, part),
            "ds_summary": functools.partial(_summary, weakref.ref(param), slot.name),
            "all_gather": functools.partial(_all_gather, weakref.ref(param)),
            "partition": functools.partial(_partition, weakref.ref(param)),
        }
        if facts["ds_id"] is None:
            facts["ds_id"] = next(_param_ids)
        for name, value in facts.items():
            setattr(param, name, value)


def _status(unit: UnitParameters) -> ZeroParamStatus:
    """Return where the parameters are; a whole one on its way is there for whoever reads it."""
    if not unit.is_sharded or unit.state is ParameterState.UNSHARDED:
        return ZeroParamStatus.AVAILABLE
    return ZeroParamStatus.INFLIGHT if unit.state is ParameterState.GATHERING else ZeroParamStatus.NOT_AVAILABLE


def _check_write(part: OwnPart) -> None:
    """Raise EngineError where a write into this rank's part of a parameter would not count."""
    unit = part.unit
    unit.check_thread()
    reason = None
    if part.is_meta:
        reason = "the parameter is on disk"
    elif unit.is_sharded and unit.state is not ParameterState.SHARDED:
        reason = "the parameter is whole now, and is read from there"
    elif not unit.is_sharded and len(unit.owned) < unit.flat.numel():
        reason = "the parameter stays whole on every rank"
    elif unit.pending is not None and not unit.pending.is_written_back:
        reason = "an update that will overwrite it is under way"
    if reason is not None:
        raise EngineError(
            f"ds_tensor of {part.slot.name or 'a parameter'} was written, where {reason}",
            hint="write param.data on every rank within launcher.zero.GatheredParameters(params, modifier_rank=0)",
        )


@dataclass(frozen=True)
class Gathering:
    """What `param.all_gather(async_op=True)` has begun."""

    units: Sequence[UnitParameters]

    def wait(self) -> None:
        """Wait until the parameters are whole."""
        for unit in self.units:
            unit.wait()


def _numel(part: Tensor) -> int:
    """Return how many elements of the parameter this rank keeps."""
    return part.numel()


def _summary(find_param: weakref.ref[Any], name: str, use_debug_name: bool = False) -> dict[str, Any]:
    """Return the facts of a parameter by DeepSpeed's names, for a log. use_debug_name: "id" is its name."""
    param = find_param()
    assert param is not None
    return {
        "id": name if use_debug_name else param.ds_id,
        "status": param.ds_status.name,
        "numel": param.numel(),
        "ds_numel": param.ds_numel,
        "shape": tuple(param.shape),
        "ds_shape": tuple(param.ds_shape),
        "requires_grad": param.requires_grad,
        "grad_shape": None if param.grad is None else tuple(param.grad.shape),
        "persist": param.ds_persist,
        "ds_tensor.shape": param.ds_tensor.shape,
    }


def _all_gather(
    find_param: weakref.ref[nn.Parameter],
    param_list: Iterable[nn.Parameter] | None = None,
    async_op: bool = False,
    hierarchy: int = 0,
) -> Gathering | None:
    """Make parameters whole until `partition()`. Every rank must call it. hierarchy: of DeepSpeed's signature."""
    units = [unit for unit in _units(find_param, param_list) if not unit.is_gathered_by_hand]
    for unit in units:
        unit.start_block()
        unit.is_gathered_by_hand = True
    gathering = Gathering(units)
    if async_op:
        return gathering
    gathering.wait()
    return None


def _partition(
    find_param: weakref.ref[nn.Parameter],
    param_list: Iterable[nn.Parameter] | None = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
) -> None:
    """Shard again what `all_gather()` has made whole. has_been_updated: keep what this rank has written to its part."""
    for unit in _units(find_param, param_list):
        if unit.is_gathered_by_hand:
            unit.wait()
            if has_been_updated:
                unit.refresh(keeps_bits=True)
            unit.is_gathered_by_hand = False
            unit.end_block()


def _units(find_param: weakref.ref[nn.Parameter], params: Iterable[nn.Parameter] | None) -> list[UnitParameters]:
    """Return the units of parameters, in one order on all ranks."""
    found = {unit_params_of(param) for param in ([find_param()] if params is None else params) if param is not None}
    return sorted((unit for unit in found if unit is not None), key=lambda unit: unit.number)
