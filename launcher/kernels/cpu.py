"""The C++ kernel for CPUs: loads the library that was built with the package, and hands spans to it.

The library (launcher/kernels/csrc) knows nothing of Python or torch: it gets addresses, lengths and hyper-parameters,
and releases the GIL while it works.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from launcher.base.env import CPU_KERNEL
from launcher.kernels.api import Adagrad, Adam, DeviceScale, GradScale, Kernel, Lamb, Lion, Rule, Sgd, Span
from launcher.kernels.reference import first_bad_element

LIBRARY = Path(__file__).with_name("libcpu_kernels.so")
_ABI_VERSION = 3  # of csrc/library.cpp
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_RULES: dict[type[Rule], int] = {Adam: 0, Adagrad: 1, Lion: 2, Sgd: 3, Lamb: 4}


_of_thread = threading.local()


def num_threads() -> int:
    """Return how many threads a kernel that this thread calls works with."""
    return max(1, int(torch.get_num_threads() * getattr(_of_thread, "fraction", 1.0)))


@contextlib.contextmanager
def part_of_threads(fraction: float) -> Iterator[None]:
    """Let kernels that this thread calls within the block use a part of the threads; other threads keep theirs.

    `torch.set_num_threads` would set MKL's number for the whole process.
    """
    _of_thread.fraction = fraction
    try:
        yield
    finally:
        _of_thread.fraction = 1.0


class _Array(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_int64))


_NO_ARRAY = (0, 0)


class _Rule(ctypes.Structure):
    """The fields of every rule of api.py, by their names."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")),
        *((name, ctypes.c_double) for name in ("momentum", "dampening", "lr_decay", "trust_ratio")),
        ("step", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("is_decoupled", "corrects_bias", "is_nesterov", "is_first")),
        ("is_eps_inside_root", ctypes.c_int32),
    )


# A span is this, and the rule after it: numel; address and type of master, grad, two states and param; kind of rule.
# Packed, because a structure of structures takes ctypes 10 µs to fill, which is a step's time where shards are small.
_SPAN = struct.Struct("=12q")


@dataclass(frozen=True)
class CpuKernelStatus:
    """What this process gets, and why."""

    kernel: CpuKernel | None
    reason: str  # one line for `launch report`


