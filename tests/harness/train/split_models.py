"""Tiny transformers that are split over ranks, and the plain loop that they are compared with."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH, SAMPLES, LR = 96, 32, 10, 2, 0.1
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_DECODER = {**_COMMON, "intermediate_size": 48, "num_key_value_heads": 2}
_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Family -> its classes of config and model, and its config.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER),
    "llama with biases": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**_DECODER, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_DECODER, "head_dim": 8}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _DECODER),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _DECODER),
    "phi": ("PhiConfig", "PhiForCausalLM", {**_DECODER, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_DECODER, "head_dim": 16}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": None},
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**_COMMON, "ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": WIDTH, "max_position_embeddings": 64},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {**_COMMON, "intermediate_size": 48, **_BERT_DROPOUT}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {**_COMMON, "n_head": 4, "n_layer": 2}),
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**_COMMON, "intermediate_size": 48, "rotary_pct": 0.5},  # of 8: more than the one frequency that is 1
    ),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {**_COMMON, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    ),
    "falcon with alibi": (
        "FalconConfig",
        "FalconForCausalLM",
        {**_COMMON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    ),
    "mpt": (
        "MptConfig",
        "MptForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
        | {"expansion_ratio": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_DECODER, "head_dim": 16, "sliding_window": 4}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_DECODER, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
}
EXAMPLE, TORCH = "examples/train_gpt.py", "torch.nn.TransformerEncoder"


def build(name: str) -> nn.Module:
    """Return the model of that name, with the same weights on every call, in fp32.

    name: of a family, and how many blocks it has where these are not 2: "gpt2 of 4".
    """
    torch.manual_seed(11)
    family, _, num_blocks = name.partition(" of ")
    if family == EXAMPLE:
        module = _example()
        return module.GPT(module.GPTConfig(int(num_blocks or 2), WIDTH, 4, 32))  # type: ignore[no-any-return]
    if name == TORCH:
        return _Encoder()
    transformers = importlib.import_module("transformers")
    config_class, model_class, values = FAMILIES[family]
    if num_blocks:
        key = next(key for key in ("n_layer", "n_layers", "num_hidden_layers") if key in values)
        values = {**values, key: int(num_blocks)}
    config = getattr(transformers, config_class)(**values)
    model: nn.Module = getattr(transformers, model_class)(config)
    for param in model.parameters():  # those that begin at zero, biases above all, would hide what is wrong with them
        if not param.any():
            nn.init.normal_(param, std=0.1)
    return model


def has(name: str) -> bool:
    """Whether what the model needs is installed."""
    return name in (EXAMPLE, TORCH) or importlib.util.find_spec("transformers") is not None


def _example() -> Any:
    path = Path(__file__).parents[3] / "examples" / "train_gpt.py"
    if "train_gpt" not in sys.modules:
        spec = importlib.util.spec_from_file_location("train_gpt", path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["train_gpt"])
    return sys.modules["train_gpt"]


class _Encoder(nn.Module):
    """torch's own transformer, between an embedding and a head with a weight in common."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.lm_head(self.encoder(self.embed_tokens(tokens)))
        if targets is None:
            return logits  # type: ignore[no-any-return]
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(seed: int, num_samples: int = SAMPLES) -> Tensor:
    """Return int64 [samples, LENGTH] without padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (num_samples, LENGTH), generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the loss of predicting the batch."""
    if hasattr(model, "config") and hasattr(model.config, "model_type"):
        return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]
    return model(batch[:, :-1], batch[:, 1:])  # type: ignore[no-any-return]


def train(model: nn.Module, num_steps: int = 3) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """Make steps of SGD; yield the loss and the gradients of each, by parameter, before its update."""
    for step in range(num_steps):
        loss = loss_of(model, tokens(step))
        loss.backward()
        yield loss.item(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.sub_(param.grad, alpha=LR)
                param.grad = None
