"""Mixtures of Hugging Face, spread: the block's own router chooses, tokens travel to the ranks of their experts.

Transformers 5 stacks experts in parameters of a module that gets tokens, their experts and weights; its own forward
runs on each rank, with whatever implementation of experts the model is set to. Transformers 4 has them in a list, and
chooses and runs them in one forward of the block, which is taken apart here by the name of its class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.parallel.expert.compute import run_each
from launcher.parallel.expert.exchange import at_experts, untouched
from launcher.parallel.expert.share import local_experts, share_of
from launcher.zero.compiled import outside_graphs


def _at_ranks(x: Tensor, chosen: Tensor, weights: Tensor, experts: nn.Module, run: Callable[..., Tensor]) -> Tensor:
    share = share_of(experts)
    assert share is not None
    trains = any(param.requires_grad for param in experts.parameters())
    return at_experts(x, chosen, weights, share, run, trains=trains)


# ---- stacked experts: transformers 5 ----


def is_stacked(module: nn.Module) -> bool:
    """Whether a module has experts stacked in its parameters, and gets tokens, their experts and weights."""
    number, params = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if not isinstance(number, int) or number < 2 or len(params) < 2:
        return False
    if any(param.dim() < 2 or param.shape[0] != number for param in params):
        return False
    return len(inspect.signature(type(module).forward).parameters) == 4  # with `self`


@functools.cache
def stacked_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a module of `kind` of whose experts this rank has a part."""

    class SpreadExperts(kind):  # type: ignore[misc,valid-type]
        @outside_graphs
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            """hidden_states: [tokens, width]; index, weights: [tokens, k] -> [tokens, width]."""

            def run(rows: Tensor, expert: Tensor, _: Sequence[int], weights: Tensor) -> Tensor:
                if not len(rows):
                    return untouched(rows, list(self.parameters()))
                found: Tensor = kind.forward(self, rows, expert[:, None], weights[:, None])
                return found

            return _at_ranks(hidden_states, top_k_index, top_k_weights, self, run)

    return _named(SpreadExperts, kind)


# ---- lists of experts: transformers 4 ----


def _of_list(x: Tensor, chosen: Tensor, weights: Tensor, experts: nn.ModuleList) -> Tensor:
    own = local_experts(experts)

    def run(rows: Tensor, _: Tensor, sizes: Sequence[int], row_weights: Tensor) -> Tensor:
        return run_each(own, rows, sizes) * row_weights[:, None]

    return _at_ranks(x, chosen, weights, experts, run)


def _by_softmax(block: Any, x: Tensor, *, normalises: bool) -> tuple[Tensor, Tensor]:
    """Return the sum over the chosen experts and the router's logits. x: [tokens, width]."""
    logits = block.gate(x)
    weights, chosen = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), block.top_k, dim=-1)
    if normalises:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return _of_list(x, chosen, weights.to(x.dtype), block.experts), logits


def _mixtral(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    if block.training and block.jitter_noise > 0:
        x = x * torch.empty_like(x).uniform_(1.0 - block.jitter_noise, 1.0 + block.jitter_noise)
    output, logits = _by_softmax(block, x.reshape(-1, x.shape[-1]), normalises=True)
    return output.view(x.shape), logits


def _plain(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    output, logits = _by_softmax(block, x.reshape(-1, x.shape[-1]), normalises=block.norm_topk_prob)
    return output.view(x.shape), logits


def _with_shared_expert(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    output, logits = _plain(block, x)
    return output + F.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x), logits


# Class of transformers 4 -> its forward with spread experts.
_FORWARDS: dict[str, Callable[[Any, Tensor], tuple[Tensor, Tensor]]] = {
    "MixtralSparseMoeBlock": _mixtral,
    "OlmoeSparseMoeBlock": _plain,
    "Qwen2MoeSparseMoeBlock": _with_shared_expert,
    "Qwen3MoeSparseMoeBlock": _plain,
    "Qwen3NextSparseMoeBlock": _with_shared_expert,
}
# Classes that run the experts in a method of their own: moe(tokens, their experts, their weights).
_WITH_METHOD = ("DeepseekV2Moe", "DeepseekV3MoE", "Dots1MoE", "Glm4MoeMoE", "Glm4vMoeTextMoE")
LISTED = (*_FORWARDS, *_WITH_METHOD)


@functools.cache
def listed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a block of `kind`, one of LISTED, of whose list of experts this rank has a part."""

    class SpreadBlock(kind):  # type: ignore[misc,valid-type]
        if kind.__name__ in _WITH_METHOD:

            @outside_graphs
            def moe(self, hidden_states: Tensor, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
                """hidden_states: [tokens, width]; indices, weights: [tokens, k] -> [tokens, width]."""
                return _of_list(hidden_states, topk_indices, topk_weights, self.experts)

        else:

            @outside_graphs
            def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
                """hidden_states: [batch, length, width] -> the same, and logits [tokens, experts]."""
                return _FORWARDS[kind.__name__](self, hidden_states)

    return _named(SpreadBlock, kind)


def _named(made: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    made.__name__ = made.__qualname__ = f"Spread{kind.__name__}"
    return made
