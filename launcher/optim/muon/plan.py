"""Muon by name: which parameters are matrices to orthogonalise, and what their groups are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from launcher.config.schema_params import MuonParams
from launcher.optim.factory import OptimizerPlan, as_groups, build_of_kind
from launcher.optim.muon.muon import Muon, uses_muon
from launcher.sharding.layout import unsharded_numel, unsharded_shape

# In the names of matrices that AdamW updates, as DeepSpeed has it: what reads or writes tokens is not a hidden layer.
_OUTER_NAMES = ("embed", "lm_head")


def muon_plan(params: Mapping[str, Any], model: nn.Module, model_parameters: Iterable[Any] | None) -> OptimizerPlan:
    """Plan Muon as the config's `optimizer` section names it.

    model_parameters: parameters or groups of them; None: all trainable parameters of `model`. A group that sets
    `use_muon` is Muon's or AdamW's as a whole; others are split by `use_muon` of each parameter, which is what the
    parameter's attribute of that name says, else whether it is a hidden matrix.
    Raises: EngineError for Muon over a parameter that is not a matrix.
    """
    options = dict(MuonParams.model_validate(dict(params)))
    options["betas"] = tuple(options["betas"])
    of_both = {key: options[key] for key in ("lr", "weight_decay") if options[key] is not None}
    of_matrices = {**of_both, "momentum": options["momentum"], "ns_method": options["ns_method"]}
    of_the_rest = {**of_both, "betas": options["betas"], "eps": options["eps"]}
    for own, lr in ((of_matrices, options["muon_lr"]), (of_the_rest, options["adam_lr"])):
        if lr is not None:
            own["lr"] = lr
    given = as_groups(model.parameters() if model_parameters is None else model_parameters)
    is_matrix = hidden_matrices(model)
    split = [part for group in given for part in _split(group, is_matrix)]
    optimizer = Muon([{**(of_matrices if uses_muon(part) else of_the_rest), **part} for part in split])
    groups = optimizer.param_groups
    build = functools.partial(build_of_kind, "Muon", groups, Muon, Muon)
    return OptimizerPlan("Muon", groups, optimizer.defaults, build, kind=Muon, summary=_summary(groups))


def hidden_matrices(model: nn.Module) -> Callable[[nn.Parameter], bool]:
    """Return what says whether Muon updates a parameter.

    By itself that is one of two or more dimensions which neither reads nor writes tokens: not of an embedding, not the
    output layer that a Hugging Face model states, without "embed" and "lm_head" in its name.
    """
    outer = {
        param
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for param in module.parameters()  # its tiles, where it was tiled
    }
    output_layer = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(output_layer, nn.Module):
        outer |= set(output_layer.parameters())
    outer |= {param for name, param in model.named_parameters() if any(word in name.lower() for word in _OUTER_NAMES)}

    def is_matrix(param: nn.Parameter) -> bool:
        asked = getattr(param, "use_muon", None)
        return len(unsharded_shape(param)) >= 2 and param not in outer if asked is None else bool(asked)

    return is_matrix


def _split(group: dict[str, Any], is_matrix: Callable[[nn.Parameter], bool]) -> list[dict[str, Any]]:
    """Return a group as it is where it says `use_muon`, else its matrices and the rest of it."""
    if "use_muon" in group:
        return [group]
    parts = []
    for use_muon in (True, False):
        params = [param for param in group["params"] if is_matrix(param) is use_muon]
        if params:
            parts.append({**group, "params": params, "use_muon": use_muon})
    return parts or [{**group, "use_muon": False}]  # a group without parameters stays one


def _summary(groups: list[dict[str, Any]]) -> str:
    counts = []
    for use_muon in (True, False):
        trained = [
            param
            for group in groups
            if group["use_muon"] is use_muon
            for param in group["params"]
            if param.requires_grad
        ]
        counts.append((len(trained), sum(map(unsharded_numel, trained))))
    (num_matrices, in_matrices), (num_others, in_others) = counts
    return (
        f"Muon updates {num_matrices} matrices ({in_matrices:,} elements), "
        f"AdamW the other {num_others} parameters ({in_others:,})"
    )
