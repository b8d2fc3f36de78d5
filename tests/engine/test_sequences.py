"""Random programs of what users call on an engine, each beside plain torch: see `harness.train.programs`.

A program that fails is printed as a call of `run_program`, made as small as hypothesis can. What it teaches goes into
`PROGRAMS`, which are run each time. The variable SEQUENCES is the number of random programs of each
long form, which draws other ones each time.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from harness.train.calls import Act, Setting
from harness.train.programs import run_program
from hypothesis import given
from hypothesis import strategies as st

NUM_QUICK, NUM_SHORT, NUM_LONG = 100, 200, int(os.environ.get("SEQUENCES", "500"))

# What the documentation refuses: kind -> the error's class, and a part of its text. Every rank must raise it.
ERRORS = {
    "no backward": ("EngineError", "engine.step() was called without a backward"),
    "boundary": ("EngineAssertionError", "set_gradient_accumulation_boundary() is not supported"),
    "no_sync": ("EngineAssertionError", "no_sync() cannot be used at ZeRO stage"),
    "raw backward": ("EngineError", "a backward pass reached parameters of an engine that it did not begin at"),
    "shards written": ("EngineError", "was written in place while it was sharded"),
    "zero_grad again": ("EngineError", "engine.zero_grad() was called between the micro-batches"),
    "gradients elsewhere": ("EngineError", "param.grad was used"),
    "gradient of another shape": ("RuntimeError", "attempting to assign a gradient of size"),  # torch's own
    "weights written": ("RuntimeError", "has been modified by an inplace operation"),  # autograd's, as in a plain loop
    "parted": ("EngineError", "are not the same on every rank"),
    "parted in evaluation": ("ended", "ranks took different paths"),
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
    **{
        f"a gradient of the script, stage {stage}": (
            [Setting(stage=stage)],
            [("pass", 0), ("own_grad", 0, "set", 1), STEP],
        )
        for stage in (0, 1, 2, 3)
    },
    **{
        f"a gradient of the script where the sums are on disk: {how}": (
            [Setting(stage=stage, offload="nvme")],
            [("pass", 0), ("own_grad", 0, how, 3), STEP, TRAIN],
        )
        for stage, how in ((1, "set"), (2, "none"), (2, "set"))
    },
    **{
        f"weights edited on one rank, stage {stage}": ([Setting(stage=stage)], [TRAIN, ("write_alone", 0)])
        for stage in (0, 1, 2, 3)
    },
    "evaluation on one rank": ([Setting(stage=3)], [TRAIN, TRAIN, ("part", 0)]),
    "sizes that wait when a backward fails": (
        [Setting(stage=3)],
        [("pass", 0), ("micro", 0, 1), ("fail", 0, "backward")],
    ),
    **{
        f"edited weights are read, stage {stage}, {offload}": (
            [Setting(stage=stage, offload=offload)],
            [("write", 0, "edit", 0), ("read", 0, "fp32")],
        )
        for stage, offload in ((2, "cpu"), (1, "nvme"))
    },
    **{
        f"a shard is written before a block reads it: {how}": (
            [Setting(stage=3, keeps=False)],
            [("write", 0, "edit", 0), ("read", 0, how)],
        )
        for how in ("state_dict", "gathered")
    },
    "a load after a shard is written": (
        [Setting(stage=3, keeps=False)],
        [TRAIN, ("write", 0, "edit", 0), ("write", 0, "load", 0), TRAIN],
    ),
    "a gradient is written where the optimizer's copy is on disk": (
        [Setting(stage=1, offload="nvme", model="frozen")],
        [("pass", 0), ("write_grad", 0, 2), STEP],
    ),
    "a block writes frozen weights": (
        [Setting(stage=2, model="frozen")],
        [TRAIN, ("write", 0, "gathered", 0), ("read", 0, "gathered"), TRAIN],
    ),
    **{
        f"an accumulation begins anew when a backward fails: {where}": (
            [Setting(stage=stage, accumulation=3)],
            [TRAIN, ("pass", 0), ("batch", 0, 2), ("fail", 0, where), ("batch", 0, 1), TRAIN],
        )
        for stage, where in ((1, "backward"), (2, "own"))
    },
    **{
        f"a graph goes back after the step, stage {stage}, {how}": (
            [Setting(stage=stage)],
            [TRAIN, FORWARD, FORWARD, BACKWARD, STEP, ("backward", 0, how, False, False), TRAIN],
        )
        for stage, how in ((0, "engine"), (1, "no_sync"), (2, "own"), (3, "engine"), (3, "own"))
    },
    **{
        f"weights are written before a graph goes back: {how}": (
            [Setting(stage=3)],
            [TRAIN, FORWARD, ("write", 0, how, 1), BACKWARD, TRAIN],
        )
        for how in ("gathered", "fp32", "load")
    },
    "weights that may be whole are written before the error": (
        [Setting(stage=3, mics=True, keeps=False)],
        [TRAIN, FORWARD, ("write", 0, "edit", 0), ("forward", 0, "whole", False), ("read", 0, "gathered"), BACKWARD],
    ),
    **{
        f"a list from before the step is written, stage {stage}, {offload}, {precision}": (
            [Setting(stage=stage, offload=offload, precision=precision)],
            [TRAIN, ("write", 0, "earlier", 0), TRAIN],
        )
        for stage, offload, precision in ((0, "none", "bf16"), (1, "nvme", "fp32"), (2, "cpu", "bf16"))
    },
    "other ranks go on": (
        [Setting(stage=3), Setting(stage=1, offload="cpu")],
        [TRAIN, ("train", 1), ("move", 0, 4, (Setting(stage=2), Setting(stage=3, mics=True))), TRAIN, ("train", 1)],
    ),
    "a refused backward has added to the sums": (
        [Setting(stage=0)],
        [("pass", 0), ("forward", 0, "1", True), ("backward", 0, "raw", False, False)],
    ),
    "both backwards within another accumulation": (
        [Setting(stage=2), Setting(stage=2)],
        [("pass", 0), ("pass", 1), FORWARD, ("forward", 1, "whole", True), ("both", 0)],
    ),
    "what another engine shows after a failure": (
        [Setting(stage=1), Setting(stage=0)],
        [("pass", 1), ("fail", 0, "backward"), ("own_grad", 1, "scale", 0), ("step", 1)],
    ),
    "a refused backward leaves nothing": (
        [Setting(stage=1, accumulation=3)],
        [TRAIN, ("forward", 0, "1", True, 1e38), ("backward", 0, "raw", False, False), TRAIN, TRAIN],
    ),
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
        offload=draw(st.sampled_from(["none"] * 4 + ["cpu", "nvme", "speculative"])) if stage else "none",
        accumulation=draw(st.sampled_from([1, 1, 2, 3])),
        managed=draw(st.sampled_from([True, True, True, False])),
        clipping=draw(st.sampled_from([0.0, 0.1])),
        precision=draw(st.sampled_from(["fp32", "fp32", "fp32", "bf16"])),
        small_is_whole=stage == 3 and draw(st.sampled_from([False, False, False, True])),
        keeps=stage != 3 or draw(st.booleans()),
        mics=mics,
    )


_READS = ["state_dict", "gathered", "fp32", "momentum", "parameters", "deepcopy", "rank_0", "thread"]
_PART, _BOOLEAN = st.integers(0, 3), st.booleans()
# What an act may be, how often of all, and with which arguments after the engine's number.
_ACTS: list[tuple[str, int, tuple[st.SearchStrategy[Any], ...]]] = [
    ("nothing", 4, ()),
    ("train", 10, ()),
    ("pass", 10, ()),
    ("step", 12, (st.sampled_from(["engine", "engine", "optimizer", "both"]),)),
    (
        "forward",
        12,
        (
            st.sampled_from(["whole"] * 4 + ["chain", "chain", "0", "1", "2", "3"]),
            st.sampled_from([True, True, True, False]),
        ),
    ),
    ("overflow", 1, ()),
    (
        "backward",
        12,
        (st.sampled_from(["engine"] * 4 + ["own", "own", "unscaled", "no_sync", "raw"]), _BOOLEAN, _BOOLEAN),
    ),
    ("both", 2, ()),
    (
        "read",
        8,
        (st.sampled_from(_READS),),
    ),
    ("write", 6, (st.sampled_from(["edit", "earlier", "gathered", "forgotten", "fp32", "load", "data"]), _PART)),
    ("read_grad", 4, (_PART,)),
    ("write_grad", 3, (_PART,)),
    ("own_grad", 4, (st.sampled_from(["set", "none", "scale", "clip"]), _PART)),
    ("zero_grad", 2, (st.sampled_from(["engine", "optimizer"]),)),
    ("sync", 1, ()),
    ("saliency", 2, ()),
    ("mode", 2, (_BOOLEAN,)),
    ("boundary", 2, (_BOOLEAN,)),
    ("batch", 2, (st.integers(1, 3),)),
    ("micro", 1, (st.integers(1, 3),)),
    ("rate", 1, (st.sampled_from([0.1, 0.3]),)),
    ("freeze", 2, (_PART, _BOOLEAN)),
    ("fail", 3, (st.sampled_from(["forward", "backward", "own", "gathered"]),)),
    ("fail_alone", 1, ()),
    ("save", 2, ()),
    ("load", 2, ()),
    ("reload", 2, (_settings(),)),
    ("again", 1, ()),
    ("move", 1, (st.sampled_from([2, 4]), st.tuples(_settings(), _settings()))),
    ("reader", 1, (_BOOLEAN,)),
    ("evaluate_alone", 1, ()),
    ("write_alone", 1, ()),
]
_NAMES = [name for name, weight, _ in _ACTS for _ in range(weight)]
_ARGUMENTS = {name: arguments for name, _, arguments in _ACTS}


@st.composite
def _act(draw: Any) -> Act:
    """Return one act; the more common it is in loops, the more often."""
    name = draw(st.sampled_from(_NAMES))
    return (name, draw(st.sampled_from([0, 0, 1])), *(draw(argument) for argument in _ARGUMENTS[name]))


@st.composite
def programs(draw: Any, *, longest: int, num_ranks: int = 2) -> tuple[list[Setting], list[Act]]:
    """Return the settings of one or two engines of one kind of model, and acts."""
    first = draw(_settings(num_ranks))
    model, optimizer = (
        draw(st.sampled_from(["plain", "plain", "tied", "frozen"])),
        draw(st.sampled_from(["SGD", "SGD", "AdamW"])),
    )
    first = Setting(**{**vars(first), "model": model, "optimizer": optimizer})
    settings = [first]
    if draw(st.sampled_from([False, True])):
        settings.append(
            replace(draw(_settings(num_ranks)), optimizer=settings[0].optimizer, precision=settings[0].precision)
        )
    # Of a fixed length, where an act may be nothing: left to itself hypothesis draws lists of five.
    acts = draw(st.lists(_act(), min_size=longest, max_size=longest))
    return settings, [act for act in acts if act[0] != "nothing" and act[1] < len(settings)]


_ANY_PACE = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck), "database": None}


@hypothesis.settings(max_examples=NUM_QUICK, derandomize=True, **_ANY_PACE)
@given(programs(longest=16))
def test_random_programs(program: tuple[list[Setting], list[Act]]) -> None:
    run_program(*program, ERRORS)


@pytest.mark.long
@hypothesis.settings(max_examples=NUM_SHORT, derandomize=True, **_ANY_PACE)
@given(programs(longest=16))
def test_more_random_programs(program: tuple[list[Setting], list[Act]]) -> None:
    run_program(*program, ERRORS)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_many_random_programs(num_ranks: int) -> None:
    @hypothesis.settings(max_examples=NUM_LONG, print_blob=True, **_ANY_PACE)
    @given(programs(longest=30, num_ranks=num_ranks))
    def run(program: tuple[list[Setting], list[Act]]) -> None:
        run_program(*program, ERRORS)

    run()
