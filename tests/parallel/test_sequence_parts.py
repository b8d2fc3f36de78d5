"""What ranks of one sequence exchange, how batches are cut, and what is said of parts that do not fit."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from harness.train import sequences
from harness.train.ranks import run_on_ranks
from harness.train.sequences import batch_of, make_decoder, shifted
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import launcher
from launcher.base.errors import ConfigError, EngineError
from launcher.base.log import get_logger
from launcher.comm.groups import world_group
from launcher.compat.ulysses import DistributedAttention as DeepSpeedAttention
from launcher.compat.ulysses import SequenceLoader, register_with_transformers, vocab_sequence_parallel_cross_entropy
from launcher.parallel.sequence.exchange import gather_heads, scatter_heads
from launcher.parallel.sequence.positions import are_made_positions, made_positions

# ---- what ranks exchange ----


def _whole(num_heads: int, length: int = 8) -> Tensor:
    """Return [batch 2, length, heads, 3] float64, the same on every rank."""
    return torch.randn(2, length, num_heads, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(num_heads))


def _check_exchange(rank: int, world_size: int) -> None:
    ranks = world_group()

    def part(x: Tensor, dim: int) -> Tensor:
        return x.chunk(world_size, dim)[rank].contiguous()

    query, key = _whole(4), _whole(2)
    own = [part(query, 1).requires_grad_(), part(key, 1).requires_grad_(), part(key, 1).float().requires_grad_()]
    got = scatter_heads(ranks, *own, head_dim=2, sequence_dim=1)
    repeated = key.repeat_interleave(max(1, world_size // 2), dim=2)
    assert torch.equal(got[0], part(query, 2))
    assert torch.equal(got[1], part(repeated, 2))
    assert torch.equal(got[2], part(repeated, 2).float())
    assert torch.equal(gather_heads(ranks, got[0], head_dim=2, sequence_dim=1), own[0])
    # The gradient of a sum of squares over all ranks; that of a head that several ranks have is the sum of theirs.
    sum((each.double() ** 2).sum() for each in got).backward()
    assert torch.equal(own[0].grad, 2 * own[0])
    assert torch.allclose(own[1].grad, 2 * own[1] * max(1, world_size // 2))
    # Other dimensions: [heads, batch, features, length], and heads flattened with their features.
    moved = [each.detach().permute(2, 0, 3, 1) for each in own]
    again = scatter_heads(ranks, *moved, head_dim=0, sequence_dim=-1)
    assert torch.equal(again[0], part(query, 2).permute(2, 0, 3, 1))
    flat = gather_heads(ranks, got[0].detach().flatten(2), head_dim=2, sequence_dim=1)
    assert torch.equal(flat, part(query, 1).flatten(2))


@pytest.mark.parametrize("world_size", [2, 4])
def test_heads_are_exchanged_for_the_sequence_and_back(world_size: int) -> None:
    run_on_ranks(world_size, _check_exchange)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[length, batch, heads, features] -> the same."""
    moved = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    return F.scaled_dot_product_attention(*moved, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)


def _attended(rank: int, world_size: int) -> None:
    group: Any = torch.distributed.group.WORLD
    query, key, value = (x.transpose(0, 1) for x in (_whole(4), _whole(2), _whole(2)))
    wanted = _attention(query, key, value).chunk(world_size)[rank]
    own = [each.chunk(world_size)[rank] for each in (query, key, value)]
    ours = launcher.DistributedAttention(_attention, group, scatter_idx=2, gather_idx=0)
    assert torch.allclose(ours(*own), wanted, rtol=1e-12)
    theirs = DeepSpeedAttention(_attention, group)
    assert torch.allclose(theirs(*own, 1), wanted, rtol=1e-12)
    logits, labels = torch.randn(8, 2, 5, generator=torch.Generator().manual_seed(1)), torch.arange(16).view(8, 2) % 5
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(8, 2)
    part = logits.chunk(world_size)[rank].clone().requires_grad_()
    found = vocab_sequence_parallel_cross_entropy(part, labels.chunk(world_size)[rank], group)
    assert torch.allclose(found, losses)
    found.mean().backward()
    whole = logits.clone().requires_grad_()
    F.cross_entropy(whole.flatten(0, 1), labels.flatten()).backward()
    assert torch.allclose(part.grad, world_size * whole.grad.chunk(world_size)[rank])


def test_attention_of_parts_is_that_of_the_whole() -> None:
    run_on_ranks(2, _attended)


# ---- batches and losses ----


def test_positions_that_were_changed_or_copied_are_not_trusted() -> None:
    tokens = torch.zeros(2, 4)
    assert are_made_positions(made_positions(tokens, 1, 2), 1, 2)
    assert not are_made_positions(made_positions(tokens, 1, 2), 0, 2)
    assert not are_made_positions(made_positions(tokens, 1, 2).clone(), 1, 2)
    changed = made_positions(tokens, 1, 2)
    changed[0, 0] = 0  # as a packed sequence has it
    assert not are_made_positions(changed, 1, 2)


def _lengths_of_loaders(rank: int, world_size: int) -> tuple[int, int]:
    rows = [{"input_ids": torch.full((1, 4), 3 * rank + number)} for number in range(3)]
    loader = SequenceLoader(rows, rank, torch.distributed.group.WORLD, world_size)
    return len(loader), len(list(loader))


def test_a_loader_of_parts_has_the_batches_of_all_ranks() -> None:
    assert run_on_ranks(2, _lengths_of_loaders) == [(6, 6), (6, 6)]


