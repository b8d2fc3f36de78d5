"""The C++ kernels of another architecture: cross-compiled, and run under an emulator."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from launcher.kernels.api import Span
from launcher.kernels.cpu import _spans

SOURCES = Path(__file__).parents[2] / "launcher" / "kernels" / "csrc"
COMPILER, EMULATOR, PREFIX = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
_HEADER = struct.Struct("=4qd")
_LINE_BYTES = 64


def missing_tool() -> str | None:
    """Return what would have to be installed; None when nothing is missing."""
    return next((tool for tool in (COMPILER, EMULATOR, "cmake") if shutil.which(tool) is None), None)


class ForeignKernel:
    """The kernel of 64-bit Arm, built into `folder`; every call is a process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}"]
        # As for a wheel: an editable build would put the library beside the sources, in the place of this machine's.
        self._run(["cmake", "-S", str(SOURCES), "-B", str(folder), "-DSKBUILD_STATE=wheel", *target])
        self._run(["cmake", "--build", str(folder)])
        driver = str(Path(__file__).with_name("foreign.cpp"))
        library = ["-L", str(folder), "-lcpu_kernels", f"-Wl,-rpath,{folder}", "-fopenmp"]
        self._run([COMPILER, "-std=c++17", f"-I{SOURCES}", driver, *library, "-o", str(folder / "driver")])
        self.name = self._emulated()

    @staticmethod
    def _run(command: list[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def _emulated(self, *args: str) -> str:
        return self._run([EMULATOR, "-L", PREFIX, str(self._folder / "driver"), *args])

    def update(self, spans: Sequence[Span], grad_scale: float = 1.0) -> None:
        self._call(spans, grad_scale, is_lamb_moments=False)

    def lamb_moments(self, spans: Sequence[Span], grad_scale: float = 1.0) -> Tensor:
        return self._call(spans, grad_scale, is_lamb_moments=True)

    def sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        raise AssertionError("only steps are compared")

    def _call(self, spans: Sequence[Span], grad_scale: float, *, is_lamb_moments: bool) -> Tensor:
        tensors = [t for span in spans for t in (span.master, span.grad, *span.states, span.param) if t is not None]
        places, num_bytes = [], 0
        for tensor in tensors:  # as far from the start of a cache line as it is here
            start = num_bytes + (tensor.data_ptr() - num_bytes) % _LINE_BYTES
            places.append(start)
            num_bytes = start + tensor.nbytes
        memory = torch.zeros(num_bytes + 1, dtype=torch.uint8)
        moved = [
            memory[p : p + t.nbytes].view(t.dtype) if t.nbytes else t for p, t in zip(places, tensors, strict=True)
        ]
        for view, tensor in zip(moved, tensors, strict=True):
            view.copy_(tensor)
        packed = _spans(_over(spans, moved))
        header = _HEADER.pack(is_lamb_moments, len(spans), num_bytes, memory.data_ptr(), grad_scale)
        given, got = self._folder / "given", self._folder / "got"
        given.write_bytes(header + packed + memory[:num_bytes].numpy().tobytes())
        self._emulated(str(given), str(got))
        answer = bytearray(got.read_bytes())
        for place, tensor in zip(places, tensors, strict=True):
            if tensor.nbytes:
                tensor.copy_(torch.frombuffer(answer, dtype=tensor.dtype, count=tensor.numel(), offset=place))
        sums = torch.frombuffer(answer[num_bytes:], dtype=torch.float64)
        return sums.clone().view(len(spans), 2)


def _over(spans: Sequence[Span], moved: Sequence[Tensor]) -> list[Span]:
    """Return the spans over other tensors, given in the order of theirs."""
    tensors = iter(moved)
    found = []
    for span in spans:
        master, grad = next(tensors), next(tensors)
        states = tuple(next(tensors) for _ in span.states)
        param = None if span.param is None else next(tensors)
        found.append(replace(span, master=master, grad=grad, states=states, param=param))
    return found
