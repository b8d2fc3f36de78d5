"""Where the elements of a parameter are: in one tensor, or in one of every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from launcher.checkpoint.formats.source import StoredParam
from launcher.checkpoint.formats.torch_file import FileTensor, plain


@dataclass(frozen=True)
class Place:
    """How ranks' tensors hold a parameter: each has `part` elements of a sequence in which the parameter begins at
    `first`, from its element `base` on.
    """

    tensor: Callable[[str, int], FileTensor]  # of a key ("weight" or a state's name) and a rank
    part: int
    first: int = 0
    base: int = 0

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield what elements [start, stop) of the parameter consist of: rank, first element there, start and stop."""
        while start < stop:
            rank, within = divmod(self.first + start, self.part)
            end = min(stop, start + self.part - within)
            yield rank, self.base + within, start, end
            start = end


@dataclass(frozen=True)
class Found:
    """A parameter of a checkpoint, and where it is."""

    stored: StoredParam
    place: Place


@dataclass(frozen=True)
class Contents:
    """What a stage's files hold, whatever the stage."""

    params: dict[str, Found]
    groups: list[Mapping[str, Any]]  # of the optimizer
    tied: dict[str, str]  # other names of parameters -> the first
    scaler: Any = None


@dataclass(frozen=True)
class States:
    """The states of a parameter's optimizer: by element and in common."""

    by_element: dict[str, str] = field(default_factory=dict)  # name -> dtype
    scalars: dict[str, Any] = field(default_factory=dict)


def in_one(tensor: FileTensor) -> Place:
    """Return the place of a weight that one tensor holds."""
    return Place(lambda _key, _rank: tensor, max(1, tensor.numel))


def states_of(state: Mapping[str, Any], numel: int, group: Mapping[str, Any]) -> States:
    """Tell apart what an optimizer keeps for each of at least `numel` elements and what for all of them together."""
    by_element = {
        name: dtype_name(value.dtype)
        for name, value in state.items()
        if isinstance(value, FileTensor) and value.shape and value.numel >= numel
    }
    scalars = {name: plain(value) for name, value in state.items() if name not in by_element}
    if by_element and "step" not in scalars and "step" in group:  # older fused optimizers count for a group
        scalars["step"] = plain(group["step"])
    if "step" in scalars:
        scalars["step"] = torch.tensor(float(scalars["step"]))  # as torch's optimizers have it
    return States(by_element, scalars)


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name without the module."""
    return str(dtype).removeprefix("torch.")
