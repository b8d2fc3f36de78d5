"""No legal order of a GPU's streams changes a result: every stage, precision and place, in the model of streams."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.train.behind import runs_behind_host
from harness.train.collective import communicators
from harness.train.parity import Case, Trajectory, make_model, micro_batches
from harness.train.ranks import run_on_ranks
from harness.train.streams import COMPUTING, ModelEvent, ModelStreams, StreamModel, modelled_streams, reference_kernels

import launcher
from launcher.comm.buffers import BufferPool
from launcher.comm.device import HostDeviceCopier
from launcher.comm.streams import PASSED, Side
from launcher.zero.disk import MAX_COPIED, MAX_WRITES, Swapped
from launcher.zero.gradients import UnitGradients
from launcher.zero.owned_gradient import OwnedGradient
from launcher.zero.parameters import UnitParameters

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_STEPS = 2
HOST = {"device": "cpu"}
SHARDED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def _disk(folder: str, **more: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": folder, **more}


PLACES: dict[str, Any] = {
    "device": lambda folder: {},
    "optimizer on host": lambda folder: {"offload_optimizer": HOST},
    "parameters on host": lambda folder: {"offload_param": HOST},
    "both on host": lambda folder: {"offload_optimizer": HOST, "offload_param": HOST},
    "optimizer on disk": lambda folder: {"offload_optimizer": _disk(folder)},
    "both on disk": lambda folder: {"offload_optimizer": _disk(folder), "offload_param": _disk(folder, max_in_cpu=0)},
    "parameters on disk": lambda folder: {"offload_param": _disk(folder, max_in_cpu=0)},
}


def _train(rank: int, world_size: int, case: Case, model: StreamModel | None = None) -> Trajectory:
    """Train; what is done after the engine has been built is written down in the model of streams, if there is one."""
    engine = launcher.initialize(model=make_model(case), config=case.config(world_size))[0]
    part = slice(rank * case.batch // world_size, (rank + 1) * case.batch // world_size)
    losses = []
    with model if model is not None else contextlib.nullcontext():
        for step in micro_batches(case):
            for tokens, targets in step:
                loss = engine(tokens[part], targets[part])
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())  # not `item()`, for which the host would wait
    weights = engine.state_dict()
    engine.destroy()
    return Trajectory([loss.item() for loss in losses], weights, [])


def _both(rank: int, world_size: int, case: Case, is_behind: bool = False) -> bool:
    with communicators("nccl"), reference_kernels():
        expected = _train(rank, world_size, case)
    with modelled_streams() as model, runs_behind_host() if is_behind else contextlib.nullcontext():
        found = _train(rank, world_size, case, model)
    # Without a norm to take there, nothing may be left to do on that stream.
    assert model.num_accesses[Side.REDUCE.name] or case.stage < 2 or is_behind, "nothing ran beside the computing"
    same = all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())
    return same and found.losses == expected.losses


def _cases() -> Iterator[Any]:
    """The short form has each precision and each accumulation, not every pair of them but on the device at stage 3."""
    for stage, place, precision, accumulation in itertools.product((0, 1, 2, 3), PLACES, ("fp32", "bf16"), (1, 2)):
        is_short = (place == "device" and stage == 3) or (precision == "bf16") == (accumulation == 2)
        if place == "device" or (stage and place.startswith("optimizer")) or stage == 3:
            yield pytest.param(stage, place, precision, accumulation, marks=[] if is_short else pytest.mark.soak)


@pytest.mark.parametrize(("stage", "place", "precision", "accumulation"), list(_cases()))
def test_nothing_races(stage: int, place: str, precision: str, accumulation: int, tmp_path: Path) -> None:
    zero = {**SHARDED, **PLACES[place](str(tmp_path))}
    case = Case(stage, precision, accumulation, num_steps=NUM_STEPS, unit_numel=2500, zero=zero, unused=True)
    assert run_on_ranks(2, _both, case) == [True, True]


def _loaded(rank: int, world_size: int, case: Case, folder: str) -> bool:
    """Load a checkpoint into an engine with its optimizer on disk; return whether it has the weights of it."""
    with modelled_streams() as model:
        engine = launcher.initialize(model=make_model(case), config=case.config(world_size))[0]
        engine.save_checkpoint(folder)
        expected = engine.state_dict()
        with model:
            engine.load_checkpoint(folder)
        found = engine.state_dict()
        engine.destroy()
    return all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_load_of_an_optimizer_on_disk_races_with_nothing(stage: int, tmp_path: Path) -> None:
    zero = {**SHARDED, **PLACES["optimizer on disk"](str(tmp_path))}
    case = Case(stage, "bf16", 1, unit_numel=2500, zero=zero)
    assert run_on_ranks(2, _loaded, case, str(tmp_path / "checkpoint")) == [True, True]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_the_host_does_not_wait_for_races_with_nothing(stage: int, precision: str) -> None:
    case = Case(stage, precision, 1, num_steps=NUM_STEPS, unit_numel=2500, zero=SHARDED, unused=True)
    assert run_on_ranks(2, _both, case, True) == [True, True]


# ---- each wait is needed, and the model finds that it is missing ----


def _nothing(*_: Any) -> None:
    pass


def _frees_at_once(pool: BufferPool, tensor: torch.Tensor) -> None:
    pool._owners.pop(tensor.untyped_storage()._cdata)
    pool._empty(tensor.untyped_storage())


def _leaves_its_owner(pool: BufferPool, storage: torch.UntypedStorage) -> None:
    pool._owners.pop(storage._cdata)
    pool._empty(storage)


_start_gather, _add_to = UnitParameters.start_gather, OwnedGradient.add_to


def _gathers_at_once(params: UnitParameters, **how: Any) -> None:
    params._written = PASSED
    _start_gather(params, **how)


def _adds_at_once(owned: OwnedGradient, arrived: torch.Tensor) -> None:
    owned._arrival = PASSED
    _add_to(owned, arrived)


_offload_grad = OwnedGradient._offload_grad


def _writes_at_once(owned: OwnedGradient, grad: torch.Tensor) -> None:
    with mock.patch.object(Swapped, "used_until", _nothing):
        _offload_grad(owned, grad)


BROKEN: dict[str, tuple[Any, str, Any, int, str, str]] = {
    "events": (ModelEvent, "wait", _nothing, 2, "device", "is not ordered after"),
    "before the optimizer": (ModelStreams, "join", _nothing, 1, "device", "is not ordered after"),
    "gradient buffers": (BufferPool, "give_back", _frees_at_once, 2, "device", "computing gets memory back"),
    "parameter memory": (BufferPool, "take_back", _leaves_its_owner, 3, "device", "GATHER gets memory back"),
    "updated shards": (UnitParameters, "start_gather", _gathers_at_once, 3, "device", "by all-gather"),
    "copied shards": (UnitParameters, "start_gather", _gathers_at_once, 3, "parameters on host", "not ordered"),
    "gradients on host": (HostDeviceCopier, "synchronize", _nothing, 2, "optimizer on host", "host"),
    "copies from and to a disk's memory": (Swapped, "used_until", _nothing, 3, "both on disk", "of a disk"),
    "gradients that go to disk": (OwnedGradient, "_offload_grad", _writes_at_once, 2, "optimizer on disk", "of a disk"),
    "sums on host": (OwnedGradient, "add_to", _adds_at_once, 2, "optimizer on host", "TO_DEVICE"),
}


def _broken(rank: int, world_size: int, name: str, case: Case) -> str:
    owner, attribute, replacement, *_ = BROKEN[name]
    with modelled_streams() as model, mock.patch.object(owner, attribute, replacement):
        try:
            _train(rank, world_size, case, model)
        except AssertionError as error:
            return str(error)
    return "nothing was found"


@pytest.mark.parametrize("name", BROKEN)
def test_the_model_finds_a_wait_that_is_missing(name: str, tmp_path: Path) -> None:
    *_, stage, place, message = BROKEN[name]
    zero = {**SHARDED, **PLACES[place](str(tmp_path))}
    case = Case(stage, "bf16", 2, num_steps=2, unit_numel=2500, zero=zero)
    for found in run_on_ranks(2, _broken, name, case):
        assert message in found


# ---- and none is there without need ----


def _gathers(rank: int, world_size: int, place: str, folder: str) -> list[tuple[int, int, int]]:
    """Gather units while the device has much to compute: return how much that was, what was awaited, and the update."""
    zero = {**SHARDED, **PLACES[place](folder)}
    case = Case(3, "bf16", 1, unit_numel=2500, zero=zero)
    found = []
    with modelled_streams() as model:
        engine = launcher.initialize(model=make_model(case), config=case.config(world_size))[0]
        tokens, targets = micro_batches(case)[0][0]
        params = [unit.params for unit in engine._sharded.units if unit.is_sharded]
        with model:
            engine.backward(engine(tokens[:4], targets[:4]))
            engine.step()
            written = model.time(COMPUTING)
            for number in range(2):  # its memory has been another unit's, and is used again
                busy = torch.ones(8, 8)
                for _ in range(20):
                    busy = busy @ busy
                params[number].start_gather()
                found.append((*model.gathers[-1], written))
                params[number].wait()
                params[number].release()
                written = model.time(COMPUTING)
        engine.destroy()
    return found


@pytest.mark.parametrize("place", ["device", "parameters on host", "both on host"])
def test_a_gather_waits_for_the_update_and_for_its_memory_alone(place: str, tmp_path: Path) -> None:
    for gathers in run_on_ranks(2, _gathers, place, str(tmp_path)):
        for computed, awaited, written in gathers:
            assert awaited <= written < computed - 20


def _host_waits(rank: int, world_size: int, folder: str) -> tuple[int, int, int]:
    """Return how often the host waits for all copies in passes, how often in steps, and the units in disk memory."""
    zero = {**SHARDED, **PLACES["both on disk"](folder)}
    case = Case(3, "bf16", 1, unit_numel=2500, num_steps=1, zero=zero)
    with modelled_streams() as model, mock.patch.object(HostDeviceCopier, "synchronize") as synchronize:
        synchronize.side_effect = lambda: model.merge("host", model.point("TO_HOST") | model.point("TO_DEVICE"))
        engine = launcher.initialize(model=make_model(case), config=case.config(world_size))[0]
        ((tokens, targets),) = micro_batches(case)[0]
        with model:
            for _ in range(2):
                counts = [synchronize.call_count]
                engine.backward(engine(tokens, targets))
                counts.append(synchronize.call_count)
                engine.step()
                counts.append(synchronize.call_count)
        on_disk = [unit.params for unit in engine._sharded.units if unit.params.placement.disk is not None]
        largest_bytes = max(params.shard.nbytes for params in on_disk)
        disk = on_disk[0].placement.disk
        return counts[1] - counts[0], counts[2] - counts[1], -(-disk.memory.peak_bytes // largest_bytes)


def test_the_host_waits_for_no_unit_whose_memory_goes_to_disk(tmp_path: Path) -> None:
    for in_passes, in_steps, num_units in run_on_ranks(2, _host_waits, str(tmp_path)):
        assert in_passes == 0
        assert in_steps == 1  # for all gradients, before the norm
        assert num_units <= 2 + MAX_COPIED + MAX_WRITES


def _backward(rank: int, world_size: int, stage: int) -> tuple[int, int, int]:
    """Return how much work reductions have after a backward pass, what the computing has waited for, and will."""
    # Stage 0 has something left to do after the sum only where that is converted.
    case = Case(stage, "fp32" if stage else "bf16", 1, unit_numel=2500, zero=SHARDED)
    with modelled_streams() as model:
        engine = launcher.initialize(model=make_model(case), config=case.config(world_size))[0]
        tokens, targets = micro_batches(case)[0][0]
        with model:
            engine.backward(engine(tokens[:4], targets[:4]))
            work, awaited = model.time(Side.REDUCE.name), model.awaited(COMPUTING, Side.REDUCE.name)
            engine.step()
        at_step = model.awaited(COMPUTING, Side.REDUCE.name)
        engine.destroy()
    return work, awaited, at_step


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_computing_waits_for_a_buffer_and_before_the_optimizer(stage: int) -> None:
    for work, awaited, at_step in run_on_ranks(2, _backward, stage):
        assert awaited < work <= at_step
        assert (awaited > 0) == (stage != 1), "buffers are used again, but for those that hold the sums"


def _copies(rank: int, world_size: int, stage: int, accumulation: int) -> tuple[int, list[int]]:
    """Return the number of units, and how often gradients were copied and added to a buffer in each micro-batch."""
    case = Case(stage, "bf16", accumulation, num_steps=1, unit_numel=2500, zero=SHARDED)
    found = []
    with modelled_streams() as model:
        engine = launcher.initialize(model=make_model(case), config=case.config(world_size))[0]
        num_units = sum(unit.grads is not None for unit in engine._sharded.units)
        with model:
            for tokens, targets in micro_batches(case)[0]:
                model.operations.clear()
                engine.backward(engine(tokens[:4], targets[:4]))
                found += [model.operations["_foreach_copy_"], model.operations["_foreach_add_"]]
                engine.step()
        engine.destroy()
    return num_units, found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_gradients_of_a_unit_are_copied_together(stage: int) -> None:
    for num_units, found in run_on_ranks(2, _copies, stage, 2):
        adds = stage < 2  # else each micro-batch is reduced, and its buffer is new
        assert num_units > 2
        assert found == [num_units, 0, *((0, num_units) if adds else (num_units, 0))]


def _sent(rank: int, world_size: int, stage: int, accumulation: int) -> set[tuple[bool, torch.dtype]]:
    """Return, of all reductions, whether gradients were sent from where they were collected, and in which type."""
    found: set[tuple[bool, torch.dtype]] = set()
    started = UnitGradients._started

    def noted(gradients: UnitGradients, local: torch.Tensor, sent: torch.Tensor, *more: Any, **named: Any) -> Any:
        found.add((sent is local, sent.dtype))
        return started(gradients, local, sent, *more, **named)

    with mock.patch.object(UnitGradients, "_started", noted):
        _train(rank, world_size, Case(stage, "bf16", accumulation, num_steps=2, unit_numel=2500))
    return found


@pytest.mark.parametrize(("accumulation", "dtype"), [(1, torch.bfloat16), (2, torch.float32)])
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_of_one_backward_are_not_summed_before_they_are_sent(
    stage: int, accumulation: int, dtype: torch.dtype
) -> None:
    """In 32 bits and back; on every device."""
    assert run_on_ranks(2, _sent, stage, accumulation) == [{(True, dtype)}] * 2
