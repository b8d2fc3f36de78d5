"""Splitting a model over the ranks of a group, in place."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.comm.groups import RankGroup, init_distributed, is_first_rank, world_group
from launcher.comm.mesh import subgroup
from launcher.config.load import load_config
from launcher.config.schema_parallel import TensorParallel
from launcher.parallel.tensor import heads, layers, names
from launcher.parallel.tensor.plan import ModelPlan, attentions, make_plan, split_dim
from launcher.parallel.tensor.styles import LayerPlan, Style
from launcher.sharding.layout import TensorSplit
from launcher.sharding.mesh import MeshSizes
from launcher.zero.marks import Mark, mark_split, slice_of, split_of
from launcher.zero.parameters import unit_params_of


@dataclass(frozen=True)
class TensorReport:
    """What was split."""

    num_ranks: int
    num_layers: dict[Style, int] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


_REPORT: Mark[TensorReport] = Mark("tensor_report")


def report_of(model: nn.Module) -> TensorReport | None:
    """Return what was split of a model; None for one that is whole."""
    return _REPORT.of(model)


@torch.no_grad()
def split_model(
    model: nn.Module, group: RankGroup, settings: TensorParallel, plan: Mapping[str, Any] | None = None
) -> TensorReport:
    """Split a model over the ranks of a group, in place: its parameters become this rank's parts of rank 0's values.

    Parameters stay the same objects, on their device; `launcher.zero.parameters.split_of` says what they are parts of.
    A model that is split over as many ranks stays as it is. plan: {pattern: style}, see `make_plan`. Every rank of the
    group must call it. Raises: EngineError before anything is changed.
    """
    before = report_of(model)
    if before is not None:
        if before.num_ranks != group.world_size:
            raise EngineError(
                f"the model is split over {before.num_ranks} ranks, and cannot be split over {group.world_size}",
                where="tensor_parallel.autotp_size",
                hint="use the same size, or make the model anew",
            )
        return before
    if group.world_size == 1:
        return TensorReport(1)
    _check_values(model)
    found = make_plan(model, group.world_size, settings, plan)
    splits = _splits(model, found, group)
    for param in model.parameters():
        _take_part(param, splits.get(param), group)
    _turn_modules(model, found, group)
    counts = Counter(layer.style for layer in found.layers.values())
    report = TensorReport(group.world_size, dict(counts), found.notices)
    _REPORT.put(model, report)
    return report


def _check_values(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if unit_params_of(param) is not None:
            raise EngineError(
                "the parameter is sharded by zero.Init already: a model is split over ranks first",
                where=name,
                hint="make the model outside of zero.Init, or without tensor_parallel",
            )
        if param.is_meta:
            raise EngineError(
                "the parameter has no values (it is on the device meta)", where=name, hint="load the model first"
            )


def _splits(model: nn.Module, found: ModelPlan, group: RankGroup) -> dict[nn.Parameter, TensorSplit]:
    """Return which part of each parameter that is split this rank holds."""
    modules = dict(model.named_modules())
    splits: dict[nn.Parameter, TensorSplit] = {}
    for name, plan in found.layers.items():
        if not plan.style.is_split or plan.blocks is None:
            continue
        module = modules[name]
        split = functools.partial(TensorSplit, index=group.rank, count=group.world_size, blocks=plan.blocks)
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        splits[weight] = split(tuple(weight.shape), split_dim(module, plan.style))
        if bias is not None and plan.style in (Style.COLUMN, Style.COLUMN_GATHERED, Style.PACKED_COLUMN):
            splits[bias] = split(tuple(bias.shape), 0)
    for attention in attentions(found.layers):
        for name, param in modules[attention].named_parameters(recurse=False):
            if name in heads.PARAMETERS:
                splits[param] = TensorSplit(tuple(param.shape), 0, group.rank, group.world_size, (param.numel(),))
    return splits


def _take_part(param: nn.Parameter, split: TensorSplit | None, group: RankGroup) -> None:
    """Give a parameter rank 0's values, or this rank's part of them. One parameter is whole at a time."""
    whole: Tensor = param.data.to(group.device)
    group.communicator.broadcast([whole])
    if split is not None:
        param.data = slice_of(whole, split).to(param.device)
        param.grad = None
        mark_split(param, split)
    elif whole is not param.data:
        param.data.copy_(whole)


# ---- modules ----


def _turn_modules(model: nn.Module, found: ModelPlan, group: RankGroup) -> None:
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    widths = {name: _widths(name, found) for name in attentions(found.layers)}
    shared: dict[str, layers.SharedInput] = {}
    summed: set[nn.Parameter] = set()
    for name, plan in found.layers.items():
        parent = names.parent_of(name)
        if plan.style is Style.REPLICATED_SUMMED_GRAD:
            summed.update(modules[name].parameters() if name in modules else [params[name]])
        else:
            module = modules[name]
            is_column = plan.style in (Style.COLUMN, Style.COLUMN_GATHERED, Style.PACKED_COLUMN)
            if is_column and parent not in shared:
                shared[parent] = layers.SharedInput(modules[parent])
            _turn(name, module, plan, group, shared[parent] if is_column else None)
            _leave_fused_kernels(modules[parent])
    for param in summed:
        if param.requires_grad:
            param.register_hook(functools.partial(_summed, group=group))
    for name, own in widths.items():
        heads.divide_heads(modules[name], group, own)


def _turn(name: str, module: nn.Module, plan: LayerPlan, group: RankGroup, shared: layers.SharedInput | None) -> None:
    weight = module._parameters["weight"]
    split = split_of(weight) if weight is not None else None
    assert split is not None
    share = layers.TensorShard(
        name,
        group,
        split,
        shared,
        takes_whole_input=plan.style is Style.ROW_SPLIT_INPUT,
        gathers_output=plan.style is Style.COLUMN_GATHERED,
    )
    layers.become(module, _class_of(module, plan.style), share)


def _class_of(module: nn.Module, style: Style) -> type[nn.Module]:
    kind: Any = type(module)  # mypy takes a class for what its instances are, which need not be hashable
    if style is Style.VOCABULARY:
        return layers.vocabulary_class(kind)
    is_row = style in (Style.ROW, Style.ROW_SPLIT_INPUT, Style.PACKED_ROW)
    if names.is_conv1d(module):
        return layers.conv1d_class(kind, "Row" if is_row else "Column")
    return layers.RowParallelLinear if is_row else layers.ColumnParallelLinear


def _widths(attention: str, found: ModelPlan) -> frozenset[int]:
    """Return how many features the layers of an attention compute for all heads: of queries, of keys, of values."""
    return frozenset(
        block
        for name, plan in found.layers.items()
        if plan.style.is_column and names.parent_of(name) == attention and heads.is_attention_input(name)
        for block in plan.blocks or ()
    )


def _leave_fused_kernels(parent: nn.Module) -> None:
    """Keep torch's own encoder layer from its kernel for inference, which reads weights and calls no layer."""
    if isinstance(parent, nn.TransformerEncoderLayer):
        parent.activation_relu_or_gelu = 0


