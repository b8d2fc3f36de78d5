"""The hooks that tie units to autograd and to the modules' forward: a guard and a verb, nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Callable, ItemsView, Iterable, ValuesView
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from launcher.zero.compiled import outside_graphs
from launcher.zero.reducer import GradientReducer
from launcher.zero.schedule import ParameterSchedule
from launcher.zero.stages import ParameterPolicy
from launcher.zero.tensors import tensors_in
from launcher.zero.unit import FlatUnit


def install_hooks(
    model: nn.Module, units: list[FlatUnit], reducer: GradientReducer | None, schedule: ParameterSchedule
) -> list[RemovableHandle]:
    """Let gradients flow into the units, and let the modules that read a unit's parameters find them there.

    reducer: None for a model that is not trained. Returns handles that undo the hooks of modules and gradients.
    """
    handles: list[RemovableHandle] = []
    readers: dict[nn.Module, list[FlatUnit]] = {model: []}
    for unit in units:
        for anchor in unit.members.anchors:
            readers.setdefault(anchor, []).append(unit)
        if unit.grads is not None and reducer is not None:
            for index, param in enumerate(unit.members.params):
                hook = _gradient_hook(reducer, schedule, unit, index)
                handles.append(param.register_post_accumulate_grad_hook(hook))
    for module, read in readers.items():
        reader = _Reader(schedule, read)
        handles.append(module.register_forward_pre_hook(reader.before_forward, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(reader.after_forward, always_call=True))
    _watch_accesses(model, units, schedule, readers[model])
    return handles


def _gradient_hook(
    reducer: GradientReducer, schedule: ParameterSchedule, unit: FlatUnit, index: int
) -> Callable[[Tensor], None]:
    # Python's garbage collector does not look into a tensor's hooks: an engine held from there would stay for ever.
    find_reducer, find_schedule, find_unit = weakref.ref(reducer), weakref.ref(schedule), weakref.ref(unit)

    def on_gradient(_param: Tensor) -> None:
        reducer, schedule, unit = find_reducer(), find_schedule(), find_unit()
        if reducer is None or schedule is None or unit is None or unit.grads is None:
            return  # the engine has gone, the model is its user's
        reducer.take_gradient(unit.grads, index)
        if unit.grads.is_done_in_graph:
            schedule.after_gradients(unit)

    return on_gradient


class _Reader:
    """The hooks of one module whose forward reads units."""

    def __init__(self, schedule: ParameterSchedule, units: list[FlatUnit]) -> None:
        self._schedule = schedule
        self._units = units

    def __reduce__(self) -> tuple[Any, ...]:
        return (_idle_reader, ())  # a copy of the model belongs to no engine

    @outside_graphs
    def before_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._schedule.before_forward(self._units)
        frozen = [unit for unit in self._units if unit.is_sharded and unit.grads is None]
        if frozen and torch.is_grad_enabled():
            inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
            if inputs:  # no gradient arrives in a frozen unit: those of the module's inputs say that it is done
                register_multi_grad_hook(inputs, lambda _grads: self._after_backward(frozen))

    @outside_graphs
    def after_forward(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        read = [unit for unit in self._schedule.after_forward(self._units) if unit.is_sharded]
        if not read or not torch.is_grad_enabled():
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _grad: self._schedule.before_backward(read))

    @outside_graphs
    def _after_backward(self, frozen: list[FlatUnit]) -> None:
        for unit in frozen:
            self._schedule.after_gradients(unit)


def _idle_reader() -> _Reader:
    return _Reader(ParameterSchedule([], ParameterPolicy()), [])


# ---- parameters read outside of their modules' forward ----


class _WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's `_parameters` that sees to it that what is asked for is there.

    A forward such as `F.linear(x, self.embedding.weight)` reads a parameter without calling its module. `state_dict()`,
    `parameters()` and copies list all parameters, right after a step too, when updates are still being gathered.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter | None],
        on_access: Callable[[nn.Parameter], None],
        on_listing: Callable[[Iterable[nn.Parameter | None]], None],
    ) -> None:
        super().__init__(params)
        self._on_access = on_access
        self._on_listing = on_listing

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None:
            self._on_access(param)
        return param

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]  # dict_values is no public class
        self._on_listing(super().values())
        return super().values()

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        self._on_listing(super().values())
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self.items()),))  # a copy of the model belongs to no engine


def _watch_accesses(
    model: nn.Module, units: list[FlatUnit], schedule: ParameterSchedule, read_by_root: list[FlatUnit]
) -> None:
    unit_of = {param: unit for unit in units for param in unit.members.params}

    def on_access(param: nn.Parameter) -> None:
        unit = unit_of.get(param)
        # From the next pass on the whole model's forward holds what was read outside of its module.
        if unit is not None and schedule.on_access(unit) and unit not in read_by_root:
            read_by_root.append(unit)

    def on_listing(params: Iterable[nn.Parameter | None]) -> None:
        # Whole parameters only: reading shards is a collective, and this rank may be the only one that lists.
        for unit in {unit_of[param] for param in params if param in unit_of}:
            if not unit.is_sharded:
                unit.params.wait()

    for module in model.modules():
        if any(param in unit_of for param in module._parameters.values() if param is not None):
            module._parameters = _WatchedParameters(module._parameters, on_access, on_listing)
