"""The parameters of a unit on one rank: full in a flat buffer, or a shard that is unsharded around its use.

Users keep their `nn.Parameter`s; only the storage under them is replaced by views into the flat buffer.

[Note: what a gather waits for] On a GPU gathers start on a stream of their own. One waits for two things, and for no
other computing:

* for its input, the shard: `_written` is the last write into it, by an update or from elsewhere;
* for its output, the memory: it is lent on the gathers' stream, which waits for each release of a unit at the time of
  the release (see "memory and streams" in `comm.buffers`). The memory that a gather gets is that of a unit which the
  computing has left behind, so gathers run ahead of the computing as far as there is memory, and not further.

Below stage 3 the buffer is one and the same, and `_written` comes after all that has read it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.comm import observe
from launcher.comm.groups import RankGroup
from launcher.comm.mesh import ParallelMesh
from launcher.comm.pending import Pending
from launcher.comm.streams import PASSED, Side, StreamEvent
from launcher.comm.torch_internals import as_plain_tensors, drop_outdated_accumulator
from launcher.config.policies import Place, Precision
from launcher.sharding.layout import ParamInfo, ParamSlot, UnitLayout, unsharded_shape
from launcher.zero.disk import Swapped
from launcher.zero.host_copy import OffloadedUnit
from launcher.zero.marks import Mark, split_of
from launcher.zero.placement import ON_DEVICE, Placement
from launcher.zero.states import TORCH_DTYPES, ParameterState
from launcher.zero.tensors import digest, take_over_edits

_unit_numbers = itertools.count()


class ZeroParamStatus(Enum):
    """`param.ds_status` of a sharded parameter, by the names scripts for DeepSpeed know."""

    AVAILABLE = auto()
    NOT_AVAILABLE = auto()
    INFLIGHT = auto()


class PendingUpdate(Protocol):
    """An update of masters that may still run while the parameters are used."""

    @property
    def is_written_back(self) -> bool:
        """Whether the parameters have followed the masters. Alike on every rank."""
        ...

    def wait(self) -> None:
        """Wait until masters are not written any more."""
        ...

    def write_back(self) -> None:
        """Let the parameters follow the masters, if they do not yet. Collective."""
        ...


@dataclass(frozen=True)
class ShardSpec:
    """How the parameters of one unit are kept on this rank."""

    dtype: torch.dtype
    owned: range  # elements this rank updates
    is_sharded: bool  # only the owned range is kept, the rest is gathered around its use
    placement: Placement = ON_DEVICE  # where the owned range of a sharded unit is kept
    label: str = ""  # of the unit, for profilers and the debug log
    has_equal_values: bool = False  # the parameters are alike on every rank; else rank 0's values are sent to all
    gathered: torch.dtype | None = None  # what a sharded unit is gathered in under torch.autocast; None: `dtype`


_BINARY = ("add", "and", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor")
_WRITES = {"__setitem__", *(f"__i{name}__" for name in _BINARY)}
_NO_WRITES = {"requires_grad_", "share_memory_", "detach_"}
_DATA: Any = inspect.getattr_static(Tensor, "data")  # the attribute itself, which `_Shard` hides


def written_by(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """Return what a function of torch writes, of its arguments."""
    name = getattr(func, "__name__", "")
    written = kwargs.get("out")
    if name in _WRITES or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES):
        written = args[0] if args else next(iter(kwargs.values()))  # functions of `nn.init` pass it by name
    return written if isinstance(written, list | tuple) else [written]


class _ShardData(Tensor):
    """The `data` of a sharded parameter, which has no elements: a write would be lost, so it raises.

    Without this class `param.data.clamp_()` would leave no trace at all: autograd does not count it.
    """

    param: nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for each in written_by(func, args, kwargs):
            if isinstance(each, _ShardData):
                raise _shard_error(each.param, f"param.data was written by {func.__name__}()")
        with as_plain_tensors():
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with as_plain_tensors():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


class _Shard(nn.Parameter):
    """The class of a parameter of an engine while it is a shard: see `_shard_class`."""

    _plain_class: ClassVar[type[nn.Parameter]]

    @property
    def data(self) -> Tensor:
        data: Tensor = _DATA.__get__(self)
        if data.numel():  # what `set_data` shows
            return data
        shard_data = data.as_subclass(_ShardData)
        shard_data.param = self
        return shard_data

    @data.setter
    def data(self, value: Tensor) -> None:
        # `module.to()` and its kin set what they have converted, or the parameter itself where nothing changes.
        is_converted = not value.numel() and (value.dtype, value.device) != (self.dtype, self.device)
        if not (is_converted or value is self or isinstance(value, _ShardData)):
            raise _shard_error(self, "param.data was set")
        set_data(self, value)

    def __deepcopy__(self, _: Any) -> nn.Parameter:
        raise _shard_error(self, "the parameter was copied")


@functools.cache
def _shard_class(plain: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class that a parameter has while it is a shard of an engine, by its class while it is unsharded."""
    facts = {"_plain_class": plain, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, (_Shard, *([] if plain is nn.Parameter else [plain])), facts)


