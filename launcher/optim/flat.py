"""Any elementwise torch optimizer over shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.kernels.api import DeviceScale, GradScale
from launcher.optim.api import FlatOptimizer, ParamShard, is_same_memory, options_of
from launcher.optim.catalog import kernel_of, ready_fused_sgd
from launcher.optim.rules import check_torch_steps


class TorchFlat(FlatOptimizer):
    """One torch optimizer whose parameters are the shards.

    Where ranks own whole parameters they have their own shapes, for optimizers that look at them; else they are flat.
    It updates all units at once: some classes keep counters in their groups.
    """

    def __init__(
        self,
        name: str,
        shards: Sequence[ParamShard],
        param_groups: list[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    ) -> None:
        """param_groups: the user's groups, read before every step; make: from groups of shards to an optimizer."""
        super().__init__(name, shards, param_groups)
        self._params = {shard: _param_of(shard) for shard in shards if shard.owned}
        groups = [{**group, "params": []} for group in param_groups]
        for shard, param in self._params.items():
            groups[shard.group]["params"].append(param)
        self._inner = make(groups)
        self._note_states(self._params)

    @property
    def label(self) -> str:
        return f"{self.name}[{kernel_of(self._inner)}]"

    @property
    def takes_device_scale(self) -> bool:
        """Whether the scale may be known to the device only: the kernels of fused Adam and AdamW read it themselves."""
        is_adam = type(self._inner) in (torch.optim.Adam, torch.optim.AdamW)
        return is_adam and all(group.get("fused") for group in self._inner.param_groups if group["params"])

    def step(self, grad_scale: GradScale = 1.0, unused: Collection[str] = ()) -> None:
        """Update every shard from its gradient times `grad_scale`, except those of `unused` parameters.

        Raises: EngineError for an option set since, that the class does not know.
        """
        if isinstance(grad_scale, DeviceScale):
            # What `torch.amp.GradScaler` hands to a fused kernel: it divides by its scale, and may find an overflow.
            self._inner.grad_scale, self._inner.found_inf = grad_scale.factor.reciprocal(), grad_scale.skip  # type: ignore[attr-defined]
        elif grad_scale != 1.0 and self._params:
            torch._foreach_mul_([shard.grad for shard in self._params], grad_scale)
        try:
            self._step(unused)
        finally:
            for name in ("grad_scale", "found_inf"):
                self._inner.__dict__.pop(name, None)

    def take_back(self) -> None:
        """Do nothing: in a step that is skipped the fused kernel takes its counters back itself, on the device."""

    def _step(self, unused: Collection[str]) -> None:
        taking = {shard: param for shard, param in self._params.items() if shard.name not in unused}
        for shard, param in taking.items():
            param.grad = shard.grad.view(param.shape)
        check_torch_steps(type(self._inner), self.param_groups)
        self._copy_options(self.param_groups, self._inner.param_groups)
        if "grad_scale" in self._inner.__dict__ and not self.takes_device_scale:
            raise EngineError(
                f"fused {self.name} was asked for another kernel after initialize()",
                hint='set "fused" or "foreach" in the optimizer\'s groups before initialize()',
            )
        if type(self._inner) is torch.optim.SGD:
            ready_fused_sgd(self._inner)
        type(self._inner).step(self._inner)
        self._copy_options(self._inner.param_groups, self.param_groups)
        for param in taking.values():
            param.grad = None
        self._note_states(taking)

    @staticmethod
    def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for given, taken in zip(source, target, strict=True):
            taken.update(options_of(given))

    def _note_states(self, params: Mapping[ParamShard, Tensor]) -> None:
        """Have each shard's state and that of the wrapped optimizer be one dict."""
        for shard, param in params.items():
            state = self._inner.state[param]
            if state is not shard.state:
                shard.state.clear()
                shard.state.update(state)
                self._inner.state[param] = shard.state

    def load_state(self, shard: ParamShard, state: Mapping[str, Any]) -> None:
        """Replace the state of a shard by a copy of `state`, of the same elements."""
        param = self._params[shard]
        is_fused = bool(self._inner.param_groups[shard.group].get("fused"))
        placed = {name: _placed(value, shard.state.get(name), param, is_fused) for name, value in state.items()}
        shard.state.clear()
        shard.state.update(placed)


def _placed(value: Any, kept: Any, param: Tensor, is_fused: bool) -> Any:
    """Return a copy of a state's value where the optimizer expects it: counters beside a fused kernel, else on CPU.

    kept: the state there is, or None; its own memory is not copied.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(kept, Tensor) and kept.dim() > 0 and is_same_memory(kept, value):
        return kept
    if value.dim() == 0:
        return value.to(param.device if is_fused else "cpu").clone()
    value = value.to(param.device, copy=True)
    return value.view(param.shape) if value.numel() == param.numel() else value


def _param_of(shard: ParamShard) -> Tensor:
    master = shard.master.detach()
    return master if shard.is_split or not shard.shape else master.view(shard.shape)
