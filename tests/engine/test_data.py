"""Each rank sees its own samples, together all of them, in an order that changes from pass to pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Sampler, TensorDataset

import launcher
from launcher.base.errors import EngineError
from launcher.engine.data import DistributedLoader, build_loader


class Numbers(Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Backwards(Sampler[int]):
    def __init__(self, data: Numbers) -> None:
        self.data = data

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data) - 1, -1, -1))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(6))


def loaders(count: int, world_size: int, *, drop_last: bool = False) -> list[DistributedLoader]:
    return [
        build_loader(Numbers(count), batch_size=4, rank=rank, world_size=world_size, drop_last=drop_last)
        for rank in range(world_size)
    ]


def seen(loader: Iterable[Tensor]) -> list[int]:
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


def test_without_shuffle_each_pass_has_the_order_of_the_dataset() -> None:
    parts = [build_loader(Numbers(7), batch_size=2, rank=rank, world_size=2, shuffle=False) for rank in range(2)]
    for _ in range(2):
        assert [seen(part) for part in parts] == [[0, 2, 4, 6], [1, 3, 5, 0]]


def test_a_list_of_layers_reads_its_data_in_order() -> None:
    model = launcher.PipelineModule([nn.Identity(), nn.Linear(1, 1)], num_stages=1, loss_fn=nn.functional.mse_loss)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    data = TensorDataset(torch.arange(6.0)[:, None], torch.zeros(6, 1))
    loader = launcher.initialize(model=model, config=config, training_data=data)[2]
    assert loader is not None
    assert [x.flatten().tolist() for x, _ in loader] == [[0, 1], [2, 3], [4, 5]]


def test_a_loader_for_evaluation_is_in_order_and_one_with_a_sampler_follows_it() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = launcher.initialize(model=nn.Linear(1, 1), config=config)[0]
    data = Numbers(5)
    for route in ("eval", "predict"):
        assert seen(engine.deepspeed_io(data, route=route, pin_memory=False)) == [0, 1, 2, 3, 4]
    assert sorted(seen(engine.deepspeed_io(data))) == [0, 1, 2, 3, 4] != seen(engine.deepspeed_io(data))
    backwards = engine.deepspeed_io(data, batch_size=3, data_sampler=Backwards(data), collate_fn=torch.stack)
    assert [batch.tolist() for batch in backwards] == [[4, 3, 2], [1, 0]]


def test_an_iterable_dataset_passes_through() -> None:
    loader = build_loader(Stream(), batch_size=4, rank=1, world_size=2)
    assert seen(loader) == list(range(6))


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(EngineError, match="empty"):
        loaders(0, 1)
