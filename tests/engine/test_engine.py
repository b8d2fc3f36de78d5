"""The engine as scripts use it: what it accepts, what it refuses, and that variants train like plain torch."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from harness.logs import logged
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import launcher
from launcher.base import env, progress
from launcher.base.errors import CheckpointError, ConfigError, EngineError
from launcher.base.progress import make_counter, read_counter
from launcher.engine.checkpoints import Checkpoints
from launcher.engine.engine import Engine

STEPS, SAMPLES, WIDTH = 6, 8, 10
LR = 1e-2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("offset", torch.full((1,), 0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.body(x))))
        return F.mse_loss(self.head(hidden).squeeze(-1) + self.offset, y)


def make_net() -> Net:
    torch.manual_seed(3)
    return Net()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, SAMPLES, WIDTH, generator=generator), torch.randn(STEPS, SAMPLES, generator=generator)


def config(stage: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,  # DeepSpeed's default, ours too, is 1.0
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        **more,
    }


def alone(**more: Any) -> Any:
    return launcher.initialize(model=make_net(), config=config(**more))[0]


def batch() -> tuple[Tensor, Tensor]:
    x, y = data()
    return x[0], y[0]


# ---- variants that must train like plain torch ----


def _groups(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": list(model.body.parameters()), "lr": 3e-2},
        {"params": list(model.head.parameters()), "weight_decay": 0.5},
    ]


VARIANTS = [
    "groups",
    "client optimizer",
    "optimizer function",
    "frozen",
    "scheduler function",
    "scheduler set later",
    "Adam with L2",
]


def _train_variant(rank: int, world_size: int, variant: str, stage: int) -> dict[str, Tensor]:
    model = make_net()
    arguments: dict[str, Any] = {"config": config(stage)}
    arguments["config"]["train_micro_batch_size_per_gpu"] = SAMPLES // world_size
    if variant == "groups":
        arguments["model_parameters"] = _groups(model)
        model.frozen.requires_grad_(False)
    elif variant == "frozen":
        model.frozen.requires_grad_(False)
    elif variant == "client optimizer":
        arguments["optimizer"] = torch.optim.Adam(model.parameters(), lr=LR, betas=(0.8, 0.9))
    elif variant == "optimizer function":
        arguments["optimizer"] = lambda params: torch.optim.AdamW(params, lr=LR, eps=1e-6)
    elif variant == "scheduler function":
        arguments["lr_scheduler"] = lambda optimizer: HalvingSchedule(optimizer.param_groups)
    elif variant == "Adam with L2":
        params = {"lr": LR, "weight_decay": 0.1, "adam_w_mode": False}
        arguments["config"]["optimizer"] = {"type": "Adam", "params": params}
    engine, *_ = launcher.initialize(model=model, **arguments)
    if variant == "scheduler set later":
        engine.lr_scheduler = HalvingSchedule(engine.optimizer.param_groups)
    part = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    for x, y in zip(*data(), strict=True):
        engine.backward(engine(x[part], y[part]))
        engine.step()
    return engine.state_dict()


class HalvingSchedule:
    """A client's schedule: half the rate after every step."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.groups = groups

    def step(self) -> None:
        for group in self.groups:
            group["lr"] *= 0.5


def _plain_variant(variant: str) -> dict[str, Tensor]:
    model = make_net()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    if variant == "groups":
        optimizer = torch.optim.AdamW(_groups(model), lr=LR, weight_decay=0.0)
        model.frozen.requires_grad_(False)
    elif variant == "frozen":
        model.frozen.requires_grad_(False)
    elif variant == "client optimizer":
        optimizer = torch.optim.Adam(model.parameters(), lr=LR, betas=(0.8, 0.9))
    elif variant == "optimizer function":
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-6)
    elif variant == "Adam with L2":
        optimizer = torch.optim.Adam(model.parameters(), lr=LR, weight_decay=0.1)
    schedule = HalvingSchedule(optimizer.param_groups)
    for x, y in zip(*data(), strict=True):
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if variant in ("scheduler function", "scheduler set later"):
            schedule.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_train_like_plain_torch(variant: str, stage: int) -> None:
    expected = _plain_variant(variant)
    for found in run_on_ranks(2, _train_variant, variant, stage):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def _train_with_its_own_schedule(rank: int, world_size: int) -> list[float]:
    model = make_net()
    rates: list[float] = []
    make: Any = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    engine, optimizer, *_ = launcher.initialize(model=model, config=config(2), lr_scheduler=make)
    engine.lr_scheduler = None  # as Lightning does, which steps the schedule itself
    for x, y in zip(*data(), strict=True):
        engine.backward(engine(x[:1], y[:1]))
        engine.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_a_schedule_that_a_script_takes_away_is_not_stepped() -> None:
    for rates in run_on_ranks(2, _train_with_its_own_schedule):
        assert rates == [LR] * len(rates)


