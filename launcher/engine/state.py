"""State dicts of a sharded model: at most one of its units is unsharded on the device at a time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from launcher.comm.groups import RankGroup
from launcher.comm.mesh import ParallelMesh
from launcher.parallel.expert.share import absent_names, counterparts, values_of_others, with_absent
from launcher.parallel.expert.whole import own_state
from launcher.parallel.tensor.functions import full_values
from launcher.zero.gathered import GatheredParameters
from launcher.zero.marks import slice_of, split_of
from launcher.zero.parameters import UnitParameters, set_data, unit_params_of
from launcher.zero.tiling import is_tiled

_LOAD = "_load_from_state_dict"


# ---- out of the model ----


def collect_state(
    model: nn.Module,
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    is_wanted: bool = True,
    left_out: Collection[nn.Parameter] = (),
    mesh: ParallelMesh | None = None,
) -> dict[str, Any]:
    """Return `model.state_dict(*arguments, **options)` in host memory. Collective.

    Units are gathered, copied and sharded again one after another; then the model's own `state_dict` runs, with its
    hooks, while every parameter shows its copy. Tied weights share one. is_wanted: False on a rank that only takes
    part: it copies nothing, and gets an empty dictionary. left_out: parameters that are neither gathered nor returned.
    mesh: whose ranks have parts of parameters, or different experts, which are put together.
    """
    copies: dict[nn.Parameter, Tensor] = {}
    parts = None if mesh is None else mesh.tensor or mesh.expert
    wanted = [param for param in model.parameters() if param not in left_out]
    for found, params in _by_unit(wanted).items():
        if found.is_sharded:
            with GatheredParameters(params):
                copies.update(_copied(params, parts, is_wanted=is_wanted))
    others = [param for param in wanted if not _sharded([param]) and split_of(param) is not None]
    copies |= _copied(others, parts, is_wanted=is_wanted)
    of_others = _experts_of_others(model, left_out, is_wanted=is_wanted)
    if not is_wanted:
        return {}
    prefix = options.get("prefix", "")
    with _showing(copies), with_absent(model), own_state(model):
        state: dict[str, Any] = model.state_dict(*arguments, **options)
        state |= {prefix + name: value for name, value in of_others.items() if prefix + name in state}
        for name, param in model.named_parameters(remove_duplicate=False) if left_out else ():
            if param in left_out or (param.is_meta and name not in of_others):
                state.pop(prefix + name, None)
        own = {copy.untyped_storage().data_ptr() for copy in (*copies.values(), *of_others.values())}
        shared: dict[tuple[Any, ...], Tensor] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.detach() if _address(value) in own else _copied_once(value, shared)
    return state


def _experts_of_others(model: nn.Module, left_out: Collection[nn.Parameter], *, is_wanted: bool) -> dict[str, Tensor]:
    """Return what only other ranks have of lists of experts, by name, in host memory. Collective.

    Empty where `is_wanted` is False.
    """
    found = {}
    for own in counterparts(model):
        param = own.tensor if isinstance(own.tensor, nn.Parameter) else None
        if param is not None and param in left_out:
            continue
        with GatheredParameters(param):
            values = values_of_others(own.tensor, own.share)
        for rank, name in enumerate(own.names):
            if is_wanted and rank != own.share.group.rank:
                found[name] = _host_copy(values[rank])
    return found


def _copied(params: Iterable[nn.Parameter], parts: RankGroup | None, *, is_wanted: bool) -> dict[nn.Parameter, Tensor]:
    """Return copies of whole parameters in host memory; none where `is_wanted` is False.

    parts: ranks that have parts of parameters; None: each has all of them.
    """
    copies = {}
    for param in params:
        values = param if parts is None else full_values(param, parts)
        if is_wanted:
            copies[param] = _host_copy(values)
    return copies


def _address(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else None


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copied_once(value: Tensor, shared: dict[tuple[Any, ...], Tensor]) -> Tensor:
    """Return a copy in host memory; the same one for the same memory. shared: those that there are, which it joins."""
    if _address(value) is None or not value.numel():
        return _host_copy(value)
    key = (value.data_ptr(), value.dtype, value.shape, value.stride())
    if key not in shared:
        shared[key] = _host_copy(value)
    return shared[key]


@contextlib.contextmanager
def _showing(copies: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Have parameters show other memory within this block."""
    before = {param: param.data for param in copies}
    for param, copy in copies.items():
        set_data(param, copy)
    try:
        yield
    finally:
        for param, values in before.items():
            set_data(param, values)


