"""At stage 3 what torch.autocast casts is gathered in its type: the same bits, half the bytes, no copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn

import launcher
from launcher.comm import observe
from launcher.zero import GatheredParameters
from launcher.zero.order import Collective

TOKENS, WIDTH, SAMPLES, STEPS = 32, 24, 12, 3


class Model(nn.Module):
    """Layers that autocast casts, and others; one is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in (0, 1):
            x = x + self.blocks[index](x)
        x = self.conv(x.unsqueeze(1)).mean(1)
        out: Tensor = self.head(x).float()
        return nn.functional.cross_entropy(out, tokens)


def start(world_size: int, stage: int, *, autocast: bool = True, **zero: Any) -> Any:
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "torch_autocast": {"enabled": autocast},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    return launcher.initialize(model=Model(), config=config)[0]


def tokens_of(rank: int, world_size: int, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, TOKENS, (SAMPLES,), generator=generator).chunk(world_size)[rank]


def train(rank: int, world_size: int, stage: int, zero: dict[str, Any]) -> dict[str, Tensor]:
    engine = start(world_size, stage, **zero)
    for number in range(2 * STEPS):
        engine.backward(engine(tokens_of(rank, world_size, number)))
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize(
    ("world_size", "zero"),
    [
        (2, {}),
        (3, {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}),
        (4, {"zero_hpz_partition_size": 2}),
        (2, {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}),
    ],
)
def test_stage_3_has_the_bits_of_stage_2(world_size: int, zero: dict[str, Any]) -> None:
    offload = {key: value for key, value in zero.items() if key == "offload_optimizer"}
    expected = run_on_ranks(world_size, train, 2, offload)[0]
    for weights in run_on_ranks(world_size, train, 3, zero):
        for name, value in expected.items():
            assert weights[name].dtype == torch.float32
            assert torch.equal(weights[name], value), name


def _bytes_of_a_forward(rank: int, world_size: int, autocast: bool) -> tuple[int, int, int]:
    """Return the bytes sent, and the elements gathered of units that autocast casts, and of others."""
    engine = start(world_size, 3, autocast=autocast)
    engine.eval()
    numels = {True: 0, False: 0}
    with torch.no_grad():
        sent_bytes = -observe.sent_bytes()
        engine(tokens_of(rank, world_size))
        sent_bytes += observe.sent_bytes()
    for index in engine._sharded.reducer.order.issued[Collective.GATHER]:
        unit = engine._sharded.units[index]
        numels[all(is_cast(name) for name in unit.layout.names)] += unit.numel
    return sent_bytes, numels[True], numels[False]


def is_cast(name: str) -> bool:
    """Neither the embedding, which is the head's weight, nor the first layers of the blocks, which are norms."""
    return not name.startswith("embedding") and ".0." not in name.removeprefix("blocks.0").removeprefix("blocks.1")


def test_bytes_gathered_are_those_of_the_formula() -> None:
    """Each rank sends its half of every unit to the other."""
    for num_bytes, num_cast, num_fp32 in run_on_ranks(2, _bytes_of_a_forward, True):
        assert num_bytes == (2 * num_cast + 4 * num_fp32) // 2
        assert num_cast >= 2 * (2 * WIDTH * 2 * WIDTH + 3 * WIDTH) + (2 * 3 + 2) + TOKENS  # blocks, conv, head's bias
        assert num_fp32 >= TOKENS * WIDTH + 2 * 2 * WIDTH


def _what_is_saved(rank: int, world_size: int) -> bool:
    """Whether all that backward reads of the weights is memory of the units, which is released."""
    engine = start(world_size, 3)
    units = [unit.params for unit in engine._sharded.units]
    weights = {param.shape for name, param in Model().named_parameters() if param.dim() == 2 and "blocks" in name}
    flats = {whole.flat.untyped_storage()._cdata for unit in units for whole in (unit._in_autocast_type,)}
    found = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16 and {tensor.shape, tensor.t().shape if tensor.dim() == 2 else None} & weights:
            found.append(tensor.untyped_storage()._cdata in flats)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine(tokens_of(rank, world_size))
    return bool(found) and all(found)


def test_backward_keeps_no_copies_of_the_weights() -> None:
    assert run_on_ranks(2, _what_is_saved) == [True, True]


def _edit(rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor, torch.dtype, torch.dtype]:
    """Edit one element between forward and backward, when forward has left the weights whole in 16 bits."""
    engine = start(world_size, 3, stage3_max_reuse_distance=10**9)
    linear = engine.module.blocks[1][1]
    with GatheredParameters(linear.weight):
        first = linear.weight.dtype
    assert first == torch.float32
    for _ in range(2):  # then it is known that backward reads the last block again soon
        loss = engine(tokens_of(rank, world_size))
        engine.backward(loss * 0.0)
        engine.step()
    with GatheredParameters(linear.weight):
        before = linear.weight.detach().clone()
    loss = engine(tokens_of(rank, world_size)) * 0.0
    with GatheredParameters(linear.weight, modifier_rank=0):
        during = linear.weight.dtype
        linear.weight.data[0, 0] = 3.001  # not in 16 bits
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)
    with GatheredParameters(linear.weight):
        after = linear.weight.detach().clone()
    with torch.no_grad():
        engine.module.blocks[1](torch.ones(1, WIDTH))  # not under autocast
        plain = engine.module.blocks[1](torch.ones(1, WIDTH)).dtype
    return before, after, after[0, 0], during, plain


def test_an_edit_after_a_forward_in_16_bits_is_one_of_fp32() -> None:
    for before, after, edited, during, plain in run_on_ranks(2, _edit):
        assert edited == torch.tensor(3.001)
        assert during == torch.float32
        assert torch.equal(before.flatten()[1:], after.flatten()[1:])
        assert plain == torch.float32
