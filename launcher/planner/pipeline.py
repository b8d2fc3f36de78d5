"""What each rank of a pipeline has of a model: parameters of its stages, and forwards that wait for their backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.planner.activations import Share
from launcher.planner.model import ModelFacts, Parameter
from launcher.sharding.grouping import block_of
from launcher.sharding.pipeline import PipelinePlan, partition


@dataclass(frozen=True)
class RankPart:
    """What one pipeline rank has."""

    model: ModelFacts  # with the parameters of its stages alone
    share: Share  # of the activations


def rank_parts(model: ModelFacts, plan: PipelinePlan, method: str = "best") -> list[RankPart]:
    """Return what each pipeline rank has. Raises: ConfigError for fewer blocks than stages.

    method: `pipeline.partition`; one by class counts blocks, as "uniform" does, and one by time counts parameters.
    What stands before the blocks goes with the first of them, and what stands behind with the last. A model without an
    output layer has its embedding there, too: the two share a weight, of which both stages hold a copy.
    """
    layers = _layers(model)
    counts_blocks = method.lower().startswith(("uniform", "type:"))
    weights = [1 if counts_blocks else sum(param.numel for param in layer) for layer in layers]
    stages = partition(weights, plan.num_stages)
    last = len(stages) - 1
    parts = []
    for rank in range(plan.num_ranks):
        own = plan.stages_of(rank)
        params = tuple(param for stage in own for index in stages[stage] for param in layers[index])
        num_layers = max(len(stages[stage]) for stage in own)
        num_heads = 0 if last not in own else plan.num_micro_batches if plan.schedule == "gpipe" else 1
        share = Share(num_layers / max(1, len(layers)), plan.in_flight(rank), num_heads)
        parts.append(RankPart(replace(model, params=params), share))
    return parts


def _layers(model: ModelFacts) -> list[list[Parameter]]:
    layers: list[list[Parameter]] = []
    before: list[Parameter] = []
    key = None
    for param in model.params:
        block = block_of(param.name)
        if block and block != key:
            layers.append([*before, param])
            before, key = [], block
        elif layers:
            layers[-1].append(param)
        else:
            before.append(param)
    if not layers:
        return [before]
    return [*layers[:-1], [*layers[-1], *_tied_head(model, layers)]]


def _tied_head(model: ModelFacts, layers: Sequence[Sequence[Parameter]]) -> list[Parameter]:
    """Return the copy of the embedding on the last stage, where no output layer is listed."""
    if model.shape is None or not model.shape.vocab_size or len(layers) < 2:
        return []
    embedding = max((param for param in layers[0] if not block_of(param.name)), key=lambda p: p.numel, default=None)
    has_head = any(not block_of(param.name) and param.numel >= _numel(embedding) // 2 for param in layers[-1])
    return [] if embedding is None or has_head else [replace(embedding, name=f"tied to {embedding.name}")]


def _numel(param: Parameter | None) -> int:
    return 0 if param is None else param.numel
