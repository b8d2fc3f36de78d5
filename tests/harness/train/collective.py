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

from launcher.comm.backends import GlooCommunicator, NcclCommunicator
from launcher.comm.buffers import BufferPool
from launcher.comm.communicator import Alone, Communicator
from launcher.comm.device import DeviceRuntime
from launcher.comm.pending import Pending

KINDS: dict[str, Callable[[Any, BufferPool], Communicator]] = {"gloo": GlooCommunicator, "nccl": NcclCommunicator}
_POISON = 0xFF  # in every byte: a NaN of every floating-point type


class LateCommunicator:
    """Results as late as a GPU's may come: when somebody waits for them. Until then there are NaNs in the outputs.

    Whoever reads an output too early gets other results. Inputs and outputs that have changed, or were given back,
    when somebody waits, are an error.
    """

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner

    def all_gather(self, flat: Tensor, own: Tensor) -> Pending:
        result = torch.empty_like(flat)
        return _late(self._inner.all_gather(result, own.clone()), [own], [(flat, result)])

    def reduce_scatter(self, flat: Tensor, output: Tensor, scale: float) -> Pending:
        result = torch.empty_like(output)
        return _late(self._inner.reduce_scatter(flat.clone(), result, scale), [flat], [(output, result)])

    def all_reduce(self, flat: Tensor, sent: Tensor, scale: float) -> Pending:
        result = sent.clone()
        if sent is flat:
            return _late(self._inner.all_reduce(result, result, scale), [], [(flat, result)])
        result = torch.empty_like(flat)
        pending = self._inner.all_reduce(result, sent.clone(), scale)
        return _late(pending, [], [(flat, result), (sent, torch.full_like(sent, torch.nan))])

    def all_to_all(self, flat: Tensor, output: Tensor) -> Pending:
        result = torch.empty_like(output)
        return _late(self._inner.all_to_all(flat.clone(), result), [flat], [(output, result)])

    def exchange(self, sends: list[Tensor], receives: list[Tensor]) -> Pending:
        results = [torch.empty_like(target) for target in receives]
        pending = self._inner.exchange([tensor.clone() for tensor in sends], results)
        return _late(pending, sends, list(zip(receives, results, strict=True)))

    def gather_rows(self, values: Tensor) -> Tensor:
        return self._inner.gather_rows(values)

    def broadcast(self, tensors: list[Tensor], source: int) -> None:
        self._inner.broadcast(tensors, source)


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


class CountingCommunicator:
    """Counts the collectives by name."""

    def __init__(self, inner: Communicator, counts: Counter[str]) -> None:
        self._inner, self._counts = inner, counts

    def __getattr__(self, name: str) -> Any:
        def counted(*args: Any) -> Any:
            self._counts[name] += 1
            return getattr(self._inner, name)(*args)

        return counted


@contextlib.contextmanager
def communicators(kind: str, wrap: Callable[[Communicator], Any] = lambda inner: inner) -> Iterator[None]:
    """Give groups made within this block communicators of a kind, as `wrap` returns them."""

    def chosen(process_group: dist.ProcessGroup | None, runtime: DeviceRuntime) -> Any:
        return wrap(Alone() if process_group is None else KINDS[kind](process_group, runtime.buffers))

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
