"""Train the byte-level GPT of train_gpt.py as a pipeline: each rank has some of its layers.

    launch --num_gpus 2 examples/pipeline.py --deepspeed examples/configs/pipeline.json

The sizes of the mesh stand in the config: `pipeline.stages`, `tensor_parallel.autotp_size`; what ranks they leave have
different samples. examples/configs/3d.json is for 8 ranks: 2 stages, tensor parallelism, two samples at a time, ZeRO-1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from train_gpt import SIZES, VOCABULARY_SIZE, Block, GPTConfig, load_windows

import launcher
from launcher import LayerSpec, PipelineModule, TiedLayerSpec


class Embedding(nn.Module):
    """Bytes and positions -> vectors; as the last layer, vectors -> logits by the same weight."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY_SIZE, width), nn.Embedding(context, width)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [batch, time] -> [batch, time, hidden]."""
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))

    def logits(self, x: Tensor) -> Tensor:
        """x: [batch, time, hidden] -> [batch, time, 256]."""
        return F.linear(x, self.token.weight)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """logits: [batch, time, 256], targets: int64 [batch, time] -> the mean loss in nats per byte."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_model(config: GPTConfig) -> PipelineModule:
    """Describe the layers; `initialize()` has each rank build its own."""
    embedding = ("embedding", Embedding, config.context, config.hidden_size)
    layers = [
        TiedLayerSpec(*embedding, tied_weight_attr="token.weight"),
        *[LayerSpec(Block, config) for _ in range(config.num_layers)],
        LayerSpec(nn.LayerNorm, config.hidden_size),
        TiedLayerSpec(*embedding, forward_fn=Embedding.logits, tied_weight_attr="token.weight"),
    ]
    return PipelineModule(layers, loss_fn=loss_of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="5m", help="parameters (default: 5m)")
    parser.add_argument("--data", type=Path, help="text file or folder (default: Python's own sources)")
    parser.add_argument("--context", type=int, default=128, help="bytes per sample (default: 128)")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps (default: 50)")
    launcher.add_config_arguments(parser)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = make_model(GPTConfig(*SIZES[arguments.size], arguments.context))
    training, validation = load_windows(arguments.data, arguments.context)
    engine, *_ = launcher.initialize(args=arguments, model=model, training_data=training)
    losses = []
    for step in range(1, arguments.steps + 1):
        losses.append(engine.train_batch().item())
        if engine.global_rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {losses[-1]:.3f}  idle {engine.idle_fraction:.0%}", flush=True)
    found = engine.eval_batch(iter(engine.deepspeed_io(validation)), num_micro_batches=4).item()
    if engine.global_rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} (validation {found:.3f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
