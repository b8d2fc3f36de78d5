"""A loader that continues from a saved position gives the batches that an uninterrupted run would have seen."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from launcher.base.errors import CheckpointError
from launcher.base.log import get_logger
from launcher.engine.data import DistributedLoader, build_loader

COUNT = 53  # a prime: nothing divides it


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caplog hear the project's logger, which keeps its lines from the root logger."""
    monkeypatch.setattr(get_logger(), "propagate", True)


class Numbers(Dataset[Tensor]):
    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


def loader_of(rank: int = 0, world_size: int = 1, batch_size: int = 4, **options: Any) -> DistributedLoader:
    data = options.pop("data", None) or Numbers()
    return build_loader(data, batch_size=batch_size, rank=rank, world_size=world_size, **options)


def resumed(saved: DistributedLoader, **options: Any) -> DistributedLoader:
    loader = loader_of(**options)
    loader.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    return loader


def batches_of(loader: DistributedLoader, num_passes: int = 1) -> list[list[list[int]]]:
    return [[batch.tolist() for batch in loader] for _ in range(num_passes)]


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_rest_of_the_epoch_and_later_ones_are_as_without_interruption(world_size: int, drop_last: bool) -> None:
    for rank in range(world_size):
        options: dict[str, Any] = {"rank": rank, "world_size": world_size, "drop_last": drop_last}
        whole = batches_of(loader_of(**options), num_passes=4)
        for given in range(len(whole[1]) + 1):
            loader = loader_of(**options)
            list(loader)
            batches = iter(loader)
            for _ in range(given):
                next(batches)
            later = resumed(loader, **options)
            assert len(later) == len(whole[0])
            assert batches_of(later, num_passes=3) == [whole[1][given:], whole[2], whole[3]]


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations([1, 2, 3], 2)))
def test_at_another_world_size_the_order_of_samples_goes_on(before: int, after: int) -> None:
    loaders = [loader_of(rank, before, batch_size=6 // before) for rank in range(before)]
    for loader in loaders:
        list(itertools.islice(loader, 3))
    order = DistributedSampler(Numbers(), num_replicas=1, rank=0, seed=0)
    expected = list(order)[18:]
    # The state of any rank will do.
    parts = [batches_of(resumed(loaders[-1], rank=r, world_size=after, batch_size=6 // after), 2) for r in range(after)]
    assert len({len(part[0]) for part in parts}) == 1
    steps = zip(*(part[0] for part in parts), strict=True)
    in_order = [sample for step in steps for row in zip(*step, strict=True) for sample in row]
    assert in_order[: len(expected)] == expected
    assert len(in_order) < len(expected) + after
    whole = [batches_of(loader_of(r, after, batch_size=6 // after), 2)[1] for r in range(after)]
    assert [part[1] for part in parts] == whole


def test_a_position_that_other_ranks_do_not_divide_loses_no_sample() -> None:
    loader = loader_of(batch_size=5)
    had = [sample for batch in itertools.islice(loader, 5) for sample in batch.tolist()]
    parts = [flat(batches_of(resumed(loader, rank=r, world_size=3, batch_size=4))[0]) for r in range(3)]
    assert len({len(part) for part in parts}) == 1
    assert set(had) | set(flat(parts)) == set(range(COUNT))
    order = list(DistributedSampler(Numbers(), num_replicas=1, rank=0, seed=0))
    assert [sample for row in zip(*parts, strict=True) for sample in row][: COUNT - 25] == order[25:]


def test_the_order_is_distributed_sampler_s() -> None:
    for world_size, drop_last, epoch in itertools.product([1, 2, 3, 60], [False, True], [0, 5]):
        for rank in range(world_size):
            sampler = DistributedSampler(Numbers(), world_size, rank, seed=9, drop_last=drop_last)
            sampler.set_epoch(epoch)
            loader = loader_of(rank, world_size, batch_size=1, seed=9, drop_last=drop_last)
            loader.set_epoch(epoch)
            assert flat(batches_of(loader)[0]) == list(sampler)


def test_the_saved_seed_decides_the_order() -> None:
    loader = loader_of(seed=5)
    whole = batches_of(loader_of(seed=5), 2)
    list(itertools.islice(loader, 2))
    assert batches_of(resumed(loader, seed=6), 2) == [whole[0][2:], whole[1]]


def test_set_epoch_of_the_saved_epoch_continues_it_and_another_begins_whole() -> None:
    whole = batches_of(loader_of(), 4)
    loader = loader_of()
    loader.set_epoch(2)
    list(itertools.islice(loader, 3))

    same = resumed(loader)
    same.set_epoch(2)
    assert batches_of(same, 2) == [whole[2][3:], whole[3]]
    same.set_epoch(2)
    assert batches_of(same) == [whole[2]]

    another = resumed(loader)
    another.set_epoch(1)
    another.set_epoch(2)
    assert batches_of(another) == [whole[2]]


def test_set_epoch_before_a_pass_is_saved() -> None:
    whole = batches_of(loader_of(), 8)
    loader = loader_of()
    batches = iter(loader)
    next(batches)
    loader.set_epoch(7)
    assert batches_of(resumed(loader)) == [whole[7]]
    next(batches)  # the pass was not over after all
    assert batches_of(resumed(loader), 2) == [whole[0][2:], whole[7]]


def test_a_state_that_was_loaded_and_not_used_is_saved_again() -> None:
    loader = loader_of()
    list(itertools.islice(loader, 3))
    first = resumed(loader)
    assert first.state_dict() == loader.state_dict()
    assert batches_of(resumed(first), 2) == batches_of(first, 2)


def test_saved_twice_within_an_epoch() -> None:
    whole = batches_of(loader_of(world_size=2), 2)
    loader = loader_of(world_size=2)
    list(itertools.islice(loader, 2))
    loader = resumed(loader, world_size=2)
    list(itertools.islice(loader, 3))
    assert batches_of(resumed(loader, world_size=2), 2) == [whole[0][5:], whole[1]]


def test_between_two_passes_the_next_one_is_whole() -> None:
    whole = batches_of(loader_of(), 2)
    loader = loader_of()
    list(loader)
    assert batches_of(resumed(loader)) == [whole[1]]
    assert batches_of(resumed(loader_of()), 2) == whole


def test_iter_and_next_work_as_a_loop_does() -> None:
    def endless(loader: DistributedLoader) -> Iterator[list[int]]:
        batches = iter(loader)
        while True:
            try:
                yield next(batches).tolist()
            except StopIteration:
                batches = iter(loader)

    for given in (5, len(loader_of()), len(loader_of()) + 1):
        loader = loader_of()
        run = endless(loader)
        list(itertools.islice(run, given))
        again = endless(resumed(loader))
        assert list(itertools.islice(again, 40)) == list(itertools.islice(run, 40))


def test_only_the_newest_of_several_passes_counts() -> None:
    whole = batches_of(loader_of(), 3)
    loader = loader_of()
    first, second = iter(loader), iter(loader)
    seen = [[next(first).tolist() for _ in range(4)], [next(second).tolist() for _ in range(2)]]
    next(first)
    assert seen == [whole[0][:4], whole[1][:2]]
    assert batches_of(resumed(loader), 2) == [whole[1][2:], whole[2]]
    list(first)  # the end of the older one is no end of the newer one
    assert batches_of(resumed(loader), 2) == [whole[1][2:], whole[2]]


def test_a_pass_that_a_loop_left_early_continues_after_a_resume() -> None:
    whole = batches_of(loader_of(), 2)
    loader = loader_of()
    for _ in zip(range(3), loader, strict=False):
        pass
    saved = resumed(loader)
    assert batches_of(loader) == [whole[1]]  # in the same process, a loop begins the next epoch
    assert batches_of(saved, 2) == [whole[0][3:], whole[1]]


def test_what_workers_read_ahead_is_not_counted() -> None:
    whole = batches_of(loader_of(), 2)
    loader = loader_of(num_workers=2)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(3)]
    later = resumed(loader, num_workers=2)
    assert loader.state_dict()["samples"] == 12
    assert [seen, *batches_of(later, 2)] == [whole[0][:3], whole[0][3:], whole[1]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_passes_draw_nothing_from_the_generators_of_the_script(num_workers: int) -> None:
    before = (torch.get_rng_state(), random.getstate())
    loader = loader_of(num_workers=num_workers)
    list(loader)
    iter(resumed(loader, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Noise(Dataset[Tensor]):
    """What workers draw."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1)


def test_workers_draw_other_numbers_each_epoch_and_on_each_rank_and_follow_the_script_s_seed() -> None:
    def noise(rank: int, seed: int) -> list[float]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            loader = build_loader(Noise(), batch_size=2, rank=rank, world_size=2, num_workers=1)
            return [value for _ in range(2) for batch in loader for value in batch.flatten().tolist()]

    drawn = [*noise(0, 1), *noise(1, 1), *noise(0, 2)]
    assert len(set(drawn)) == len(drawn)
    assert noise(0, 1) == drawn[:4]


def test_the_position_ends_with_the_epoch_also_after_a_resume() -> None:
    def positions(loader: DistributedLoader) -> list[int]:
        return [loader.state_dict()["samples"] for _ in iter(loader)]

    data = Numbers(10)
    assert positions(loader_of(data=data)) == [4, 8, 10]
    loader = loader_of(data=data)
    next(iter(loader))
    assert positions(resumed(loader, data=data)) == [8, 10]


def test_another_dataset_starts_the_epoch_anew_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of()
    list(loader)
    list(itertools.islice(loader, 3))
    with caplog.at_level(logging.WARNING):
        later = resumed(loader, data=Numbers(30))
    assert "30 samples" in caplog.text
    assert "53" in caplog.text
    fresh = loader_of(data=Numbers(30))
    fresh.set_epoch(1)
    assert batches_of(later) == batches_of(fresh)


class Stream(IterableDataset[Tensor]):
    """Splits itself by rank, draws from the script's generator, and cannot be resumed."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size, self.epoch = rank, world_size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.rank, COUNT, self.world_size):
            random.random()
            torch.rand(1)
            yield torch.tensor(1000 * self.epoch + number)


class ResumableStream(Stream):
    """As a stream that knows where it is."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(rank, world_size)
        self.start = self.at = 0
        self.reads: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        self.at, self.start = self.start, 0
        while self.at < COUNT:
            self.at += 1
            self.reads.append(self.at)
            yield torch.tensor(1000 * self.epoch + self.at)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


def test_a_stream_is_read_up_to_where_it_was(caplog: pytest.LogCaptureFixture) -> None:
    whole = batches_of(loader_of(data=Stream()), 3)
    loader = loader_of(data=Stream())
    list(loader)
    list(itertools.islice(loader, 3))
    later = resumed(loader, data=Stream())
    before = (torch.get_rng_state(), random.getstate())
    with caplog.at_level(logging.INFO):
        iter(later)
    assert "3 batches" in caplog.text
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert batches_of(resumed(loader, data=Stream()), 2) == [whole[1][3:], whole[2]]


def test_a_stream_that_splits_itself_continues_on_other_ranks() -> None:
    loader = loader_of(1, 2, data=Stream(1, 2))
    list(itertools.islice(loader, 3))  # 24 samples on both ranks
    parts = [resumed(loader, rank=rank, world_size=3, data=Stream(rank, 3)) for rank in range(3)]
    assert sorted(flat(flat(batches_of(part)[0]) for part in parts)) == list(range(24, COUNT))


def test_a_stream_with_a_state_is_not_read_again() -> None:
    whole = batches_of(loader_of(data=ResumableStream()), 3)
    loader = loader_of(data=ResumableStream())
    list(loader)
    batches = iter(loader)
    list(itertools.islice(batches, 3))
    stream = ResumableStream()
    later = resumed(resumed(loader, data=ResumableStream()), data=stream)
    assert batches_of(later, 2) == [whole[1][3:], whole[2]]
    assert stream.reads[0] == 13


def test_workers_copies_of_a_stream_are_read_up_to_where_they_were() -> None:
    whole = batches_of(loader_of(data=ResumableStream(), num_workers=1), 2)
    loader = loader_of(data=ResumableStream(), num_workers=1)
    batches = iter(loader)
    list(itertools.islice(batches, 3))
    assert "dataset" not in loader.state_dict()
    assert batches_of(resumed(loader, data=ResumableStream(), num_workers=1), 2) == [whole[0][3:], whole[1]]


@pytest.mark.parametrize(
    "change",
    [{"epoch": -1}, {"samples": "3"}, {"samples": None}, {"seed": 2**64}, {"next_epoch": 1.5}, {"epoch": True}],
)
def test_a_damaged_position_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(change))):
        loader_of().load_state_dict({**loader_of().state_dict(), **change})


def test_a_position_beyond_the_end_is_the_end() -> None:
    loader = loader_of()
    loader.load_state_dict({**loader.state_dict(), "samples": 2**61})
    assert batches_of(loader, 2) == [[], batches_of(loader_of(), 2)[1]]
