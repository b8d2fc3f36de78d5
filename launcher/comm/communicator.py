"""The collectives of a group of ranks on flat buffers: counted, named, measured where a config asks, for each backend.

Buffers are 1-D, with one equal chunk for each rank. gloo's collectives between CPUs are pairwise sends and sums in rank
order. A reduce-scatter by pairs sends every byte once (gloo's own sends as much as an all-reduce), and an all-gather by
pairs is twice as quick as gloo's; measured at 2 ranks, 16 MB: 11.1 ms against 29.7 ms, and 7.0 ms against 15.3 ms. Sums
are taken in fp32, in rank order on every rank, so a result has the same bits wherever and however often it is computed.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm import observe
from launcher.comm.device import DeviceRuntime, backend_name
from launcher.comm.pending import Pending, begin_call, current_call, end_call, name_next
from launcher.kernels.cpu import scaled_copy

# Since torch 2.13 the collectives on one flat buffer have other names, and the old ones warn.
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_NUM_TAGS = 2**31

T = TypeVar("T")


class Transfer(NamedTuple):
    """A tensor on its way between this rank and a peer of the group."""

    tensor: Tensor
    peer: int
    is_sent: bool  # else it is received


class Communicator(abc.ABC):
    """The collectives of one group. Every rank must call the same ones, in the same order.

    A public method is a collective's contract; it counts, names and measures the call, and the method of the same name
    with an underscore carries it out, by backend. Peers are ranks of the group, never of the world.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, runtime: DeviceRuntime) -> None:
        """process_group: None for a single process. runtime: of the device that has the buffers."""
        self.process_group = process_group
        self.rank, self.world_size = (0, 1) if process_group is None else (process_group.rank(), process_group.size())
        self.device = runtime.device
        self._buffers = runtime.buffers  # lend memory for sums, and for what is received before it is added

    def reduce_scatter(self, flat: Tensor, output: Tensor, scale: float = 1.0) -> Pending:
        """Start summing `flat` over all ranks; this rank's chunk of the sum, times `scale`, will be in `output`.

        flat: 1-D, numel = world size * chunk. output: 1-D, numel = chunk; may be this rank's chunk of `flat` itself.
        `flat` is sent as it is. On gloo the sum is taken in fp32 and in rank order, on NCCL in the type of `flat` and
        in NCCL's order.
        """
        begun_s = self._begin("reduce_scatter")
        return self._begun("reduce_scatter", [flat], begun_s, self._reduce_scatter(flat, output, scale))

    @abc.abstractmethod
    def sum_dtype(self, dtype: torch.dtype, scale: float) -> torch.dtype:
        """Return the type that holds all that a sum of tensors of `dtype`, times `scale`, has of `reduce_scatter`."""

    def all_gather(self, flat: Tensor, own: Tensor | None = None) -> Pending:
        """Start filling `flat` with every rank's chunk.

        flat: 1-D, numel = world size * chunk. own: this rank's chunk, 1-D, which must stay as it is until `wait()`;
        None: it is in its place already.
        """
        if own is None:
            numel = flat.numel() // self.world_size
            own = flat[self.rank * numel : (self.rank + 1) * numel]
        begun_s = self._begin("all_gather")
        return self._begun("all_gather", [flat], begun_s, self._all_gather(flat, own))

    def all_reduce(self, flat: Tensor, scale: float = 1.0, *, sent: Tensor | None = None) -> Pending:
        """Start summing `flat` over all ranks in place, times `scale`.

        On gloo with more than two ranks a reduce-scatter, then as a second phase an all-gather: ranks must `advance` or
        `wait` in the same order, too. flat: 1-D, numel = world size * chunk. sent: what is summed into `flat` instead
        of its own content, perhaps of another dtype; its own content is undefined afterwards. The sum is taken as by
        `reduce_scatter`.
        """
        begun_s = self._begin("all_reduce")
        pending = self._all_reduce(flat, flat if sent is None else sent, scale)
        return self._begun("all_reduce", [flat], begun_s, pending)

    def all_to_all(self, flat: Tensor, output: Tensor) -> Pending:
        """Start sending chunk r of `flat` to rank r, and making chunk r of `output` what rank r has sent here.

        flat, output: 1-D, of the same dtype, numel = world size * chunk; they must not overlap.
        """
        begun_s = self._begin("all_to_all")
        return self._begun("all_to_all", [flat], begun_s, self._all_to_all(flat, output))

    def exchange(self, sends: list[Tensor], receives: list[Tensor]) -> Pending:
        """Start sending `sends[r]` to every rank r, and filling `receives[r]` with what rank r has sent here.

        sends, receives: 1-D, of one dtype and any sizes, where the two sides of each transfer agree; 0 sends nothing.
        """
        begun_s = self._begin("exchange")
        return self._begun("all_to_all", sends, begun_s, self._exchange(sends, receives))

    def transfer(self, transfers: list[Transfer]) -> Pending:
        """Start sending to, and receiving from, single ranks: no collective, so only these ranks call it.

        The two sides of each transfer must agree in size, and start their transfers in the same order.
        """
        observe.note_sent(sum(one.tensor.nbytes for one in transfers if one.is_sent))
        return Pending(self._start(transfers) if transfers else [])

    def gather_rows(self, values: Tensor) -> Tensor:
        """Return every rank's small tensor, [world size, *shape] in rank order."""
        begun_s = self._begin("gather_rows")
        rows = self._gather_rows(values.reshape(-1))
        self._begun("all_gather", [rows], begun_s, Pending())
        return rows.view(self.world_size, *values.shape)

    def gather_scalars(self, value: float) -> list[float]:
        """Return every rank's value, in rank order."""
        own = torch.tensor([value], dtype=torch.float64, device=self.device)
        values: list[float] = self.gather_rows(own).reshape(-1).tolist()
        return values

    def sum_scalars(self, values: Tensor) -> Tensor:
        """Return the sum of a small float64 tensor over all ranks, added in rank order on each of them."""
        return self.gather_rows(values).sum(dim=0)

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, which is pickled, in rank order."""
        values = [value] * self.world_size
        if self.process_group is not None:
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def broadcast(self, tensors: list[Tensor], source: int = 0) -> None:
        """Overwrite every rank's tensors with those of rank `source`, which have the same shapes."""
        begun_s = self._begin("broadcast")
        self._broadcast(tensors, source)
        self._begun("broadcast", tensors, begun_s, Pending())

    def _begin(self, kind: str) -> float | None:
        """Count a call; return the time at which it begins, None when it is not measured."""
        if self.process_group is None:
            name_next("")  # nothing is begun
            return None
        begin_call(kind, self.process_group)
        for listener in observe.listeners:
            listener.begins()
        return observe.begin(self.device)

    def _begun(self, kind: str, tensors: list[Tensor], begun_s: float | None, pending: Pending) -> Pending:
        """Give a collective its name; when calls are measured, wait for it."""
        if observe.listeners:
            self._tell(kind, tensors)
        end_call()
        pending.kind = kind
        if begun_s is not None:
            pending.wait()
            observe.end(begun_s, kind, self.world_size, tensors, self.device)
        return pending

    def _tell(self, kind: str, tensors: list[Tensor]) -> None:
        call = current_call()
        for listener in observe.listeners:
            if call is not None and self.process_group is not None:
                listener.has_begun(kind, self.process_group, tensors, call.what)

    # ---- How they are carried out: here what is alike for all backends ----

    @abc.abstractmethod
    def _reduce_scatter(self, flat: Tensor, output: Tensor, scale: float) -> Pending: ...

    @abc.abstractmethod
    def _all_gather(self, flat: Tensor, own: Tensor) -> Pending: ...

    @abc.abstractmethod
    def _all_reduce(self, flat: Tensor, sent: Tensor, scale: float) -> Pending: ...

    @abc.abstractmethod
    def _all_to_all(self, flat: Tensor, output: Tensor) -> Pending: ...

    def _exchange(self, sends: list[Tensor], receives: list[Tensor]) -> Pending:
        receives[self.rank].copy_(sends[self.rank])
        return Pending(self._send_and_receive(sends, receives))

    def _gather_rows(self, values: Tensor) -> Tensor:
        observe.note_sent(values.nbytes * (self.world_size - 1))
        rows = values.new_empty(self.world_size * values.numel())
        Pending([all_gather_single(rows, values, group=self.process_group, async_op=True)]).wait()
        return rows

    def _broadcast(self, tensors: list[Tensor], source: int) -> None:
        if self.rank == source:
            observe.note_sent(sum(tensor.nbytes for tensor in tensors) * (self.world_size - 1))
        dense = [each.contiguous() for each in tensors]
        # As bytes: backends lack types that buffers have, such as uint16, and complex numbers.
        sent = [each.view(-1).view(torch.uint8) for each in dense]
        works = [dist.broadcast(t, group=self.process_group, group_src=source, async_op=True) for t in sent]
        Pending(works).wait()
        for mine, received in zip(tensors, dense, strict=True):
            if received is not mine:
                mine.copy_(received)

    def _send_and_receive(self, sends: list[Tensor], receives: list[Tensor]) -> list[dist.Work]:
        """Send `sends[peer]` to, and receive `receives[peer]` from, every other rank at once."""
        rank, world_size = self.rank, self.world_size
        transfers: list[Transfer] = []
        observe.note_sent(sum(sends[peer].nbytes for peer in range(world_size) if peer != rank))
        for distance in range(1, world_size):  # each rank starts at another peer: no rank is a hot spot
            to, source = (rank + distance) % world_size, (rank - distance) % world_size
            if sends[to].numel():
                transfers.append(Transfer(sends[to], to, is_sent=True))
            if receives[source].numel():
                transfers.append(Transfer(receives[source], source, is_sent=False))
        return self._start(transfers) if transfers else []

    def _start(self, transfers: list[Transfer]) -> list[dist.Work]:
        """Start transfers that wait for one another."""
        group = self.process_group
        calls = [
            dist.P2POp(dist.isend if one.is_sent else dist.irecv, one.tensor, group=group, group_peer=one.peer)
            for one in transfers
        ]
        return list(dist.batch_isend_irecv(calls))


