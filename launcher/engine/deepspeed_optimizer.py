"""What scripts for DeepSpeed ask an engine's optimizer, by DeepSpeed's names; the engine itself needs none of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from launcher.config.schema import Config
from launcher.optim.api import ParamShard
from launcher.optim.scaling import LossScaler
from launcher.zero.states import UnitState
from launcher.zero.unit import FlatUnit


class DeepSpeedOptimizerNames:
    """The part of `ZeroOptimizer` that scripts for DeepSpeed know. Tensors are this rank's own, and live."""

    param_groups: list[dict[str, Any]]
    loss_scaler: LossScaler | None
    settings: Config | None
    optimizer: torch.optim.Optimizer
    _units: Sequence[FlatUnit]

    @property
    def stands_for(self) -> str:
        """The class of DeepSpeed's that scripts take this for, where it wraps none: at stage 0 in fp32."""
        settings = self.settings
        if settings is None or settings.zero_optimization.stage or settings.bf16.enabled or settings.fp16.enabled:
            return ""
        base = self.optimizer
        return str(getattr(base, "stands_for", type(base).__name__))

    def needs_scaler(self) -> bool:
        """Whether a loss must be scaled before it goes back: `engine.scale(loss)`."""
        return self.loss_scaler is not None

    @property
    def loss_scale_config(self) -> LossScaler | None:
        """What has the loss scale, `cur_scale`; None where there is none."""
        return self.loss_scaler

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each group."""
        return [list(group["params"]) for group in self.param_groups]

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """The master weights that this rank updates, 1-D, by unit; without memory where they are on disk."""
        return [unit.params.master for unit in self._units if unit.grads is not None]

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """The same, by the name of stages 1 and 2."""
        return self.fp32_partitioned_groups_flat

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """The summed gradients that the next step will see, 1-D, by group: of each parameter this rank's part.

        Empty where a sum is missing yet: after `step()`, and before the last backward of an accumulation at stages 0
        and 1. They are too large by the loss scale.
        """
        found: dict[int, list[Tensor]] = {}
        for shard, gradient in self._gradients():
            found.setdefault(shard.group, []).append(gradient)
        return found

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """Return `averaged_gradients` in fp32, by the number of the parameter in its group, without the loss scale."""
        scale = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        return {
            group: {number: gradient.float() / scale for number, gradient in enumerate(gradients)}
            for group, gradients in self.averaged_gradients.items()
        }

    def unscale_and_clip_grads(self, grad_groups_flat: Sequence[Tensor], total_norm: float | Tensor) -> None:
        """Divide gradients in place by the loss scale, and clip them to the config's `gradient_clipping`.

        For gradients that a script keeps; `engine.step()` does it by itself. total_norm: theirs, still scaled.
        """
        scale = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        limit = self.clip_grad
        norm = float(total_norm) / scale
        factor = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        torch._foreach_mul_(list(grad_groups_flat), factor / scale)

    clip_grad = 0.0  # the largest norm; 0: gradients are not clipped

    def _gradients(self) -> Iterator[tuple[ParamShard, Tensor]]:
        trained = [(unit, unit.grads) for unit in self._units if unit.grads is not None]
        for _, gradients in trained:
            gradients.finish()
        if any(gradients.state is not UnitState.REDUCED or gradients.is_incomplete for _, gradients in trained):
            return
        for unit, gradients in trained:
            with_padding = unit.is_sharded and unit.layout.is_one_even_param  # as `ds_tensor` has
            for shard in unit.shards:
                yield shard, gradients.owned_grad if with_padding else gradients.owned_grad[shard.place]
