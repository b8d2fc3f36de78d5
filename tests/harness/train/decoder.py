"""A small decoder whose layers have the usual names, and its training by torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 24, 16, 4, 6, 4
LR, DECAY, CLIP = 2e-3, 0.1, 0.5
PARITY_STEPS = [6, pytest.param(20, marks=pytest.mark.soak)]  # of runs beside torch alone


class Attention(nn.Module):
    """Attention over all tokens before, by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)  # its bias would have no gradient but rounding
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, width] -> the same."""
        q, k, v = (
            part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated feed-forward part, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.gate_proj = nn.Linear(WIDTH, 3 * WIDTH)
        self.up_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down_proj = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, width] -> the same."""
        x = x + self.attention(self.norm1(x))
        inner = self.norm2(x)
        return x + self.down_proj(F.silu(self.gate_proj(inner)) * self.up_proj(inner))


class Decoder(nn.Module):
    """Tokens in, mean cross-entropy of the next ones out."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch, length] -> scalar."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_decoder() -> Decoder:
    """Return the same model on every call."""
    torch.manual_seed(7)
    return Decoder()


def batch_of(step: int) -> Tensor:
    """Return the tokens of all samples of a step, [batch, length]."""
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def config(stage: int, data_size: int, **more: Any) -> dict[str, Any]:
    """Return an engine config for `BATCH` samples over all ranks with different samples."""
    return {
        "train_micro_batch_size_per_gpu": BATCH // data_size,
        "steps_per_print": 0,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        **more,
    }


def reference(
    num_steps: int, make: Callable[[], Decoder] = make_decoder, batch: Callable[[int], Tensor] = batch_of
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train with torch alone; return losses, norms of gradients before clipping, and the weights.

    batch: returns the tokens of a step.
    """
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    losses, norms = [], []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}
