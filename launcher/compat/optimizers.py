"""Optimizers that scripts make themselves, by the names of DeepSpeed's implementations.

The engine takes their steps with its own kernels; used without an engine they are plain torch.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.comm.groups import is_first_rank
from launcher.config.schema import Config
from launcher.engine.optimizer import ZeroOptimizer
from launcher.optim.classes import Lamb, Lion

# What `initialize(optimizer=..., lr_scheduler=...)` takes besides objects.
DeepSpeedOptimizerCallable = Callable[[Iterable[Any]], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]


class _OrEngines(type):
    """Has the optimizer that an engine made of the config be an instance of DeepSpeed's class, too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or getattr(instance, "stands_for", None) == cls.__name__


class _Adam(torch.optim.Adam, metaclass=_OrEngines):
    """Adam with decoupled weight decay or not; `steps_of` tells the engine which."""

    def __init__(self, params: Any, is_decoupled: bool, options: dict[str, Any]) -> None:
        if not options.pop("bias_correction", True):
            raise EngineError(
                f"{type(self).__name__}(bias_correction=False) is not supported",
                hint='name the optimizer in the config: "params": {"bias_correction": false}',
            )
        super().__init__(params, decoupled_weight_decay=is_decoupled, **options)
        self.adam_w_mode = is_decoupled
        for group in self.param_groups:  # those of another optimizer say what that one does
            group.update(decoupled_weight_decay=is_decoupled, foreach=None, fused=None)

    @property
    def steps_of(self) -> type[torch.optim.Optimizer]:
        """The class of torch whose steps these are."""
        return torch.optim.AdamW if self.defaults["decoupled_weight_decay"] else torch.optim.Adam


