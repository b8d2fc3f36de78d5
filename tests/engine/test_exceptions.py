"""A script may catch what ends a pass and continue with the next batch: on all ranks, or on none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import scripts
from harness.launch.command import slowness
from harness.train.forked import run_ranks
from harness.train.ranks import run_on_ranks
from harness.train.zoo import LR, build
from torch import Tensor

import launcher

SAMPLES, STEPS, WIDTH = 12, 3, 16
FIRST, LAST = 2, 1  # blocks, in the order of backward


def start(world_size: int, stage: int, accumulation: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 0,
        # A unit a layer: some are on their way when the exception comes.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 600},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
    }
    return launcher.initialize(model=build("Plain"), config=config)[0]


def batches(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, generator=generator))
        for _ in range(num)
    ]


def fail(*_: Any) -> None:
    raise RuntimeError("on purpose")


def fail_in_forward(engine: Any, x: Tensor, y: Tensor) -> None:
    handle = engine.module.blocks[FIRST].register_forward_pre_hook(fail)
    try:
        engine(x, y)
    finally:
        handle.remove()


def fail_in_backward(engine: Any, x: Tensor, y: Tensor) -> None:
    handle = engine.module.blocks[LAST].register_forward_hook(lambda *args: args[-1].register_hook(fail) and None)
    try:
        engine.backward(engine(x, y))
    finally:
        handle.remove()


def fail_in_own_backward(engine: Any, x: Tensor, y: Tensor) -> None:
    loss = engine(x, y)
    loss.register_hook(fail)
    engine.scale(loss).backward()


def fail_in_gather(engine: Any, x: Tensor, y: Tensor) -> None:
    with launcher.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
        fail()


FAILURES = (fail_in_backward, fail_in_forward, fail_in_own_backward, fail_in_gather)


def train(rank: int, world_size: int, stage: int, accumulation: int, fails: bool) -> dict[str, Tensor]:
    """Before each step let a pass fail in each way: nothing of it is left, nor of the micro-batches before it."""
    engine = start(world_size, stage, accumulation)

    def parts() -> list[tuple[Tensor, Tensor]]:
        return [(x.chunk(world_size)[rank], y.chunk(world_size)[rank]) for x, y in batches(STEPS * accumulation)]

    for number, (x, y) in enumerate(parts()):
        for failure in FAILURES if fails and number % accumulation == 0 else ():
            for earlier in parts()[: accumulation - 1 if failure is fail_in_backward else 0]:
                engine.backward(engine(*earlier))
                engine.step()
            with pytest.raises(RuntimeError, match="on purpose"):
                failure(engine, x, y)
        engine.backward(engine(x, y))
        engine.step()
    assert engine.global_steps == STEPS
    return engine.state_dict()


# Alone nothing is reduced: the first and the last stage show it.
WORLDS = [
    pytest.param(stage, *world, marks=pytest.mark.soak if world == (1, 1) and stage in (1, 2) else [])
    for stage in (0, 1, 2, 3)
    for world in ((1, 1), (2, 2), (3, 1))
]


@pytest.mark.parametrize(("stage", "world_size", "accumulation"), WORLDS)
def test_training_continues_as_if_the_batch_had_not_been_there(stage: int, world_size: int, accumulation: int) -> None:
    broken = run_on_ranks(world_size, train, stage, accumulation, True)
    for found, expected in zip(broken, run_on_ranks(world_size, train, stage, accumulation, False), strict=True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


# ---- on one rank only ----

SCRIPT = """
    import os, sys, time, torch, launcher
    from launcher.base.timeouts import Timeouts
    import launcher.zero.order as order
    order.timeouts = lambda: Timeouts(other_ranks_s=2.0)
    stage, place, catches = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "caught"
    config = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": 0,
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0,
                                    "reduce_bucket_size": 5000},
              "optimizer": {"type": "AdamW", "params": {"lr": 0.05}}}
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(5)))
    engine, *_ = launcher.initialize(model=model, config=config)

    def fail(*_):
        raise ValueError("on purpose")

    def step(fails):
        x = torch.randn(4, 64)
        if fails and place == "data":
            fail()
        handle = model[2].register_forward_pre_hook(fail) if fails and place == "forward" else None
        try:
            out = engine(x)
            if fails and place == "backward":
                model[3].weight.register_hook(fail)
            engine.backward(out.mean())
        finally:
            if handle:
                handle.remove()
        if fails and place == "step":
            fail()
        engine.step()

    for number in range(3):
        try:
            step(number == 1 and os.environ["RANK"] == "1")
        except ValueError:
            if not catches:
                raise
"""


@pytest.mark.parametrize(
    ("stage", "place"),
    [
        (3, "backward"),
        *(
            pytest.param(stage, place, marks=pytest.mark.soak)
            for stage, place in ((2, "backward"), (3, "forward"), (3, "data"), (3, "step"), (2, "step"))
        ),
    ],
)
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(tmp_path: Path, stage: int, place: str) -> None:
    start_s = time.monotonic()
    script = scripts.write(tmp_path, SCRIPT)
    result = run_ranks(tmp_path, 3, script, str(stage), place, "uncaught")
    assert result.code == 1
    assert "ValueError: on purpose" in result.err
    assert time.monotonic() - start_s < 100 * slowness()  # the process group would wait for 30 min


@pytest.mark.parametrize(("stage", "place"), [(2, "backward"), (3, "forward")])
def test_a_rank_that_continues_alone_is_an_error(tmp_path: Path, stage: int, place: str) -> None:
    result = run_ranks(tmp_path, 2, scripts.write(tmp_path, SCRIPT), str(stage), place, "caught")
    assert result.code == 1
    assert "an exception ended a pass, and not alike on every rank: rank 1 caught the exception" in result.err
