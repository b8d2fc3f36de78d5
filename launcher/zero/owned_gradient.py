"""The summed gradient of what a rank owns of a unit: on the device, in host memory or on disk, for its optimizer.

[Note: 16-bit sums in host memory] The bus to host memory is slower than all else that a gradient passes. Where a sum
over the ranks has 16 bits, and is the first since the last step, it crosses the bus in these: it is kept so, at the
begin of the memory that fp32 sums have, and the optimizer's kernel reads it as it is. A further sum is added to it in
fp32, on the device, and all of it is fp32 from then on. Whoever writes asks for `widened` memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from launcher.comm.groups import RankGroup
from launcher.comm.streams import PASSED, Side, StreamEvent
from launcher.kernels.select import kernel_for
from launcher.zero.placement import Placement


def sum_of_squares(grad: Tensor, parts: Sequence[slice] = (slice(None),)) -> Tensor:
    """Return the sum of squares of parts of a gradient, scalar fp64; not finite when an element is not."""
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=grad.device)
    kernel = kernel_for(grad.device.type) if grad.device.type == "cpu" else None  # elsewhere: see `measure_all`
    if kernel is not None:
        return kernel.sum_of_squares([grad[part] for part in parts])
    # Its sum in fp64 is 40 times slower on a CPU.
    norms = [torch.linalg.vector_norm(grad[part], dtype=torch.float32) for part in parts]
    return torch.stack(norms).double().square().sum()


def measure_all(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the sum of squares of gradients of one device, at least one, scalar fp64, in one launch for each type.

    A kernel on a GPU reads a table of addresses: a call for each unit would need a table for each. Returns, too, which
    element is the first that is not finite, as `Kernel.measure` has it; None: there is no kernel that finds it in the
    same pass.
    """
    kernel = kernel_for(grads[0].device.type)
    if kernel is not None:
        return kernel.measure(grads)
    return torch.stack(torch._foreach_norm(list(grads), 2, torch.float32)).double().square().sum(), None


