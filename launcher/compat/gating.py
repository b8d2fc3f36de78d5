"""Gates and experts by the names of `deepspeed.moe.sharded_moe`, `deepspeed.moe.experts` and `deepspeed.moe.mappings`.

Experts are chosen as in the layer `launcher.moe.MoE`. The results have DeepSpeed's forms, which grow with tokens times
experts times places; for layers of a script's own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from launcher.base.errors import EngineError
from launcher.comm.mesh import current_mesh
from launcher.parallel.expert.exchange import output_of
from launcher.parallel.expert.gating import GateOptions, choose, counts_of, jittered, places_of
from launcher.parallel.tensor.functions import gather_last_dim, split_last_dim

# The balance loss, weights [tokens, experts, places], where they are not zero, and how many chose each expert. With
# `sparse_routes` the loss, places, experts, then of each choice, [k, tokens]: its expert, -1 where it is dropped, its
# place and its weight; and how many chose each expert.
Gated = tuple[Any, ...]


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: ProcessGroup | None = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> Gated:
    """Return which expert each token goes to: see `Gated`. logits: [tokens, experts].

    capacity_factor, min_capacity: an expert takes max(ceil(tokens / experts * factor), min_capacity) tokens; without
    `drop_tokens` as many as the most popular one has, on all ranks of `ep_group`, which must call it together then.
    used_token: [tokens], zero for those that no expert gets. use_rts: which tokens are dropped is random.
    Raises: EngineError for `use_tutel`.
    """
    if use_tutel:
        raise EngineError("top1gating: Tutel's kernels are not supported", hint="leave use_tutel out")
    options = GateOptions(1, capacity_factor, 0.0, min_capacity, noisy_gate_policy, drop_tokens, use_rts)
    choice = _Choice(logits, options)
    if used_token is not None:
        choice.chosen = torch.where(used_token.reshape(-1, 1) != 0, choice.chosen, -1)
    num = choice.chosen.numel()
    order = torch.randperm(num, device=logits.device) if use_rts else torch.arange(num, device=logits.device)
    return choice.gated(ep_group, order, is_sparse=sparse_routes)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Gated:
    """Return the two experts of each token: see `top1gating`. top2_2nd_expert_sampling: the second one is drawn."""
    options = GateOptions(
        2,
        capacity_factor,
        min_capacity=min_capacity,
        drop_tokens=drop_tokens,
        top2_2nd_expert_sampling=top2_2nd_expert_sampling,
    )
    choice = _Choice(logits, options)
    order = torch.arange(choice.chosen.numel(), device=logits.device)  # all first choices before all second ones
    return choice.gated(ep_group, order, is_sparse=sparse_routes, fills=order)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> Gated:
    """Return the k experts of each token: see `top1gating`.

    drop_policy: an expert keeps the tokens with the largest weights, "probs", or the first ones, "position".
    Raises: ValueError for another policy.
    """
    if drop_policy not in ("probs", "position"):
        raise ValueError(f'topkgating: unknown drop_policy "{drop_policy}"; use "probs" or "position"')
    options = GateOptions(
        k, capacity_factor, min_capacity=min_capacity, drop_tokens=drop_tokens, top2_2nd_expert_sampling=False
    )
    choice = _Choice(logits, options)
    order = choice.by_token
    if drop_policy == "probs":
        order = choice.values.detach().t().reshape(-1).argsort(descending=True, stable=True)
    return choice.gated(ep_group, order, is_sparse=sparse_routes, counts_all=True)


class _Choice:
    """The experts of each token, before any is full."""

    def __init__(self, logits: Tensor, options: GateOptions) -> None:
        self.options = options
        self.gates = logits.softmax(dim=1)
        self.chosen = choose(logits, self.gates, options, is_training=True)  # int64 [tokens, k], -1: none

    @property
    def values(self) -> Tensor:
        """The probabilities of the choices, [tokens, k]."""
        return self.gates.gather(1, self.chosen.clamp(min=0))

    @property
    def by_token(self) -> Tensor:
        """The choices, counted choice by choice, in the order of their tokens."""
        num_tokens, k = self.chosen.shape
        return torch.arange(num_tokens * k, device=self.chosen.device).view(k, num_tokens).t().reshape(-1)

    def gated(
        self,
        group: ProcessGroup | None,
        order: Tensor,
        *,
        is_sparse: bool,
        fills: Tensor | None = None,
        counts_all: bool = False,
    ) -> Gated:
        """Return the result. order: of the choices, counted choice by choice, until an expert is full. fills: the order
        in which those that it takes get their places, None: by token. counts_all: the loss counts all k choices.
        """
        num_tokens, num_experts = self.gates.shape
        counts = counts_of(self.chosen, num_experts)
        chosen = self.chosen
        if self.options.drop_tokens:
            capacity = counts.new_tensor(self.options.capacity(num_tokens, num_experts, is_training=True))
            chosen = torch.where(places_of(chosen, order, num_experts) < capacity, chosen, -1)
        else:
            capacity = counts.max()
            if group is not None and dist.get_world_size(group=group) > 1:
                dist.all_reduce(capacity, op=dist.ReduceOp.MAX, group=group)
        is_kept = chosen >= 0
        places = places_of(chosen, self.by_token if fills is None else fills, num_experts) * is_kept
        weights = self.values * is_kept
        if self.options.k > 1:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
        load = (counts if counts_all else counts_of(self.chosen[:, :1], num_experts)).to(self.gates.dtype)
        scale = num_experts / self.options.k if counts_all else num_experts
        loss = (self.gates.mean(0) * load / max(num_tokens, 1)).sum() * scale
        if is_sparse:
            routes = (each.t().contiguous() for each in (chosen.int(), places.int(), weights))
            return loss, capacity, num_experts, *routes, counts
        dense = weights.new_zeros(num_tokens, num_experts * int(capacity))
        slots = chosen.clamp(min=0) * int(capacity) + places
        dense = dense.scatter_add(1, slots, weights).view(num_tokens, num_experts, -1)
        return loss, dense, dense.bool(), counts


def _route_slots(indices: Tensor, locations: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return where each choice of `sparse_routes` is among experts times places; what is dropped: one behind them."""
    return torch.where(indices >= 0, indices.long() * capacity + locations.long(), num_experts * capacity)


