"""The optimizer object users hold: live parameter groups over sharded states."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.config.schema import Config
from launcher.optim.api import FlatOptimizer, ParamShard, saved_piece
from launcher.optim.factory import OptimizerPlan
from launcher.optim.live import LiveStates, base_optimizer
from launcher.optim.scaling import LossScaler
from launcher.sharding.layout import unsharded_numel
from launcher.zero.states import UnitState
from launcher.zero.unit import FlatUnit


class RemovableHooks:
    """The hooks that trl removes while it generates from gathered parameters, under DeepSpeed's names: there are none.

    The engine's hooks stay: they leave parameters alone that are gathered already.
    """

    def __init__(self) -> None:
        self.module = _NoParameters()  # trl resets marks on the parameters, which ours do not have
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Do nothing: the hooks are there."""


class _NoParameters(nn.Module):
    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield nothing."""
        return iter(())


class SteppingEngine(Protocol):
    """What the optimizer asks its engine to do."""

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has run since the last `step()`."""
        ...

    def step_of_optimizer(self) -> None:
        """Take the step that `optimizer.step()` asks for."""
        ...

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last optimizer step before clipping."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last optimizer step."""
        ...

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Move states to host memory."""
        ...

    def reload_states(self, non_blocking: bool) -> None:
        """Bring them back."""
        ...

    def backward(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """Compute gradients of `loss`."""
        ...


class ZeroOptimizer(torch.optim.Optimizer):
    """What `initialize()` returns as optimizer. Groups are live: a learning rate written there is used.

    A torch optimizer for everything that reads or writes groups, such as `torch.optim.lr_scheduler`. Steps are taken
    by `engine.step()`, which knows the accumulation boundary and which `step()` calls. `flat` updates this rank's
    shards; `optimizer` is the client's optimizer, or an instance of the config's class.
    """

    def __init__(
        self,
        flat: FlatOptimizer,
        plan: OptimizerPlan,
        loss_scaler: LossScaler | None = None,
        units: Sequence[FlatUnit] = (),
        *,
        max_grad_norm: float = 0.0,
        is_offloaded: bool = False,
    ) -> None:
        """loss_scaler: None where the precision needs none. units: those that `flat` updates, by index."""
        super().__init__(plan.param_groups, dict(plan.defaults))
        self.param_groups = flat.param_groups  # the client's own list, where a client brought the optimizer
        self.flat = flat
        self.clip_grad = max_grad_norm  # 0: gradients are not clipped
        shards = {
            param: shard
            for unit in units
            if unit.swap is None
            for param, shard in zip(unit.members.params, unit.shards, strict=False)  # none are frozen, or all
        }
        states = LiveStates(shards, flat, self._wait_for_update)
        self.state = states  # type: ignore[assignment]  # torch's is a defaultdict, which is a mapping
        self.optimizer = base_optimizer(plan, flat, states, is_offloaded=is_offloaded)
        self._client = plan.client
        self._units = units
        self._loss_scaler = loss_scaler
        # After it `overflow` and the states are those of the last step.
        self.wait_for_outcome: Callable[[], None] = lambda: None
        self._overflow = False
        self._find_engine: Callable[[], SteppingEngine | None] = lambda: None
        self.parameter_offload = RemovableHooks()
        self.settings: Config | None = None  # of the engine, and whether that has stages
        self.is_of_pipeline = False

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, its gradient norm being not finite. On a GPU it waits for the norm."""
        self.wait_for_outcome()
        return self._overflow

    @overflow.setter
    def overflow(self, overflow: bool) -> None:
        self._overflow = overflow

    @property
    def loss_scaler(self) -> LossScaler | None:
        """What follows the overflows of fp16, up to the last step; None: the precision needs none.

        On a GPU it waits for the norm of that step.
        """
        if self._loss_scaler is not None:
            self.wait_for_outcome()
        return self._loss_scaler

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    @property
    def cur_scale(self) -> float:
        """The loss scale, by the other name scripts for DeepSpeed read."""
        return self.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.loss_scaler is not None and self.loss_scaler.rules.is_dynamic

    def note_step(self, *, overflow: bool) -> None:
        """Remember how the engine's step went."""
        self.overflow = overflow
        if not overflow:
            # torch's schedules warn when they are stepped before an optimizer that they watch through this mark.
            for watched in (self, self._client):
                if watched is not None:
                    watched._opt_called = True  # type: ignore[attr-defined]  # torch sets it on instances

    def run_by(self, engine: SteppingEngine, settings: Config, *, is_of_pipeline: bool) -> None:
        """Have `step`, `zero_grad` and `backward` be those of `engine`, which is held weakly."""
        self._find_engine = weakref.ref(engine)
        self.settings, self.is_of_pipeline = settings, is_of_pipeline

    def _engine(self) -> SteppingEngine:
        engine = self._find_engine()
        if engine is None:
            raise EngineError(
                "the engine of this optimizer has ended", hint="keep the engine that initialize() returned"
            )
        return engine

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do what `engine.step()` does, unless that has just been called. Every rank must call it.

        closure: called first, with gradients enabled; what it returns is returned. Raises: as `engine.step()`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine().step_of_optimizer()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of backward passes that no `step()` has followed, as `engine.zero_grad()` does.

        Else do nothing: a step has dropped them, and the sum of an accumulation that steps count stays for its step.
        """
        engine = self._find_engine()
        if engine is not None and engine.has_gradients:
            engine.zero_grad(set_to_none)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Do what `engine.backward(loss)` does."""
        self._engine().backward(loss, retain_graph=retain_graph)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Do what `engine.offload_states()` does."""
        self._engine().offload_states(*args, **kwargs)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Do what `engine.reload_states()` does."""
        self._engine().reload_states(non_blocking)

    @property
    def _global_grad_norm(self) -> float:
        """`engine.get_global_grad_norm()`, and 0 before the first step: frameworks read DeepSpeed's private name."""
        return self._engine().get_global_grad_norm() or 0.0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse after construction: units are laid out once. Raises: EngineError."""
        if hasattr(self, "optimizer"):
            raise EngineError("a parameter group cannot be added to a running engine", hint="call initialize() anew")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's states, the hyper-parameters and the loss scale; see `FlatOptimizer.state_dict`.

        Where this rank has all states there are torch's `state` and `param_groups`, too: of the same tensors.
        States that are on disk, or that `engine.offload_states()` has moved, are copied; the others are live.
        """
        self._wait_for_update()
        state = self.flat.state_dict()
        for unit in self._units:
            if unit.swap is not None or unit.params.offloaded.is_offloaded:
                with unit.in_memory(writes=False):
                    state["states"].update(copy.deepcopy(self.flat.states_of_unit(unit.index)))
        if self._is_whole:
            state.update(torch.optim.Optimizer.state_dict(self))
        return state if self.loss_scaler is None else {**state, "loss_scaler": self.loss_scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()` of the same rank, world size and stage, or of others that cover its ranges.

        A state of torch's form alone will do: of whole parameters, as it is at stage 0.
        """
        self._wait_for_update()
        engine = self._find_engine()
        if engine is not None:
            engine.reload_states(False)
        if "states" not in state_dict and {"state", "param_groups"} <= set(state_dict):
            state_dict = self._of_torch(state_dict)
        states = self.flat.accept(state_dict)
        for unit in self._units:
            with unit.with_new_states():
                self.flat.load_unit(unit.index, states)
        if self.loss_scaler is not None and "loss_scaler" in state_dict:
            self.loss_scaler.load_state_dict(state_dict["loss_scaler"])

    @property
    def _is_whole(self) -> bool:
        """Whether this rank has all states in memory."""
        return all(unit.swap is None and len(unit.owned) == unit.numel for unit in self._units)

    def _of_torch(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state of torch's form in ours."""
        names = {param: name for unit in self._units for param, name in unit.names.items()}
        params = [param for group in self.param_groups for param in group["params"]]
        states = {
            names[param]: [saved_piece(range(unsharded_numel(param)), state_dict["state"].get(number, {}))]
            for number, param in enumerate(params)
            if param in names
        }
        return {**state_dict, "name": self.flat.name, "groups": state_dict["param_groups"], "states": states}

    def _wait_for_update(self) -> None:
        """Wait for updates that still run; parameters that do not have them yet do not matter here."""
        self.wait_for_outcome()
        for unit in self._units:
            if unit.params.pending is not None:
                unit.params.check_thread()  # what is waited for, or rolled back, is the training thread's
                unit.params.pending.wait()

    # ---- what scripts for DeepSpeed ask; tensors are this rank's own, and live ----

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
        self._wait_for_update()
        return [unit.params.master for unit in self._units if unit.grads is not None]

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """The same, by the name of stages 1 and 2."""
        return self.fp32_partitioned_groups_flat

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """The summed gradients that the next step will see, 1-D, by group: of each parameter this rank's part.

        Empty where a sum is missing yet: after `step()`, and before the last backward of an accumulation at stages 0
        and 1. They are too large by the loss scale. What is written into them before the step counts, also for the norm
        and for clipping, but for those on disk, which are copies. At stage 0 every rank must write the same.

        Raises: EngineError in another thread than the one that trains.
        """
        found: dict[int, list[Tensor]] = {}
        for shard, gradient in self._gradients(hands_out=True):
            found.setdefault(shard.group, []).append(gradient)
        return found

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """Return `averaged_gradients` in fp32, by the number of the parameter in its group, without the loss scale."""
        scale = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        found: dict[int, dict[int, Tensor]] = {}
        for shard, gradient in self._gradients(hands_out=False):
            of_group = found.setdefault(shard.group, {})
            of_group[len(of_group)] = gradient.float() / scale
        return found

    def unscale_and_clip_grads(self, grad_groups_flat: Sequence[Tensor], total_norm: float | Tensor) -> None:
        """Divide gradients in place by the loss scale, and clip them to the config's `gradient_clipping`.

        For gradients that a script keeps; `engine.step()` does it by itself. total_norm: theirs, still scaled.
        """
        scale = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        limit = self.clip_grad
        norm = float(total_norm) / scale
        factor = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        torch._foreach_mul_(list(grad_groups_flat), factor / scale)

    def _gradients(self, *, hands_out: bool) -> Iterator[tuple[ParamShard, Tensor]]:
        """Yield the parts of the sums. hands_out: to be kept and written, else they are for reading at once."""
        trained = [(unit, unit.grads) for unit in self._units if unit.grads is not None]
        for unit, _ in trained:
            unit.params.check_thread()
        self._wait_for_update()  # a script may write what it gets
        for _, gradients in trained:
            gradients.finish()
        if any(gradients.state is not UnitState.REDUCED or gradients.is_incomplete for _, gradients in trained):
            return
        for unit, gradients in trained:
            with_padding = unit.is_sharded and unit.layout.is_one_even_param  # as `ds_tensor` has
            owned_grad = gradients.hand_out() if hands_out else gradients.owned_grad
            for shard in unit.shards:
                yield shard, owned_grad if with_padding else owned_grad[shard.place]
