"""Test doubles of communicators: late ones, counting ones, and NCCL's way over gloo's collectives."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm.buffers import BufferPool
from launcher.comm.communicator import Communicator, GlooCommunicator, NcclCommunicator, SingleProcess, Transfer
from launcher.comm.device import DeviceRuntime
from launcher.comm.pending import Pending

KINDS: dict[str, type[Communicator]] = {"gloo": GlooCommunicator, "nccl": NcclCommunicator}
_POISON = 0xFF  # in every byte: a NaN of every floating-point type


class _Wrapper(Communicator):
    """A communicator that has another one carry out the collectives."""

    def __init__(self, inner: Communicator) -> None:
        vars(self).update(vars(inner))  # its ranks and its device
        self._inner = inner

    def sum_dtype(self, dtype: torch.dtype, scale: float) -> torch.dtype:
        return self._inner.sum_dtype(dtype, scale)

    def _start(self, transfers: list[Transfer]) -> list[dist.Work]:
        return self._inner._start(transfers)


class LateCommunicator(_Wrapper):
    """Results as late as a GPU's may come: when somebody waits for them. Until then there are NaNs in the outputs.

    Whoever reads an output too early gets other results. Inputs and outputs that have changed, or were given back,
    when somebody waits, are an error.
    """

    def _all_gather(self, flat: Tensor, own: Tensor) -> Pending:
        result = torch.empty_like(flat)
        return _late(self._inner._all_gather(result, own.clone()), [own], [(flat, result)])

    def _reduce_scatter(self, flat: Tensor, output: Tensor, scale: float) -> Pending:
        result = torch.empty_like(output)
        return _late(self._inner._reduce_scatter(flat.clone(), result, scale), [flat], [(output, result)])

    def _all_reduce(self, flat: Tensor, sent: Tensor, scale: float) -> Pending:
        result = sent.clone()
        if sent is flat:
            return _late(self._inner._all_reduce(result, result, scale), [], [(flat, result)])
        result = torch.empty_like(flat)
        pending = self._inner._all_reduce(result, sent.clone(), scale)
        return _late(pending, [], [(flat, result), (sent, torch.full_like(sent, torch.nan))])

    def _all_to_all(self, flat: Tensor, output: Tensor) -> Pending:
        result = torch.empty_like(output)
        return _late(self._inner._all_to_all(flat.clone(), result), [flat], [(output, result)])

    def _exchange(self, sends: list[Tensor], receives: list[Tensor]) -> Pending:
        results = [torch.empty_like(target) for target in receives]
        pending = self._inner._exchange([tensor.clone() for tensor in sends], results)
        return _late(pending, sends, list(zip(receives, results, strict=True)))

    def _gather_rows(self, values: Tensor) -> Tensor:
        return self._inner._gather_rows(values)

    def _broadcast(self, tensors: list[Tensor], source: int) -> None:
        self._inner._broadcast(tensors, source)


def _late(pending: Pending, inputs: list[Tensor], outputs: list[tuple[Tensor, Tensor]]) -> Pending:
    for target, _ in outputs:
        _bytes_of(target).fill_(_POISON)
    watched = [(tensor, tensor.clone()) for tensor in (*inputs, *(target for target, _ in outputs))]

    def arrive() -> None:
        pending.wait()
        for tensor, before in watched:
            assert tensor.untyped_storage().nbytes(), "a buffer was given back before the collective had ended"
            is_same = torch.equal(_bytes_of(tensor), _bytes_of(before))
            assert is_same, "a buffer was written before the collective had ended"
        for target, result in outputs:
            target.copy_(result)

    return Pending([], arrive)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint8)


def _counted(name: str) -> Callable[..., Any]:
    def carry_out(communicator: CountingCommunicator, *args: Any) -> Any:
        communicator.counts[name] += 1
        return getattr(communicator._inner, f"_{name}")(*args)

    return carry_out


class CountingCommunicator(_Wrapper):
    """Counts the collectives by name."""

    def __init__(self, inner: Communicator, counts: Counter[str]) -> None:
        super().__init__(inner)
        self.counts = counts

    _reduce_scatter, _all_gather = _counted("reduce_scatter"), _counted("all_gather")
    _all_reduce, _all_to_all = _counted("all_reduce"), _counted("all_to_all")
    _exchange, _gather_rows, _broadcast = _counted("exchange"), _counted("gather_rows"), _counted("broadcast")


@contextlib.contextmanager
def communicators(kind: str, wrap: Callable[[Communicator], Any] = lambda inner: inner) -> Iterator[None]:
    """Give groups made within this block communicators of a kind, as `wrap` returns them."""

    def chosen(process_group: dist.ProcessGroup | None, runtime: DeviceRuntime) -> Any:
        return wrap((SingleProcess if process_group is None else KINDS[kind])(process_group, runtime))

    with mock.patch("launcher.comm.groups.communicator_for", chosen):
        yield


@contextlib.contextmanager
def poisoned_buffers() -> Iterator[None]:
    """Fill memory with NaNs where a pool lends it, and where it takes it back: a view that is read later has them."""
    lend, take_back = BufferPool.lend, BufferPool.take_back

    def fill(pool: BufferPool, storage: torch.UntypedStorage) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device=pool.device)
        whole.set_(storage, 0, (storage.nbytes(),), (1,)).fill_(_POISON)

    def lend_poisoned(pool: BufferPool, storage: torch.UntypedStorage, num_bytes: int) -> None:
        lend(pool, storage, num_bytes)
        fill(pool, storage)

    def take_back_poisoned(pool: BufferPool, storage: torch.UntypedStorage) -> None:
        fill(pool, storage)
        take_back(pool, storage)

    with (
        mock.patch.object(BufferPool, "lend", lend_poisoned),
        mock.patch.object(BufferPool, "take_back", take_back_poisoned),
    ):
        yield


@contextlib.contextmanager
def late_group(kind: str = "gloo") -> Iterator[None]:
    """Give groups made within this block late communicators, and buffers that are poisoned when given back."""
    with communicators(kind, LateCommunicator), poisoned_buffers():
        yield
