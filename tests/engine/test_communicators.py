"""Training through NCCL's communicator, with late collectives; how many collectives a step takes, and their names.

gloo has all single-tensor collectives that NCCL's communicator calls, so the same code runs here as on GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.logs import logged
from harness.train.collective import CountingCommunicator, communicators, late_group
from harness.train.offload import late_link
from harness.train.parity import Case, Trajectory, check_fp32, train_engine, train_mixed, worst_relative
from harness.train.ranks import run_on_ranks
from torch import nn

from launcher.base.log import get_logger
from launcher.comm import observe

pytestmark = pytest.mark.usefixtures("one_thread")
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
FEW_STAGES = pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=pytest.mark.soak if stage in (0, 2) else []) for stage in (0, 1, 2, 3)]
)
UNIT_NUMEL = 2500  # a block of the model: several units at every stage
EXACT = {"communication_data_type": "fp32"}


def small(stage: int, precision: str, accumulation: int, **more: Any) -> Case:
    return Case(stage, precision, accumulation, num_steps=4, unit_numel=UNIT_NUMEL, **more)


def _train(rank: int, world_size: int, case: Case, kind: str, is_late: bool) -> Trajectory:
    with contextlib.ExitStack() as stack:
        if is_late:
            stack.enter_context(late_group(kind))
            stack.enter_context(late_link())
        else:
            stack.enter_context(communicators(kind))
        return train_engine(rank, world_size, case)


def trained(case: Case, kind: str, *, is_late: bool = False) -> Trajectory:
    """Train two ranks and check that both end with the same bits."""
    one, other = run_on_ranks(2, _train, case, kind, is_late)
    assert_same_bits(one, other)
    return one  # type: ignore[no-any-return]


def assert_same_bits(found: Trajectory, expected: Trajectory) -> None:
    assert found.losses == expected.losses
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name


# ---- NCCL's communicator ----


@pytest.mark.parametrize(
    ("accumulation", "stage"),
    [
        pytest.param(number, stage, marks=[] if (stage + number) % 2 else pytest.mark.soak)
        for number in (1, 2)
        for stage in (0, 1, 2, 3)
    ],
)
def test_fp32_equals_the_plain_loop_on_nccl(stage: int, accumulation: int) -> None:
    case = small(stage, "fp32", accumulation, unused=True)
    found = trained(case, "nccl")
    expected = check_fp32(found, case)
    assert worst_relative(found.grad_norms, expected.grad_norms) <= 1e-5


@STAGES
def test_bf16_equals_the_mixed_loop_on_nccl_where_fp32_travels(stage: int) -> None:
    case = small(stage, "bf16", 2, settings=EXACT)
    found = trained(case, "nccl")
    assert_same_bits(found, train_mixed(case, 2, found.grad_norms))


@STAGES
def test_bf16_that_travels_is_added_in_bf16_on_nccl(stage: int) -> None:
    """Close to the exact sum, and not the same."""
    case = small(stage, "bf16", 1)
    found, exact = trained(case, "nccl"), trained(dataclasses.replace(case, settings=EXACT), "nccl")
    assert found.grad_norms != exact.grad_norms
    assert worst_relative(found.grad_norms, exact.grad_norms) <= 0.01
    assert worst_relative(found.losses, exact.losses) <= 0.01


@FEW_STAGES
@pytest.mark.parametrize("name", ["predivided", "summed", "all-reduced", "fp16"])
def test_other_reductions_are_those_of_gloo(stage: int, name: str) -> None:
    """Of two terms the order does not matter, and powers of two are exact."""
    settings: dict[str, Any] = {
        "predivided": {"prescale_gradients": True},
        "summed": {"gradient_allreduce_op": "sum"},
        "all-reduced": {},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}, **EXACT},
    }[name]
    zero = {"stage3_param_persistence_threshold": 0, "reduce_scatter": name != "all-reduced"}
    case = small(stage, "fp32", 2, settings=settings, zero=zero)
    assert_same_bits(trained(case, "nccl"), trained(case, "gloo"))


# ---- late collectives ----


TRAVELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sums": ("fp32", 2, {}),
    "what autograd made": ("bf16", 1, {}),
    "rounded sums": ("fp32", 2, {"communication_data_type": "bf16"}),
}


@pytest.mark.parametrize(
    ("stage", "what", "kind"),
    [  # each two of them together, and all three in the soak
        pytest.param(stage, what, kind, marks=[] if stage % 2 and is_quick else pytest.mark.soak)
        for stage, (at, what), kind in itertools.product((0, 1, 2, 3), enumerate(TRAVELS), ("gloo", "nccl"))
        for is_quick in [(stage // 2 + at) % 2 == (kind == "nccl")]
    ],
)
def test_nothing_is_read_or_written_before_a_collective_has_ended(stage: int, what: str, kind: str) -> None:
    precision, accumulation, settings = TRAVELS[what]
    case = small(stage, precision, accumulation, unused=True, settings=settings)
    assert_same_bits(trained(case, kind, is_late=True), trained(case, kind))


BOTH = ("offload_optimizer", "offload_param")
HOST = {"device": "cpu"}
OFFLOADS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 optimizer": (1, {"offload_optimizer": HOST}),
    "2 optimizer": (2, {"offload_optimizer": HOST}),
    "2 part": (2, {"offload_optimizer": {**HOST, "ratio": 0.4}}),
    "2 delayed": (2, {"offload_optimizer": {**HOST, "delayed_update": True, "delayed_update_warmup_steps": 1}}),
    "3 optimizer": (3, {"offload_optimizer": HOST}),
    "3 both": (3, {"offload_optimizer": HOST, "offload_param": HOST}),
    "3 delayed": (3, {"offload_optimizer": {**HOST, "delayed_update": True, "delayed_update_warmup_steps": 1}}),
}


@pytest.mark.parametrize("name", OFFLOADS)
def test_nor_with_offload(name: str) -> None:
    stage, offload = OFFLOADS[name]
    case = small(stage, "bf16", 1, zero={"stage3_param_persistence_threshold": 0, **offload})
    assert_same_bits(trained(case, "gloo", is_late=True), trained(case, "gloo"))


@pytest.mark.parametrize(
    ("precision", "sections"),
    [
        ("fp32", BOTH[:1]),
        ("bf16", BOTH[1:]),
        ("fp32", BOTH),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("bf16", BOTH[:1]), ("fp32", BOTH[1:]))),
        ("bf16", BOTH),
    ],
)
def test_nor_on_disk(tmp_path: Path, sections: tuple[str, ...], precision: str) -> None:
    zero: dict[str, Any] = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    zero.update({section: {"device": "nvme", "nvme_path": str(tmp_path)} for section in sections})
    zero.get("offload_param", {}).update(max_in_cpu=0)
    case = small(3, precision, 2, zero=zero)
    assert_same_bits(trained(case, "gloo", is_late=True), trained(case, "gloo"))


# ---- how many ----


NUM_LAYERS, WIDTH, NUM_STEPS = 5, 48, 2


def _counts(rank: int, world_size: int, config: dict[str, Any]) -> tuple[int, Counter[str]]:
    """Return the units of a chain of layers, and the collectives of the steps after the first two."""
    import launcher

    counts: Counter[str] = Counter()
    with communicators("gloo", lambda inner: CountingCommunicator(inner, counts)):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        engine, *_ = launcher.initialize(model=model, config=config)
        for step in range(2 + NUM_STEPS):
            if step == 2:
                counts.clear()
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
                engine.step()
        num_units = len(engine._sharded.units)
        found = Counter(counts)
        engine.destroy()
    return num_units, found


@STAGES
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_collectives_of_a_step(stage: int, accumulation: int) -> None:
    """And no others: what ranks must know of each other travels with the norm."""
    zero = {"stage": stage, "reduce_bucket_size": UNIT_NUMEL, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 0,
        "zero_optimization": {**zero, "stage3_max_reuse_distance": 0},
        "optimizer": {"type": "AdamW"},
    }
    units, every_backward = NUM_LAYERS, NUM_LAYERS * accumulation
    gathers = accumulation * 2 * units  # for forward, and again for backward
    of_a_step = {
        0: {"all_reduce": units},
        1: {"reduce_scatter": units, "all_gather": units},
        2: {"reduce_scatter": every_backward, "all_gather": units},
        3: {"reduce_scatter": every_backward, "all_gather": gathers},
    }[stage]
    expected = {name: NUM_STEPS * count for name, count in {"gather_rows": 1, **of_a_step}.items()}
    assert run_on_ranks(2, _counts, config) == [(units, expected)] * 2


# ---- their names ----


def _names(rank: int, world_size: int, stage: int) -> tuple[list[str], set[str], list[str]]:
    """Return the units' labels, what a profiler sees of one step, and what the debug log says of it."""
    import launcher

    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    zero = {"stage": stage, "reduce_bucket_size": UNIT_NUMEL, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "optimizer": {"type": "AdamW"}}
    engine, *_ = launcher.initialize(model=model, config=config)

    def step() -> None:
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        engine.step()
        engine.state_dict()  # waits for what a step has left on its way

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    get_logger().setLevel(logging.DEBUG)
    try:
        with logged() as lines:
            step()
    finally:
        get_logger().setLevel(logging.INFO)
    labels = [unit.label for unit in engine._sharded.units]
    engine.destroy()
    return labels, {event.name for event in profile.events()}, lines


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_profiles_and_the_debug_log_name_the_unit(stage: int) -> None:
    kinds = ["reduction", "wait for the reduction"] + (["gather", "wait for the gather"] if stage else [])
    for labels, events, lines in run_on_ranks(2, _names, stage):
        assert "0.weight and 1 more" in labels
        for label in labels:
            for kind in kinds:
                assert f"launch: {kind} of {label}" in events
                assert f"{kind} of {label}" in lines


def test_nothing_is_recorded_without_a_profiler() -> None:
    """torch's `record_function` is entered only while a profiler runs."""
    assert isinstance(observe.unit_span("gather", "a unit"), contextlib.nullcontext)
