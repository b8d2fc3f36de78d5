"""Optimizer states that travel: pieces of parameters by name, cut anywhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import EngineError


class LiveState:
    """Marks what a client's optimizer shows as `state` while an engine takes its steps: no steps of its own."""


def options_of(group: Mapping[str, Any], *, copies: bool = False) -> dict[str, Any]:
    """Return the hyper-parameters of a group; what is left out stays as the wrapped optimizer has it.

    copies: of their values too, some of which may be tensors.
    """
    options = {key: value for key, value in group.items() if key not in ("params", "fused", "foreach")}
    return copy.deepcopy(options) if copies else options


def check_state(state: Mapping[str, Any], name: str, num_groups: int) -> None:
    """Raises: EngineError for the state of another optimizer, or of other groups."""
    found, expected = (state["name"], len(state["groups"])), (name, num_groups)
    if found != expected:
        shown = ["{} with {} groups".format(*facts) for facts in (found, expected)]
        raise EngineError(f"the optimizer state is of {shown[0]}, this run has {shown[1]}")


def saved_piece(owned: range, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of elements `owned` of a parameter as a piece: by element 1-D, whatever its shape was."""
    flat = {name: value.view(-1) if _is_by_element(value, len(owned)) else value for name, value in state.items()}
    return {"start": owned.start, "stop": owned.stop, "state": flat}


def state_of(name: str, owned: range, states: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the state of elements `owned` of a parameter, put together from pieces of it.

    What all elements share is taken from the first piece. states: parameter name -> pieces, which may overlap.
    Raises: EngineError where they leave out an element.
    """
    found: list[dict[str, Any]] = []
    reached = owned.start
    for piece in sorted(states.get(name, ()), key=lambda piece: int(piece["start"])):
        if piece["start"] <= reached < min(piece["stop"], owned.stop):
            stop = min(piece["stop"], owned.stop)
            found.append(_cut(piece, slice(reached - piece["start"], stop - piece["start"])))
            reached = stop
    if reached < owned.stop:
        raise EngineError(
            f"the optimizer state has nothing of elements {reached} to {owned.stop} of {name}",
            hint="load the state that this rank saved with as many ranks at the same stage, or the pieces of all ranks",
        )
    if len(found) == 1:
        return found[0]
    return {
        key: torch.cat([each[key] for each in found]) if isinstance(value, Tensor) and value.dim() > 0 else value
        for key, value in found[0].items()
    }


def _cut(piece: Mapping[str, Any], part: slice) -> dict[str, Any]:
    numel = piece["stop"] - piece["start"]
    return {name: value[part] if _is_by_element(value, numel) else value for name, value in piece["state"].items()}


def _is_by_element(value: Any, numel: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == numel
