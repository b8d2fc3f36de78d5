"""The norm of all gradients, and what follows from it: the factor of clipping, and whether a step is skipped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.comm.groups import RankGroup
from launcher.comm.hosts import Readback
from launcher.kernels.api import DeviceScale
from launcher.zero.gradients import UnitGradients
from launcher.zero.owned_gradient import sum_of_all_squares

# Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does.
CLIP_EPSILON = 1e-6


class StepOutcome:
    """How an optimizer step went, as soon as the host knows it."""

    def __init__(self, norm: float | Readback, *, skips_overflow: bool, compared: Sequence[str] = ()) -> None:
        """norm: of all gradients before clipping; or, being copied from the device, its square, how many units differed
        between ranks before the step, and whether each of `compared` did.

        skips_overflow: a step whose norm is not finite updates nothing. compared: the labels of units.
        """
        self._norm = norm
        self.skips_overflow = skips_overflow
        self._compared = compared
        self._error: EngineError | None = None

    @property
    def is_known(self) -> bool:
        """Whether the host knows the norm: else `norm` waits for the device."""
        return not isinstance(self._norm, Readback)

    @property
    def norm(self) -> float:
        """The gradient norm before clipping. Raises: EngineError for parameters that differed between ranks."""
        if isinstance(self._norm, Readback):
            square, num_parted, *are_parted = self._norm.values()
            self._norm = math.sqrt(square) if square >= 0 else math.nan
            if num_parted:
                self._error = parted_error(self._compared, are_parted)
        if self._error is not None:
            raise self._error
        return self._norm

    @property
    def is_skipped(self) -> bool:
        """Whether nothing was updated."""
        return self.skips_overflow and not math.isfinite(self.norm)


def parted_error(labels: Sequence[str], are_parted: Sequence[float]) -> EngineError:
    """Return the error for parameters that are not the same on every rank. labels: of the units that were compared."""
    first = next((label for label, is_parted in zip(labels, are_parted, strict=False) if is_parted), "another rank")
    return EngineError(
        f"the parameters of {first} are not the same on every rank: some were written on one rank alone, or with other"
        " values, since the last step",
        hint="write the same on every rank (load_state_dict, param.copy_(...)), or on one rank within"
        " launcher.zero.GatheredParameters(params, modifier_rank=0), which sends its values to all",
    )


def sum_of_squares(gradients: list[UnitGradients], group: RankGroup) -> Tensor:
    """Return the sum of squares of this rank's share of all gradients, fp64 [1] on the device.

    On a GPU in one launch over all units; on a CPU each unit was measured as its sum arrived, while it was in the cache
    and others were in flight. After the reductions.
    """
    together = [own.unmeasured for own in gradients]
    squares = [own.square.to(group.device) for own, grads in zip(gradients, together, strict=True) if grads is None]
    unmeasured = [grad for grads in together for grad in grads or ()]
    squares.append(torch.zeros((), dtype=torch.float64, device=group.device))
    if unmeasured:
        squares.append(sum_of_all_squares(unmeasured))
    return torch.stack(squares).sum().reshape(1)


def grad_scale(norm: float, max_norm: float, loss_scale: float) -> float:
    """Return the one number that unscales and clips gradients; `norm` is that of the unscaled ones."""
    coefficient = max_norm / (norm + CLIP_EPSILON) if max_norm > 0 else 1.0
    return min(coefficient, 1.0) / loss_scale


def device_scale(square: Tensor, max_norm: float, *, skips_overflow: bool) -> DeviceScale:
    """Return what `grad_scale` returns, without a loss scale, and whether to skip, of the square of the norm.

    square: fp64 [1], on a device that the host does not wait for.
    """
    norm = square.sqrt().reshape(())
    factor = torch.ones_like(norm)
    if max_norm > 0:  # divided, as the host does: `max_norm / norm` would multiply by a reciprocal
        factor = torch.full_like(norm, max_norm).div_(norm + CLIP_EPSILON).clamp_(max=1.0)
    skip = ~torch.isfinite(norm) if skips_overflow else torch.zeros_like(norm)
    return DeviceScale(factor.float(), skip.float())
