"""PipelineModule: the same model, weights and gradients for any number of stages; what it takes and refuses."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness.train.stages import assert_whole, chain
from torch import Tensor, nn

from launcher.base.errors import ConfigError, EngineError
from launcher.config.schema_parallel import Pipeline
from launcher.parallel.pipeline.divide import Profiling, requested_stages, stage_model
from launcher.parallel.pipeline.module import PipelineModule
from launcher.parallel.pipeline.specs import LayerSpec, TiedLayerSpec
from launcher.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from launcher.sharding.mesh import MeshSizes

WIDTH, VOCABULARY = 8, 12
built: list[int] = []  # positions of blocks that were built with values


class Embedding(nn.Embedding):
    """Tokens and a mask, as one tuple -> hidden states and the mask."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        tokens, mask = inputs
        return super().forward(tokens), mask


class Block(nn.Module):
    """A layer over a tuple whose second part carries no gradient."""

    def __init__(self, position: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.num_forwards = 0
        if not self.linear.weight.is_meta:
            built.append(position)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = inputs
        self.num_forwards += 1
        return x + self.dropout(torch.tanh(self.linear(x))) * mask[..., None], mask


def without_mask(inputs: tuple[Tensor, Tensor]) -> Tensor:
    """A layer that is a function."""
    return inputs[0]


def logits(embedding: nn.Embedding, x: Tensor) -> Tensor:
    """What the head makes of the tied embedding."""
    return nn.functional.linear(x, embedding.weight)


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def layers(num_blocks: int = 4, dropout: float = 0.0) -> list[Any]:
    return [
        TiedLayerSpec("embed", Embedding, VOCABULARY, WIDTH),
        *[LayerSpec(Block, position, dropout=dropout) for position in range(num_blocks)],
        without_mask,
        nn.LayerNorm(WIDTH),
        TiedLayerSpec("embed", Embedding, VOCABULARY, WIDTH, forward_fn=logits),
    ]


def module(seed: int = 3, **arguments: Any) -> PipelineModule:
    torch.manual_seed(seed)
    torch.rand(1)  # a script draws numbers before
    dropout = arguments.pop("dropout", 0.0)
    return PipelineModule(layers(dropout=dropout), loss_fn=loss_fn, **arguments)


def staged(own: Sequence[Sequence[int]], settings: Pipeline | None = None, **arguments: Any) -> list[Any]:
    """What the ranks with these stages have."""
    num_stages = 1 + max(stage for stages in own for stage in stages)
    given = settings or Pipeline(partition="uniform")
    return [stage_model(module(**arguments), stages, num_stages, given) for stages in own]


def batch(seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (2, 5), generator=generator)
    return [[tokens, (tokens % 3 > 0).long()], tokens.roll(1)]  # lists, as a DataLoader makes them


class Whole(nn.Module):
    """The same layers in one piece, with the weights of stages."""

    def __init__(self, parts: Sequence[PipelineModule]) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({"embed": Embedding(VOCABULARY, WIDTH)})
        for position in range(4):
            self.add_module(str(1 + position), Block(position))
        self.add_module("6", nn.LayerNorm(WIDTH))
        for part in parts:
            for name, param in part.named_parameters():
                self.get_parameter(name).data.copy_(param.data)

    def forward(self, given: Any) -> Tensor:
        (tokens, mask), labels = given
        embedding: Any = self.tied_modules["embed"]
        x = embedding((tokens, mask))
        for position in range(4):
            x = self.get_submodule(str(1 + position))(x)
        return loss_fn(logits(embedding, self.get_submodule("6")(x[0])), labels)


STAGES = [[(0,)], [(0,), (1,)], [(0,), (1,), (2,), (3,)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]


@pytest.mark.parametrize("own", STAGES, ids=str)
def test_any_number_of_stages_computes_what_one_process_does(own: list[tuple[int, ...]]) -> None:
    parts = staged(own)
    whole = Whole(parts)
    for seed in range(2):
        loss: Tensor = whole(batch(seed))
        loss.backward()
        torch.testing.assert_close(chain(parts, batch(seed)), loss.detach(), rtol=1e-6, atol=0)
    assert_whole(parts, whole)
    assert parts[0].tied == (
        {"tied_modules.embed.weight": (0, parts[0].num_stages - 1)} if len(parts[0].stages) > 1 else {}
    )


@pytest.mark.parametrize(
    "arguments", [{}, {"seed_layers": True, "base_seed": 7}], ids=["torch.manual_seed", "seed_layers"]
)
def test_initial_weights_do_not_depend_on_the_number_of_stages(arguments: dict[str, Any]) -> None:
    found = []
    for own in STAGES:
        parts = staged(own, **arguments)
        found.append({name: param.clone() for part in parts for name, param in part.named_parameters()})
        copies = [part.get_parameter("tied_modules.embed.weight") for part in parts if "embed" in part.tied_modules]
        assert all(torch.equal(copy, copies[0]) for copy in copies)
    for weights in found[1:]:
        assert weights.keys() == found[0].keys()
        assert all(torch.equal(weights[name], found[0][name]) for name in weights)
    other = {name: param for part in staged([(0,)], seed=4, **arguments) for name, param in part.named_parameters()}
    is_same = [torch.equal(other[name], found[0][name]) for name in other if name.endswith("linear.weight")]
    assert all(is_same) == bool(arguments)
    assert len({param.sum().item() for name, param in found[0].items() if name.endswith("linear.weight")}) == 4


def test_a_rank_builds_its_own_layers_alone_and_draws_as_if_it_built_none() -> None:
    model = module()
    assert {name: tuple(param.shape) for name, param in model.named_parameters()}["2.linear.weight"] == (WIDTH, WIDTH)
    assert model.get_parameter("2.linear.weight").is_meta
    assert model.whole_names == {name for name, _ in Whole([]).named_parameters()}
    before = torch.get_rng_state()
    built.clear()
    part = stage_model(model, (1,), 4, Pipeline(partition="uniform"))
    assert torch.equal(before, torch.get_rng_state())
    assert built == [1, 2]
    assert [name for name, _ in part.named_children()] == ["tied_modules", "2", "3"]
    assert not any(param.is_meta for param in part.parameters())
    assert part.partition_text.startswith(
        "stage 0: 0 Embedding to 1 Block (2 layers), 168 parameters; stage 1: 2 Block"
    )


def test_layers_of_other_stages_are_freed() -> None:
    layers = [nn.Linear(4, 4) for _ in range(4)]
    part = stage_model(PipelineModule(layers, loss_fn=loss_fn), (1,), 2, Pipeline())
    assert [name for name, _ in part.named_parameters()] == ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert part.get_submodule("2") is layers[2]
    assert part._layers[0] is not layers[0]


def test_a_loss_with_parameters_is_on_the_last_stage() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
            return self.scale * nn.functional.mse_loss(outputs, labels)

    def made() -> PipelineModule:
        torch.manual_seed(0)
        return PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], loss_fn=Scaled())

    parts = [stage_model(made(), (stage,), 2, Pipeline()) for stage in range(2)]
    chain(parts, (torch.ones(1, 2), torch.zeros(1, 2)))
    assert [len(list(part.parameters())) for part in parts] == [2, 3]
    assert parts[1].get_parameter("loss_fn.scale").grad is not None
    assert parts[0].whole_names == {name for part in parts for name, _ in part.named_parameters()}


