"""1-bit Adam: Tang et al., https://arxiv.org/abs/2102.02888, algorithm 1."""

from __future__ import annotations

from launcher.optim.onebit.flat import OneBitFlat, ParamState, descend


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
