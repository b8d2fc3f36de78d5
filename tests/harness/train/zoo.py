"""Small models that are awkward to shard, each with a forward from (x, y) to a loss, and a plain loop to train them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import launcher

WIDTH, SAMPLES = 16, 8
LR, WEIGHT_DECAY = 1e-2, 0.1


class Block(nn.Module):
    """A residual block with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.down(torch.tanh(self.up(x)))
        return out


class Plain(nn.Module):
    """Four blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.body(x)).squeeze(-1), y)


class NoList(nn.Module):
    """Layers as attributes: nothing says that they repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))).mean(-1), y)


class Repeated(Plain):
    """One block that is used three times, among others."""

    def body(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0, 2, 0, 3):
            x = self.blocks[index](x)
        return x


class Tied(Plain):
    """A weight of a block that another block uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].up.weight = self.blocks[0].up.weight


class Outside(Plain):
    """Parameters that are read without calling their modules: of a block, and of a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.linear(self.body(x), self.table.weight)
        x = F.linear(x, self.blocks[1].down.weight[:, :WIDTH])
        return F.mse_loss(self.head(x).squeeze(-1), y)


class SomeUnused(Plain):
    """A whole block and a parameter of another that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].extra = nn.Parameter(torch.ones(5))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks[1:]:
            x = block(x)
        return x


class AlternatingPath(Plain):
    """Control flow: every other forward takes another path."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        order = (0, 1, 2, 3) if self.calls % 2 else (3, 1)
        for index in order:
            x = self.blocks[index](x)
        return x


class PartlyFrozen(Plain):
    """Frozen blocks with trainable adapters between them, a frozen weight in a trainable block."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for block in self.blocks[1:3]:
            block.requires_grad_(False)
        self.blocks[3].up.requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            x = block(adapter(x))
        return x


@dataclass
class Output:
    """What some models return."""

    hidden: Tensor
    extra: dict[str, Any]


class DataclassBlock(Block):
    """Takes and returns structures."""

    def forward(self, packed: Any) -> Any:  # type: ignore[override]  # that is the point
        hidden = packed.hidden if isinstance(packed, Output) else packed["hidden"]
        return Output(super().forward(hidden), {"step": 1, "list": [None, "text"]})


class Structured(Plain):
    """Blocks that pass dataclasses and dictionaries on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DataclassBlock() for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        packed: Any = {"hidden": x}
        for block in self.blocks:
            packed = block(packed)
        hidden: Tensor = packed.hidden
        return hidden


class Recomputed(Plain):
    """Activation recomputation, as torch recommends it."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class RecomputedReentrant(Plain):
    """Activation recomputation of the old kind, which runs a backward within the backward."""

    def body(self, x: Tensor) -> Tensor:
        x.requires_grad_(True)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class ReentrantRepeated(Plain):
    """One block in several recomputed segments: each of their backward passes delivers its gradients."""

    def body(self, x: Tensor) -> Tensor:
        x.requires_grad_(True)
        for index in (0, 1, 0, 2, 0, 3):
            x = checkpoint(self.blocks[index], x, use_reentrant=True)
        return x


class ReentrantTied(Tied):
    """A weight that is read in one recomputed segment, in another, and outside of them."""

    def body(self, x: Tensor) -> Tensor:
        weight = self.blocks[3].up.weight[:WIDTH]
        x = F.linear(x, weight)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return F.linear(x, weight)


class ReentrantOutside(Plain):
    """A weight that is read first outside of the recomputed segment that uses it again, by what hands a gradient on."""

    def body(self, x: Tensor) -> Tensor:
        x = F.linear(self.blocks[0](x), self.blocks[2].up.weight[:WIDTH])
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class ReentrantLoss(Plain):
    """A loss that is recomputed part by part, from parameters whose module is not called."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def loss_of(hidden: Tensor, target: Tensor) -> Tensor:
            hidden = F.linear(hidden, self.blocks[2].down.weight[:, :WIDTH])
            return F.mse_loss(F.linear(hidden, self.head.weight, self.head.bias).squeeze(-1), target)

        parts = zip(self.body(x).chunk(2), y.chunk(2), strict=True)
        return sum((checkpoint(loss_of, *part, use_reentrant=True) for part in parts), torch.zeros(())) / 2