class SingleProcess(Communicator):
    """The collectives of a single process: copies."""

    def sum_dtype(self, dtype: torch.dtype, scale: float) -> torch.dtype:
        return dtype if scale == 1.0 else _sum_dtype(dtype)

    def _reduce_scatter(self, flat: Tensor, output: Tensor, scale: float) -> Pending:
        _copy_unless_same(output, flat)
        return Pending([], lambda: _scale_in_place(output, scale))

    def _all_gather(self, flat: Tensor, own: Tensor) -> Pending:
        _copy_unless_same(flat, own)
        return Pending()

    def _all_reduce(self, flat: Tensor, sent: Tensor, scale: float) -> Pending:
        return self._reduce_scatter(sent, flat, scale)

    def _all_to_all(self, flat: Tensor, output: Tensor) -> Pending:
        output.copy_(flat)
        return Pending()

    def _gather_rows(self, values: Tensor) -> Tensor:
        return values

    def _broadcast(self, tensors: list[Tensor], source: int) -> None:
        pass


class GlooCommunicator(Communicator):
    """Between CPUs."""

    process_group: dist.ProcessGroup

    def sum_dtype(self, dtype: torch.dtype, scale: float) -> torch.dtype:
        return _sum_dtype(dtype)

    def _reduce_scatter(self, flat: Tensor, output: Tensor, scale: float) -> Pending:
        """16-bit gradients are sent as they are and summed without loss."""
        chunks = list(flat.chunk(self.world_size))
        own = chunks[self.rank]
        received = [
            own if peer == self.rank else self._buffers.borrow(own.numel(), own.dtype)
            for peer in range(self.world_size)
        ]

        def finish() -> None:
            self._add_in_rank_order(received, output, scale)
            for peer, term in enumerate(received):
                if peer != self.rank:
                    self._buffers.give_back(term)

        return Pending(self._send_and_receive(chunks, received), finish)

    def _add_in_rank_order(self, terms: list[Tensor], output: Tensor, scale: float) -> None:
        wide = _sum_dtype(output.dtype)
        own = terms[self.rank]
        if self.world_size == 2 and own.dtype == output.dtype == wide:  # a + b = b + a: one pass, no temporary
            torch.add(terms[0], terms[1], out=output)
            _scale_in_place(output, scale)
        elif self.rank == 0 and output.dtype == wide:  # the first term may stand in `output` already
            output.copy_(own)
            for term in terms[1:]:
                output.add_(term)
            _scale_in_place(output, scale)
        else:
            total = terms[0].to(wide, copy=True)
            for term in terms[1:]:
                total.add_(term)
            _scale_in_place(total, scale)
            output.copy_(total)

    def _all_gather(self, flat: Tensor, own: Tensor) -> Pending:
        chunks = list(flat.chunk(self.world_size))
        works = self._send_and_receive([own] * self.world_size, chunks)
        _copy_unless_same(chunks[self.rank], own)  # while the others' are on their way
        return Pending(works)

    def _all_reduce(self, flat: Tensor, sent: Tensor, scale: float) -> Pending:
        # Of two terms every order is rank order, and gloo's own is quicker there.
        if self.world_size == 2 and sent is flat and flat.dtype == torch.float32:
            observe.note_sent(flat.nbytes)
            work = dist.all_reduce(flat, group=self.process_group, async_op=True)
            return Pending([work], lambda: _scale_in_place(flat, scale))
        own = flat.chunk(self.world_size)[self.rank]
        scattered = self._reduce_scatter(sent, own, scale)
        add = scattered.finish

        def gather() -> Pending:
            if add is not None:
                add()
            return self._all_gather(flat, own)

        scattered.finish = gather
        return scattered

    def _all_to_all(self, flat: Tensor, output: Tensor) -> Pending:
        return self._exchange(list(flat.chunk(self.world_size)), list(output.chunk(self.world_size)))

    def _start(self, transfers: list[Transfer]) -> list[dist.Work]:
        """Start transfers, each with a tag for its size.

        Gloo ends the process when a message is larger than what is waiting for it. Ranks whose collectives have
        different orders wait for each other instead: see `launcher.zero.order_watch`. The group itself is called:
        `dist.batch_isend_irecv` checks each operation again, and would do no more.
        """
        group = self.process_group
        return [
            (group.send if one.is_sent else group.recv)([one.tensor], one.peer, one.tensor.nbytes % _NUM_TAGS)
            for one in transfers
        ]


