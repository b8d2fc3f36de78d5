"""Pipelines in DeepSpeed's forms: `PipelineModule`, divided where it is built, and `PipelineParallelGrid`, the process
groups of a topology."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from launcher.base.errors import EngineError
from launcher.comm.groups import init_distributed, world_group
from launcher.comm.mesh import subgroup
from launcher.parallel.pipeline import module
from launcher.parallel.pipeline.topology import PipeDataParallelTopology, ProcessTopology
from launcher.parallel.pipeline.weights import PROFILE, layer_weights


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


class PipelineModule(module.PipelineModule):
    """See `launcher.PipelineModule`. With process groups and a number of stages a rank has its own layers at once.

    `initialize()` divides what could not be: no process groups yet, the stages of the config, times of layers.
    """

    def __init__(
        self,
        layers: Iterable[module.Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        *others: Any,
        **options: Any,
    ) -> None:
        """Every rank must call it with the same arguments. Raises: EngineError; ConfigError for too few layers."""
        super().__init__(layers, num_stages, topology, *others, **options)
        self._grid: PipelineParallelGrid | None = None
        if dist.is_initialized() and self.partition_method.lower() != PROFILE:
            self._divide(dist.get_rank(), dist.get_world_size())

    def _divide(self, rank: int, num_ranks: int) -> None:
        """Keep the layers of this rank's stage, unless `initialize()` would refuse the number of stages."""
        num_stages, topology = self.requested_stages, self._topology
        if num_stages is None or num_ranks % num_stages:
            return
        own = rank * num_stages // num_ranks
        if topology is None or (topology.world_size() == num_ranks and topology.get_coord(rank).pipe == own):
            self.divided_by = self.partition_method
            self.prepare(num_stages, layer_weights(self.divided_by, self.layer_facts()))
            self.assign([own])

    def forward(self, forward_input: Any, *of_stage: Any) -> Any:
        """Run this rank's layers on what the layers before return. With more arguments: `StagedModel.forward`."""
        if of_stage:
            return super().forward(forward_input, *of_stage)
        if len(self.own_stages) != 1:
            raise EngineError("the model has not been divided into stages yet", hint="call deepspeed.initialize()")
        return self.run_layers(self.own_stages[0], forward_input)

    def topology(self) -> ProcessTopology:
        """Return the topology that was given, or stages and ranks with other data.

        Raises: EngineError where the number of stages is not known yet.
        """
        if self._topology is not None:
            return self._topology
        num_stages = self.num_pipeline_stages()
        if not num_stages:
            raise EngineError(
                "the number of stages is the config's, and the model has not been divided yet",
                hint="give PipelineModule(num_stages=...), or call deepspeed.initialize() before",
            )
        init_distributed()
        return PipeDataParallelTopology(num_stages, world_group().world_size // num_stages)

    def mpu(self) -> PipelineParallelGrid:
        """Return the groups of ranks along the topology's axes. Every rank must call it."""
        if self._grid is None:
            self._grid = PipelineParallelGrid(self.topology())
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Return the number of ranks of one pipeline, 0 where neither the model nor the config has said it yet."""
        return self.num_stages // max(1, len(self.own_stages))

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage of a layer, virtual ones counted. Raises: ValueError for a layer that there is not."""
        for stage, found in enumerate(self.stages):
            if layer_idx in found.layers:
                return stage
        raise ValueError(f"there is no layer {layer_idx} in {len(self.stages)} stages")
