"""How a model is split: who says so, in which order, and what is refused before anything is changed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from harness.train import split_models
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from launcher.base.errors import EngineError
from launcher.config.load import load_config
from launcher.config.schema_parallel import TensorParallel
from launcher.parallel.tensor.plan import make_plan
from launcher.parallel.tensor.styles import HF_EXPERTS, HF_STYLES, LayerPlan, Style

NEEDS_TRANSFORMERS = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers")


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = heads, key_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width * key_heads // heads)
        self.v_proj = nn.Linear(width, width * key_heads // heads)
        self.o_proj = nn.Linear(width, width)


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)


class Model(nn.Module):
    """A transformer with the usual names; it is never called."""

    def __init__(self, vocabulary: int = 32, **sizes: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, 16)
        self.layers = nn.ModuleList([nn.ModuleDict({"self_attn": Attention(**sizes), "mlp": Mlp()})])
        self.lm_head = nn.Linear(16, vocabulary)


def plan(model: nn.Module, given: Any = None, ranks: int = 2, **partition: Any) -> dict[str, LayerPlan]:
    return full_plan(model, given, ranks, **partition).layers


def full_plan(model: nn.Module, given: Any = None, ranks: int = 2, **partition: Any) -> Any:
    settings = TensorParallel()
    if partition:
        settings = load_config({"tensor_parallel": {"partition_config": partition}}).config.tensor_parallel
    return make_plan(model, ranks, settings, given)


def styles(found: dict[str, LayerPlan]) -> dict[str, str]:
    return {name: layer.style.value for name, layer in found.items()}


NAMED = {
    "layers.0.self_attn.q_proj": "column",
    "layers.0.self_attn.k_proj": "column",
    "layers.0.self_attn.v_proj": "column",
    "layers.0.self_attn.o_proj": "row",
    "layers.0.mlp.fc1": "column",
    "layers.0.mlp.fc2": "row",
    "embed_tokens": "vocabulary",
    "lm_head": "column_gathered",
}
MLP_ONLY = {"layers.0.mlp.fc1": "column", "layers.0.mlp.fc2": "row"}
SPECS = [
    {"patterns": [".*fc1$"], "partition_type": "column"},
    {"patterns": [".*\\.fc2\\.weight$"], "partition_type": "row"},
]


# ---- sources ----


def test_names_say_how_a_usual_transformer_is_split() -> None:
    assert styles(plan(Model())) == NAMED


def test_a_plan_in_python_counts_alone() -> None:
    model = Model()
    assert styles(plan(model, {"layers.*.fc1": "column", "*.fc2": Style.ROW}, layer_specs=SPECS)) == MLP_ONLY
    words = {"*.fc1": ColwiseParallel(), "*.fc2": "rowwise", "embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    assert styles(plan(model, words)) == {**MLP_ONLY, "embed_tokens": "vocabulary"}


def test_of_several_patterns_the_first_counts() -> None:
    given = {"layers.0.mlp.fc1": "replicated", "*.fc1": "column", "*.q_proj": "column"}
    assert styles(plan(Model(), given)) == {"layers.0.self_attn.q_proj": "column"}


def test_specs_of_the_config_come_before_names_or_alone() -> None:
    skip = {"patterns": ["layers.0.self_attn"], "partition_type": "skip"}
    rest = {name: style for name, style in NAMED.items() if "attn" not in name}
    assert styles(plan(Model(), layer_specs=[skip])) == rest
    assert styles(plan(Model(), layer_specs=SPECS, use_default_specs=False)) == MLP_ONLY
    whole = {**skip, "grad_allreduce": True}
    found = styles(plan(Model(), layer_specs=[whole, *SPECS], use_default_specs=False))
    assert found["layers.0.self_attn.q_proj"] == found["layers.0.self_attn.q_proj.bias"] == "replicated_summed_grad"


def test_what_specs_say_of_fused_and_gathered_layers() -> None:
    model = nn.ModuleDict({"fused": nn.Linear(8, 16), "back": nn.Linear(16, 8), "out_head": nn.Linear(8, 6)})
    specs = [
        {"patterns": ["fused"], "shape": [[8, 4, 4], -1], "partition_dim": 0},
        {"patterns": ["back"], "partition_type": "row", "shape": [-1, 2]},
        {"patterns": ["out_head"], "gather_output": True},
    ]
    assert plan(model, layer_specs=specs) == {
        "fused": LayerPlan(Style.PACKED_COLUMN, (8, 4, 4)),
        "back": LayerPlan(Style.PACKED_ROW, (8, 8)),
        "out_head": LayerPlan(Style.COLUMN_GATHERED, (6,)),
    }
    assert plan(model, layer_specs=[{"patterns": ["fused"], "shape": [2, -1]}])["fused"].blocks == (8, 8)


def test_specs_are_for_some_kinds_of_models_and_heads_have_patterns() -> None:
    model = Model()
    model.config = type("Config", (), {"model_type": "Mine", "num_attention_heads": 4})()  # type: ignore[assignment]
    model.scores = nn.Linear(16, 32)
    other = {"patterns": [".*fc1"], "partition_type": "skip", "model_types": ["other"]}
    own = {"patterns": [".*o_proj"], "partition_type": "skip", "model_types": ["mine"]}
    found = styles(plan(model, layer_specs=[other, own], lm_head_patterns=["scores"]))
    assert found["layers.0.mlp.fc1"] == "column"
    assert "layers.0.self_attn.o_proj" not in found
    assert found["scores"] == "column_gathered"


def with_hf_plan(words: dict[str, str]) -> nn.Module:
    """A model with a plan as transformers 4.57 and 5 keep them."""
    model = Model()
    model._tp_plan = words  # type: ignore[assignment]
    return model


def test_hugging_face_s_plan_comes_before_names() -> None:
    model = with_hf_plan({"layers.*.mlp.fc1": "colwise", "layers.*.mlp.fc2": "rowwise"})
    rest = {"embed_tokens": "vocabulary", "lm_head": "column_gathered"}
    assert styles(plan(model)) == {**MLP_ONLY, **rest}
    inside = nn.ModuleDict({"wrapped": model})
    found = styles(plan(inside))
    assert {name.removeprefix("wrapped."): style for name, style in found.items()} == {**MLP_ONLY, **rest}


def test_a_plan_of_the_vocabulary_alone_is_none() -> None:
    assert styles(plan(with_hf_plan({"embed_tokens": "embedding_rowwise", "lm_head": "colwise_rep"}))) == NAMED


def test_the_config_of_a_base_model_has_a_plan_without_its_prefix() -> None:
    inner = Model()
    outer = nn.ModuleDict({"model": inner})
    outer.base_model_prefix = "model"  # type: ignore[assignment]
    words = {"layers.*.mlp.fc1": "colwise", "layers.*.mlp.fc2": "rowwise"}
    outer.config = type("Config", (), {"base_model_tp_plan": words})()  # type: ignore[assignment]
    assert {f"model.{name}": style for name, style in MLP_ONLY.items()}.items() <= styles(plan(outer)).items()


@pytest.mark.parametrize("word", HF_STYLES)
def test_every_word_of_hugging_face_has_its_style(word: str) -> None:
    expected = {
        "colwise": Style.COLUMN,
        "colwise_gather_output": Style.COLUMN_GATHERED,
        "colwise_rep": Style.COLUMN_GATHERED,
        "embedding_colwise": Style.VOCABULARY,
        "embedding_rowwise": Style.VOCABULARY,
        "local_colwise": Style.COLUMN,
        "local_packed_colwise": Style.PACKED_COLUMN,
        "local_packed_rowwise": Style.PACKED_ROW,
        "local_rowwise": Style.ROW,
        "packed_colwise": Style.PACKED_COLUMN,
        "packed_rowwise": Style.PACKED_ROW,
        "replicate": None,
        "replicated_with_grad_allreduce": Style.REPLICATED_SUMMED_GRAD,
        "rowwise": Style.ROW,
        "rowwise_rep": Style.ROW_SPLIT_INPUT,
        "rowwise_split_input": Style.ROW_SPLIT_INPUT,
        "sequence_parallel": None,
    }[word]
    name = "embed_tokens" if word.startswith("embedding") else "layers.0.mlp.fc1"
    words = {"layers.*.self_attn.q_proj": "colwise", name.replace("0", "*"): word}
    found = plan(with_hf_plan(words)).get(name)
    assert (found and found.style) == expected


@pytest.mark.parametrize("word", sorted(HF_EXPERTS))
def test_experts_stay_whole_with_a_notice(word: str) -> None:
    model = with_hf_plan({"layers.*.self_attn.q_proj": "colwise", "layers.*.mlp": word})
    found = full_plan(model)
    assert "layers.0.mlp" not in found.layers
    assert found.notices == ["layers.*.mlp stays whole on every rank: experts are not split"]


@NEEDS_TRANSFORMERS
def test_words_of_a_real_mixture() -> None:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4
    )
    config.num_key_value_heads = 2
    found = full_plan(transformers.MixtralForCausalLM(config))
    assert found.layers["model.layers.0.self_attn.q_proj"].style is Style.COLUMN
    if not any("experts" in name for name in found.layers):  # transformers 5 has them in one parameter
        assert found.notices == ["model.layers.*.mlp.experts stays whole on every rank: experts are not split"]


@NEEDS_TRANSFORMERS
def test_fused_projections_of_phi3_and_gpt2_are_split_block_by_block() -> None:
    phi = plan(split_models.build("phi3"))
    assert phi["model.layers.0.self_attn.qkv_proj"] == LayerPlan(Style.PACKED_COLUMN, (32, 16, 16))
    assert phi["model.layers.0.self_attn.o_proj"].style is Style.ROW
    assert phi["model.layers.0.mlp.gate_up_proj"] == LayerPlan(Style.PACKED_COLUMN, (48, 48))
    gpt = plan(split_models.build("gpt2"))
    assert gpt["transformer.h.0.attn.c_attn"] == LayerPlan(Style.PACKED_COLUMN, (32, 32, 32))
    assert plan(split_models.build("bloom"))["transformer.h.0.self_attention.query_key_value"].blocks == (96,)


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(("kind", "fused"), [("GPTBigCode", "attn.c_attn"), ("CodeGen", "attn.qkv_proj")])
def test_fused_projections_of_another_layout_stay_whole(kind: str, fused: str) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")(vocab_size=32, n_embd=16, n_layer=1, n_head=4, rotary_dim=4)
    found = full_plan(getattr(transformers, f"{kind}ForCausalLM")(config))
    assert not any("attn" in name for name in found.layers)
    assert any("mlp" in name for name in found.layers)
    name = f"transformer.h.*.{fused}"
    assert found.notices == [f"{name} stays whole on every rank: its layout is not queries, keys, values"]


@NEEDS_TRANSFORMERS
def test_norms_of_single_heads_and_of_all_of_them() -> None:
    found = plan(split_models.build("qwen3"))
    assert found["model.layers.0.self_attn.q_norm"].style is Style.REPLICATED_SUMMED_GRAD
    model = split_models.build("olmo2")
    assert plan(model)["model.layers.0.self_attn.q_proj"].style is Style.COLUMN_GATHERED
    named: Any = Model()
    named.layers[0].self_attn.q_norm = nn.LayerNorm(4)
    assert plan(named)["layers.0.self_attn.q_norm"].style is Style.REPLICATED_SUMMED_GRAD
    named.layers[0].self_attn.q_norm = nn.LayerNorm(16)
    assert plan(named)["layers.0.self_attn.q_proj"].style is Style.COLUMN_GATHERED
    assert plan(named)["layers.0.self_attn.o_proj"].style is Style.ROW_SPLIT_INPUT
    assert "layers.0.self_attn.q_norm" not in plan(named)


# ---- what is left whole ----


def test_a_vocabulary_that_the_ranks_do_not_divide_stays_whole() -> None:
    for is_tied in (False, True):
        model = Model(vocabulary=33)
        if is_tied:
            model.lm_head.weight = model.embed_tokens.weight
        found = full_plan(model)
        assert set(found.layers) == set(NAMED) - {"embed_tokens", "lm_head"}
        assert found.notices == [
            f"{name} stays whole on every rank: 2 ranks do not divide a vocabulary of 33"
            for name in ("embed_tokens", "lm_head")
        ]


# ---- errors ----


def error_of(*args: Any, **named: Any) -> str:
    with pytest.raises(EngineError) as error:
        plan(*args, **named)
    return str(error.value)


def test_heads_that_the_ranks_do_not_divide() -> None:
    text = error_of(Model(heads=4, key_heads=2), ranks=4)
    assert text == (
        "layers.0.self_attn: 4 ranks of one layer do not divide num_key_value_heads 2: each rank computes whole heads;"
        " use a tensor-parallel size that divides all of them (1, 2)"
    )


@NEEDS_TRANSFORMERS
def test_heads_that_only_the_config_knows() -> None:
    assert "do not divide num_key_value_heads 2" in error_of(split_models.build("llama"), ranks=4)


def test_features_that_the_ranks_do_not_divide() -> None:
    model = nn.ModuleDict({"up": nn.Linear(4, 6)})
    assert "4 ranks of one layer do not divide its 6 features (column)" in error_of(model, {"up": "column"}, 4)


def test_a_model_of_which_nothing_is_known() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    text = error_of(model)
    assert "nothing says how to split Sequential over ranks" in text
    assert '"0" is one of its linear layers' in text
    assert "give tensor_parallel.partition_config with layer_specs" in text
    assert '{"0": "column"}' in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers.*.fc3": "column"}, 'plan: no module of the model is called "layers.*.fc3"'),
        ({"*.fc1": "colunm"}, 'plan["*.fc1"]: "colunm" is not a style; one of column, column_gathered, row'),
        ({"*.fc1": SequenceParallel()}, "SequenceParallel of Linear is not supported"),
        (
            {"*.fc1": ColwiseParallel(input_layouts=Shard(1))},
            "ColwiseParallel with input_layouts Shard(1) and output_layouts Shard(-1) of Linear is not supported",
        ),
        ({"embed_tokens": ColwiseParallel()}, "output_layouts Shard(-1) of Embedding is not supported"),
        ({"layers": "column"}, "layers: torch.nn.modules.container.ModuleList cannot be split (column)"),
        ({"embed_tokens": "column"}, "torch.nn.modules.sparse.Embedding cannot be split (column)"),
        ({"*.fc1": LayerPlan(Style.PACKED_COLUMN, (4, 4))}, "blocks [4, 4] are not the 64 features of the layer"),
    ],
)
def test_plans_that_do_not_fit(given: dict[str, Any], message: str) -> None:
    assert message in error_of(Model(), given)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"patterns": ["("]}, '"(" is not a regular expression'),
        ({"patterns": [".*fc1"], "shape": [[3, 4], -1]}, "shape [[3, 4], -1] does not fit layers.0.mlp.fc1"),
        ({"patterns": [".*fc1"], "shape": [2, -1], "partition_dim": 2}, "partition_dim 2 is not a dimension of shape"),
    ],
)
def test_specs_that_do_not_fit(spec: dict[str, Any], message: str) -> None:
    text = error_of(Model(), layer_specs=[spec])
    assert message in text
    assert "tensor_parallel.partition_config.layer_specs[0]" in text


def test_strict_mode_names_the_layers_that_no_spec_does() -> None:
    text = error_of(Model(), layer_specs=SPECS, use_default_specs=False, strict_mode=True)
    assert "strict_mode: no spec names layers.0.self_attn.q_proj, layers.0.self_attn.k_proj" in text
    assert "and 2 more" in text
    model = nn.ModuleDict({"mlp": Mlp()})
    assert len(plan(model, layer_specs=SPECS, strict_mode=True)) == 2


def test_words_of_hugging_face_that_are_not_known() -> None:
    words = {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.k_proj": "mla_kv_a_proj"}
    text = error_of(with_hf_plan(words))
    assert 'layers.0.self_attn.k_proj: the plan that the model brings along has the style "mla_kv_a_proj"' in text


def test_a_parameter_in_hugging_face_s_plan_that_is_no_layer() -> None:
    model: Any = with_hf_plan({"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.scales": "local_rowwise"})
    model.layers[0].self_attn.scales = nn.Parameter(torch.zeros(4))
    assert "layers.0.self_attn.scales: the plan that the model brings along splits a parameter" in error_of(model)


class Adapted(nn.Linear):
    """A linear layer with something more in it."""


def test_layers_of_other_classes_are_refused_by_name() -> None:
    model: Any = Model()
    model.layers[0].mlp.fc1 = Adapted(16, 64)
    text = error_of(model)
    assert "layers.0.mlp.fc1: " in text
    assert "Adapted cannot be split (column): only torch.nn.Linear and Conv1D of transformers can" in text
    assert 'with partition_type "skip"' in text


class Wrapped(nn.Module):
    """An adapter around a layer, which is no linear layer itself: as PEFT makes them."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_layers_with_adapters_beside_split_ones_are_refused_by_name() -> None:
    model: Any = Model()
    attention = model.layers[0].self_attn
    attention.q_proj = Wrapped(attention.q_proj)
    text = error_of(model)
    assert "layers.0.self_attn.q_proj: " in text
    assert "Wrapped cannot be split (column)" in text
    attention.k_proj, attention.v_proj = Wrapped(attention.k_proj), Wrapped(attention.v_proj)
    assert not [name for name in plan(model) if "self_attn" in name], "all of them are whole, and fit together"


