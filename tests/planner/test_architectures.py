"""What a Hugging Face config says: published counts of its class, and the shape of its blocks."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from harness.needs import need_module
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from launcher.planner.architectures import ArchitectureConfig, shape_of

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
T0_3B: dict[str, Any] = {
    "model_type": "t5", "architectures": ["T5Model"], "d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 24,
    "num_decoder_layers": 24, "num_heads": 32, "vocab_size": 32128, "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8,
    "architectures": ["MistralForCausalLM"],
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


def read(config: dict[str, Any]) -> ArchitectureConfig:
    return ArchitectureConfig(config, "config.json")


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (LLAMA, 6_738_415_616),  # Llama 2 7B
        (LLAMA | MISTRAL, 7_241_732_096),
        (LLAMA | MIXTRAL, 46_702_792_704),
        (T0_3B, 2_783_959_040),
        (BERT, 109_482_240),
        (OPT, 125_239_296),
        (GPT2, 124_439_808),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_counts(tmp_path: Path, config: dict[str, Any], count: int) -> None:
    """The class itself is asked, on the meta device."""
    need_module("transformers")
    from launcher.probes.model import facts_of

    (tmp_path / "config.json").write_text(json.dumps(config))
    params = facts_of("transformers", str(tmp_path))["params"]
    assert sum(numel for _, numel, _ in params) == count
    assert len({name for name, _, _ in params}) == len(params)


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
        shape_of(read(LLAMA | change))


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.none(), max_size=2)


@pytest.mark.parametrize("kind", ["llama", "t5", "bert", "unheard"])
@given(changes=st.dictionaries(st.sampled_from(sorted({*LLAMA, *T0_3B, *GPT2, "text_config"})), values, max_size=4))
def test_any_config_is_a_shape_or_one_error(kind: str, changes: dict[str, Any]) -> None:
    config = {**LLAMA, **T0_3B, **GPT2, "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, **changes}
    with contextlib.suppress(UsageError):
        assert shape_of(read(config | {"model_type": kind})).num_layers > 0
