"""Memory that is lent again and again, with torch's swap of storages and, before torch 2.12, without."""

from __future__ import annotations

import pytest
import torch
from harness.train import zoo
from harness.train.ranks import run_on_ranks

from launcher.comm import buffers
from launcher.comm.buffers import BufferPool

HAS_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


@pytest.fixture(params=["swaps", "resizes"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BufferPool:
    if request.param == "swaps" and not HAS_SWAP:
        pytest.skip("torch has no swap of storages before 2.12")
    monkeypatch.setattr(buffers, "_CAN_SWAP", request.param == "swaps")
    return BufferPool(torch.device("cpu"))


def test_a_storage_keeps_its_identity_while_its_memory_comes_and_goes(pool: BufferPool) -> None:
    """What autograd saved of a view must see the values of the next loan."""
    flat = pool.borrow(6, torch.float32)
    view = flat[2:4].view(1, 2)
    for value in (1.0, 2.0):
        flat.fill_(value)
        assert view.tolist() == [[value, value]]
        pool.take_back(flat.untyped_storage())
        assert flat.untyped_storage().nbytes() == 0
        pool.lend(flat.untyped_storage(), 24)
    pool.give_back(flat)


def test_what_is_lent_is_counted_and_is_nobody_elses(pool: BufferPool) -> None:
    first, second = pool.borrow(8, torch.float32), pool.borrow(8, torch.float32)
    first.fill_(1.0)
    second.fill_(2.0)
    assert first.unique().tolist() == [1.0]
    assert (pool.lent_bytes, pool.peak_bytes) == (64, 64)
    pool.give_back(first)
    third = pool.borrow(8, torch.float32)
    third.fill_(3.0)
    assert second.unique().tolist() == [2.0]
    pool.give_back(second)
    pool.give_back(third)
    assert (pool.lent_bytes, pool.peak_bytes) == (0, 64)


@pytest.mark.skipif(not HAS_SWAP, reason="torch has no swap of storages before 2.12")
def test_memory_is_used_again_where_it_can_be() -> None:
    pool = BufferPool(torch.device("cpu"))
    first = pool.borrow(8, torch.float32)
    address = first.data_ptr()
    pool.give_back(first)
    assert pool.borrow(16, torch.bfloat16).data_ptr() == address


def _train_at_stage_3(rank: int, world_size: int, can_swap: bool) -> list[torch.Tensor]:
    import launcher

    before, buffers._CAN_SWAP = buffers._CAN_SWAP, can_swap
    try:
        config = {
            "train_micro_batch_size_per_gpu": zoo.SAMPLES // world_size,
            "steps_per_print": 0,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": zoo.LR}},
        }
        engine = launcher.initialize(model=zoo.build("RecomputedReentrant"), config=config)[0]
        for x, y in zoo.batches(3):
            engine.backward(engine(x.chunk(world_size)[rank], y.chunk(world_size)[rank]))
            engine.step()
        return list(engine.state_dict().values())
    finally:
        buffers._CAN_SWAP = before


@pytest.mark.skipif(not HAS_SWAP, reason="torch has no swap of storages before 2.12")
def test_training_has_the_same_bits_either_way() -> None:
    swapped, resized = (run_on_ranks(2, _train_at_stage_3, can_swap) for can_swap in (True, False))
    for ours, theirs in zip(swapped, resized, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
