"""Steps that are queued on a device and not waited for: the same results, and no wait between backward and the end.

There is no GPU here. The code for one runs on the CPU, where `runs_behind_host` says so.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.logs import logged
from harness.train.behind import Waits, runs_behind_host
from harness.train.parity import Case, Trajectory, make_model, micro_batches, train_engine, weight_distance
from harness.train.ranks import run_on_ranks
from harness.train.zoo import batches, build
from torch import Tensor, nn

import launcher
from launcher.base.errors import EngineError
from launcher.comm.groups import world_group
from launcher.comm.hosts import host_all_reduce_max
from launcher.kernels import triton_kernels
from launcher.kernels.api import Kernel
from launcher.kernels.reference import ReferenceKernel
from launcher.kernels.triton_kernels import TritonKernel
from launcher.zero import step

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_LAYERS = 20  # more units than the kernels for GPUs keep tables
UNIT_NUMEL = 2500  # a block of the model: several units at every stage
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def small(stage: int, precision: str, accumulation: int = 1, **more: Any) -> Case:
    return Case(stage, precision, accumulation, num_steps=4, unit_numel=UNIT_NUMEL, **more)


def _train(rank: int, world_size: int, case: Case, is_behind: bool) -> Trajectory:
    with runs_behind_host() if is_behind else contextlib.nullcontext():
        return train_engine(rank, world_size, case)


def assert_the_same(case: Case, world_size: int = 2) -> Trajectory:
    found, expected = (run_on_ranks(world_size, _train, case, is_behind)[0] for is_behind in (True, False))
    assert found.losses == expected.losses
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-15)
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name
    return found  # type: ignore[no-any-return]


@STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_same_bits(stage: int, precision: str) -> None:
    case = small(stage, precision, accumulation=2 if stage in (1, 3) else 1, unused=stage in (1, 2))
    found = assert_the_same(case, world_size=3 if stage == 2 else 2)
    assert any(norm > case.clipping for norm in found.grad_norms), "nothing was clipped"


def test_what_needs_the_host_is_as_before() -> None:
    offload = {"offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    assert_the_same(small(2, "bf16", zero=offload))


# ---- steps that are skipped, late gradients, unused parameters ----


class Rates:
    """A client's schedule that only steps forward."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups, self.num_steps = optimizer.param_groups, 0

    def step(self) -> None:
        self.num_steps += 1
        self.groups[0]["lr"] = 0.01 / (1 + self.num_steps)


def _cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=20)


def _rates(optimizer: torch.optim.Optimizer) -> Any:
    return Rates(optimizer)


SCHEDULES = {"of the config": None, "torch": _cycle, "client": _rates}


def _with_bad_steps(
    rank: int, world_size: int, stage: int, precision: str, name: str, is_behind: bool
) -> dict[str, Any]:
    """Train with gradients that are not finite in the first step, and later in two of them."""
    case = small(stage, precision)
    found: dict[str, Any] = {"rates": [], "overflows": [], "norms": [], "scales": []}
    with runs_behind_host() if is_behind else contextlib.nullcontext(), logged() as lines:
        engine, optimizer, _, schedule = launcher.initialize(
            model=make_model(case), config=case.config(world_size), lr_scheduler=SCHEDULES[name]
        )
        tokens, targets = (part.chunk(world_size)[rank] for part in micro_batches(case)[0][0])
        for number in range(7):
            factor = math.nan if number in (0, 3, 4) and rank == 0 else 1.0
            engine.backward(engine(tokens, targets) * factor)
            engine.step()
            if number % 2:  # what is not read must be right too
                found["norms"].append(engine.get_global_grad_norm())
                found["overflows"].append(optimizer.overflow)
                found["rates"].append(engine.get_lr())
                found["scales"].append(optimizer.loss_scale)
        found |= {"skipped": engine.skipped_steps, "last rates": engine.get_lr(), "states": optimizer.state_dict()}
        found["schedule"] = schedule.state_dict() if hasattr(schedule, "state_dict") else schedule.num_steps
        found["weights"] = {key: value.clone() for key, value in engine.state_dict().items()}
        engine.destroy()
    # The device of a GPU would be behind with the messages: they come when the next backward begins.
    return found | {"lines": [line for line in lines if " skipped: " in line]}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (3, "bf16"), (2, "fp16")])
