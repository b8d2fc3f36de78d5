"""`super_offload`: the bits of steps that wait, also where updates are rolled back; updates run beside backward.

Copies run as late as a GPU's may (`LateCopier`): what a thread reads or overwrites too early shows in the bits.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.launch.command import slowness
from harness.logs import logged
from harness.train.behind import runs_behind_host
from harness.train.offload import late_link
from harness.train.parity import RESTLESS_SCALE, Case, make_model, micro_batches
from harness.train.ranks import run_on_ranks
from harness.train.zoo import batches, build
from torch import Tensor, nn

import launcher
from launcher.base.errors import ConfigError, EngineError
from launcher.kernels.api import Span
from launcher.kernels.reference import ReferenceKernel
from launcher.zero.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from launcher.zero.gathered import GatheredParameters
from launcher.zero.speculative_update import SpeculativeUpdate, _UnitSpeculation

pytestmark = pytest.mark.usefixtures("one_thread")
SPECULATIVE = {"device": "cpu", "super_offload": True}
HOST = {"device": "cpu"}
SHARDED = {"stage3_param_persistence_threshold": 0}
SETTINGS: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {}), (3, {}), (3, {"offload_param": HOST})]
NAMES = ["1", "2", "3", "3 both"]
settings = pytest.mark.parametrize(("stage", "more"), SETTINGS, ids=NAMES)
TIMEOUT_S = 60.0
Found = tuple[list[float], dict[str, Tensor], list[float], tuple[int, int]]


def _train(rank: int, world_size: int, case: Case, is_speculative: bool, between: str = "") -> Found:
    """Train; return losses, weights and states, norms, and how many updates were kept and rolled back."""
    zero = {**SHARDED, **case.zero, "offload_optimizer": SPECULATIVE if is_speculative else HOST}
    case = Case(**{**vars(case), "zero": zero})
    losses, norms, kept = [], [], (0, 0)
    with late_link():
        engine, optimizer, _, _ = launcher.initialize(model=make_model(case), config=case.config(world_size))
        part = slice(rank * case.batch // world_size, (rank + 1) * case.batch // world_size)
        for number, step in enumerate(micro_batches(case)):
            for tokens, targets in step:
                loss = engine(tokens[part], targets[part])
                engine.backward(loss)
                if between and number % 2:
                    BETWEEN[between](engine, tokens[part], targets[part])
                _finish_all(engine)
                engine.step()
                losses.append(loss.item())
            norms.append(engine.get_global_grad_norm())
        values = engine.state_dict()
        for name, pieces in optimizer.state_dict()["states"].items():
            for piece, (state, value) in itertools.product(pieces, pieces[0]["state"].items()):
                values[f"{name} {state} {piece['start']}"] = torch.as_tensor(value).clone()
        speculative = engine._sharded.reducer.speculative
        if speculative is not None:
            kept = speculative.num_kept, speculative.num_rolled_back
        engine.destroy()
    return losses, values, norms, kept


def _finish_all(engine: Any) -> None:
    """Have the thread take all updates that have been given to it: a step cancels those that it has not come to."""
    engine._sharded.reducer.wait()
    for of_unit in _speculations(engine):
        of_unit._running.exception()


def assert_the_same(case: Case, world_size: int = 2, between: str = "") -> tuple[int, int]:
    """Return how many updates were kept, and how many rolled back, on rank 0."""
    found, expected = (
        run_on_ranks(world_size, _train, case, is_speculative, between)[0] for is_speculative in (True, False)
    )
    assert found[0] == expected[0]
    assert repr(found[2]) == repr(expected[2])
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name
    counts: tuple[int, int] = found[3]
    return counts


@settings
@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 1), ("bf16", 2)])
def test_the_same_bits(stage: int, more: dict[str, Any], precision: str, accumulation: int) -> None:
    case = Case(stage, precision, accumulation, 4, clipping=0.0, unit_numel=2500, zero=more, unused=True)
    num_kept, num_rolled_back = assert_the_same(case)
    assert num_kept >= 4 * 3, "what could begin early did not"
    assert num_rolled_back == 0


@settings
def test_clipped_steps_are_rolled_back(stage: int, more: dict[str, Any]) -> None:
    case = Case(stage, "bf16", 1, 15, clipping=0.0, unit_numel=2500, zero=more)
    norms = sorted(run_on_ranks(2, _train, case, False)[0][2])
    clipped = Case(**{**vars(case), "clipping": norms[-4]})  # a fifth of the steps, as far as the norms stay
    num_kept, num_rolled_back = assert_the_same(clipped)
    assert num_kept > 0
    assert num_rolled_back > 0


@settings
def test_overflows_are_rolled_back(stage: int, more: dict[str, Any]) -> None:
    case = Case(stage, "fp16", 1, 12, clipping=0.0, unit_numel=2500, fp16=RESTLESS_SCALE, zero=more)
    num_kept, num_rolled_back = assert_the_same(case)
    assert num_kept > 0
    assert num_rolled_back > 0


def test_alone_with_a_part_of_the_optimizer_and_of_the_threads() -> None:
    zero = {"offload_optimizer": {**SPECULATIVE, "ratio": 0.5, "cpuadam_cores_perc": 0.5}}
    case = Case(2, "bf16", 2, 4, clipping=0.0, unit_numel=2500, zero=zero)
    num_kept, _ = assert_the_same(case, world_size=1)
    assert num_kept > 0


# ---- between backward and step ----


def _first(engine: Any) -> nn.Parameter:
    return next(param for param in engine.module.parameters() if param.requires_grad)


def _set_grad(engine: Any, *_: Tensor) -> None:
    param = _first(engine)
    safe_set_full_grad(param, safe_get_full_grad(param) * 0.5)


def _set_master(engine: Any, *_: Tensor) -> None:
    param = _first(engine)
    safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 0.5)


def _write(engine: Any, *_: Tensor) -> None:
    params = list(engine.module.parameters())
    with GatheredParameters(params, modifier_rank=0), torch.no_grad():
        params[0].mul_(0.5)


def _read(engine: Any, *_: Tensor) -> None:
    """Read what an update writes: it must have the values of before."""
    param = list(engine.module.parameters())[-1]
    weight, master = engine.state_dict()[engine._sharded.units[-1].names[param]], safe_get_full_fp32_param(param)
    assert master is not None
    assert torch.equal(master.to(weight.dtype), weight)
    before = safe_get_full_optimizer_state(param, "exp_avg")
    states = engine.optimizer.state_dict()["states"]
    assert all(piece["state"]["step"] == engine.global_steps for pieces in states.values() for piece in pieces)
    assert before is not None


def _change_rate(engine: Any, *_: Tensor) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] *= 0.5


def _drop(engine: Any, tokens: Tensor, targets: Tensor) -> None:
    engine.zero_grad()
    engine.backward(engine(tokens, targets) * 0.5)


def _evaluate(engine: Any, tokens: Tensor, targets: Tensor) -> None:
    with torch.no_grad():
        engine(tokens, targets)


def _fail(engine: Any, tokens: Tensor, targets: Tensor) -> None:
    """Have a backward pass end half-way, drop what it has left, and begin anew."""
    loss = engine(tokens, targets)
    handle = _first(engine).register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    handle.remove()
    engine.zero_grad()
    engine.backward(engine(tokens, targets))


BETWEEN = {
    "a gradient is written": _set_grad,
    "a master is written": _set_master,
    "parameters are written": _write,
    "masters and states are read": _read,
    "the rate changes": _change_rate,
    "gradients are dropped": _drop,
    "the model is evaluated": _evaluate,
    "a backward fails": _fail,
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize(("stage", "more"), SETTINGS[1:], ids=NAMES[1:])
def test_what_a_script_does_between_backward_and_step(stage: int, more: dict[str, Any], name: str) -> None:
    case = Case(stage, "bf16", 1, 4, clipping=0.0, unit_numel=2500, zero=more)
    num_kept, num_rolled_back = assert_the_same(case, between=name)
    assert num_kept > 0
    assert (num_rolled_back > 0) == (name in ("the rate changes", "gradients are dropped", "a backward fails"))


def _saved(rank: int, world_size: int, folder: str, is_speculative: bool) -> dict[str, Tensor]:
    """Save between backward and step, and load it again: a checkpoint has the states of the last step."""
    case = Case(
        2,
        "bf16",
        1,
        3,
        clipping=0.0,
        unit_numel=2500,
        zero={"offload_optimizer": SPECULATIVE if is_speculative else HOST},
    )
    engine = launcher.initialize(model=make_model(case), config=case.config(world_size))[0]
    for ((tokens, targets),) in micro_batches(case):
        engine.backward(engine(tokens, targets))
        engine.save_checkpoint(folder, tag="between")
        engine.step()
    engine.load_checkpoint(folder, tag="between")
    engine.backward(engine(tokens, targets))
    engine.step()
    found: dict[str, Tensor] = engine.state_dict()
    return found


def test_a_checkpoint_has_the_states_of_the_last_step(tmp_path: Path) -> None:
    found, expected = (run_on_ranks(2, _saved, str(tmp_path / str(early)), early)[0] for early in (True, False))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _zoo(rank: int, world_size: int, name: str, is_speculative: bool, is_behind: bool) -> dict[str, Tensor]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 200,
            "offload_optimizer": SPECULATIVE if is_speculative else HOST,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    with runs_behind_host() if is_behind else contextlib.nullcontext(), late_link():
        engine = launcher.initialize(model=build(name), config=config)[0]
        for x, y in batches(3):
            engine.backward(engine(x.chunk(world_size)[rank], y.chunk(world_size)[rank]))
            engine.step()
        return {key: value.clone() for key, value in engine.state_dict().items()}


@pytest.mark.parametrize("name", ["ReentrantTied", "Mixture", "AlternatingPath"])
@pytest.mark.parametrize("is_behind", [False, True])
def test_late_gradients_and_unused_parameters(name: str, is_behind: bool) -> None:
    found, expected = (run_on_ranks(2, _zoo, name, is_speculative, is_behind)[0] for is_speculative in (True, False))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ---- when updates run ----


class NotedKernel(ReferenceKernel):
    """Notes that it has updated something; fails where the test wants it to."""

    def __init__(self) -> None:
        self.has_updated = threading.Event()
        self.fails = False

    def update(self, spans: Sequence[Span], grad_scale: float = 1.0) -> None:
        if self.fails:
            raise ValueError("no update today")
        super().update(spans, grad_scale)
        self.has_updated.set()


class _WaitsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, event: threading.Event) -> Tensor:
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        assert ctx.event.wait(TIMEOUT_S * slowness()), "no update has run beside backward"
        return grads[0], None


class _WaitsForUpdate(nn.Module):
    """Its first layer's backward begins when an update of the last ones has ended."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        self.event = event

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(_WaitsInBackward.apply(self.first(x), self.event))
        return y.sum()