class OwnedGradient:
    """Sums over ranks and micro-batches, added up in `grad`. The optimizer reads `optimizer_grad`.

    Both are read only, where a sum may be kept in 16 bits: see [Note: 16-bit sums in host memory].
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        group: RankGroup,
        placement: Placement,
        *,
        kept: Tensor | None,
        turns: bool,
    ) -> None:
        """kept: 1-D [owned], memory of the device to add up in, copied to `optimizer_grad` before a step; None: each
        sum goes to `optimizer_grad` as soon as it is there.

        turns: two buffers take turns, because a delayed update reads one beside the next backward.
        """
        self._group = group
        self._copier = group.copier
        self._is_offloaded = placement.is_offloaded and kept is None
        # The memory, 1-D [owned] in the type of sums.
        self._grad = kept if kept is not None else placement.empty(numel, dtype, group).zero_()
        self._optimizer_grad = self._grad
        if placement.is_offloaded and not self._is_offloaded:
            self._optimizer_grad = placement.empty(numel, dtype, group).zero_()
        self._spare_grad = placement.empty(numel, dtype, group) if turns else self._optimizer_grad
        self._kept_dtype = dtype  # of what is in it
        # Its 16-bit views, made with the first such sum: there must be memory, which a disk takes between uses.
        self._narrow: dict[Tensor, Tensor] = {}
        self._is_swapped = False
        self.swap = placement.swapped(self._optimizer_grad)
        if self.swap is not None:
            self.swap.drop()
        self.holds_sum = False  # of an earlier micro-batch, to which the next one is added
        self.stored: StreamEvent = PASSED  # the last copy into `optimizer_grad`
        self._fetched: Tensor | None = None  # 1-D [owned], what is kept, on the device or being copied there
        self._arrival: StreamEvent = PASSED  # of it

    @property
    def grad(self) -> Tensor:
        """What is kept, 1-D [owned], where it is added up."""
        return self._in_kept_dtype(self._grad)

    @property
    def optimizer_grad(self) -> Tensor:
        """The same, 1-D [owned], where the optimizer reads it."""
        return self._in_kept_dtype(self._optimizer_grad)

    def buffers(self) -> list[Tensor]:
        """Return the memory of both."""
        return [self._grad, self._optimizer_grad]

    def _in_kept_dtype(self, memory: Tensor) -> Tensor:
        if memory.dtype == self._kept_dtype:
            return memory
        if memory not in self._narrow:
            self._narrow[memory] = memory.view(self._kept_dtype)[: memory.numel()]
        return self._narrow[memory]

    def widened(self) -> Tensor:
        """Return `grad`, which must be in memory, in the type of sums: to be written."""
        if self._kept_dtype != self._grad.dtype:
            narrow, self._kept_dtype = self.grad.clone(), self._grad.dtype
            self._grad.copy_(narrow)
        return self._grad

    @property
    def has_buffer(self) -> bool:
        """Whether a sum over the ranks can arrive in `grad` itself."""
        return not self._is_offloaded

    def begin_backward(self) -> None:
        """Have the next gradient come into other memory than the one that was handed over."""
        if self._is_swapped:
            self._optimizer_grad, self._spare_grad, self._is_swapped = self._spare_grad, self._optimizer_grad, False
            if self._is_offloaded:
                self._grad = self._optimizer_grad

    def start_fetch(self) -> None:
        """Start bringing what is kept to the device: a sum that will be added to it is in flight."""
        if not (self.holds_sum and self._is_offloaded):
            return
        if self.swap is not None:
            self.swap.start_reading()
        elif not self._copier.is_on_device(self.grad):
            self._fetch()

    def _fetch(self) -> None:
        self.stored.wait()
        self._fetched = self._group.buffers.borrow(self.grad.numel(), self.grad.dtype)
        self._arrival = self._copier.copy(self._fetched, self.grad)
        if self.swap is not None:
            self.swap.used_until(self._arrival)

    def keep(self, arrived: Tensor) -> Tensor:
        """Add a sum, 1-D [owned] on the device, to what is kept. Returns the total, on the device.

        arrived: in 16 bits to be kept in these, which is for the first sum alone.
        """
        if not self._is_offloaded:
            return (self._grad.add_ if self.holds_sum else self._grad.copy_)(arrived)
        if self.holds_sum:
            self.add_to(arrived)
        self._kept_dtype = min(self._grad.dtype, arrived.dtype, key=lambda dtype: dtype.itemsize)
        kept = arrived.to(self._kept_dtype)  # rounded before it is measured, as where it stays on the device
        self._offload_grad(kept)
        if kept is not arrived:
            self._group.streams.keep(kept, Side.TO_HOST)
        return kept

    def add_to(self, arrived: Tensor) -> None:
        """Add what is kept to `arrived`, 1-D [owned] on the device."""
        if self._is_offloaded and self.swap is not None:
            self.swap.bring_in()
        if not self._is_offloaded or self._copier.is_on_device(self.grad):
            arrived.add_(self.grad)
            return
        if self._fetched is None:
            self._fetch()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None
        self._arrival.wait()
        arrived.add_(fetched)
        self._group.buffers.give_back(fetched)

    def give_back(self, arrived: Tensor) -> None:
        """Give the borrowed memory of what was kept back to its pool; it may have to be copied to the host yet."""
        streams = self._group.streams
        if self._is_offloaded:
            so_far = streams.record()
            with streams.on(Side.TO_HOST):
                so_far.wait()
                self._group.buffers.give_back(arrived)
        else:
            self._group.buffers.give_back(arrived)

    def copy_to_optimizer(self) -> None:
        """Copy what was added up on the device to `optimizer_grad`."""
        if self._optimizer_grad is not self._grad:
            self._offload_grad(self._grad)

    def _offload_grad(self, grad: Tensor) -> None:
        if self.swap is not None:
            self.swap.bring_in(reads=False)
        self.stored = self._copier.copy(self.optimizer_grad, grad)
        if self.swap is not None:
            self.swap.used_until(self.stored)
            self.swap.send_out()

    @contextlib.contextmanager
    def in_memory(self, *, writes: bool = False) -> Iterator[None]:
        """Have what is kept in memory. writes: it is changed."""
        on_disk = self.swap if self._is_offloaded else None
        if on_disk is not None:
            on_disk.bring_in()
        yield
        if on_disk is not None and writes:
            self._copier.synchronize()  # a copy may still write the memory that goes to disk
            on_disk.send_out()
        elif on_disk is not None:
            on_disk.drop()

    def square(self, parts: Sequence[slice]) -> Tensor:
        """Return the sum of squares of parts of what is kept, scalar fp64 on the device."""
        with self.in_memory():
            return sum_of_squares(self.grad, parts).to(self._group.device)

    def swap_optimizer_grad(self) -> Tensor:
        """Return `optimizer_grad`; the next gradient comes into other memory, the one after into this again."""
        self._is_swapped = True
        return self.optimizer_grad

    def end_step(self) -> None:
        """Forget the sum; the memory is used again."""
        if self.swap is not None:
            self.swap.drop()
        self.holds_sum = False