def test_a_skipped_step_is_taken_back(stage: int, precision: str, name: str) -> None:
    found, expected = (
        run_on_ranks(2, _with_bad_steps, stage, precision, name, is_behind)[0] for is_behind in (True, False)
    )
    assert len({*expected["scales"]}) == (3 if precision == "fp16" else 1)
    assert expected["skipped"] == 3
    assert len(expected["lines"]) == 3
    for key in ("skipped", "rates", "overflows", "last rates", "lines", "schedule", "scales"):
        assert found[key] == expected[key], key
    assert repr(found["norms"]) == repr(expected["norms"])
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=0)
    torch.testing.assert_close(found["states"]["states"], expected["states"]["states"], rtol=0, atol=0)
    assert found["states"]["groups"] == expected["states"]["groups"]


def _zoo(rank: int, world_size: int, name: str, stage: int, is_behind: bool) -> dict[str, torch.Tensor]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    with runs_behind_host() if is_behind else contextlib.nullcontext():
        engine, _, _, _ = launcher.initialize(model=build(name), config=config)
        for x, y in batches(3):
            engine.backward(engine(x.chunk(world_size)[rank], y.chunk(world_size)[rank]))
            engine.step()
        return {key: value.clone() for key, value in engine.state_dict().items()}


@pytest.mark.parametrize("name", ["ReentrantTied", "Mixture", "AlternatingPath"])
def test_late_gradients_and_unused_parameters_are_known_before_the_update(name: str) -> None:
    found, expected = (run_on_ranks(2, _zoo, name, 2, is_behind)[0] for is_behind in (True, False))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _refuses(rank: int, world_size: int) -> str:
    case = small(
        1, "fp32", unused=True, settings={"zero_optimization": {"stage": 1, "ignore_unused_parameters": False}}
    )
    with runs_behind_host():
        engine, _, _, _ = launcher.initialize(model=make_model(case), config=case.config(world_size))
        tokens, targets = micro_batches(case)[0][0]
        engine.backward(engine(tokens, targets))
        with pytest.raises(EngineError) as error:
            engine.step()
    return str(error.value)


def test_unused_parameters_that_are_not_accepted_are_refused_before_the_update() -> None:
    assert all("no rank computed a gradient of" in text for text in run_on_ranks(2, _refuses))


# ---- what the host waits for ----


def _curves(rank: int, world_size: int, folder: str, is_behind: bool) -> tuple[Counter[str], list[str]]:
    """Return what steps with curves wait for, and the curve of the loss as the file has it before the last one."""
    case, waits = small(1, "bf16"), Waits()
    section = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": f"behind {is_behind}"}}
    with runs_behind_host(ReferenceKernel()) if is_behind else contextlib.nullcontext():
        engine = launcher.initialize(model=make_model(case), config={**case.config(world_size), **section})[0]
        for ((tokens, targets),) in micro_batches(case):
            engine.backward(engine(tokens, targets))
            with waits.counting():
                engine.step()
    engine.monitor.close()
    [path] = Path(folder, f"behind {is_behind}").glob("*train_loss*.csv")
    return waits.counts, path.read_text().splitlines()


def test_curves_have_the_loss_of_each_step_and_no_step_waits_for_its_own(tmp_path: Path) -> None:
    [(counts, found)], [(_, expected)] = (run_on_ranks(1, _curves, str(tmp_path), each) for each in (True, False))
    assert counts == {"values": 3, "tolist": 3}, "of four steps, each with the loss of the one before"
    assert len(found) == 1 + 4
    assert found == expected


def _waits(rank: int, world_size: int, case: Case, has_kernel: bool, is_behind: bool) -> Counter[str]:
    kernel: Kernel | None = ReferenceKernel() if has_kernel else None
    waits = Waits()
    with runs_behind_host(kernel) if is_behind else contextlib.nullcontext():
        engine, _, _, _ = launcher.initialize(model=make_model(case), config=case.config(world_size))
        for ((tokens, targets),) in micro_batches(case):
            engine.backward(engine(tokens.chunk(world_size)[rank], targets.chunk(world_size)[rank]))
            with waits.counting():
                engine.step()
    return waits.counts


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("precision", "has_kernel"), [("fp32", True), ("fp32", False), ("bf16", True), ("fp16", True)])
def test_a_step_waits_for_nothing(stage: int, precision: str, has_kernel: bool) -> None:
    assert run_on_ranks(2, _waits, small(stage, precision, unused=stage == 2), has_kernel, True) == [Counter()] * 2


