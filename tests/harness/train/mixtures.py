"""Small mixtures of experts, and their training by torch alone in one process that sees the samples of all ranks."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.moe import MoE

WIDTH, EXPERTS, TOKENS, SAMPLES = 12, 4, 5, 2
LR, DECAY, CLIP, BALANCE = 5e-3, 0.1, 0.5, 0.1
EPSILON = 1e-4  # of AdamW: what differs by rounding alone differs by no more in the weights
_COMMON: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
# Family of Hugging Face -> its classes of config and model, and its config.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": EXPERTS, "output_router_logits": True}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {"num_experts": EXPERTS, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
        | {"output_router_logits": True},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": EXPERTS, "moe_intermediate_size": 8, "norm_topk_prob": True, "head_dim": 8},
    ),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": EXPERTS, "output_router_logits": True}),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {"n_routed_experts": EXPERTS, "moe_intermediate_size": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
        | {"qk_nope_head_dim": 4, "v_head_dim": 8},
    ),
}


class Expert(nn.Module):
    """A feed-forward part whose output is zero for no input: biases show which tokens an expert has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., WIDTH] -> the same."""
        return self.down(F.silu(self.up(x)))


class Mixture(nn.Module):
    """Two layers of `launcher.moe` between linear ones. Its first expert gets no token: inputs of it are positive."""

    def __init__(self, ep_size: int, *, drop_tokens: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            MoE(
                WIDTH,
                Expert(),
                num_experts=EXPERTS,
                ep_size=ep_size,
                k=k,
                drop_tokens=drop_tokens,
                capacity_factor=EXPERTS,
                eval_capacity_factor=EXPERTS,
                use_residual=k == 1,
                top2_2nd_expert_sampling=False,
            )
            for k in (1, 2)
        )
        self.counts: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """x: [samples, tokens, WIDTH] -> the loss."""
        y, balance, self.counts = F.relu(self.first(x)), x.new_zeros(()), []
        for layer in self.layers:
            output, loss, counts = layer(y)
            y, balance = y + F.relu(output), balance + loss
            self.counts.append(counts)
        return (self.last(y) - x.roll(1, -1)).square().mean() + BALANCE * balance


class MixtralSparseMoeBlock(nn.Module):
    """The block of transformers 4.57 by that name, with the attributes that it has: experts in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.jitter_noise = EXPERTS, 2, 0.0
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [samples, tokens, WIDTH] -> the same, and logits [samples * tokens, EXPERTS]."""
        rows = x.reshape(-1, WIDTH)
        logits = self.gate(rows)
        weights, chosen = F.softmax(logits, dim=1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            total = total.index_add(0, token, expert(rows[token]) * weights[token, place, None])
        return total.view(x.shape), logits


class ListedMixture(nn.Module):
    """Two such blocks between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": MixtralSparseMoeBlock()}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """x: [samples, tokens, WIDTH] -> the loss."""
        y, balance = F.relu(self.first(x)), x.new_zeros(())
        for layer in self.layers:
            output, logits = layer["mlp"](y)
            y, balance = y + output, balance + logits.logsumexp(-1).square().mean()
        return (self.last(y) - x.roll(1, -1)).square().mean() + 0.01 * balance


def build(kind: str, ep_size: int = 1) -> nn.Module:
    """Return the mixture of that name, with the same weights on every call. ep_size: of layers of `launcher.moe`."""
    torch.manual_seed(3)
    if kind in ("moe", "moe with capacity"):
        model: nn.Module = Mixture(ep_size, drop_tokens=kind != "moe")
    elif kind == "listed":
        model = ListedMixture()
    else:
        transformers = importlib.import_module("transformers")
        config_class, model_class, values = FAMILIES[kind]
        return getattr(transformers, model_class)(  # type: ignore[no-any-return]
            getattr(transformers, config_class)(**_COMMON, **values)
        )
    with torch.no_grad():
        for name, param in model.named_parameters():  # by name: a rank has some of them
            seed = sum(ord(letter) * (place + 1) for place, letter in enumerate(name))
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * 0.3)
            if name.endswith(("deepspeed_moe.gate.wg.weight", "mlp.gate.weight")):
                param[0] = -9.0
    return model


def batch(kind: str, step: int, rank: int) -> Tensor:
    """Return the samples of one rank's micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if kind in FAMILIES:
        return torch.randint(1, 32, (SAMPLES, TOKENS), generator=generator)
    return torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator)


def loss_of(model: nn.Module, samples: Tensor) -> Tensor:
    """Return the loss of one micro-batch."""
    if samples.is_floating_point():
        return model(samples)  # type: ignore[no-any-return]
    return model(input_ids=samples, labels=samples).loss  # type: ignore[no-any-return]


def plain(kind: str, num_ranks: int, num_steps: int, accumulation: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """Train in this process on the samples of all ranks; return the mean loss of each step, and the weights.

    A parameter without a gradient gets zeros, as experts without a token do.
    """
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, eps=EPSILON)
    losses = []
    for step in range(num_steps):
        total = 0.0
        for part in range(accumulation):
            for rank in range(num_ranks):
                loss = loss_of(model, batch(kind, step * accumulation + part, rank)) / (num_ranks * accumulation)
                loss.backward()
                total += loss.item()
        for param in model.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def config(stage: int, ep_size: int, **others: Any) -> dict[str, Any]:
    """Return an engine config. ep_size: 0 for models whose layers are sharded already."""
    experts = {"expert_parallel": {"enabled": True, "autoep_size": ep_size}} if ep_size else {}
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "eps": EPSILON}},
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})},
        "steps_per_print": 0,
        **experts,
        **others,
    }