# ---- the interface ----


def test_accumulation_steps_only_at_the_boundary() -> None:
    engine = alone(gradient_accumulation_steps=3)
    before = engine.module.head.weight.detach().clone()
    for micro in range(3):
        assert engine.is_gradient_accumulation_boundary() == (micro == 2)
        assert torch.equal(engine.module.head.weight, before)
        engine.backward(engine(*batch()))
        engine.step()
    assert not torch.equal(engine.module.head.weight, before)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (1, 3, 3 * SAMPLES)


def test_the_boundary_can_be_set_by_hand() -> None:
    engine = alone(gradient_accumulation_steps=4)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(*batch()))
    engine.step()
    assert engine.global_steps == 1


def test_a_learning_rate_written_into_the_groups_is_used() -> None:
    engine = alone()
    engine.optimizer.param_groups[0]["lr"] = 0.0
    before = engine.module.head.weight.detach().clone()
    engine.backward(engine(*batch()))
    engine.step()
    assert torch.equal(engine.module.head.weight, before)
    assert engine.get_lr() == [0.0]


def test_zero_grad_drops_what_was_gathered() -> None:
    engine, once = alone(), alone()
    engine.backward(engine(*batch()) * 1000)
    engine.zero_grad()
    for each in (engine, once):
        each.backward(each(*batch()))
        each.step()
    assert engine.get_global_grad_norm() == pytest.approx(once.get_global_grad_norm())


def test_loaded_weights_are_the_ones_that_train_on() -> None:
    source, target = alone(bf16={"enabled": True}), alone(bf16={"enabled": True})
    x, y = batch()
    for _ in range(3):
        source.backward(source(x.bfloat16(), y.bfloat16()))
        source.step()
    target.load_state_dict(source.state_dict())
    target.optimizer.param_groups[0]["lr"] = 0.0  # a step that changes nothing must keep the loaded weights
    target.backward(target(x.bfloat16(), y.bfloat16()))
    target.step()
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name


def test_attributes_of_the_model_are_the_engines_too() -> None:
    engine = alone()
    assert engine.head is engine.module.head
    assert engine.train_batch_size() == SAMPLES
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.no_such_thing


def test_the_line_of_a_step() -> None:
    engine = alone(steps_per_print=2)
    with logged() as lines:
        for _ in range(4):
            engine.backward(engine(*batch()))
            engine.step()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["2", "4"]
    assert all("loss" in line and "lr 0.01" in line and "grad norm" in line for line in steps)


# ---- elasticity ----


def _elastic_norms(rank: int, world_size: int) -> tuple[list[float], list[str], tuple[int, int, int]]:
    """Train two batches of 12 samples, dealt out to the ranks by the engine's own sizes."""
    settings = config(elasticity={"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3]})
    del settings["train_micro_batch_size_per_gpu"]
    with logged() as lines:
        engine = launcher.initialize(model=make_net(), config=settings)[0]
    x, y = (part.flatten(0, 1) for part in data())
    micro, steps = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    norms = []
    for start in range(0, 24, micro * world_size):
        part = slice(start + rank * micro, start + (rank + 1) * micro)
        engine.backward(engine(x[part], y[part]))
        is_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if is_boundary:
            norms.append(float(engine.get_global_grad_norm()))
    return norms, lines, (engine.train_batch_size(), micro, steps)


def test_elastic_worlds_train_alike() -> None:
    """The batch, and with it every step, is the same on one and on two ranks; only the micro-batches differ."""
    (alone_norms, lines, alone_sizes), *_ = run_on_ranks(1, _elastic_norms)
    (both_norms, _, both_sizes), *_ = run_on_ranks(2, _elastic_norms)
    assert (alone_sizes, both_sizes) == ((12, 3, 4), (12, 3, 2))
    assert len(alone_norms) == 2
    assert alone_norms == pytest.approx(both_norms, rel=1e-5)
    assert any("micro 3 × accumulation 4 × dp 1 = batch 12" in line for line in lines)
    assert any("train_batch_size = 12" in line and "elasticity: the batch fits 5 world sizes" in line for line in lines)


def test_a_world_that_elasticity_does_not_allow() -> None:
    elasticity = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3], "min_gpus": 2}
    settings = config(elasticity=elasticity)
    del settings["train_micro_batch_size_per_gpu"]
    with pytest.raises(ConfigError, match="world size 1 does not fit the elastic batch 12; the nearest that fit: 2"):
        launcher.initialize(model=make_net(), config=settings)


