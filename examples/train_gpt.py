"""Train a byte-level GPT on real text through the ZeRO engine.

    launch --num_gpus 2 examples/train_gpt.py --deepspeed examples/configs/zero2.json

The text is `--data PATH` (a file, or a folder of text files) or, by default, the sources of the Python
standard library, which every machine has. At the end a loss plot is written and the model continues a line of
code.
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import launcher

VOCABULARY_SIZE = 256  # one token per byte value
VALIDATION_FRACTION = 0.02
INDENT = b"    "  # is one tab in the text that the model sees: a fifth of the standard library's bytes are blanks
TEXT_SUFFIXES = {".py", ".txt", ".md", ".rst", ".c", ".h"}


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a decoder-only transformer."""

    num_layers: int
    hidden_size: int
    num_heads: int
    context: int


SIZES = {  # name -> layers, hidden size, heads
    "600k": (3, 128, 4),
    "5m": (6, 256, 8),
    "10m": (8, 320, 8),
    "20m": (12, 384, 12),
}


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_size = width // config.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, time, hidden] -> the same shape."""
        batch, length, _ = x.shape
        heads = (batch, length, 3, -1, self.head_size)  # -1: under tensor parallelism a rank has a part of the heads
        query, key, value = self.qkv(self.attention_norm(x)).view(heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT over bytes; the output layer shares its weight with the embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(VOCABULARY_SIZE, config.hidden_size)
        self.position_embedding = nn.Embedding(config.context, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, VOCABULARY_SIZE, bias=False)
        self.head.weight = self.token_embedding.weight
        self.apply(self._initialize)
        for block in self.blocks:  # residual branches start small, as in GPT-2
            for layer in (block.attention_out, block.mlp_out):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * config.num_layers))

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens, targets: int64 [batch, time]. Returns the mean loss in nats per byte, or without
        targets the logits [batch, time, 256]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of a text: `context` input bytes and the same shifted by one as targets."""

    def __init__(self, text: bytes, context: int) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.data[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def read_text(path: Path | None) -> bytes:
    """Return the bytes of a file, of a folder's text files, or of the standard library's sources, indented by tabs."""
    if path is None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES)
    else:
        files = [path]
    try:
        return b"\n".join(file.read_bytes().replace(INDENT, b"\t") for file in files)
    except OSError as error:
        sys.exit(f"--data: cannot read {error.filename}: {error.strerror}")


def load_windows(path: Path | None, context: int) -> tuple[ByteWindows, ByteWindows]:
    """Return training and validation windows; the validation text is the end of the data."""
    text = read_text(path)
    split = int(len(text) * (1 - VALIDATION_FRACTION))
    training, validation = ByteWindows(text[:split], context), ByteWindows(text[split:], context)
    if len(validation) < 1:
        sys.exit(f"--data: {len(text)} bytes of text are too few for --context {context}")
    return training, validation


def mean_over_ranks(value: Tensor) -> float:
    """Average a scalar over all ranks. Must be called by every rank."""
    value = value.detach().float().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def memory_mib(device: torch.device) -> float:
    """Peak memory of this rank: of the device on a GPU, resident memory of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def evaluate(engine: Any, windows: ByteWindows, batch_size: int = 16) -> float:
    """Return the mean loss on the first validation windows; the same on every rank."""
    engine.eval()
    pairs = [windows[index] for index in range(min(batch_size, len(windows)))]
    tokens = torch.stack([pair[0] for pair in pairs]).to(engine.device)
    targets = torch.stack([pair[1] for pair in pairs]).to(engine.device)
    with torch.no_grad():
        loss = engine(tokens, targets)
    engine.train()
    return mean_over_ranks(loss)


@dataclass
class History:
    """What the plot shows."""

    steps: list[int]
    losses: list[float]
    validation_steps: list[int]
    validation_losses: list[float]


def train(engine: Any, loader: Any, validation: ByteWindows, arguments: argparse.Namespace) -> History:
    """Run `arguments.steps` optimizer steps and print a line every `arguments.print_every`."""
    history = History([], [], [], [])
    tokens_per_step = engine.train_batch_size() * arguments.context
    batches = iter(loader)
    micro_losses: list[Tensor] = []
    window_start_s, window_steps = time.perf_counter(), 0
    while engine.global_steps < arguments.steps:
        batch = next(batches, None)
        if batch is None:  # the next pass over the data, shuffled anew
            batches = iter(loader)
            continue
        tokens, targets = (tensor.to(engine.device) for tensor in batch)
        loss = engine(tokens, targets)
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        micro_losses.append(loss.detach())
        if not boundary:
            continue
        step, window_steps = engine.global_steps, window_steps + 1
        history.steps.append(step)
        history.losses.append(mean_over_ranks(torch.stack(micro_losses).mean()))
        micro_losses.clear()
        if step % arguments.print_every == 0 or step in (1, arguments.steps):
            rate = tokens_per_step * window_steps / (time.perf_counter() - window_start_s)
            if arguments.rank == 0:
                print(
                    f"step {step:4d}/{arguments.steps}  loss {history.losses[-1]:.4f} (mean of all ranks)"
                    f"  {rate:,.0f} tok/s  mem {memory_mib(engine.device):,.0f} MiB",
                    flush=True,
                )
        if step % arguments.evaluate_every == 0 or step == arguments.steps:
            history.validation_steps.append(step)
            history.validation_losses.append(evaluate(engine, validation))
        if step % arguments.print_every == 0 or step % arguments.evaluate_every == 0:
            window_start_s, window_steps = time.perf_counter(), 0
    return history