class CpuKernel:
    """The rules in C++ for one instruction set, on as many threads as torch uses; safe in forked children."""

    def __init__(self, library: ctypes.CDLL, isa: int) -> None:
        """isa: place in the library's list of what this CPU can run, the best first."""
        self._library = library
        self._isa = isa
        self.name = f"C++ {library.launch_isa(isa).decode()}"

    def update(self, spans: Sequence[Span], grad_scale: GradScale = 1.0) -> None:
        """Update every span from its gradient times `grad_scale`. Raises: ValueError for tensors it cannot take."""
        if isinstance(grad_scale, DeviceScale):  # and the device is this CPU
            if grad_scale.skip.item():
                return
            grad_scale = grad_scale.factor.item()
        self._library.launch_update(self._isa, _spans(spans), len(spans), grad_scale, num_threads())

    def lamb_moments(self, spans: Sequence[Span], grad_scale: float = 1.0) -> Tensor:
        """Update the moments of LAMB; return fp64 [num_spans, 2]: sums of squares of weights and directions."""
        sums = torch.empty(len(spans), 2, dtype=torch.float64)
        threads = num_threads()
        self._library.launch_lamb_moments(self._isa, _spans(spans), len(spans), grad_scale, threads, sums.data_ptr())
        return sums

    def sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares of all elements, scalar fp64; the same bits for any number of threads."""
        arrays = (_Array * len(grads))(*(_Array(*_array(grad, grad.numel())) for grad in grads))
        numels = (ctypes.c_int64 * len(grads))(*(grad.numel() for grad in grads))
        threads = num_threads()
        total = self._library.launch_sum_of_squares(self._isa, arrays, numels, len(grads), threads)
        return torch.tensor(total, dtype=torch.float64)

    def measure(self, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of squares, and where the first element is that is not finite: as `Kernel.measure` does."""
        total = self.sum_of_squares(grads)
        return total, torch.tensor([-1, -1]) if total.isfinite() else first_bad_element(grads)

    def scaled_copy(self, target: Tensor, source: Tensor, scale: float) -> None:
        """Write `source` times `scale` to `target`, as `copy` does. Both: contiguous fp32 of one length."""
        numel = target.numel()
        (to, _), (read, _) = _array(target, numel), _array(source, numel)
        self._library.launch_scaled_copy(self._isa, to, read, numel, scale, num_threads())

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` to `target`, past the caches. Both: in host memory, contiguous, of one type and length.

        A store past the caches does not read its line first, which is a third of the traffic of a plain copy. It is for
        more than the caches hold: what is read again at once is quicker where it was stored in them.
        """
        self._library.launch_copy(self._isa, target.data_ptr(), source.data_ptr(), target.nbytes, num_threads())


_STREAMED_BYTES = 2**20  # a copy of so much goes past the caches: the second-level cache of a core holds no more


def scaled_copy(target: Tensor, source: Tensor, scale: float) -> None:
    """Write `source` times `scale` to `target`, of the same shape, by the quickest way there is."""
    kernel = cpu_kernel_status().kernel if target.nbytes >= _STREAMED_BYTES else None
    are_alike = (target.dtype, target.shape) == (source.dtype, source.shape)
    are_alike = are_alike and target.device.type == source.device.type == "cpu"
    if kernel is None or not (are_alike and target.is_contiguous() and source.is_contiguous()):
        kernel = None
    if scale == 1.0:
        target.copy_(source) if kernel is None else kernel.copy(target, source)
    elif kernel is None or target.dtype != torch.float32:
        torch.mul(source, scale, out=target)
    else:
        kernel.scaled_copy(target, source, scale)


def load_cpu_kernel() -> Kernel | None:
    """Return the C++ kernel, None where there is none; `cpu_kernel_status` has the reason."""
    return cpu_kernel_status().kernel


@functools.cache
def cpu_kernel_status() -> CpuKernelStatus:
    """Load the library once a process and choose the instruction set: the best one, or that of LAUNCH_CPU_KERNEL."""
    wanted = os.environ.get(CPU_KERNEL.name, "")
    if wanted == "off":
        return CpuKernelStatus(None, f"off by {CPU_KERNEL.name}")
    try:
        kernels = all_cpu_kernels()
    except OSError as error:
        return CpuKernelStatus(None, str(error))
    names = [kernel.name.removeprefix("C++ ") for kernel in kernels]
    if not wanted:
        return CpuKernelStatus(kernels[0], f"the best of {', '.join(names)} on this CPU")
    if wanted in names:
        return CpuKernelStatus(kernels[names.index(wanted)], f"chosen by {CPU_KERNEL.name}")
    return CpuKernelStatus(None, f"{CPU_KERNEL.name}={wanted}, but this CPU has {', '.join(names)}")


def all_cpu_kernels() -> list[CpuKernel]:
    """Return a kernel for each instruction set of this CPU, the best first.

    Raises: OSError where the library is missing, older than this file, or cannot be loaded.
    """
    if not LIBRARY.exists():
        raise OSError("not built: install the package again where a C++ compiler is found")
    library = _load(LIBRARY)
    if library.launch_abi_version() != _ABI_VERSION:
        raise OSError(f"{LIBRARY} was built from other sources than these; install the package again")
    library.launch_isa.restype = ctypes.c_char_p
    library.launch_sum_of_squares.restype = ctypes.c_double
    batch = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int64)
    library.launch_update.argtypes = batch
    library.launch_lamb_moments.argtypes = (*batch, ctypes.c_void_p)
    library.launch_sum_of_squares.argtypes = (
        ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
    )  # fmt: skip
    library.launch_scaled_copy.argtypes = (
        ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int64,
    )  # fmt: skip
    library.launch_copy.argtypes = (
        ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
    )  # fmt: skip
    kernels: list[CpuKernel] = []
    while library.launch_isa(len(kernels)) is not None:
        kernels.append(CpuKernel(library, len(kernels)))
    return kernels


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        # The symbols of OpenMP are in no library that torch has made global: a torch built without it, or with
        # another runtime. Then the system's own serves.
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))


def _spans(spans: Sequence[Span]) -> bytes:
    """Return the spans as the library reads them. Raises: ValueError for tensors it cannot take."""
    rules = {id(rule): bytes(_Rule(**vars(rule))) for rule in {id(span.rule): span.rule for span in spans}.values()}
    packed = []
    for span in spans:
        numel = span.master.numel()
        first, second = (*[_array(state, numel) for state in span.states], _NO_ARRAY, _NO_ARRAY)[:2]
        param = _NO_ARRAY if span.param is None else _array(span.param, numel)
        arrays = (*_array(span.master, numel), *_array(span.grad, numel), *first, *second, *param)
        packed.append(_SPAN.pack(numel, *arrays, _RULES[type(span.rule)]))
        packed.append(rules[id(span.rule)])
    return b"".join(packed)


def _array(tensor: Tensor, numel: int) -> tuple[int, int]:
    """Return address and type of a tensor. Raises: ValueError unless it is contiguous with `numel` elements."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.device.type != "cpu" or tensor.numel() != numel or not tensor.is_contiguous():
        found = f"{tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
        raise ValueError(
            f"the C++ kernel takes contiguous fp32, bf16 or fp16 tensors of one length on the CPU: here {numel}"
            f" elements; it was given {found}"
        )
    return tensor.data_ptr(), dtype
