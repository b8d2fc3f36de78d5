"""The samples of a rank's journal: memory, processor time, lowered clocks, energy. By the journal's own thread.

Everything is read from files of the kernel, and from the driver of a GPU that this process uses, where the package
`nvidia-ml-py` is installed. What a machine does not tell is null.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import os
import sys
import time

from launcher.base import env
from launcher.journal.steps import step_clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class _Journal(Protocol):
        def add(self, kind: str, **fields: Any) -> None: ...


_INTERVAL_S = 5.0
_MAX_THREADS = 64  # whose waiting for a processor is read
_THROTTLE_COUNTS = "/sys/devices/system/cpu/cpu*/thermal_throttle/*_throttle_count"
_ENERGY = "/sys/class/powercap/intel-rapl:[0-9]*/energy_uj"  # of packages, not of their parts
# Of nvmlClocksEventReasons: what lowers clocks below what the power limit of a busy GPU does.
_REASONS = {0x08: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}


class Sampler:
    """Adds a record of samples to a journal every few seconds."""

    def __init__(self, journal: _Journal) -> None:
        self._journal = journal
        self._clock = step_clock()  # now: its phases are those of the thread that makes it
        self._is_first_here = os.environ.get(env.LOCAL_RANK.name, "0") == "0"
        self._due_s = time.monotonic() + _INTERVAL_S
        self._throttle_files: list[str] | None = None
        self._throttles = 0
        self._waits: dict[str, int] = {}  # by thread, ns
        self._wait_s = 0.0
        self._energy: dict[str, tuple[int, float]] = {}  # by file: the last count, and joules so far
        self._gpu: Any = None  # the driver's module and handle; False: there is none

    def look(self) -> None:
        """Add a record, where it is time for it."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _INTERVAL_S
            self.add()

    def add(self) -> None:
        """Add a record."""
        longest_s, self._clock.gc_longest_s = self._clock.gc_longest_s, 0.0
        times = os.times()
        gpu = self._gpu_handle()
        self._journal.add(
            "sample",
            phase=self._clock.phase,
            resident_bytes=_resident_bytes(),
            cpu_s=round(times.user + times.system, 3),
            cpu_wait_s=self._cpu_wait_s(),
            gc_longest_s=round(longest_s, 6),
            throttled=self._throttled(gpu),
            energy_j=self._energy_j(gpu),
        )

    def _cpu_wait_s(self) -> float | None:
        """Return the sum of what, from sample to sample, the thread that waited most for a processor has waited."""
        waits: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for thread in os.listdir("/proc/self/task")[:_MAX_THREADS]:
                with contextlib.suppress(OSError, ValueError, IndexError):
                    waits[thread] = int(_text(f"/proc/self/task/{thread}/schedstat").split()[1])
        if not waits:
            return None
        before, self._waits = self._waits, waits
        if before:
            self._wait_s += max(waited - before.get(thread, 0) for thread, waited in waits.items()) / 1e9
        return round(self._wait_s, 4)

    def _throttled(self, gpu: Any) -> str | None:
        """Return why clocks were lowered, "" where they were not; None where nothing tells."""
        if gpu is not None:
            module, handle = gpu
            with contextlib.suppress(Exception):
                bits = int(module.nvmlDeviceGetCurrentClocksEventReasons(handle))
                return " and ".join(sorted({text for bit, text in _REASONS.items() if bits & bit}))
        if self._throttle_files is None:
            self._throttle_files = glob.glob(_THROTTLE_COUNTS)
        counts = []
        for path in self._throttle_files:
            with contextlib.suppress(OSError, ValueError):
                counts.append(int(_text(path)))
        if not counts:
            return None
        before, self._throttles = self._throttles, sum(counts)
        return "heat" if before and sum(counts) > before else ""

    def _energy_j(self, gpu: Any) -> float | None:
        """Return the joules of this rank's GPU; without one, of the host's processors, on its first rank."""
        if gpu is not None:
            module, handle = gpu
            with contextlib.suppress(Exception):
                return round(int(module.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3, 3)
            return None
        if not self._is_first_here:
            return None
        for path in glob.glob(_ENERGY):
            with contextlib.suppress(OSError, ValueError):
                count = int(_text(path))
                before, joules = self._energy.get(path, (count, 0.0))
                if count < before:  # the counter has begun anew
                    before -= int(_text(os.path.join(os.path.dirname(path), "max_energy_range_uj")))
                self._energy[path] = count, joules + (count - before) / 1e6
        return round(sum(joules for _, joules in self._energy.values()), 3) if self._energy else None

    def _gpu_handle(self) -> Any:
        """Return the driver's module and the handle of the GPU that this process computes on; None without."""
        if self._gpu is None:
            torch: Any = sys.modules.get("torch")
            cuda = getattr(torch, "cuda", None)
            if cuda is None or not cuda.is_initialized():
                return None
            self._gpu = False
            with contextlib.suppress(Exception):
                pynvml: Any = importlib.import_module("pynvml")
                pynvml.nvmlInit()
                uuid = f"GPU-{cuda.get_device_properties(cuda.current_device()).uuid}"
                self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return self._gpu or None


def _resident_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_text("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()
