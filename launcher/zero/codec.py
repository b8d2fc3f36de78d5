"""What a unit's gradients are while they travel between ranks: their type, and the factors of the average."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from launcher.comm.groups import RankGroup
from launcher.zero.stages import ZeroPolicy


class GradientCodec:
    """Turns the gradients of one unit into what a reduction sends.

    What travels is what autograd made: a 16-bit gradient of one micro-batch is sent in 16 bits, which loses nothing;
    only a sum of several micro-batches is sent in fp32. A policy may name the type that travels.
    """

    def __init__(self, policy: ZeroPolicy, group: RankGroup, num_ranks: int) -> None:
        """group: over which the gradients are reduced. num_ranks: over which they are averaged."""
        self._policy = policy
        self._group = group
        self._is_alone = group.process_group is None
        self.dtype = policy.precision.wire_dtype or policy.precision.param_dtype
        self.scale = policy.reduction.factor(num_ranks)  # of the sum, for the average
        self._encoded: Tensor | None = None  # 1-D [padded], in flight

    @property
    def exact_scale(self) -> float:
        """The factor of the average if gradients may be multiplied by it as they are taken, which rounds nothing; or 1.

        It saves a pass over the buffer. A power of two is exact in fp32 and bf16; fp16 would underflow.
        """
        is_exact = math.frexp(self.scale)[0] == 0.5
        is_wide = self._policy.precision.grad_dtype == torch.float32 and self.dtype != torch.float16
        return self.scale if is_exact and is_wide and self._policy.reduction.predivide == 1.0 else 1.0

    @property
    def sends_what_autograd_makes(self) -> bool:
        """Whether 16-bit gradients of a single backward can be collected in what is sent.

        Through the 32-bit sum they would cost two further passes. Without overlap the buffers of all units would be
        needed at once.
        """
        precision = self._policy.precision
        is_narrow = precision.wire_dtype is None and precision.param_dtype != precision.grad_dtype
        is_plain = self._policy.overlap_comm and self._policy.reduction.predivide == 1.0
        return is_narrow and is_plain and not self._is_alone

    def divide_before(self, local: Tensor, scale: float) -> float:
        """Take what the policy divides by before sending off `local`; return what is left of `scale` for the sum."""
        predivide = self._policy.reduction.predivide
        if predivide == 1.0 or self._is_alone:
            return scale
        local.mul_(1.0 / predivide)
        return scale * predivide

    def encode(self, local: Tensor, *, num_backwards: int) -> Tensor:
        """Return what travels: `local` (1-D [padded]), or a copy in another type, which lasts until `release`.

        num_backwards: whose gradients are summed in `local`.
        """
        is_lossless = num_backwards == 1 and local.dtype == torch.float32
        if self._is_alone or self.dtype == local.dtype:
            return local
        if self._policy.precision.wire_dtype is None and not is_lossless:
            return local
        self._encoded = self._group.buffers.borrow(local.numel(), self.dtype)
        return self._encoded.copy_(local)

    def release(self) -> None:
        """Give the copy back, when it has been sent and added."""
        if self._encoded is not None:
            self._group.buffers.give_back(self._encoded)
            self._encoded = None
