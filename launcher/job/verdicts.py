"""The verdicts on a run while it runs: its journal goes through the rules on a thread of its own.

What appears, and what is gone, is told to the watcher and written into the launcher's journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher.base.timeouts import timeouts
from launcher.job.display import Display
from launcher.job.journal import RunJournal
from launcher.job.worker_thread import WorkerThread
from launcher.journal.read import LineReader
from launcher.journal.totals import Totals, Training
from launcher.journal.verdicts import Key, Verdict, Verdicts

_LOOK_INTERVAL_S = 1.0
_RANKS_A_SECOND = 2_000  # that are looked at
_AT_THE_END = frozenset({"failure", "hang"})  # what the report of the run shows in full


class RunVerdicts:
    """Comes to the verdicts on one run. Its methods are for the controller's thread, and wait for nothing but `end`."""

    def __init__(
        self, journal: RunJournal, watcher: Display, totals: Totals, on_fault: Callable[[str], object]
    ) -> None:
        """totals: of the job, over all its starts. on_fault: called with the kind of a fault that a rank rehearses."""
        self._journal, self._watcher, self._totals, self._on_fault = journal, watcher, totals, on_fault
        self._verdicts = Verdicts()
        self._readers: dict[int, LineReader] = {}
        self._told: dict[Key, Verdict] = {}
        self._look_at_s = 0.0
        self._interval_s = _LOOK_INTERVAL_S
        self._thread = WorkerThread("verdicts")
        journal.follow(self._take_launcher, self._take_rank)

    def look(self, now_s: float) -> None:
        """Have the run judged, when its time has come."""
        if now_s >= self._look_at_s and self._thread.stalled_s == 0:
            self._look_at_s = now_s + self._interval_s
            self._thread.put(self._judge)

    def end(
        self, last: dict[str, object], is_cancelled: Callable[[], bool]
    ) -> tuple[tuple[Verdict, ...], Training | None]:
        """Return all verdicts on the run, and what the job has trained; end the thread. Waits for it, not forever.

        last: the fields of the last record of the launcher, which is written after the verdicts.
        """
        self._thread.put(self._feed, None, {"kind": "end", "time_s": time.time(), **last})
        answer = self._thread.request(self._ended)
        done = self._thread.wait(answer.done, is_cancelled, lambda: None, timeouts().disk_stall_s)
        self._thread.close()
        try:
            self._thread.check()
            return answer.get() if done else ((), None)
        except Exception as error:  # noqa: BLE001  # no rule may end a job, whatever its journal holds
            self._watcher.warning(f"the verdicts on the run are incomplete: {error!r}")
            return (), None

    # ---- any thread ----

    def _take_launcher(self, record: dict[str, object]) -> None:
        if record["kind"] not in ("verdict", "end"):
            self._thread.put(self._feed, None, record)

    def _take_rank(self, rank: int, data: bytes) -> None:
        self._thread.put(self._read, rank, data)

    # ---- on its thread ----

    def _read(self, rank: int, data: bytes) -> None:
        reader = self._readers.get(rank) or self._readers.setdefault(rank, LineReader())
        reader.feed(data, lambda record: self._feed(rank, record))

    def _feed(self, rank: int | None, record: dict[str, object]) -> None:
        self._verdicts.feed(rank, record)
        self._totals.feed(rank, record)
        self._interval_s = max(_LOOK_INTERVAL_S, len(self._readers) / _RANKS_A_SECOND)
        if record["kind"] == "fault" and rank is not None:
            self._on_fault(str(record.get("name")))

    def _judge(self) -> None:
        current = {verdict.key: verdict for verdict in self._verdicts.current(time.time())}
        for key, verdict in current.items():
            before = self._told.get(key)
            if before is None or before.severity != verdict.severity:
                self._tell(key, verdict)
        for key in [key for key in self._told if key not in current]:
            gone = self._verdicts.gone(key)
            if gone is not None:
                self._tell(key, gone)
            del self._told[key]

    def _tell(self, key: Key, verdict: Verdict) -> None:
        self._told[key] = verdict
        self._journal.add("verdict", **verdict.fields())
        if verdict.name not in _AT_THE_END:
            self._watcher.verdict(verdict)

    def _ended(self) -> tuple[tuple[Verdict, ...], Training | None]:
        self._judge()
        return tuple(self._verdicts.all(time.time())), self._totals.training()


def worst(verdicts: tuple[Verdict, ...]) -> Verdict | None:
    """Return the worst of what a report has: what it shows in full elsewhere, the failure, is none of them."""
    own = [verdict for verdict in verdicts if verdict.name not in _AT_THE_END]
    return min(own, key=lambda each: (each.until_step is not None, each.severity != "critical"), default=None)
