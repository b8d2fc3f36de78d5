"""The hooks that tie units to autograd and to the modules' forward: a guard and a verb, nothing else."""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, ItemsView, Iterable, Mapping, Sequence, ValuesView
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.comm.groups import is_first_rank
from launcher.comm.torch_internals import hooks_around, is_in_transform, outside_graphs, tree_map_only
from launcher.config.policies import ParameterPolicy
from launcher.zero.reducer import GradientReducer
from launcher.zero.schedule import ParameterSchedule, Use
from launcher.zero.states import ParameterState
from launcher.zero.tensors import tensors_in
from launcher.zero.unit import FlatUnit, unit_of


class InstalledHooks:
    """Everything that ties units to one model."""

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []
        self.watched: list[weakref.ref[nn.Module]] = []  # modules whose `_parameters` are watched

    def remove(self) -> None:
        """Leave the model as if there had been no units; parameters are as they are."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for reference in self.watched:
            module = reference()
            if module is not None and isinstance(module._parameters, _WatchedParameters):
                module._parameters = dict(dict.items(module._parameters))
        self.watched.clear()


def install_hooks(
    model: nn.Module, units: list[FlatUnit], reducer: GradientReducer | None, schedule: ParameterSchedule
) -> InstalledHooks:
    """Let gradients flow into the units, and let the modules that read a unit's parameters find them there.

    reducer: None for a model that is not trained.
    """
    installed = InstalledHooks()
    handles = installed.handles
    units_of: dict[nn.Module, list[FlatUnit]] = {model: []}
    if any(unit.is_sharded for unit in units):  # each may read parameters of others
        compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
        # There the block's own hook says what runs: one inside would end the graph.
        inside = {part for block in compiled if block is not model for part in block.modules() if part is not block}
        others = [module for module in model.modules() if module not in inside]
        units_of.update((module, []) for module in others if any(True for _ in module.children()))
    for unit in units:
        for module in unit.members.modules:
            units_of.setdefault(module, []).append(unit)
        if unit.grads is not None and reducer is not None:
            for index, param in enumerate(unit.members.params):
                hook = _gradient_hook(reducer, unit, index)
                reducer.gradient_hooks.append(param.register_post_accumulate_grad_hook(hook))
    if reducer is not None:
        handles.extend(reducer.gradient_hooks)
    for module, read in units_of.items():
        reader = _Reader(schedule, reducer, read)
        handles.append(module.register_forward_pre_hook(reader.before_forward, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(reader.after_forward, always_call=True))
    if any(unit.is_sharded for unit in units):
        handles.append(model.register_state_dict_post_hook(_warn_of_shards))
    installed.watched = _watch_accesses(model, units, schedule)
    return installed


def _gradient_hook(reducer: GradientReducer, unit: FlatUnit, index: int) -> Callable[[Tensor], None]:
    # Python's garbage collector does not look into a tensor's hooks: an engine held from there would stay forever.
    find_reducer, find_unit = weakref.ref(reducer), weakref.ref(unit)

    def on_gradient(_param: Tensor) -> None:
        reducer, unit = find_reducer(), find_unit()
        if reducer is not None and unit is not None and unit.grads is not None:  # else the model is its user's again
            reducer.take_gradient(unit.grads, index)

    return on_gradient


class _Reader:
    """The hooks of one module whose forward reads units."""

    def __init__(self, schedule: ParameterSchedule, reducer: GradientReducer | None, units: list[FlatUnit]) -> None:
        self._schedule = schedule
        self._reducer = reducer
        self._units = units
        # Of the forwards that run now, the innermost last: and by id the nodes of the tensors that inputs are views of.
        self._running: list[tuple[Use | None, dict[int, Any]]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return (_idle_reader, ())  # a copy of the model belongs to no engine

    @outside_graphs
    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sharded = [unit for unit in self._units if unit.is_sharded]
        if sharded and is_in_transform():
            raise EngineError(
                f"a forward of {type(module).__name__}, which reads {sharded[0].label}, ran within a transform of"
                " torch.func: stage 3 cannot gather parameters there",
                hint="run it outside of torch.func.grad, jvp or vmap, keep its parameters unsharded with"
                " stage3_param_persistence_threshold, or use stage 2",
            )
        self._schedule.before_forward(self._units)
        use = self._schedule.open_use(sharded, self, is_training=module.training) if sharded else None
        if use is None:  # nothing is read again in backward
            self._running.append((None, {}))
            return None
        inputs = list(tensors_in((args, kwargs)))
        self._running.append((use, {id(base): base.grad_fn for base in map(_base, inputs)}))
        return self._hook_inputs(use, inputs, args, kwargs)

    def _hook_inputs(self, use: Use, inputs: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have a use end with the backward of its module; return the inputs, of which some are replaced by views.

        [Note: when the backward of a module has passed] Of the nodes that are ready autograd runs the one that was
        created last. All nodes of a module are created after those of its inputs. So when the node of any input runs,
        everything in the module that could run has run, whatever parameters got a gradient. Modules that share an input
        get a view each, whose node is their own.
        """
        views: dict[int, Tensor] = {}
        recorded = [tensor for tensor in inputs if tensor.grad_fn is not None]
        args = _viewed(args, views)
        kwargs = {name: _viewed(value, views) for name, value in kwargs.items()}
        if not views and not recorded:
            self._schedule.keep_open(use)
        # The inputs themselves, too: a view that the module writes into is not in the graph.
        for tensor in (*views.values(), *recorded):
            tensor.register_hook(lambda _grad: self._after_backward(use))
        return args, kwargs

    @outside_graphs
    def after_forward(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        use, given = self._running.pop() if self._running else (None, {})
        read = [unit for unit in self._units if unit.is_sharded]
        if output is None and sys.exc_info()[0] is not None:  # torch calls this within its `except` block
            self._schedule.abort_forward()
            return None
        returned = _returned(read, output)
        is_outermost = self._schedule.after_forward(keeps=returned)
        if returned and is_outermost:  # the memory goes: the caller gets a copy
            output = tree_map_only(
                Tensor, lambda tensor: tensor.clone() if _reads(tensor, returned) else tensor, output
            )
        if read and torch.is_grad_enabled():
            for node in dict.fromkeys(_first_node(tensor, given) for tensor in tensors_in(output)):
                if node is not None:
                    # After the hooks of the tensor itself, which release the module that reads it.
                    node.register_prehook(lambda _grads: self._schedule.before_backward(read, use))
        if returned and is_outermost:
            self._schedule.release(returned)
        return output

    @outside_graphs
    def _after_backward(self, use: Use) -> None:
        for unit in self._schedule.after_backward(use):
            if unit.grads is not None and self._reducer is not None:
                self._reducer.after_backward(unit.grads)


def is_read_as_called(module: nn.Module) -> bool:
    """Whether to read a module's own parameters does all that a call of it does besides computing.

    So it is where no hook runs with it but the engine's, and no parameter is sharded: a read waits for what is in
    flight, as those hooks do. A read of a shard gathers it, which would have to be so on every rank.
    """
    if any(not isinstance(getattr(hook, "__self__", None), _Reader) for hook in hooks_around(module)):
        return False
    units = [unit_of(param) for param in dict.values(module._parameters) if param is not None]
    return not any(unit is not None and unit.is_sharded for unit in units)


def _base(tensor: Tensor) -> Tensor:
    """Return the tensor that one is a view of, which may be itself."""
    return tensor if tensor._base is None else tensor._base


def _first_node(tensor: Tensor, given: Mapping[int, Any]) -> Any:
    """Return the node of an output that every gradient of it reaches first; None: it has no graph.

    Of a view that is the node of what it is a view of: whoever writes into the view (`y += x` behind a linear layer,
    an activation in place) takes the view's own node out of the graph. given: by id, the nodes that the tensors had of
    which inputs are views: those belong to modules before. Another node is that of a write in this module.
    """
    if tensor.grad_fn is None:
        return None
    base = _base(tensor)
    node = base.grad_fn
    is_of_before = id(base) in given and node is given[id(base)]
    return tensor.grad_fn if node is None or is_of_before else node


def _viewed(value: Any, views: dict[int, Tensor]) -> Any:
    """Return `value` with a view in place of each tensor that needs a gradient, the same one wherever it is the same.

    views: by the tensor's id; those that are made are added. Lists and mappings, which a module may write into, stay.
    """
    if isinstance(value, Tensor) and value.requires_grad and value.layout == torch.strided:
        if id(value) not in views:
            views[id(value)] = value.view_as(value)
        return views[id(value)]
    return tuple(_viewed(item, views) for item in value) if type(value) is tuple else value


def _returned(units: Sequence[FlatUnit], output: Any) -> list[FlatUnit]:
    """Return the units of which a module's output is a parameter, or a view of one."""
    if not units:
        return []
    tensors = list(tensors_in(output))
    return [unit for unit in units if any(_reads(tensor, [unit]) for tensor in tensors)]


def _reads(tensor: Tensor, units: Sequence[FlatUnit]) -> bool:
    """Whether a tensor is a view of the memory of an unsharded unit."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return False
    address = tensor.untyped_storage().data_ptr()
    return address != 0 and any(address == unit.params.flat.untyped_storage().data_ptr() for unit in units)


def _idle_reader() -> _Reader:
    return _Reader(ParameterSchedule([], ParameterPolicy()), None, [])


# ---- parameters read outside of their modules' forward ----


class _WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's `_parameters` that sees to it that what is asked for is there.

    A forward such as `F.linear(x, self.embedding.weight)` reads a parameter without calling its module. `state_dict()`,
    `parameters()` and copies list all parameters, right after a step too, when updates are still being gathered.

    torch.compile traces what stands here, and ends a graph where `on_access` is called. A block whose own hook has its
    units there reads them without: it is one graph, with a guard on what `_are_read` has seen.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter | None],
        units: tuple[FlatUnit, ...],
        on_access: Callable[[nn.Parameter], None],
        on_listing: Callable[[Iterable[nn.Parameter | None]], None],
    ) -> None:
        """units: of the parameters."""
        super().__init__(params)
        self._units = units
        self._on_access = on_access
        self._on_listing = on_listing

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None and not (torch.compiler.is_compiling() and self._are_read()):
            self._on_access(param)
        return param

    def _are_read(self) -> bool:
        return all(unit.is_read and unit.params.state is ParameterState.UNSHARDED for unit in self._units)

    def __setitem__(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param is not super().get(name):
            raise EngineError(
                f"the parameter {name} was added or replaced after initialize(), which would not train the new one",
                hint="write into the one there is (param.data.copy_(...)), or change the model before initialize();"
                " for torch.func.functional_call with other values take a copy made before initialize()",
            )
        super().__setitem__(name, param)

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]  # dict_values is no public class
        self._on_listing(super().values())
        return super().values()

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        self._on_listing(super().values())
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self.items()),))  # a copy of the model belongs to no engine

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        for name, param in self.items():
            if param is not None and _is_released(param):
                raise EngineError(
                    f"the parameter {name} is a shard: a copy of its module would have no values",
                    hint="copy within launcher.zero.GatheredParameters(model.parameters()), on every rank",
                )
        return copy.deepcopy(dict(self.items()), memo)


def _is_released(param: nn.Parameter) -> bool:
    unit = unit_of(param)
    return unit is not None and unit.is_sharded and not param.numel()


def _warn_of_shards(module: nn.Module, _state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
    """Say once, on the first rank, that a state dict has empty tensors. A function of a module can be pickled."""
    if is_first_rank() and any(map(_is_released, module.parameters())):
        _warn_once()


@functools.cache
def _warn_once() -> None:
    get_logger().warning(
        "state_dict() of the model has empty tensors in place of what is sharded: call engine.state_dict(), or"
        " engine.save_16bit_model(folder), on every rank"
    )


def _watch_accesses(
    model: nn.Module, units: list[FlatUnit], schedule: ParameterSchedule
) -> list[weakref.ref[nn.Module]]:
    unit_of = {param: unit for unit in units for param in unit.members.params}

    @outside_graphs
    def on_access(param: nn.Parameter) -> None:
        unit = unit_of.get(param)
        if unit is not None:
            schedule.on_access(unit)

    @outside_graphs
    def on_listing(params: Iterable[nn.Parameter | None]) -> None:
        for unit in {unit_of[param] for param in params if param in unit_of}:
            schedule.on_listing(unit)

    watched = [
        module
        for module in model.modules()
        if any(param in unit_of for param in module._parameters.values() if param is not None)
    ]
    for module in watched:
        read = dict.fromkeys(unit_of[param] for param in dict.values(module._parameters) if param in unit_of)
        module._parameters = _WatchedParameters(module._parameters, tuple(read), on_access, on_listing)
    return [weakref.ref(module) for module in watched]