# ---- data ----


def _loader(rank: int, world_size: int) -> tuple[list[list[int]], int]:
    model = nn.Linear(1, 1)
    dataset = TensorDataset(torch.arange(20.0).unsqueeze(1))
    settings = config() | {"train_micro_batch_size_per_gpu": 5}
    _, _, loader, _ = launcher.initialize(model=model, training_data=dataset, config=settings)
    assert loader is not None
    return [[int(value) for value in part.flatten()] for (part,) in loader], len(loader)


def test_training_data_is_split_over_the_ranks() -> None:
    results = run_on_ranks(2, _loader)
    assert [num_batches for _, num_batches in results] == [2, 2]
    assert all(len(part) == 5 for batches, _ in results for part in batches)
    assert sorted(value for batches, _ in results for part in batches for value in part) == list(range(20))


# ---- losses and gradients that are not finite ----


def _nan_on_rank_1(rank: int, world_size: int, stage: int) -> tuple[bool, bool, int, list[str]]:
    engine, optimizer, _, _ = launcher.initialize(model=make_net(), config=config(stage))
    before = engine.state_dict()
    x, y = batch()
    records: list[dict[str, Any]] = []
    journal = SimpleNamespace(add=lambda kind, **fields: records.append({"kind": kind, **fields}))
    with logged() as lines, mock.patch("launcher.engine.last_step.own_journal", return_value=journal):
        engine.backward(engine(x, y) * (math.nan if rank == 1 else 1.0))
        engine.step()
        for _ in range(3):  # said once
            loss = engine(x, y)
            if rank == 0:  # a finite loss whose gradient is not
                loss = loss + (engine.module.head.bias * 0.0).sqrt().sum() * 0.0
            engine.backward(loss)
            engine.step()
    unchanged = all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    found = {"step": 2, "what": "gradient", "module": "head.bias", "last_finite": None}
    assert records == [{"kind": "nonfinite", **found}]
    return unchanged, optimizer.overflow, engine.skipped_steps, lines


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_that_is_not_finite_is_skipped_and_the_culprit_named(stage: int) -> None:
    results = run_on_ranks(2, _nan_on_rank_1, stage)
    for unchanged, overflow, skipped, _ in results:
        assert (unchanged, overflow, skipped) == (True, True, 4)
    assert results[0][3] == [
        "step 1 skipped: the loss is nan on rank 1",
        *(f"step {step} skipped: the gradient norm is nan, first in head.bias" for step in (2, 3, 4)),
    ]
    assert results[1][3] == []


# ---- misuse ----


def test_step_without_backward() -> None:
    with pytest.raises(EngineError, match="without a backward"):
        alone().step()


def test_backward_around_the_engine() -> None:
    engine = alone()
    with pytest.raises(EngineError, match=r"not computed from what engine\(\.\.\.\) returned"):
        engine.module(*batch()).backward()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.ones(2, requires_grad=True), r"scalar tensor, got shape \(2,\)"),
        (1.0, "scalar tensor, got float"),
        (torch.ones(()), "no graph to go back through"),
    ],
)
def test_a_loss_that_is_none(loss: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        alone().backward(loss)


def _bad_groups(kind: str) -> Any:
    model = make_net()
    if kind == "two groups":
        params = list(model.parameters())
        return model, [{"params": params}, {"params": params[:1]}]
    return model, [*model.parameters(), nn.Parameter(torch.ones(7))]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("two groups", "body.weight is in two optimizer groups"),
        ("foreign", r"shape \(7,\) that is not the model's"),
    ],
)
def test_groups_that_do_not_fit_the_model(kind: str, message: str) -> None:
    model, params = _bad_groups(kind)
    with pytest.raises(EngineError, match=message):
        launcher.initialize(model=model, model_parameters=params, config=config())


def test_an_optimizer_that_cannot_be_used() -> None:
    model = make_net()
    with pytest.raises(EngineError, match="LBFGS cannot be used: it evaluates the loss again"):
        launcher.initialize(model=model, optimizer=torch.optim.LBFGS(model.parameters()), config=config())


