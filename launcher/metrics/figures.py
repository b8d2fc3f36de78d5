"""The figures of a job for other systems: a table of their names, and their values as the journals of ranks come in.

Names follow Prometheus' conventions: the unit is in the name, and what only grows ends with `_total`. A figure that is
not known has no point: it is never 0 in place of nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from launcher.base.progress import RankProgress
from launcher.cluster.cluster import NodePlacement, Placement
from launcher.job.events import FailureKind, RunReport, Watcher, signal_name
from launcher.journal.read import LineReader, Record
from launcher.journal.records import PHASES
from launcher.journal.verdicts import Key, Verdict
from launcher.plan.plan import JobPlan

# Of larger jobs only the first rank of each host has figures of its own: all of 10,000 ranks would be 250,000 series,
# a page of 20 MB that takes seconds to write, and more than a server should be given by one target.
MAX_RANKS = 1_024
_MAX_LOGGED = 100  # names that one rank may give to `launcher.log`: a name made anew at each step must not grow memory
_MAX_NAME_CHARS = 200
_UNITS = {"_bytes": "By", "_seconds": "s", "_joules": "J"}  # as UCUM writes them
STARTING, RUNNING, STOPPING, RESTARTING, ENDED = STATES = ("starting", "running", "stopping", "restarting", "ended")


@dataclass(frozen=True)
class Figure:
    """One name, for all points that have it."""

    name: str
    doc: str
    labels: tuple[str, ...] = ()  # beyond those of the job, or of the rank

    @property
    def is_counter(self) -> bool:
        """Whether it only grows, and starts at 0 again when the job or the rank does."""
        return self.name.endswith("_total")

    @property
    def unit(self) -> str:
        """Return the unit as OTLP has it."""
        stem = self.name.removesuffix("_total")
        return next((unit for end, unit in _UNITS.items() if stem.endswith(end)), "1")


JOB_LABELS = ("job",)
RANK_LABELS = ("job", "rank", "host", "local_rank")
JOB_FIGURES = (
    Figure("launch_job_state", "1 for the state that the job is in, 0 for the others", ("state",)),
    Figure("launch_start_timestamp_seconds", "when the launcher began, seconds since the epoch"),
    Figure("launch_world_size", "number of ranks of the job"),
    Figure("launch_ranks", "ranks of this launcher that are starting, or running", ("state",)),
    Figure("launch_restarts_total", "how often the job was started again"),
    Figure("launch_rank_exits_total", "ranks that ended, by exit code or name of the signal", ("status",)),
    Figure("launch_failures_total", "starts of the job that failed, by what failed first", ("kind",)),
    Figure("launch_verdicts", "what is wrong with the training now, by rule and severity", ("verdict", "severity")),
    Figure("launch_slowest_rank_step", "step of the rank that is furthest behind, of all ranks that run"),
    Figure(
        "launch_oldest_step_timestamp_seconds",
        "the last step of the rank whose last step is the longest ago, of all ranks that run, seconds since the epoch",
    ),
    Figure("launch_job_samples_total", "samples of all ranks, restarts included"),
    Figure("launch_job_tokens_total", "tokens of all ranks, restarts included"),
    Figure("launch_job_phase_seconds_total", "seconds of all ranks in each phase, restarts included", ("phase",)),
)
RANK_FIGURES = (
    Figure("launch_step", "number of the last optimizer step"),
    Figure(
        "launch_last_step_timestamp_seconds",
        "end of the last optimizer step, seconds since the epoch by the clock of the rank's host",
    ),
    Figure("launch_loss", "mean loss of the last step on this rank"),
    Figure("launch_gradient_norm", "norm of the gradients of the last step, before clipping"),
    Figure("launch_learning_rate", "learning rate of the last step"),
    Figure("launch_loss_scale", "loss scale of fp16"),
    Figure("launch_memory_bytes", "memory in use: of the GPU's allocator, else resident"),
    Figure("launch_peak_memory_bytes", "the most memory in use so far"),
    Figure("launch_resident_memory_bytes", "host memory of the rank's process"),
    Figure("launch_device_peak_flops", "FLOP/s that the device can do in this precision"),
    Figure("launch_log", "the last number that the script gave to launcher.log, by name", ("name",)),
    Figure("launch_steps_total", "optimizer steps"),
    Figure("launch_skipped_steps_total", "steps that updated nothing because gradients were not finite"),
    Figure("launch_samples_total", "samples of this rank"),
    Figure("launch_tokens_total", "tokens of this rank"),
    Figure("launch_phase_seconds_total", "seconds in each phase of a step", ("phase",)),
    Figure("launch_sent_bytes_total", "bytes sent in collectives"),
    Figure("launch_saves_total", "checkpoints saved"),
    Figure("launch_model_flops_total", "FLOPs of the model, without recomputation; of ranks that count them"),
    Figure("launch_cpu_seconds_total", "processor time of the rank's process"),
    Figure("launch_energy_joules_total", "energy that the rank's device has used"),
    Figure("launch_dropped_records_total", "records of the journal that were lost, and are missing in these figures"),
)
_LAST_STEP, _PHASE_SECONDS, _LOG = "launch_last_step_timestamp_seconds", "launch_phase_seconds_total", "launch_log"
# kind of record -> its field -> figure. Counters of a record of steps are added up; those of a sample are sums already.
_SET = {
    "step": {
        "step": "launch_step", "loss": "launch_loss", "norm": "launch_gradient_norm", "lr": "launch_learning_rate",
        "loss_scale": "launch_loss_scale", "memory_bytes": "launch_memory_bytes",
        "peak_bytes": "launch_peak_memory_bytes", "time_s": _LAST_STEP,
    },
    "sample": {
        "resident_bytes": "launch_resident_memory_bytes", "cpu_s": "launch_cpu_seconds_total",
        "energy_j": "launch_energy_joules_total",
    },
    "engine": {"peak_flops": "launch_device_peak_flops"},
}  # fmt: skip
_ADD = {
    "step": {
        "num_steps": "launch_steps_total", "samples": "launch_samples_total", "tokens": "launch_tokens_total",
        "sent_bytes": "launch_sent_bytes_total", "skipped": "launch_skipped_steps_total",
    },
    "dropped": {"num_records": "launch_dropped_records_total"},
}  # fmt: skip
_JOB_SUMS = {"launch_samples_total": "launch_job_samples_total", "launch_tokens_total": "launch_job_tokens_total"}

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """All points of one figure. A point: the values of the labels, the value, and since when a counter counts."""

    figure: Figure
    labels: Labels
    points: list[tuple[Labels, float, float]]


@dataclass
class _Rank:
    """One rank that has not ended: its values by figure and by the values of the figure's own labels."""

    labels: Labels
    is_shown: bool  # has figures of its own
    start_s: float  # epoch
    reader: LineReader = field(default_factory=LineReader)
    is_running: bool = False
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    flops: float = 0.0  # of an optimizer step

    def set(self, name: str, value: float, labels: Labels = ()) -> None:
        self.values.setdefault(name, {})[labels] = value

    def add(self, name: str, value: float, labels: Labels = ()) -> None:
        values = self.values.setdefault(name, {})
        values[labels] = values.get(labels, 0.0) + value

    def get(self, name: str) -> float | None:
        return self.values.get(name, {}).get(())


