"""A model of a GPU's streams: finds what some order of execution could make wrong, whatever order really occurs.

What the engine does with side streams and events is written down as it runs here, on a CPU and in the order of the
calls. Each operation, copy and collective belongs to a lane: the computing, a side stream, a stream of NCCL's, or the
host. Of each access to memory it is known which accesses it comes after in every legal order: those before it in its
lane, those that its lane has waited for, and what the host knew to have ended when it queued it. Two accesses to the
same bytes, one of them a write, with no such order between them are an error; so is memory that its stream gets back
while another lane may still use it. A run without an error has one result in all legal orders: that of the calls.

(Lamport's "happened before", with vector clocks, as in race detectors for threads. Running operations late in random
orders, as `LateCopier` does for copies, finds a missing wait only in the orders that are drawn.)
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness.train.collective import communicators
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.comm import communicator
from launcher.comm.buffers import BufferPool
from launcher.comm.communicator import Communicator, Transfer
from launcher.comm.device import HostDeviceCopier
from launcher.comm.streams import Side, StreamEvent
from launcher.kernels.api import Span
from launcher.kernels.reference import ReferenceKernel
from launcher.zero.disk import Swapped

HOST, COMPUTING = "host", "computing"
Clock = Counter[str]  # lane -> how much of it has come before

# What reads or writes no element of its arguments.
_METADATA = {
    "empty_like",
    "new_empty",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "set_",
    "resize_",
}
_BLOCKS_HOST = {"_local_scalar_dense", "is_nonzero", "equal"}
# Copies, and what the engine does after `.to(another device)`, a blocking copy that does not show where all is a CPU's.
_MOVES = {"copy_", "_to_copy", "ne", "where"}


@dataclass(frozen=True)
class _Access:
    what: str
    lane: str
    time: int
    writes: bool
    start: int  # in bytes from the begin of the storage
    stop: int


@dataclass
class _Memory:
    storage: torch.UntypedStorage  # held, so that its name stays its own
    owner: str  # the lane on which the allocator gave it
    accesses: list[_Access] = field(default_factory=list)
    kept_for: dict[str, int] = field(default_factory=dict)  # lane -> its time at `record_stream`

    @property
    def is_shared(self) -> bool:
        return any(access.lane != self.owner for access in self.accesses)

    @property
    def is_free(self) -> bool:
        """Whether only this record holds it: one reference within C++, and two of Python (one is of the question)."""
        num_uses: int = torch._C._storage_Use_Count(self.storage._cdata)  # type: ignore[attr-defined]
        return num_uses == 1 and sys.getrefcount(self.storage) == 2


class StreamModel(TorchDispatchMode):
    """One device and its host. Entered around what is to be written down; one thread."""

    def __init__(self) -> None:
        super().__init__()
        self._clocks: defaultdict[str, Clock] = defaultdict(Counter)
        self._current = [COMPUTING]
        self._memories: dict[int, _Memory] = {}
        self._shared: set[int] = set()
        self._host: dict[int, torch.UntypedStorage] = {}
        self._new: set[int] = set()  # made of no values of others: the host's, if the host uses them
        self._freed: defaultdict[str, list[_Access]] = defaultdict(list)  # lane -> uses of what its allocator got back
        self._is_paused = False
        self.num_accesses: Counter[str] = Counter()  # by lane
        self.collects = False  # errors, in place of raising them: a rank that raised would leave others waiting
        self.errors: list[str] = []
        self.num_transfers = 0  # of disks
        self.operations: Counter[str] = Counter()  # by name
        self.gathers: list[tuple[int, int]] = []  # how much computing there was, and how much each one waits for
        self.receives: list[tuple[int, int, int]] = []  # the same of these, and what a send or the host has awaited
        self._sent_at: Clock = Counter()

    # ---- lanes and what they wait for ----

    @property
    def lane(self) -> str:
        return self._current[-1]

    def time(self, lane: str) -> int:
        return self._clocks[lane][lane]

    def awaited(self, lane: str, other: str) -> int:
        """How much of the other lane comes before what is queued on a lane next."""
        return self._clocks[lane][other]

    def merge(self, lane: str, point: Clock) -> None:
        """Have a lane come after a point."""
        self._clocks[lane] |= point

    def point(self, lane: str) -> Clock:
        return self._queued(lane).copy()

    def _queued(self, lane: str) -> Clock:
        self._clocks[lane] |= self._clocks[HOST]  # the host queues what it queues after what it knows
        return self._clocks[lane]

    @contextlib.contextmanager
    def on(self, lane: str) -> Iterator[None]:
        self._current.append(lane)
        try:
            yield
        finally:
            self._current.pop()

    # ---- memory ----

    def add_host(self, tensor: Tensor) -> None:
        self._host[tensor.untyped_storage()._cdata] = tensor.untyped_storage()

    def is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    def access(self, lane: str, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Write one operation down."""
        clock = self._queued(lane)
        clock[lane] += 1
        self.num_accesses[lane] += 1
        for is_write, tensors in ((False, reads), (True, writes)):
            for tensor in tensors:
                self._touch(clock, what, lane, tensor, writes=is_write)

    def _touch(self, clock: Clock, what: str, lane: str, tensor: Tensor, *, writes: bool) -> None:
        if tensor.numel() == 0:
            return
        memory = self._memory(tensor.untyped_storage())
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = tensor.storage_offset() * tensor.itemsize
        access = _Access(what, lane, clock[lane], writes, start, start + extent * tensor.itemsize)
        kept = []
        for other in memory.accesses:
            overlaps = other.start < access.stop and access.start < other.stop
            if overlaps and (writes or other.writes) and clock[other.lane] < other.time:
                self._found(f"{_say(access)} is not ordered after {_say(other)}")
            is_within = access.start <= other.start and other.stop <= access.stop
            is_replaced = is_within and (writes or (other.lane == lane and not other.writes))
            if not is_replaced:
                kept.append(other)
        memory.accesses = [*kept, access]
        if lane != memory.owner:
            self._shared.add(memory.storage._cdata)

    def _memory(self, storage: torch.UntypedStorage) -> _Memory:
        owner = HOST if storage._cdata in self._host else COMPUTING
        return self._memories.setdefault(storage._cdata, _Memory(storage, owner))

    def allocated(self, storage: torch.UntypedStorage, lane: str) -> None:
        """Note that the allocator has given memory to a lane: perhaps what it got back just now."""
        self._find_freed()
        for access in self._freed.pop(lane, ()):
            if self._queued(lane)[access.lane] < access.time:
                self._found(f"{lane} gets memory back that {_say(access)} may still use")
        self._memories[storage._cdata] = _Memory(storage, lane)

    def gave_back(self, memory: _Memory) -> None:
        """Note that the allocator has memory back."""
        done = memory.kept_for
        others = [access for access in memory.accesses if access.lane != memory.owner]
        # The allocator waits for all that the lanes have come to that use it until now.
        users = [self._clocks[lane] for lane, time in done.items() if time == sys.maxsize]
        self._freed[memory.owner] += [
            access
            for access in others
            if access.time > max([done.get(access.lane, 0), *(clock[access.lane] for clock in users)])
        ]

    def emptied(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._memories:
            self.gave_back(self._memories.pop(storage._cdata))

    def _find_freed(self) -> None:
        for key in [key for key in self._shared if key not in self._memories or self._memories[key].is_free]:
            self._shared.discard(key)
            if key in self._memories:
                self.gave_back(self._memories.pop(key))
        if len(self._memories) > 2000:
            self._memories = {key: memory for key, memory in self._memories.items() if not memory.is_free}

    def keep(self, tensor: Tensor, lane: str) -> None:
        self._memory(tensor.untyped_storage()).kept_for[lane] = self.time(lane)

    def use(self, tensor: Tensor, lane: str) -> None:
        self._memory(tensor.untyped_storage()).kept_for[lane] = sys.maxsize  # as `record_stream`: until it is freed

    def uses_all(self, lane: str, storage: torch.UntypedStorage, what: str) -> None:
        """Note that the host, or a disk, reads and writes all of some memory."""
        whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        self.access(lane, what, [], [whole])

    def _found(self, error: str) -> None:
        if not self.collects:
            raise AssertionError(error)
        self.errors.append(error)

    # ---- operations ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_paused:
            with self.paused():
                self._note(func, args, kwargs or {}, result)
        return result

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name.split("::")[-1]
        reads, writes = _arguments(func, args, kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in given]
        if not fresh and not writes and name not in _BLOCKS_HOST:
            return  # a view
        if name in _METADATA:
            reads, writes = [], []
        homes = [self.is_host(tensor) for tensor in (*reads, *writes) if tensor.dim() or len(given) == 1]
        on_host = self.lane == HOST or (bool(homes) and all(homes))
        is_mixed = any(homes) and not on_host
        if is_mixed and name not in _MOVES:
            raise AssertionError(f"{name} takes tensors of the device and of the host")
        lane = HOST if on_host else self.lane
        self.operations[name] += 1
        for tensor in (*reads, *writes) if on_host else ():
            if tensor.untyped_storage()._cdata in self._new:
                self._memories.pop(tensor.untyped_storage()._cdata, None)
                self.add_host(tensor)
        for tensor in fresh:
            if on_host and tensor.dim():
                self.add_host(tensor)
            self.allocated(tensor.untyped_storage(), lane)
            if not reads and not writes:
                self._new.add(tensor.untyped_storage()._cdata)
        writes = writes if name.startswith(("empty", "new_empty")) else [*writes, *fresh]
        self.access(lane, name, reads, writes)
        blocks = is_mixed and not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if blocks or name in _BLOCKS_HOST:
            self.merge(HOST, self.point(lane))

    def transfers(self, group: Any, run: Callable[[], list[dist.Work]], transfers: Sequence[Transfer]) -> _Transfers:
        """Start transfers; write them down in the lane of their group, after what the current one has so far."""
        lane = f"NCCL {group.group_name}"
        self.merge(lane, self.point(self.lane))
        sent = [one.tensor for one in transfers if one.is_sent]
        received = [one.tensor for one in transfers if not one.is_sent]
        awaited = self._clocks[lane][COMPUTING]
        known = max(self._sent_at[lane], self.awaited(HOST, COMPUTING))
        self.receives += [(self.time(COMPUTING), awaited, known) for _ in received[:1]]
        if sent:
            self._sent_at[lane] = awaited
        with self.paused():
            works = run()
            self.access(lane, "transfer", sent, received)
        return _Transfers(_Work(self, self.point(lane), [*sent, *received]), works)

    def collective(
        self, kind: str, group: Any, run: Callable[[], dist.Work], reads: list[Tensor], writes: list[Tensor]
    ) -> _Work:
        """Run a collective now; write it down in the lane of its group, after what the current one has so far."""
        lane = f"NCCL {group.group_name}"
        self.merge(lane, self.point(self.lane))
        if kind == "all-gather":
            self.gathers.append((self.time(COMPUTING), self._clocks[lane][COMPUTING]))
        with self.paused():
            run().wait()
            self.access(lane, kind, reads, writes)
        return _Work(self, self.point(lane), [*reads, *writes])


class _Transfers:
    """Transfers of NCCL with other ranks. They really end where they are waited for: the other side begins later."""

    def __init__(self, work: _Work, works: list[dist.Work]) -> None:
        self._work, self._works = work, works

    def wait(self) -> None:
        for each in self._works:
            each.wait()
        self._work.wait()


class _Work:
    """Of NCCL: the lane that waits comes after the collective, whose tensors are held until then."""

    def __init__(self, model: StreamModel, point: Clock, tensors: list[Tensor]) -> None:
        self._model, self._point, self._tensors = model, point, tensors

    def wait(self) -> None:
        self._model.merge(self._model.lane, self._point)
        self._tensors.clear()


def _say(access: _Access) -> str:
    kind = "write" if access.writes else "read"
    return f"the {kind} of bytes {access.start} to {access.stop} by {access.what} ({access.lane} {access.time})"


def _arguments(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation reads, and those that it writes."""
    is_collective = func.namespace == "c10d"
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        is_written = is_collective or (argument.alias_info is not None and argument.alias_info.is_write)
        (writes if is_written else reads).extend(tensors)
    return reads, writes


# ---- what the engine gets instead of a GPU's ----


@dataclass(frozen=True)
class ModelEvent:
    model: StreamModel
    point: Clock

    @property
    def has_passed(self) -> bool:
        """Whether the host knows: where it does not, the event may be reached or not."""
        return all(self.model.awaited(HOST, lane) >= time for lane, time in self.point.items())

    def wait(self) -> None:
        self.model.merge(self.model.lane, self.point)

    def synchronize(self) -> None:
        """Wait in a thread of a disk: what the host learns of it, it learns with the transfer."""
        if threading.current_thread() is threading.main_thread():
            self.model.merge(HOST, self.point)


class ModelStreams:
    is_async = True

    def __init__(self, model: StreamModel) -> None:
        self._model = model

    def on(self, side: Side) -> contextlib.AbstractContextManager[None]:
        return self._model.on(side.name)

    def current(self) -> Side | None:
        return None if self._model.lane == COMPUTING else Side[self._model.lane]

    def record(self) -> StreamEvent:
        return ModelEvent(self._model, self._model.point(self._model.lane))

    def join(self, side: Side) -> None:
        self._model.merge(self._model.lane, self._model.point(side.name))

    def keep(self, tensor: Tensor, side: Side) -> None:
        self._model.keep(tensor, side.name)

    def record_stream(self, tensor: Tensor) -> None:
        self._model.use(tensor, self._model.lane)

    def synchronize(self, *sides: Side) -> None:
        for side in sides:
            self._model.merge(HOST, self._model.point(side.name))


def _copier_for(model: StreamModel) -> type[HostDeviceCopier]:
    class Copier(HostDeviceCopier):
        def empty(self, numel: int, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
            memory = super().empty(numel, dtype, is_pinned=is_pinned)
            model.add_host(memory)
            return memory

        def is_on_device(self, tensor: Tensor) -> bool:
            return not model.is_host(tensor)

    return Copier


def _pool_for(model: StreamModel) -> type[BufferPool]:
    class Pool(BufferPool):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.is_pooled = False  # as on a GPU

        def lend(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
            super().lend(storage, num_bytes)
            model.allocated(storage, model.lane)

        def _empty(self, storage: torch.UntypedStorage) -> None:
            model.emptied(storage)
            super()._empty(storage)

    return Pool


def _late_collectives(model: StreamModel) -> Iterator[Any]:
    rows_of = Communicator._gather_rows
    gather, scatter, reduce, exchange = (
        communicator.all_gather_single,
        communicator.reduce_scatter_single,
        dist.all_reduce,
        dist.all_to_all_single,
    )

    def all_gather(flat: Tensor, own: Tensor, *, group: Any, async_op: bool) -> _Work:
        assert async_op
        return model.collective(
            "all-gather", group, lambda: gather(flat, own, group=group, async_op=True), [own], [flat]
        )

    def reduce_scatter(output: Tensor, flat: Tensor, operation: Any, *, group: Any, async_op: bool) -> _Work:
        assert async_op
        run = lambda: scatter(output, flat, operation, group=group, async_op=True)  # noqa: E731
        return model.collective("reduce-scatter", group, run, [flat], [output])

    def all_reduce(flat: Tensor, operation: Any, *, group: Any, async_op: bool) -> _Work:
        assert async_op
        run = lambda: reduce(flat, operation, group=group, async_op=True)  # noqa: E731
        return model.collective("all-reduce", group, run, [], [flat])

    def all_to_all(output: Tensor, flat: Tensor, *, group: Any, async_op: bool) -> _Work:
        assert async_op
        run = lambda: exchange(output, flat, group=group, async_op=True)  # noqa: E731
        return model.collective("all-to-all", group, run, [flat], [output])

    class Dist:
        def __getattr__(self, name: str) -> Any:
            return {"all_reduce": all_reduce, "all_to_all_single": all_to_all}.get(name) or getattr(dist, name)

    def gather_rows(own: Communicator, values: Tensor) -> Tensor:  # is waited for at once, by whoever begins it
        with mock.patch("launcher.comm.communicator.all_gather_single", gather):
            return rows_of(own, values)

    start = Communicator._start

    def transfer(own: Communicator, transfers: list[Transfer]) -> list[Any]:
        return [model.transfers(own.process_group, lambda: start(own, transfers), transfers)]

    yield mock.patch.object(Communicator, "_start", transfer)
    yield mock.patch.object(Communicator, "_gather_rows", gather_rows)
    yield mock.patch("launcher.comm.communicator.all_gather_single", all_gather)
    yield mock.patch("launcher.comm.communicator.reduce_scatter_single", reduce_scatter)
    yield mock.patch("launcher.comm.communicator.dist", Dist())


def _disk_hooks(model: StreamModel) -> Iterator[Any]:
    memory, take_back, end_transfer = Swapped._memory, Swapped._take_back, Swapped._end_transfer
    lanes: dict[Swapped, str] = {}  # of the last transfer

    def used_by_the_disk(swapped: Swapped) -> memoryview:
        lanes[swapped] = f"disk {model.num_transfers}"
        model.num_transfers += 1
        with model.paused(), model.on(lanes[swapped]):
            swapped._last_use.wait()
            model.uses_all(lanes[swapped], swapped._storage, "a transfer of a disk")
        return memory(swapped)

    def waited_for(swapped: Swapped) -> None:
        if swapped._transfer is not None:
            model.merge(HOST, model.point(lanes[swapped]))
        end_transfer(swapped)

    def given_back(swapped: Swapped) -> None:
        with model.paused():
            model.uses_all(HOST, swapped._storage, "the next owner of a disk's memory")
        take_back(swapped)

    yield mock.patch.object(Swapped, "_memory", used_by_the_disk)
    yield mock.patch.object(Swapped, "_end_transfer", waited_for)
    yield mock.patch.object(Swapped, "_take_back", given_back)


@contextlib.contextmanager
def reference_kernels(model: StreamModel | None = None) -> Iterator[None]:
    """Have torch's operations update, which the model sees; those in host memory are the host's."""

    class Kernel(ReferenceKernel):
        def update(self, spans: Sequence[Span], grad_scale: float = 1.0) -> None:
            is_host = model is not None and any(model.is_host(span.master) for span in spans)
            with model.on(HOST) if model is not None and is_host else contextlib.nullcontext():
                super().update(spans, grad_scale)

    with (
        mock.patch("launcher.engine.optimizer_plan.kernel_for", return_value=Kernel()),
        mock.patch("launcher.zero.owned_gradient.kernel_for", return_value=Kernel()),
    ):
        yield


@contextlib.contextmanager
def modelled_streams() -> Iterator[StreamModel]:
    """Give groups made within this block a GPU's ways, and write down what is done with them."""
    model = StreamModel()
    with contextlib.ExitStack() as stack:
        stack.enter_context(communicators("nccl"))
        stack.enter_context(reference_kernels(model))
        stack.enter_context(mock.patch("launcher.comm.device.streams_of", return_value=ModelStreams(model)))
        stack.enter_context(mock.patch("launcher.comm.device.HostDeviceCopier", _copier_for(model)))
        stack.enter_context(mock.patch("launcher.comm.device.BufferPool", _pool_for(model)))
        for patch in (*_late_collectives(model), *_disk_hooks(model)):
            stack.enter_context(patch)
        yield model
