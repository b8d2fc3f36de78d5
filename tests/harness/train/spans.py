"""Flat shards in several groups, drawn at random, to hold a kernel of `launcher.kernels` to the reference."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.kernels.api import Adagrad, Adam, Kernel, Lamb, Lion, Rule, Sgd, Span
from launcher.kernels.reference import ReferenceKernel

RULES = (Adam, Adagrad, Lion, Sgd, Lamb)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 1e-6  # relative to the number before or after the step, whichever is larger


@dataclass
class Shard:
    """Flat tensors, and the ranges of them that are spans; what lies between must not change."""

    ranges: list[tuple[int, int]]
    rules: list[Rule]
    master: Tensor
    grad: Tensor
    states: tuple[Tensor, ...]
    param: Tensor | None

    def spans(self) -> list[Span]:
        """Return the spans: views of the flat tensors."""
        return [
            Span(
                rule,
                self.master[start:stop],
                self.grad[start:stop],
                tuple(state[start:stop] for state in self.states),
                None if self.param is None else self.param[start:stop],
            )
            for (start, stop), rule in zip(self.ranges, self.rules, strict=True)
        ]

    def to(self, device: str) -> Shard:
        """Copy the tensors to `device`; they stay as far from a multiple of 16 bytes as they are."""
        copies = [tensor.to(device, copy=True) for tensor in (self.master, self.grad, *self.states)]
        param = None if self.param is None else self.param.to(device, copy=True)
        return Shard(self.ranges, self.rules, copies[0], copies[1], tuple(copies[2:]), param)

    def wide(self) -> Shard:
        """Copy what is updated to fp32: with these the reference returns what it has before it rounds."""
        states = tuple(state.to(torch.float32, copy=True) for state in self.states)
        return Shard(self.ranges, self.rules, self.master.to(torch.float32, copy=True), self.grad, states, None)


def random_rule(kind: type[Rule], draw: random.Random, has_momentum: bool) -> Rule:
    """Draw the hyper-parameters of one group. has_momentum: for SGD, of all groups alike."""
    lr, decay, eps = 10 ** draw.uniform(-4, -1), draw.choice([0.0, 0.01, 0.3]), 10 ** draw.uniform(-8, -3)
    beta1, beta2, step = (
        draw.choice([0.0, 0.4, 0.9, 0.95]),
        draw.choice([0.9, 0.99, 0.999]),
        draw.choice([1, 2, 10_000]),
    )
    if kind is Adam:
        return Adam(lr, beta1, beta2, eps, decay, step, draw.random() < 0.5, draw.random() < 0.8)
    if kind is Adagrad:
        return Adagrad(lr, eps, decay, draw.choice([0.0, 0.1]), step)
    if kind is Lion:
        return Lion(lr, beta1, beta2, decay)
    if kind is Sgd:
        momentum = draw.uniform(0.5, 0.99) if has_momentum else 0.0
        return Sgd(lr, momentum, draw.choice([0.0, 0.1]), decay, draw.random() < 0.5, draw.random() < 0.3)
    ratio = draw.uniform(0.1, 10)
    return Lamb(lr, beta1, beta2, eps, decay, step, draw.random() < 0.8, draw.random() < 0.5, ratio)


def random_shard(kind: type[Rule], seed: int, block_numel: int) -> Shard:
    """Draw lengths around whole blocks, gaps, dtypes and rules; in some shards gradients that are not finite."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ranges, numel = [], 0
    for _ in range(draw.choice([1, 1, 2, 3, 5])):
        start = numel + draw.choice([0, 0, 1, 7, 16])
        blocks, tail = draw.choice([0, 0, 0, 1, 2]), draw.choice([0, 1, draw.randrange(block_numel), block_numel - 1])
        numel = start + blocks * block_numel + tail
        ranges.append((start, numel))
    numel += draw.choice([0, 5])
    has_momentum = draw.random() < 0.8
    rules = [random_rule(kind, draw, has_momentum) for _ in ranges]
    num_states = len(kind.STATES) if has_momentum or kind is not Sgd else 0

    def normal(scale: float = 1.0) -> Tensor:
        return torch.randn(numel, generator=generator) * scale

    grad_size = 10 ** draw.uniform(-3, 1)
    grad = normal(grad_size)
    if draw.random() < 0.2 and numel:
        for bad in (float("inf"), -float("inf"), float("nan"), 1e30):
            grad[draw.randrange(numel)] = bad
    # The last state is a sum of squares, except where it is the only one and a momentum.
    states = [normal(grad_size) for _ in range(num_states)]
    if kind in (Adam, Adagrad, Lamb):
        states[-1] = states[-1].square()
    state_dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
    param_dtype = draw.choice([None, torch.bfloat16, torch.float16])
    return Shard(
        ranges,
        rules,
        normal().to(draw.choice([torch.float32, *FLOATS])),
        grad.to(draw.choice(FLOATS)),
        tuple(state.to(state_dtype) for state in states),
        None if param_dtype is None else normal().to(param_dtype),
    )


def check_update(kernel: Kernel, shard: Shard, device: str, grad_scale: float) -> None:
    """Let the reference, on the CPU, and `kernel`, on `device`, take the step; compare the whole shards."""
    truth, taken = shard.wide(), shard.to(device)
    if isinstance(shard.rules[0], Lamb):
        expected = ReferenceKernel().lamb_moments(truth.spans(), grad_scale)
        sums = kernel.lamb_moments(taken.spans(), grad_scale)
        torch.testing.assert_close(sums.cpu(), expected, rtol=TOLERANCE, atol=0, equal_nan=True)
        # The second pass reads the moments as they were rounded.
        for wide, kept, before in zip(truth.states, taken.states, shard.states, strict=True):
            check_rounded(kept, wide, before)
            wide.copy_(kept)
    ReferenceKernel().update(truth.spans(), grad_scale)
    kernel.update(taken.spans(), grad_scale)
    check_rounded(taken.master, truth.master, shard.master)
    for kept, wide, before in zip(taken.states, truth.states, shard.states, strict=True):
        check_rounded(kept, wide, before)
    if shard.param is not None and taken.param is not None:
        expected = shard.param.float()
        for start, stop in shard.ranges:
            expected[start:stop] = truth.master[start:stop]
        check_rounded(taken.param, expected, torch.zeros_like(expected), shard.master)


def check_rounded(got: Tensor, truth: Tensor, *before: Tensor) -> None:
    """Check that `got` is, to nearest even, the rounding of numbers within the tolerance of `truth`, which is fp32."""
    got = got.cpu()
    slack = TOLERANCE * torch.stack([truth, *[tensor.float() for tensor in before]]).abs().amax(0)
    low, high = (truth - slack).to(got.dtype), (truth + slack).to(got.dtype)
    is_right = ((low <= got) & (got <= high)) | (got == truth.to(got.dtype)) | (got.isnan() & truth.isnan())
    wrong = (~is_right).nonzero().flatten()[:5]
    assert not len(wrong), f"elements {wrong.tolist()}: {got[wrong].tolist()}, not {truth[wrong].tolist()}"