def _summed(grad: Tensor, group: RankGroup) -> Tensor:
    flat = grad.new_zeros((grad.numel() + group.world_size - 1) // group.world_size * group.world_size)
    flat[: grad.numel()].copy_(grad.reshape(-1))
    group.communicator.all_reduce(flat).wait()
    return flat[: grad.numel()].view(grad.shape)


# ---- DeepSpeed's entry ----


_Model = TypeVar("_Model", bound=nn.Module)


def tp_model_init(
    model: _Model,
    tp_size: int = 1,
    dtype: torch.dtype | None = None,
    config: Any = None,
    plan: Mapping[str, Any] | None = None,
) -> _Model:
    """Split a model over `tp_size` neighbouring ranks, in place, and return it.

    dtype: its floating-point parameters are cast to it; None leaves them. config: a DeepSpeed config, of which
    `tensor_parallel` is read. plan: how layers are split, {pattern of names: style}. Every rank must call it.
    Raises: EngineError for a size that does not divide the ranks, and for a model that cannot be split.
    """
    init_distributed()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if tp_size < 1 or world_size % tp_size:
        raise EngineError(
            f"tp_size {tp_size} does not divide the {world_size} ranks of this job",
            where="tp_model_init(tp_size=...)",
            hint="give a size that does",
        )
    settings = TensorParallel() if config is None else load_config(config, is_of_engine=True).config.tensor_parallel
    if settings.autotp_size not in (0, tp_size):
        raise EngineError(
            f"tp_size {tp_size} is not tensor_parallel.autotp_size {settings.autotp_size} of the config",
            where="tp_model_init(tp_size=...)",
            hint="give the same size to both",
        )
    if dtype is not None:
        for param in model.parameters():
            if param.is_floating_point():
                param.data = param.data.to(dtype)
    report = split_model(model, tensor_group(tp_size), settings, plan)
    if is_first_rank():
        for notice in report.notices:
            get_logger().info("tensor parallelism: %s", notice)
    return model


def tensor_group(tp_size: int) -> RankGroup:
    """Return the group of the `tp_size` neighbouring ranks that this one belongs to. Every rank must call it."""
    world = world_group()
    if tp_size == 1 or world.process_group is None:
        return RankGroup(0, 1, None, world.runtime)
    sizes = MeshSizes(world.world_size // tp_size, tensor=tp_size)
    return world.subset(subgroup(sizes.ranks_along("tensor"), "tensor"))
