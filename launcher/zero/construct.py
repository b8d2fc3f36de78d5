"""`Init`: build a model whose parameters are sharded as soon as they exist."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.base import env
from launcher.base.errors import EngineError, did_you_mean
from launcher.base.progress import phase
from launcher.comm.groups import RankGroup, init_distributed
from launcher.comm.groups import world_group as all_ranks
from launcher.comm.mesh import ParallelMesh
from launcher.config.policies import Place, param_dtype
from launcher.sharding.layout import CHUNK_ALIGNMENT_NUMEL, layout_unit
from launcher.zero.described import describe
from launcher.zero.gathered import GatheredParameters
from launcher.zero.parameters import ShardSpec, UnitParameters, param_info, unit_params_of
from launcher.zero.placement import ON_DEVICE, Placement, settings_for_construction, shard_placements
from launcher.zero.states import TORCH_DTYPES

_INITIALIZERS = tuple(name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_"))
_active: list[Init] = []
# Arguments of DeepSpeed's signature: those that say how, and those that say what.
_HARMLESS = frozenset({"mem_efficient_linear", "pin_memory"})
_GROUPS = frozenset({"data_parallel_group", "mpu", "sequence_data_parallel_group"})  # accepted with all ranks
_REFUSED = frozenset(
    {
        "param_swapper",
        "tensor_overrides",
        "zero_param_parallel_group",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_weights",
    }
)


class Init:
    """Within this `with` block every module's parameters are sharded once the module has been built.

    A model larger than one rank's memory can be built: one module is unsharded at a time. Shards are stored where
    the config's `offload_param` says, in host memory or on disk, also those of a single rank, which are full. The
    initial values of rank 0 count. Functions of `torch.nn.init` and `Module.apply` see full parameters; other changes
    need `GatheredParameters(params, modifier_rank=0)`. Every rank must build the same modules in the same order. The
    shards of a single rank are whole parameters, and behave as others; with `enabled=False` nothing is sharded. A block
    within a block has the settings of the outer one; what was built within it is sharded when it ends.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        remote_device: str | None = None,
        **other: Any,
    ) -> None:
        """module: an existing model to shard at once. dtype: of the parameters; None: what the config's `bf16` and
        `fp16` sections say, and without them as the parameters are built. remote_device: "cpu", "nvme" or "none"
        instead of the config's `offload_param.device`.

        other: further arguments of DeepSpeed's signature; groups must be of all ranks. Raises: EngineError for one that
        would change what is built, or a disk that is too full; ConfigError for a config that cannot be read.
        """
        unknown = sorted(set(other) - _HARMLESS - _GROUPS - _REFUSED)
        refused = sorted(name for name in _REFUSED if other.get(name) is not None and other[name] is not False)
        if unknown:
            raise EngineError(f"zero.Init has no argument {unknown[0]}", hint=did_you_mean(unknown[0], _HARMLESS))
        if refused:
            raise EngineError(f"zero.Init({refused[0]}=...) is not supported", hint="it shards over all ranks")
        given = config if config is not None else config_dict_or_path
        settings = settings_for_construction(given)
        self._dtype = dtype if dtype is not None or given is None else TORCH_DTYPES[param_dtype(settings)]
        self._enabled = enabled
        if enabled:
            init_distributed()
            for name in _GROUPS & set(other):
                _check_all_ranks(name, other[name])
        self._group = all_ranks()
        if enabled:
            _check_started(self._group.world_size)
        self._placements = shard_placements(settings, remote_device) if enabled else None
        self._stack = contextlib.ExitStack()
        self._built: list[weakref.ref[nn.Module]] = []
        self._num_built_before = 0  # of the outer block, where this one is within it
        if module is not None and enabled:
            self._shard_all(module)
            self._placements = None

    def __enter__(self) -> Init:
        if self._enabled and _active:
            self._num_built_before = len(_active[0]._built)
        elif self._enabled:
            _active.append(self)
            self._stack.callback(_active.clear)
            self._stack.enter_context(phase("building the model"))
            self._stack.enter_context(self._group.device)
            self._stack.enter_context(_patched(nn.Module, "__init__", self._remember))
            self._stack.enter_context(_patched(nn.Module, "__setattr__", self._shard_assigned))
            self._stack.enter_context(_patched(nn.Module, "add_module", self._shard_assigned))
            self._stack.enter_context(_patched(nn.Module, "apply", _apply_gathered))
            for name in _INITIALIZERS:
                self._stack.enter_context(_patched(nn.init, name, _initialize_gathered))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind is None and self._enabled:
            outer = _active[0] if _active else self  # its own block is not active any more
            outer._shard_built(self._num_built_before)
        self._built.clear()
        self._placements = None  # the file goes when the last parameter has moved to an engine

    def _remember(self, original: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        self._built.append(weakref.ref(module))

    def _shard_built(self, first: int) -> None:
        """Shard what was built, from a number on: the constructors of these modules have returned."""
        for reference in self._built[first:]:
            module = reference()
            if module is not None:
                self._shard_own(module)

    def _shard_assigned(self, original: Callable[..., None], module: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):  # it has become part of another one: it has been built
            self._shard_all(value)
        original(module, name, value)

    def _shard_all(self, module: nn.Module) -> None:
        for part in module.modules():
            self._shard_own(part)

    def _shard_own(self, module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            if unit_params_of(param) is None and not param.is_meta:
                placement = (
                    ON_DEVICE
                    if self._placements is None
                    else self._placements.of_shard(param.numel() // self._group.world_size)
                )
                shard_parameter(param, self._group, self._dtype, placement)


def _check_started(world_size: int) -> None:
    """Raise EngineError where the group has one rank in a job of several: every rank would keep all shards."""
    started = os.environ.get(env.WORLD_SIZE.name, "1")
    if world_size == 1 and started.isdecimal() and int(started) > 1:
        raise EngineError(
            f"zero.Init shards nothing: the process group has one rank, and the job {env.WORLD_SIZE.name}={started}",
            hint="call deepspeed.init_distributed() in place of torch.distributed.init_process_group()",
        )


def _check_all_ranks(name: str, given: Any) -> None:
    """Raise EngineError for a group, or the data group of an mpu, that has not all ranks: shards are over all."""
    if name == "mpu" and given is not None:
        if not callable(getattr(given, "get_data_parallel_group", None)):
            raise EngineError(
                "zero.Init(mpu=...) is not supported without get_data_parallel_group()", hint="it shards over all ranks"
            )
        given = given.get_data_parallel_group()
    if given is not None and dist.is_initialized() and dist.get_world_size(given) != dist.get_world_size():
        raise EngineError(
            f"zero.Init({name}=...) is not supported with a part of the ranks", hint="it shards over all ranks"
        )


def shard_parameter(
    param: nn.Parameter, group: RankGroup, dtype: torch.dtype | None = None, placement: Placement = ON_DEVICE
) -> None:
    """Keep only this rank's chunk of a parameter, of rank 0's values, at `placement`. Every rank must call it.

    dtype: to convert floating-point parameters to.
    """
    converted = dtype if dtype is not None and param.is_floating_point() else param.dtype
    # Equal parts, as scripts for DeepSpeed count them.
    alignment_numel = 1 if placement.place is not Place.DISK else CHUNK_ALIGNMENT_NUMEL
    layout = layout_unit([param_info("", param, converted)], group.world_size, alignment_numel=alignment_numel)
    owned = layout.chunk_range(group.rank)
    parts = UnitParameters(
        [param],
        layout,
        ParallelMesh(group, group, group),
        ShardSpec(converted, owned, is_sharded=True, placement=placement),
    )
    parts.register()
    describe(parts)
    parts.release()
    group.buffers.note_freed(layout.slots[0].numel)


@contextlib.contextmanager
def _patched(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Have `owner.name(...)` call `replacement(original, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, patched)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _apply_gathered(
    _original: Callable[..., nn.Module], module: nn.Module, function: Callable[[nn.Module], None]
) -> nn.Module:
    for child in module.children():
        child.apply(function)
    with GatheredParameters(module.parameters(recurse=False), modifier_rank=0):
        function(module)
    return module


def _initialize_gathered(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(tensor, nn.Parameter) or unit_params_of(tensor) is None:
        return original(tensor, *args, **kwargs)
    with GatheredParameters(tensor, modifier_rank=0):
        return original(tensor, *args, **kwargs)
