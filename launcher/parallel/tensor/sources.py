"""Who says how a model is split: the user, Hugging Face, or the names of its layers."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from launcher.base.errors import EngineError, did_you_mean
from launcher.parallel.tensor import heads, names
from launcher.parallel.tensor.styles import (
    HF_EXPERTS,
    HF_STYLES,
    HF_WITHOUT_EFFECT,
    LayerPlan,
    Style,
    style_of,
)

Plan = dict[str, LayerPlan]


# ---- a plan in Python ----


def from_user(model: nn.Module, modules: Mapping[str, nn.Module], given: Mapping[str, Any]) -> Plan:
    """Return what a plan in Python says: {pattern: style}. "*" in a pattern is any part of a name.

    Of several patterns for one module the first counts. A parameter's name may have the style REPLICATED_SUMMED_GRAD.
    Raises: EngineError for a pattern that nothing has.
    """
    found: Plan = {}
    for pattern, value in given.items():
        matched = [name for name in modules if name and fnmatch.fnmatchcase(name, pattern)]
        if value in (Style.REPLICATED_SUMMED_GRAD, Style.REPLICATED_SUMMED_GRAD.value):
            matched += [name for name, _ in model.named_parameters() if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise EngineError(
                f'no module of the model is called "{pattern}"',
                where="plan",
                hint=did_you_mean(pattern, list(modules)) or "give the names of named_modules()",
            )
        for name in matched:
            found.setdefault(name, style_of(value, modules.get(name, model), f'plan["{pattern}"]'))
    return found


# ---- Hugging Face's plan ----


def from_hugging_face(modules: Mapping[str, nn.Module], notices: list[str]) -> Plan:
    """Return the plan that a model of transformers brings along; empty where it has none, or none of its blocks.

    notices: gets what stays whole. Raises: EngineError for a style that is not known.
    """
    found: Plan = {}
    plans = _hf_plans(modules)
    parameters = {
        f"{name}.{own}" for name, module in modules.items() for own, _ in module.named_parameters(recurse=False)
    }
    whole: set[str] = set()
    for prefix, words in plans.items():
        for pattern, word in words.items():
            regex = re.compile(re.escape(prefix + pattern).replace(r"\*", "[^.]+"))
            for name in filter(regex.fullmatch, modules):
                style = _of_hf_word(name, word, whole)
                if style is not None and _is_planned(name, modules[name], style, whole):
                    found[name] = LayerPlan(style)
            for name in filter(regex.fullmatch, parameters):
                _check_parameter(name, word, whole)
    notices += [f"{name} stays whole on every rank: experts are not split" for name in _generic(whole)]
    if not any(plan.style in _OF_BLOCKS for plan in found.values()):
        return {}
    return _with_packed(modules, found)


_OF_BLOCKS = frozenset({Style.COLUMN, Style.PACKED_COLUMN, Style.ROW, Style.PACKED_ROW, Style.ROW_SPLIT_INPUT})


def _hf_plans(modules: Mapping[str, nn.Module]) -> dict[str, dict[str, str]]:
    """Return {prefix of names: {pattern: word}} of the outermost modules that have a plan."""
    found: dict[str, dict[str, str]] = {}
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        if any(prefix.startswith(outer) for outer in found):
            continue
        own = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
        of_base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        base = getattr(module, "base_model_prefix", "")
        within = f"{base}." if base and hasattr(module, base) else ""
        merged = {f"{within}{pattern}": word for pattern, word in (of_base or {}).items() if isinstance(word, str)}
        if isinstance(own, Mapping):
            merged.update({pattern: word for pattern, word in own.items() if isinstance(word, str)})
        if merged and (isinstance(own, Mapping) or of_base):
            found[prefix] = merged
    return found


def _of_hf_word(name: str, word: str, whole: set[str]) -> Style | None:
    if word in HF_EXPERTS:
        whole.add(name)
        return None
    if word in HF_WITHOUT_EFFECT:
        return None
    if word not in HF_STYLES:
        raise EngineError(
            f'the plan that the model brings along has the style "{word}", which is not supported',
            where=name,
            hint="give a plan, or tensor_parallel.partition_config with use_default_specs: false",
        )
    return HF_STYLES[word]


def _is_planned(name: str, module: nn.Module, style: Style, whole: set[str]) -> bool:
    """Whether a style of a module is about a layer of ours; containers of experts stay whole."""
    if style.is_split and not hasattr(module, "weight") and "expert" in name:
        whole.add(name)
        return False
    return True


def _check_parameter(name: str, word: str, whole: set[str]) -> None:
    if "expert" in name or word in HF_EXPERTS:
        whole.add(names.parent_of(name))
    elif word in HF_STYLES and HF_STYLES[word].is_split and names.last(name) not in heads.PARAMETERS:
        raise EngineError(
            f'the plan that the model brings along splits a parameter that is not a layer\'s weight ("{word}")',
            where=name,
            hint="give a plan, or tensor_parallel.partition_config with use_default_specs: false",
        )


def _with_packed(modules: Mapping[str, nn.Module], found: Plan) -> Plan:
    """Split fused layers block by block where Hugging Face gathers what they compute: it saves the gather.

    Only where all layers around are known: `gate_up_proj` with `down_proj`, `qkv_proj` with `o_proj`.
    """
    result = dict(found)
    for fused, following in (("gate_up_proj", "down_proj"), ("qkv_proj", "o_proj")):
        for name, plan in found.items():
            parent = names.parent_of(name)
            other = f"{parent}.{following}"
            if names.last(name) != fused or plan.style is not Style.COLUMN_GATHERED or other not in found:
                continue
            if found[other].style is not Style.ROW_SPLIT_INPUT or type(modules[name]) is not nn.Linear:
                continue
            result[name], result[other] = LayerPlan(Style.PACKED_COLUMN), LayerPlan(Style.ROW)
    return result


def _generic(found: set[str]) -> list[str]:
    """Return names without the numbers of layers, each once."""
    return sorted({re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in found})


# ---- names of layers ----


def from_names(modules: Mapping[str, nn.Module], notices: list[str]) -> Plan:
    """Return what the names of layers say: those of the usual transformers.

    A layer is split by columns where one that is split by rows follows within the same block, and the other way round.
    notices: gets what stays whole.
    """
    other = {
        name for name in modules if names.is_named(name, names.FUSED_ATTENTION) and _has_other_layout(name, modules)
    }
    notices += [
        f"{name} stays whole on every rank: its layout is not queries, keys, values" for name in _generic(other)
    ]
    columns = {name: style for name, module in modules.items() if (style := _column_style(name, module)) is not None}
    columns = {name: style for name, style in columns.items() if name not in other}
    found: Plan = {}
    for name, module in modules.items():
        if not names.is_linear(module) or not names.is_named(name, names.ROW):
            continue
        before = _before(name, columns)
        if not before:
            continue
        is_gathered = any(_has_norm_of_all_heads(column, modules) for column in before)
        found[name] = LayerPlan(Style.ROW_SPLIT_INPUT if is_gathered else Style.ROW)
        for column in [*before, *_adapted_beside(before, modules)]:
            found[column] = LayerPlan(Style.COLUMN_GATHERED if is_gathered else columns.get(column, Style.COLUMN))
        if not is_gathered:
            found.update(_norms_of_heads(before, modules))
    return found


def _has_other_layout(name: str, modules: Mapping[str, nn.Module]) -> bool:
    return type(modules[names.parent_of(name)]).__name__ in names.OTHER_LAYOUTS


def _adapted_beside(columns: list[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the layers with adapters that compute the rest of what these do: whole, they would not fit together."""
    parents = {names.parent_of(name) for name in columns}
    is_attention = names.is_named(columns[0], names.ATTENTION)
    return [
        name
        for name, module in modules.items()
        if hasattr(module, "base_layer")
        and names.parent_of(name) in parents
        and names.is_named(name, names.COLUMN | names.FUSED)
        and names.is_named(name, names.ATTENTION) == is_attention
    ]


