"""What `tensor_parallel.partition_config` of a config says of a model's layers, in DeepSpeed's words."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from launcher.base.errors import EngineError
from launcher.config.schema_parallel import LayerSpec, PartitionConfig
from launcher.parallel.tensor import names
from launcher.parallel.tensor.sources import Plan
from launcher.parallel.tensor.styles import LayerPlan, Style

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
