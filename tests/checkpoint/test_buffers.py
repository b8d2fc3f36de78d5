"""Buffers of every type that torch has are sent to all ranks, saved and loaded, bit by bit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from harness.train.checkpoint_runs import config
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn

import launcher
from launcher.engine.casting import buffer_dtype

# Those of torch's quantized tensors need more than bytes.
TYPES = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype) and "qint" not in str(each)}
    - {torch.quint4x2, torch.quint2x4},
    key=str,
)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).replace(".", "_")


def _bytes_of(tensor: Tensor) -> list[int]:
    return list(tensor.contiguous().view(-1).view(torch.uint8).tolist())


class Buffers(nn.Module):
    """A layer, and a buffer of every type: as if this rank's number were added to rank 0's values."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for dtype in TYPES:
            first = 0 if dtype is torch.bool else rank + 1
            values = torch.arange(first, first + 4 * dtype.itemsize, dtype=torch.uint8)
            self.register_buffer(_name(dtype), (values % 2 if dtype is torch.bool else values).view(dtype).view(2, 2))
        self.register_buffer("expanded", torch.tensor([rank + 7.0]).expand(3))
        self.register_buffer("part", torch.arange(9.0)[rank : rank + 1].expand(2, 1))
        self.register_buffer("one", torch.tensor(rank + 7, dtype=torch.uint16))
        self.register_buffer("turned", torch.full((2, 3), rank + 7, dtype=torch.uint32).t())

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4] -> scalar."""
        out: Tensor = self.layer(x).square().mean()
        return out


def _others(found: Iterable[tuple[str, Tensor]], expected: dict[str, list[int]], what: str) -> list[str]:
    return [f"{name} {what}" for name, each in found if _bytes_of(each) != expected[name]]


def _problems(rank: int, world_size: int, folder: str, stage: int, is_async: bool) -> list[str]:
    settings = config(world_size, stage, checkpoint={"async": is_async})
    engine = launcher.initialize(model=Buffers(rank), config=settings)[0]
    expected = {name: _bytes_of(buffer) for name, buffer in Buffers(0).named_buffers()}
    found = _others(engine.module.named_buffers(), expected, "was not sent")
    engine.save_checkpoint(folder, client_state=dict(engine.module.named_buffers()))
    engine.wait_for_checkpoint()
    for buffer in engine.module.buffers():
        buffer.untyped_storage().fill_(0)
    _, client_state = engine.load_checkpoint(folder)
    found += _others(engine.module.named_buffers(), expected, "was not loaded")
    found += _others(client_state.items(), expected, "is another in the client state")
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_buffers_of_every_type_are_saved_and_loaded(tmp_path: Path, stage: int, is_async: bool) -> None:
    for problems in run_on_ranks(2, _problems, str(tmp_path), stage, is_async):
        assert problems == []


def test_only_ordinary_numbers_are_cast_where_the_config_says_so() -> None:
    assert buffer_dtype(torch.float8_e4m3fn, torch.bfloat16) == torch.float8_e4m3fn
    assert buffer_dtype(torch.complex64, torch.bfloat16) == torch.complex64
    assert buffer_dtype(torch.float64, torch.bfloat16) == torch.bfloat16
    assert buffer_dtype(torch.float64, None) == torch.float64


def _half_then_full(rank: int, world_size: int, folder: str) -> list[Tensor]:
    """Save statistics in bf16, as runs did before buffers kept their type, and load them into fp32."""
    settings = config(world_size, 2, bf16={"enabled": True})
    older = {**settings, "data_types": {"buffer_dtype": "bf16"}}
    engine = launcher.initialize(model=nn.BatchNorm1d(4), config=older)[0]
    engine.module.running_mean.fill_(1 / 3)
    engine.save_checkpoint(folder)
    engine = launcher.initialize(model=nn.BatchNorm1d(4), config=settings)[0]
    engine.load_checkpoint(folder)
    return [engine.module.running_mean.clone()]


def test_16_bit_buffers_of_a_checkpoint_load_into_wider_ones(tmp_path: Path) -> None:
    for (mean,) in run_on_ranks(2, _half_then_full, str(tmp_path)):
        assert mean.dtype == torch.float32
        assert torch.equal(mean, torch.full((4,), 1 / 3).bfloat16().float())