class OwnLookup(nn.Embedding):
    """An embedding that reads its weight itself."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.weight[input]


@pytest.mark.parametrize(
    ("embedding", "message"),
    [
        (nn.Embedding(32, 16, max_norm=1.0), "an embedding with max_norm cannot be split along its vocabulary"),
        (nn.Embedding(32, 16, sparse=True), "an embedding with sparse cannot be split"),
        (nn.Embedding(32, 16, scale_grad_by_freq=True), "an embedding with scale_grad_by_freq cannot be split"),
        (OwnLookup(32, 16), "OwnLookup cannot be split (vocabulary): only torch.nn.Embedding can"),
    ],
)
def test_embeddings_that_cannot_be_split(embedding: nn.Embedding, message: str) -> None:
    model = Model()
    model.embed_tokens = embedding
    text = error_of(model, {"embed_tokens": "vocabulary"})
    assert text.startswith("embed_tokens: ")
    assert message in text


def test_tied_layers_are_split_alike() -> None:
    model = Model()
    model.lm_head.weight = model.embed_tokens.weight
    assert styles(plan(model, {"lm_head": "colwise_rep"})) == {
        "lm_head": "column_gathered",
        "embed_tokens": "vocabulary",
    }
    text = error_of(model, {"lm_head": "row_split_input", "embed_tokens": "vocabulary"})
    assert "embed_tokens (vocabulary) and lm_head (row_split_input) share one weight and are not split alike" in text
    model = Model()
    model.layers[0]["mlp"].fc1.weight = nn.Parameter(model.lm_head.weight.detach().repeat(2, 1))
    model.extra = nn.Linear(16, 64)
    model.extra.weight = model.layers[0]["mlp"].fc1.weight
    assert "extra shares its weight with layers.0.mlp.fc1, which is split" in error_of(model)