class DeepSpeedCPUAdam(_Adam):
    """DeepSpeed's Adam on the CPU. Without an engine, states of parameters in 16 bits are in fp32, as there."""

    steps_of = _Adam.steps_of

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """fp32_optimizer_states: False keeps states in the dtype of the parameters. An engine has masters in fp32."""
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        if isinstance(model_params, list):
            _warn_of_another_optimizer(model_params)
        super().__init__(model_params, adamw_mode, {**options, "weight_decay": weight_decay, "amsgrad": amsgrad})
        self.fp32_optimizer_states = fp32_optimizer_states

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters. Raises: AssertionError for one that is not on the CPU."""
        loss = _call(closure)
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        for param in params:
            if param.device.type != "cpu":
                raise AssertionError(f"DeepSpeedCPUAdam updates parameters on the CPU, and one is on {param.device}")
        with _in_fp32(self, params if self.fp32_optimizer_states else ()):
            super().step()
        return loss

    def step_subgroup(self, subgroup_id: int, closure: Any = None) -> Any:
        """Update the one parameter that has a gradient, with the states `state[subgroup_id]`.

        Scripts give it a flat part of a model after the other. Raises: as `step()`; EngineError for several gradients.
        """
        loss = _call(closure)
        if found := self._with_gradient():
            param = found[0]
            states: dict[Any, Any] = self.state
            own = states.pop(param, None)
            if subgroup_id in states:
                states[param] = states.pop(subgroup_id)
            try:
                self.step()
            finally:
                states[subgroup_id] = states.pop(param, {})
                if own is not None:
                    states[param] = own
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, sub_group_id: int, closure: Any = None) -> Any:
        """Undo the last `step_subgroup` of these states, within rounding: the gradient must still be that step's.

        Raises: RuntimeError for states that were never stepped, or not since they were undone; EngineError for several
        gradients, and with amsgrad, which keeps no earlier maximum.
        """
        loss = _call(closure)
        states: dict[Any, Any] = self.state
        state = states.get(sub_group_id)
        if not state:
            raise RuntimeError(
                f"Cannot rollback optimizer state for sub_group_id {sub_group_id} as it has not been initialized."
            )
        if state["step"] <= 0:
            raise RuntimeError(f"Cannot rollback sub_group_id {sub_group_id}: step count is {int(state['step'])}")
        if found := self._with_gradient():
            _undo_adam(*found, state)
        return loss

    def _with_gradient(self) -> tuple[nn.Parameter, dict[str, Any]] | None:
        """Return the parameter that has a gradient, and its group. Raises: EngineError for several."""
        found = [(param, group) for group in self.param_groups for param in group["params"] if param.grad is not None]
        if len(found) > 1:
            raise EngineError(
                f"{len(found)} parameters have gradients, and a subgroup of DeepSpeedCPUAdam has the states of one",
                hint="flatten them into one parameter, or call step()",
            )
        return found[0] if found else None


@contextlib.contextmanager
def _in_fp32(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> Iterator[None]:
    """Have parameters in 16 bits, their gradients and states in fp32 within the block; they are rounded at its end."""
    kept = [(param, param.data, param.grad) for param in params if param.dtype.itemsize == 2 and param.grad is not None]
    try:
        for param, data, grad in kept:
            param.grad = None  # torch wants it in the dtype of the parameter
            param.data, param.grad = data.float(), grad.float()
            state = optimizer.state[param]  # `load_state_dict` gives it the dtype of the parameter
            state.update({name: value.float() for name, value in state.items() if isinstance(value, Tensor)})
        yield
    finally:
        for param, data, grad in kept:
            data.copy_(param.data)
            param.grad = None
            param.data, param.grad = data, grad


def _all_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _call(closure: Any) -> Any:
    """Return what a closure of `step()` returns, None without one. It may go back: gradients are enabled."""
    with torch.enable_grad():
        return None if closure is None else closure()


def _undo_adam(param: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
    """Take back one step of Adam: its formulas (Kingma and Ba 2015; Loshchilov and Hutter 2019), backwards.

    In fp32 at least: values in 16 bits come back as near as they are. `state` is changed in place.
    """
    if group["amsgrad"]:
        raise EngineError("a step with amsgrad cannot be undone", hint="leave amsgrad out")
    assert param.grad is not None
    step, lr, decay = int(state["step"]), group["lr"], group["weight_decay"]
    beta1, beta2 = group["betas"]
    wide = torch.promote_types(param.dtype, torch.float32)
    average, average_sq, gradient = (each.to(wide) for each in (state["exp_avg"], state["exp_avg_sq"], param.grad))
    denominator = average_sq.sqrt() / math.sqrt(1 - beta2**step) + group["eps"]
    before = param.to(wide) + average / denominator * (lr / (1 - beta1**step))
    if group["decoupled_weight_decay"]:
        before /= 1 - lr * decay
    else:
        gradient = gradient + decay * before
    param.copy_(before)
    state["exp_avg"].copy_((average - (1 - beta1) * gradient) / beta1)
    state["exp_avg_sq"].copy_(((average_sq - (1 - beta2) * gradient.square()) / beta2).clamp_(min=0))
    state["step"] -= 1


def _warn_of_another_optimizer(groups: list[Any]) -> None:
    """Warn where groups have options of another optimizer: accelerate makes every optimizer an Adam under offload."""
    known = inspect.signature(torch.optim.Adam).parameters
    for group in groups:
        others = [] if not isinstance(group, dict) or "betas" in group else sorted({*group} - {*known, "initial_lr"})
        if len(others) > 1 and is_first_rank():  # one may be a mark of the script's own
            get_logger().warning(
                "Adam updates the parameters in place of the optimizer whose groups have %s: accelerate does so under"
                ' offload_optimizer ("zero_force_ds_cpu_optimizer": false in the config keeps your optimizer)',
                ", ".join(others),
            )
            return


class FusedAdam(_Adam):
    """DeepSpeed's Adam on the GPU."""

    steps_of = _Adam.steps_of

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        """set_grad_none: what `zero_grad()` does without an engine, which always drops gradients."""
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, adam_w_mode, {**options, "weight_decay": weight_decay, "amsgrad": amsgrad})
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients, or fill them with zeros; default: as `set_grad_none`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad, metaclass=_OrEngines):
    """DeepSpeed's Adagrad on the CPU. The engine takes its steps; without one it is torch's."""

    steps_of = torch.optim.Adagrad

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        adamw_mode: bool = False,
    ) -> None:
        """fp32_optimizer_states: as of `DeepSpeedCPUAdam`. adamw_mode: accelerate passes False to every class.

        Raises: EngineError where either of the other two is True.
        """
        if adamw_mode or amsgrad:
            what = "amsgrad" if amsgrad else "decoupled weight decay"
            name = "amsgrad" if amsgrad else "adamw_mode"
            raise EngineError(f"Adagrad has no {what}", hint=f"leave {name} out")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states
        for group in self.param_groups:  # those of another optimizer say what that one does
            group.update(foreach=None, fused=None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters."""
        loss = _call(closure)
        with _in_fp32(self, _all_of(self) if self.fp32_optimizer_states else ()):
            super().step()
        return loss


class FusedLamb(Lamb, metaclass=_OrEngines):
    """DeepSpeed's LAMB on the GPU. The engine takes its steps; without one it is plain torch."""

    steps_of = Lamb

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        """Raises: EngineError for `amsgrad` and `max_grad_norm`."""
        if amsgrad or max_grad_norm:
            raise EngineError(
                "FusedLamb has neither amsgrad nor max_grad_norm", hint='set "gradient_clipping" in the config'
            )
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            eps_inside_sqrt=eps_inside_sqrt,
            weight_decay=weight_decay,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
        )