def _plain_class(param: nn.Parameter) -> type[nn.Parameter]:
    """Return the class that a parameter has while it is unsharded."""
    kind = type(param)
    return kind._plain_class if issubclass(kind, _Shard) else kind


def set_data(param: nn.Parameter, value: Tensor) -> None:
    """Give a parameter other memory for a while, also a shard."""
    _DATA.__set__(param, value)


def _shard_error(param: nn.Parameter, what: str) -> EngineError:
    unit = unit_params_of(param)
    name = "the parameter" if unit is None else unit.slot_of(param).name
    return EngineError(
        f"{what}, where {name} is a shard, which has no elements",
        hint="do it on every rank within launcher.zero.GatheredParameters(params, modifier_rank=0)",
    )


@dataclass(frozen=True, eq=False)
class _FullBuffer:
    """A buffer for all elements of the unit, in one type, and the views of it that the parameters become."""

    flat: Tensor  # 1-D [padded]
    own: Tensor  # 1-D [owned]
    views: list[Tensor]


class UnitParameters:
    """Values and master weights of one unit. `owned` is the part this rank updates.

    The storage of `flat` never changes its identity: what autograd saved for backward sees the values again
    once they have been gathered again.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        layout: UnitLayout,
        mesh: ParallelMesh,
        spec: ShardSpec,
    ) -> None:
        """Take the values over from `params`, which must be unsharded: on any device, in any type. Collective."""
        self.number = next(_unit_numbers)  # alike on every rank: units are made by all of them together
        self._params = params
        self._label = spec.label
        self._layout = layout
        self.group = group = mesh.shard
        self._mesh = mesh
        self._node = mesh.node if spec.is_sharded else None
        self.owned = owned = spec.owned
        self.is_sharded = is_sharded = spec.is_sharded
        dtype = spec.dtype
        self.state = ParameterState.UNSHARDED
        self._gather: Pending | None = None
        self._written: StreamEvent = PASSED  # the last write into `shard`, or into what `_second` is copied from
        self._arrival: StreamEvent = PASSED  # of this rank's part in `flat`, where it is copied there
        self._in_own_type = self._in_autocast_type = self._full_buffer(dtype)
        if is_sharded and spec.gathered is not None:
            self._in_autocast_type = self._full_buffer(spec.gathered)
            group.buffers.give_back(self._in_autocast_type.flat)
        self._use(self._in_own_type)
        self.flat.zero_()
        # 1-D [padded / ranks of a node]: this rank's part of the second set of shards, which backward gathers from.
        self._second: Tensor | None = None
        if self._node is not None:
            numel = layout.padded_numel // self._node.world_size
            self._second = torch.empty(numel, dtype=self._in_autocast_type.flat.dtype, device=group.device)
        self._has_second = False  # it holds the values of now
        self._absent = torch.empty(0, dtype=dtype, device=group.device)
        self._move_params_in(has_equal_values=spec.has_equal_values)
        # 1-D [owned], model precision; a view of `flat` unless sharded.
        self.shard = self._own_flat
        self.placement = spec.placement if is_sharded else ON_DEVICE  # where the shard is kept
        if is_sharded:
            self.shard = self.placement.empty(len(owned), dtype, group).copy_(self._own_flat)
        self._swap = self.placement.swapped(self.shard)
        if self._swap is not None:
            self._swap.send_out()
        self._written = group.streams.record()
        self.master = self.shard  # 1-D [owned]; in fp32 the parameters are their own master
        self._master_swap: Swapped | None = None
        self.pending: PendingUpdate | None = None  # None: updates end before a step does
        self.copy: Tensor | None = None  # 1-D [owned], 16-bit, beside the master: what an optimizer may write for us
        self.offloaded = OffloadedUnit(spec.label)
        self._waiting = threading.RLock()  # held while a gather is waited for: see `wait`
        self.check_thread = any_thread  # raises in a thread that may not touch the unit: the schedule knows
        self.may_be_edited = False  # a script has got the parameters outside of forward and backward
        self._seen: Tensor | None = None  # fp64 [], a digest of their values then, where an update may be under way
        self.refuses_writes = False  # into shards: an engine has the unit, and no initialization is to come
        self.is_touched = False  # so has been since ranks last compared their values
        self.was_read_sharded = False  # a script has got parameters without elements: graphs of those may be alive
        # Who has a sharded unit unsharded, alike on every rank:
        self.is_scheduled = False  # the schedule of its engine
        self.num_blocks = 0  # so many blocks of `GatheredParameters`
        self.is_gathered_by_hand = False  # one of them is a `param.all_gather()` of the script
        self._lost: ParamSlot | None = None  # the first parameter written as a shard, where a block has come after that
        self.written_in_flight: ParamSlot | None = None  # the first one written while others' updates were on their way
        self.note_versions()
        self._sent_versions = list(self._versions)  # when the last gather of a whole unit was started
        self._shares_count: set[int] = set()  # see `find_shared_counts`

    def _full_buffer(self, dtype: torch.dtype) -> _FullBuffer:
        numel, device, buffers = self._layout.padded_numel, self.group.device, self.group.buffers
        flat = buffers.borrow(numel, dtype) if self.is_sharded else torch.empty(numel, dtype=dtype, device=device)
        views = [flat[slot.offset : slot.end].view(slot.shape) for slot in self._layout.slots]
        return _FullBuffer(flat, flat[self.owned.start : self.owned.stop], views)

    def _use(self, full: _FullBuffer) -> None:
        self.flat = full.flat  # 1-D [padded], model precision, or under autocast what it computes in
        self._own_flat, self._views = full.own, full.views

    @property
    def dtype(self) -> torch.dtype:
        """The type that the parameters have now; of a sharded unit under torch.autocast it may be that of a forward."""
        return self.flat.dtype if self.state is ParameterState.UNSHARDED else self._absent.dtype

    def _move_params_in(self, *, has_equal_values: bool) -> None:
        """Fill `flat`, converting on the way, and make the parameters views of it: their own memory is freed."""
        is_read = has_equal_values or self._mesh.data.rank == 0
        with torch.no_grad():
            for param, view in zip(self._params, self._views, strict=True):
                if is_read:
                    view.copy_(param.data)
                param.data = view
                param.grad = None
        if not has_equal_values:
            self._mesh.data.communicator.broadcast([self.flat])

    def register(self) -> None:
        """Have `unit_params_of` find this unit for its parameters."""
        for param in self._params:
            _UNIT_PARAMS.put(param, self)

    def unregister(self) -> None:
        """Have `unit_params_of` find nothing for its parameters: they are ordinary ones."""
        for param in self._params:
            if unit_params_of(param) is self:
                _UNIT_PARAMS.remove(param)

    def slots(self) -> Iterator[tuple[ParamSlot, nn.Parameter]]:
        """Yield the places of the parameters, with these."""
        return zip(self._layout.slots, self._params, strict=True)

    def note_own_write(self, slot: ParamSlot) -> None:
        """Take over a write into this rank's part of a parameter."""
        self.count_write([slot])
        if not self.is_sharded:
            self.may_be_edited = self.is_touched = True
            return
        self._has_second = False
        self._written = self.group.streams.record()
        if self.master is not self.shard:
            if self._master_swap is not None:
                self._master_swap.bring_in()
            self._take_into_master(self.shard)
            if self._master_swap is not None:
                self.group.copier.synchronize()
                self._master_swap.send_out()

    def keep_master(self, precision: Precision, placement: Placement, *, is_apart: bool = False) -> Swapped | None:
        """Make what the optimizer updates at `placement`, unless the shard itself is that. Returns its swap on disk.

        is_apart: nothing that the optimizer writes may be the shard, which is read meanwhile.
        """
        is_with_shard = placement.place is self.placement.place and not is_apart
        if not precision.has_master and is_with_shard:
            return self._swap
        dtype = torch.float32 if precision.has_master else TORCH_DTYPES[precision.param]
        self.master = placement.empty(len(self.owned), dtype, self.group)
        with self.shard_in_memory(reads=True):
            self.master.copy_(self.shard)
        self._master_swap = placement.swapped(self.master)
        if self._master_swap is not None:
            self._master_swap.send_out()
        if dtype != self.shard.dtype and self._swap is None:
            if is_with_shard:
                self.copy = self.shard
            elif placement.place is Place.HOST:  # half of the master's bytes go to the device
                self.copy = placement.empty(len(self.owned), self.shard.dtype, self.group)
                self.renew_copy()
        return self._master_swap

    def free(self) -> None:
        """Give memory and disk back: parameters have moved to another unit. Those that have not stay shards here."""
        moved = [unit_params_of(param) is not self for param in self._params]
        # A gather for the others must not touch those that have moved.
        self._params = [
            nn.Parameter(self._absent, requires_grad=False) if has_moved else param
            for param, has_moved in zip(self._params, moved, strict=True)
        ]
        if self._swap is not None:
            self._swap.wait_for_writes()
        if self.is_sharded and self.state is not ParameterState.SHARDED:
            self.group.buffers.take_back(self.flat.untyped_storage())
            self.state = ParameterState.SHARDED

    def positions(self) -> dict[nn.Parameter, int]:
        """Return the position of each parameter within the unit."""
        return {param: position for position, param in enumerate(self._params)}

    def slot_of(self, param: nn.Parameter) -> ParamSlot:
        """Return the place of one of the unit's parameters."""
        return next(slot for slot in self._layout.slots if self._params[slot.index] is param)

    def broadcast(self, params: list[nn.Parameter], source: int) -> None:
        """Overwrite parameters of this unsharded unit by rank `source`'s, of the data axis. Collective."""
        slots = [self.slot_of(param) for param in params]
        views = [self._views[slot.index] for slot in slots]
        self._mesh.data.communicator.broadcast(views, self._mesh.place_in_data(source))
        self.count_write(slots)  # autograd has seen what the source wrote there alone
        self.refresh(keeps_bits=True)

    # ---- unsharded and sharded ----

    def start_gather(self, *, for_autocast: bool = False) -> None:
        """Start gathering a sharded unit. Every rank must call it in the same order.

        for_autocast: in the type that torch.autocast would cast the parameters to, where it casts them.
        """
        if self.state is not ParameterState.SHARDED:
            return
        self.offloaded.check_values()
        self._use(self._in_autocast_type if for_autocast else self._in_own_type)
        is_rounded = self.flat.dtype != self.shard.dtype
        with self.group.streams.on(Side.GATHER):
            self.group.buffers.lend(self.flat.untyped_storage(), self.flat.nbytes)
            self._written.wait()
            if self._node is not None and self._second is not None and self._has_second and self._fits_second:
                self._gather = self._start_all_gather(self._second, self._node)
            elif is_rounded or self.placement.is_offloaded or self.group.process_group is None:
                with self.shard_in_memory(reads=True):
                    self._arrival = self.group.copier.copy(self._own_flat, self.shard)
                self._arrival.wait()
                self._gather = self._start_all_gather(self._own_flat)
            else:
                self._gather = self._start_all_gather(self.shard)
        self.state = ParameterState.GATHERING
        self._mark(ZeroParamStatus.INFLIGHT)

    def is_gathered_in(self, *, for_autocast: bool) -> bool:
        """Whether the buffer of now, empty or not, is the one that `start_gather` fills for a use."""
        return self.flat is (self._in_autocast_type if for_autocast else self._in_own_type).flat

    @contextlib.contextmanager
    def shard_in_memory(self, *, reads: bool = True, writes: bool = False) -> Iterator[None]:
        """Have the shard in memory; reads, writes: whether its values are read, or changed."""
        if self._swap is None:
            with self.offloaded.on_device(writes=writes):
                yield
            if writes:
                self._has_second = False
                self._written = self.group.streams.record()
            return
        self._swap.bring_in(reads=reads)
        try:
            yield
        finally:
            self._swap.used_until(self.group.copier.so_far())  # others get the memory next
            if writes:
                self._has_second = False
                self._swap.send_out()
            else:
                self._swap.drop()

    def start_reading(self) -> None:
        """Start reading a shard that is kept on disk: the unit will be gathered soon."""
        if self._swap is not None and self.state is ParameterState.SHARDED:
            self._swap.start_reading()

    def stop_reading(self) -> None:
        """Forget a shard that was read and not used."""
        if self._swap is not None:
            self._swap.drop()

    def _start_all_gather(self, own: Tensor, group: RankGroup | None = None) -> Pending:
        """Start filling `flat` with what every rank has of it. own: what this rank has.

        group: None for the ranks that own a chunk each. Call it on the gathers' stream.
        """
        with observe.unit_span("gather", self._label):
            return (group or self.group).communicator.all_gather(self.flat, own)

    def wait(self) -> None:
        """Block until what is in flight has arrived: the values are those of the last step. Cheap when nothing is.

        A thread that only reads may call it beside the one that trains. A gather is waited for once, so the one that
        comes second waits for the first one: `_gather` is None when the values are there, and not before.
        """
        if self._gather is None:
            return
        with self._waiting:
            if self._gather is not None:
                self._end_gather(self._gather)

    def _end_gather(self, gather: Pending) -> None:
        with observe.unit_span("wait for the gather", self._label):
            gather.wait()
        self._arrival.wait()
        self.state = ParameterState.UNSHARDED
        if not self.is_sharded and len(self.owned) < self._layout.padded_numel:
            self.written_in_flight = self.written_in_flight or self._first_since(self._sent_versions)
        self._gather = None  # now the thread that trains may count the writes of the next update
        if self.is_sharded:
            for slot, param, view in zip(self._layout.slots, self._params, self._views, strict=True):
                if param.dtype is not self._absent.dtype:
                    raise _cast_error(slot.name, param.dtype, self._absent.dtype)
                if self.refuses_writes:
                    param.__class__ = _plain_class(param)
                param.data = view
                if self.was_read_sharded:
                    drop_outdated_accumulator(param)
            self._mark(ZeroParamStatus.AVAILABLE)

    def start_block(self) -> None:
        """Start gathering a sharded unit in its own type for a block of `GatheredParameters`. Collective."""
        self.offloaded.check_values()
        if self.is_sharded:
            self.check_thread()
        if self.flat is not self._in_own_type.flat:
            self.release()
        if self.is_sharded and self.state is not ParameterState.UNSHARDED and self._lost is None:
            self._lost = self.first_written()  # what the block writes counts no more at its end
        self.num_blocks += 1
        self.start_gather()

    def end_block(self) -> None:
        """End what `start_block` has begun. Changes are forgotten unless `refresh` has taken them over."""
        self.num_blocks -= 1
        if self._in_autocast_type is not self._in_own_type and not self.num_blocks:
            self.is_scheduled = False  # a pass under way computes in the other type
        if self.is_sharded and not self.is_scheduled and not self.num_blocks:
            self.note_versions()
            self.release()

    def release_if_idle(self) -> None:
        """Do as `release` unless the schedule or a block has the unit unsharded."""
        if not self.is_scheduled and not self.num_blocks:
            self.release()

    def release(self) -> None:
        """Keep only this rank's chunk of a sharded unit. What was written into the parameters is forgotten."""
        if not self.is_sharded or self.state is ParameterState.SHARDED:
            return
        self.wait()
        if self._node is not None and self._second is not None and not self._has_second and self._fits_second:
            self._second.copy_(self.flat.chunk(self._node.world_size)[self._node.rank])
            self._written = self.group.streams.record()
            self._has_second = True
        for param in self._params:
            param.data = self._absent
            if self.refuses_writes:
                param.__class__ = _shard_class(_plain_class(param))
        self.group.buffers.take_back(self.flat.untyped_storage())
        self.state = ParameterState.SHARDED
        self._mark(ZeroParamStatus.NOT_AVAILABLE)

    @property
    def _fits_second(self) -> bool:
        return self.flat is self._in_autocast_type.flat

    def _mark(self, status: ZeroParamStatus) -> None:
        for param in self._params:
            param.ds_status = status  # type: ignore[attr-defined]

    # ---- updates ----

    def write_back(self, *, is_written: bool = False, unused: Collection[str] = ()) -> None:
        """Write the updated master range into the parameters; unless sharded, start gathering the others' ranges.

        is_written: the optimizer has done the first part. unused: the names of parameters that the update has left out.

        [Note: nothing unsharded outlives an update] A sharded unit is released here, whoever has unsharded it: a
        forward that does not go back, the backward of another engine's loss, a fetch ahead that is in flight. The next
        use would compute with the values of before. No collective follows from it: the next use finds a shard on every
        rank, because all ranks took the same way here. A block that is open gets the new values.
        """
        if self.is_sharded:
            self.is_scheduled = False
            self.release()
        else:
            self.wait()  # for the update before this one, where no forward has used the unit since
        self._has_second = False
        streams = self.group.streams
        source = self.copy if is_written and self.copy is not None else self.master
        self._written = streams.record()  # by the optimizer, if it has written the shard itself
        if source is not self.shard:
            with self.shard_in_memory(reads=False, writes=True):
                copied = self.group.copier.copy(self.shard, source)
            self._written = copied
        self._seen = None
        self.count_write(slot for slot in self._layout.slots if slot.name not in unused)
        self._gather_written()

    def gather_unwritten(self) -> None:
        """Gather an unsharded unit with the values that it has: its master, which `write_back` reads, is not there."""
        if not self.is_sharded:
            self.wait()
        self._written = self.group.streams.record()
        self._gather_written()

    def _gather_written(self) -> None:
        if not self.is_sharded:
            self._arrival = self._written
            owns_all = len(self.owned) == self._layout.padded_numel
            with self.group.streams.on(Side.GATHER):
                self._written.wait()
                gather = Pending() if owns_all else self._start_all_gather(self._own_flat)
            self._sent_versions = [param._version for param in self._params]
            self.state = ParameterState.GATHERING
            self._gather = gather  # last: a thread that reads may end it from now on
        elif self.num_blocks:
            self.start_gather()
            self.wait()

    def refresh(self, *, keeps_bits: bool = False) -> None:
        """Take the values of the unsharded parameters, which were written from elsewhere, as the new ones.

        A sharded unit is unsharded in its own type: see `start_block`. keeps_bits: elements that were not written keep
        the master's bits that 16 bits cannot hold.
        """
        if self.pending is not None:
            self.pending.wait()
        self.note_versions()
        self._seen = None
        if self.is_sharded:
            with self.shard_in_memory(reads=False, writes=True):
                self.shard.copy_(self._own_flat)
        if self.master is not self.shard:
            if self._master_swap is not None:
                self._master_swap.bring_in(reads=keeps_bits)
            if keeps_bits:
                self.sync_external_writes()
            else:
                self.group.streams.join(Side.TO_HOST)  # an asynchronous save may still copy the master
                with self.offloaded.on_device(writes=True):
                    self.master.copy_(self._own_flat)
                self.renew_copy()
            if self._master_swap is not None:
                self._master_swap.send_out()

    def after_load(self) -> None:
        """Take note that the masters, and what follows them, have been read from elsewhere: nothing is edited since."""
        self.may_be_edited = self.is_touched = False
        self.count_write(self._layout.slots)
        self.forget_written()

    def sync_external_writes(self) -> None:
        """Take values that were written into the unsharded parameters since the last step over into the master.

        The others keep the master's bits that 16 bits cannot hold. The master must be in memory.
        """
        self.may_be_edited = False
        self.note_versions()
        self._take_into_master(self._own_flat)

    def _take_into_master(self, own: Tensor) -> None:
        """Take over what differs from the rounded master. own: 1-D [owned]."""
        if self.pending is not None:
            self.pending.wait()
        own = own.to(self.master.device)
        self.group.streams.join(Side.TO_HOST)  # see `refresh`
        with self.offloaded.on_device(writes=True):
            if take_over_edits(self.master, own, asks=not self.group.runtime.is_async_device):
                self.renew_copy()

    def note_access(self, *, is_in_thread: bool) -> None:
        """Note that a script has got the whole parameters, outside of forward and backward, and may write them.

        is_in_thread: in the one that trains, so that no update writes them now.
        """
        self.may_be_edited = self.is_touched = True
        if self.pending is not None and not self.pending.is_written_back and is_in_thread and self._seen is None:
            self._seen = digest(self.flat)

    @property
    def is_changed(self) -> bool:
        """Whether whole parameters have other values than when a script got them. Waits for the device."""
        return self._seen is not None and bool(digest(self.flat) != self._seen)

    def count_write(self, slots: Iterable[ParamSlot]) -> None:
        """Have autograd count a write into parameters that it has not seen, such as an update. Call it on every rank.

        A graph of before that goes back is then an error, as it is in a plain loop; else it would compute with the new
        values. `first_written` finds nothing of it.
        """
        indices = [slot.index for slot in slots if slot.index not in self._shares_count]
        torch.autograd.graph.increment_version([self._params[index] for index in indices])
        for versions in (self._versions, self._sent_versions):
            for index in indices:
                versions[index] += 1

    def note_versions(self) -> None:
        """Take note of what autograd has counted of writes into the parameters."""
        self._versions = [param._version for param in self._params]

    def forget_written(self) -> None:
        """Have `first_written` find nothing that was written until now."""
        self._lost = self._seen = self.written_in_flight = None
        self.note_versions()

    def first_written(self) -> ParamSlot | None:
        """Return the slot of the first parameter that was written in place since the versions were noted, or None.

        Of a sharded unit also of one whose write a block of `GatheredParameters` came after: it is lost all the same.
        """
        return self._lost or self._first_since(self._versions)

    def _first_since(self, versions: list[int]) -> ParamSlot | None:
        changed = (slot for slot in self._layout.slots if self._params[slot.index]._version != versions[slot.index])
        return next(changed, None)

    def first_elsewhere(self) -> ParamSlot | None:
        """Return the slot of the first parameter whose memory is not the unit's, or None."""
        is_released = self.is_sharded and self.state is not ParameterState.UNSHARDED
        for slot, param, view in zip(self._layout.slots, self._params, self._views, strict=True):
            if param.numel() if is_released else param.data_ptr() != view.data_ptr():
                return slot
        return None

    def copies(self) -> list[Tensor]:
        """Return the memory of its values beside the shard: what backward gathers from, what an optimizer writes."""
        return [each for each in (self._second, self.copy) if each is not None and each is not self.shard]

    def renew_copy(self) -> None:
        """Take over that the master was written from elsewhere: what sits a step out is sent from the copy too."""
        if self.copy is not None and self.copy is not self.shard:
            self.copy.copy_(self.master)


