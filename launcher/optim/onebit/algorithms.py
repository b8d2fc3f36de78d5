"""The optimizers with one-bit communication: 1-bit Adam, 1-bit LAMB, 0/1 Adam, and their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from launcher.comm.groups import RankGroup
from launcher.config.schema_params import OPTIMIZER_PARAMS
from launcher.optim.api import FlatOptimizer, ParamShard
from launcher.optim.factory import OptimizerBackend, OptimizerPlan, as_groups
from launcher.optim.onebit.flat import OneBitFlat, ParamState, add_square, denominator, descend, move_against, root_of

# ---- 0/1 Adam: Lu et al., https://arxiv.org/abs/2202.06009, algorithm 1 with the policies of section 6 ----
# Up to `var_freeze_step` gradients are summed, and the variance updated, at intervals that double after every
# `var_update_scaler` updates; in between, momenta are exchanged. After it ranks go apart: each steps by itself and
# momenta are exchanged at intervals that double every `local_step_scaler` steps, up to `local_step_clipper`.
#
# The paper exchanges the sum of rate times momentum since the last exchange. Here it is divided by the sum of rates
# before it is compressed, not after: errors are then in units of momentum in all phases, whatever the schedule does.


def is_variance_step(step: int, scaler: int) -> bool:
    """Whether `step` (from 0) updates the variance: intervals of 1, 2, 4, ... steps, `scaler` of each."""
    interval = 1 << ((step // scaler + 1).bit_length() - 1)  # its first one begins at step scaler * (interval - 1)
    return (step - scaler * (interval - 1)) % interval == 0


def is_exchange_step(step: int, scaler: int, clipper: int) -> bool:
    """Whether ranks exchange after local step `step` (from 0, counted from `var_freeze_step`)."""
    interval = min(clipper, 1 << min(step // scaler, clipper.bit_length()))
    return (step + 1) % interval == 0


class ZeroOneAdam(OneBitFlat):
    """AdamW whose variance is updated ever more rarely, then never, and whose ranks exchange momenta ever more rarely.

    Between exchanges parameters differ from rank to rank; after each they are the same again, to the bit.
    """

    title = "ZeroOneAdam"
    keeps_ranks_alike = False

    @property
    def skips_reduction(self) -> bool:
        if self._num_steps >= int(self._options["var_freeze_step"]):
            return True
        return not is_variance_step(self._num_steps, int(self._options["var_update_scaler"]))

    @property
    def is_apart(self) -> bool:
        """Whether ranks have stepped by themselves since the last exchange."""
        return any(param.state.get("path_steps") for param in self._params)

    def _advance(self, active: list[ParamState]) -> None:
        self._add_to_momentum(active)
        if not self.skips_reduction:
            self._add_to_variance(active)
        elif self._exchanges() and not self.is_apart:
            self._average_momenta(active)
        else:
            for param in active:
                _step_apart(param)
            if self._exchanges():
                self._meet()
            return
        for param in active:
            descend(param)

    def _exchanges(self) -> bool:
        options = self._options
        local_step = self._num_steps - int(options["var_freeze_step"])
        scaler, clipper = int(options["local_step_scaler"]), int(options["local_step_clipper"])
        return local_step < 0 or is_exchange_step(local_step, scaler, clipper)

    def _meet(self) -> None:
        """Replace the paths of the ranks since they went apart by the compressed mean of these. Collective."""
        moved = [param for param in self._params if param.state.get("path_rate")]  # not while the rate is 0
        for param in moved:
            torch.div(param.state["path"], param.state["path_rate"], out=param.momentum)
        self._average_momenta(moved)
        for param in moved:
            state = param.state
            torch.mul(state["module"], state["path_decay"], out=param.master)
            move_against(param, state["path_rate"])
            state.update(path_steps=0, path_rate=0.0)


def _step_apart(param: ParamState) -> None:
    """Step by this rank's own momentum, and remember from where and along which way."""
    state = param.state
    if not state.get("path_steps"):
        state.setdefault("module", torch.empty_like(param.master)).copy_(param.master)
        state.setdefault("path", torch.empty_like(param.master)).zero_()
        state.update(path_steps=0, path_rate=0.0, path_decay=1.0)
    state["path"].add_(param.momentum, alpha=param.rate)
    state["path_rate"] += param.rate
    state["path_decay"] *= 1 - param.options["lr"] * param.options["weight_decay"]
    state["path_steps"] += 1
    descend(param)


# ---- 1-bit LAMB: Li et al., https://arxiv.org/abs/2104.06069, algorithm 1; LAMB: https://arxiv.org/abs/1904.00962 ----


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


# ---- 1-bit Adam: Tang et al., https://arxiv.org/abs/2102.02888, algorithm 1 ----


class OneBitAdam(OneBitFlat):
    """AdamW for `freeze_step` steps; then the variance stays and momenta are exchanged."""

    title = "OneBitAdam"

    @property
    def skips_reduction(self) -> bool:
        return self._num_steps >= int(self._options["freeze_step"])

    def _advance(self, active: list[ParamState]) -> None:
        self._add_to_momentum(active)
        if self.skips_reduction:
            self._average_momenta(active)
        else:
            self._add_to_variance(active)
        for param in active:
            descend(param)


# ---- By name ----


ONE_BIT: dict[str, type[OneBitFlat]] = {kind.title: kind for kind in (OneBitAdam, ZeroOneAdam, OneBitLamb)}

# What a parameter group may set for itself; the rest of the params are about all ranks and parameters together.
_GROUP_OPTIONS = ("lr", "betas", "eps", "weight_decay", "bias_correction", "eps_inside_sqrt", "max_coeff", "min_coeff")


def one_bit_plan(
    name: str,
    params: Mapping[str, Any],
    model: nn.Module,
    model_parameters: Iterable[Any] | None,
    group: RankGroup,
) -> OptimizerPlan:
    """Plan the optimizer `name` of `ONE_BIT`, whose ranks are those of `group`.

    model_parameters: parameters or groups of them; None: all trainable parameters of `model`.
    """
    options = dict(OPTIMIZER_PARAMS[name].model_validate(dict(params)))
    defaults = {key: options[key] for key in _GROUP_OPTIONS if key in options}
    given = as_groups(model.parameters() if model_parameters is None else model_parameters)
    groups = [{**defaults, **group_options} for group_options in given]

    def build(shards: list[ParamShard], _means: OptimizerBackend) -> FlatOptimizer:
        return ONE_BIT[name](shards, param_groups=groups, group=group, options=options)

    return OptimizerPlan(name, groups, defaults, build)
