"""From a model to how each of its layers is split, checked before anything is changed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from launcher.base.errors import EngineError
from launcher.config.schema_parallel import LayerSpec, PartitionConfig, TensorParallel
from launcher.parallel.tensor import heads, names, sources
from launcher.parallel.tensor.sources import Plan
from launcher.parallel.tensor.styles import LayerPlan, Style

# ---- What `tensor_parallel.partition_config` of a config says of a model's layers, in DeepSpeed's words ----


WHERE = "tensor_parallel.partition_config"


def from_partition_config(model: nn.Module, config: PartitionConfig, model_type: str | None, defaults: Plan) -> Plan:
    """Return the plan of a model. defaults: what is known without the config, for layers that no spec names.

    Raises: EngineError for a pattern that is not one, a shape that does not fit a weight, and in strict mode for
    linear layers that no spec names.
    """
    found = dict(defaults) if config.use_default_specs else {}
    unnamed = []
    for name, module in model.named_modules():
        spec = _spec_of(name, config.layer_specs, model_type)
        if spec is not None and hasattr(module, "weight"):
            index = config.layer_specs.index(spec)
            found[name] = _plan_of(name, module, spec, f"{WHERE}.layer_specs[{index}]")
        elif names.is_linear(module) and name not in found:
            unnamed.append(name)
    for name, _ in model.named_parameters():
        spec = _spec_of(name, config.layer_specs, model_type)
        if spec is not None and spec.partition_type == "skip" and spec.grad_allreduce:
            found.setdefault(name, LayerPlan(Style.REPLICATED_SUMMED_GRAD))
    if config.strict_mode and unnamed:
        more = f" and {len(unnamed) - 3} more" if len(unnamed) > 3 else ""
        raise EngineError(
            f"strict_mode: no spec names {', '.join(unnamed[:3])}{more}",
            where=f"{WHERE}.layer_specs",
            hint='add a spec with their patterns, of partition_type "skip" where they stay whole',
        )
    return found


def _spec_of(name: str, specs: list[LayerSpec], model_type: str | None) -> LayerSpec | None:
    """Return the first spec whose patterns match the name of a module, or that of its weight, from their beginning."""
    found = (spec for at, spec in enumerate(specs) if _fits(name, spec, model_type, f"{WHERE}.layer_specs[{at}]"))
    return next(found, None)


def _fits(name: str, spec: LayerSpec, model_type: str | None, where: str) -> bool:
    if spec.model_types and str(model_type).lower() not in [kind.lower() for kind in spec.model_types]:
        return False
    for pattern in spec.patterns:
        try:
            if re.match(pattern, f"{name}.weight") or re.match(pattern, name):
                return True
        except re.error as error:
            message = f'"{pattern}" is not a regular expression: {error}'
            raise EngineError(message, where=f"{where}.patterns") from None
    return False


def _plan_of(name: str, module: nn.Module, spec: LayerSpec, where: str) -> LayerPlan:
    if spec.partition_type == "skip":
        return LayerPlan(Style.REPLICATED_SUMMED_GRAD if spec.grad_allreduce else Style.REPLICATED)
    is_column = spec.partition_type == "column"
    if isinstance(module, nn.Embedding):
        return LayerPlan(Style.VOCABULARY)
    blocks = _blocks(name, module, spec, where)
    if not is_column:
        return LayerPlan(Style.ROW if blocks is None else Style.PACKED_ROW, blocks)
    if spec.gather_output:
        return LayerPlan(Style.COLUMN_GATHERED, blocks)
    return LayerPlan(Style.COLUMN if blocks is None else Style.PACKED_COLUMN, blocks)


def _blocks(name: str, module: nn.Module, spec: LayerSpec, where: str) -> tuple[int, ...] | None:
    """Return the sizes of the layers in a fused one, from the spec's `shape`; None for a plain one."""
    dim = int(spec.partition_type == "row") if spec.partition_dim is None else spec.partition_dim
    num_inputs, num_outputs = names.num_features(module)
    size = num_outputs if spec.partition_type == "column" else num_inputs
    if spec.shape is None:
        return None
    if not 0 <= dim < len(spec.shape):
        raise EngineError(f"partition_dim {dim} is not a dimension of shape {spec.shape}", where=where)
    entry: Any = spec.shape[dim]
    if entry == -1 or entry == size:
        return None
    blocks = tuple(entry) if isinstance(entry, list) else (size // entry,) * entry
    if sum(blocks) != size:
        raise EngineError(
            f"shape {spec.shape} does not fit {name}, which has {size} features along that dimension",
            where=f"{where}.shape",
            hint="give the number of layers in the weight, or the sizes of all of them",
        )
    return blocks


# ---- The plan of a model ----


_OF_OUTPUTS = (Style.COLUMN, Style.COLUMN_GATHERED, Style.PACKED_COLUMN, Style.VOCABULARY)


@dataclass(frozen=True)
class ModelPlan:
    """How a model is split."""

    # Of those that are not simply whole; blocks of split ones are known. Parameters only as REPLICATED_SUMMED_GRAD.
    layers: dict[str, LayerPlan]
    notices: list[str] = field(default_factory=list)


def make_plan(
    model: nn.Module, num_ranks: int, settings: TensorParallel, given: Mapping[str, Any] | None = None
) -> ModelPlan:
    """Return how a model is split over the ranks of a group.

    given: a plan in Python, {pattern: style}, which alone counts then. Else the config's `partition_config`, then
    Hugging Face's plan, then the names of layers. Raises: EngineError for what cannot be split so.
    """
    modules = {name: module for name, module in model.named_modules() if not _is_elsewhere(module)}
    notices: list[str] = []
    found = _sourced(model, modules, settings, given, notices)
    found = {name: plan for name, plan in found.items() if plan.style is not Style.REPLICATED}
    found = _with_tied(modules, found)
    if not any(plan.style.is_split for plan in found.values()):
        raise _nothing_found(model, modules)
    _check_classes(modules, found)
    _check_attentions(model, modules, found, num_ranks)
    found = {name: _with_blocks(name, plan, model, modules) for name, plan in found.items()}
    found = _divisible(modules, found, num_ranks, notices)
    return ModelPlan(found, notices)


def split_dim(module: nn.Module, style: Style) -> int:
    """Return the dimension along which a layer's weight is split."""
    is_first = style in _OF_OUTPUTS
    return int(is_first) if names.is_conv1d(module) else int(not is_first)


def _is_elsewhere(module: nn.Module) -> bool:
    """Whether a module is the placeholder of one on another pipeline stage."""
    return getattr(module, "is_placeholder", False) is True


def _sourced(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    settings: TensorParallel,
    given: Mapping[str, Any] | None,
    notices: list[str],
) -> sources.Plan:
    if given is not None:
        return sources.from_user(model, modules, given)
    config: PartitionConfig | None = settings.partition_config
    defaults: sources.Plan = {}
    if config is None or config.use_default_specs:
        endings = names.HEAD | frozenset(config.lm_head_patterns if config is not None else ())
        defaults = sources.from_hugging_face(modules, notices) or sources.from_names(modules, notices)
        if defaults or config is not None:
            defaults = sources.with_vocabulary(model, modules, defaults, lambda name: names.is_named(name, endings))
    if config is None:
        return defaults
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return from_partition_config(model, config, model_type, defaults)


def _nothing_found(model: nn.Module, modules: Mapping[str, nn.Module]) -> EngineError:
    example = next((name for name, module in modules.items() if names.is_linear(module)), None)
    found = f'; "{example}" is one of its linear layers' if example else ""
    return EngineError(
        f"nothing says how to split {type(model).__name__} over ranks: transformers has no plan for it, and its layers"
        f" have none of the usual names{found}",
        where="tensor_parallel",
        hint=f"give {WHERE} with layer_specs for its layers, or a plan such as"
        f' {{"{example or "layers.*.up"}": "column"}}, to tp_model_init(plan=...)',
    )


# ---- layers that share a weight ----


def _with_tied(modules: Mapping[str, nn.Module], found: sources.Plan) -> sources.Plan:
    """Give layers that share a split weight the same split. Raises: EngineError where they cannot have it."""
    users: dict[int, list[str]] = defaultdict(list)
    for name, module in modules.items():
        weight = module._parameters.get("weight")
        if weight is not None:
            users[id(weight)].append(name)
    result = dict(found)
    for tied in users.values():
        planned = [name for name in tied if name in found and found[name].style.is_split]
        if len(tied) < 2 or not planned:
            continue
        for name in tied:
            if name not in found:
                result[name] = _tied_to(name, planned[0], modules, found)
        dims = {split_dim(modules[name], result[name].style) for name in tied}
        if len(dims) > 1 or not all(result[name].style.is_split for name in tied):
            shown = " and ".join(f"{name} ({result[name].style.value})" for name in tied)
            raise EngineError(f"{shown} share one weight and are not split alike", where="plan")
    return result


def _tied_to(name: str, other: str, modules: Mapping[str, nn.Module], found: sources.Plan) -> LayerPlan:
    if isinstance(modules[name], nn.Embedding):
        return LayerPlan(Style.VOCABULARY)
    if found[other].style in (Style.VOCABULARY, Style.COLUMN_GATHERED) and isinstance(modules[name], nn.Linear):
        return LayerPlan(Style.COLUMN_GATHERED)
    raise EngineError(
        f"{name} shares its weight with {other}, which is split, and no plan says how {name} is",
        where="plan",
        hint="name both",
    )


# ---- checks ----


def _check_classes(modules: Mapping[str, nn.Module], found: sources.Plan) -> None:
    for name, plan in found.items():
        if not plan.style.is_split:
            continue
        module = modules[name]
        is_embedding = plan.style is Style.VOCABULARY
        if is_embedding and isinstance(module, nn.Embedding):
            _check_embedding(name, module)
        if not (_is_embedding(module) if is_embedding else _is_plain_linear(module)):
            raise EngineError(
                f"{type(module).__module__}.{type(module).__name__} cannot be split ({plan.style.value}): only"
                f" {'torch.nn.Embedding' if is_embedding else 'torch.nn.Linear and Conv1D of transformers'} can",
                where=name,
                hint=f'split the model before adapters or quantised layers are put in, or leave it whole: "{name}" with'
                f' partition_type "skip" in {WHERE}',
            )


def _is_plain_linear(module: nn.Module) -> bool:
    is_alike = type(module).__name__ == "FalconLinear" and isinstance(module, nn.Linear)  # the same, in other words
    return type(module) is nn.Linear or names.is_conv1d(module) or is_alike


def _is_embedding(module: nn.Module) -> bool:
    """Whether an embedding is torch's, or a class of its own whose forward does something to what torch's returns."""
    kind = type(module)
    if not isinstance(module, nn.Embedding):
        return False
    code = getattr(kind.forward, "__code__", None)
    return kind.forward is nn.Embedding.forward or (
        code is not None and "__class__" in code.co_freevars and "forward" in code.co_names
    )


def _check_embedding(name: str, module: nn.Embedding) -> None:
    given = {"max_norm": module.max_norm, "sparse": module.sparse, "scale_grad_by_freq": module.scale_grad_by_freq}
    wrong = [key for key, value in given.items() if value]
    if wrong:
        raise EngineError(
            f"an embedding with {' and '.join(wrong)} cannot be split along its vocabulary",
            where=name,
            hint="make the embedding without, or leave it whole in the plan",
        )


def _check_attentions(model: nn.Module, modules: Mapping[str, nn.Module], found: sources.Plan, num_ranks: int) -> None:
    for name in attentions(found):
        heads.check_heads(name, heads.head_counts(modules[name], model), num_ranks)


def attentions(found: Mapping[str, LayerPlan]) -> list[str]:
    """Return the names of the modules whose attention heads are split."""
    columns = [name for name, plan in found.items() if plan.style.is_column and heads.is_attention_input(name)]
    return list(dict.fromkeys(names.parent_of(name) for name in columns))


def _divisible(
    modules: Mapping[str, nn.Module], found: sources.Plan, num_ranks: int, notices: list[str]
) -> sources.Plan:
    """Leave layers whole that the ranks do not divide, where nothing around them is split; else raise EngineError."""
    uneven = {
        name: block
        for name, plan in found.items()
        for block in plan.blocks or ()
        if plan.style.is_split and block % num_ranks
    }
    weights = {id(modules[name]._parameters["weight"]) for name in uneven}
    result = dict(found)
    for name, plan in found.items():
        if not plan.style.is_split or id(modules[name]._parameters["weight"]) not in weights:
            continue
        if not plan.style.takes_whole:
            raise EngineError(
                f"{num_ranks} ranks of one layer do not divide its {uneven[name]} features ({plan.style.value})",
                where=name,
                hint="use a tensor-parallel size that does, or leave this layer and those around it whole",
            )
        del result[name]
        size = modules[name].weight.shape[split_dim(modules[name], plan.style)]  # type: ignore[index]
        what = "a vocabulary of " if plan.style is not Style.ROW_SPLIT_INPUT else ""
        notices.append(f"{name} stays whole on every rank: {num_ranks} ranks do not divide {what}{size}")
    return result


# ---- blocks of fused layers ----


def _with_blocks(name: str, plan: LayerPlan, model: nn.Module, modules: Mapping[str, nn.Module]) -> LayerPlan:
    """Return a plan that says which blocks the weight has along the dimension that is split."""
    if not plan.style.is_split:
        return plan
    module = modules[name]
    size = int(module.weight.shape[split_dim(module, plan.style)])  # type: ignore[index]
    blocks = plan.blocks
    if blocks is None and plan.style in (Style.PACKED_COLUMN, Style.PACKED_ROW):
        blocks = _found_blocks(name, size, model, modules)
    blocks = blocks or (size,)
    if sum(blocks) != size:
        raise EngineError(f"blocks {list(blocks)} are not the {size} features of the layer", where=name)
    return LayerPlan(plan.style, blocks)


def _found_blocks(name: str, size: int, model: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[int, ...]:
    own = names.last(name)
    if own not in names.FUSED_ATTENTION:
        count = 2
    else:
        parent = names.parent_of(name)
        if f"{parent}.q_attn" in modules:  # cross-attention of GPT-2: keys and values
            return (size // 2,) * 2
        queries, keys = heads.num_heads(heads.head_counts(modules[parent], model))
        if queries is not None and keys is not None and size % (queries + 2 * keys) == 0:
            width = size // (queries + 2 * keys)
            return queries * width, keys * width, keys * width
        count = 3
    if size % count:
        raise EngineError(
            f"{size} features are not {count} layers in one weight",
            where=name,
            hint=f"give their sizes: layer_specs with shape [[...], -1] in {WHERE}",
        )
    return (size // count,) * count
