"""The shape of a model's blocks from a Hugging Face config, for every architecture that uses the common names.

Parameters are those of the model class itself, which `launcher.probes.model` builds on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.base.errors import UsageError
from launcher.planner.model import TransformerShape

_GATED_TYPES = {
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo", "olmo2",
    "stablelm", "cohere", "granite", "deepseek_v2", "deepseek_v3", "qwen2_moe", "qwen3_moe",
}  # fmt: skip
_SPELLINGS = {  # one meaning -> the names that configs use for it
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"),
    "kv_heads": ("num_key_value_heads",),
    "head": ("head_dim", "d_kv"),
    "vocab": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active_experts": ("num_experts_per_tok", "moe_k"),
    "length": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len"),
}
_MAX_SIZE, _MAX_LAYERS = 10**9, 10**4


class ArchitectureConfig:
    """A Hugging Face config read by meaning instead of by one model's key names."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        """where: the file's name, for errors."""
        inner = data.get("text_config")
        self.data = {**data, **inner} if isinstance(inner, Mapping) else dict(data)
        self._where = where

    @property
    def model_type(self) -> str:
        return str(self.data.get("model_type", ""))

    def number(self, meaning: str, default: int | None = None) -> int:
        """Return a size. Raises: UsageError when it is not there and has no default, or is not a positive number."""
        for name in _SPELLINGS.get(meaning, (meaning,)):
            value = self.data.get(name)
            if value is None:
                continue
            most = _MAX_LAYERS if "layer" in name else _MAX_SIZE
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
                message = f"{name} {str(value)[:50]!r} is not a number from 1 to {most:,}"
                raise UsageError(message, where=self._where, hint="copy the model's own config.json again")
            return value
        if default is None:
            names = " or ".join(_SPELLINGS.get(meaning, (meaning,)))
            raise UsageError(f"no {names}", where=self._where, hint="a model's config.json has it")
        return default

    @property
    def has_head(self) -> bool:
        """Whether the model class has an output layer over the vocabulary."""
        names = self.data.get("architectures")
        if not isinstance(names, list) or not names:
            return self.model_type not in ("bert", "roberta")
        return any(part in str(names[0]) for part in ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration"))


def shape_of(config: ArchitectureConfig) -> TransformerShape:
    """Return the shape of the blocks. Raises: UsageError when the config does not tell it."""
    hidden, layers, heads = (config.number(name) for name in ("hidden", "layers", "heads"))
    if config.model_type in ("t5", "mt5", "umt5"):
        layers += config.number("num_decoder_layers", layers)
    is_gated = config.model_type in _GATED_TYPES or "gated" in str(config.data.get("feed_forward_proj"))
    return TransformerShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        vocab_size=config.number("vocab", 1) if config.has_head else 0,
        ffn_size=config.number("ffn", 4 * hidden),
        num_kv_heads=config.number("kv_heads", heads),
        head_size=config.number("head", max(1, hidden // heads)),
        is_gated=is_gated,
        num_experts=config.number("experts", 0),
        num_active_experts=config.number("active_experts", 0),
        max_length=config.number("length", 0) or None,
    )
