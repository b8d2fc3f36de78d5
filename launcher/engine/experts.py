"""Expert parallelism in the engine: experts are spread before units are built; an optimizer trains those that stay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from launcher.base.errors import EngineError
from launcher.comm.mesh import ParallelMesh
from launcher.config.equations import with_experts
from launcher.config.schema import Config
from launcher.optim.factory import replace_parameters
from launcher.parallel.expert.share import spread_containers
from launcher.parallel.expert.spread import spread_experts
from launcher.parallel.expert.whole import return_whole_state
from launcher.sharding.mesh import MeshSizes
from launcher.zero.marks import is_moe_param
from launcher.zero.parameters import unit_params_of


def sizes_with_experts(sizes: MeshSizes, model: nn.Module) -> MeshSizes:
    """Return the mesh of a config, with the ranks over which layers of `model` have spread their experts.

    Raises: ConfigError for sizes that do not fit, EngineError for layers that are spread over different numbers.
    """
    found = {name: share.group.world_size for name, (_, share) in spread_containers(model).items()}
    names = {size: name for name, size in found.items()}
    if not names:
        return sizes
    (first, where), *others = names.items()
    if others or sizes.expert not in (1, first):
        other, place = others[0] if others else (sizes.expert, "expert_parallel.autoep_size")
        raise EngineError(
            f"{where} has its experts over {first} ranks, and {place} asks for {other}",
            where=where,
            hint="use one ep_size for all layers",
        )
    return with_experts(sizes if sizes.expert == 1 else MeshSizes(sizes.data), first, where)


def spread_over_ranks(
    model: nn.Module, settings: Config, mesh: ParallelMesh, optimizer: Any, model_parameters: Iterable[Any] | None
) -> tuple[list[str], Iterable[Any] | None]:
    """Spread the experts of `model` over the expert axis; return what to say of it, and the parameters that stay.

    A client's optimizer loses the parameters that only other ranks have. Collective. Raises: EngineError for a model
    whose experts cannot be spread.
    """
    if mesh.expert is None:
        return [], model_parameters
    for name, param in model.named_parameters():
        if is_moe_param(param) and unit_params_of(param) is not None:
            raise EngineError(
                "experts that were built within zero.Init cannot be spread over ranks",
                where=name,
                hint="build the model outside of the block: initialize() shards it, too",
            )
    report = spread_experts(model, mesh, settings.expert_parallel)
    return_whole_state(model, mesh.expert)
    kept = replace_parameters(optimizer, model_parameters, lambda param: [] if param in report.gone else [param])
    return [report.text], kept