def test_an_optimizer_that_has_state() -> None:
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(*batch()).backward()
    optimizer.step()
    with pytest.raises(EngineError, match="holds state already"):
        launcher.initialize(model=model, optimizer=optimizer, config=config())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no config was given"),
        ({"config": {"train_batch_size": 1}, "config_params": {"train_batch_size": 2}}, "two different configs"),
        ({"config": {"train_batchsize": 1}}, 'did you mean "train_batch_size"'),
        ({"config": "no/such/file.json"}, "cannot be read"),
    ],
)
def test_a_config_that_is_missing_or_wrong(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launcher.initialize(model=make_net(), **arguments)


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_config", "deepscale_config"])
def test_a_config_is_read_from_the_arguments(name: str) -> None:
    arguments = argparse.Namespace(**{name: config(steps_per_print=7)})
    engine = launcher.initialize(arguments, make_net())[0]
    assert engine.steps_per_print() == 7
    engine.destroy()


def test_a_model_is_needed() -> None:
    with pytest.raises(EngineError, match="needs a model"):
        launcher.initialize(config=config())


@contextlib.contextmanager
def _recorded() -> Iterator[int]:
    """Have this process be a rank that `launch` has started; return the descriptor of its record."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {env.PROGRESS_FILE.name: f"{folder}/told"}),
    ):
        record = make_counter(f"{folder}/told")
        progress._shared = None  # the process has served other tests, and will serve more
        try:
            yield record
        finally:
            progress._shared = None
            os.close(record)


def _told(rank: int, world_size: int) -> progress.RankProgress:
    with _recorded() as record:
        accumulating = {"train_micro_batch_size_per_gpu": SAMPLES, "gradient_accumulation_steps": 2}
        engine = alone(**accumulating, steps_per_print=2)
        for x, y in zip(*data(), strict=True):
            engine.backward(engine(x, y))
            engine.step()
        return read_counter(record)


def test_the_launcher_is_told_steps_not_micro_batches_and_the_printed_loss() -> None:
    first, second = run_on_ranks(2, _told)
    for told in (first, second):
        assert (told.heartbeats, told.step) == (STEPS, STEPS // 2)
    assert first.loss is not None
    assert 0 < first.loss < 10
    assert second.loss is None  # only rank 0 tells it


def _phases(rank: int, world_size: int) -> tuple[list[str], int | None]:
    found: list[str] = []
    with _recorded() as record, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def note(where: str) -> None:
            found.append(f"{where}: {read_counter(record).phase}")

        for owner, name in ((Engine, "begin_in_folder"), (Checkpoints, "save"), (Checkpoints, "load")):
            stack.enter_context(mock.patch.object(owner, name, lambda *_, name=name, **__: note(name)))
        progress.update_progress(phase="")
        schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 7, "warmup_num_steps": 1}}
        engine = alone(scheduler=schedule)
        note("engine")
        engine.module.register_forward_pre_hook(lambda *_: note("forward"))
        engine.backward(engine(*batch()))
        note("backward")
        engine.step()
        note("step")
        engine.save_checkpoint(folder)
        engine.eval()
        with torch.no_grad():
            engine(*batch())
        engine.load_checkpoint(folder)
        note("load")
        engine.train()
        note("train")
        return found, read_counter(record).total_steps


def test_the_engine_tells_the_phase_of_its_rank_and_the_last_step() -> None:
    found, total_steps = run_on_ranks(1, _phases)[0]
    assert found == [
        "begin_in_folder: building the engine",
        "engine: ",
        "forward: training",
        "backward: training",
        "step: between steps",
        "save: saving a checkpoint",
        "forward: evaluating",
        "load: loading a checkpoint",
        "load: evaluating",
        "train: training",
    ]
    assert total_steps == 7


class _Fixed(torch.optim.Optimizer):
    """Steps by a fixed part of the gradient: its groups have no "lr"."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(param.grad, alpha=0.1)


def test_an_optimizer_without_a_rate_steps() -> None:
    model = make_net()
    before = model.head.weight.detach().clone()
    settings = {key: value for key, value in config().items() if key not in ("optimizer", "scheduler")}
    settings |= {"steps_per_print": 1, "zero_allow_untested_optimizer": True}
    engine = launcher.initialize(model=model, config=settings, optimizer=_Fixed(model.parameters()))[0]
    engine.backward(engine(*batch()))
    engine.step()
    assert not torch.equal(before, model.head.weight)
    assert all(math.isnan(rate) for rate in engine.get_lr())


@pytest.mark.parametrize("folder", ["", None])
def test_a_checkpoint_needs_a_folder(folder: Any) -> None:
    engine = alone()
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(CheckpointError, match="names no folder for checkpoints"):
            call(folder)
