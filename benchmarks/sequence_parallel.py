"""What ranks keep for backward, and how long steps take, when 1, 2 or 4 of them have parts of one sequence.

    launch --num_gpus 4 benchmarks/sequence_parallel.py [--length 2048] [--width 256] [--rounds 7] [--output FILE]

One decoder is trained by engines with sequence axes of different sizes, on the same ranks and in turns: the data axis
takes the ranks that are left, so that fewer ranks of one sequence mean more sequences a step. Then attention alone with
the exchanges around it, ours and DeepSpeed's where that is installed. Rank 0 writes a section of docs/benchmarks.md.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import NOT_INSTALLED, Section, argument_parser, is_installed, median, rounds_text, spread, table
from torch import Tensor, nn
from torch.nn import functional as F

import launcher
from launcher.comm import observe
from launcher.comm.groups import is_first_rank
from launcher.parallel.sequence.batch import part_of_batch

VOCABULARY, HEADS, BLOCKS = 256, 8, 4
STEPS_A_TURN = 2


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention, [length, batch, heads, features] -> the same."""
    moved = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    return F.scaled_dot_product_attention(*moved, is_causal=True).permute(2, 0, 1, 3)


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention = launcher.DistributedAttention(attend, scatter_idx=2, gather_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        """x: [length of this part, batch, width] -> the same."""
        query, key, value = (each.unflatten(-1, (HEADS, -1)) for each in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(self.attention(query, key, value).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Bytes in, their mean loss out."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        """All: [batch, length of this part] -> scalar."""
        x = (self.tokens(input_ids) + self.places(position_ids)).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), shift_labels.t().flatten())


class Run:
    """One engine, and its part of one batch."""

    def __init__(self, num_ranks: int, width: int, length: int) -> None:
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 0,
            "sequence_parallel_size": num_ranks,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }
        self.engine: Any = launcher.initialize(model=Decoder(width, length), config=config)[0]
        generator = torch.Generator().manual_seed(self.engine.get_data_parallel_rank())
        tokens = torch.randint(0, VOCABULARY, (1, length), generator=generator).to(self.engine.device)
        rank = self.engine.get_sequence_parallel_rank()
        self.batch = part_of_batch({"input_ids": tokens, "labels": tokens}, rank, num_ranks)
        self.group = self.engine.get_sequence_parallel_group() if num_ranks > 1 else None

    def step(self) -> None:
        """Take one optimizer step."""
        self.backward_of(self.engine(**self.batch))
        self.engine.step()

    def backward_of(self, loss: Tensor) -> None:
        """Compute the gradients of a whole sequence."""
        if self.group is not None:
            loss = launcher.sequence_loss(loss, self.batch["shift_labels"], group=self.group)
        self.engine.backward(loss)

    def saved_bytes(self) -> int:
        """Return what a forward keeps for its backward, parameters left out."""
        own = {param.untyped_storage().data_ptr() for param in self.engine.parameters()}
        kept: dict[int, Tensor] = {}  # they are held: storage that is freed would be counted again elsewhere

        def pack(tensor: Tensor) -> Tensor:
            pointer = tensor.untyped_storage().data_ptr()
            if pointer not in own:
                kept[pointer] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.engine(**self.batch)
        self.backward_of(loss)
        self.engine.step()
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def in_turns(calls: dict[str, Callable[[], object]], rounds: int, repeats: int = 1) -> dict[str, list[float]]:
    """Return the milliseconds of each call on the slowest rank; all in another order each round, one in front."""
    times_ms: dict[str, list[float]] = {name: [] for name in calls}
    orders = random.Random(0)  # the same on every rank
    for number in range(-1, rounds):
        for name in orders.sample(list(calls), len(calls)):
            dist.barrier()
            begun_s = time.perf_counter()
            for _ in range(repeats):
                calls[name]()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            dist.barrier()
            if number >= 0:
                times_ms[name].append((time.perf_counter() - begun_s) * 1e3 / repeats)
    return times_ms


def training(sizes: list[int], width: int, length: int, rounds: int) -> str:
    """Measure the engines, and return their table."""
    runs = {f"{size}": Run(size, width, length) for size in sizes}
    saved = {name: run.saved_bytes() for name, run in runs.items()}
    times_ms = in_turns({name: run.step for name, run in runs.items()}, rounds, STEPS_A_TURN)
    rows = []
    for name, run in runs.items():
        num_tokens = run.engine.train_batch_size() * length
        before = observe.sent_bytes()
        run.step()
        rows.append(
            [
                name,
                str(run.engine.dp_world_size),
                f"{saved[name] / 2**20:.1f} MiB",
                f"{saved[name] / saved['1']:.3f}",
                f"{median(times_ms[name]):.0f} ms",
                spread(times_ms[name]),
                f"{num_tokens / median(times_ms[name]) * 1e3:.0f}",
                f"{(observe.sent_bytes() - before) / 2**20:.1f} MiB",
            ]
        )
    header = ["ranks of one sequence", "sequences a step", "kept for backward by a rank", "of 1 rank's", "step"]
    return table([*header, "quartiles", "tokens/s", "sent by a rank"], rows)


def attention(sizes: list[int], width: int, length: int, rounds: int) -> str:
    """Measure attention with its exchanges, forward and backward, and return the table."""
    calls: dict[str, Callable[[], object]] = {}
    for size in sizes:
        group, _ = dist.new_subgroups(size)
        shape = (length // size, 1, HEADS, width // HEADS)
        own = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        ours = launcher.DistributedAttention(attend, group, scatter_idx=2, gather_idx=0)
        calls[f"launch, {size} ranks"] = lambda own=own, ours=ours: ours(*own).sum().backward()
        if is_installed("deepspeed"):
            from deepspeed.sequence.layer import DistributedAttention

            theirs = DistributedAttention(attend, group)
            calls[f"DeepSpeed, {size} ranks"] = lambda own=own, theirs=theirs: theirs(*own, 1).sum().backward()
    times_ms = in_turns(calls, rounds, repeats=3)
    rows = [[name, f"{median(values):.1f} ms", spread(values)] for name, values in times_ms.items()]
    if not is_installed("deepspeed"):
        rows.append(["DeepSpeed", NOT_INSTALLED])
    return table(["attention and its exchanges", "forward and backward", "quartiles"], rows)


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__, rounds=7)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the model (default %(default)s)")
    options = parser.parse_args()
    launcher.init_distributed()
    if is_installed("deepspeed"):
        import deepspeed

        deepspeed.init_distributed(dist_backend=dist.get_backend())
    page = Section("Sequence parallelism", "torch", "deepspeed")
    num_ranks = dist.get_world_size()
    sizes = [size for size in (1, 2, 4) if num_ranks % size == 0]
    parts = [
        training(sizes, options.width, options.length, options.rounds),
        attention(sizes[1:], options.width, options.length, options.rounds),
    ]
    if is_first_rank():
        text = (
            f"{num_ranks} ranks, {dist.get_backend()}, fp32, ZeRO stage 1. A decoder of {BLOCKS} blocks, width"
            f" {options.width}, {HEADS} heads; one sequence of {options.length} tokens\nfor each rank of the data axis,"
            " which has the ranks that the sequence axis leaves. Kept for backward: the storage that autograd saves in"
            " a forward, parameters left out.\n\n"
        )
        samples = rounds_text(options.rounds, "in another order each round in one job, the slowest rank's")
        page.write(samples, text + "\n\n".join(parts), options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
