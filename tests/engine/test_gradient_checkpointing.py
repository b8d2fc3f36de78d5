"""`model.gradient_checkpointing_enable()` of Hugging Face's models: the same training at every stage, in less memory.

The model here calls `torch.utils.checkpoint` where and how theirs do: around a whole layer, inside its `__call__`, with
the keyword arguments bound.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from launcher.base.errors import EngineError

VOCABULARY, WIDTH, LENGTH, LAYERS, SAMPLES, STEPS = 29, 32, 8, 3, 2, 2


class Layer(nn.Module):
    """A pre-norm block with dropout; recomputed on request."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.recompute: Any = None
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.is_shifted = True
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            return self.recompute(functools.partial(super().__call__, **kwargs), *args)
        return super().__call__(*args, **kwargs)

    def forward(self, x: Tensor, is_causal: bool = False) -> Tensor:
        x = x + self.shift if self.is_shifted else x
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=is_causal))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Tied embedding and head. `is_shared`: one layer is used again and again, as in ALBERT."""

    def __init__(self, is_shared: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(1 if is_shared else LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        for module in self.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = True
                module.recompute = functools.partial(checkpoint, **gradient_checkpointing_kwargs)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight
        for index in range(LAYERS):
            x = self.layers[index % len(self.layers)](x, is_causal=True)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def train(
    rank: int,
    world_size: int,
    stage: int,
    precision: str,
    use_reentrant: bool | None,
    is_shared: bool = False,
    blocks: bool = False,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of this rank and the final weights. use_reentrant: None trains without recomputation.

    blocks: the engine has them recomputed, of a model that would not do so.

    The shared layer trains by SGD: Adam makes a difference of gradients that are nearly zero as large as any. Rank 1
    leaves one of its parameters out, so that ranks do not agree on when the layer's gradients are complete; at stage 3
    all ranks must use the same parameters.
    """
    import launcher

    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 0,
        "bf16": {"enabled": precision == "bf16"},
        "activation_checkpointing": {"blocks": blocks},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": 1000,  # units that are not joined
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
        },
        "optimizer": {"type": "SGD" if is_shared else "AdamW", "params": {"lr": 0.3 if is_shared else 1e-2}},
    }
    torch.manual_seed(3)
    model = GPT(is_shared)
    model.layers[0].is_shifted = not is_shared or rank == 0 or stage == 3
    engine = launcher.initialize(model=model, config=config)[0]
    if use_reentrant is not None:
        engine.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    torch.manual_seed(5 + rank)
    losses = []
    for tokens in torch.randint(VOCABULARY, (STEPS, SAMPLES, LENGTH)):
        for _ in range(2):
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses, engine.state_dict()


# Each two of stage, precision and kind of recomputation together, and all three in the soak.
SETTINGS = [
    pytest.param(stage, ("fp32", "bf16")[is_bf16], use_reentrant, marks=[] if is_quick else pytest.mark.soak)
    for stage, is_bf16, use_reentrant in itertools.product((0, 1, 2, 3), (False, True), (False, True))
    for is_quick in [(stage + is_bf16 + use_reentrant) % 2 == 0]
]


@pytest.mark.parametrize(("stage", "precision", "use_reentrant"), SETTINGS)
def test_recomputation_changes_nothing(stage: int, precision: str, use_reentrant: bool) -> None:
    expected = run_on_ranks(2, train, stage, precision, None)
    found = run_on_ranks(2, train, stage, precision, use_reentrant)
    for (losses, weights), (expected_losses, expected_weights) in zip(found, expected, strict=True):
        assert losses == expected_losses
        assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_layer_in_several_recomputed_segments(stage: int) -> None:
    """Each segment's own backward delivers gradients of the shared layer: sums come in another order."""
    expected = run_on_ranks(2, train, stage, "fp32", None, True)
    for use_reentrant in (False, True):
        found = run_on_ranks(2, train, stage, "fp32", use_reentrant, True)
        for (losses, weights), (expected_losses, expected_weights) in zip(found, expected, strict=True):
            assert losses == pytest.approx(expected_losses, rel=1e-6)
            torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


# ---- blocks that the engine has recomputed: `activation_checkpointing.blocks` ----


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")])
def test_blocks_recomputed_by_the_engine_change_nothing(stage: int, precision: str) -> None:
    expected = run_on_ranks(2, train, stage, precision, None)
    found = run_on_ranks(2, train, stage, precision, None, False, True)
    for (losses, weights), (expected_losses, expected_weights) in zip(found, expected, strict=True):
        assert losses == expected_losses
        assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())


def engine_of(model: nn.Module, *, blocks: bool = True, **keys: Any) -> Any:
    import launcher

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "activation_checkpointing": {"blocks": blocks},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **keys,
    }
    return launcher.initialize(model=model, config=config)[0]


class Counting(nn.Module):
    """Counts how often its forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return torch.tanh(self.inner(x))


def test_each_block_runs_twice_in_training_and_once_else() -> None:
    counting = [Counting(), Counting()]
    engine = engine_of(nn.Sequential(*counting, nn.Linear(4, 1)))
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert [module.num_calls for module in counting] == [2, 2]
    engine.eval()
    engine(torch.ones(1, 4))
    assert [module.num_calls for module in counting] == [3, 3]


def test_the_next_engine_of_a_model_decides_anew() -> None:
    block = Counting()
    model = nn.Sequential(block, nn.Linear(4, 1))
    engine_of(model).destroy()
    copied = copy.deepcopy(model)
    engine = engine_of(model, blocks=False)
    assert "forward" not in vars(block)
    engine.backward(engine(torch.ones(1, 4)).sum())
    assert block.num_calls == 1
    copied(torch.ones(1, 4)).sum().backward()
    assert (copied[0].num_calls, block.num_calls) == (2, 1)  # a copy recomputes itself, not its original


def test_a_model_that_recomputes_itself_is_left_alone() -> None:
    model = GPT()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine_of(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(EngineError, match=r"Linear has no blocks, modules in an nn\.ModuleList or nn\.Sequential"):
        engine_of(nn.Linear(4, 1))


def test_a_pipeline_is_refused() -> None:
    from launcher import PipelineModule

    layers = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 1)], num_stages=1)
    with pytest.raises(EngineError, match=r"activation_checkpointing\.blocks is not for a pipeline"):
        engine_of(layers)
