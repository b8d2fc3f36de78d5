"""Whole models split over ranks: losses, gradients, generated tokens and exchanges, against one process."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from harness.train import split_models
from harness.train.collective import CountingCommunicator, communicators
from harness.train.ranks import run_on_ranks
from harness.train.split_models import EXAMPLE, FAMILIES, TORCH
from torch import Tensor, nn

from launcher.comm.groups import world_group
from launcher.config.schema_parallel import TensorParallel
from launcher.parallel.tensor.functions import full_values
from launcher.parallel.tensor.split import split_model
from launcher.zero.marks import split_of

MODELS = [*FAMILIES, EXAMPLE, TORCH]
STEPS = 3


def needs(name: str) -> None:
    if not split_models.has(name):
        pytest.skip("transformers is not installed")


def build(name: str) -> Any:
    """Return the model in fp64: what differs then is no rounding of sums, whose order is the processor's."""
    model: Any = split_models.build(name).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other one takes no fp64
    return model


def _trained(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Train split over all ranks; return losses, whole gradients of each step, whole weights, what was split."""
    group = world_group()
    model = build(name)
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
    model = build(name)
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
        assert difference <= 1e-6, f"{what} of {name}: {difference}"


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


def _generated(rank: int, world_size: int, name: str) -> Tensor:
    model: Any = split_models.build(name)
    split_model(model, world_group(), TensorParallel())
    return _generate(model)


def _generate(model: Any) -> Tensor:
    prompt = split_models.tokens(7)
    found: Tensor = model.eval().generate(prompt, max_new_tokens=8, do_sample=False, attention_mask=prompt > 0)
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "bloom"])
def test_a_split_model_generates_what_one_process_does(name: str) -> None:
    needs(name)
    wanted = _generate(split_models.build(name))
    assert wanted.shape[1] == split_models.LENGTH + 8
    for found in run_on_ranks(2, _generated, name):
        assert found.tolist() == wanted.tolist()


def _counted(rank: int, world_size: int, num_layers: int) -> tuple[dict[str, int], dict[str, int]]:
    """How many collectives a forward and a backward of the layers of a Llama begin."""
    counts: Counter[str] = Counter()
    with communicators("gloo", lambda inner: CountingCommunicator(inner, counts)):
        group = world_group()
        model: Any = split_models.build("llama")
        model.model.layers = model.model.layers[:num_layers]
        split_model(model, group, TensorParallel())
        counts.clear()
        loss = split_models.loss_of(model, split_models.tokens(0))
        forward = dict(counts)
        counts.clear()
        loss.backward()
    return forward, dict(counts)


def test_a_layer_of_llama_begins_four_all_reduces() -> None:
    needs("llama")
    (forward, backward), (fewer, back) = run_on_ranks(2, _counted, 2)[0], run_on_ranks(2, _counted, 1)[0]
    assert forward["all_reduce"] - fewer["all_reduce"] == 2
    assert backward["all_reduce"] - back["all_reduce"] == 2
    assert fewer == {"all_reduce": 1 + 2, "all_gather": 1}  # the embedding; the logits
    assert back == {"all_reduce": 1 + 2}  # the input of the head


def _in_eval(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    whole, model = split_models.build(TORCH).eval(), split_models.build(TORCH).eval()
    split_model(model, world_group(), TensorParallel())
    with torch.no_grad():
        return whole(split_models.tokens(0)), model(split_models.tokens(0))


def test_torch_s_own_layer_does_not_pass_its_split_weights_to_a_fused_kernel() -> None:
    for wanted, found in run_on_ranks(2, _in_eval):
        torch.testing.assert_close(found, wanted)


def _recomputed(rank: int, world_size: int, reentrant: bool) -> dict[str, Tensor]:
    model = build("llama")
    split_model(model, world_group(), TensorParallel())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    _, grads = next(split_models.train(model.train()))
    params = dict(model.named_parameters())
    return {name: _whole(grad, params[name], world_group()) for name, grad in grads.items()}


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_are_recomputed(reentrant: bool) -> None:
    needs("llama")
    for found in run_on_ranks(2, _recomputed, reentrant):
        assert_close(found, expected("llama")["gradients"][0], "gradient")
