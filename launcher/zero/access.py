"""Read and write single parameters, their gradients and optimizer states, wherever they are sharded.

The `full` functions return or take full values in the parameter's own shape, in fp32: every rank must call them, in
the same order. The `local` functions act on the part of a parameter that this rank updates, 1-D, which may be empty.
Names and meaning are those of DeepSpeed's `deepspeed.utils.safe_get_full_fp32_param` and its siblings.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineAssertionError, EngineError
from launcher.sharding.layout import ParamSlot
from launcher.zero.states import ParameterState, UnitState
from launcher.zero.unit import FlatUnit, unit_of

# Returns the tensor of the owned range of a unit, 1-D [owned], or None when there is none (yet).
_Owned = Callable[[FlatUnit], Tensor | None]
# Does what must be done with a unit before its tensors are read or written.
_Prepare = Callable[[FlatUnit], None]


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return a copy of a parameter's master value; None when no engine trains it. Collective."""
    return _full(param, _master_of, FlatUnit.sync_external_writes)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return a copy of the gradient the next step will see, the mean over all ranks; None when there is none.

    Collective. Call it between `engine.backward` of the last micro-batch and `engine.step`. Sums over ranks that wait
    for the step, or for further micro-batches, are taken now.
    """
    return _full(param, _owned_grad, _complete_sums)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a copy of an optimizer state, such as `exp_avg`; None before the first step. Collective."""
    return _full(param, lambda unit: unit.optimizer_state(optim_state_key))


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite a parameter's master value and the parameter. `value` must be the same on every rank."""
    unit, slot = _trained(param)
    unit.params.wait()
    with unit.in_memory():
        _write(unit, slot, _part(unit, slot, unit.params.master), value)
        unit.params.renew_copy()
        if unit.params.state is ParameterState.UNSHARDED:
            unit.params.flat[slot.offset : slot.end].copy_(value.reshape(-1))
    with unit.params.shard_in_memory(writes=True):
        _write(unit, slot, _part(unit, slot, unit.params.shard), value)
    unit.params.count_write([slot])


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite the gradient the next step will see. `value` must be the same on every rank. Collective."""
    _set_grad(param, value, _write, _complete_sums)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Overwrite an optimizer state. `value` must be the same on every rank."""
    _set_optimizer_state(param, value, optim_state_key, _write)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return a copy of this rank's part of a parameter's master value; None when no engine trains it."""
    return _local(param, _master_of, FlatUnit.sync_external_writes)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return a copy of this rank's part of the gradient the next step will see; None when there is none.

    Raises: EngineError where its sum over ranks waits for the step: see `safe_get_full_grad`.
    """
    return _local(param, _owned_grad, _check_sums)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a copy of this rank's part of an optimizer state; None before the first step."""
    return _local(param, lambda unit: unit.optimizer_state(optim_state_key))


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite this rank's part of a parameter's master value and of its shard. Only where parameters are sharded."""
    unit, slot = _trained(param)
    if not unit.is_sharded:
        raise EngineAssertionError(
            f"{slot.name} is not sharded",
            hint="use safe_set_full_fp32_param, or stage 3 with stage3_param_persistence_threshold 0",
        )
    if unit.params.state is not ParameterState.SHARDED:
        raise EngineError(
            f"{slot.name} is unsharded: a forward that has not gone back, or a block of GatheredParameters, would keep"
            " the value of before",
            hint="call it after engine.backward or engine.step, or use safe_set_full_fp32_param",
        )
    with unit.in_memory():
        _set_local(unit, slot, _part(unit, slot, unit.params.master), value)
        unit.params.renew_copy()
    with unit.params.shard_in_memory(writes=True):
        _set_local(unit, slot, _part(unit, slot, unit.params.shard), value)
    unit.params.count_write([slot])


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite this rank's part of the gradient the next step will see."""
    _set_grad(param, value, _set_local)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Overwrite this rank's part of an optimizer state."""
    _set_optimizer_state(param, value, optim_state_key, _set_local)


# ---- writing, of all or of this rank's part ----

# Takes this rank's part of what is written, 1-D, and the value.
_Write = Callable[[FlatUnit, ParamSlot, Tensor, Tensor], None]


def _set_grad(param: nn.Parameter, value: Tensor, write: _Write, prepare: _Prepare = lambda unit: None) -> None:
    unit, slot = _trained(param, prepare)
    _check_sums(unit)
    if _owned_grad(unit) is None or unit.grads is None:
        raise _nothing(slot, "gradient", "call it between engine.backward and engine.step")
    with unit.in_memory():
        write(unit, slot, _part(unit, slot, unit.grads.widened_grad()), value)
    unit.grads.invalidate_norm()  # after the block: it may bring the optimizer's copy in, and send it out, itself


