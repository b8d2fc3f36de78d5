"""Unmodified models divided between their blocks: stages one after the other, against the model in one piece."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness.train import split_models
from harness.train.split_models import EXAMPLE, FAMILIES, TORCH
from harness.train.stages import assert_whole, chain
from torch import Tensor, nn

from launcher.base.errors import ConfigError, EngineError
from launcher.config.schema_parallel import Pipeline
from launcher.parallel.pipeline.divide import stage_model
from launcher.parallel.pipeline.stages import StagedModel

MIXED = Pipeline(partition="uniform")


def divided(name: str, own: Sequence[Sequence[int]], settings: Pipeline = MIXED) -> list[StagedModel]:
    """What the ranks with these stages have."""
    num_stages = max(stage for stages in own for stage in stages) + 1
    return [stage_model(build(name, num_stages), stages, num_stages, settings) for stages in own]


def build(name: str, num_blocks: int = 2) -> nn.Module:
    """A model with so many blocks."""
    if name not in (EXAMPLE, TORCH):
        pytest.importorskip("transformers")
    return split_models.build(name if num_blocks == 2 else f"{name} of {num_blocks}")


def batch_of(name: str, seed: int = 0, num_samples: int = 2) -> Any:
    """A micro-batch, padded on the left where the model takes masks."""
    tokens = split_models.tokens(seed, num_samples)
    if name in (EXAMPLE, TORCH):
        return tokens[:, :-1], tokens[:, 1:]
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def whole_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of the model in one piece, with its gradients."""
    loss: Tensor = model(**batch).loss if isinstance(batch, dict) else model(*batch)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("name", [*FAMILIES, EXAMPLE])
def test_two_stages_compute_what_the_whole_model_does(name: str) -> None:
    whole, parts = build(name), divided(name, [(0,), (1,)])
    for seed in range(2):  # gradients add up, and the second batch has another shape
        batch = batch_of(name, seed, 2 + seed)
        torch.testing.assert_close(chain(parts, batch), whole_loss(whole, batch), rtol=1e-6, atol=0)
    assert_whole(parts, whole)
    is_tied = len(list(whole.named_parameters(remove_duplicate=False))) > len(list(whole.named_parameters()))
    assert bool(parts[0].tied) == is_tied
    assert "stage 0: " in parts[0].partition_text


@pytest.mark.parametrize("own", [[(0, 2), (1, 3)], [(0, 3), (1, 2)], [(0, 1, 2, 3)]], ids=["loop", "V", "one rank"])
@pytest.mark.parametrize("name", ["llama with biases", "gpt2", "falcon"])
def test_several_stages_on_a_rank_compute_what_the_whole_model_does(name: str, own: list[tuple[int, ...]]) -> None:
    whole, parts = build(name, 4), divided(name, own)
    assert chain(parts, batch_of(name)).item() == pytest.approx(whole_loss(whole, batch_of(name)).item(), rel=1e-6)
    assert_whole(parts, whole)
    (tied,) = parts[0].tied.values()
    assert tied == (0, 3)


def test_a_rank_has_the_memory_of_its_stages_alone() -> None:
    model: Any = build("llama", 4)
    foreign = [weakref.ref(param) for param in model.model.layers[0].parameters()]
    foreign.append(weakref.ref(model.model.embed_tokens.weight))
    part = stage_model(model, (1, 3), 4, MIXED)
    gc.collect()
    assert all(reference() is None for reference in foreign)
    names = {name.partition("layers.")[2][:1] for name, _ in part.named_parameters() if "layers." in name}
    assert names == {"1", "3"}
    assert part.whole_names == {name for name, _ in build("llama", 4).named_parameters()}
    assert sum(param.numel() for param in part.parameters()) == sum(part.stages[stage].num_params for stage in (1, 3))


