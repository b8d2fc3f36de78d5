"""Parameters from a config alone: published counts, and the models of `transformers` where it is installed."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from harness.needs import need_module
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from launcher.planner.architectures import ArchitectureConfig, known_types, parameters_of, shape_of

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
T0_3B: dict[str, Any] = {
    "model_type": "t5", "architectures": ["T5Model"], "d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 24,
    "num_decoder_layers": 24, "num_heads": 32, "vocab_size": 32128, "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "intermediate_size": 14336, "num_key_value_heads": 8, "num_local_experts": 8,
    "architectures": ["MixtralForCausalLM"],
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertModel"], "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512,
}  # fmt: skip
OPT = {
    "model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 50272, "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12,
    "vocab_size": 50257, "n_positions": 1024, "n_inner": None,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {  # for the comparison: every option that changes a count
    "llama": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "mistral": {"num_key_value_heads": 2},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32},
    "gemma": {"num_key_value_heads": 1, "head_dim": 16},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "bloom": {},
    "bert": {},
    "roberta": {},
    "t5": {"d_kv": 8, "num_decoder_layers": 2},
    "mt5": {"d_kv": 8, "feed_forward_proj": "gated-gelu"},
    "umt5": {"d_kv": 8, "feed_forward_proj": "gated-gelu"},
}


def read(config: dict[str, Any]) -> ArchitectureConfig:
    return ArchitectureConfig(config, "config.json")


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (LLAMA, 6_738_415_616),  # Llama 2 7B
        (LLAMA | {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8}, 7_241_732_096),
        (LLAMA | MIXTRAL, 46_702_792_704),
        (T0_3B, 2_783_959_040),
        (BERT, 109_482_240),
        (OPT, 125_239_296),
        (GPT2, 124_439_808),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_counts(config: dict[str, Any], count: int) -> None:
    params = parameters_of(read(config))
    assert params is not None
    assert sum(param.numel for param in params) == count
    assert len({param.name for param in params}) == len(params)


def test_every_known_type_is_compared() -> None:
    assert set(SMALL) == set(known_types())


@pytest.mark.parametrize("kind", SMALL)
def test_counts_are_those_of_transformers(kind: str) -> None:
    need_module("transformers")
    import torch
    import transformers

    sizes = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    if kind in ("t5", "mt5", "umt5"):
        sizes = {"vocab_size": 101, "d_model": 64, "num_layers": 3, "num_heads": 4, "d_ff": 96}
    elif kind in ("gpt2", "bloom"):
        sizes = {"vocab_size": 101, "hidden_size": 64, "n_layer": 3, "n_head": 4}
    config = transformers.AutoConfig.for_model(kind, **sizes, **SMALL[kind], pad_token_id=0)
    head = "MaskedLM" if "bert" in kind else "Seq2SeqLM" if "t5" in kind else "CausalLM"
    for auto in (transformers.AutoModel, getattr(transformers, f"AutoModelFor{head}")):
        with torch.device("meta"):
            model = auto.from_config(config)
        data = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
        params = parameters_of(read(data))
        assert params is not None
        assert sum(p.numel for p in params) == sum(p.numel() for p in model.parameters())


def test_the_shape_is_read_under_every_name() -> None:
    shape = shape_of(read(GPT2))
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.ffn) == (12, 768, 12, 3072)
    assert shape.max_length == 1024
    shape = shape_of(read(T0_3B))
    assert (shape.num_layers, shape.is_gated, shape.vocab_size) == (48, True, 0)
    inner = {"model_type": "any", "text_config": LLAMA}
    assert shape_of(read(inner)).hidden_size == 4096
    assert shape_of(read(LLAMA)).is_gated


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_size": None}, "no hidden_size or n_embd"),
        ({"hidden_size": "4096x"}, "hidden_size '4096x' is not a number from 1 to 1,000,000,000"),
        ({"num_attention_heads": 0}, "num_attention_heads '0' is not a number"),
        ({"num_hidden_layers": 10**9}, "is not a number from 1 to 10,000"),
        ({"vocab_size": True}, "vocab_size 'True'"),
    ],
)
def test_a_config_without_its_sizes_is_an_error(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        parameters_of(read(LLAMA | change))
    assert parameters_of(read({"model_type": "unheard"})) is None


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.none(), max_size=2)


@pytest.mark.parametrize("kind", SMALL)
@given(changes=st.dictionaries(st.sampled_from(sorted({*LLAMA, *T0_3B, *GPT2, "text_config"})), values, max_size=4))
def test_any_config_is_a_model_or_one_error(kind: str, changes: dict[str, Any]) -> None:
    config = {**LLAMA, **T0_3B, **GPT2, "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, **changes}
    with contextlib.suppress(UsageError):
        assert parameters_of(read(config | {"model_type": kind}))
        shape_of(read(config))
