"""The compressed mean and the optimizers that use it, written down plainly, for all ranks in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.comm.compressed import CompressedMean

BLOCK = 1024
SAMPLES, WIDTH, HIDDEN = 16, 8, 96
BETAS, EPS = (0.9, 0.99), 1e-8


# A sign may be either where its element is smaller than this part of its block's root mean square: there it hangs on
# the order of sums, which differs between CPUs, and a sign that differs changes every later step by far more.
EITHER_SIGN_BELOW = 1e-2
MAX_EITHER_SIGNS = 1e-2  # of all


@dataclass
class Signs:
    """What one rank sent in one exchange: True is negative. Of the mean it got, every rank has the same."""

    own: list[Tensor]  # [run], bool
    of_mean: list[Tensor]


@contextlib.contextmanager
def recorded_signs() -> Iterator[list[Signs]]:
    """Write down the signs of every exchange of this process within the block."""
    exchanges: list[Signs] = []
    average = CompressedMean.average

    def recorded(mean: CompressedMean, flat: Tensor, resting: Sequence[int] = ()) -> None:
        wanted = flat + mean.worker_error
        average(mean, flat, resting)
        sent = wanted - mean.worker_error  # but for rounding
        places = [place for run, place in enumerate(mean.places) if run not in resting]
        exchanges.append(Signs([sent[place] < 0 for place in places], [flat[place] < 0 for place in places]))

    with mock.patch.object(CompressedMean, "average", recorded):
        yield exchanges


class ReferenceMean:
    """Both phases of the compressed mean over `world_size` ranks: one run after another, one block after another.

    Blocks of all runs, and then empty ones, are dealt to the ranks in order: each serves as many.
    """

    def __init__(self, world_size: int, numels: list[int], seen: list[list[Signs]] | None = None) -> None:
        """seen: by rank and exchange, the signs of the run under test.

        They are followed where an element is near zero, and must be the reference's own elsewhere. None: its own
        everywhere, which is for input that has the same bits on both sides.
        """
        self.numels = numels
        self.worker_errors = [[torch.zeros(n) for n in numels] for _ in range(world_size)]
        self.server_errors = [torch.zeros(n) for n in numels]
        self.seen = seen
        self.num_exchanges = 0

    def average(self, values: list[list[Tensor]]) -> list[Tensor]:
        """values: [rank][run] 1-D fp32; returns the mean of each run."""
        signs = None if self.seen is None else [of_rank[self.num_exchanges] for of_rank in self.seen]
        self.num_exchanges += 1
        means = []
        for run, numel in enumerate(self.numels):
            total = torch.zeros(numel)
            for rank, runs in enumerate(values):
                total += self._signs(runs[run], self.worker_errors[rank][run], signs and signs[rank].own[run])
            of_mean = signs and signs[0].of_mean[run]
            means.append(self._signs(total / len(values), self.server_errors[run], of_mean))
        return means

    @staticmethod
    def _signs(values: Tensor, error: Tensor, seen: Tensor | None) -> Tensor:
        sent = torch.empty_like(values)
        wanted = values + error
        for start in range(0, len(values), BLOCK):
            block = wanted[start : start + BLOCK]
            row = torch.zeros(1, BLOCK)
            row[0, : len(block)] = block
            scale = torch.linalg.vector_norm(row, dim=1) / torch.tensor(float(len(block))).sqrt()
            is_negative = block.signbit()
            if seen is not None:
                given = seen[start : start + BLOCK]
                differs = given != is_negative
                assert (block[differs].abs() <= EITHER_SIGN_BELOW * scale).all(), "the sign of an element far from zero"
                assert differs.sum() <= 1 + MAX_EITHER_SIGNS * len(block)
                is_negative = given
            sent[start : start + BLOCK] = torch.where(is_negative, -scale, scale)
        error.copy_(wanted - sent)
        return sent


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 1)
        self.spare = nn.Linear(WIDTH, 1)
        self.uses_spare = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        out = self.head(hidden) + (self.spare(x) if self.uses_spare else 0.0)
        return F.mse_loss(out.squeeze(-1).float(), y.float())


def make_net() -> Net:
    torch.manual_seed(3)
    return Net()


def data(num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """The whole batch of every step; something can be learnt from it."""
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(num_steps, SAMPLES, WIDTH, generator=generator)
    return [(x, torch.sin(x[:, 0]) + 0.5 * x[:, 1]) for x in xs]


class Reference:
    """Every rank's gradients, momenta and weights, side by side."""

    def __init__(self, seen: list[list[Signs]]) -> None:
        """seen: by rank and exchange, the signs of the run under test."""
        self.world_size = world_size = len(seen)
        self.models = [make_net() for _ in range(world_size)]
        self.trained = [[p for n, p in model.named_parameters() if "spare" not in n] for model in self.models]
        self.m = [[torch.zeros(p.numel()) for p in params] for params in self.trained]
        self.v = [torch.zeros(p.numel()) for p in self.trained[0]]
        self.mean = ReferenceMean(world_size, [p.numel() for p in self.trained[0]], seen)

    def gradients(self, x: Tensor, y: Tensor) -> list[list[Tensor]]:
        """By rank and parameter, flat."""
        parts = zip(self.models, self.trained, x.chunk(self.world_size), y.chunk(self.world_size), strict=True)
        return [[g.view(-1) for g in torch.autograd.grad(model(a, b), params)] for model, params, a, b in parts]

    def update_momenta(self, grads: list[list[Tensor]]) -> None:
        for m_of, g_of in zip(self.m, grads, strict=True):
            for m, g in zip(m_of, g_of, strict=True):
                m.lerp_(g, 1 - BETAS[0])

    def update_variance(self, grads: list[list[Tensor]]) -> list[list[Tensor]]:
        """Return the mean gradient, once for each rank."""
        mean = [sum(of_all) / self.world_size for of_all in zip(*grads, strict=True)]
        for v, g in zip(self.v, mean, strict=True):
            v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
        return [mean] * self.world_size  # type: ignore[list-item]

    def exchange(self) -> None:
        means = self.mean.average(self.m)
        self.m = [[m.clone() for m in means] for _ in range(self.world_size)]

    @torch.no_grad()
    def move(self, lengths: Callable[[int, Tensor, Tensor], float], num_steps: int, num_variances: int) -> None:
        """Step along the corrected update; lengths: from a parameter's number, itself and its update to the length."""
        for params, m_of in zip(self.trained, self.m, strict=True):
            for i, (p, m, v) in enumerate(zip(params, m_of, self.v, strict=True)):
                root = (v / (1 - BETAS[1] ** num_variances)).sqrt() + EPS
                update = (m / (1 - BETAS[0] ** num_steps) / root).view(p.shape)
                p -= lengths(i, p, update) * update


