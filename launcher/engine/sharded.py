"""A model laid out in units, with everything that moves them, from `initialize()` to `destroy()`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from launcher.base.errors import EngineAssertionError, EngineError
from launcher.engine.optimizer import ZeroOptimizer
from launcher.zero.gathered import unregister_outside
from launcher.zero.hooks import InstalledHooks
from launcher.zero.host_copy import HostCopy, is_in_host_memory
from launcher.zero.marks import Mark
from launcher.zero.order_watch import unwatch_order, watch_order
from launcher.zero.parameters import set_data, values_of
from launcher.zero.reducer import GradientReducer
from launcher.zero.schedule import ParameterSchedule
from launcher.zero.step import DelayedUpdate
from launcher.zero.unit import FlatUnit, unit_of


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
        _OF_MODEL.put(model, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())  # a copy of the model belongs to no engine

    def wait_for_parameters(self) -> None:
        """Wait until every parameter holds the last update that has been sent to it."""
        for unit in self.units:
            unit.params.wait()

    def synchronize_parameters(self) -> None:
        """Wait until every parameter holds the last step's update. With `delayed_update` every rank must call it."""
        if self.delayed is not None:
            self.delayed.write_back()
        self.wait_for_parameters()

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
        if self.reducer.speculative is not None:
            self.reducer.speculative.end()
        self._hooks.remove()
        for unit in self.units:
            unit.free()
        for param in self._frozen:
            param.requires_grad_(True)
        unregister_outside(self._model.parameters())
        _OF_MODEL.remove(self._model)


_OF_MODEL: Mark[ShardedModel] = Mark("sharded")


def end_engine_of(model: nn.Module) -> bool:
    """End the engine that `model` belongs to; return whether there was one. Collective.

    Raises: EngineError for a model of which only some parameters belong to another engine.
    """
    previous = _OF_MODEL.own_of(model)
    if previous is not None:
        previous.end()
    for name, param in model.named_parameters():
        if unit_of(param) is not None:
            raise EngineError(
                f"the parameter {name} belongs to the engine of another model",
                hint="train what shares parameters in one engine, or end the other one first: engine.destroy()",
            )
    return previous is not None


# ---- `engine.offload_states()` ----
# Memory of the device is free for something else between steps, such as generation by a server. What moves stays
# readable: whatever has a unit "in memory" (`FlatUnit.in_memory`), as saving and `safe_get_*` do, has it on the device
# for that long.


class StateKind(str, Enum):
    """The kinds of memory that an engine has between steps, by DeepSpeed's names."""

    optim_states = "optim_states"
    hp_params = "hp_params"  # masters; in fp32 the parameters are their own
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"  # the memory of `lp_grads`


_GRADIENTS = {StateKind.lp_grads, StateKind.contiguous_grad_buffer}


class OffloadedStates:
    """Which states of an engine are in host memory."""

    def __init__(self, units: Sequence[FlatUnit]) -> None:
        self._units = units
        self._kinds: frozenset[StateKind] = frozenset()
        # Parameters that are whole, with what they are on the device.
        self._shown: list[tuple[nn.Parameter, Tensor]] = []

    def offload(self, kinds: Collection[StateKind], *, pins_memory: bool) -> int:
        """Move these kinds, and those that have been moved before, to host memory; return the bytes that it frees.

        What is in host memory or on disk already stays. Units must not be in use: nothing is unsharded or in flight.
        Where host memory ends, everything is on the device as before, and torch's error is raised.
        """
        kinds = self._kinds.union(kinds)
        self.reload()
        try:
            num_bytes = sum(self._offload_unit(unit, kinds, pins_memory=pins_memory) for unit in self._units)
        except BaseException:
            self.reload()
            raise
        self._kinds = kinds if num_bytes else frozenset()
        return num_bytes

    def _offload_unit(self, unit: FlatUnit, kinds: Collection[StateKind], *, pins_memory: bool) -> int:
        found = _tensors_of(unit, kinds)
        if not found:
            return 0
        host_copy = HostCopy(found, pins_memory=pins_memory)
        host_copy.copy_out()
        has_values = StateKind.lp_params not in kinds
        if not has_values and not unit.is_sharded:
            self._show(unit, host_copy)
        unit.params.offloaded.keep(host_copy, has_values=has_values)
        return host_copy.num_bytes

    def reload(self) -> None:
        """Bring everything back."""
        for unit in self._units:
            unit.params.offloaded.bring_in()
        for param, value in self._shown:
            set_data(param, value)
        self._shown.clear()
        self._kinds = frozenset()

    def _show(self, unit: FlatUnit, host_copy: HostCopy) -> None:
        """Let the whole parameters of a unit be their copies in host memory: scripts may read them there."""
        for _, param in unit.params.slots():
            value = param.data
            self._shown.append((param, value))
            set_data(param, host_copy.host_view(value))

    def check_forward(self) -> None:
        """Raise EngineError where a forward would find no parameters."""
        if StateKind.lp_params in self._kinds:
            raise self._error("the parameters")

    def check_training(self) -> None:
        """Raise EngineError where a backward or a step would find no memory."""
        if self._kinds:
            raise self._error(", ".join(sorted(self._kinds)))

    def _error(self, what: str) -> EngineError:
        return EngineError(
            f"engine.offload_states() has moved {what} to host memory", hint="call engine.reload_states() before"
        )


def kinds_of(include: Collection[str] | None) -> list[StateKind]:
    """Return the kinds of `offload_states(include=...)`; None means all. Raises: EngineError for an unknown one."""
    try:
        return list(StateKind) if include is None else [StateKind(each) for each in include]
    except ValueError as error:
        raise EngineError(
            f"offload_states(include=...): {error}", hint=f"there are {', '.join(kind.value for kind in StateKind)}"
        ) from None


def check_device(device: str) -> bool:
    """Return whether there is anything to move to. Raises: EngineError for a device other than "cpu" and "none"."""
    if device not in ("cpu", "none"):
        raise EngineAssertionError(
            f"offload_states(device={str(device)!r}): states are moved to host memory only",
            hint='leave it out, or set "offload_optimizer" to "nvme" in the config',
        )
    return device == "cpu"


def _tensors_of(unit: FlatUnit, kinds: Collection[StateKind]) -> list[Tensor]:
    """Return what has these kinds of memory of a unit on the device, of a unit that is not in use."""
    params, grads = unit.params, unit.grads
    of_values = values_of(params)
    found: list[Tensor] = []
    if StateKind.optim_states in kinds:
        found += unit.state_tensors()
    if StateKind.hp_params in kinds and not any(_share_memory(params.master, each) for each in of_values):
        found.append(params.master)
    if StateKind.lp_params in kinds:
        found += of_values
    if grads is not None and not _GRADIENTS.isdisjoint(kinds):
        found += [grads.owned_grad, grads.optimizer_grad]
    return [each for each in found if each.untyped_storage().nbytes() and not is_in_host_memory(each)]


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