class NcclCommunicator(Communicator):
    """Between GPUs: every call is one collective on one flat buffer.

    Rings, trees and reductions within the switches are NCCL's to choose. So are the order of sums, which is not that of
    the ranks, and thereby their last bits; they are taken in the type that travels.
    """

    def sum_dtype(self, dtype: torch.dtype, scale: float) -> torch.dtype:
        return dtype if self._operation(scale)[1] == 1.0 else _sum_dtype(dtype)

    def _reduce_scatter(self, flat: Tensor, output: Tensor, scale: float) -> Pending:
        observe.note_sent(flat.nbytes // self.world_size * (self.world_size - 1))
        operation, remaining = self._operation(scale)
        if flat.dtype == output.dtype:
            work = reduce_scatter_single(output, flat, operation, group=self.process_group, async_op=True)
            return Pending([work], lambda: _scale_in_place(output, remaining))
        total = self._buffers.borrow(output.numel(), flat.dtype)

        def finish() -> None:
            _convert(total, output, remaining)
            self._buffers.give_back(total)

        work = reduce_scatter_single(total, flat, operation, group=self.process_group, async_op=True)
        return Pending([work], finish)

    def _all_gather(self, flat: Tensor, own: Tensor) -> Pending:
        observe.note_sent(own.nbytes * (self.world_size - 1))
        return Pending([all_gather_single(flat, own, group=self.process_group, async_op=True)])

    def _all_reduce(self, flat: Tensor, sent: Tensor, scale: float) -> Pending:
        observe.note_sent(2 * (self.world_size - 1) * sent.nbytes // self.world_size)  # a ring's: the least there is
        operation, remaining = self._operation(scale)
        work = dist.all_reduce(sent, operation, group=self.process_group, async_op=True)
        return Pending([work], lambda: _convert(sent, flat, remaining))

    def _all_to_all(self, flat: Tensor, output: Tensor) -> Pending:
        observe.note_sent(flat.nbytes // self.world_size * (self.world_size - 1))
        return Pending([dist.all_to_all_single(output, flat, group=self.process_group, async_op=True)])

    def _operation(self, scale: float) -> tuple[dist.ReduceOp.RedOpType, float]:
        """Return what NCCL computes, and the factor that is left: the mean costs no pass of its own.

        NCCL divides each term before it adds it, so that a mean of fp16 overflows only where a term does.
        """
        return (dist.ReduceOp.AVG, 1.0) if scale == 1.0 / self.world_size else (dist.ReduceOp.SUM, scale)


def communicator_for(process_group: dist.ProcessGroup | None, runtime: DeviceRuntime) -> Communicator:
    """Return the communicator for what carries the device's memory. Backends other than gloo have quick collectives."""
    if process_group is None:
        return SingleProcess(None, runtime)
    kind = GlooCommunicator if backend_name(process_group, runtime.device) == "gloo" else NcclCommunicator
    return kind(process_group, runtime)


def _convert(total: Tensor, output: Tensor, scale: float) -> None:
    """Write a sum times `scale` to `output`, which may be the sum itself."""
    if total is output or output.dtype == _sum_dtype(output.dtype):
        _copy_unless_same(output, total)
        _scale_in_place(output, scale)
    else:  # what 16 bits cannot hold may be a sum, and not the mean
        output.copy_(total.to(_sum_dtype(output.dtype)).mul_(scale))


def _copy_unless_same(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        scaled_copy(target, source, 1.0)


def _scale_in_place(tensor: Tensor, scale: float) -> None:
    if scale != 1.0:
        tensor.mul_(scale)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums that end in `dtype` are scaled: never a 16-bit one."""
    return torch.promote_types(dtype, torch.float32)
