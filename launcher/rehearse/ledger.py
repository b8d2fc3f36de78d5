"""What of a rank's memory is taken for what, as tensors come and go, and the most of it in each phase."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from launcher.rehearse.torch_tools import StorageMap

BUILDING, INITIALIZING, FORWARD, BACKWARD, STEP, BETWEEN = (
    "building the model", "initialize", "forward", "backward", "step", "between",
)  # fmt: skip
# Kinds of memory that last; what a phase makes besides is named after it.
PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, IN_FLIGHT, HOST = (
    "parameters", "gradients", "optimizer", "buffers", "in flight", "host",
)  # fmt: skip
_KIND_OF_PHASE = {
    BUILDING: "model", INITIALIZING: "initialize", FORWARD: "activations", BACKWARD: "temporary", STEP: "temporary",
    BETWEEN: "script",
}  # fmt: skip


@dataclass
class _Entry:
    """One storage: counted under a kind until it is freed."""

    kind: str
    num_bytes: int


@dataclass
class Peak:
    """The most that was taken at once in a phase, by kind."""

    total: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)


class Ledger:
    """Counts storages from their first tensor to the end of their memory."""

    def __init__(self) -> None:
        self.phase = BUILDING
        self.peaks: dict[str, Peak] = {}
        self.lent_bytes: Callable[[], int] = lambda: 0  # that the engine's pools have, beside tensors
        self._entries: StorageMap[_Entry] = StorageMap()
        self._taken: Counter[str] = Counter()

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, the first time it is seen, under the kind of the phase."""
        num_bytes = storage.nbytes()
        if num_bytes and storage not in self._entries:
            entry = _Entry(_KIND_OF_PHASE[self.phase], num_bytes)
            self._entries[storage] = entry
            self._taken[entry.kind] += num_bytes
            weakref.finalize(storage, self._free, entry).atexit = False
        self._compare()

    def assign(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Count tensors under a kind from now on, whatever has made them; what is in host memory stays there."""
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            entry = self._entries.get(storage)
            if entry is None:
                self.note(storage)
                entry = self._entries.get(storage)
            if entry is not None and entry.kind not in (kind, HOST):
                self._taken[entry.kind] -= entry.num_bytes
                self._taken[kind] += entry.num_bytes
                entry.kind = kind

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is counted as host memory."""
        entry = self._entries.get(tensor.untyped_storage())
        return entry is not None and entry.kind == HOST

    def forget_peaks(self) -> None:
        """Begin anew with the peaks of the phases of a step: those of the last step count."""
        for phase in (FORWARD, BACKWARD, STEP):
            self.peaks.pop(phase, None)

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count what the block makes as that of a phase."""
        before, self.phase = self.phase, phase
        self._compare()
        try:
            yield
        finally:
            self._compare()
            self.phase = before

    def taken(self) -> dict[str, int]:
        """Return the bytes that are taken now, by kind."""
        taken = {kind: num_bytes for kind, num_bytes in self._taken.items() if num_bytes}
        lent = self.lent_bytes()
        return taken | ({IN_FLIGHT: lent} if lent else {})

    def _free(self, entry: _Entry) -> None:
        self._taken[entry.kind] -= entry.num_bytes

    def _compare(self) -> None:
        total = self._taken.total() - self._taken[HOST] + self.lent_bytes()
        peak = self.peaks.setdefault(self.phase, Peak())
        if total > peak.total:
            peak.total, peak.by_kind = total, self.taken()