def _beside(rank: int, world_size: int, stage: int, fails: bool) -> list[str]:
    kernel, texts = NotedKernel(), []
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": {**SHARDED, "stage": stage, "reduce_bucket_size": 72, "offload_optimizer": SPECULATIVE},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    with mock.patch("launcher.engine.optimizer_plan.kernel_for", return_value=kernel), late_link():
        engine = launcher.initialize(model=_WaitsForUpdate(kernel.has_updated), config=config)[0]
        for step in range(3):
            kernel.fails = fails and step == 1
            if not kernel.fails:
                kernel.has_updated.clear()
            engine.backward(engine(torch.ones(1, 8)))
            try:
                engine.step()
            except ValueError as error:
                texts.append(str(error))
                return texts
    return texts


@pytest.mark.parametrize("stage", [1, 2])
def test_an_update_runs_beside_backward(stage: int) -> None:
    assert run_on_ranks(2, _beside, stage, False) == [[], []]


def test_what_fails_in_the_thread_is_raised_in_the_step() -> None:
    assert run_on_ranks(2, _beside, 2, True) == [["no update today"]] * 2


def _without_memory(rank: int, world_size: int) -> tuple[list[bool], int, list[str]]:
    """Return whether each step's weights are those of steps that wait, how many were kept, and what was logged."""
    engines = []
    for offload in (SPECULATIVE, HOST):
        case = Case(2, "fp32", 1, 3, clipping=0.0, unit_numel=2500, zero={**SHARDED, "offload_optimizer": offload})
        engines.append(launcher.initialize(model=make_model(case), config=case.config(world_size))[0])
    found, failing = [], mock.patch.object(torch, "empty_like", side_effect=MemoryError("no memory today"))
    with logged() as lines:
        for number, ((tokens, targets),) in enumerate(micro_batches(case)):
            for engine in engines:
                loss = engine(tokens, targets)
                with failing if number == 0 and engine is engines[0] else contextlib.nullcontext():
                    engine.backward(loss)
                    _finish_all(engine)
                engine.step()
            expected = engines[1].state_dict()
            found.append(all(torch.equal(value, expected[name]) for name, value in engines[0].state_dict().items()))
    return found, engines[0]._sharded.reducer.speculative.num_kept, [line for line in lines if "super_offload" in line]


