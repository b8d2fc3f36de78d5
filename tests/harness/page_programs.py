"""Run the blocks of Python of the pages, each as one rank.

A block finds what its page speaks of and does not define: a model with its data, a config, an engine. The working
folder gets what the blocks write.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness.pages import ROOT, Block, blocks_of, python_blocks
from torch import Tensor, nn

import launcher

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
ARGUMENTS = ["--deepspeed", "ds_config.json"]


class Model(nn.Module):
    """What most blocks train: `forward` returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """inputs: [batch, 3], targets: [batch, 1] -> mean loss."""
        return nn.functional.mse_loss(self.head(inputs), targets)


def offload() -> dict[str, Any]:
    """Return the first config of docs/offload.md: stage 3, in host memory."""
    found: dict[str, Any] = json.loads(
        next(b.text for b in blocks_of(ROOT / "docs/offload.md") if b.language == "json")
    )
    return found


def given_to(block: Block) -> dict[str, Any]:
    """Return the names that a block may use."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(3, 1) if "loss_of(" in block.text else Model()
    config = CONFIG | offload() if "zero.Init(" in block.text else CONFIG
    data = [(torch.randn(3), torch.zeros(1)) for _ in range(4)]
    parser = launcher.add_config_arguments(argparse.ArgumentParser())
    names: dict[str, Any] = {"launcher": launcher, "os": os, "sys": sys, "torch": torch, "rank": 0, "mpu": None}
    names |= {"Model": Model, "model": model, "block": nn.Linear(3, 3), "self": nn.Module(), "num_steps": 2}
    names |= {"config": config, "args": parser.parse_args(ARGUMENTS), "loss_of": nn.functional.mse_loss}
    names |= {"data": data, "dataset": data, "loader": torch.utils.data.DataLoader(data, batch_size=2)}
    names |= {"x": torch.randn(2, 3, requires_grad=True), "save": lambda: print("saved")}
    if "engine." in block.text and "initialize(" not in block.text:
        names["engine"] = launcher.initialize(model=model, config=config)[0]
    return names


def run(block: Block) -> None:
    """Run a block as rank 0 of 1; a notice of preemption has come, and what is too large for a test has no memory."""
    code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
    place = torch.device("meta" if "TiledLinear(" in block.text else "cpu")
    with launcher.notebook.emulate(), mock.patch.object(launcher, "preempted", return_value=True), place:
        try:
            exec(code, given_to(block))
        except SystemExit as end:
            print(f"exit code {end.code}")
    print(f"ran {block.place}", flush=True)


def main() -> None:
    """Run the blocks whose places are the arguments."""
    Path("ds_config.json").write_text(json.dumps(CONFIG))
    sys.argv, places = ["train.py", *ARGUMENTS], sys.argv[1:]
    for each in python_blocks():
        if each.place in places:
            run(each)
