"""What a disk gives with which settings, measured with the transfers that the engine uses."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle

from launcher.base.errors import EngineError
from launcher.storage.store import AioSettings, Extent, Store, Transfer, aligned_buffer

CHUNK_BYTES = 16 << 20  # one transfer
GRID = tuple(
    AioSettings(block_size_bytes, queue_depth, num_threads=1)  # more threads are the same as a deeper queue
    for block_size_bytes in (256 << 10, 1 << 20, 4 << 20)
    for queue_depth in (4, 8, 16, 32)
)
_FILL_SHARE = 0.25  # of the time
_ORDERS = (GRID, GRID[::-1])  # of each round: a disk that slows down with time meets all of them alike
NUM_MEASUREMENTS = sum(map(len, _ORDERS))
# What is less apart is noise. Then the fewest bytes in flight win: small transfers fill such a queue too.
_NEAR_BEST = 0.95


@dataclass(frozen=True)
class Rates:
    """What one setting gave."""

    settings: AioSettings
    read_bytes_per_s: float
    write_bytes_per_s: float

    @property
    def both_bytes_per_s(self) -> float:
        """The rate of reading and writing the same number of bytes in turns, as an optimizer step on disk does."""
        return 2 / (1 / self.read_bytes_per_s + 1 / self.write_bytes_per_s)

    @property
    def in_flight_bytes(self) -> int:
        """Memory that the disk works on at a time."""
        return self.settings.request_bytes * self.settings.num_requests


class DiskMeter:
    """A swap file full of noise in one folder, read and written with one setting after the other."""

    def __init__(self, folder: str, size_bytes: int, allocate: Callable[[int], memoryview] = aligned_buffer) -> None:
        """Reserve `size_bytes`, at least one chunk. Raises: EngineError when that cannot be done in `folder`.

        allocate: makes the memory, of so many bytes.
        """
        self._allocate = allocate
        self._store = Store(folder, GRID[0])
        self._noise = os.urandom(CHUNK_BYTES)  # disks and file systems that compress gain nothing from it
        self._memories: list[memoryview] = []
        try:
            whole = self._store.reserve(max(1, size_bytes // CHUNK_BYTES) * CHUNK_BYTES)
        except EngineError:
            self.close()
            raise
        starts = range(whole.offset, whole.offset + whole.num_bytes, CHUNK_BYTES)
        self._extents = [Extent(start, CHUNK_BYTES) for start in starts]

    @property
    def notice(self) -> str | None:
        """What a user should know about the folder."""
        return self._store.notice

    @property
    def size_bytes(self) -> int:
        """Bytes that are read and written over and over."""
        return CHUNK_BYTES * len(self._extents)

    def fill(self, seconds: float) -> None:
        """Write all that is reserved, as much as `seconds` allow; from now on the file is as large as that.

        What was never written would be read without asking the disk, and written for the first time it is slower.
        """
        self._store.tune(GRID[-1])
        num_chunks, _ = self._run(self._store.write, iter(self._extents), seconds)
        del self._extents[num_chunks:]

    def read_rate(self, settings: AioSettings, seconds: float) -> float:
        """Read with `settings` for about `seconds`; return bytes per second."""
        return self._rate(self._store.read, settings, seconds)

    def write_rate(self, settings: AioSettings, seconds: float) -> float:
        """Write with `settings` for about `seconds`; return bytes per second."""
        return self._rate(self._store.write, settings, seconds)

    def close(self) -> None:
        """Remove the file."""
        self._store.close()

    def _rate(self, move: Callable[[Extent, memoryview], Transfer], settings: AioSettings, seconds: float) -> float:
        self._store.tune(settings)
        num_chunks, elapsed_s = self._run(move, cycle(self._extents), seconds)
        return num_chunks * CHUNK_BYTES / elapsed_s

    def _run(
        self, move: Callable[[Extent, memoryview], Transfer], extents: Iterator[Extent], seconds: float
    ) -> tuple[int, float]:
        """Move extents until `seconds` have passed or none is left; return their number and the seconds it took.

        So many transfers are under way that the queue never runs dry between two of them.
        """
        settings = self._store.settings
        num_pending = 1 + -(-settings.request_bytes * settings.num_requests // CHUNK_BYTES)
        while len(self._memories) < num_pending:
            self._memories.append(self._allocate(CHUNK_BYTES))
            self._memories[-1][:] = self._noise
        pending: deque[Transfer] = deque()
        count, start_s = 0, time.monotonic()
        for count, extent in enumerate(extents, start=1):
            pending.append(move(extent, self._memories[count % num_pending]))
            if time.monotonic() - start_s > seconds:
                break
            if len(pending) == num_pending:
                pending.popleft().wait()
        for transfer in pending:
            transfer.wait()
        return count, time.monotonic() - start_s


def survey(meter: DiskMeter, seconds: float, report: Callable[[int], None]) -> list[Rates]:
    """Measure every setting of GRID within about `seconds`, and return their rates in order.

    A slow disk gets a single round. report: called with 1 after each measurement; there are NUM_MEASUREMENTS at most.
    """
    start_s = time.monotonic()
    meter.fill(_FILL_SHARE * seconds)
    slice_s = (1 - _FILL_SHARE) * seconds / (2 * NUM_MEASUREMENTS)
    seen: dict[AioSettings, list[tuple[float, float]]] = {settings: [] for settings in GRID}
    for done, settings in enumerate(chain(*_ORDERS), start=1):
        if done > len(GRID) and time.monotonic() - start_s > seconds:
            break
        seen[settings].append((meter.write_rate(settings, slice_s), meter.read_rate(settings, slice_s)))
        report(1)
    return [_mean(settings, rates) for settings, rates in seen.items()]


def _mean(settings: AioSettings, rates: Sequence[tuple[float, float]]) -> Rates:
    writes, reads = zip(*rates, strict=True)
    return Rates(settings, sum(reads) / len(reads), sum(writes) / len(writes))


def best(found: Sequence[Rates]) -> Rates:
    """Return the setting to use: of the quickest ones that with the fewest bytes in flight."""
    limit = _NEAR_BEST * max(rates.both_bytes_per_s for rates in found)
    return min((rates for rates in found if rates.both_bytes_per_s >= limit), key=lambda rates: rates.in_flight_bytes)


def as_config(settings: AioSettings) -> dict[str, int]:
    """Return the `aio` section of a config that asks for `settings`."""
    return {
        "block_size": settings.block_size_bytes,
        "queue_depth": settings.queue_depth,
        "intra_op_parallelism": settings.num_threads,
    }
