"""The compressed mean written down plainly, for all ranks in one process."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024


class ReferenceMean:
    """Both phases of the compressed mean over `world_size` ranks: one run after another, one block after another.

    Blocks of all runs, and then empty ones, are dealt to the ranks in order: each serves as many.
    """

    def __init__(self, world_size: int, numels: list[int]) -> None:
        self.numels = numels
        self.worker_errors = [[torch.zeros(n) for n in numels] for _ in range(world_size)]
        self.server_errors = [torch.zeros(n) for n in numels]

    def average(self, values: list[list[Tensor]]) -> list[Tensor]:
        """values: [rank][run] 1-D fp32; returns the mean of each run."""
        means = []
        for run, numel in enumerate(self.numels):
            total = torch.zeros(numel)
            for rank, runs in enumerate(values):
                total += self._signs(runs[run], self.worker_errors[rank][run])
            means.append(self._signs(total / len(values), self.server_errors[run]))
        return means

    @staticmethod
    def _signs(values: Tensor, error: Tensor) -> Tensor:
        sent = torch.empty_like(values)
        wanted = values + error
        for start in range(0, len(values), BLOCK):
            block = wanted[start : start + BLOCK]
            row = torch.zeros(1, BLOCK)
            row[0, : len(block)] = block
            scale = torch.linalg.vector_norm(row, dim=1) / torch.tensor(float(len(block))).sqrt()
            sent[start : start + BLOCK] = torch.where(block.signbit(), -scale, scale)
        error.copy_(wanted - sent)
        return sent
