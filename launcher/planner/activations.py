"""Bytes of activations of a stack of transformer blocks: what forward keeps for backward, or needs where none follows.

After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1: their
34·s·b·h + 5·a·s²·b bytes of a 16-bit GPT block with dropout are these elements for `is_eager`, `has_dropout`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.planner.model import TransformerShape

_FP32 = 4
_MASK = 1  # bytes of an element of a dropout mask


@dataclass(frozen=True)
class Workload:
    """One micro-batch of one rank, and how the model computes it."""

    batch_size: int  # sequences
    length: int  # tokens of a sequence
    is_checkpointed: bool = False  # only the input of each block is kept, its inside is computed again
    is_eager: bool = False  # attention keeps its scores; torch's fused attention does not
    has_dropout: bool = False
    num_sequence_ranks: int = 1  # that have a part of every sequence each
    is_inference: bool = False  # no backward follows: blocks keep nothing but keys and values

    @property
    def num_tokens(self) -> int:
        """Tokens of one rank. Attention has all tokens and a part of the heads: the product is the same."""
        return -(-self.batch_size * self.length // self.num_sequence_ranks)


@dataclass(frozen=True)
class Share:
    """What a rank computes of a model. The default: all of it, one micro-batch after the other."""

    layers: float = 1.0  # part of the blocks, of the largest of its pipeline stages
    num_kept: int = 1  # forwards of a stage that wait for their backward at once
    num_heads: int = 1  # forwards of the output layer that do; 0: another rank has it


def layer_bytes(shape: TransformerShape, work: Workload, element_bytes: int, num_ranks: int = 1) -> int:
    """Return the bytes that one block keeps for its backward. num_ranks: tensor-parallel ranks that share it.

    These have what is inside of attention and of the feed-forward part in parts (section 4.2.1), and the rest each.
    """
    # Inputs of two norms, of the projections to query, key and value, and of the feed-forward part.
    elements = 4 * shape.hidden_size
    inside = 2 * shape.query_size + 2 * shape.key_size  # query, key, value, input of the output projection
    # Around the activation function: its input and output; with a gate both factors and their product too.
    inside += (4 if shape.is_gated else 2) * shape.ffn
    per_token = (elements + inside // num_ranks) * element_bytes
    num_heads = -(-shape.num_heads // num_ranks)
    if work.has_dropout:
        per_token += 2 * shape.hidden_size * _MASK  # behind attention and behind the feed-forward part
    if work.is_eager:
        scores = element_bytes + (element_bytes + _MASK if work.has_dropout else 0)
        per_token += num_heads * work.length * scores
    else:
        per_token += num_heads * _FP32  # fused attention keeps the log of each row's sum
    return work.num_tokens * per_token


def activation_bytes(
    shape: TransformerShape, work: Workload, element_bytes: int, num_ranks: int = 1, share: Share | None = None
) -> int:
    """Return the bytes alive at the peak, which is at the end of forward or in the first block's recomputation.

    share: of a pipeline rank; None: the whole model.
    """
    share = share or Share()
    if work.is_inference:
        return _inference_bytes(shape, work, element_bytes, num_ranks, share)
    block = layer_bytes(shape, work, element_bytes, num_ranks)
    block_input = work.num_tokens * shape.hidden_size * element_bytes
    num_blocks = share.num_kept * math.ceil(share.layers * shape.num_layers)
    kept = num_blocks * (block_input if work.is_checkpointed else block)
    # The logits, their log-softmax in fp32 and the gradient of it.
    logits = work.num_tokens * shape.vocab_size * (element_bytes + 2 * _FP32)
    head = share.num_heads * (2 * block_input + logits)  # with the input and output of the last norm
    return kept + (max(head, block) if work.is_checkpointed else head)


def _inference_bytes(shape: TransformerShape, work: Workload, element_bytes: int, num_ranks: int, share: Share) -> int:
    """Return the bytes alive at the peak of a forward without gradients, with the keys and values of all its tokens."""
    cache = math.ceil(share.layers * shape.num_layers) * 2 * shape.key_size // num_ranks
    # Of one block: query, key, value and what attention returns, and what is around the activation function.
    block = 2 * (shape.query_size + shape.key_size) // num_ranks
    block += (3 if shape.is_gated else 2) * shape.ffn // num_ranks
    if work.is_eager:
        block += 2 * -(-shape.num_heads // num_ranks) * work.length  # scores and their softmax
    head = shape.vocab_size if share.num_heads else 0
    # With the input of the block, or of the output layer, and its norm.
    return work.num_tokens * (cache + 2 * shape.hidden_size + max(block, head)) * element_bytes
