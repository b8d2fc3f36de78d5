"""What layers of transformers are called, and what their names say of them."""

from __future__ import annotations

from torch import nn

# Names end a fully qualified one: "attention.dense" is the layer `dense` of a module `attention`.
SEPARATE_ATTENTION = frozenset(
    {"q_proj", "k_proj", "v_proj", "query", "key", "value", "q_lin", "k_lin", "v_lin", "wq", "wk", "wv", "q_attn"}
)
# Query, key and value in one weight, one after another.
FUSED_ATTENTION = frozenset({"c_attn", "qkv", "qkv_proj", "Wqkv"})
# Attentions whose fused layer has such a name and another layout: a part of it would be parts of wrong heads.
OTHER_LAYOUTS = frozenset({"CodeGenAttention", "GPTBigCodeAttention"})
# Query, key and value in one weight, head by head: a contiguous part is whole heads.
HEAD_BY_HEAD_ATTENTION = frozenset({"query_key_value"})
ATTENTION = SEPARATE_ATTENTION | FUSED_ATTENTION | HEAD_BY_HEAD_ATTENTION
# Two layers in one weight, one after another.
FUSED_MLP = frozenset({"gate_up_proj"})
FUSED = FUSED_ATTENTION | FUSED_MLP

COLUMN = (
    SEPARATE_ATTENTION
    | HEAD_BY_HEAD_ATTENTION
    | {
        "c_fc",
        "dense_h_to_4h",
        "fc1",
        "fc_in",
        "gate_proj",
        "intermediate.dense",
        "lin1",
        "linear1",
        "mlp_in",
        "up_proj",
        "w1",
        "w3",
        "wi",
        "wi_0",
        "wi_1",
    }
)
# Layers that end an attention, those that end the rest of a block, and names of both.
ATTENTION_ROW = frozenset(
    {
        "attention.dense",
        "attention.output.dense",
        "attention_out",
        "o_proj",
        "out_lin",
        "out_proj",
        "self_attention.dense",
        "self_attn.dense",
    }
)
MLP_ROW = frozenset({"dense_4h_to_h", "down_proj", "fc2", "fc_out", "lin2", "linear2", "mlp_out", "output.dense", "w2"})
ROW = ATTENTION_ROW | MLP_ROW | {"c_proj", "wo"}
EMBEDDING = frozenset(
    {
        "embed_in",
        "embed_tokens",
        "shared",
        "tok_embeddings",
        "token_embedding",
        "token_embeddings",
        "word_embeddings",
        "wte",
    }
)
HEAD = frozenset({"embed_out", "head", "lm_head", "output_projection"})
# Norms of query and key: of one head each, or of all of them together.
NORM_OF_HEADS = frozenset({"q_norm", "k_norm", "query_layernorm", "key_layernorm", "q_layernorm", "k_layernorm"})


def is_named(name: str, endings: frozenset[str]) -> bool:
    """Whether a fully qualified name ends in one of these."""
    parts = name.rsplit(".", 3)
    return any(".".join(parts[-length:]) in endings for length in (1, 2, 3))


def last(name: str) -> str:
    """Return the name of a module within its parent."""
    return name.rpartition(".")[2]


def parent_of(name: str) -> str:
    """Return the name of the parent; "" for the model."""
    return name.rpartition(".")[0]


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is Hugging Face's Conv1D: a linear layer whose weight is [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Whether a module is some linear layer, of any class."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def num_features(module: nn.Module) -> tuple[int, int]:
    """Return how many inputs and outputs a linear layer has."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (int(rows), int(columns)) if is_conv1d(module) else (int(columns), int(rows))
