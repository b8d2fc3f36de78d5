"""Random states of a process: a run that has them again draws the numbers it would have drawn."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from launcher.activation.rng import get_cuda_rng_tracker
from launcher.base.errors import CheckpointError
from launcher.base.log import get_logger
from launcher.comm.device import accelerator_type, device_module

_MT19937_WORDS = 624


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators that training draws from, as `tree.encode` takes them.

    They are those of Python, of numpy where its random numbers are loaded, of torch's CPU, of `device`, and of
    `launcher.checkpointing.get_cuda_rng_tracker()`. Tensors of the result are the caller's own.
    """
    state: dict[str, Any] = {"python": _python_state(), "torch": torch.get_rng_state()}
    if (numpy_state := _numpy_state()) is not None:
        state["numpy"] = numpy_state
    if device.type != "cpu":
        state["device"] = {"type": device.type, "state": device_module(device).get_rng_state(device)}
    if tracked := get_cuda_rng_tracker().get_states():
        states = {name: tracked_state.clone() for name, tracked_state in tracked.items()}
        state["tracked"] = {"type": _tracked_type(), "states": states}
    return state


def restore_rng(state: dict[str, Any], device: torch.device) -> tuple[str, ...]:
    """Set the states that `rng_state` returned. Returns the names of those this machine has no generator for.

    Those are left out: a GPU's on another kind of device, numpy's where it is not installed.
    Raises: CheckpointError for a state that no generator accepts; those before it are set.
    """
    setters: dict[str, Callable[[Any], bool]] = {
        "python": _set_python,
        "numpy": _set_numpy,
        "torch": _set_torch,
        "device": lambda part: _set_device(part, device),
        "tracked": _set_tracked,
    }
    if not isinstance(state, dict):
        raise CheckpointError("the random states are damaged", hint="load another checkpoint")
    left_out = []
    for name, setter in setters.items():
        if name not in state:
            continue
        try:
            is_set = setter(state[name])
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            hint = "load another checkpoint"
            raise CheckpointError(f"the random state {name!r} is damaged ({error})", hint=hint) from None
        if not is_set:
            left_out.append(name)
            get_logger().debug("the checkpoint's random state %r has no generator here and is left out", name)
    return tuple(left_out)


def _python_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    return {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}


def _set_python(part: Any) -> bool:
    random.setstate((part["version"], tuple(part["words"].tolist()), part["gauss"]))
    return True


def _numpy_state() -> dict[str, Any] | None:
    """Return None where nothing has drawn from numpy, or where the script gave it another kind of generator."""
    module = sys.modules.get("numpy.random")
    state = None if module is None else module.get_state(legacy=False)
    if state is None or state["bit_generator"] != "MT19937":
        return None
    words = torch.tensor(state["state"]["key"].tolist(), dtype=torch.int64)
    return {"words": words, "position": state["state"]["pos"], "has_gauss": state["has_gauss"], "gauss": state["gauss"]}


def _set_numpy(part: Any) -> bool:
    try:
        import numpy
    except ImportError:
        return False
    words, position = part["words"].tolist(), int(part["position"])
    # numpy does not look at the position, and would read memory beyond the words.
    if len(words) != _MT19937_WORDS or not 0 <= position <= _MT19937_WORDS:
        raise ValueError("its length or position is wrong")
    key = numpy.array(words, dtype=numpy.uint32)
    numpy.random.set_state(("MT19937", key, position, int(part["has_gauss"]), float(part["gauss"])))
    return True


def _set_torch(part: Any) -> bool:
    torch.set_rng_state(part)
    return True


def _set_device(part: Any, device: torch.device) -> bool:
    if part["type"] != device.type:
        return False
    device_module(device).set_rng_state(part["state"], device)
    return True


def _tracked_type() -> str:
    return accelerator_type() or "cpu"


def _set_tracked(part: Any) -> bool:
    if part["type"] != _tracked_type():
        return False
    states: dict[str, Tensor] = part["states"]
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in states.items()):
        raise TypeError("a state is not a tensor")
    tracker = get_cuda_rng_tracker()
    tracker.set_states({**tracker.get_states(), **states})
    return True
