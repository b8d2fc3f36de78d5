"""Random work for kernels, and what it means that two of them agree."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from launcher.kernels.api import Adagrad, Adam, Kernel, Lamb, Lion, Rule, Sgd, Span

HALVES = (torch.bfloat16, torch.float16)
RULES: tuple[type[Rule], ...] = (Adam, Adagrad, Lion, Sgd, Lamb)
NUMELS = (0, 1, 5, 31, 64, 100, 1023, 1024, 1025, 3000)
TOLERANCE = 1e-6  # relative, of fp32


def random_rule(rng: random.Random, kind: type[Rule]) -> Rule:
    """Return a rule with hyper-parameters as users choose them, and some at their limits."""
    lr, decay = 10 ** rng.uniform(-5, 0), rng.choice([0.0, 0.01, 0.1])
    beta1, beta2 = rng.choice([0.0, 0.3, 0.9, 0.95]), rng.choice([0.9, 0.99, 0.999])
    eps, step = rng.choice([1e-8, 1e-6]), rng.choice([1, 2, 10, 1000])
    if kind is Adam:
        return Adam(lr, beta1, beta2, eps, decay, step, rng.random() < 0.5, rng.random() < 0.8)
    if kind is Adagrad:
        return Adagrad(lr, eps, decay, rng.choice([0.0, 0.1]), step)
    if kind is Lion:
        return Lion(lr, beta1, beta2, decay)
    if kind is Sgd:
        momentum, dampening = rng.choice([0.0, 0.9]), rng.choice([0.0, 0.2])
        return Sgd(lr, momentum, dampening, decay, rng.random() < 0.5, rng.random() < 0.3)
    return Lamb(lr, beta1, beta2, eps, decay, step, rng.random() < 0.8, rng.random() < 0.5, rng.uniform(0.1, 2))


def make_span(rng: random.Random, rule: Rule, numel: int, *, is_plain: bool = False) -> Span:
    """Return a span of random dtypes that starts up to seven elements into its memory; `is_plain`: fp32, no param."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))

    def array(dtype: torch.dtype) -> Tensor:
        offset = rng.randrange(8)
        return torch.randn(numel + offset, generator=generator).to(dtype)[offset:]

    def choose(*dtypes: torch.dtype) -> torch.dtype:
        return torch.float32 if is_plain else rng.choice(dtypes)

    names = () if isinstance(rule, Sgd) and not rule.momentum else rule.STATES
    state_dtype = choose(torch.float32, torch.bfloat16)
    states = tuple(array(state_dtype).abs() if name in ("exp_avg_sq", "sum") else array(state_dtype) for name in names)
    param_dtype = None if is_plain else rng.choice([None, *HALVES])
    return Span(
        rule,
        array(choose(torch.float32, torch.float32, *HALVES)),
        array(choose(torch.float32, *HALVES)),
        states,
        None if param_dtype is None else array(param_dtype),
    )


def random_spans(seed: int) -> tuple[list[Span], float]:
    """Return one to four spans of one kind of rule, each with its own, and a gradient scale.

    One in five has gradients that are not finite.
    """
    rng = random.Random(seed)
    kind = RULES[seed % len(RULES)]
    spans = [make_span(rng, random_rule(rng, kind), rng.choice(NUMELS)) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.2:
        for span in spans:
            for value in (float("inf"), float("-inf"), float("nan")):
                span.grad[rng.randrange(8) :: 97] = value
    return spans, rng.choice([1.0, 0.37, 1 / 65536])


def run(kernel: Kernel, spans: list[Span], grad_scale: float = 1.0, device: str = "cpu") -> list[Tensor]:
    """Take one step on copies; return all that came out: masters, states, params, and the norms of LAMB."""
    copies = [_copy(span, device) for span in spans]
    out = []
    if isinstance(copies[0].rule, Lamb):
        out.append(kernel.lamb_moments(copies, grad_scale))
    kernel.update(copies, grad_scale)
    for span in copies:
        out += [span.master, *span.states, *([] if span.param is None else [span.param])]
    return [tensor.cpu() for tensor in out]


def _copy(span: Span, device: str) -> Span:
    def copy(tensor: Tensor) -> Tensor:
        """Keep the place within a cache line."""
        offset = tensor.storage_offset()
        memory = torch.empty(offset + tensor.numel(), dtype=tensor.dtype, device=device)
        memory[offset:] = tensor
        return memory[offset:]

    states = tuple(copy(state) for state in span.states)
    param = None if span.param is None else copy(span.param)
    return replace(span, master=copy(span.master), grad=copy(span.grad), states=states, param=param)


def check_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Raise AssertionError unless fp32 agree to 1e-6 and 16-bit results are the same; NaN equals NaN."""
    for ours, reference in zip(found, wanted, strict=True):
        tolerance = 0.0 if reference.dtype in HALVES else TOLERANCE
        torch.testing.assert_close(ours, reference, rtol=tolerance, atol=0.0, equal_nan=True)


def check_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Raise AssertionError unless both are the same numbers, to the last place; NaN equals NaN."""
    for ours, others in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, others, rtol=0.0, atol=0.0, equal_nan=True)
