"""DeepSpeed's topologies: the axes of a mesh of ranks in an order of the script's choice.

A model may carry one; the engine's own mesh has to agree with it (`PipelineModule.check_mesh`).
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any

from launcher.base.errors import EngineError
from launcher.sharding.mesh import AXES, MeshSizes

# DeepSpeed's names of axes -> those of the mesh.
_AXIS_OF = {"pipe": "pipeline", "data": "data", "model": "tensor"}


class ProcessTopology:
    """The place of each rank along named axes; the last axis varies fastest."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        """axes: names, from the outermost. dims: their sizes. Raises: EngineError."""
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(size < 1 for size in dims):
            raise EngineError(f"a topology needs a size of at least 1 for each axis, not {list(axes)}, {list(dims)}")
        self.axes, self.dims = list(axes), list(dims)
        coordinate: Any = namedtuple  # a type made of names that are known at run time alone
        self.ProcessCoord = coordinate("ProcessCoord", axes)
        coordinates = product(*(range(size) for size in dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*place): rank for rank, place in enumerate(coordinates)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a place; every axis must be given. Raises: ValueError."""
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(f"get_rank() needs all of {self.axes}; filter_match() takes fewer")
        place = self.ProcessCoord(**coord_kwargs)
        if place not in self.mapping:
            raise ValueError(f"{coord_kwargs} is outside of {dict(zip(self.axes, self.dims, strict=True))}")
        return self.mapping[place]

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes, from the outermost."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return the place of a rank as text, such as `model_00`."""
        place = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along an axis, 0 for one that there is not."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the place of a rank, a named tuple. Raises: ValueError."""
        for place, other in self.mapping.items():
            if other == rank:
                return place
        raise ValueError(f"rank {rank} is not one of the topology's {self.world_size()}")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ along an axis alone; none for an axis that there is not."""
        if axis not in self.axes:
            return []
        position = self.axes.index(axis)
        found: dict[tuple[int, ...], list[int]] = {}
        for place, rank in self.mapping.items():
            found.setdefault(place[:position] + place[position + 1 :], []).append(rank)
        return list(found.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks at these places of the given axes."""
        return [
            rank
            for place, rank in self.mapping.items()
            if all(getattr(place, axis) == where for axis, where in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one place of an axis."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages, and in each the ranks with different samples, which are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, in each the ranks with different samples, and for each of these the ranks that share layers."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def check_topology(topology: ProcessTopology, sizes: MeshSizes) -> None:
    """Raise EngineError where a topology places ranks differently than the mesh of the config does."""
    unknown = [axis for axis in topology.axes if axis not in _AXIS_OF and topology.get_dim(axis) > 1]
    wanted = {axis: topology.get_dim(name) or 1 for name, axis in _AXIS_OF.items()}
    has = dict(zip(AXES, sizes.shape, strict=True))
    if unknown or has["sequence"] > 1 or any(has[axis] != size for axis, size in wanted.items()):
        raise EngineError(
            f"the model's topology has {_text(topology)}, and the config asks for {sizes.equation} ranks",
            where="PipelineModule(topology=...)",
            hint="make pipeline.stages, tensor_parallel.autotp_size and the number of ranks agree with it",
        )
    for rank in range(sizes.world_size):
        place = topology.get_coord(rank)
        mesh_place = dict(zip(AXES, sizes.coordinates(rank), strict=True))
        if any(getattr(place, name, 0) != mesh_place[axis] for name, axis in _AXIS_OF.items()):
            raise EngineError(
                f"the model's topology has {_text(topology)}, in this order; ranks are numbered by pipeline, data and"
                f" model: rank {rank} would have another place",
                where="PipelineModule(topology=...)",
                hint="use PipeDataParallelTopology or PipeModelDataParallelTopology, or give num_stages alone",
            )


def _text(topology: ProcessTopology) -> str:
    return " × ".join(f"{size} ({axis})" for axis, size in zip(topology.axes, topology.dims, strict=True))