# ---- into the model ----


def load_state(model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
    """Call `model.load_state_dict(state, strict)`, and have masters and shards follow; return its result. Collective.

    Each rank loads its own `state`; of parameters that tensor-parallel ranks share, its part. A unit is gathered before
    its first module loads, and sharded again when a module of another one does. Modules with hooks of their own on
    loading may look at everything inside: they are loaded whole, and so is a model that has a `load_state_dict` of its
    own. Raises: what the model's does, after everything that fits has been loaded.
    """
    loading = _Loading(model)
    try:
        with loading.installed():
            return model.load_state_dict(_own_parts(model, state), strict=strict)
    finally:
        loading.end()


def _own_parts(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `state` with this rank's part of parameters that ranks have in parts, without experts of other ranks."""
    absent = absent_names(model)
    state = {name: value for name, value in state.items() if name not in absent} if absent else state
    own = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        split, value = split_of(param), state.get(name)
        if split is not None and isinstance(value, Tensor) and tuple(value.shape) == split.shape:
            own[name] = slice_of(value, split)
    return {**state, **own} if own else state


class _Loading:
    """Unshards the units of a module while it loads its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._needs: dict[nn.Module, dict[UnitParameters, list[nn.Parameter]]] = {}
        self._unsharded: dict[UnitParameters, contextlib.ExitStack] = {}  # closed, they are sharded again
        is_torchs = getattr(model.load_state_dict, "__func__", None) is nn.Module.load_state_dict
        self._note_needs(model, {} if is_torchs else _sharded(model.parameters()))
        if not is_torchs:
            self._have(self._needs[model])

    def _note_needs(self, module: nn.Module, needed: dict[UnitParameters, list[nn.Parameter]]) -> None:
        """Note what a module and those inside it need; needed: what the modules around it do meanwhile."""
        inside = _sharded(module.parameters()) if _has_hooks(module) else {}
        needed = {**needed, **inside}
        own = _sharded(module.parameters(recurse=False))
        self._needs[module] = {**self._needs.get(module, {}), **needed, **own}
        for child in module.children():
            self._note_needs(child, needed)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Be called before each module loads its own parameters and buffers."""
        with contextlib.ExitStack() as stack:
            for module in self._needs:
                instance = module.__dict__
                if _LOAD in instance:
                    stack.callback(instance.__setitem__, _LOAD, instance[_LOAD])
                else:
                    stack.callback(instance.pop, _LOAD)
                instance[_LOAD] = functools.partial(self._load, module, getattr(module, _LOAD))
            yield

    def _load(self, module: nn.Module, load: Callable[..., None], *arguments: Any) -> None:
        if self._needs[module]:  # else the next module may well need what is unsharded now
            self._have(self._needs[module])
        load(*arguments)

    def _have(self, needed: Mapping[UnitParameters, list[nn.Parameter]]) -> None:
        for found in [found for found in self._unsharded if found not in needed]:
            self._take(found)
        for found, params in needed.items():
            if found not in self._unsharded:
                self._unsharded[found] = contextlib.ExitStack()
                self._unsharded[found].enter_context(GatheredParameters(params))

    def _take(self, found: UnitParameters) -> None:
        """Take what has been loaded over into the shards."""
        found.refresh()
        found.forget_written()  # of a write into a shard, which was lost, nothing is missed now
        self._unsharded.pop(found).close()

    def end(self) -> None:
        """Shard what is unsharded, and take over what was loaded into parameters that always are."""
        for found in list(self._unsharded):
            self._take(found)
        for found in _by_unit(self._model.parameters()):
            if not found.is_sharded:
                found.refresh()


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks on loading beside that of a tiled layer: they may look at what is inside."""
    return len(module._load_state_dict_pre_hooks) + len(module._load_state_dict_post_hooks) > is_tiled(module)


# ---- units ----


def _by_unit(params: Iterable[nn.Parameter]) -> dict[UnitParameters, list[nn.Parameter]]:
    """Return parameters by where their values are kept, alike on every rank."""
    found: dict[UnitParameters, list[nn.Parameter]] = {}
    for param in params:
        unit_params = unit_params_of(param)
        if unit_params is not None:
            found.setdefault(unit_params, []).append(param)
    return found


def _sharded(params: Iterable[nn.Parameter]) -> dict[UnitParameters, list[nn.Parameter]]:
    return {found: held for found, held in _by_unit(params).items() if found.is_sharded}
