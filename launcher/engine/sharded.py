"""A model laid out in units, with everything that moves them, from `initialize()` to `destroy()`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from launcher.base.errors import EngineError
from launcher.engine.offloaded import OffloadedStates
from launcher.engine.optimizer import ZeroOptimizer
from launcher.zero.gathered import unregister_outside
from launcher.zero.hooks import InstalledHooks
from launcher.zero.order_watch import unwatch_order, watch_order
from launcher.zero.reducer import GradientReducer
from launcher.zero.schedule import ParameterSchedule
from launcher.zero.step import DelayedUpdate
from launcher.zero.unit import FlatUnit, unit_of

_OF_MODEL = "_launch_sharded"


class ShardedModel:
    """What one engine has made of a model. The model holds it, and lets it go at the latest when it goes itself."""

    def __init__(
        self,
        model: nn.Module,
        units: list[FlatUnit],
        reducer: GradientReducer,
        schedule: ParameterSchedule,
        hooks: InstalledHooks,
        optimizer: ZeroOptimizer | None = None,
        delayed: DelayedUpdate | None = None,
    ) -> None:
        """optimizer: None for inference only. delayed: None where a step has ended when `step()` returns."""
        self._model = model
        self.units = units
        self.reducer = reducer
        self.schedule = schedule
        self._hooks = hooks
        self.optimizer = optimizer
        self.delayed = delayed
        self.offloaded = OffloadedStates(units)
        watch_order(reducer.order, reducer.group)
        self.has_ended = False
        self._frozen: list[nn.Parameter] = []
        model.__dict__[_OF_MODEL] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())  # a copy of the model belongs to no engine

    def remove_at_end(self, handle: RemovableHandle) -> None:
        """Remove a further hook of the model when the engine ends."""
        self._hooks.handles.append(handle)

    def thaw_at_end(self, params: list[nn.Parameter]) -> None:
        """Let frozen parameters get gradients again when the engine ends: the next one may train them."""
        self._frozen = params

    def end(self) -> None:
        """Give the model back: unsharded parameters are ordinary ones again, with the last step's values. Collective.

        Sharded ones stay sharded: `GatheredParameters` and another `initialize()` unshard them. The second call does
        nothing.
        """
        if self.has_ended:
            return
        self.has_ended = True
        self.offloaded.reload()
        unwatch_order(self.reducer.order)
        self.schedule.reset()
        self.reducer.wait()
        self.reducer.withdraw()
        if self.delayed is not None:
            self.delayed.end()
        self._hooks.remove()
        for unit in self.units:
            unit.free()
        for param in self._frozen:
            param.requires_grad_(True)
        unregister_outside(self._model.parameters())
        self._model.__dict__.pop(_OF_MODEL, None)


def end_engine_of(model: nn.Module) -> bool:
    """End the engine that `model` belongs to; return whether there was one. Collective.

    Raises: EngineError for a model of which only some parameters belong to another engine.
    """
    previous: ShardedModel | None = model.__dict__.get(_OF_MODEL)
    if previous is not None:
        previous.end()
    for name, param in model.named_parameters():
        if unit_of(param) is not None:
            raise EngineError(
                f"the parameter {name} belongs to the engine of another model",
                hint="train what shares parameters in one engine, or end the other one first: engine.destroy()",
            )
    return previous is not None