def _any_ranks(rank: int, world_size: int) -> tuple[list[bool], Counter[str]]:
    waits = Waits()
    with runs_behind_host():
        engine = launcher.initialize(model=nn.Linear(2, 2), config={"train_batch_size": world_size})[0]
        with waits.counting():
            found = [engine.any_rank(rank == number) for number in range(world_size + 1)]
    return found, waits.counts


def test_ranks_tell_each_other_of_a_condition_without_their_devices() -> None:
    assert run_on_ranks(3, _any_ranks) == [([True, True, True, False], Counter())] * 3


def test_waits_are_counted_where_the_host_decides() -> None:
    counts = run_on_ranks(2, _waits, small(2, "bf16"), True, False)[0]
    assert counts["tolist"] == 4  # once a step
    assert counts["synchronize"] >= 4


def test_torchs_fused_kernel_reads_the_scale() -> None:
    case = small(2, "fp32")
    found, expected = run_on_ranks(2, _fused, case)[0], run_on_ranks(2, _train, case, False)[0]
    assert weight_distance(found.weights, expected.weights) <= 1e-6


def _fused(rank: int, world_size: int, case: Case) -> Trajectory:
    with runs_behind_host(None):
        return train_engine(rank, world_size, case)


def _at_the_smallest_scale(rank: int, world_size: int) -> tuple[float, str]:
    """Overflow until the run ends; return the scale, which is read before each backward on rank 0 alone."""
    case = small(1, "fp16", settings={"fp16": {"enabled": True, "loss_scale": 4.0}})
    with runs_behind_host():
        engine, optimizer, _, _ = launcher.initialize(model=make_model(case), config=case.config(world_size))
        tokens, targets = (part.chunk(world_size)[rank] for part in micro_batches(case)[0][0])
        for _ in range(20):
            engine.backward(engine(tokens, targets) * math.nan)
            engine.step()
            if rank == 0:
                assert optimizer.loss_scale == 4.0
        loss = engine(tokens, targets)
        with pytest.raises(EngineError) as error:
            engine.backward(loss)
    return optimizer.loss_scale, str(error.value)


def test_a_scale_that_cannot_get_smaller_ends_the_run_on_every_rank() -> None:
    for scale, text in run_on_ranks(2, _at_the_smallest_scale):
        assert scale == 4.0
        assert "gradients overflowed in 20 steps in a row" in text


# ---- the memory of sums ----


def _sum_bytes(engine: Any) -> int:
    grads = [unit.grads for unit in engine._sharded.units if unit.grads is not None]
    kept = [each.untyped_storage() for own in grads for each in own.buffers()]
    return sum({storage._cdata: storage.nbytes() for storage in kept}.values())


def _memory_of_sums(rank: int, world_size: int, stage: int, precision: str) -> dict[str, list[Any]]:
    """Return the bytes of sums before forward, after it and after backward; and which gradients are named as bad."""
    found: dict[str, list[Any]] = {"bytes": [], "grads": []}
    case = small(stage, precision)
    with runs_behind_host(), logged() as lines:
        engine = launcher.initialize(model=make_model(case), config=case.config(world_size))[0]
        names = [name for name, param in engine.module.named_parameters() if param.requires_grad]
        trained = engine.module.get_parameter(names[0])
        tokens, targets = (part.chunk(world_size)[rank] for part in micro_batches(case)[0][0])
        for bad in (None, *names, None):
            handle = None
            if bad is not None and rank == world_size - 1:
                param = engine.module.get_parameter(bad)
                handle = param.register_hook(lambda grad: grad.index_fill(0, torch.tensor(len(grad) - 1), torch.inf))
            found["bytes"].append(_sum_bytes(engine))
            loss = engine(tokens, targets)
            found["bytes"].append(_sum_bytes(engine))
            engine.backward(loss)
            found["bytes"].append(_sum_bytes(engine))
            full = launcher.zero.safe_get_full_grad(trained)
            found["grads"].append(full.isfinite().all().item())
            engine.step()
            assert launcher.zero.safe_get_full_grad(trained) is None
            if handle is not None:
                handle.remove()
        engine.zero_grad()
        engine.destroy()
    found["named"] = [line.rpartition(" in ")[2] for line in lines if "first in" in line]
    found["names"] = names
    return found


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 2), (2, 3), (2, 1), (3, 2)])
def test_sums_of_16_bit_gradients_have_memory_in_backward_alone(stage: int, world_size: int) -> None:
    for rank, found in enumerate(run_on_ranks(world_size, _memory_of_sums, stage, "bf16")):
        before, after_forward, after_backward = (found["bytes"][start::3] for start in range(3))
        assert {*before} == {*after_forward} == {0}
        assert len({*after_backward}) == 1
        assert after_backward[0] > 0
        assert (found["grads"][0], found["grads"][-1]) == (True, True)
        assert found["named"] == (found["names"] if rank == 0 else [])