def _column_style(name: str, module: nn.Module) -> Style | None:
    if not names.is_linear(module):
        return None
    if names.is_named(name, names.FUSED):
        return Style.PACKED_COLUMN
    return Style.COLUMN if names.is_named(name, names.COLUMN) else None


def _before(row: str, columns: Mapping[str, Style]) -> list[str]:
    """Return the column-split layers whose outputs a row-split one gets: those of its parent, or of the next one."""
    if names.is_named(row, names.ATTENTION_ROW):
        fitting = [name for name in columns if names.is_named(name, names.ATTENTION)]
    elif names.is_named(row, names.MLP_ROW):
        fitting = [name for name in columns if not names.is_named(name, names.ATTENTION)]
    else:
        return [name for name in columns if names.parent_of(name) == names.parent_of(row)]
    scope = names.parent_of(row)
    for within in (scope, names.parent_of(scope)):
        found = [name for name in fitting if f".{name}".startswith(f".{within}." if within else ".")]
        if found or not within:
            return found
    return []


def _norms_of_heads(columns: list[str], modules: Mapping[str, nn.Module]) -> Plan:
    """Return the norms of single heads beside these layers: each rank sees a part of the heads."""
    parents = {names.parent_of(name) for name in columns}
    return {
        name: LayerPlan(Style.REPLICATED_SUMMED_GRAD)
        for name in modules
        if names.parent_of(name) in parents and names.last(name) in names.NORM_OF_HEADS
    }


def _has_norm_of_all_heads(column: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a norm beside this layer is over all that it computes, so that no rank can do without the others."""
    prefix = names.parent_of(column)
    for name in names.NORM_OF_HEADS:
        norm = modules.get(f"{prefix}.{name}" if prefix else name)
        weight = getattr(norm, "weight", None)
        if weight is not None and weight.numel() == names.num_features(modules[column])[1]:
            return True
    return False


# ---- vocabulary ----


def with_vocabulary(
    model: nn.Module, modules: Mapping[str, nn.Module], found: Plan, is_head: Callable[[str], bool]
) -> Plan:
    """Add the embedding of tokens and the layer that computes logits, where the plan says nothing of them."""
    result = dict(found)
    by_module = {module: name for name, module in modules.items()}
    given = {
        Style.VOCABULARY: _embedding_of(model, "get_input_embeddings"),
        Style.COLUMN_GATHERED: _embedding_of(model, "get_output_embeddings"),
    }
    for style, module in given.items():
        name = by_module.get(module) if module is not None else None
        if name is not None and isinstance(module, nn.Embedding if style is Style.VOCABULARY else nn.Linear):
            result.setdefault(name, LayerPlan(style))
    for name, module in modules.items():
        if type(module) is nn.Embedding and names.is_named(name, names.EMBEDDING):
            result.setdefault(name, LayerPlan(Style.VOCABULARY))
        if type(module) is nn.Linear and is_head(name):
            result.setdefault(name, LayerPlan(Style.COLUMN_GATHERED))
    return result


def _embedding_of(model: nn.Module, getter: str) -> nn.Module | None:
    get = getattr(model, getter, None)
    try:
        found = get() if callable(get) else None
    except (NotImplementedError, AttributeError):  # no embedding: not a model of text, or it is on another stage
        return None
    return found if isinstance(found, nn.Module) else None
