"""Models that no stage can train end in one error, before they are touched."""

from __future__ import annotations

import pytest
import torch
from harness.logs import logged
from harness.train.ranks import run_on_ranks
from torch import nn

import launcher
from launcher.base.errors import EngineError
from launcher.zero import set_z3_leaf_modules, unset_z3_leaf_modules

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}


def test_a_complex_parameter_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_parameter("turns", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(EngineError, match=r"the parameter 0\.turns is complex.*view_as_real"):
        launcher.initialize(model=model, config=CONFIG)
    assert model[0].turns.dtype == torch.complex64  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_module_is_named() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    for model, name in ((nn.Sequential(scripted), "the module 0"), (scripted, "the model")):
        with pytest.raises(EngineError, match=rf"{name} is a scripted module .*the module it was made from"):
            launcher.initialize(model=model, config=CONFIG)


def said_of_leaves(stage: int, **section: list[str]) -> list[str]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1)))
    config = {**CONFIG, "zero_optimization": {"stage": stage, "leaf_module": section}}
    with logged() as lines:
        launcher.initialize(model=model, config=config)
    return [line for line in lines if line.startswith("leaf_module.")]


def test_a_leaf_module_that_is_not_there_is_named() -> None:
    assert said_of_leaves(
        3,
        classes=["Sequental", "torch.nn.modules.linear.Linear"],
        names=["1.0", "layers"],
        name_suffixes=["0", "experts"],
    ) == [
        'leaf_module.classes: the model has no "Sequental"; did you mean "Sequential"?',
        'leaf_module.names: the model has no "layers"; it has no effect',
        'leaf_module.name_suffixes: the model has no "experts"; it has no effect',
    ]
    assert said_of_leaves(2, classes=["Sequental"]) == []  # all of leaf_module is said to have no effect


def test_leaves_may_be_one_class_or_one_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1)))
    assert set_z3_leaf_modules(model, nn.Linear) == set_z3_leaf_modules(model, "Linear") == [model[0], model[1][0]]  # type: ignore[index]
    assert unset_z3_leaf_modules(model, "Linear") == [model[0], model[1][0]]  # type: ignore[index]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_is_unfrozen_later_is_named(stage: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    engine = launcher.initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": stage}})[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    model[0].requires_grad_(True)
    engine.backward(engine(torch.ones(1, 2)).sum())
    with pytest.raises(EngineError, match=r"the parameter 0\.weight was unfrozen after initialize\(\)"):
        engine.step()


def test_a_model_that_is_cast_later_is_named() -> None:
    model = nn.Linear(2, 1)
    engine = launcher.initialize(model=model, config=CONFIG)[0]
    model.bfloat16()
    engine.backward(engine(torch.ones(1, 2, dtype=torch.bfloat16)).sum())
    with pytest.raises(
        EngineError, match=r"weight became torch.bfloat16 after initialize\(\), which made it .*float32"
    ):
        engine.step()


def _changed(rank: int, world_size: int, stage: int, how: str) -> str:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {**CONFIG, "zero_optimization": zero}
    body = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    engine = launcher.initialize(model=nn.Sequential(body, nn.Linear(4, 1)), config=config)[0]
    tokens = torch.tensor([rank, 2])

    def step() -> None:
        engine.backward(engine(tokens).sum())
        engine.step()

    step()
    if how == "wrapped":  # no parameter is new, or to be trained
        engine.module[0] = nn.Sequential(engine.module[0], nn.Identity(), nn.Linear(4, 4).requires_grad_(False))
        step()
        return "nothing"
    if how == "replaced":
        body[1] = nn.Linear(4, 4)
    elif how == "added":
        body.append(nn.Linear(4, 4))
    else:  # as transformers' resize_token_embeddings does
        body[0].weight.data = torch.randn(9, 4)
    with pytest.raises(EngineError) as error:
        step()
    return str(error.value)


@pytest.mark.parametrize(
    ("stage", "how", "told"),
    [
        (0, "replaced", "the module 0.1 was added or replaced after initialize(), which would not train its parameter"),
        (3, "replaced", "parameter 0.1.weight; change the model before initialize(), or call initialize() anew; at"),
        (2, "added", "the module 0.2 was added or replaced after initialize()"),
        (0, "resized", "the parameter 0.0.weight has another shape than at initialize(): (8, 4) then, (9, 4) now;"),
        (2, "resized", "change the model before initialize(), or call initialize() anew"),
        (2, "wrapped", "nothing"),
    ],
)
def test_a_module_that_comes_later_is_named(stage: int, how: str, told: str) -> None:
    assert all(told in said for said in run_on_ranks(2, _changed, stage, how))


def _cast_shards(rank: int, world_size: int, how: str) -> str:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine = launcher.initialize(model=nn.Linear(8, 8), config=config)[0]
    x = torch.ones(2, 8)
    if how == "functional_call":
        values = {name: param * 1.0 for name, param in engine.module.named_parameters()}
        with pytest.raises(EngineError) as error:
            torch.func.functional_call(engine.module, values, (x,))
        return str(error.value)
    (engine.half if how == "half" else engine.module.bfloat16)()
    with pytest.raises(EngineError) as error:
        engine(x)
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("half", "the parameter weight became torch.float16 after initialize(), which made it torch.float32: at stage"),
        ("bfloat16", "the parameter weight became torch.bfloat16 after initialize()"),
        ("functional_call", "for torch.func.functional_call with other values take a copy made before initialize()"),
    ],
)
def test_shards_are_neither_cast_nor_replaced(how: str, told: str) -> None:
    assert all(told in said for said in run_on_ranks(2, _cast_shards, how))
