"""torch.compile of a model and of its blocks: the engine's hooks are no part of a graph, and results stay the same."""

from __future__ import annotations

import sys

import pytest
import torch
from harness.train.parity import Case, TinyLM, Trajectory, make_model, micro_batches
from harness.train.ranks import run_on_ranks
from torch import Tensor
from torch.nn import functional as F

import launcher
from launcher.comm.torch_internals import outside_graphs

# Traces and differentiates as for code generation, then runs torch's own operators: the same bits.
BACKEND = "aot_eager"


class ReadsFromOutside(TinyLM):
    """Reads a parameter of a block without calling its module."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(tokens, targets)
        return loss + F.linear(loss[None, None].expand(1, 24), self.blocks[1][1].weight).mean()  # type: ignore[index]


def _train(rank: int, world_size: int, stage: int, what: str, reads_outside: bool) -> Trajectory:
    case = Case(stage, "fp32", accumulation=2, num_steps=3)
    torch.manual_seed(11)
    model = ReadsFromOutside() if reads_outside else make_model(case)
    del model.blocks[2]  # two compile in less time than three
    if what == "blocks":
        for block in model.blocks:
            block.compile(backend=BACKEND)
    engine = launcher.initialize(model=model, config=case.config(world_size))[0]
    if what == "model":
        model.compile(backend=BACKEND)
    part = slice(rank * case.batch // world_size, (rank + 1) * case.batch // world_size)
    losses, norms = [], []
    for step in micro_batches(case):
        for tokens, targets in step:
            loss = engine(tokens[part], targets[part])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    torch._dynamo.reset()
    return Trajectory(losses, engine.state_dict(), norms)


@pytest.mark.parametrize(
    ("stage", "what", "reads_outside"),
    [(2, "model", False), (3, "blocks", False), (3, "model", True)],
)
def test_a_compiled_model_trains_as_it_would_otherwise(stage: int, what: str, reads_outside: bool) -> None:
    plain, compiled = (run_on_ranks(2, _train, stage, how, reads_outside) for how in ("nothing", what))
    for one, other in zip(plain, compiled, strict=True):
        assert other.losses == one.losses
        assert other.grad_norms == one.grad_norms
        assert all(torch.equal(other.weights[name], value) for name, value in one.weights.items())


def test_a_hook_outside_of_graphs_runs_as_python() -> None:
    seen = []

    @outside_graphs
    def hook(x: Tensor) -> None:
        seen.append(type(x))
        assert not torch.compiler.is_compiling()

    def forward(x: Tensor) -> Tensor:
        hook(x)
        return x + 1

    assert torch.compile(forward, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]
    assert seen == [torch.Tensor]
    assert "torch._dynamo" in sys.modules


def test_functions_around_hooks_are_not_compiled() -> None:
    def hook(*_: Tensor) -> None:
        pass

    hooks = [outside_graphs(hook) for _ in range(3)]

    def forward(x: Tensor) -> Tensor:
        for number, each in enumerate(hooks):
            each(*[x] * number)
        return x + 1

    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.compile(forward, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]