class DeepSpeedCPULion(Lion, metaclass=_OrEngines):
    """DeepSpeed's Lion on the CPU. The engine takes its steps; without one it is plain torch."""

    steps_of = Lion

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
        adamw_mode: bool = False,
    ) -> None:
        """fp32_optimizer_states: as of `DeepSpeedCPUAdam`. adamw_mode: accelerate passes False to every class.

        Raises: EngineError for an `adamw_mode` of True.
        """
        if adamw_mode:
            raise EngineError("adamw_mode is Adam's: Lion's weight decay is always decoupled", hint="leave it out")
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters."""
        loss = _call(closure)
        with _in_fp32(self, _all_of(self) if self.fp32_optimizer_states else ()):
            super().step()
        return loss


class FusedLion(Lion, metaclass=_OrEngines):
    """DeepSpeed's Lion on the GPU."""

    steps_of = Lion

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        """set_grad_none: what `zero_grad()` does without an engine, which always drops gradients."""
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients, or fill them with zeros; default: as `set_grad_none`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class _OneBit(torch.optim.Optimizer):
    """An optimizer that needs an engine to be made, in DeepSpeed too: frameworks list these classes by their names."""

    of_config = ""  # its type there

    def __init__(self, *_: Any, **__: Any) -> None:
        raise EngineError(
            f"{type(self).__name__} compresses what ranks send, so the engine makes it",
            hint=f'name it in the config: "optimizer": {{"type": "{self.of_config}"}}',
        )


class OnebitAdam(_OneBit):
    """1-bit Adam."""

    of_config = "OneBitAdam"


class OnebitLamb(_OneBit):
    """1-bit LAMB."""

    of_config = "OneBitLamb"


class ZeroOneAdam(_OneBit):
    """0/1 Adam."""

    of_config = "ZeroOneAdam"


# ---- Classes that scripts derive from or look for ----
# The built-in engine has one class for all stages and precisions. What DeepSpeed would have built is in the config.


_FUSED = ("Adam", "AdamW", "OneBitAdam", "ZeroOneAdam")  # types of the config that DeepSpeed updates as one buffer


class _ByConfig(type):
    """Answers `isinstance` by the config of the engine whose optimizer is asked about."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, ZeroOptimizer) or instance.settings is None:
            return False
        return issubclass(_class_of(instance, instance.settings), cls)


class DeepSpeedOptimizer(metaclass=_ByConfig):
    """Every wrapped optimizer: at stage 0 in fp32 there is none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: `initialize()` wraps optimizers. Raises: EngineError."""
        raise EngineError(
            f"{type(self).__name__} cannot be built by a script",
            hint="give the optimizer to deepspeed.initialize(), which returns it wrapped",
        )


class ZeROOptimizer(DeepSpeedOptimizer):
    """Those whose states are sharded."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # DeepSpeed's name
    """Stage 3."""


class BF16_Optimizer(ZeROOptimizer):  # DeepSpeed's name
    """Stage 1 in bf16 with `data_types.grad_accum_dtype` fp32, in device memory; stage 0 of a pipeline in bf16."""


class FP16_Optimizer(DeepSpeedOptimizer):  # DeepSpeed's name
    """Stage 0 in 16 bits, with an Adam of DeepSpeed's."""


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):  # DeepSpeed's name
    """Stage 0 in 16 bits, with another optimizer."""


class _Plain:
    """Stage 0 in fp32."""


def _class_of(optimizer: ZeroOptimizer, settings: Config) -> type:
    """Return the class that DeepSpeed would wrap an optimizer in."""
    stage = int(settings.zero_optimization.stage)
    is_bf16 = bool(settings.bf16.enabled)
    if stage == 1 and is_bf16 and settings.data_types.grad_accum_dtype == "fp32":
        is_offloaded = settings.zero_optimization.offload_optimizer.device != "none"
        return DeepSpeedZeroOptimizer if is_offloaded else BF16_Optimizer
    if stage > 0:
        return DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer
    if not is_bf16 and not settings.fp16.enabled:
        return _Plain
    if is_bf16 and optimizer.is_of_pipeline:
        return BF16_Optimizer
    return FP16_Optimizer if _is_fused(optimizer, settings) else FP16_UnfusedOptimizer


def _is_fused(optimizer: ZeroOptimizer, settings: Config) -> bool:
    if optimizer._client is not None:
        return isinstance(optimizer._client, FusedAdam)
    section = settings.optimizer
    return section is not None and section.type in _FUSED and not section.params.get("torch_adam", False)