def _speculations(engine: Any) -> list[Any]:
    speculative = engine._sharded.reducer.speculative
    return [] if speculative is None else [each for each in speculative._of.values() if each.has_begun]


def test_without_memory_for_the_copies_updates_wait_and_it_is_said_once() -> None:
    for found, num_kept, lines in run_on_ranks(2, _without_memory):
        assert found == [True] * 3
        assert num_kept == 0
        assert len(lines) == 1
        assert "has failed (no memory today): from here on updates wait for the norm" in lines[0]


def _behind(rank: int, world_size: int) -> tuple[list[bool], int, int]:
    """Return whether each step's weights are those of steps that wait, the updates that were kept, and the units."""
    engines = []
    for offload in (SPECULATIVE, HOST):
        case = Case(2, "bf16", 1, 3, clipping=0.0, unit_numel=2500, zero={**SHARDED, "offload_optimizer": offload})
        engines.append(launcher.initialize(model=make_model(case), config=case.config(world_size))[0])
    may_update, run, keeps = threading.Event(), _UnitSpeculation._run, SpeculativeUpdate._keeps

    def run_late(self: Any, *arguments: Any) -> None:
        assert may_update.wait(TIMEOUT_S * slowness())
        run(self, *arguments)

    def keep_in_time(self: Any, of_unit: Any) -> bool:
        may_update.set()
        return keeps(self, of_unit)

    found = []
    with (
        mock.patch.object(_UnitSpeculation, "_run", run_late),
        mock.patch.object(SpeculativeUpdate, "_keeps", keep_in_time),
    ):
        for ((tokens, targets),) in micro_batches(case):
            may_update.clear()
            for engine in engines:
                engine.backward(engine(tokens, targets))
                engine.step()
            expected = engines[1].state_dict()
            found.append(all(torch.equal(value, expected[name]) for name, value in engines[0].state_dict().items()))
    speculative = engines[0]._sharded.reducer.speculative
    return found, speculative.num_kept, len(speculative._of)


