"""Which experts a token goes to, with which weights, and how far the experts are from an even load.

The balance loss is that of Shazeer et al., https://arxiv.org/abs/1701.06538, in the form of GShard (Lepikhin et al.,
https://arxiv.org/abs/2006.16668, section 2.2) and the Switch Transformer (Fedus et al.,
https://arxiv.org/abs/2101.03961, equations 4 to 6). Options have DeepSpeed's names and meaning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

JITTER = 1e-2  # inputs of the router are multiplied by a number in [1 - JITTER, 1 + JITTER]


@dataclass(frozen=True)
class GateOptions:
    """What a router does. Noise and sampling are for training."""

    k: int
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.0
    min_capacity: int = 4
    noisy_gate_policy: str | None = None  # "Jitter": of the router's input; "RSample": of its choice, for k = 1
    drop_tokens: bool = True
    use_rts: bool = True  # of k = 1: which tokens an expert drops is random, else the last
    top2_2nd_expert_sampling: bool = True  # of k = 2: the second expert is drawn by its probability

    def capacity(self, num_tokens: int, num_experts: int, *, is_training: bool) -> int:
        """Return how many tokens of one rank an expert takes: GShard, algorithm 1, for k experts a token."""
        factor = self.capacity_factor if is_training else self.eval_capacity_factor
        return max(math.ceil(num_tokens / num_experts * factor * self.k), self.min_capacity)


@dataclass(frozen=True)
class Routing:
    """Where the tokens of a rank go."""

    experts: Tensor  # int64 [tokens, k]; -1: this choice is dropped
    weights: Tensor  # fp32 [tokens, k], of what is not dropped
    places: Tensor  # int64 [tokens, k], among the tokens of the expert, 0 first
    balance_loss: Tensor  # scalar fp32; 1 for an even load
    counts: Tensor  # int64 [experts]: tokens of this rank, before any is dropped


def jittered(x: Tensor) -> Tensor:
    """Return `x` times uniform noise around 1: Fedus et al., section 2.4 of the Switch Transformer."""
    return x * torch.empty_like(x).uniform_(1 - JITTER, 1 + JITTER)


def route(
    logits: Tensor, options: GateOptions, *, capacity: int | None, used: Tensor | None, is_training: bool
) -> Routing:
    """Choose the k experts of each token.

    logits: fp32 [tokens, experts]. capacity: tokens that an expert takes, None: all. used: [tokens], zero for tokens
    that no expert gets, such as padding.
    """
    gates = logits.softmax(dim=1)
    num_experts, k = gates.shape[1], options.k
    chosen = choose(logits, gates, options, is_training=is_training)
    if used is not None:
        chosen = torch.where(used.reshape(-1, 1) != 0, chosen, -1)
    counts = counts_of(chosen, num_experts)
    first = counts_of(chosen[:, :1], num_experts) if k == 2 else counts  # of two the first alone: GShard, algorithm 1
    load = first.to(gates.dtype) / max(len(gates), 1)
    scale = num_experts if k <= 2 else num_experts / k
    balance_loss = (gates.mean(0) * load).sum() * scale
    values = gates.gather(1, chosen.clamp(min=0))
    places = places_of(chosen, _priority(chosen, values.detach(), options), num_experts)
    is_kept = chosen >= 0
    if capacity is not None:
        is_kept &= places < capacity
    weights = values * is_kept
    if k > 1:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
    return Routing(torch.where(is_kept, chosen, -1), weights, places, balance_loss, counts)


@torch.no_grad()
def choose(logits: Tensor, gates: Tensor, options: GateOptions, *, is_training: bool) -> Tensor:
    """Return the experts of each token, int64 [tokens, k], the most probable first."""
    if options.k == 1 and options.noisy_gate_policy == "RSample" and is_training:
        return (logits + _gumbel(logits)).argmax(1, keepdim=True)
    if options.k == 2 and options.top2_2nd_expert_sampling and is_training:
        first = gates.argmax(1, keepdim=True)
        others = (logits + _gumbel(logits)).scatter(1, first, -math.inf)
        return torch.cat([first, others.argmax(1, keepdim=True)], 1)
    return gates.topk(options.k, dim=1).indices


def _gumbel(logits: Tensor) -> Tensor:
    """Return Gumbel noise: the largest of logits with it is drawn by their softmax."""
    return -torch.empty_like(logits).exponential_().log()


@torch.no_grad()
def _priority(chosen: Tensor, values: Tensor, options: GateOptions) -> Tensor:
    """Return the choices, flattened choice by choice, in the order in which experts take them: int64 [k * tokens]."""
    num = chosen.numel()
    if options.drop_tokens and options.k == 1 and options.use_rts:
        return torch.randperm(num, device=chosen.device)
    if options.drop_tokens and options.k > 2:
        return values.t().reshape(-1).argsort(descending=True, stable=True)
    return torch.arange(num, device=chosen.device)  # all first choices before all second ones


@torch.no_grad()
def places_of(chosen: Tensor, priority: Tensor, num_experts: int) -> Tensor:
    """Return the place of each choice among those of its expert, int64 [tokens, k]."""
    experts = chosen.t().reshape(-1)[priority]
    by_expert = experts.argsort(stable=True)
    experts = experts[by_expert]
    sizes = _sizes(experts, num_experts)
    starts = sizes.cumsum(0) - sizes
    places = torch.empty_like(experts)
    places[priority[by_expert]] = torch.arange(len(experts), device=experts.device) - starts[experts + 1]
    return places.view(chosen.shape[1], -1).t()


def counts_of(chosen: Tensor, num_experts: int) -> Tensor:
    """Return how many choices each expert has, int64 [experts]; on a GPU the host does not wait, as for `bincount`."""
    return _sizes(chosen.reshape(-1), num_experts)[1:]


def _sizes(experts: Tensor, num_experts: int) -> Tensor:
    """Return how often each number from -1 on occurs, int64 [1 + experts]."""
    return experts.new_zeros(num_experts + 1).scatter_add_(0, experts + 1, torch.ones_like(experts))