def test_a_model_is_divided_as_the_config_says() -> None:
    pytest.importorskip("transformers")
    found = {}
    for method in ("parameters", "uniform", "type:DecoderLayer"):
        part = stage_model(build("llama", 4), (0,), 2, Pipeline(partition=method))
        found[method] = [len(stage.layers) for stage in part.stages]
    assert found == {"parameters": [2, 2], "uniform": [2, 2], "type:DecoderLayer": [2, 2]}
    with pytest.raises(ConfigError, match="no layer has a class name") as caught:
        stage_model(build("llama"), (0,), 2, Pipeline(partition="type:conv"))
    assert "LlamaDecoderLayer" in str(caught.value)
    with pytest.raises(ConfigError, match="2 layers cannot be divided into 3 stages"):
        stage_model(build("llama"), (0,), 3, MIXED)
    with pytest.raises(ConfigError, match='"profile" is for a PipelineModule'):
        stage_model(build("llama"), (0,), 2, Pipeline(partition="profile"))
    with pytest.raises(ConfigError, match="activation_checkpoint_interval is for a PipelineModule") as caught:
        stage_model(build("llama"), (0,), 2, Pipeline(activation_checkpoint_interval=1))
    assert "gradient_checkpointing_enable" in str(caught.value)


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_are_recomputed_on_their_stage(reentrant: bool) -> None:
    whole, parts = build("llama"), divided("llama", [(0,), (1,)])
    for part in parts:
        part.train()
        assert part.training
        for module in part.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = True
                module._gradient_checkpointing_func = lambda function, *args: torch.utils.checkpoint.checkpoint(
                    function, *args, use_reentrant=reentrant
                )
    if reentrant:  # no gradient reaches a first block whose inputs need none
        parts[0].get_submodule("model.embed_tokens").register_forward_hook(lambda *_: _[-1].requires_grad_())
    chain(parts, batch_of("llama"))
    whole_loss(whole, batch_of("llama"))
    assert_whole(parts, whole)


def test_stages_in_16_bits_and_in_evaluation() -> None:
    whole = build("qwen3").bfloat16().eval()
    parts = [stage.bfloat16().eval() for stage in divided("qwen3", [(0,), (1,)])]
    with torch.no_grad():
        received = parts[0](0, (), batch_of("qwen3"))
        outputs = parts[1](1, received, batch_of("qwen3"))
        assert received[0].dtype == torch.bfloat16
        assert torch.equal(outputs.logits, whole(**batch_of("qwen3")).logits)
    assert not any(module.training for module in parts[1].modules())


def test_planning_leaves_the_model_as_it_was() -> None:
    model: Any = build("gpt2")
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.config.use_cache = True
    torch.manual_seed(3)
    stage_model(model, (0, 1), 2, MIXED)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.config.use_cache
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_weights_load_by_the_names_of_the_whole_model() -> None:
    whole, parts = build("gpt2"), divided("gpt2", [(0,), (1,)])
    for param in whole.parameters():
        nn.init.normal_(param)
    for part in parts:
        assert part.load_state_dict(whole.state_dict(), strict=False).missing_keys == []
    assert torch.equal(chain(parts, batch_of("gpt2")), whole_loss(whole, batch_of("gpt2")))
    assert_whole(parts, whole)


def test_a_stage_that_fails_leaves_the_model_as_it_was() -> None:
    (part,) = divided("llama", [(0, 1)])
    with pytest.raises((TypeError, RuntimeError)):
        part(0, (), {"input_ids": torch.ones(2, 5)})
    assert {name for name, _ in part.named_parameters()} == part.whole_names
    whole = build("llama")
    assert torch.equal(chain([part], batch_of("llama")), whole_loss(whole, batch_of("llama")))


def test_a_patched_forward_and_a_copy_of_a_stage() -> None:
    model: Any = build("llama")
    for block in model.model.layers:
        block.forward = functools.partial(type(block).forward, block)  # as libraries patch it
    last = copy.deepcopy(stage_model(build("llama"), (1,), 2, MIXED))
    parts, whole = [stage_model(model, (0,), 2, MIXED), last], build("llama")
    assert torch.equal(chain(parts, batch_of("llama")), whole_loss(whole, batch_of("llama")))
    assert_whole(parts, whole)


def test_a_divided_model_stays_divided() -> None:
    model = build("llama")
    part = stage_model(model, (1,), 2, MIXED)
    assert stage_model(part, (1,), 2, MIXED) is part
    with pytest.raises(EngineError, match=r"has stages \[1\] of 2 .* cannot become stages \[0\] of 2"):
        stage_model(part, (0,), 2, MIXED)
    with pytest.raises(EngineError, match="it was divided before"):
        stage_model(model, (1,), 2, MIXED)


