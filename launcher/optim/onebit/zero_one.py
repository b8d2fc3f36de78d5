"""0/1 Adam: Lu et al., https://arxiv.org/abs/2202.06009, algorithm 1 with the policies of section 6.

Up to `var_freeze_step` gradients are summed, and the variance updated, at intervals that double after every
`var_update_scaler` updates; in between, momenta are exchanged. After it ranks go apart: each steps by itself and
momenta are exchanged at intervals that double every `local_step_scaler` steps, up to `local_step_clipper`.

The paper exchanges the sum of rate times momentum since the last exchange. Here it is divided by the sum of rates
before it is compressed, not after: errors are then in units of momentum in all phases, whatever the schedule does.
"""

from __future__ import annotations

import torch

from launcher.optim.onebit.flat import OneBitFlat, ParamState, descend, move_against


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