@pytest.mark.parametrize("length", [None, 7])
def test_a_length_that_does_not_vary_must_be_known_and_be_cut(length: int | None) -> None:
    with pytest.raises(EngineError, match=f"seq_length {length} is not a multiple of the 2 ranks"):
        register_with_transformers("a/model", "sdpa", 2, seq_length=length, seq_length_is_variable=False)


def _check_parts(rank: int, world_size: int) -> None:
    group: ProcessGroup | None = torch.distributed.group.WORLD
    batch = {**batch_of(0), "weights": torch.ones(4), "source": "a file", "attention_mask": torch.ones(4, 8)}
    whole = shifted(batch)
    part = launcher.shard_sequence(batch, group)
    for name, value in whole.items():
        assert torch.equal(part[name], value.chunk(world_size, 1)[rank]), name
    assert "labels" not in part
    own = launcher.shard_sequence(batch, group, shifts_labels=False)
    assert torch.equal(own["labels"], batch["labels"].chunk(world_size, 1)[rank])
    assert part["weights"].shape == (4,)
    assert part["source"] == "a file"
    assert part["attention_mask"].shape == (4, 8 // world_size)
    embedded = launcher.shard_sequence({"inputs_embeds": torch.ones(4, 8, 3)}, group)["inputs_embeds"]
    assert embedded.shape == (4, 8 // world_size, 3)
    # Parts with 1 and 3 labels; then one without any, whose mean is not a number.
    for counted in ([1, 3], [0, 2]):
        labels = torch.full((2, 4), -100)
        labels.view(-1)[: counted[rank]] = 1
        logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        total = launcher.sequence_loss(loss, labels, group=group)
        (total / 2).backward()
        others = [
            torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(r)).flatten(0, 1)[:n]
            for r, n in enumerate(counted)
        ]
        wanted = torch.cat(others).requires_grad_()
        expected = F.cross_entropy(wanted, torch.ones(sum(counted), dtype=torch.int64))
        (expected / 2).backward()
        assert torch.allclose(total, expected)
        own = wanted.grad.split(counted)[rank]
        assert torch.allclose(logits.grad.flatten(0, 1)[: counted[rank]], world_size * own)
        assert not logits.grad.flatten(0, 1)[counted[rank] :].any()


def test_parts_of_batches_and_losses_make_up_the_whole() -> None:
    run_on_ranks(2, _check_parts)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": torch.ones(1, 4)}, "a dict with input_ids"),
        ({"input_ids": torch.ones(2, 8), "labels": torch.ones(2, 7)}, "shift_labels has the shape [2, 7]"),
        ({"input_ids": torch.ones(2, 8), "attention_mask": torch.ones(2, 1, 8, 8)}, "attention_mask has the shape"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(EngineError, match=re.escape(message)):
        launcher.shard_sequence(batch)


# ---- what is said ----


class Deaf(nn.Module):
    """A decoder whose parts of sequences do not meet."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_decoder()
        for attention in self.inner.attentions:
            del attention.core
            attention.core = F.scaled_dot_product_attention

    def forward(self, **batch: Tensor) -> Tensor:
        return self.inner(**batch)


def _tried(rank: int, world_size: int) -> dict[str, str]:
    config = sequences.config(1, 4, world_size)
    whole = shifted(batch_of(0))
    other: Any = type("Other", (), {"get_model_parallel_world_size": lambda _: 2})()

    def start(**more: Any) -> Any:
        return launcher.initialize(model=make_decoder(), **{"config": config, **more})[0]

    engine = start(mesh_param=(1, world_size))
    with mock.patch.object(get_logger(), "warning") as warned:
        start()(**{name: value[:, :4] for name, value in whole.items()})
    assert warned.call_count == (rank == 0), "equal parts"
    uneven = {name: value[:, : 4 + rank] for name, value in whole.items()}
    tries = {
        "uneven": lambda: engine(**uneven),
        "no exchange": lambda: launcher.initialize(model=Deaf(), config=config)[0](
            **launcher.shard_sequence(batch_of(0))
        ),
        "another mpu": lambda: start(mpu=other),
        "another mesh": lambda: start(mesh_param=(2, 2)),
        "three ranks": lambda: start(config={**config, "sequence_parallel_size": 3}),
        "pipeline": lambda: start(config={**config, "pipeline": {"stages": 2}}),
        "shards of shards": lambda: start(config={**config, "zero_optimization": {"stage": 3, "mics_shard_size": 2}}),
        "three heads": lambda: launcher.DistributedAttention(_attention, torch.distributed.group.WORLD)(
            *[_whole(3)] * 3
        ),
        "five keys": lambda: launcher.DistributedAttention(_attention, torch.distributed.group.WORLD)(
            _whole(8), _whole(5), _whole(5)
        ),
    }
    return {name: _said(call) for name, call in tries.items()}


def _said(call: Any) -> str:
    try:
        call()
    except (ConfigError, EngineError) as error:
        return str(error)
    return ""


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    for said in run_on_ranks(2, _tried):
        assert "got parts of different sizes" in said["uneven"]
        assert "no attention of the model exchanged heads" in said["no exchange"]
        assert "takes groups of sequence or model parallelism" in said["another mpu"]
        assert "mesh_param=(2, 2)" in said["another mesh"]
        assert "1 (data) × 3 (sequence) = 3 does not divide the 2 ranks" in said["three ranks"]
        assert said["pipeline"]
        assert "mics_shard_size is for data parallelism alone" in said["shards of shards"]
        assert "2 ranks of one sequence do not divide 3 attention heads" in said["three heads"]
        assert "5 heads of keys do not divide the 8 heads of queries" in said["five keys"]
