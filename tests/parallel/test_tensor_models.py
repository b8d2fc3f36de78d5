"""Whole models split over ranks: losses, gradients, generated tokens and exchanges, against one process."""

from __future__ import annotations

from typing import Any

import pytest
from harness import split_models
from harness.ranks import run_on_ranks
from harness.split_models import EXAMPLE, FAMILIES, TORCH
from torch import Tensor, nn

from launcher.comm.groups import world_group
from launcher.config.schema_parallel import TensorParallel
from launcher.parallel.tensor.slices import full_values
from launcher.parallel.tensor.split import split_model
from launcher.zero.splits import split_of

MODELS = [*FAMILIES, EXAMPLE, TORCH]
STEPS = 3


def needs(name: str) -> None:
    if not split_models.has(name):
        pytest.skip("transformers is not installed")


def _trained(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Train split over all ranks; return losses, whole gradients of each step, whole weights, what was split."""
    group = world_group()
    model = split_models.build(name)
    if rank:
        for param in model.parameters():
            nn.init.constant_(param, 0.5)  # rank 0's values count
    ids = {own: id(param) for own, param in model.named_parameters()}
    report = split_model(model, group, TensorParallel())
    assert {own: id(param) for own, param in model.named_parameters()} == ids
    for own, param in model.named_parameters():
        split = split_of(param)
        assert split is None or tuple(param.shape) == split.local_shape, own
    params = dict(model.named_parameters())
    losses, gradients = [], []
    for loss, grads in split_models.train(model, STEPS):
        losses.append(loss)
        gradients.append({own: _whole(grad, params[own], group) for own, grad in grads.items()})
    weights = {own: full_values(param, group).clone() for own, param in params.items()}
    counts = {style.value: count for style, count in report.num_layers.items()}
    return {"losses": losses, "gradients": gradients, "weights": weights, "split": counts, "notices": report.notices}


def _whole(gradient: Tensor, param: nn.Parameter, group: Any) -> Tensor:
    part = nn.Parameter(gradient.detach().clone())
    part.__dict__.update(param.__dict__)
    return full_values(part, group).clone()


def expected(name: str) -> dict[str, Any]:
    model = split_models.build(name)
    steps = [(loss, {own: grad.clone() for own, grad in grads.items()}) for loss, grads in split_models.train(model)]
    return {
        "losses": [loss for loss, _ in steps],
        "gradients": [grads for _, grads in steps],
        "weights": {own: param.detach() for own, param in model.named_parameters()},
    }


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    """Compare with the norm of each tensor, or a part of the largest: a key's bias has no gradient but rounding."""
    assert found.keys() == wanted.keys()
    largest = max(float(tensor.norm()) for tensor in wanted.values())
    for name, tensor in wanted.items():
        difference = float((found[name] - tensor).norm()) / max(float(tensor.norm()), 0.1 * largest)
        assert difference <= 3e-6, f"{what} of {name}: {difference}"


@pytest.mark.parametrize("name", MODELS)
def test_a_split_model_trains_as_one_process_does(name: str) -> None:
    needs(name)
    found, wanted = run_on_ranks(2, _trained, name), expected(name)
    for result in found:
        assert result["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
        for step in range(STEPS):
            assert_close(result["gradients"][step], wanted["gradients"][step], f"gradient {step}")
        assert_close(result["weights"], wanted["weights"], "weight")
        assert result["split"].get("vocabulary") == 1, result["split"]
        assert result["split"].get("column_gathered", 0) >= 1
        assert result["notices"] == []
    assert found[0]["losses"] == found[1]["losses"]
