"""A model before its units are built: split over tensor-parallel ranks, its experts sharded.

What ranks of one layer must have alike is compared while it trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.checkpoint.values.rng import restore_rng, rng_state
from launcher.comm.groups import RankGroup
from launcher.comm.hosts import node_sizes
from launcher.comm.mesh import ParallelMesh
from launcher.comm.torch_internals import tree_leaves
from launcher.config.equations import check_nodes, with_experts
from launcher.config.schema import Config
from launcher.optim.factory import OptimizerPlan, replace_parameters
from launcher.optim.onebit.algorithms import ONE_BIT
from launcher.optim.rules import COLLECTIVE
from launcher.parallel.expert.placement import sharded_containers
from launcher.parallel.expert.shard import shard_experts
from launcher.parallel.expert.whole import return_whole_state
from launcher.parallel.tensor.split import split_model
from launcher.sharding.mesh import MeshSizes
from launcher.zero.marks import is_moe_param
from launcher.zero.parameters import unit_params_of
from launcher.zero.unit import FlatUnit

_NUM_PARTS = 8
# Of a gradient's norm. Rounding differs by far less; what lacks the other ranks' part differs by far more.
_TOLERANCE = 1e-2


# ---- Before the units are built ----


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


def _of_first(group: RankGroup, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of random numbers of the group's first rank."""
    found = [state]
    torch.distributed.broadcast_object_list(found, group=group.process_group, group_src=0)
    return found[0]


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
        raise EngineError(
            f"{plan.name} needs all ranks to have the same parameters, and experts are sharded", hint=hint
        )


def sizes_with_experts(sizes: MeshSizes, model: nn.Module) -> MeshSizes:
    """Return the mesh of a config, with the ranks over which layers of `model` have sharded their experts.

    Raises: ConfigError for sizes that do not fit, EngineError for layers that are sharded over different numbers.
    """
    found = {name: placement.group.world_size for name, (_, placement) in sharded_containers(model).items()}
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
    whose experts cannot be sharded.
    """
    if mesh.expert is None:
        return [], model_parameters
    for name, param in model.named_parameters():
        if is_moe_param(param) and unit_params_of(param) is not None:
            raise EngineError(
                "experts that were built within zero.Init cannot be sharded over ranks",
                where=name,
                hint="build the model outside of the block: initialize() shards it, too",
            )
    report = shard_experts(model, mesh, settings.expert_parallel)
    return_whole_state(model, mesh.expert)
    kept = replace_parameters(optimizer, model_parameters, lambda param: () if param in report.gone else (param,))
    return [report.text], kept


# ---- What ranks of one layer must have alike ----


def check_replicated_gradients(names: Sequence[str], gradients: Sequence[Tensor], group: RankGroup) -> None:
    """Raise EngineError where gradients of whole parameters differ between the ranks of one layer beyond rounding.

    names, gradients: of parameters that are not split, alike on every rank of the group; the gradients are those of the
    same samples, before any reduction over data-parallel ranks. Every rank of the group must call it, and all raise.
    """
    if group.world_size == 1 or not names:
        return
    digests = torch.stack([_digest(gradient) for gradient in gradients]).to(group.device)  # [names, 1 + parts]
    rows = group.communicator.gather_rows(digests)
    spread = (rows.amax(0) - rows.amin(0)).amax(-1)
    # A digest that is not finite differs from nothing: what comes of it is the business of the loss scaler.
    differs = (spread > _TOLERANCE * rows[..., 0].amax(0)).tolist()
    wrong = [name for name, is_wrong in zip(names, differs, strict=True) if is_wrong]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise EngineError(
            f"the gradient of {', '.join(wrong[:3])}{more} differs between the ranks of one layer: it is used between a"
            " column- and a row-split layer",
            where="tensor_parallel",
            hint='give it partition_type "skip" and grad_allreduce: true in tensor_parallel.partition_config, or the'
            " style replicated_summed_grad in a plan",
        )


def _digest(gradient: Tensor) -> Tensor:
    """Return the norm of a gradient, and the sums of its parts, in float64."""
    flat = gradient.detach().reshape(-1)
    sums = [part.sum(dtype=torch.float64) for part in flat.tensor_split(_NUM_PARTS)]
    return torch.stack([torch.linalg.vector_norm(flat, dtype=torch.float64), *sums])


def fingerprint(inputs: Any, device: torch.device) -> Tensor:
    """Return [3] float64 on `device`: of the shapes of all tensors, of the sum of their values, and of their order."""
    facts = torch.zeros(3, dtype=torch.float64, device=device)
    for position, tensor in enumerate((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), start=1):
        values = tensor.detach().reshape(-1).to(device, torch.float64)
        places = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=device)
        shape = sum(place * size for place, size in enumerate((values.numel(), *tensor.shape), start=1))
        found = [values.new_tensor(float(shape)), values.sum(), (values * places.rsqrt()).sum()]
        facts += torch.stack(found) * position
    return facts


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
        rows = group.communicator.gather_rows(fingerprint(inputs, group.device))
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
