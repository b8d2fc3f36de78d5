"""Look at, or change, sharded parameters: `GatheredParameters`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from launcher.comm.mesh import ParallelMesh
from launcher.zero.marks import Mark
from launcher.zero.parameters import UnitParameters, unit_params_of

_numbers = itertools.count()
_OUTSIDE: Mark[_Outside] = Mark("outside_of_units")


@dataclass(frozen=True)
class _Outside:
    """What is known of a parameter that is in no unit, because nothing trains it and it is whole on every rank."""

    number: int  # in one order on all ranks of the mesh's data axis
    mesh: ParallelMesh

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())  # a saved parameter belongs to no engine


def register_outside(params: Iterable[nn.Parameter], mesh: ParallelMesh) -> None:
    """Have `GatheredParameters` find parameters that are in no unit, to be called in one order by all ranks."""
    for param in params:
        _OUTSIDE.put(param, _Outside(next(_numbers), mesh))


def unregister_outside(params: Iterable[nn.Parameter]) -> None:
    """Undo `register_outside` where it was called."""
    for param in params:
        _OUTSIDE.remove(param)


class GatheredParameters:
    """Unshard parameters within a `with` block; they are sharded again at its end.

    params: a parameter or any iterable of them; None and parameters that no engine has are left alone.
    modifier_rank: the rank whose changes all ranks take over at the end; None: changes are forgotten. Every rank must
    enter and leave with the same parameters. Blocks may be nested: the outermost one shards again.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter | None] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """fwd_module: part of the signature scripts use; what a module reads is found when it runs."""
        given: list[Any] = [params] if isinstance(params, nn.Parameter) else list(params or ())
        self._modifier_rank = modifier_rank
        found: list[tuple[UnitParameters, nn.Parameter]] = []
        outside: list[tuple[_Outside, nn.Parameter]] = []
        for param in dict.fromkeys(given) if enabled else ():
            unit_params = unit_params_of(param) if param is not None else None
            if unit_params is not None:
                found.append((unit_params, param))
            elif (known := _OUTSIDE.of(param)) is not None:
                outside.append((known, param))
        # In one order on every rank, whatever that of `params` is: transformers gives sets, whose order differs.
        positions = {unit_params: unit_params.positions() for unit_params in {pair[0] for pair in found}}
        found.sort(key=lambda pair: (pair[0].number, positions[pair[0]][pair[1]]))
        self._outside = sorted(outside, key=lambda pair: pair[0].number)
        self._unit_params: dict[UnitParameters, list[nn.Parameter]] = {}
        for unit_params, param in found:
            self._unit_params.setdefault(unit_params, []).append(param)

    def __enter__(self) -> None:
        for found in self._unit_params:
            if self._modifier_rank is not None and found.pending is not None:
                found.pending.write_back()  # an update to come would be lost to the values that this block leaves
            found.start_block()
        for found in self._unit_params:
            found.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._modifier_rank is not None:
            for found, params in self._unit_params.items():
                found.broadcast(params, self._modifier_rank)
            for known, param in self._outside:
                known.mesh.data.communicator.broadcast([param.data], known.mesh.place_in_data(self._modifier_rank))
                torch.autograd.graph.increment_version(param)  # see `UnitParameters.count_write`
        for found in self._unit_params:  # without a modifier rank changes are forgotten, which is the caller's choice
            found.end_block()