def test_sums_that_scripts_may_hold_keep_their_memory() -> None:
    [found] = run_on_ranks(1, _memory_of_sums, 1, "fp32")
    assert len({*found["bytes"]}) == 1
    assert found["bytes"][0] > 0
    assert found["named"] == found["names"]


def _held_gradients(rank: int, world_size: int) -> bool:
    """Return whether what a script has got of gradients can be read behind the step, as it was."""
    case = small(2, "bf16")
    with runs_behind_host():
        engine, optimizer, _, _ = launcher.initialize(model=make_model(case), config=case.config(world_size))
        tokens, targets = (part.chunk(world_size)[rank] for part in micro_batches(case)[0][0])
        engine.backward(engine(tokens, targets))
        held = [each for group in optimizer.averaged_gradients.values() for each in group]
        before = [each.clone() for each in held]
        engine.step()
        engine(tokens, targets)
        return bool(held) and all(map(torch.equal, held, before))


def test_gradients_that_a_script_holds_keep_their_memory() -> None:
    assert run_on_ranks(2, _held_gradients) == [True, True]


# ---- what is launched ----


class Launches(TritonKernel):
    """Makes the tables and launches nothing. The norm is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def _launch(self, kernel: Any, part: Any, tables: Any, *arguments: Any, **constants: Any) -> None:
        self.launched.append(kernel.__name__)
        if kernel is self._code.sum_of_squares:
            arguments[0].zero_()
        elif kernel is self._code.first_bad_element:
            arguments[1].fill_(-1)


def _launches(rank: int, world_size: int, stage: int) -> list[tuple[list[str], list[str]]]:
    """Return what each of three steps launches, and the types of the tables it uploads."""
    uploaded: list[str] = []

    def counted(table: torch.Tensor, device: torch.device) -> torch.Tensor:
        uploaded.append(str(table.dtype).removeprefix("torch."))
        return table

    kernel, found = Launches(), []
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 72, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(NUM_LAYERS)])
    with runs_behind_host(kernel), mock.patch.object(triton_kernels, "to_device", counted):
        engine, _, _, _ = launcher.initialize(model=model, config=config)
        for _ in range(3):
            engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum())
            engine.step()
            found.append((list(kernel.launched), sorted(uploaded)))
            kernel.launched.clear()
            uploaded.clear()
        assert len(engine._sharded.units) > triton_kernels._NUM_KEPT
    return found


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@STAGES
def test_all_units_are_measured_and_updated_in_one_launch_each(stage: int) -> None:
    first, *others = run_on_ranks(2, _launches, stage)[0]
    launched = ["sum_of_squares", "first_bad_element", "update_unless_skipped"]
    assert first[0] == launched
    assert {*first[1]} == {"float32", "int32", "int64"}
    for again, uploaded in others:
        assert again == launched
        assert uploaded.count("float32") == 1  # hyper-parameters
        assert {*uploaded} <= {"float32", "int64"}  # and the small tables, where the memory of sums is elsewhere


# ---- stages of a pipeline ----


def _pipeline(
    rank: int, world_size: int, is_behind: bool, optimizer: str, has_kernel: bool
) -> tuple[list[float], list[float], int]:
    """Train stages of which the first has frozen parameters only; return losses, norms and the groups of transfers."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(2 * world_size)]
    for index in (0, world_size):
        layers[index].requires_grad_(False)
    model = launcher.PipelineModule(layers=layers, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2 * world_size,
        "gradient_clipping": 0.1,
        "steps_per_print": 0,
        "optimizer": {"type": optimizer, "params": {"lr": 0.01}},
        "pipeline": {"stages": world_size, "virtual_stages": 2, "schedule": "interleaved_1f1b"},
    }
    losses, norms = [], []
    with runs_behind_host("the host's own" if has_kernel else None) if is_behind else contextlib.nullcontext():
        engine: Any = launcher.initialize(model=model, config=config)[0]
        for step in range(4):
            data = [torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + i)) for i in range(20)]
            losses.append(engine.train_batch(iter([(x, torch.zeros(2, 8)) for x in data])).item())
            norms.append(engine.get_global_grad_norm())
        return losses, norms, len(engine._runtime._links._links)