def sample(engine: Any, prompt: bytes, num_bytes: int, context: int, seed: int) -> str:
    """Continue `prompt`. Every rank must call it, and every rank draws the same bytes."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=engine.device)
    engine.eval()
    with torch.no_grad(), launcher.phase("writing a sample"):
        for _ in range(num_bytes):
            logits = engine(tokens[:, -context:])[0, -1].float().cpu()
            likeliest = logits.topk(8)
            probabilities = torch.softmax(likeliest.values / 0.6, dim=-1)
            following = likeliest.indices[torch.multinomial(probabilities, 1, generator=generator)]
            tokens = torch.cat([tokens, following.to(engine.device)[None]], dim=1)
    return bytes(tokens[0].tolist()).replace(b"\t", INDENT).decode("utf-8", errors="replace")


def plot(history: History, path: Path, title: str) -> None:
    """Write the loss curve as a PNG."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    smooth: list[float] = []
    for loss in history.losses:
        smooth.append(loss if not smooth else 0.9 * smooth[-1] + 0.1 * loss)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes.plot(history.steps, history.losses, color="#9db8d9", linewidth=1, label="training, each step")
    axes.plot(history.steps, smooth, color="#1f4e8c", linewidth=2, label="training, smoothed")
    axes.plot(history.validation_steps, history.validation_losses, "o-", color="#d1662b", label="validation")
    axes.axhline(math.log(VOCABULARY_SIZE), color="0.6", linestyle=":", linewidth=1)
    axes.annotate(
        "uniform guess, ln 256",
        (history.steps[-1], math.log(VOCABULARY_SIZE)),
        xytext=(0, -12),
        textcoords="offset points",
        ha="right",
        color="0.4",
        fontsize=8,
    )
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)", title=title, ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"loss plot written to {path}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="600k", help="parameters (default: 600k)")
    parser.add_argument("--data", type=Path, help="text file or folder (default: Python's own sources)")
    parser.add_argument("--context", type=int, default=128, help="bytes per sample (default: 128)")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps (default: 1000)")
    parser.add_argument("--print_every", type=int, default=50, help="steps between lines (default: 50)")
    parser.add_argument("--evaluate_every", type=int, default=250, help="default: 250")
    parser.add_argument("--sample_bytes", type=int, default=300, help="bytes to write at the end; 0: none")
    parser.add_argument("--plot", type=Path, default=Path("runs/loss.png"), help="default: runs/loss.png")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    launcher.add_config_arguments(parser)
    arguments = parser.parse_args()
    if not (arguments.deepspeed or arguments.deepspeed_config):
        parser.error("give the engine's config: --deepspeed examples/configs/zero2.json")
    for name in ("context", "steps", "print_every", "evaluate_every"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    launcher.init_distributed()
    arguments.rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(arguments.seed)
    num_layers, hidden_size, num_heads = SIZES[arguments.size]
    model = GPT(GPTConfig(num_layers, hidden_size, num_heads, arguments.context))
    training, validation = load_windows(arguments.data, arguments.context)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if arguments.rank == 0:
        print(
            f"GPT {num_parameters / 1e6:.1f} M parameters · {num_layers} layers × {hidden_size}"
            f" · {len(training.data) / 1e6:.1f} MB of text",
            flush=True,
        )
    engine, _, loader, _ = launcher.initialize(args=arguments, model=model, training_data=training)
    history = train(engine, loader, validation, arguments)
    if arguments.sample_bytes:
        text = sample(engine, b"class Reader:\n\tdef ", arguments.sample_bytes, arguments.context, arguments.seed)
        if arguments.rank == 0:
            print("\n--- sample ---\n" + text + "\n--------------")
    if arguments.rank == 0:
        with launcher.phase("drawing the losses"):
            plot(history, arguments.plot, f"Byte-level GPT, {num_parameters / 1e6:.1f} M parameters")
        print(
            f"loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f} (validation {history.validation_losses[-1]:.3f})"
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
