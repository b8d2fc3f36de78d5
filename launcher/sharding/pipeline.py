"""Pipeline schedules and partitions as arithmetic: which rank has which stages, idle time, which layers form a stage.

With p ranks, m micro-batches and v stages on each rank, where a stage's forward, the backward of its inputs and that of
its weights take the same time, ranks are idle for this part of a step:

* GPipe: (p-1)/(m+p-1). Huang et al., "GPipe", https://arxiv.org/abs/1811.06965, section 2.3.
* 1F1B: the same, with p instead of m micro-batches in memory. Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
  Training", https://arxiv.org/abs/2006.09503.
* interleaved 1F1B: (p-1)/(v·m+p-1). Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
  Using Megatron-LM", https://arxiv.org/abs/2104.04473, section 2.2.2.
* zero bubble: (p-1)/(3·v·m+p-1), as the backward of weights, a third of the work, fills what was idle. Qi et al., "Zero
  Bubble Pipeline Parallelism", https://arxiv.org/abs/2401.10241, section 2; ZB-V, two stages a rank in the shape of
  a V, section 6: torch's has the same idle time, from 2p micro-batches on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from launcher.base.errors import ConfigError
from launcher.base.units import counted

DEFAULT_SCHEDULE = "1f1b"


@dataclass(frozen=True)
class Schedule:
    """In which order a rank runs forwards and backwards."""

    name: str
    min_virtual: int = 1  # stages on each rank
    max_virtual: int | None = 1  # None: any number
    is_v_shaped: bool = False  # the second half of the stages is on the ranks in reverse order
    splits_backward: bool = False  # weights' gradients are computed apart from those of inputs
    counts_rounds: bool = False  # micro-batches come in equal rounds of at least as many as there are ranks


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe"),
        Schedule("1f1b"),
        Schedule("interleaved_1f1b", min_virtual=2, max_virtual=None, counts_rounds=True),
        Schedule("zero_bubble", max_virtual=None, splits_backward=True, counts_rounds=True),
        Schedule("zero_bubble_v", min_virtual=2, max_virtual=2, is_v_shaped=True, splits_backward=True),
    )
}


@dataclass(frozen=True)
class PipelinePlan:
    """A schedule, and how many ranks, stages and micro-batches it has."""

    num_ranks: int = 1  # p
    num_virtual: int = 1  # v, stages on each rank
    schedule: str = DEFAULT_SCHEDULE
    num_micro_batches: int = 1  # m, of one step

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return self.num_ranks * self.num_virtual

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, ascending."""
        if SCHEDULES[self.schedule].is_v_shaped:
            return (rank, self.num_stages - 1 - rank)
        return tuple(range(rank, self.num_stages, self.num_ranks))

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that has a stage."""
        if SCHEDULES[self.schedule].is_v_shaped:
            return min(stage, self.num_stages - 1 - stage)
        return stage % self.num_ranks

    @property
    def idle_fraction(self) -> float:
        """The part of a step in which a rank waits, in theory; more where there are fewer micro-batches than ranks."""
        waiting = self.num_ranks - 1
        parts = 3 if SCHEDULES[self.schedule].splits_backward else 1
        return waiting / (parts * self.num_virtual * self.num_micro_batches + waiting)

    def in_flight(self, rank: int = 0) -> int:
        """Return how many forwards of single stages a rank keeps at most until their backward has passed."""
        schedule, p, v, m = SCHEDULES[self.schedule], self.num_ranks, self.num_virtual, self.num_micro_batches
        if schedule.name == "gpipe":
            return m
        if schedule.name == "1f1b":
            return min(m, p - rank)
        if schedule.is_v_shaped:
            return min(v * m, v * p)
        ahead = (v - 1) * (m // max(1, m // p))  # of all but the last of its stages, a round
        return min(v * m, ahead + (p if schedule.splits_backward else 2 * (p - 1 - rank) + 1))

    def problem(self) -> tuple[str, str] | None:
        """Return what is wrong with the number of stages or micro-batches, and what to do; None if nothing is."""
        schedule, p, m = SCHEDULES[self.schedule], self.num_ranks, self.num_micro_batches
        rounds = max(1, m // p)
        if schedule.counts_rounds and m % rounds:
            near = f"{m - m % rounds} or {m + rounds - m % rounds}"
            what = f"{schedule.name} runs {m} micro-batches on {p} ranks in {rounds} equal rounds, and {rounds} does"
            return f"{what} not divide {m}", f"use {near} micro-batches a step, or another schedule"
        return None


def virtual_problem(schedule: str, num_virtual: int) -> tuple[str, str] | None:
    """Return what is wrong with a number of stages on each rank, and what to do; None if nothing is."""
    row = SCHEDULES[schedule]
    low, high = row.min_virtual, row.max_virtual
    if low <= num_virtual and (high is None or num_virtual <= high):
        return None
    wanted = f"at least {low}" if high is None else str(low)
    others = [name for name, other in SCHEDULES.items() if other.max_virtual is None]
    hint = f'set "virtual_stages": {low}' + ("" if num_virtual == 1 else f", or use {' or '.join(others)}")
    return f"{schedule} has {wanted} {'stage' if wanted == '1' else 'stages'} on each rank, not {num_virtual}", hint


# ---- partitions ----


def partition(weights: Sequence[float], num_stages: int) -> list[range]:
    """Divide layers into stages of neighbours, none empty, so that the heaviest stage is as light as possible.

    Of the partitions with that maximum, the one whose stages are most alike (least sum of squares). weights: of the
    layers, at least 0. Raises: ConfigError for fewer layers than stages.
    """
    num_layers = len(weights)
    if num_layers < num_stages:
        raise ConfigError(
            f"{counted(num_layers, 'layer')} cannot be divided into {num_stages} stages: a stage has at least one",
            where="pipeline.stages",
            hint=f"use at most {num_layers} stages, virtual ones included",
        )
    sums = [0.0, *accumulate(float(weight) for weight in weights)]
    bound = _smallest_maximum(sums, num_stages)
    cuts = _most_alike(sums, num_stages, bound)
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _smallest_maximum(sums: Sequence[float], num_stages: int) -> float:
    """Return the weight of the heaviest stage in the best partition. sums: of the first 0, 1, ... layers.

    best[n] is that of the first n layers in k stages. It grows with n, and the weight of a last stage that begins at n
    shrinks with n: the best start is where they cross.
    """
    num_layers = len(sums) - 1
    best = [float("inf")] * (num_layers + 1)
    best[0] = 0.0
    for k in range(1, num_stages + 1):
        following = [float("inf")] * (num_layers + 1)
        for stop in range(k, num_layers + 1):
            starts = range(k - 1, stop)
            crossing = bisect_left(starts, True, key=lambda start: best[start] >= sums[stop] - sums[start])
            near = (starts[index] for index in (crossing - 1, crossing) if 0 <= index < len(starts))
            following[stop] = min(max(best[start], sums[stop] - sums[start]) for start in near)
        best = following
    return best[num_layers]


def _most_alike(sums: Sequence[float], num_stages: int, bound: float) -> list[int]:
    """Return the bounds of the stages, none of them heavier than `bound`, with the least sum of squares."""
    num_layers = len(sums) - 1
    limit = bound * (1 + 1e-12)
    squares = [[float("inf")] * (num_layers + 1) for _ in range(num_stages + 1)]
    starts = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    squares[0][0] = 0.0
    for k in range(1, num_stages + 1):
        for stop in range(k, num_layers - (num_stages - k) + 1):
            for start in range(stop - 1, k - 2, -1):
                weight = sums[stop] - sums[start]
                if weight > limit:
                    break
                found = squares[k - 1][start] + weight * weight
                if found < squares[k][stop]:
                    squares[k][stop], starts[k][stop] = found, start
    cuts = [num_layers]
    for k in range(num_stages, 0, -1):
        cuts.append(starts[k][cuts[-1]])
    return cuts[::-1]


def num_links(num_ranks: int) -> int:
    """Return how many process groups a pipeline needs so that transfers of neighbouring pairs do not wait for others.

    The pairs are the edges of a ring, which two colours are enough for, and three where their number is odd.
    """
    return 1 if num_ranks <= 2 else 2 + num_ranks % 2


def link_between(rank: int, peer: int, num_ranks: int) -> int:
    """Return which of `num_links` groups two neighbours use; the last and the first rank are neighbours, too."""
    low, high = sorted((rank, peer))
    if num_ranks <= 2:
        return 0
    if (low, high) == (0, num_ranks - 1):
        return num_links(num_ranks) - 1
    return low % 2
