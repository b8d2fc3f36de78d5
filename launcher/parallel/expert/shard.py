"""Spreading the experts of an unmodified model over the ranks of a group, in place."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.base.errors import EngineError
from launcher.comm.mesh import ParallelMesh
from launcher.comm.torch_internals import outside_graphs
from launcher.config.equations import divisors
from launcher.config.schema_parallel import ExpertParallel
from launcher.parallel.expert.exchange import at_experts, run_each, untouched
from launcher.parallel.expert.placement import (
    ExpertPlacement,
    local_experts,
    placement_of,
    set_placement,
    sharded_containers,
)
from launcher.sharding.layout import TensorSplit
from launcher.zero.marks import mark_expert, mark_split, slice_of
from launcher.zero.parameters import unit_params_of

# ---- Mixtures of Hugging Face ----
# Transformers 5 stacks experts in parameters of a module that gets tokens, their experts and weights; its own forward
# runs on each rank, with whatever implementation of experts the model is set to. Transformers 4 has them in a list,
# and chooses and runs them in one forward of the block, which is taken apart here by the name of its class.


def _at_ranks(x: Tensor, chosen: Tensor, weights: Tensor, experts: nn.Module, run: Callable[..., Tensor]) -> Tensor:
    placement = placement_of(experts)
    assert placement is not None
    trains = any(param.requires_grad for param in experts.parameters())
    return at_experts(x, chosen, weights, placement, run, trains=trains)


# ---- stacked experts: transformers 5 ----


def is_stacked(module: nn.Module) -> bool:
    """Whether a module has experts stacked in its parameters, and gets tokens, their experts and weights."""
    number, params = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if not isinstance(number, int) or number < 2 or len(params) < 2:
        return False
    if any(param.dim() < 2 or param.shape[0] != number for param in params):
        return False
    return len(inspect.signature(type(module).forward).parameters) == 4  # with `self`


@functools.cache
def stacked_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a module of `kind` of whose experts this rank has a part."""

    class SpreadExperts(kind):  # type: ignore[misc,valid-type]
        @outside_graphs
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            """hidden_states: [tokens, width]; index, weights: [tokens, k] -> [tokens, width]."""

            def run(rows: Tensor, expert: Tensor, _: Sequence[int], weights: Tensor) -> Tensor:
                if not len(rows):
                    return untouched(rows, list(self.parameters()))
                found: Tensor = kind.forward(self, rows, expert[:, None], weights[:, None])
                return found

            return _at_ranks(hidden_states, top_k_index, top_k_weights, self, run)

    return _named(SpreadExperts, kind)


# ---- lists of experts: transformers 4 ----


def _of_list(x: Tensor, chosen: Tensor, weights: Tensor, experts: nn.ModuleList) -> Tensor:
    own = local_experts(experts)

    def run(rows: Tensor, _: Tensor, sizes: Sequence[int], row_weights: Tensor) -> Tensor:
        return run_each(own, rows, sizes) * row_weights[:, None]

    return _at_ranks(x, chosen, weights, experts, run)


def _by_softmax(block: Any, x: Tensor, *, normalises: bool) -> tuple[Tensor, Tensor]:
    """Return the sum over the chosen experts and the router's logits. x: [tokens, width]."""
    logits = block.gate(x)
    weights, chosen = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), block.top_k, dim=-1)
    if normalises:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return _of_list(x, chosen, weights.to(x.dtype), block.experts), logits


