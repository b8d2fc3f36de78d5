"""The code for devices that the host does not wait for, on the CPU; and a count of what the host waits for."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.comm import hosts
from launcher.comm.device import DeviceRuntime, HostDeviceCopier
from launcher.kernels.api import Kernel
from launcher.zero import step

# What reads a number of the device, or waits for it, each by the method that Python calls.
WAITING = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


@contextlib.contextmanager
def runs_behind_host(kernel: Kernel | str | None = "the host's own") -> Iterator[None]:
    """Have engines of this process take the CPU for a device that works through a queue.

    kernel: of the device; None: it has none. The C++ kernel reads the scale: count waits with another one.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(DeviceRuntime, "is_async_device", True))
        if not isinstance(kernel, str):
            for user in ("launcher.engine.optimizer_plan", "launcher.zero.owned_gradient"):
                stack.enter_context(mock.patch(f"{user}.kernel_for", return_value=kernel))
        yield


class Waits(TorchDispatchMode):
    """Counts, by name, what would make the host wait for the device; not what hosts send each other."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._is_paused = False

    def note(self, name: str) -> None:
        if not self._is_paused:
            self.counts[name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.note(str(func))
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count within this block."""
        with contextlib.ExitStack() as stack:
            for name in WAITING:
                original = getattr(torch.Tensor, name)
                stack.enter_context(mock.patch.object(torch.Tensor, name, self._counted(name, original)))
            for owner in (hosts.AsyncHostCopy, HostDeviceCopier):
                name = "values" if owner is hosts.AsyncHostCopy else "synchronize"
                stack.enter_context(mock.patch.object(owner, name, self._counted(name, getattr(owner, name))))
            for user, name in ((step, "host_all_reduce_max"), (hosts, "host_all_reduce_max")):
                stack.enter_context(mock.patch.object(user, name, self._paused(getattr(user, name))))
            stack.enter_context(self)
            yield

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return original(*args, **kwargs)

        return counted

    def _paused(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*args: Any) -> Any:
            self._is_paused = True
            try:
                return original(*args)
            finally:
                self._is_paused = False

        return paused