def _set_optimizer_state(param: nn.Parameter, value: Tensor, name: str, write: _Write) -> None:
    unit, slot = _trained(param)
    with unit.in_memory():
        shard = unit.shards[slot.index]
        if not shard.owned:
            return
        state = shard.state.get(name)
        if not isinstance(state, Tensor) or state.numel() != len(shard.owned):
            raise _nothing(slot, f"optimizer state {name}", "states exist after the first step")
        write(unit, slot, state.view(-1), value)


# ---- where things are ----


def _master_of(unit: FlatUnit) -> Tensor:
    return unit.params.master


def _owned_grad(unit: FlatUnit) -> Tensor | None:
    if unit.grads is None:
        return None
    unit.grads.finish()
    return unit.grads.owned_grad if unit.grads.state is UnitState.REDUCED else None


def _check_sums(unit: FlatUnit) -> None:
    if unit.grads is not None and unit.grads.is_incomplete:
        raise EngineError(
            f"the gradients of {unit.label} are not summed over all ranks yet: after the last backward another"
            " one could come before engine.step(), which sums them",
            hint="call safe_get_full_grad on every rank before: it does it too",
        )


def _complete_sums(unit: FlatUnit) -> None:
    """Do what `engine.step()` does before it looks at gradients, late ones of this unit included. Collective."""
    assert unit.grads is not None
    unit.complete_sums()
    # All ranks decide together: the reduction includes the ranks of other copies of the shards.
    states = unit.mesh.data.communicator.gather_scalars(float(unit.grads.has_late + 2 * unit.grads.has_written))
    if max(states) >= 2:
        raise EngineError(
            f"param.grad was set, of {unit.label} or another parameter in its unit, before a function that reads or"
            " writes gradients",
            hint="call launcher.zero.safe_set_full_grad(param, value) in its place",
        )
    if any(states):
        unit.grads.finish_reduction()
        unit.grads.reduce_late()
        unit.grads.finish()
        unit.grads.leave(shows=True)
    unit.group.copier.synchronize()  # the sums may be on their way to host memory


def _find(param: nn.Parameter, prepare: _Prepare) -> tuple[FlatUnit, ParamSlot] | None:
    unit = unit_of(param)
    if unit is None or unit.grads is None:
        return None
    unit.params.check_thread()
    if unit.params.pending is not None:
        unit.params.pending.wait()
    unit.group.copier.synchronize()  # a copy of the last step may still write, or read, what is going to be touched
    prepare(unit)
    return unit, unit.params.slot_of(param)


def _trained(param: nn.Parameter, prepare: _Prepare = lambda unit: None) -> tuple[FlatUnit, ParamSlot]:
    found = _find(param, prepare)
    if found is None:
        raise EngineError(
            f"a parameter of shape {tuple(param.shape)} is not trained by an engine",
            hint="pass a trainable parameter of the model given to launcher.initialize",
        )
    return found


def _nothing(slot: ParamSlot, what: str, hint: str) -> EngineError:
    return EngineError(f"{slot.name} has no {what} now", hint=hint)


def _full(param: nn.Parameter, owned_of: _Owned, prepare: _Prepare = lambda unit: None) -> Tensor | None:
    found = _find(param, prepare)
    if found is None:
        return None
    unit, slot = found
    with unit.in_memory(writes=False):
        owned = owned_of(unit)
        # A rank that owns nothing but padding has no state, and must take part in gathering that of the others.
        if not any(unit.group.communicator.gather_scalars(float(owned is not None))):
            return None
        full = unit.unsharded(torch.zeros(len(unit.owned)) if owned is None else owned.float())
    return full[slot.offset : slot.end].view(slot.shape).clone()


def _part(unit: FlatUnit, slot: ParamSlot, owned: Tensor) -> Tensor:
    """Return this rank's part of a parameter: a view of something of the unit's owned range, 1-D."""
    return owned[unit.shards[slot.index].place]


def _local(param: nn.Parameter, owned_of: _Owned, prepare: _Prepare = lambda unit: None) -> Tensor | None:
    found = _find(param, prepare)
    if found is None:
        return None
    with found[0].in_memory(writes=False):
        owned = owned_of(found[0])
        return None if owned is None else _part(*found, owned).float().clone()


def _write(unit: FlatUnit, slot: ParamSlot, part: Tensor, value: Tensor) -> None:
    if value.numel() != slot.numel:
        raise EngineError(f"{slot.name} has shape {slot.shape}, the value {tuple(value.shape)}")
    owned = unit.shards[slot.index].owned
    with torch.no_grad():
        part.copy_(value.reshape(-1)[owned.start : owned.stop])


def _set_local(unit: FlatUnit, slot: ParamSlot, part: Tensor, value: Tensor) -> None:
    if value.numel() != part.numel():
        raise EngineError(f"this rank's part of {slot.name} has {part.numel()} elements, the value {value.numel()}")
    with torch.no_grad():
        part.copy_(value.reshape(-1))