def test_a_class_that_needs_values_is_built_for_its_sizes() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.scale = 1 / self.weight.abs().max().item()

    model = PipelineModule([LayerSpec(Scaled), nn.Linear(2, 2)])
    assert model.get_parameter("0.weight").is_meta
    assert not stage_model(model, (0,), 2, Pipeline()).get_parameter("0.weight").is_meta


# ---- random numbers and recomputation ----


def test_seeded_layers_drop_the_same_on_any_number_of_stages() -> None:
    losses = []
    for own in STAGES[:3]:
        parts = staged(own, dropout=0.5, seed_layers=True)
        losses.append([chain(parts, batch()).item() for _ in range(2)])
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][0] != losses[0][1]  # each micro-batch has masks of its own


def test_a_seed_function_is_called_for_each_layer() -> None:
    seeds: list[int] = []

    def seed_fn(seed: int) -> None:
        seeds.append(seed)
        random.seed(seed)

    state = random.getstate()
    part = stage_model(module(seed_layers=True, seed_fn=seed_fn, base_seed=100), (1,), 2, Pipeline(partition="uniform"))
    assert seeds == [104, 100]
    assert random.getstate() == state
    part(1, tuple(torch.ones(2, 5, *tail) for tail in ((WIDTH,), ())))
    assert seeds[2:] == [204, 205, 206, 207]


