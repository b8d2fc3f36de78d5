"""A data loader that gives each rank its own micro-batches, and knows how far it is."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from launcher.base.errors import CheckpointError, EngineError
from launcher.base.log import get_logger
from launcher.checkpoint.values.rng import restore_rng, rng_state

_MAX_NUMBER = 2**62  # in a saved state: sums of two stay within what a generator takes as a seed
_END = object()


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are built; the names are those of `torch.utils.data.DataLoader`."""

    batch_size: int  # samples of one micro-batch of one rank
    collate_fn: Callable[[list[Any]], Any] | None = None
    drop_last: bool = False
    num_workers: int = 0
    pin_memory: bool = False
    shuffle: bool = True
    seed: int = 0  # of the shuffle, the same on every rank


@dataclass(frozen=True)
class ShuffledOrder:
    """How a dataset's samples are split over ranks.

    An epoch's order is a permutation of all samples that depends on seed and epoch alone. Rank r of W takes every W-th
    sample from r on, so that the ranks' k-th micro-batches together are the k-th piece of the order, however many ranks
    there are. Ranks get equally many: unequal counts would leave ranks waiting in a collective. A few samples are
    repeated for that, or left out with `drop_last`. The same samples as torch's `DistributedSampler` gives.
    """

    num_samples: int  # of the dataset
    rank: int
    world_size: int
    drop_last: bool
    shuffle: bool = True  # False: the dataset's own order in every epoch

    def num_left(self, position: int) -> int:
        """Return how many samples each rank gets when all together had `position` samples of an epoch."""
        left = max(0, self.num_samples - position)
        return left // self.world_size if self.drop_last else math.ceil(left / self.world_size)

    def indices(self, shuffle_seed: int, position: int) -> list[int]:
        """Return this rank's samples of one epoch from `position` on."""
        if position >= self.num_samples:
            return []
        if self.shuffle:
            order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(shuffle_seed))
        else:
            order = torch.arange(self.num_samples)
        stop = position + self.num_left(position) * self.world_size
        if stop > self.num_samples:
            order = order.repeat(math.ceil(stop / self.num_samples))
        indices: list[int] = order[position + self.rank : stop : self.world_size].tolist()
        return indices


class _Share(Sampler[int]):
    """A rank's samples of the rest of one epoch, for one pass."""

    def __init__(self, order: ShuffledOrder, shuffle_seed: int, position: int) -> None:
        self._order = order
        self._shuffle_seed = shuffle_seed
        self._position = position

    def __len__(self) -> int:
        return self._order.num_left(self._position)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order.indices(self._shuffle_seed, self._position))


@dataclass(eq=False)
class _Pass:
    """How far one pass over the data is."""

    epoch: int
    position: int  # samples of all ranks together that loops were given, those before a resume included
    limit: int | None = None  # samples of all ranks together in the whole epoch; None: not known


