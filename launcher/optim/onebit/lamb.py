"""1-bit LAMB: Li et al., https://arxiv.org/abs/2104.06069, algorithm 1; LAMB: https://arxiv.org/abs/1904.00962."""

from __future__ import annotations

import torch
from torch import Tensor

from launcher.optim.onebit.flat import OneBitFlat, ParamState, add_square, denominator, root_of


class OneBitLamb(OneBitFlat):
    """LAMB for `freeze_step` steps; then variances and mean trust ratios stay, and momenta are exchanged.

    What a frozen trust ratio misses is how the variance changes later. It is followed by the gradient that two momenta
    imply, and the ratio is multiplied by the largest ratio of a frozen to a fresh root of the variance, within
    `factor_min` and `factor_max` and within `factor_threshold` of the factor before. Where weights decay, the factor
    counts for the share of the update that is not decay.
    """

    title = "OneBitLamb"

    @property
    def skips_reduction(self) -> bool:
        return self._num_steps >= int(self._options["freeze_step"])

    def _advance(self, active: list[ParamState]) -> None:
        if not self.skips_reduction:
            self._add_to_momentum(active)
            self._add_to_variance(active)
            for param in active:
                self._descend_in_warm_up(param)
            return
        decayed = [param.momentum * param.options["betas"][0] for param in active]
        self._add_to_momentum(active)
        self._average_momenta(active)
        for param, before in zip(active, decayed, strict=True):
            self._descend_compressed(param, before)

    def _descend_in_warm_up(self, param: ParamState) -> None:
        update = _add_decay(_adaptive(param), param)
        ratio = trust_ratio(param, update)
        mean = param.state.get("coefficient")
        beta = float(self._options["coeff_beta"])
        param.state["coefficient"] = ratio if mean is None else mean.mul(beta).add_(ratio, alpha=1 - beta)
        _move(param, update, ratio)

    def _descend_compressed(self, param: ParamState, before: Tensor) -> None:
        """before: the momentum of the step before, times beta1; overwritten."""
        state, (beta1, beta2) = param.state, param.options["betas"]
        if "exp_avg_sq_fresh" not in state:
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
        implied_grad = torch.sub(param.momentum, before, out=before).div_(1 - beta1)
        add_square(state["exp_avg_sq_fresh"], implied_grad, beta2)
        adaptive = _adaptive(param)
        adaptive_norm = torch.linalg.vector_norm(adaptive)
        update = _add_decay(adaptive, param)
        factor = self._factor(param, adaptive_norm / torch.linalg.vector_norm(update))
        state["factor"] = factor
        coefficient = state.get("coefficient", torch.ones_like(factor))  # its first gradient came after the warm-up
        _move(param, update, coefficient * factor)

    def _factor(self, param: ParamState, adaptive_share: Tensor) -> Tensor:
        """Return what the frozen trust ratio is multiplied by, scalar. adaptive_share: of the update's norm."""
        options, state = self._options, param.state
        frozen = root_of(state["exp_avg_sq"], state["variance_step"], param.options)
        fresh = root_of(state["exp_avg_sq_fresh"], state["step"], param.options)
        share = adaptive_share.nan_to_num(1.0).clamp(max=1.0)
        factor = frozen.div_(fresh).max() * share + (1.0 - share)
        factor = factor.clamp(float(options["factor_min"]), float(options["factor_max"]))
        last, threshold = state.get("factor", torch.ones_like(factor)), float(options["factor_threshold"])
        return torch.minimum(torch.maximum(factor, last * (1.0 - threshold)), last * (1.0 + threshold))


def trust_ratio(param: ParamState, update: Tensor) -> Tensor:
    """Return the ratio of the norms of a parameter and its update, within the group's bounds; 1 where one is zero."""
    weight_norm, update_norm = torch.linalg.vector_norm(param.master), torch.linalg.vector_norm(update)
    ratio = (weight_norm / update_norm).clamp(param.options["min_coeff"], param.options["max_coeff"])
    return torch.where((weight_norm > 0) & (update_norm > 0), ratio, 1.0)


def _adaptive(param: ParamState) -> Tensor:
    """Return Adam's update without the learning rate, a new tensor."""
    return torch.div(param.momentum, denominator(param.state["exp_avg_sq"], param)).mul_(param.correction)


def _add_decay(update: Tensor, param: ParamState) -> Tensor:
    return update.add_(param.master, alpha=param.options["weight_decay"])


def _move(param: ParamState, update: Tensor, coefficient: Tensor) -> None:
    param.master.addcmul_(update, coefficient, value=-param.options["lr"])