# ---- what cannot be divided ----


class ScaledEmbedding(nn.Embedding):
    """An embedding with a method of its own."""

    def scale(self) -> float:
        return 2.0


class Stack(nn.Module):
    """Blocks between an embedding and a head, with one thing that does not fit."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        if what == "a parameter of its own":
            self.scale = nn.Parameter(torch.ones(8))
        if what == "a layer that is not called":
            self.extra = nn.Linear(8, 8)
        if what == "two lists":
            self.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        if what == "a method":
            self.embed = ScaledEmbedding(16, 8)
        if what == "frozen weights":
            self.embed.requires_grad_(False)
        if what == "no list":
            self.blocks = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = embedded = self.embed(tokens)
        for block in reversed(self.blocks) if self.what == "backwards" else self.blocks:
            x = block(x)
            if self.what == "between":
                x = x + 1
            if self.what == "embedding within":
                self.embed(tokens)
        if self.what == "a skip":
            x = x + embedded
        if self.what == "a functional head":
            return nn.functional.linear(x, self.embed.weight)
        if self.what == "frozen weights":
            x = x + self.embed.weight[0]
        if self.what == "the embedding's width":
            x = x * self.embed.weight.shape[1] ** 0.5
        if self.what == "a method":
            x = x * self.embed.scale()  # type: ignore[operator]
        return self.head(x)  # type: ignore[no-any-return]


REASONS = {
    "a parameter of its own": "scale is read by no module's forward",
    "a layer that is not called": "extra.weight is read by no module's forward",
    "two lists": "it has several lists of 2 blocks: blocks, others",
    "no list": "it has no list of blocks",
    "backwards": "its blocks do not run once each, in order: block 1 came as number 1",
    "between": "block 1 does not get the very tensor that block 0 returned",
    "embedding within": "embed runs before and ",
    "a skip": "head runs behind the blocks and reads what the first stage computes",
    "a functional head": "past the blocks",
    "frozen weights": "its forward reads weights of the first stage behind the blocks",
    "a method": "its forward needs modules of the first stage on every stage: AttributeError",
}


@pytest.mark.parametrize("what", REASONS)
def test_a_model_that_cannot_be_divided_is_refused_with_the_reason(what: str) -> None:
    model = Stack(what)
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(EngineError, match="Stack cannot be divided into pipeline stages") as caught:
        stage_model(model, (0,), 2, MIXED)
    assert REASONS[what] in str(caught.value)
    assert "PipelineModule" in str(caught.value)
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_a_later_stage_knows_the_shapes_of_what_the_first_has() -> None:
    whole = Stack("the embedding's width")
    parts = [stage_model(copy.deepcopy(whole), (stage,), 2, MIXED) for stage in range(2)]
    tokens = split_models.tokens(0) % 16
    (received,) = parts[0](0, (), (tokens,))
    torch.testing.assert_close(parts[1](1, (received,), (tokens,)), whole(tokens))


def test_hugging_face_models_that_cannot_be_divided_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 32}
    with pytest.raises(EngineError, match=r"T5ForConditionalGeneration .* an encoder and a decoder"):
        stage_model(transformers.T5ForConditionalGeneration(transformers.T5Config(**small)), (0,), 2, MIXED)
    model: Any = build("opt")
    model.config.layerdrop = 0.1
    with pytest.raises(EngineError, match="set layerdrop to 0"):
        stage_model(model, (0,), 2, MIXED)


def test_micro_batches_that_do_not_fit_are_refused() -> None:
    parts = divided("llama", [(0,), (1,)])
    batch = batch_of("llama")
    with pytest.raises(EngineError, match="use_cache is not possible"):
        parts[0](0, (), {**batch, "use_cache": True})
    with pytest.raises(EngineError, match=r"stage 1 is not one of this rank's, \[0\]"):
        parts[0](1, (), batch)
    received = parts[0](0, (), batch)
    outputs = parts[1](1, received, {"input_ids": batch["input_ids"]})
    with pytest.raises(EngineError, match=r"returned no scalar loss.*\"labels\""):
        parts[1].loss(outputs, batch)
    with pytest.raises(EngineError, match="are this rank's already"):
        parts[0].assign((1,))