class DistributedLoader:
    """Iterates over one rank's micro-batches; every pass shuffles anew, alike on all ranks, unless told not to.

    A dataset with a length is split as `ShuffledOrder` says. An `IterableDataset` is passed through and must split
    itself by rank; where it has `set_epoch`, that is called before each pass.

    `state_dict()` counts the batches that the newest pass gave. After `load_state_dict()` the first pass gives the rest
    of that epoch, which may be nothing, and later ones are whole. Passes draw no number from torch's generators.
    """

    def __init__(self, dataset: Dataset[Any], rank: int, world_size: int, options: LoaderOptions) -> None:
        self.dataset = dataset
        self.options = options
        self._seed = options.seed
        self._rank = rank
        self._world_size = world_size
        self._epoch = 0  # of the next pass
        self._current: _Pass | None = None  # the pass that gave the latest batch, until it ends
        self._newest: _Pass | None = None
        self._resumed: dict[str, Any] | None = None  # a loaded state no pass began from yet
        self._order: ShuffledOrder | None = None
        if not isinstance(dataset, IterableDataset):
            num_samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__
            if num_samples == 0:
                raise EngineError("training_data is empty", hint="give a dataset with at least one sample")
            self._order = ShuffledOrder(num_samples, rank, world_size, options.drop_last, options.shuffle)

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next pass; without a call each pass takes the next one.

        After `load_state_dict` the saved epoch continues where it was; any other begins whole.
        """
        if self._resumed is not None and self._resumed["epoch"] == epoch:
            self._epoch = epoch + 1  # of the pass after the resumed one
            return
        self._resumed = None
        self._epoch = epoch
        if self._current is not None and self._current.epoch != epoch:
            self._current = None

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        return len(self._loader(_Pass(0, 0)))

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            newest = _Pass(self._epoch, 0)
            self._epoch += 1
        else:
            newest = _Pass(resumed["epoch"], resumed["samples"])
        self._newest = self._current = newest
        loader = self._loader(newest)
        batches = iter(loader) if self._order is not None else self._begin_stream(loader, newest, resumed)
        return self._given(batches, newest)

    def state_dict(self) -> dict[str, Any]:
        """Return how far this rank is: numbers, and what an `IterableDataset` says of itself.

        Batches count when a loop is given them; what worker processes have read ahead does not.
        """
        if self._resumed is not None:
            return {**self._resumed, "next_epoch": self._epoch}
        at = self._current
        state: dict[str, Any] = {
            "epoch": self._epoch if at is None else at.epoch,
            "next_epoch": self._epoch + 1 if at is None else self._epoch,
            "samples": 0 if at is None else at.position,
            "seed": self._seed,
            "num_samples": None if self._order is None else self._order.num_samples,
            "batch_size": self.options.batch_size,
            "rank": self._rank,
            "world_size": self._world_size,
        }
        # The copies in worker processes read ahead, and cannot be asked.
        if at is not None and self.options.num_workers == 0 and keeps_position(self.dataset):
            state["dataset"] = self.dataset.state_dict()  # type: ignore[attr-defined]  # just looked
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called: with the same batches, or the same order in batches of other sizes.

        The shuffle is the saved one, whatever seed this loader was given.
        Raises: CheckpointError for a state that is not this method's.
        """
        for name in ("epoch", "next_epoch", "samples", "seed", "batch_size", "rank", "world_size"):
            if type(state) is not dict or type(state.get(name)) is not int or not 0 <= state[name] < _MAX_NUMBER:
                raise CheckpointError(
                    f"the saved position in the data has no valid {name!r}", hint="load another checkpoint"
                )
        state = dict(state)
        num_samples = None if self._order is None else self._order.num_samples
        if state.get("num_samples") != num_samples:
            if self._rank == 0:
                get_logger().warning(
                    "training_data has %s samples, and had %s when the checkpoint was saved: epoch %d starts anew",
                    _counted(num_samples),
                    _counted(state.get("num_samples")),
                    state["epoch"],
                )
            state.update(samples=0, num_samples=num_samples)
        self._seed = state["seed"]
        self._current = self._newest = None
        self._epoch = state["next_epoch"]
        self._resumed = state

    def _loader(self, at: _Pass) -> DataLoader[Any]:
        """Return torch's loader of one pass. Each has its own, as passes may overlap."""
        sampler = None
        if self._order is not None:
            sampler = _Share(self._order, self._seed + at.epoch, at.position)
            at.limit = at.position + len(sampler) * self._world_size
        # It seeds worker processes. Without one, each pass would draw from torch's own generator, and a resumed run,
        # which begins its pass at another moment, would draw other numbers from then on.
        text = f"{torch.initial_seed()} {at.epoch} {self._rank}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        return DataLoader(
            self.dataset,
            batch_size=self.options.batch_size,
            sampler=sampler,
            collate_fn=self.options.collate_fn,
            drop_last=self.options.drop_last,
            num_workers=self.options.num_workers,
            pin_memory=self.options.pin_memory,
            generator=torch.Generator().manual_seed(seed),
        )

    def _begin_stream(self, loader: DataLoader[Any], newest: _Pass, resumed: dict[str, Any] | None) -> Iterator[Any]:
        """Start a pass of an `IterableDataset`: by the state it gave, else by reading what was had."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(newest.epoch)
        if resumed is None or newest.position == 0:
            return iter(loader)
        is_same_share = (resumed["rank"], resumed["world_size"]) == (self._rank, self._world_size)
        if "dataset" in resumed and is_same_share and self.options.num_workers == 0 and keeps_position(self.dataset):
            self.dataset.load_state_dict(resumed["dataset"])  # type: ignore[attr-defined]  # just looked
            return iter(loader)
        num_batches = newest.position // (self.options.batch_size * self._world_size)
        if self._rank == 0:
            get_logger().info(
                "training_data cannot be resumed: reading %d batches that the run had before", num_batches
            )
        cpu = torch.device("cpu")
        before = rng_state(cpu)
        batches = iter(loader)
        for _ in range(num_batches):
            if next(batches, _END) is _END:
                break
        # What the dataset drew is in the states that the checkpoint restored already.
        restore_rng(before, cpu)
        return batches

    def _given(self, batches: Iterator[Any], at: _Pass) -> Iterator[Any]:
        """Yield batches, and note the position just before each; only the newest pass counts."""
        for batch in batches:
            at.position += self.options.batch_size * self._world_size
            if at.limit is not None:
                at.position = min(at.position, at.limit)
            if at is self._newest:
                self._current = at
            yield batch
        if self._current is at:
            self._current = None


def keeps_position(loader: Any) -> bool:
    """Whether a loader or data set says how far it is, and continues there. Torch's own, lists, generators do not."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def continue_loader(loader: Any, position: Any, *, warns: bool) -> None:
    """Have a loader continue at the position that a checkpoint holds, where there are both. warns: if it cannot.

    Raises: CheckpointError where it is not that of such a loader.
    """
    if position is None or loader is None:
        return
    if keeps_position(loader):
        loader.load_state_dict(position)
    elif warns:
        get_logger().warning(
            "the checkpoint holds a position in the data, which %s cannot take over, without load_state_dict(): it"
            " is read from its beginning",
            type(loader).__name__,
        )


def _counted(num_samples: int | None) -> str:
    return "an unknown number of" if num_samples is None else str(num_samples)


def build_loader(
    dataset: Dataset[Any],
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    shuffle: bool = True,
    seed: int = 0,
    pin_memory: bool = False,
) -> DistributedLoader:
    """Build the loader `initialize(training_data=...)` returns: micro-batches of `batch_size` samples."""
    options = LoaderOptions(batch_size, collate_fn, drop_last, num_workers, pin_memory, shuffle, seed)
    return DistributedLoader(dataset, rank, world_size, options)
