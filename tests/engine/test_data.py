"""Each rank sees its own samples, together all of them, in an order that changes from pass to pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from launcher.base.errors import EngineError
from launcher.engine.data import DistributedLoader, build_loader


class Numbers(Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(6))


def loaders(count: int, world_size: int, *, drop_last: bool = False) -> list[DistributedLoader]:
    return [
        build_loader(Numbers(count), batch_size=4, rank=rank, world_size=world_size, drop_last=drop_last)
        for rank in range(world_size)
    ]


def seen(loader: DistributedLoader) -> list[int]:
    return torch.cat(list(loader)).tolist()


def test_ranks_share_all_samples_without_overlap() -> None:
    parts = [seen(loader) for loader in loaders(32, 2)]
    assert sorted(parts[0] + parts[1]) == list(range(32))


def test_uneven_counts_give_every_rank_as_many() -> None:
    parts = [seen(loader) for loader in loaders(31, 4)]
    assert {len(part) for part in parts} == {8}
    assert {number for part in parts for number in part} == set(range(31))


def test_drop_last_gives_whole_batches_only() -> None:
    for loader in loaders(31, 2, drop_last=True):
        assert {len(batch) for batch in loader} == {4}
        assert len(list(loader)) == len(loader) == 3


def test_each_pass_is_shuffled_anew_and_can_be_repeated() -> None:
    (loader,) = loaders(32, 1)
    first, second = seen(loader), seen(loader)
    assert first != second
    loader.set_epoch(0)
    assert seen(loader) == first


def test_an_iterable_dataset_passes_through() -> None:
    loader = build_loader(Stream(), batch_size=4, rank=1, world_size=2)
    assert seen(loader) == list(range(6))


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(EngineError, match="empty"):
        loaders(0, 1)