def _sparse_encode(reshaped_input: Tensor, slots: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return the tokens at their experts, [experts, places, width], zeros where there is none. slots: [k, tokens]."""
    num_tokens, width = reshaped_input.shape
    token = torch.arange(num_tokens, device=slots.device).expand_as(slots).reshape(-1)
    token_at = slots.new_full((num_experts * capacity + 1,), num_tokens).scatter_(0, slots.reshape(-1), token)
    padded = torch.cat([reshaped_input, reshaped_input.new_zeros(1, width)])
    return padded[token_at[:-1]].view(num_experts, capacity, width)


def _sparse_decode(expert_output: Tensor, slots: Tensor, gates: Tensor, num_tokens: int) -> Tensor:
    """Return the weighted sum of each token's results. expert_output: [experts * places, width]; gates: [k, tokens]."""
    padded = torch.cat([expert_output, expert_output.new_zeros(1, expert_output.shape[-1])])
    weighted = padded[slots.reshape(-1)].view(len(slots), num_tokens, -1) * gates[..., None]
    return weighted.sum(0).to(expert_output.dtype)


class TopKGate(nn.Module):
    """A linear layer in fp32, and the gating function for its k. Noise and sampling are for training."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: ProcessGroup | None = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """model_dim: of the tokens. Others: see `MoE` and `top1gating`."""
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.ep_group, self.min_capacity = k, ep_group, min_capacity
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.noisy_gate_policy, self.drop_tokens, self.use_rts = noisy_gate_policy, drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(
        self, input: Tensor, used_token: Tensor | None = None, sparse_routes: bool = False, use_tutel: bool = False
    ) -> Gated:
        """Return the result of the gating function. input: [tokens, model_dim]."""
        x = input.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            x = jittered(x)
        logits = F.linear(x, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        if self.k == 1:
            return top1gating(
                logits,
                factor,
                self.min_capacity,
                used_token,
                self.noisy_gate_policy if self.training else None,
                self.drop_tokens,
                self.use_rts,
                self.ep_group,
                sparse_routes,
                use_tutel,
            )
        limits, common = (factor, self.min_capacity), (self.drop_tokens, self.ep_group)
        if self.k == 2:
            return top2gating(logits, *limits, *common, self.top2_2nd_expert_sampling, sparse_routes)
        return topkgating(logits, self.k, *limits, *common, sparse_routes=sparse_routes)


class Experts(nn.Module):
    """Copies of an expert, each for an equal part of dimension 1."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        """expert_group_name: kept at the parameters, beside the mark of experts."""
        super().__init__()
        self.num_local_experts = num_local_experts
        self.deepspeed_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        for param in self.deepspeed_experts.parameters():
            param.allreduce, param.group_name = False, expert_group_name  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: [ranks, experts * places, width, ...] -> the same."""
        chunks = inputs.chunk(self.num_local_experts, dim=1)
        outputs = (output_of(expert, chunk) for expert, chunk in zip(self.deepspeed_experts, chunks, strict=True))
        return torch.cat(list(outputs), dim=1)


# ---- tokens of ranks that share layers ----


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Return the parts of all ranks that share layers, joined along a dimension; backward takes this rank's part."""
    mesh = current_mesh()
    if mesh is None or mesh.tensor is None:
        return input_
    return gather_last_dim(input_.movedim(dim, -1), mesh.tensor).movedim(-1, dim)


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Return this rank's part of what the ranks that share layers all have; backward gathers the gradient.

    Raises: EngineError for a size that the ranks do not divide.
    """
    mesh = current_mesh()
    if mesh is None or mesh.tensor is None:
        return input_
    if input_.shape[dim] % mesh.tensor.world_size:
        raise EngineError(
            f"drop_tokens: dimension {dim} has {input_.shape[dim]}, for {mesh.tensor.world_size} ranks",
            hint="pad it to a multiple",
        )
    return split_last_dim(input_.movedim(dim, -1), mesh.tensor).movedim(-1, dim)
