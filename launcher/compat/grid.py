"""A topology with its process groups: `PipelineParallelGrid` of `deepspeed.runtime.pipe.topology`."""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup

from launcher.base.errors import EngineError
from launcher.comm.groups import init_distributed, world_group
from launcher.comm.mesh import subgroup
from launcher.parallel.pipeline.topology import PipeDataParallelTopology, ProcessTopology


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, ascending; of 1 none. Raises: ValueError below 1."""
    if number < 1:
        raise ValueError(f"{number} has no prime factors: give a number of at least 1")
    factors, candidate = [], 2
    while number > 1:
        while number % candidate == 0:
            factors.append(candidate)
            number //= candidate
        candidate += 1
    return factors


class PipelineParallelGrid:
    """The groups of ranks along the axes of a topology, with the methods of an `mpu`."""

    def __init__(self, topology: ProcessTopology | None = None, process_group: ProcessGroup | None = None) -> None:
        """topology: of all ranks; None: stages and data, each about the square root of the ranks.

        Every rank must call it. Raises: EngineError for a topology of another number of ranks, and for process_group.
        """
        if process_group is not None:
            raise EngineError("PipelineParallelGrid(process_group=...) is not supported", hint="it is of all ranks")
        init_distributed()
        world = world_group()
        self.global_rank, self.world_size = world.rank, world.world_size
        self._topo = topology or _about_square(self.world_size)
        if not self._is_grid_valid():
            raise EngineError(
                f"the topology has {self._topo.world_size()} ranks, the job {self.world_size}",
                where="PipelineParallelGrid(topology=...)",
                hint="make the product of its dimensions the number of ranks",
            )
        self.pipe_parallel_size, self.data_parallel_size, self.model_parallel_size = (
            max(self._topo.get_dim(axis), 1) for axis in ("pipe", "data", "model")
        )
        self.slice_parallel_size = self.model_parallel_size
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1
        self.dp_groups, self.pipe_groups, self.model_groups = (self._along(axis) for axis in ("data", "pipe", "model"))
        same_data = [sorted(self._topo.filter_match(data=place)) for place in range(self._topo.get_dim("data"))]
        models = same_data or [list(range(self.world_size))]
        self.dp_group, self.dp_proc_group = self._own(self.dp_groups, "data")
        self.pp_group, self.pp_proc_group = self._own(self.pipe_groups, "pipe")
        self.slice_group, self.slice_proc_group = self._own(self.model_groups, "model")
        of_model, self.ds_model_proc_group = self._own(models, "one model")
        self.ds_model_world_size, self.ds_model_rank = len(of_model), of_model.index(self.global_rank)

    def _along(self, axis: str) -> list[list[int]]:
        return self._topo.get_axis_comm_lists(axis) or [[rank] for rank in range(self.world_size)]

    def _own(self, groups: list[list[int]], purpose: str) -> tuple[list[int], ProcessGroup]:
        """Return this rank's group, as ranks and as process group. Collective."""
        own = next(ranks for ranks in groups if self.global_rank in ranks)
        return own, subgroup(groups, f"grid, {purpose}")

    def _is_grid_valid(self) -> bool:
        return self._topo.world_size() == self.world_size

    def _place(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of a stage at this rank's place along the other axes, or at the given ones."""
        place: Any = self._topo.get_coord(self.global_rank)
        return self._topo.get_rank(**place._replace(pipe=stage_id, **kwargs)._asdict())

    def get_global_rank(self) -> int:
        """Return this rank."""
        return self.global_rank

    # ---- along the stages ----

    def get_stage_id(self) -> int:
        """Return this rank's stage."""
        return self._place("pipe")

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipe_parallel_size

    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_pipe_parallel_group(self) -> ProcessGroup:
        """Return the ranks of one pipeline."""
        return self.pp_proc_group

    # ---- ranks with other data ----

    def get_data_parallel_id(self) -> int:
        """Return this rank's place among those with other data."""
        return self._place("data")

    get_data_parallel_rank = get_data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Return how many ranks have other data."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> ProcessGroup:
        """Return the ranks of one stage with other data."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return these as numbers."""
        return self.dp_group

    # ---- ranks with the same data ----

    def get_model_parallel_rank(self) -> int:
        """Return this rank's place among those that have the whole model together."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """Return how many these are."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> ProcessGroup:
        """Return these."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """Return this rank's place among those that share layers."""
        return self._place("model")

    get_tensor_model_parallel_rank = get_slice_parallel_rank

    def get_slice_parallel_world_size(self) -> int:
        """Return how many these are."""
        return self.slice_parallel_size

    get_tensor_model_parallel_world_size = get_slice_parallel_world_size

    def get_slice_parallel_group(self) -> ProcessGroup:
        """Return these."""
        return self.slice_proc_group


def _about_square(num_ranks: int) -> ProcessTopology:
    stages = data = 1
    for index, prime in enumerate(_prime_factors(num_ranks)):
        stages, data = (stages * prime, data) if index % 2 == 0 else (stages, data * prime)
    return PipeDataParallelTopology(num_pp=stages, num_dp=data)
