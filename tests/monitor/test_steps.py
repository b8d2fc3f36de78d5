"""Records of steps: of a device by its events, which nothing waits for; FLOPs as torch's own counter has them."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from launcher.journal.rank import RankJournal
from launcher.journal.records import BACKWARD, DATA, FORWARD, SCRIPT, UPDATE
from launcher.journal.steps import StepClock
from launcher.monitor import flops as flops_module
from launcher.monitor import plain
from launcher.monitor import steps as steps_module
from launcher.monitor.flops import ModelFlops
from launcher.monitor.meters import MemoryUse
from launcher.monitor.steps import StepEnd, StepRecorder


class Journal(RankJournal):
    """Keeps records in memory."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    @property
    def record_interval_s(self) -> float:
        return 0.0

    def call_at_end(self, method: Any) -> None:
        self.rest = method

    def add(self, kind: str, **fields: Any) -> None:
        self.records.append({"kind": kind, **fields})


class Device:
    """A device that is behind: an event has passed when the device has come so far."""

    def __init__(self) -> None:
        self.queued_s = self.done_s = 0.0
        self.made = 0

    def Event(self, *, enable_timing: bool) -> DeviceEvent:  # as torch names it
        assert enable_timing
        self.made += 1
        return DeviceEvent(self)

    def current_stream(self, _device: torch.device) -> None:
        return None


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self._device, self.at_s = device, 0.0

    def record(self, _stream: None) -> None:
        self.at_s = self._device.queued_s

    def query(self) -> bool:
        return self._device.done_s >= self.at_s

    def elapsed_time(self, later: DeviceEvent) -> float:
        assert later.query(), "the host would have waited"
        return (later.at_s - self.at_s) * 1e3

    def synchronize(self) -> None:
        raise AssertionError("the host has waited")


def end(step: int, *, norm: float = 1.0, skipped: bool = False, losses: tuple[float, ...] = (2.0, 4.0)) -> StepEnd:
    return StepEnd(step, [torch.tensor(loss) for loss in losses], 0.1, None, 8, lambda: (norm, skipped))


def test_a_device_is_asked_later_and_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device, journal, clock = Device(), Journal(), StepClock(lambda: 0.0)
    monkeypatch.setattr(steps_module, "device_module", lambda _: device)
    monkeypatch.setattr(steps_module, "memory_use", lambda _: MemoryUse(1, 2))
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory: torch.zeros(*shape))  # no driver pins memory here
    recorder = StepRecorder(journal, clock, torch.device("cuda"))
    for step in (1, 2, 3):
        device.queued_s += 0.5  # of the script's own
        with clock.inside(FORWARD):
            device.queued_s += 1
        with clock.inside(BACKWARD):
            device.queued_s += 2
        recorder.end(end(step, skipped=step == 2))
        assert journal.records == []
    device.done_s = 7.0  # two steps
    recorder.end(end(4))
    first, second = journal.records
    assert (first["step"], first["duration_s"], first["loss"]) == (1, 3.5, 3.0)
    assert first["phases"] == {"forward": 1.0, "backward": 2.0, "script": 0.5}
    assert second["phases"] == first["phases"]
    assert (first["skipped"], second["skipped"]) == (0, 1)
    made = device.made
    device.done_s = 100.0
    for step in range(5, 50):
        with clock.inside(FORWARD):
            device.queued_s += 0.01
        recorder.end(end(step))
    assert device.made <= made + 5, "events are used again"


def test_a_device_that_never_arrives_holds_no_more_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    device, journal, clock = Device(), Journal(), StepClock(lambda: 0.0)
    monkeypatch.setattr(steps_module, "device_module", lambda _: device)
    monkeypatch.setattr(steps_module, "memory_use", lambda _: MemoryUse(1, 2))
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory: torch.zeros(*shape))
    recorder = StepRecorder(journal, clock, torch.device("cuda"))
    for step in range(1, 100):
        device.queued_s += 1
        recorder.end(end(step))
    assert [record["step"] for record in journal.records] == list(range(1, 100 - 65))
    assert {record["loss"] for record in journal.records} == {None}


def test_short_steps_share_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    journal, now = Journal(), [0.0]
    monkeypatch.setattr(Journal, "record_interval_s", 0.1)
    clock = StepClock(lambda: now[0])
    recorder = StepRecorder(journal, clock, torch.device("cpu"))
    for step in range(1, 9):
        with clock.inside(UPDATE):
            now[0] += 0.03 if step == 2 else 0.02
        recorder.note_inputs((torch.zeros(2, 3, dtype=torch.int64),), {})
        recorder.end(end(step, skipped=step == 3))
    first = journal.records[0]
    assert (first["step"], first["num_steps"], first["tokens"], first["samples"], first["skipped"]) == (5, 5, 30, 40, 1)
    assert (first["duration_s"], first["slowest_s"]) == (pytest.approx(0.11), pytest.approx(0.03))
    assert first["phases"] == {"update": pytest.approx(0.11)}
    assert len(journal.records) == 1
    journal.rest()
    rest = journal.records[1]
    assert (rest["step"], rest["num_steps"], rest["samples"], rest["loss"]) == (8, 3, 24, 3.0)
    journal.rest()
    assert len(journal.records) == 2


