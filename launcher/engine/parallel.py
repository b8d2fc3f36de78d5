"""Tensor parallelism in the engine: the model is split before its units are built; ranks of one layer agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from launcher.base.errors import EngineError
from launcher.checkpoint.values.rng import restore_rng, rng_state
from launcher.comm import collectives
from launcher.comm.groups import RankGroup
from launcher.comm.hosts import node_sizes
from launcher.comm.mesh import ParallelMesh
from launcher.config.mesh import check_nodes
from launcher.config.schema import Config
from launcher.engine.inputs import fingerprint
from launcher.optim.factory import OptimizerPlan
from launcher.optim.onebit.plan import ONE_BIT
from launcher.optim.rules import COLLECTIVE
from launcher.parallel.tensor.gradient_check import check_replicated_gradients
from launcher.parallel.tensor.split import split_model
from launcher.zero.parameters import unit_params_of
from launcher.zero.unit import FlatUnit


def split_over_ranks(model: nn.Module, settings: Config, mesh: ParallelMesh) -> list[str]:
    """Split the layers of `model` over the ranks of the tensor axis; return what to say about it. Collective.

    Random numbers of ranks that share layers become those of the first of them: dropout on what each of them has whole
    must be the same. Raises: ConfigError for ranks of one layer on two nodes, EngineError for a model that cannot be
    split.
    """
    group = mesh.tensor
    if group is None:
        return []
    check_nodes(settings, mesh.sizes, node_sizes(mesh.world))
    if any(unit_params_of(param) is not None for param in model.parameters()):
        raise EngineError(
            "a model that was built within zero.Init cannot be split over tensor-parallel ranks",
            hint="build it outside of the block: initialize() shards it, too",
        )
    restore_rng(_of_first(group, rng_state(group.device)), group.device)
    report = split_model(model, group, settings.tensor_parallel)
    counts = ", ".join(f"{count} {style.value}" for style, count in report.num_layers.items())
    return [f"tensor parallel: layers split over {group.world_size} ranks: {counts}", *report.notices]


def check_optimizer(plan: OptimizerPlan | None, mesh: ParallelMesh) -> None:
    """Raise EngineError for an optimizer whose update of an element depends on other elements, or on other ranks."""
    if plan is None or (plan.kind not in COLLECTIVE and plan.name not in ONE_BIT):
        return
    hint = "use AdamW, Adagrad, Lion or SGD, or another axis"
    if mesh.tensor is not None:
        raise EngineError(
            f"{plan.name} needs whole parameters, and tensor-parallel ranks have parts of them", hint=hint
        )
    if mesh.expert is not None:
        raise EngineError(f"{plan.name} needs all ranks to have the same parameters, and experts are spread", hint=hint)


class LayerRanks:
    """What ranks that share layers must have alike, compared the first time: what differs would train, to no use."""

    def __init__(self, group: RankGroup | None) -> None:
        """group: None: each rank has whole layers."""
        self._group = group
        self._has_inputs = self._has_gradients = group is None

    def check_inputs(self, inputs: Any) -> None:
        """Raise EngineError on all ranks of a layer where their inputs differ. Collective."""
        if self._has_inputs or self._group is None:
            return
        self._has_inputs, group = True, self._group
        rows = collectives.gather_rows(group, fingerprint(inputs, group.device))
        if not bool((rows == rows[0]).all() | rows.isnan().any()):
            raise EngineError(
                f"the {group.world_size} ranks that share layers got different inputs",
                hint="ranks of one layer need the same samples: DistributedSampler(..., num_replicas="
                "engine.dp_world_size, rank=engine.get_data_parallel_rank()), or engine.deepspeed_io(dataset)",
            )

    def check_gradients(self, units: list[FlatUnit]) -> None:
        """Raise EngineError on all ranks of a layer where gradients of what each has whole differ. Collective.

        units: trained ones; the sums of their gradients are complete.
        """
        if self._has_gradients or self._group is None:
            return
        self._has_gradients = True
        names, gradients = [], []
        for unit in units:
            own = unit.grads
            assert own is not None
            if own.swap is not None:
                own.swap.bring_in()
            for slot, shared in unit.layout.slots_in(unit.owned):
                if slot.param.split is None:
                    names.append(slot.name)
                    grad = own.owned_grad[shared.start - unit.owned.start : shared.stop - unit.owned.start]
                    gradients.append(grad.clone() if own.swap is not None else grad)
            if own.swap is not None:
                own.swap.drop()
        check_replicated_gradients(names, gradients, self._group)


def _of_first(group: RankGroup, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of random numbers of the group's first rank."""
    found = [state]
    torch.distributed.broadcast_object_list(found, group=group.process_group, group_src=0)
    return found[0]