class RunFigures(Watcher):
    """Keeps the figures of a job up to date with its events; `collect` may be called from any thread.

    A rank that has ended, or is started again, has no figures any more: nothing stale is shown.
    """

    def __init__(self, plan: JobPlan, *, keeps_ended: bool = False, clock: Callable[[], float] = time.time) -> None:
        """keeps_ended: for `collect(with_ended=True)`. clock: seconds since the epoch."""
        self._lock = threading.Lock()
        self._clock, self._keeps_ended = clock, keeps_ended
        self._start_s = clock()
        self._state = STARTING
        self._ranks: dict[int, _Rank] = {}  # those that have not ended
        self._ended: dict[Labels, _Rank] = {}  # since they were last collected, the last start of each
        self._exits: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._verdicts: dict[Key, Verdict] = {}  # that hold
        self._sums: dict[tuple[str, Labels], float] = {}
        self.planned(plan)

    # ---- events ----

    def planned(self, plan: JobPlan) -> None:
        start_s, shown = self._clock(), ranks_shown(plan.placement)
        with self._lock:
            self._plan, self._state = plan, STARTING
            self._verdicts = {}
            self._keep(self._ranks.values())
            self._ranks = {
                rank: _Rank(_labels_of(plan.job_id, node, rank), rank in shown, start_s)
                for node in plan.placement.nodes
                for rank in node.ranks
            }
            self._num_starting = len(self._ranks)

    def started(self, rank: int) -> None:
        with self._lock:
            found = self._ranks.get(rank)
            if found is not None and not found.is_running:
                found.is_running = True
                self._num_starting -= 1
                if not self._num_starting and self._state == STARTING:
                    self._state = RUNNING

    def ended(self, rank: int, status: int) -> None:
        with self._lock:
            self._exits[signal_name(status) or str(status)] += 1
            found = self._ranks.pop(rank, None)
            if found is not None:
                self._num_starting -= not found.is_running
                self._keep([found])

    def stopping(self, why: str) -> None:
        with self._lock:
            self._state = STOPPING

    def verdict(self, verdict: Verdict) -> None:
        with self._lock:
            self._verdicts.pop(verdict.key, None)
            if verdict.until_step is None:
                self._verdicts[verdict.key] = verdict

    def restarting(self, plan: JobPlan, report: RunReport) -> None:
        with self._lock:
            self._state = RESTARTING
            self._count_failure(report)

    def finish(self, report: RunReport) -> None:
        """Note how the last run of the job ended."""
        with self._lock:
            self._state = ENDED
            self._count_failure(report)
            self._keep(self._ranks.values())
            self._ranks = {}

    def progress(self, rank: int, progress: RankProgress) -> None:
        """Take the steps of a script that has no records of steps: without torch, or with its journal switched off."""
        with self._lock:
            found, step = self._ranks.get(rank), progress.reached_step
            if found is None or step is None or "launch_steps_total" in found.values:
                return
            if found.get("launch_step") != step:
                found.set("launch_step", step)
                found.set(_LAST_STEP, self._clock())
            if progress.loss is not None:
                found.set("launch_loss", progress.loss)

    def journal(self, rank: int, data: bytes) -> None:
        found = self._ranks.get(rank)
        if found is None:
            return
        records: list[Record] = []
        found.reader.feed(data, records.append)
        with self._lock:
            for record in records:
                self._take(found, record)

    def _take(self, rank: _Rank, record: Record) -> None:
        """Take a record. A script can write into its journal what it likes: what is no number counts for nothing."""
        kind = record["kind"]
        for name, figure in _SET.get(kind, {}).items():
            value = number_of(record.get(name))
            if value is not None:
                rank.set(figure, value)
        for name, figure in _ADD.get(kind, {}).items():
            value = _amount_of(record.get(name))
            if value is not None:
                rank.add(figure, value)
                self._sum(_JOB_SUMS.get(figure), value)
        if kind == "step":
            self._take_phases(rank, record.get("phases"))
            if rank.flops:
                rank.add("launch_model_flops_total", rank.flops * (_amount_of(record.get("num_steps")) or 0.0))
        elif kind == "log":
            _take_logged(rank, record.get("values"))
        elif kind == "save":
            rank.add("launch_saves_total", 1.0)
        elif kind == "flops":
            rank.flops = (_amount_of(record.get("flops")) or 0.0) * (_amount_of(record.get("micro_batches")) or 0.0)

    def _take_phases(self, rank: _Rank, phases: object) -> None:
        for name, time_s in phases.items() if isinstance(phases, Mapping) else ():
            value = _amount_of(time_s)
            if value is not None and name in PHASES:
                rank.add(_PHASE_SECONDS, value, (name,))
                self._sum("launch_job_phase_seconds_total", value, (name,))

    def _sum(self, name: str | None, value: float, labels: Labels = ()) -> None:
        if name is not None:
            self._sums[name, labels] = self._sums.get((name, labels), 0.0) + value

    def _keep(self, ranks: Iterable[_Rank]) -> None:
        if self._keeps_ended:
            self._ended.update((rank.labels, rank) for rank in ranks if rank.values)

    def _count_failure(self, report: RunReport) -> None:
        if report.failure is not None:
            self._failures[report.failure.kind.name.lower()] += 1

    # ---- what others get ----

    def collect(self, *, with_ended: bool = False) -> list[Family]:
        """Return all figures that have points. with_ended: also the last values of ranks that ended meanwhile, once."""
        with self._lock:
            ranks = list(self._ranks.values())
            if with_ended:
                # One point of each series: that of a rank's new start takes the place of the one before.
                by_labels = self._ended | {rank.labels: rank for rank in ranks if rank.values}
                ranks, self._ended = list(by_labels.values()), {}
            job, start_s = self._plan.job_id, self._start_s
            found = [
                Family(figure, JOB_LABELS + figure.labels, [((job, *own), value, start_s) for own, value in points])
                for figure, points in self._of_job()
            ]
            ranks = [rank for rank in ranks if rank.is_shown]
            for figure in RANK_FIGURES:
                points = [
                    (rank.labels + own, value, rank.start_s)
                    for rank in ranks
                    for own, value in rank.values.get(figure.name, {}).items()
                ]
                if points:
                    found.append(Family(figure, RANK_LABELS + figure.labels, points))
            return found

    def _of_job(self) -> Iterator[tuple[Figure, list[tuple[Labels, float]]]]:
        running = [rank for rank in self._ranks.values() if rank.is_running]
        steps = [step for rank in running if (step := rank.get("launch_step")) is not None]
        times_s = [time_s for rank in running if (time_s := rank.get(_LAST_STEP)) is not None]
        values: dict[str, list[tuple[Labels, float]]] = {
            "launch_job_state": [((state,), float(state == self._state)) for state in STATES],
            "launch_start_timestamp_seconds": [((), self._start_s)],
            "launch_world_size": [((), self._plan.placement.world_size)],
            "launch_ranks": [((STARTING,), self._num_starting), ((RUNNING,), len(running))],
            "launch_restarts_total": [((), self._plan.restart)],
            "launch_rank_exits_total": [((status,), count) for status, count in self._exits.items()],
            "launch_failures_total": [
                ((kind.name.lower(),), self._failures[kind.name.lower()]) for kind in FailureKind
            ],
            "launch_verdicts": list(Counter((one.name, one.severity) for one in self._verdicts.values()).items()),
            "launch_slowest_rank_step": [((), min(steps))] if steps else [],
            "launch_oldest_step_timestamp_seconds": [((), min(times_s))] if times_s else [],
        }
        for (name, labels), value in self._sums.items():
            values.setdefault(name, []).append((labels, value))
        for figure in JOB_FIGURES:
            if values.get(figure.name):
                yield figure, values[figure.name]


