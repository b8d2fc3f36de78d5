"""A thread that reads the model beside the one that trains changes nothing, or gets one clear error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from harness.launch.command import DEADLINE_S
from harness.train.ranks import run_on_ranks, run_once_on_ranks
from torch import Tensor, nn

import launcher
from launcher.base.errors import EngineError
from launcher.zero.access import safe_get_full_fp32_param, safe_get_local_fp32_param
from launcher.zero.gathered import GatheredParameters
from launcher.zero.parameters import UnitParameters

WIDTH, NUM_STEPS = 256, 20

READERS: dict[str, Callable[[Any], object]] = {
    "state_dict": lambda engine: engine.module.state_dict(),
    "listed": lambda engine: [param.sum().item() for param in engine.module.parameters()],
    "attribute": lambda engine: [layer.weight.sum().item() for layer in engine.module],
    "full access": lambda engine: safe_get_full_fp32_param(engine.module[0].weight),
    "local access": lambda engine: safe_get_local_fp32_param(engine.module[0].weight),
    "gathered": lambda engine: _gather(engine),
    "averaged": lambda engine: engine.optimizer.averaged_gradients,
}


def _gather(engine: Any) -> None:
    with GatheredParameters(engine.module.parameters()):
        pass


class _Reader(threading.Thread):
    """Reads until it is stopped, or gets an error."""

    def __init__(self, engine: Any, name: str) -> None:
        super().__init__(name="monitor")
        self._engine, self._read = engine, READERS[name]
        self._is_over = threading.Event()
        self.num_reads = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        while not self._is_over.wait(0.0002):
            try:
                self._read(self._engine)
            except BaseException as error:  # noqa: BLE001  # the test looks at it
                self.error = error
                return
            self.num_reads += 1

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def _engine(stage: int, precision: str) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 0,
        precision: {"enabled": precision != "fp32"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": WIDTH * WIDTH,
            "stage3_param_persistence_threshold": 0,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    config.pop("fp32", None)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    return launcher.initialize(model=model, config=config)[0]


def _train_beside_a_graph(rank: int, world_size: int, read: str) -> Tensor:
    """Return the weights where a sum of sharded parameters, read between steps, is kept with its graph."""

    def keep(engine: Any) -> None:
        layers = engine.module
        params = [layer.weight for layer in layers] if read == "attribute" else list(layers.parameters())
        held.extend(param.sum() for param in params)

    held: list[Tensor] = []
    weights = _train(rank, world_size, 3, "fp32", None, before_forward=keep)[0]
    assert all(each.requires_grad for each in held)
    return weights


def _train(
    rank: int,
    world_size: int,
    stage: int,
    precision: str,
    reader: str | None,
    before_forward: Callable[[Any], None] = lambda _engine: None,
) -> tuple[Tensor, int, str]:
    """Return the weights, how often another thread has read, and the error that it got."""
    engine = _engine(stage, precision)
    thread = _Reader(engine, reader) if reader is not None else None
    if thread is not None:
        thread.start()
    dtype = engine.get_data_types()[0]
    for step in range(NUM_STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step)).to(dtype)
        before_forward(engine)
        engine.backward(engine(x).float().square().mean())
        engine.step()
    while thread is not None and thread.error is None and thread.num_reads < 10:
        engine.synchronize_parameters()
    if thread is not None:
        thread.stop()
    weights = torch.cat([value.float().flatten() for value in engine.state_dict().values()])
    if thread is None:
        return weights, 0, ""
    assert thread.error is None or isinstance(thread.error, EngineError)
    return weights, thread.num_reads, str(thread.error or "")


@pytest.mark.parametrize("reader", ["state_dict", "listed", "attribute"])
@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (1, "fp32"), (2, "bf16")])
def test_a_reading_thread_changes_nothing(stage: int, precision: str, reader: str) -> None:
    expected = run_once_on_ranks(2, _train, stage, precision, None)[0][0]
    for weights, num_reads, error in run_on_ranks(2, _train, stage, precision, reader):
        assert (num_reads >= 10, error) == (True, "")
        assert torch.equal(weights, expected)


def _end_a_gather_beside_a_reader(rank: int, world_size: int) -> bool:
    """Return whether `wait` of this thread has returned while another one still ended the same gather."""
    engine = _engine(1, "fp32")
    engine.backward(engine(torch.ones(1, WIDTH)).sum())
    engine.step()
    params = engine._sharded.units[0].params
    is_in, is_out, seen = threading.Event(), threading.Event(), []
    find = params._first_since

    def look(versions: list[int]) -> Any:
        if threading.current_thread().name == "monitor":
            is_in.set()
            seen.append(is_out.wait(0.5))
        return find(versions)

    params._first_since = look
    thread = threading.Thread(target=params.wait, name="monitor")
    thread.start()
    assert is_in.wait(DEADLINE_S)
    params.wait()
    is_out.set()
    thread.join()
    return any(seen)


def test_a_reader_has_compared_before_the_next_update_counts() -> None:
    """It took the engine's own count for a write into parameters that were on their way."""
    assert run_on_ranks(2, _end_a_gather_beside_a_reader) == [False, False]


def _read_before_versions_are_noted(rank: int, world_size: int) -> int:
    """Return how many reads of another thread came between the start of a gather and the versions to compare with."""
    engine = _engine(1, "fp32")
    params = engine._sharded.units[0].params
    num_reads = 0

    def set_after_a_read(unit: UnitParameters, name: str, value: Any) -> None:
        nonlocal num_reads
        if unit is params and name == "_sent_versions":
            thread = threading.Thread(target=params.wait, name="monitor")
            thread.start()
            thread.join()
            num_reads += 1
        object.__setattr__(unit, name, value)

    with mock.patch.object(UnitParameters, "__setattr__", set_after_a_read):
        for _ in range(3):
            engine.backward(engine(torch.ones(1, WIDTH)).sum())
            engine.step()
    return num_reads


def test_a_reader_ends_no_gather_whose_versions_are_not_noted() -> None:
    """It compared with those of the update before, and `step()` raised."""
    assert run_on_ranks(2, _read_before_versions_are_noted) == [3, 3]


@pytest.mark.parametrize(
    ("stage", "reader"),
    [*((3, reader) for reader in READERS), (1, "full access"), (2, "local access"), (2, "averaged")],
)
def test_what_another_thread_cannot_read_is_an_error_there(stage: int, reader: str) -> None:
    expected = run_once_on_ranks(2, _train, stage, "fp32", None)[0][0]
    for weights, _, error in run_on_ranks(2, _train, stage, "fp32", reader):
        assert "the thread monitor reads or writes what the engine keeps, and the thread MainThread trains" in error
        assert torch.equal(weights, expected)


@pytest.mark.parametrize("read", ["attribute", "listed"])
def test_a_graph_of_a_sharded_parameter_may_be_held(read: str) -> None:
    """Its node for the gradient has no elements, and the next forward took it: backward raised."""
    expected = run_once_on_ranks(2, _train, 3, "fp32", None)[0][0]
    for weights in run_on_ranks(2, _train_beside_a_graph, read):
        assert torch.equal(weights, expected)


def _trains_elsewhere(rank: int, world_size: int) -> float:
    """Train in a thread of its own, then use the engine in the first one: only one thread at a time does."""
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(_train(rank, world_size, 3, "fp32", None)[0]))
    thread.start()
    thread.join()
    return (found[0] - _train(rank, world_size, 3, "fp32", None)[0]).abs().max().item()


def test_an_engine_may_train_in_any_thread() -> None:
    assert run_on_ranks(2, _trains_elsewhere) == [0.0, 0.0]