def reference_adam(seen: list[list[Signs]], steps: list[tuple[Tensor, Tensor]]) -> Reference:
    ours = Reference(seen)
    for t, (x, y) in enumerate(steps):
        grads = ours.gradients(x, y)
        ours.update_momenta(grads if t >= 3 else ours.update_variance(grads))
        if t >= 3:
            ours.exchange()
        ours.move(lambda *_: 1e-2, t + 1, min(t + 1, 3))
    return ours


def reference_lamb(seen: list[list[Signs]], steps: list[tuple[Tensor, Tensor]]) -> Reference:
    ours = Reference(seen)
    num = len(ours.v)
    coefficients: list[Any] = [None] * num
    factors = [1.0] * num
    fresh = [v.clone() for v in ours.v]

    def warm(i: int, p: Tensor, update: Tensor) -> float:
        ratio = (p.norm() / update.norm()).clamp(0.01, 10.0).item()
        if p is ours.trained[0][i]:
            coefficients[i] = ratio if coefficients[i] is None else 0.9 * coefficients[i] + 0.1 * ratio
        return 1e-2 * ratio

    for t, (x, y) in enumerate(steps):
        grads = ours.gradients(x, y)
        before = [m.clone() for m in ours.m[0]]
        ours.update_momenta(grads if t >= 3 else ours.update_variance(grads))
        if t < 3:
            ours.move(warm, t + 1, t + 1)
            fresh = [v.clone() for v in ours.v]
            continue
        ours.exchange()
        for i in range(num):
            implied = (ours.m[0][i] - BETAS[0] * before[i]) / (1 - BETAS[0])
            fresh[i] = BETAS[1] * fresh[i] + (1 - BETAS[1]) * implied**2
            frozen_root = (ours.v[i] / (1 - BETAS[1] ** 3)).sqrt() + EPS
            fresh_root = (fresh[i] / (1 - BETAS[1] ** (t + 1))).sqrt() + EPS
            factor = min(4.0, max(0.5, (frozen_root / fresh_root).max().item()))
            factors[i] = min(factors[i] * 1.1, max(factors[i] * 0.9, factor))
        ours.move(lambda i, *_: 1e-2 * coefficients[i] * factors[i], t + 1, 3)
    return ours


def reference_zero_one(seen: list[list[Signs]], steps: list[tuple[Tensor, Tensor]]) -> Reference:
    """Variance at steps 0, 1, 3, 7; from 8 on apart: 4 exchanges after one step each, then after 2, 2, 4, 4."""
    ours = Reference(seen)
    num_variances, module, path, path_rate = 0, None, None, 0.0
    for t, (x, y) in enumerate(steps):
        grads = ours.gradients(x, y)
        if t in (0, 1, 3, 7):
            grads, num_variances = ours.update_variance(grads), num_variances + 1
        ours.update_momenta(grads)
        if t in (2, 4, 5, 6, 8, 9, 10, 11):
            ours.exchange()
        if t < 12:
            ours.move(lambda *_: 1e-2, t + 1, num_variances)
            continue
        if path is None:
            module = [p.detach().clone() for p in ours.trained[0]]
            path, path_rate = [[torch.zeros_like(m) for m in m_of] for m_of in ours.m], 0.0
        rate = 1e-2 / (1 - BETAS[0] ** (t + 1))
        path_rate += rate
        for path_of, m_of in zip(path, ours.m, strict=True):
            for way, m in zip(path_of, m_of, strict=True):
                way += rate * m
        ours.move(lambda *_: 1e-2, t + 1, num_variances)
        if t in (13, 15, 19, 23):
            ours.m = [[way / path_rate for way in path_of] for path_of in path]
            ours.exchange()
            for params, m_of in zip(ours.trained, ours.m, strict=True):
                for p, a, m, v in zip(params, module or [], m_of, ours.v, strict=True):
                    root = (v / (1 - BETAS[1] ** num_variances)).sqrt() + EPS
                    p.data = a - path_rate * (m / root).view(p.shape)
            path = None
    return ours
