"""The whole model's weights: as a state dict, out of it and into it, and as one plain file.

At most one of the units is unsharded on the device at a time.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.checkpoint.zero_to_fp32 import write_safetensors
from launcher.comm.groups import RankGroup
from launcher.comm.mesh import ParallelMesh
from launcher.comm.torch_internals import num_load_hooks
from launcher.engine import stages
from launcher.engine.parts import EngineParts
from launcher.parallel.expert.placement import (
    counterparts,
    remote_expert_names,
    values_of_other_ranks,
    with_remote_experts,
)
from launcher.parallel.expert.whole import own_state
from launcher.parallel.tensor.functions import full_values
from launcher.zero.gathered import GatheredParameters
from launcher.zero.marks import slice_of, split_of
from launcher.zero.parameters import UnitParameters, set_data, unit_params_of
from launcher.zero.tiling import is_tiled

_CHUNK_NUMEL = 1 << 20  # elements that are copied to a file at a time
_LOAD = "_load_from_state_dict"


class WholeWeights:
    """What an engine hands out and takes of its whole model. Every rank must call each method."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def state_dict(
        self, model: nn.Module, /, *args: Any, rank0_only: bool, leaves_out_frozen: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the state dict of all stages, experts and parts; see `_collected`. rank0_only: others get {}."""
        self._parts.sharded.wait_for_parameters()
        mesh = self._parts.mesh
        is_wanted = mesh.world.rank == 0 or not rank0_only
        frozen = {param for param in model.parameters() if leaves_out_frozen and not param.requires_grad}
        has_stages = mesh.pipeline is not None
        own = _collected(model, args, kwargs, is_wanted=is_wanted or has_stages, left_out=frozen, mesh=mesh)
        return own if mesh.pipeline is None else stages.joined_state(mesh.pipeline, own, is_wanted=is_wanted)

    def load(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
        """Load a state dict of the whole model, of which each rank takes what it has; see `_load`."""
        pipeline = self._parts.mesh.pipeline
        if pipeline is not None:
            own = model.state_dict().keys()
            others = {key for keys in stages.gather(pipeline, set(own)) for key in keys} - own
            state = {key: value for key, value in state.items() if key not in others}
        self._parts.sharded.synchronize_parameters()
        self._parts.sharded.offloaded.reload()
        return _load(model, state, strict=strict)

    def save_file(self, model: nn.Module, folder: str, name: str, *, leaves_out_frozen: bool) -> bool:
        """Write what `state_dict` returns; return whether it was written: see `DeepSpeedEngine.save_16bit_model`."""
        group, zero = self._parts.mesh.world, self._parts.settings.zero_optimization
        if zero.stage == 3 and not zero.stage3_gather_16bit_weights_on_model_save:
            if group.rank == 0:
                key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
                get_logger().warning("save_16bit_model() wrote nothing: at ZeRO stage 3 it needs %s", key)
            return False
        weights = self.state_dict(model, rank0_only=True, leaves_out_frozen=leaves_out_frozen)
        _write_on_rank_0(weights, Path(folder, name), group)
        return True


# ---- out of the model ----


def _collected(
    model: nn.Module,
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    is_wanted: bool,
    left_out: Collection[nn.Parameter],
    mesh: ParallelMesh,
) -> dict[str, Any]:
    """Return `model.state_dict(*arguments, **options)` in host memory. Collective.

    Units are gathered, copied and sharded again one after another; then the model's own `state_dict` runs, with its
    hooks, while every parameter shows its copy. Tied weights share one. is_wanted: False on a rank that only takes
    part: it copies nothing, and gets an empty dictionary. left_out: parameters that are neither gathered nor returned.
    mesh: whose ranks have parts of parameters, or different experts, which are put together.
    """
    copies: dict[nn.Parameter, Tensor] = {}
    parts = mesh.tensor or mesh.expert
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
    with _showing(copies), with_remote_experts(model), own_state(model):
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
            values = values_of_other_ranks(own.tensor, own.placement)
        for rank, name in enumerate(own.names):
            if is_wanted and rank != own.placement.group.rank:
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


def _load(model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
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
    remote = remote_expert_names(model)
    state = {name: value for name, value in state.items() if name not in remote} if remote else state
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
    return num_load_hooks(module) > is_tiled(module)


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


# ---- to a file ----


def _write_on_rank_0(weights: Mapping[str, Any], path: Path, group: RankGroup) -> None:
    """Write rank 0's `weights` to one file, which appears when it is complete. Collective.

    Raises: EngineError, on every rank, where it cannot be written.
    """
    failure = None
    if group.rank == 0:
        try:
            _write(weights, path)
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: torch.save's own, of a full disk too
            failure = error
    has_failed = any(group.communicator.gather_scalars(float(failure is not None)))
    if failure is not None:
        raise EngineError(f"the weights were not written: {failure}", where=str(path)) from failure
    if has_failed:
        raise EngineError("the weights were not written", where=str(path), hint="see the error of rank 0")


def _write(weights: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            if path.suffix == ".safetensors":
                write_safetensors(file, {key: _in_memory(key, value) for key, value in weights.items()})
            else:
                torch.save(weights, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _in_memory(key: str, value: Any) -> _InMemory:
    if not isinstance(value, Tensor):
        raise ValueError(f"{key} is a {type(value).__name__}, and safetensors holds tensors only; name the file *.bin")
    return _InMemory(value.contiguous())


@dataclass(frozen=True)
class _InMemory:
    """A tensor in host memory, to be written piece by piece."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def chunks(self) -> Iterator[memoryview]:
        """Yield the tensor's bytes in order. Each chunk is overwritten by the next one."""
        flat = self.tensor.view(-1)
        buffer = bytearray(min(flat.numel(), _CHUNK_NUMEL) * self.dtype.itemsize)
        for start in range(0, flat.numel(), _CHUNK_NUMEL):
            part = flat[start : start + _CHUNK_NUMEL]
            torch.frombuffer(buffer, dtype=self.dtype, count=part.numel()).copy_(part)
            yield memoryview(buffer)[: part.nbytes]