class Experts(nn.Module):
    """A mixture whose experts depend on the data: each rank may call others, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] * 10).long().remainder(4)
        out = torch.zeros_like(x)
        for index in chosen.unique().flip(0).tolist():
            out = out + self.experts[index](x) * (chosen == index).unsqueeze(-1)
        return out


class Mixture(Plain):
    """Blocks of experts; each is gathered as one."""

    def __init__(self) -> None:
        super().__init__()
        self.mixtures = nn.ModuleList(Experts() for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        for mixture in self.mixtures:
            x = x + mixture(super().body(x))
        return x


class Containers(nn.Module):
    """Parameter lists, dictionaries of modules, a sequence whose items are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))
        self.layers = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": Block()})
        self.tail = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, 1)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.layers["b"](self.layers["a"](x) + self.biases[0]) + self.biases[1]
        first, second = self.tail
        for part in second:
            x = part(x if part is not second[0] else first(x))
        return F.mse_loss(x.squeeze(-1), y)


class TwoForwards(Plain):
    """Two forwards of everything before one backward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + 0.5 * super().forward(-x, -y)


class LookBetween(Plain):
    """A look at the model without gradients in the middle of a forward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            weight = self.body(x).abs().mean() * 0 + 1.0
        return super().forward(x, y) * weight


class WrittenInto(nn.Module):
    """Linear layers of three dimensions, which return views, and a forward that writes into what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        for index, layer in enumerate(self.layers):
            out = layer(x)
            if index % 2:
                out += x
            else:
                out = self.act(out)
            x = out
        return F.mse_loss(x.mean((1, 2)), y)


class WritesIntoInput(Block):
    """A block that writes into its input and returns it."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 1, WIDTH] -> the same tensor."""
        return x.add_(self.scale * self.down(torch.tanh(self.up(x.relu()))))


class InputWrittenInto(nn.Module):
    """Blocks that return the view that they were given, and a forward that writes into it again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(WritesIntoInput() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x).unsqueeze(1)
        for block in self.blocks:
            x = block(x)
            x *= 0.5
        return F.mse_loss(x.mean((1, 2)), y)


MODELS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        Plain,
        NoList,
        Repeated,
        Tied,
        Outside,
        SomeUnused,
        AlternatingPath,
        PartlyFrozen,
        Structured,
        Recomputed,
        RecomputedReentrant,
        ReentrantRepeated,
        ReentrantTied,
        ReentrantOutside,
        ReentrantLoss,
        Mixture,
        Containers,
        TwoForwards,
        LookBetween,
        WrittenInto,
        InputWrittenInto,
    )
}


def build(name: str) -> nn.Module:
    """Return the model of that name, with the same weights on every call."""
    torch.manual_seed(23)
    return MODELS[name]()


def batches(num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return the whole batch of every step: x [SAMPLES, WIDTH], y [SAMPLES]."""
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, generator=generator))
        for _ in range(num_steps)
    ]


def train_plain(
    name: str,
    num_steps: int,
    adjust: Callable[[nn.Module], None] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on one process with plain torch; return the losses and the final weights."""
    model = build(name).to(dtype)
    if adjust is not None:
        adjust(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=WEIGHT_DECAY)
    losses = []
    for x, y in batches(num_steps):
        loss = model(x.to(dtype), y.to(dtype))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


def engine_of(model: nn.Module, stage: int, world_size: int, **more: Any) -> Any:
    """Return an engine for batches of `SAMPLES` over all ranks. more: of the config, in place of what is here."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        **more,
    }
    return launcher.initialize(model=model, config=config)[0]
