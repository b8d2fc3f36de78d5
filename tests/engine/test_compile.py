"""torch.compile of a model and of its blocks: the engine's hooks are no part of a graph, and results stay the same."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
from harness.logs import logged
from harness.train.parity import WIDTH, Case, TinyLM, Trajectory, micro_batches
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import launcher
from launcher.comm.torch_internals import outside_graphs

# Traces and differentiates as for code generation, then runs torch's own operators: the same bits.
BACKEND = "aot_eager"


class Mlp(nn.Module):
    """A part of a block, with parts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One with a forward of its own: torch compiles none of `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


class Blocks(TinyLM):
    """Two of them: they compile in less time than three."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))


class ReadsFromOutside(Blocks):
    """Reads a parameter of a block without calling its module."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(tokens, targets)
        return loss + F.linear(loss[None, None].expand(1, WIDTH), self.blocks[1].mlp.up.weight).mean()


def _train(rank: int, world_size: int, stage: int, what: str, reads_outside: bool) -> Trajectory:
    case = Case(stage, "fp32", accumulation=2, num_steps=3)
    torch.manual_seed(11)
    model = ReadsFromOutside() if reads_outside else Blocks()
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


def _graphs(rank: int, world_size: int, stage: int) -> list[list[str]]:
    """Return the functions in each graph of what blocks compute, compiled before there is an engine."""
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        graphs.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    case = Case(stage, "fp32", accumulation=1, num_steps=2)
    model = Blocks()
    for block in model.blocks:
        block.compile(backend=backend)
    engine = launcher.initialize(model=model, config=case.config(world_size))[0]
    for [(tokens, targets)] in micro_batches(case):
        engine.backward(engine(tokens, targets))
        engine.step()
    torch._dynamo.reset()
    return graphs


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_compiled_block_is_one_graph(stage: int) -> None:
    for graphs in run_on_ranks(2, _graphs, stage):
        assert graphs == [["layer_norm", "linear", "gelu", "linear"]]  # of both blocks, in each pass


class Reader(nn.Module):
    """Reads a parameter of its owner, which calls it; others do, too."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = [owner]
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * self.scale, self.owner[0].weight)


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) / 2)
        self.reader = Reader(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(x + 0 * self.weight.sum())


class TwoCallers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.owner, self.between = Owner(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.owner.reader(self.between(self.owner(x))).square().mean()


def _train_two_callers(rank: int, world_size: int, is_compiled: bool) -> tuple[list[float], list[int]]:
    """Return the losses, and the number of functions in each graph."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    torch.manual_seed(3)
    model = TwoCallers()
    if is_compiled:
        model.owner.reader.compile(backend=backend)
    case = Case(3, "fp32", 1, unit_numel=WIDTH**2)
    zero = {**case.zero, "stage3_max_reuse_distance": 0}
    engine = launcher.initialize(model=model, config=dataclasses.replace(case, zero=zero).config(world_size))[0]
    losses = []
    for _ in range(4):
        loss = engine(torch.randn(case.batch // world_size, WIDTH))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    torch._dynamo.reset()
    return losses, graphs


def test_a_graph_that_read_a_parameter_within_its_owners_forward_is_not_run_behind_it() -> None:
    """The parameter is a shard there, and no backward would know that the graph reads it."""
    plain, compiled = (run_on_ranks(2, _train_two_callers, is_compiled) for is_compiled in (False, True))
    for (expected, _), (losses, graphs) in zip(plain, compiled, strict=True):
        assert losses == expected
        assert graphs[0] == 2
        assert len(graphs) > 1


def _said_of_modes(rank: int, world_size: int, stage: int) -> list[list[str]]:
    """Return what is said of a block's mode at the start, of the model's when it is compiled, and of what was compiled
    in between at the first step."""
    said = []
    for mode in ("default", "reduce-overhead"):
        model = Blocks()
        model.blocks[1].compile(mode=mode)
        with logged() as lines:
            engine = launcher.initialize(model=model, config=Case(stage, "fp32", 1).config(world_size))[0]
        said.append([line for line in lines if "CUDA graphs" in line])
    with logged() as lines:
        engine.compile(compile_kwargs={"mode": "max-autotune"})
    return [*said, [line for line in lines if "CUDA graphs" in line]]


def _said_at_first_step(rank: int, world_size: int, is_replaced: bool) -> list[str]:
    """Return what is said of a block that is compiled after `initialize()`, over two steps."""
    case, model = Case(3, "fp32", 2, num_steps=2), Blocks()
    engine = launcher.initialize(model=model, config=case.config(world_size))[0]
    if is_replaced:
        model.blocks[1] = torch.compile(model.blocks[1], mode="max-autotune")
    else:
        model.blocks[1].compile(mode="reduce-overhead")
    with logged() as lines, torch.compiler.set_stance("force_eager"):  # none is generated
        for step in micro_batches(case):
            engine.backward(engine(*step[0]))
            engine.step()
    return [line for line in lines if "CUDA graphs" in line]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_cuda_graphs_of_a_block_that_is_compiled_later_are_warned_of_once(is_replaced: bool) -> None:
    (said,), on_the_other = run_on_ranks(2, _said_at_first_step, is_replaced)
    assert "torch.compile of blocks.1 is to record CUDA graphs" in said
    assert on_the_other == []


def test_cuda_graphs_of_gathered_parameters_are_warned_of() -> None:
    (default, of_block, of_model), on_the_other = run_on_ranks(2, _said_of_modes, 3)
    assert default == []
    assert len(of_block) == len(of_model) == 1
    assert "torch.compile of blocks.1 is to record CUDA graphs" in of_block[0]
    assert "torch.compile of the model is to record CUDA graphs" in of_model[0]
    assert run_on_ranks(2, _said_of_modes, 2)[0] == on_the_other == [[], [], []]


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