def ranks_shown(placement: Placement) -> frozenset[int]:
    """Return the ranks that have figures of their own: all, or of a large job those that are first on a host."""
    ranks = placement.ranks
    if len(ranks) > MAX_RANKS:
        ranks = [node.first_rank for node in placement.nodes]
        ranks = ranks[:: -(-len(ranks) // MAX_RANKS)]
    return frozenset(ranks)


def number_of(value: object) -> float | None:
    """Return a number of a journal, where NaN and infinity are texts; None for what is none."""
    if isinstance(value, (int, float)) or value in ("nan", "inf", "-inf"):
        with contextlib.suppress(OverflowError):
            return float(value)
    return None


def _amount_of(value: object) -> float | None:
    """Return what a counter may grow by; None for what is no such number."""
    number = number_of(value)
    return number if number is not None and 0 <= number < float("inf") else None


def _take_logged(rank: _Rank, values: object) -> None:
    for name, value in values.items() if isinstance(values, Mapping) else ():
        number = number_of(value)
        if number is not None:
            labels = (str(name)[:_MAX_NAME_CHARS].encode("utf-8", "replace").decode(),)
            logged = rank.values.setdefault(_LOG, {})
            if labels in logged or len(logged) < _MAX_LOGGED:
                logged[labels] = number


def _labels_of(job_id: str, node: NodePlacement, rank: int) -> Labels:
    return (job_id, str(rank), node.host.name, str(rank - node.first_rank))
