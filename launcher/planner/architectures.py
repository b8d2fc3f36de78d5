"""Parameters of well-known architectures from a Hugging Face config, without building anything.

Each family is the list of its layers; the counts equal those of `transformers`' own models (tests compare them where it
is installed). Shapes are read for every architecture that uses the common names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launcher.base.errors import UsageError
from launcher.planner.model import Parameter, TransformerShape

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
_Layers = Iterator[Parameter]


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

    def flag(self, name: str, default: bool) -> bool:
        value = self.data.get(name)
        return default if value is None else bool(value)

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


def known_types() -> list[str]:
    """Return the model types whose parameters are known here."""
    return sorted(_FAMILIES)


def parameters_of(config: ArchitectureConfig) -> tuple[Parameter, ...] | None:
    """Return every parameter of the model, tied ones once; None when the architecture is not known here."""
    family = _FAMILIES.get(config.model_type)
    return None if family is None else tuple(family(config))


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> _Layers:
    yield Parameter(f"{name}.weight", inputs * outputs)
    if bias:
        yield Parameter(f"{name}.bias", outputs)


def _norm(name: str, size: int) -> _Layers:
    yield Parameter(f"{name}.weight", size)
    yield Parameter(f"{name}.bias", size)


def _llama(config: ArchitectureConfig) -> _Layers:
    """Llama and its descendants: RMSNorm, gated feed-forward, grouped queries."""
    kind, shape = config.model_type, shape_of(config)
    hidden, ffn, query, key = shape.hidden_size, shape.ffn, shape.query_size, shape.key_size
    qkv_bias = config.flag("attention_bias", kind == "qwen2")
    out_bias = config.flag("attention_bias", False) and kind != "qwen2"
    mlp_bias = config.flag("mlp_bias", False)
    experts = config.number("num_local_experts", 8) if kind == "mixtral" else 0
    yield Parameter("embed_tokens.weight", config.number("vocab") * hidden)
    for index in range(shape.num_layers):
        block = f"layers.{index}"
        for name, size in (("q", query), ("k", key), ("v", key)):
            yield from _linear(f"{block}.self_attn.{name}_proj", hidden, size, qkv_bias)
        yield from _linear(f"{block}.self_attn.o_proj", query, hidden, out_bias)
        if kind == "qwen3":
            head = query // shape.num_heads
            yield from (Parameter(f"{block}.self_attn.{name}_norm.weight", head) for name in "qk")
        if experts:
            yield Parameter(f"{block}.mlp.gate.weight", hidden * experts)
            yield Parameter(f"{block}.mlp.experts.gate_up_proj", 2 * experts * hidden * ffn)
            yield Parameter(f"{block}.mlp.experts.down_proj", experts * hidden * ffn)
        else:
            yield from _linear(f"{block}.mlp.gate_proj", hidden, ffn, mlp_bias)
            yield from _linear(f"{block}.mlp.up_proj", hidden, ffn, mlp_bias)
            yield from _linear(f"{block}.mlp.down_proj", ffn, hidden, mlp_bias)
        yield from (Parameter(f"{block}.norm_{place}.weight", hidden) for place in ("in", "post"))
    yield Parameter("norm.weight", hidden)
    if config.has_head and not config.flag("tie_word_embeddings", kind == "gemma"):
        yield Parameter("lm_head.weight", config.number("vocab") * hidden)


def _gpt2(config: ArchitectureConfig) -> _Layers:
    shape = shape_of(config)
    hidden = shape.hidden_size
    yield Parameter("wte.weight", config.number("vocab") * hidden)
    yield Parameter("wpe.weight", config.number("length") * hidden)
    yield from _plain_blocks("h", shape, fused=True)
    yield from _norm("ln_f", hidden)
    if config.has_head and not config.flag("tie_word_embeddings", True):
        yield Parameter("lm_head.weight", config.number("vocab") * hidden)


def _gpt_neox(config: ArchitectureConfig) -> _Layers:
    shape = shape_of(config)
    hidden = shape.hidden_size
    yield Parameter("embed_in.weight", config.number("vocab") * hidden)
    yield from _plain_blocks("layers", shape, fused=True)
    yield from _norm("final_layer_norm", hidden)
    if config.has_head and not config.flag("tie_word_embeddings", False):
        yield Parameter("embed_out.weight", config.number("vocab") * hidden)


def _opt(config: ArchitectureConfig) -> _Layers:
    shape = shape_of(config)
    hidden, word = shape.hidden_size, config.number("word_embed_proj_dim", shape.hidden_size)
    yield Parameter("embed_tokens.weight", config.number("vocab") * word)
    yield Parameter("embed_positions.weight", (config.number("length") + 2) * hidden)  # OPT keeps two places free
    if word != hidden:
        yield Parameter("project_in.weight", word * hidden)
        yield Parameter("project_out.weight", word * hidden)
    yield from _plain_blocks("layers", shape, fused=False)
    if config.flag("do_layer_norm_before", True):
        yield from _norm("final_layer_norm", hidden)
    if config.has_head and not config.flag("tie_word_embeddings", True):
        yield Parameter("lm_head.weight", config.number("vocab") * word)


def _bloom(config: ArchitectureConfig) -> _Layers:
    shape = shape_of(config)
    hidden = shape.hidden_size
    yield Parameter("word_embeddings.weight", config.number("vocab") * hidden)
    yield from _norm("word_embeddings_layernorm", hidden)
    yield from _plain_blocks("h", shape, fused=True)
    yield from _norm("ln_f", hidden)


def _bert(config: ArchitectureConfig) -> _Layers:
    shape = shape_of(config)
    hidden, vocab = shape.hidden_size, config.number("vocab")
    yield Parameter("embeddings.word.weight", vocab * hidden)
    yield Parameter("embeddings.position.weight", config.number("length") * hidden)
    yield Parameter("embeddings.type.weight", config.number("type_vocab_size", 2) * hidden)
    yield from _norm("embeddings.norm", hidden)
    yield from _plain_blocks("layer", shape, fused=False)
    if config.has_head:  # the output layer shares the embedding's weight
        yield from _linear("head.dense", hidden, hidden, True)
        yield from _norm("head.norm", hidden)
        yield Parameter("head.bias", vocab)
    else:
        yield from _linear("pooler.dense", hidden, hidden, True)


def _plain_blocks(name: str, shape: TransformerShape, *, fused: bool) -> _Layers:
    """Yield blocks of two norms, attention and a feed-forward part, all with biases."""
    hidden = shape.hidden_size
    for index in range(shape.num_layers):
        block = f"{name}.{index}"
        if fused:
            yield from _linear(f"{block}.attention.qkv", hidden, 3 * hidden, True)
        else:
            for part in "qkv":
                yield from _linear(f"{block}.attention.{part}", hidden, hidden, True)
        yield from _linear(f"{block}.attention.out", hidden, hidden, True)
        yield from _linear(f"{block}.mlp.in", hidden, shape.ffn, True)
        yield from _linear(f"{block}.mlp.out", shape.ffn, hidden, True)
        yield from _norm(f"{block}.norm_1", hidden)
        yield from _norm(f"{block}.norm_2", hidden)


def _t5(config: ArchitectureConfig) -> _Layers:
    hidden, ffn, heads = config.number("hidden"), config.number("ffn"), config.number("heads")
    inner = heads * config.number("head", max(1, hidden // heads))
    is_gated = "gated" in str(config.data.get("feed_forward_proj"))
    num_layers = config.number("layers")
    vocab = config.number("vocab")
    yield Parameter("shared.weight", vocab * hidden)
    for stack, count in (("encoder", num_layers), ("decoder", config.number("num_decoder_layers", num_layers))):
        for index in range(count):
            block = f"{stack}.block.{index}"
            for kind in ("self",) if stack == "encoder" else ("self", "cross"):
                yield from (Parameter(f"{block}.{kind}.{part}.weight", hidden * inner) for part in "qkvo")
                yield Parameter(f"{block}.{kind}.norm.weight", hidden)
            if index == 0 or config.model_type == "umt5":
                buckets = config.number("relative_attention_num_buckets", 32)
                yield Parameter(f"{block}.self.relative_attention_bias.weight", buckets * heads)
            yield from (Parameter(f"{block}.mlp.in_{i}.weight", hidden * ffn) for i in range(2 if is_gated else 1))
            yield Parameter(f"{block}.mlp.out.weight", ffn * hidden)
            yield Parameter(f"{block}.mlp.norm.weight", hidden)
        yield Parameter(f"{stack}.final_norm.weight", hidden)
    if config.has_head and not config.flag("tie_word_embeddings", True):
        yield Parameter("lm_head.weight", vocab * hidden)


_FAMILIES: dict[str, Callable[[ArchitectureConfig], _Layers]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma"), _llama),
    **dict.fromkeys(("bert", "roberta"), _bert),
    **dict.fromkeys(("t5", "mt5", "umt5"), _t5),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "bloom": _bloom,
}