@pytest.mark.parametrize("interval", [1, 2])
def test_layers_are_recomputed_in_groups(interval: int) -> None:
    plain, again = staged([(0,), (1,)], dropout=0.5), staged([(0,), (1,)], dropout=0.5)
    for part in again:
        part.set_checkpoint_interval(interval)
    torch.manual_seed(0)
    wanted = chain(plain, batch())
    torch.manual_seed(0)
    assert torch.equal(chain(again, batch()), wanted)
    for one, other in zip(plain, again, strict=True):
        for name, param in one.named_parameters():
            assert torch.equal(other.get_parameter(name).grad, param.grad), name
    assert all(block.num_forwards == 2 for part in again for block in part.modules() if isinstance(block, Block))


def test_the_config_s_interval_and_the_named_classes_count() -> None:
    calls: list[int] = []

    def recompute(function: Any, *inputs: Tensor) -> Any:
        calls.append(len(inputs))
        return function(*inputs)

    arguments = {"activation_checkpoint_func": recompute, "checkpointable_layers": ["Block"]}
    settings = Pipeline(partition="uniform", activation_checkpoint_interval=1)
    parts = staged([(0,)], settings, **arguments)
    chain(parts, batch())
    assert calls == [2, 2, 2, 2]
    with torch.no_grad():
        parts[0](0, (), batch())
    assert len(calls) == 4


# ---- partitions ----


@pytest.mark.parametrize(
    ("method", "bounds"),
    [("uniform", [0, 4]), ("parameters", [0, 3]), ("type:^block$", [0, 3]), ("best", [0, 3])],
)
def test_the_config_and_then_the_model_say_how_layers_are_divided(method: str, bounds: list[int]) -> None:
    by_model = stage_model(module(partition_method=method), (0,), 2, Pipeline())
    assert [stage.layers.start for stage in by_model.stages] == bounds
    by_config = stage_model(module(partition_method="uniform"), (0,), 4, Pipeline(partition="type:Block"))
    assert [stage.layers.start for stage in by_config.stages][1:] == [2, 3, 4]


def test_layers_are_timed_once_and_all_ranks_go_by_it() -> None:
    calls: list[list[float]] = []

    def on_rank_0(measure: Any) -> list[float]:
        calls.append(measure())
        return [1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0]

    inputs, _ = batch()
    settings, profiling = Pipeline(partition="profile"), Profiling(on_rank_0=on_rank_0)
    part = stage_model(module(example_input=tuple(inputs)), (0,), 3, settings, profiling=profiling)
    assert [stage.layers for stage in part.stages] == [range(4), range(4, 5), range(5, 8)]
    assert len(calls[0]) == 8
    assert all(seconds > 0 for seconds in calls[0])
    with pytest.raises(ConfigError, match="there are none") as caught:
        stage_model(module(), (0,), 2, settings)
    assert "PipelineModule(example_input=...)" in str(caught.value)


# ---- topologies ----


def test_a_topology_says_how_many_stages_there_are() -> None:
    for topology in (PipeDataParallelTopology(2, 3), PipeModelDataParallelTopology(2, 1, 3)):
        model = module(topology=topology)
        assert requested_stages(model) == model.num_stages == 2
        stage_model(model, (0,), 2, Pipeline(), sizes=MeshSizes(3, pipeline=2))
    assert requested_stages(nn.Linear(1, 1)) is requested_stages(module()) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"topology": PipeDataParallelTopology(2, 2)},
            r"the model's topology has 2 \(pipe\) × 2 \(data\), and the config",
        ),
        ({"topology": ProcessTopology(["data", "pipe"], [3, 2])}, "rank 1 would have another place"),
        ({"num_stages": 3}, "the model was built for 3 stages, and the config asks for 2"),
    ],
)
def test_another_mesh_than_the_config_s_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        stage_model(module(**arguments), (0,), 2, Pipeline(), sizes=MeshSizes(3, pipeline=2))