def _mixtral(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    if block.training and block.jitter_noise > 0:
        x = x * torch.empty_like(x).uniform_(1.0 - block.jitter_noise, 1.0 + block.jitter_noise)
    output, logits = _by_softmax(block, x.reshape(-1, x.shape[-1]), normalises=True)
    return output.view(x.shape), logits


def _plain(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    output, logits = _by_softmax(block, x.reshape(-1, x.shape[-1]), normalises=block.norm_topk_prob)
    return output.view(x.shape), logits


def _with_shared_expert(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    output, logits = _plain(block, x)
    return output + F.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x), logits


# Class of transformers 4 -> its forward with sharded experts.
_FORWARDS: dict[str, Callable[[Any, Tensor], tuple[Tensor, Tensor]]] = {
    "MixtralSparseMoeBlock": _mixtral,
    "OlmoeSparseMoeBlock": _plain,
    "Qwen2MoeSparseMoeBlock": _with_shared_expert,
    "Qwen3MoeSparseMoeBlock": _plain,
    "Qwen3NextSparseMoeBlock": _with_shared_expert,
}
# Classes that run the experts in a method of their own: moe(tokens, their experts, their weights).
_WITH_METHOD = ("DeepseekV2Moe", "DeepseekV3MoE", "Dots1MoE", "Glm4MoeMoE", "Glm4vMoeTextMoE")
LISTED = (*_FORWARDS, *_WITH_METHOD)


@functools.cache
def listed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a block of `kind`, one of LISTED, of whose list of experts this rank has a part."""

    class SpreadBlock(kind):  # type: ignore[misc,valid-type]
        if kind.__name__ in _WITH_METHOD:

            @outside_graphs
            def moe(self, hidden_states: Tensor, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
                """hidden_states: [tokens, width]; indices, weights: [tokens, k] -> [tokens, width]."""
                return _of_list(hidden_states, topk_indices, topk_weights, self.experts)

        else:

            @outside_graphs
            def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
                """hidden_states: [batch, length, width] -> the same, and logits [tokens, experts]."""
                return _FORWARDS[kind.__name__](self, hidden_states)

    return _named(SpreadBlock, kind)


def _named(made: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    made.__name__ = made.__qualname__ = f"Spread{kind.__name__}"
    return made


# ---- Spreading the experts of an unmodified model over the ranks of a group, in place ----


_WHERE = "expert_parallel"


@dataclass(frozen=True)
class ExpertReport:
    """What was sharded."""

    num_layers: int
    num_experts: int  # of the largest layer
    num_ranks: int
    # Parameters of experts that only other ranks have now: they are trained there.
    gone: frozenset[nn.Parameter] = field(default_factory=frozenset)

    @property
    def text(self) -> str:
        """What to say at start."""
        return (
            f"expert parallel: {self.num_experts} experts of {self.num_layers} layers over {self.num_ranks} ranks,"
            f" {self.num_experts // self.num_ranks} on each"
        )


@dataclass(frozen=True)
class _Mixture:
    """A mixture that was found."""

    name: str  # of what holds the experts
    experts: nn.Module  # a list of them, or what they are stacked in
    block: nn.Module | None  # of a list: what chooses among them
    num_experts: int


@torch.no_grad()
def shard_experts(model: nn.Module, mesh: ParallelMesh, settings: ExpertParallel) -> ExpertReport:
    """Have each rank keep its part of the experts of every mixture, with rank 0's values, in place.

    Parameters that stay are the same objects. A model that is sharded over as many ranks stays as it is. Every rank of
    the data axis must call it. Raises: EngineError before anything is changed.
    """
    group = mesh.expert
    assert group is not None
    before = sharded_containers(model)
    found = [] if before else _mixtures(model, settings)
    for mixture in found:
        _check(mixture, group.world_size)
    gone: set[nn.Parameter] = set()
    for mixture in found:
        if mixture.block is not None:
            gone |= _keep_own_of_list(mixture, mesh)
        else:
            _keep_own_of_stack(mixture, mesh)
        changed = mixture.block or mixture.experts
        kind: Any = type(changed)  # mypy takes a class for what its instances are, which need not be hashable
        changed.__class__ = stacked_class(kind) if mixture.block is None else listed_class(kind)
    num_experts = [placement.num_experts for _, placement in sharded_containers(model).values()]
    return ExpertReport(len(num_experts), max(num_experts), group.world_size, frozenset(gone))


def _mixtures(model: nn.Module, settings: ExpertParallel) -> list[_Mixture]:
    """Return the mixtures of a model that the patterns name. Raises: EngineError where there is none that is known."""
    modules = dict(model.named_modules())
    found = list(_known(modules, settings))
    if not found:
        others = [name for name, module in modules.items() if _is_like_a_mixture(name, module)]
        if others:
            kind = type(modules[others[0].rpartition(".")[0]]).__name__
            raise EngineError(
                f"the experts of {kind} cannot be sharded: how it runs them is not known",
                where=others[0],
                hint="build the layer with launcher.moe.MoE, or leave expert_parallel out: every rank has all experts"
                " then",
            )
        raise EngineError(
            "the model has no mixture of experts"
            + (f' in a module named "{settings.moe_layer_pattern}"' if settings.moe_layer_pattern else ""),
            where=f"{_WHERE}.moe_layer_pattern" if settings.moe_layer_pattern else f"{_WHERE}.enabled",
            hint="give the names of named_modules(), as regular expression"
            if settings.moe_layer_pattern
            else "leave the section out",
        )
    return found


def _known(modules: Mapping[str, nn.Module], settings: ExpertParallel) -> Iterator[_Mixture]:
    for name, module in modules.items():
        block_name, _, own_name = name.rpartition(".")
        if settings.moe_layer_pattern is not None and not re.fullmatch(settings.moe_layer_pattern, block_name):
            continue
        if own_name != (settings.expert_pattern or "experts") or block_name not in modules:
            continue
        block = modules[block_name]
        if isinstance(module, nn.ModuleList) and type(block).__name__ in LISTED:
            yield _Mixture(name, module, block, len(module))
        elif is_stacked(module):
            number: Any = module.num_experts
            yield _Mixture(name, module, None, number)


def _is_like_a_mixture(name: str, module: nn.Module) -> bool:
    is_list = isinstance(module, nn.ModuleList) and len(module) > 1
    is_stack = any(param.dim() == 3 for param in module.parameters(recurse=False))
    return name.rpartition(".")[2] == "experts" and (is_list or is_stack)


def _check(mixture: _Mixture, num_ranks: int) -> None:
    if mixture.num_experts % num_ranks:
        sizes = ", ".join(map(str, divisors(mixture.num_experts)))
        raise EngineError(
            f"{num_ranks} ranks do not divide the {mixture.num_experts} experts of {mixture.name}",
            where=f"{_WHERE}.autoep_size",
            hint=f"use one of {sizes}",
        )
    for name, param in mixture.experts.named_parameters():
        if unit_params_of(param) is not None:
            raise EngineError(
                "the parameter is sharded by zero.Init already: experts are sharded first",
                where=f"{mixture.name}.{name}",
                hint="make the model outside of zero.Init, or without expert_parallel",
            )
        if param.is_meta:
            raise EngineError(
                "the parameter has no values (it is on the device meta)",
                where=f"{mixture.name}.{name}",
                hint="load the model first",
            )


def _of_rank_0(param: nn.Parameter, mesh: ParallelMesh) -> Tensor:
    """Return rank 0's values of a parameter, on the device. Collective."""
    whole = param.data.to(mesh.data.device)
    mesh.data.communicator.broadcast([whole])
    return whole


def _keep_own_of_list(mixture: _Mixture, mesh: ParallelMesh) -> set[nn.Parameter]:
    """Keep the experts of this rank in a list; return the parameters of the others, which have no memory then."""
    assert mesh.expert is not None
    placement = ExpertPlacement(mesh.expert, mixture.num_experts)
    gone: set[nn.Parameter] = set()
    for key, expert in list(mixture.experts._modules.items()):
        assert expert is not None
        is_own = int(key) in placement.local
        params = list(expert.parameters())
        if not is_own:
            placement.remote[int(key)] = expert.to("meta")  # with other parameters
            mixture.experts._modules[key] = None
            gone.update(params)
        for param in params:
            whole = _of_rank_0(param, mesh)
            if is_own:
                param.data.copy_(whole)
                mark_expert(param, mesh.expert.world_size)
            else:
                param.data = whole.new_empty(0)
                param.grad = None
    set_placement(mixture.experts, placement)
    return gone


def _keep_own_of_stack(mixture: _Mixture, mesh: ParallelMesh) -> None:
    group = mesh.expert
    assert group is not None
    for param in mixture.experts.parameters(recurse=False):
        shape = tuple(param.shape)
        split = TensorSplit(shape, 0, group.rank, group.world_size, (shape[0],))
        param.data = slice_of(_of_rank_0(param, mesh), split).to(param.device)
        param.grad = None
        mark_split(param, split)
        mark_expert(param, group.world_size)
    placement = ExpertPlacement(group, mixture.num_experts)
    experts: Any = mixture.experts
    experts.num_experts = placement.num_local  # what its own forward counts
    set_placement(mixture.experts, placement)