@pytest.mark.parametrize(("optimizer", "has_kernel"), [("AdamW", True), ("SGD", True), ("SGD", False)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_pipeline_with_a_frozen_stage(world_size: int, optimizer: str, has_kernel: bool) -> None:
    found, expected = (
        run_on_ranks(world_size, _pipeline, is_behind, optimizer, has_kernel) for is_behind in (True, False)
    )
    assert [each[2] for each in found] == [3 if world_size == 3 else 1] * world_size
    for (losses, norms, _), (true_losses, true_norms, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(true_losses, rel=1e-6)
        assert norms == pytest.approx(true_norms, rel=1e-6)
    assert len({*expected[0][1]}) == 4, "the norms of four steps"


class _HasUnused(nn.Linear):
    def __init__(self, has_unused: bool) -> None:
        super().__init__(8, 8)
        self.unused = nn.Parameter(torch.zeros(3)) if has_unused else None


def _unused_in_one_stage(rank: int, world_size: int, is_behind: bool) -> str:
    model = launcher.PipelineModule(
        layers=[_HasUnused(index == 3) for index in range(4)],
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 0, "ignore_unused_parameters": False},
        "pipeline": {"stages": world_size},
    }
    with runs_behind_host() if is_behind else contextlib.nullcontext():
        engine: Any = launcher.initialize(model=model, config=config)[0]
        with pytest.raises(EngineError) as error:
            engine.train_batch(iter([(torch.ones(2, 8), torch.zeros(2, 8))] * 2))
    return str(error.value)


@pytest.mark.parametrize("is_behind", [True, False])
def test_unused_parameters_of_one_stage_are_refused_on_all_stages(is_behind: bool) -> None:
    other, own = run_on_ranks(2, _unused_in_one_stage, is_behind)
    assert "no rank computed a gradient of some parameters of another part of the model" in other
    assert "no rank computed a gradient of 3.unused" in own


# ---- what a rank owns does not decide what it takes part in ----


def _owns_nothing(rank: int, world_size: int) -> tuple[int, Tensor]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)  # no kernel of it reads the scale
    config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 0, "zero_optimization": {"stage": 1}}
    with runs_behind_host(None):
        engine = launcher.initialize(model=model, optimizer=optimizer, config=config)[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 1)).sum())
            engine.step()
        shards = engine.optimizer.flat.shards
        return sum(len(shard.owned) for shard in shards), engine.state_dict()["weight"].clone()


def test_a_rank_without_elements_takes_the_path_of_the_others() -> None:
    (num_first, first), (num_second, second) = run_on_ranks(2, _owns_nothing)
    assert sorted((num_first, num_second)) == [0, 1]
    assert torch.equal(first, second)
    assert first[0, 0] < 0.9


class _OtherWay(nn.Module):
    """Rank 1 runs two blocks of one size the other way round: no backend notices."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.blocks, self.order = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), (0, 2, 1) if rank else (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x.to(self.blocks[index].weight.dtype))
        return x.sum()


def _parts(rank: int, world_size: int, more: dict[str, Any]) -> str:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})},
        "optimizer": {"type": "AdamW", "params": {}},
        **more,
    }
    with runs_behind_host():
        engine = launcher.initialize(model=_OtherWay(rank), config=config)[0]
        engine.backward(engine(torch.ones(1, 8)))
        with (
            mock.patch.object(step, "_exchange_facts", side_effect=AssertionError("the host waits for the device")),
            pytest.raises(EngineError) as error,
        ):
            engine.step()
    return str(error.value)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"fp16": {"enabled": True}},
        {"zero": {"offload_optimizer": {"device": "cpu"}}},
        {"optimizer": {"type": "Lamb", "params": {}}},
    ],
    ids=["fp32", "fp16", "offload", "LAMB"],
)
def test_hosts_know_that_ranks_parted_before_they_wait_for_the_device(more: dict[str, Any]) -> None:
    for text in run_on_ranks(2, _parts, more):
        assert "ranks took different paths through the model since the last step: the gather of blocks.1" in text


# ---- what hosts tell each other ----


def _largest(rank: int, world_size: int) -> list[int]:
    with runs_behind_host():
        group = world_group(has_reduce_group=True)
    return host_all_reduce_max(group, [rank, -rank, 5, 2**32 - 1 if rank == 1 else 0])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_host_knows_the_largest(world_size: int) -> None:
    assert run_on_ranks(world_size, _largest) == [[world_size - 1, 0, 5, 2**32 - 1]] * world_size
