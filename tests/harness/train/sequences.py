"""A small decoder for parts of sequences, batches with uneven numbers of labels, and its training by torch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import launcher

VOCABULARY, WIDTH, HEADS, KEY_HEADS, LENGTH, BATCH = 24, 16, 4, 2, 8, 4
LR, DECAY, CLIP = 2e-3, 0.1, 0.5


class Attention(nn.Module):
    """Causal attention with fewer heads of keys than of queries."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        # A bias of keys would have no gradient but rounding.
        self.key, self.value = nn.Linear(WIDTH, key_heads * size, bias=False), nn.Linear(WIDTH, key_heads * size)
        self.core = launcher.DistributedAttention(F.scaled_dot_product_attention, scatter_idx=1, gather_idx=2)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length of this part, width] -> the same."""
        size = WIDTH // HEADS
        query, key, value = (
            part(x).unflatten(-1, (-1, size)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        found = self.core(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Tokens and their positions in, the mean loss over the labels of this part out."""

    def __init__(self, key_heads: int = KEY_HEADS, num_blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attentions = nn.ModuleList(Attention(key_heads) for _ in range(num_blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(num_blocks))
        self.feeds = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        """All: [batch, length of this part] -> scalar."""
        x = self.tokens(input_ids) + self.places(position_ids)
        for attention, norm, feed in zip(self.attentions, self.norms, self.feeds, strict=True):
            x = x + attention(norm(x))
            x = x + F.gelu(feed(x))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), shift_labels.flatten())


def make_decoder(key_heads: int = KEY_HEADS) -> Decoder:
    """Return the same model on every call."""
    torch.manual_seed(7)
    return Decoder(key_heads)


def batch_of(step: int, num_samples: int = BATCH, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Return all samples of a step, [samples, length]. Most labels of the first half of a sequence do not count."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, vocabulary, (num_samples, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[:, : LENGTH // 2 + 1] = -100
    labels[:, 1 + step % 3] = tokens[:, 1 + step % 3]  # each sample has as many
    return {"input_ids": tokens, "labels": labels}


def config(stage: int, num_samples: int, sequence_size: int, **more: Any) -> dict[str, Any]:
    """Return an engine config. num_samples: of a rank's micro-batch."""
    return {
        "train_micro_batch_size_per_gpu": num_samples,
        "steps_per_print": 0,
        "gradient_clipping": CLIP,
        "sequence_parallel_size": sequence_size,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        **more,
    }


def reference(num_steps: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train with torch alone; return losses, norms of gradients before clipping, and the weights."""
    model = make_decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    losses, norms = [], []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(**shifted(batch_of(step)))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


def shifted(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch as a single process computes it; written anew, as what it is compared with."""
    tokens, labels = batch["input_ids"], batch["labels"]
    places = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
    ends = torch.full((len(tokens), 1), -100)
    return {"input_ids": tokens, "position_ids": places, "shift_labels": torch.cat([labels[:, 1:], ends], dim=1)}