def test_a_step_takes_the_updates_that_the_thread_has_not_come_to() -> None:
    """Without a copy of masters and states: so a step is not longer than one that waits."""
    for found, num_kept, num_units in run_on_ranks(2, _behind):
        assert found == [True] * 3
        assert num_units > 2
        assert num_kept == 3  # of each step the one that the thread had begun


def _read_elsewhere(rank: int, world_size: int) -> str:
    case = Case(2, "fp32", 1, 1, clipping=0.0, unit_numel=2500, zero={**SHARDED, "offload_optimizer": SPECULATIVE})
    engine, optimizer, _, _ = launcher.initialize(model=make_model(case), config=case.config(world_size))
    (((tokens, targets),),) = micro_batches(case)
    engine.backward(engine(tokens, targets))
    errors: list[BaseException] = []

    def read() -> None:
        try:
            optimizer.state_dict()
        except EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=read, name="monitor")
    thread.start()
    thread.join()
    engine.step()
    return str(errors[0]) if errors else ""


def test_another_thread_rolls_no_update_back() -> None:
    assert all("the thread monitor reads or writes" in text for text in run_on_ranks(2, _read_elsewhere))


# ---- what cannot be ----


@pytest.mark.parametrize(
    ("section", "optimizer", "says"),
    [
        ({"device": "nvme", "nvme_path": "/tmp", "super_offload": True}, "AdamW", "needs the optimizer in host memory"),
        ({**SPECULATIVE, "delayed_update": True}, "AdamW", "exclude each other"),
        (SPECULATIVE, "Lamb", "is not possible with Lamb"),
    ],
)
def test_a_config_that_cannot_be_is_refused(section: dict[str, Any], optimizer: str, says: str) -> None:
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 2, "offload_optimizer": section},
        "optimizer": {"type": optimizer, "params": {"lr": 0.01}},
    }
    with pytest.raises(ConfigError, match=says):
        launcher.initialize(model=nn.Linear(2, 2), config=config)


def test_a_clients_optimizer_of_another_kind_is_refused() -> None:
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 2, "offload_optimizer": SPECULATIVE}}
    model = nn.Linear(2, 2)
    with pytest.raises(EngineError, match="super_offload is not possible with NAdam"):
        launcher.initialize(model=model, config=config, optimizer=torch.optim.NAdam(model.parameters()))
