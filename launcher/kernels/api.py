"""The update protocol: what a fused optimizer kernel is given, whatever it is written in.

A rule is one optimizer's hyper-parameters in one step; a span is a run of flat elements that take that step. Formulas
are those of torch.optim, in its order of operations; LAMB's are of You et al., https://arxiv.org/abs/1904.00962.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Adam:
    """Adam, and AdamW where `is_decoupled`."""

    STATES: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int  # number of the step being taken, from 1
    is_decoupled: bool = True  # weight decay acts on the weights, not through the gradient
    corrects_bias: bool = True


@dataclass(frozen=True)
class Adagrad:
    """Adagrad."""

    STATES: ClassVar[tuple[str, ...]] = ("sum",)

    lr: float
    eps: float
    weight_decay: float
    lr_decay: float
    step: int  # from 1


@dataclass(frozen=True)
class Lion:
    """Lion: the sign of an interpolated momentum. https://arxiv.org/abs/2302.06675, algorithm 2."""

    STATES: ClassVar[tuple[str, ...]] = ("exp_avg",)

    lr: float
    beta1: float
    beta2: float
    weight_decay: float


@dataclass(frozen=True)
class Sgd:
    """SGD with momentum. Without momentum the span has no state."""

    STATES: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    is_nesterov: bool
    is_first: bool  # the momentum buffer becomes the gradient, whatever is in it


@dataclass(frozen=True)
class Lamb:
    """LAMB's second pass: the weights move along Adam's direction, `trust_ratio` times.

    The first pass is `Kernel.lamb_moments`; in between somebody who knows whole parameters turns the norms of that pass
    into trust ratios.
    """

    STATES: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int  # from 1
    corrects_bias: bool = True
    is_eps_inside_root: bool = False
    trust_ratio: float = 1.0


Rule = Adam | Adagrad | Lion | Sgd | Lamb


@dataclass(frozen=True)
class DeviceScale:
    """What gradients are multiplied by, and whether anything is updated, as the device knows it and the host does not.

    Both are fp32 tensors of no dimension, on the device of the spans.
    """

    factor: Tensor
    skip: Tensor  # 1: nothing is written, whatever the gradients are; else 0


GradScale = float | DeviceScale


@dataclass(frozen=True)
class Span:
    """A run of elements that take the same step. All tensors are 1-D, contiguous, of equal length, on one device."""

    rule: Rule
    master: Tensor  # fp32, bf16 or fp16: read as fp32, updated in place, rounded to nearest even
    grad: Tensor  # fp32, bf16 or fp16: read only
    states: tuple[Tensor, ...]  # fp32 or bf16, in the order of `rule.STATES`; updated in place
    param: Tensor | None = None  # bf16 or fp16: receives the new master, rounded to nearest even


class Kernel(Protocol):
    """One implementation. Nothing is allocated that grows with the spans."""

    @property
    def name(self) -> str:
        """What the start line and `launch report` call it, such as `C++ AVX-512`."""
        ...

    def update(self, spans: Sequence[Span], grad_scale: GradScale = 1.0) -> None:
        """Update every span from its gradient times `grad_scale`, in one pass over memory.

        With a `DeviceScale` the host waits for nothing that the device computes.

        The rules of all spans must be of one class. A gradient that is not finite is used as it is.
        """
        ...

    def lamb_moments(self, spans: Sequence[Span], grad_scale: float = 1.0) -> Tensor:
        """Update the moments of spans with `Lamb` rules, and no weights.

        Returns fp64 [num_spans, 2]: the sums of squares of the weights and of the direction, weight decay included.
        """
        ...

    def sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares of all elements, scalar fp64: inf or NaN when one of them is not finite.

        Of finite gradients it is finite: squares of fp32 are summed such that they do not overflow early.
        """
        ...

    def measure(self, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return what `sum_of_squares` does, and int64 [2] on the same device: the first element that is not finite.

        It is the index of its gradient among `grads`, and its index there; -1, -1 where all are finite. On a GPU the
        host waits for nothing.
        """
        ...
