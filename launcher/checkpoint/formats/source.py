"""What every kind of checkpoint can be asked for: ours, and those that are imported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from launcher.sharding.layout import TensorSplit

WEIGHT = "weight"
HALVES = ("bfloat16", "float16")
# `RunState.optimizer` of a checkpoint that has states, but does not say of which class.
UNKNOWN_OPTIMIZER = "an optimizer of unknown class"


@dataclass(frozen=True)
class StoredParam:
    """One parameter of a checkpoint. Types by torch's names, such as "bfloat16"."""

    shape: tuple[int, ...]
    dtype: str  # in which the forward read it; its master may have been fp32
    is_trainable: bool = True
    group: int | None = 0  # of the optimizer; None: it was not trained
    states: Mapping[str, str] = field(default_factory=dict)  # those with a value for every element -> type
    scalars: Mapping[str, Any] = field(default_factory=dict)  # those with one value, such as `step`
    split: TensorSplit | None = None  # into parts that are stored one after another; None: it is stored row-major

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def master_dtype(self) -> str:
        """The type in which its weight is written: of a 16-bit one that is trained the fp32 master is."""
        return "float32" if self.is_trainable and self.dtype in HALVES else self.dtype


@dataclass
class RunState:
    """What all ranks of a run had in common, beside parameters and their states."""

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0
    optimizer: str | None = None  # the class whose steps are taken, such as "AdamW"; None: nothing was trained
    groups: list[dict[str, Any]] = field(default_factory=list)  # hyper-parameters, without parameters
    lr_scheduler: dict[str, Any] | None = None
    loss_scaler: dict[str, Any] | None = None
    client_state: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)  # of rank 0, by fully qualified name
    extra_state: dict[str, Any] = field(default_factory=dict)  # what modules' `get_extra_state` returned, by key
    config: dict[str, Any] = field(default_factory=dict)  # as it was given
    versions: dict[str, str] = field(default_factory=dict)


_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_DICTS = ("client_state", "buffers", "extra_state", "config", "versions")


def checked(state: RunState) -> RunState:
    """Return `state`, whose fields may come from anyone. Raises: TypeError, ValueError for a value that none can be."""
    for name in _COUNTERS:
        value = getattr(state, name)
        if type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"{name} is {value!r:.80}")
    optional = {"optimizer": str, "lr_scheduler": dict, "loss_scaler": dict}
    kinds = {**dict.fromkeys(_DICTS, dict), **optional, "groups": list}
    for name, kind in kinds.items():
        value = getattr(state, name)
        if not isinstance(value, kind) and not (value is None and name in optional):
            raise TypeError(f"{name} is no {kind.__name__}")
    if not all(isinstance(group, dict) for group in state.groups):
        raise TypeError("a group of the optimizer is not a dict")
    if not all(isinstance(buffer, Tensor) for buffer in state.buffers.values()):
        raise TypeError("a buffer is not a tensor")
    return state


class CheckpointSource(Protocol):
    """A checkpoint, whoever wrote it. Every rank opens it on its own."""

    @property
    def where(self) -> str:
        """The folder, for messages."""
        ...

    @property
    def state(self) -> RunState: ...

    @property
    def params(self) -> Mapping[str, StoredParam]:
        """Parameters by fully qualified name; tied ones are there once."""
        ...

    def read(self, key: str, name: str, start: int, out: Tensor) -> None:
        """Fill `out` with elements of a parameter, or of a state of it, in the type of `out`.

        key: "weight" (the master where there was one), or a state by name. start: first element, row-major. out: 1-D,
        in host memory. Raises: CheckpointError where it is not there, or damaged.
        """
        ...

    def private(self, rank: int, world_size: int) -> dict[str, Any]:
        """Return what belongs to one rank, as far as it is there: random numbers, the position in the data.

        world_size: of the run that reads; what depends on it is left out where it differs.
        """
        ...

    def close(self) -> None:
        """Close its files."""
        ...


def most_used_dtype(source: CheckpointSource) -> str:
    """Return the type in which most parameters were used."""
    found = [stored.dtype for stored in source.params.values()]
    return max(set(found), key=found.count, default="float32")
