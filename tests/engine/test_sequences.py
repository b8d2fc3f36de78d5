"""Random programs of what users call on an engine, each beside plain torch: see `harness.calls`.

A program that fails is printed as a call of `run_program`, made as small as hypothesis can. What it teaches goes into
`PROGRAMS`, which are run each time. SEQUENCES is the number of random programs of the long form.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
from harness.calls import Act, Setting, run_program
from hypothesis import given
from hypothesis import strategies as st

NUM_SHORT, NUM_LONG = 200, int(os.environ.get("SEQUENCES", "20000"))

# What the documentation refuses: kind -> the error's class, and a part of its text. Every rank must raise it.
ERRORS = {
    "no backward": ("EngineError", "engine.step() was called without a backward"),
    "no_sync": ("EngineError", "no_sync() cannot be used at ZeRO stage"),
    "raw backward": ("EngineError", "a backward pass ran outside of engine.backward(loss)"),
    "shards written": ("EngineError", "was written in place while it was sharded"),
    "zero_grad again": ("EngineError", "engine.zero_grad() was called between the micro-batches"),
    "parted": ("EngineError", "rank 0"),
    "evaluation alone": ("ended", "ranks took different paths"),
}

TRAIN = ("train", 0)
FORWARD = ("forward", 0, "whole", True)
BACKWARD = ("backward", 0, "engine", False, False)
STEP = ("step", 0)
# Programs that have failed: name -> settings, acts.
PROGRAMS: dict[str, tuple[list[Setting], list[Act]]] = {
    "a forward with gradients between backward and step": (
        [Setting(stage=3)],
        [FORWARD, BACKWARD, FORWARD, STEP, ("forward", 0, "whole", False)],
    ),
    "the same in evaluation": (
        [Setting(stage=3)],
        [FORWARD, BACKWARD, ("mode", 0, False), FORWARD, STEP, ("read", 0, "state_dict")],
    ),
    "two engines, both backwards before the first step": (
        [Setting(stage=3), Setting(stage=3)],
        [
            FORWARD,
            ("forward", 1, "whole", True),
            ("backward", 0, "engine", True, True),
            ("backward", 1, "engine", True, False),
            STEP,
            ("step", 1),
            ("forward", 0, "whole", False),
        ],
    ),
    "the accumulation changes after two steps": (
        [Setting(stage=2, accumulation=3)],
        [*6 * [TRAIN], ("batch", 0, 4), *5 * [TRAIN]],
    ),
    **{
        f"a thread reads weights, stage {stage}": (
            [Setting(stage=stage, width=256)],
            [TRAIN, ("reader", 0, True), *20 * [TRAIN], ("reader", 0, False)],
        )
        for stage in (1, 2)
    },
    "a part alone before step": (
        [Setting(stage=3)],
        [*2 * [TRAIN], FORWARD, BACKWARD, ("forward", 0, "0", True), STEP],
    ),
    "gradients of MiCS before the copies are summed": (
        [Setting(stage=3, mics=True, managed=False)],
        [FORWARD, BACKWARD, ("read_grad", 0, 0), ("write_grad", 0, 0), STEP],
    ),
    **{
        f"gradients before step with boundaries of the script, stage {stage}": (
            [Setting(stage=stage, managed=False)],
            [FORWARD, BACKWARD, ("read_grad", 0, 0), ("write_grad", 0, 0), STEP],
        )
        for stage in (0, 1)
    },
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_has_failed(name: str) -> None:
    run_program(*PROGRAMS[name], ERRORS)


# ---- random programs ----


@st.composite
def _settings(draw: Any, num_ranks: int = 2) -> Setting:
    stage = draw(st.sampled_from([3, 2, 1, 0]))
    mics = stage == 3 and num_ranks == 4
    return Setting(
        stage=stage,
        offload=draw(st.sampled_from(["none"] * 4 + ["cpu", "nvme"])) if stage else "none",
        accumulation=draw(st.sampled_from([1, 1, 2, 3])),
        managed=draw(st.sampled_from([True, True, True, False])),
        clipping=draw(st.sampled_from([0.0, 0.1])),
        small_is_whole=stage == 3 and draw(st.sampled_from([False, False, False, True])),
        keeps=stage != 3 or draw(st.booleans()),
        mics=mics,
    )


_WHERE = ["whole"] * 4 + ["chain"] + [str(part) for part in range(4)]
_PARTS = st.integers(0, 3)
_BOOLEANS = st.booleans()


def _acts(num_ranks: int) -> st.SearchStrategy[Act]:
    """Return one act; the more common it is in loops, the more often."""
    engines = st.sampled_from([0, 0, 1])
    sampled = st.sampled_from

    def act(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Act]:
        return st.tuples(st.just(name), engines, *arguments)

    forward = act("forward", sampled(_WHERE), sampled([True, True, True, False]))
    backward = act("backward", sampled(["engine"] * 4 + ["own", "own", "unscaled", "no_sync", "raw"]), _BOOLEANS, _BOOLEANS)
    return st.one_of(
        act("train"),
        act("step"),
        act("train"),
        forward,
        backward,
        act("step"),
        forward,
        backward,
        act("step"),
        act("read", sampled(["state_dict", "gathered", "fp32", "momentum", "parameters", "deepcopy", "rank 0", "thread"])),
        act("write", sampled(["edit", "gathered", "forgotten", "fp32", "load", "data"]), _PARTS),
        st.one_of(act("read_grad", _PARTS), act("write_grad", _PARTS)),
        st.one_of(act("both"), act("zero_grad"), act("sync"), act("saliency"), act("mode", _BOOLEANS)),
        st.one_of(act("boundary", _BOOLEANS), act("batch", st.integers(1, 3)), act("micro", st.integers(1, 3))),
        st.one_of(act("rate", sampled([0.1, 0.3])), act("freeze", _PARTS, _BOOLEANS)),
        act("fail", sampled(["forward", "backward", "own", "gathered"])),
        st.one_of(act("save"), act("load"), act("reload", _settings(num_ranks)), act("again")),
        st.one_of(
            act("reader", sampled([True, True, False])),
            act("evaluate_alone").filter(lambda _: True),
            st.tuples(st.just("forward"), engines, st.just("whole"), st.just(True), st.just(float("inf"))),
        ),
    )


@st.composite
def programs(draw: Any, *, longest: int, num_ranks: int = 2) -> tuple[list[Setting], list[Act]]:
    """Return the settings of one or two engines of one kind of model, and acts."""
    first = draw(_settings(num_ranks))
    model, optimizer = draw(st.sampled_from(["plain", "plain", "tied", "frozen"])), draw(st.sampled_from(["SGD", "SGD", "AdamW"]))
    first = Setting(**{**vars(first), "model": model, "optimizer": optimizer})
    settings = [first]
    if draw(st.sampled_from([False, True])):
        settings.append(Setting(**{**vars(draw(_settings(num_ranks))), "optimizer": optimizer}))
    return settings, draw(st.lists(_acts(num_ranks), min_size=1, max_size=longest))


@hypothesis.settings(
    max_examples=NUM_SHORT, derandomize=True, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@given(programs(longest=16))
def test_random_programs(program: tuple[list[Setting], list[Act]]) -> None:
    run_program(*program, ERRORS)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_many_random_programs(num_ranks: int) -> None:
    @hypothesis.settings(
        max_examples=NUM_LONG, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), print_blob=True
    )
    @given(programs(longest=30, num_ranks=num_ranks))
    def run(program: tuple[list[Setting], list[Act]]) -> None:
        run_program(*program, ERRORS)

    run()