def test_skipped_steps_that_share_a_record_of_a_device_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    device, journal, clock = Device(), Journal(), StepClock(lambda: 0.0)
    monkeypatch.setattr(steps_module, "device_module", lambda _: device)
    monkeypatch.setattr(steps_module, "memory_use", lambda _: MemoryUse(1, 2))
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory: torch.zeros(*shape))
    monkeypatch.setattr(Journal, "record_interval_s", 1.0)
    recorder = StepRecorder(journal, clock, torch.device("cuda"))
    for step in (1, 2, 3):
        recorder.end(end(step, skipped=step < 3))
    journal.rest()
    assert [(record["num_steps"], record["skipped"]) for record in journal.records] == [(3, 2)]


def test_a_step_that_raises_ends_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = StepClock(lambda: now[0])
    steps = plain._PlainSteps(Journal(), clock, None)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    steps.begin_update(optimizer, (), {})  # and it raises
    steps.begin_update(optimizer, (), {})
    steps.end_update(optimizer, (), {})
    assert clock.phase == SCRIPT


# ---- FLOPs ----


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.mix = nn.Linear(32, 96)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.embed(tokens)).unflatten(-1, (2, 48)).transpose(1, 2).chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(mixed.transpose(1, 2).flatten(-2)).logsumexp(-1).mean()


@pytest.fixture
def counted() -> tuple[ModelFlops, list[float]]:
    import torch.utils.flop_counter  # noqa: F401  # beside the training in a run

    now = [0.0]
    return ModelFlops(4, recomputes=False, clock=lambda: now[0]), now


def run_once(flops: ModelFlops, model: nn.Module, tokens: torch.Tensor, *, is_called: bool = True) -> dict[str, int]:
    with flops.phase("forward", is_called=is_called):
        loss = model(tokens)
    with flops.phase("backward", is_called=is_called) as record:
        loss.backward()
    return record


def test_flops_are_those_of_torchs_counter(
    counted: tuple[ModelFlops, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flops, now = counted
    monkeypatch.setattr(flops_module, "may_be_compiled", lambda: False)  # other tests have imported the compiler
    model, tokens = Attending(), torch.randint(50, (3, 16))
    assert run_once(flops, model, tokens) == {}, "a run of seconds pays nothing"
    now[0] = 11.0
    while not flops._is_due():
        pass
    record = run_once(flops, model, tokens)
    with FlopCounterMode(display=False, custom_mapping=flops_module._cpu_attention()) as mode:
        model(tokens).backward()
    assert record == {"flops": mode.get_total_flops(), "micro_batches": 4}
    assert flops.is_over
    assert run_once(flops, model, tokens) == {}


def test_a_backward_of_the_script_counts_as_two_forwards(
    counted: tuple[ModelFlops, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flops, now = counted
    monkeypatch.setattr(flops_module, "may_be_compiled", lambda: False)
    now[0] = 11.0
    while not flops._is_due():
        pass
    model, tokens = Attending(), torch.randint(50, (3, 16))
    record = run_once(flops, model, tokens, is_called=False)
    with FlopCounterMode(display=False, custom_mapping=flops_module._cpu_attention()) as mode:
        model(tokens)
    assert record["flops"] == 3 * mode.get_total_flops()


def test_counting_imports_no_compiler() -> None:
    code = (
        "import sys, torch; from torch import nn; from launcher.comm.torch_internals import FlopMode\n"
        "model = nn.Linear(4, 8)\n"
        "with FlopMode() as mode: model(torch.ones(2, 4)).sum().backward()\n"
        "assert mode.total == 2 * 2 * 4 * 8 * 2, mode.total\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


def test_the_loader_is_a_phase_by_its_iterators_base_class() -> None:
    from launcher.comm.torch_internals import has_dispatch_mode, loader_iterator

    iterator = iter(torch.utils.data.DataLoader([1, 2]))  # type: ignore[arg-type]
    assert isinstance(iterator, loader_iterator())
    assert "__next__" in vars(loader_iterator())
    assert not has_dispatch_mode()
    with FlopCounterMode(display=False):
        assert has_dispatch_mode()
    assert DATA in StepClock()._inside