def test_topologies_answer_as_deepspeed_s_do() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert (topology.get_dim("data"), topology.get_dim("expert"), topology.world_size()) == (2, 0, 8)
    assert topology.get_rank(pipe=1, data=0, model=1) == 5
    assert topology.get_coord(5) == (1, 0, 1)
    assert topology.get_coord(5).data == 0
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("expert") == []
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_axis_list("model", 0) == [0, 2, 4, 6]
    assert topology.get_rank_repr(3) == "model_01"
    with pytest.raises(ValueError, match="needs all of"):
        topology.get_rank(pipe=0)
    with pytest.raises(ValueError, match="rank 8"):
        topology.get_coord(8)


# ---- refused ----


REFUSED: list[tuple[Any, str]] = [
    (lambda: LayerSpec(torch.tanh), "LayerSpec describes a subclass of torch.nn.Module"),
    (lambda: PipelineModule([nn.Linear]), "layer 0, .* is neither a LayerSpec, a module nor a function"),
    (lambda: PipelineModule([module()]), "layer 0 is a PipelineModule itself"),
    (lambda: PipelineModule([]), "at least one layer"),
    (lambda: module(num_stages=0), "num_stages must be at least 1"),
    (lambda: module(num_stages=3, topology=PipeDataParallelTopology(2, 1)), "num_stages 3 contradicts the topology"),
    (
        lambda: PipelineModule([TiedLayerSpec("x", nn.Linear, 2, 2, tied_weight_attr="embedding")]),
        'the tied layer "x" has no parameter embedding; its parameters are bias, weight',
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_models_that_are_not_right_are_refused(make: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        make()


def test_layers_that_share_a_parameter_unsaid_are_refused_on_two_stages() -> None:
    shared = nn.Linear(4, 4)
    relu = nn.ReLU()
    stage_model(PipelineModule([shared, relu, shared, relu]), (0,), 1, Pipeline())
    with pytest.raises(EngineError, match=r"layer 2 \(Linear\) shares a parameter") as caught:
        stage_model(PipelineModule([shared, relu, shared, relu]), (0,), 2, Pipeline(partition="uniform"))
    assert "TiedLayerSpec" in str(caught.value)


def test_a_sequential_needs_a_loss() -> None:
    sequential = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(EngineError, match=r"PipelineModule\(model, loss_fn=...\)"):
        stage_model(sequential, (0,), 2, Pipeline())
    whole = copy.deepcopy(sequential)
    parts = [
        stage_model(PipelineModule(copy.deepcopy(sequential), loss_fn=nn.functional.mse_loss), (i,), 2, Pipeline())
        for i in range(2)
    ]
    inputs, labels = torch.randn(3, 4), torch.randn(3, 2)
    loss = nn.functional.mse_loss(whole(inputs), labels)
    loss.backward()
    assert torch.equal(chain(parts, (inputs, labels)), loss.detach())
    assert_whole(parts, whole)


def test_what_layers_and_losses_return_is_checked() -> None:
    part = stage_model(PipelineModule([nn.Identity(), lambda x: {"x": x}, nn.Identity()]), (0,), 1, Pipeline())
    with pytest.raises(EngineError, match="the last layer returned dict and not a scalar loss"):
        part.loss(part(0, (), (torch.ones(2), None)), (torch.ones(2), None))
    part = stage_model(
        PipelineModule([nn.Linear(2, 2), lambda x: {"x": x}, nn.Identity()]),
        (0,),
        2,
        Pipeline(partition="type:func|lam"),
    )
    with pytest.raises(EngineError, match=r"layer 1 \(<lambda>\) returned dict, and the next stage receives tensors"):
        part(0, (), (torch.ones(2), None))
    for wrong in (torch.ones(2), {"inputs": 1}, (torch.ones(2),)):
        with pytest.raises(EngineError, match=r"takes micro-batches \(inputs, labels\)"):
            part(0, (), wrong)


def test_what_a_script_freezes_before_it_is_built_stays_frozen() -> None:
    layers = [
        TiedLayerSpec("tied", nn.Linear, 4, 4),
        LayerSpec(nn.Linear, 4, 4),
        TiedLayerSpec("tied", nn.Linear, 4, 4),
    ]
    model = PipelineModule(layers, num_stages=1, loss_fn=nn.functional.mse_loss)
    for name, param in model.named_parameters():
        param.requires_grad_(name == "1.bias")
    model.prepare(1, [1.0] * 3)
    model.assign([0])
    assert [name for name, param in model.named_parameters() if param.requires_grad] == ["1.bias"]