def find_shared_counts(units: Iterable[UnitParameters]) -> None:
    """Have `count_write` leave parameters alone that were made of views of one tensor. Call it with those of an engine.

    Autograd counts writes into them together: a count for one would look like a write into the others.
    """
    found = [(unit, index, param) for unit in units for index, param in enumerate(unit._params)]
    before = [param._version for _, _, param in found]
    torch.autograd.graph.increment_version([param for _, _, param in found])
    for (unit, index, param), version in zip(found, before, strict=True):
        if param._version != version + 1:
            unit._shares_count.add(index)


def any_thread() -> None:
    """Raise nothing: see `UnitParameters.check_thread`."""


def _cast_error(name: str, found: torch.dtype, expected: torch.dtype) -> EngineError:
    return EngineError(
        f"the parameter {name} became {found} after initialize(), which made it {expected}: at stage 3 it is a shard,"
        " and what is gathered is not cast",
        hint='set "fp16", "bf16" or "torch_autocast" in the config in place of model.half() or model.to(dtype)',
    )


def own_part(unit: UnitParameters, slot: ParamSlot) -> Tensor:
    """Return what this rank owns of a parameter of a unit, 1-D: a view, without memory where it is on disk.

    Of a parameter that is a unit of its own that is an equal part for each rank, padding included.
    """
    owned = slot.within(unit.owned)
    start = slot.offset + owned.start - unit.owned.start if owned else 0
    shard = unit.shard if unit._swap is None else torch.empty_like(unit.shard, device="meta")
    is_alone = -(-slot.numel // unit.group.world_size) == len(unit.owned) < unit._layout.padded_numel
    return shard if is_alone else shard[start : start + len(owned)]


def values_of(unit: UnitParameters) -> list[Tensor]:
    """Return what has the values of a unit's parameters on this rank, masters aside, while it is not in use."""
    whole = [] if unit.is_sharded else [unit.flat]
    return [each for each in (*whole, unit.shard, unit.copy, unit._second) if each is not None]


def param_info(name: str, param: nn.Parameter, dtype: torch.dtype, group: int | None = None) -> ParamInfo:
    """Return the facts of a parameter, also of one that is sharded.

    dtype: in which it is kept. group: its optimizer group; None where nothing trains it.
    """
    shape = unsharded_shape(param)
    return ParamInfo(name, shape, str(dtype).removeprefix("torch."), group is not None, group or 0, split_of(param))


def full_shape(param: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter, also of one that is sharded, or of which this rank has a part."""
    split = split_of(param)
    return unsharded_shape(param) if split is None else split.shape


_UNIT_PARAMS: Mark[UnitParameters] = Mark("unit_params")


def unit_params_of(param: nn.Parameter) -> UnitParameters | None:
    """Return where the values of a parameter are kept; None for one that no engine and no `zero.Init` has taken."""
    return _UNIT_PARAMS.of(param)
