"""A data loader that gives each rank its own micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from launcher.base.errors import EngineError


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are built; the names are those of `torch.utils.data.DataLoader`."""

    batch_size: int  # samples of one micro-batch of one rank
    collate_fn: Callable[[list[Any]], Any] | None = None
    drop_last: bool = False
    num_workers: int = 0
    pin_memory: bool = False
    seed: int = 0  # of the shuffle, the same on every rank


class DistributedLoader:
    """Iterates over one rank's micro-batches; every pass shuffles anew, alike on all ranks.

    A dataset with a length is split by `DistributedSampler`, which repeats a few samples so that every
    rank has equally many: unequal counts would leave ranks waiting in a collective. An `IterableDataset`
    is passed through and must split itself by rank.
    """

    def __init__(self, dataset: Dataset[Any], rank: int, world_size: int, options: LoaderOptions) -> None:
        self.options = options
        self._epoch = 0
        self._sampler: DistributedSampler[Any] | None = None
        if not isinstance(dataset, IterableDataset):
            if len(dataset) == 0:  # type: ignore[arg-type]  # torch's Dataset declares no __len__
                raise EngineError("training_data is empty", hint="give a dataset with at least one sample")
            self._sampler = DistributedSampler(
                dataset,
                num_replicas=world_size,
                rank=rank,
                seed=options.seed,
                drop_last=options.drop_last,
            )
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=options.batch_size,
            sampler=self._sampler,
            collate_fn=options.collate_fn,
            drop_last=options.drop_last,
            num_workers=options.num_workers,
            pin_memory=options.pin_memory,
        )

    @property
    def dataset(self) -> Dataset[Any]:
        return self._loader.dataset

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next pass; without a call each pass takes the next one."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._sampler is not None:
            self._sampler.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self._loader)


def build_loader(
    dataset: Dataset[Any],
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    seed: int = 0,
    pin_memory: bool = False,
) -> DistributedLoader:
    """Build the loader `initialize(training_data=...)` returns: micro-batches of `batch_size` samples."""
    options = LoaderOptions(batch_size, collate_fn, drop_last, num_workers, pin_memory, seed)
    return DistributedLoader(dataset, rank, world_size, options)
