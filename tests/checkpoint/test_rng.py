"""Random states that a checkpoint keeps make a process draw the numbers it would have drawn."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import numpy.random  # loaded by the first use else: its state is saved from then on
import pytest
import torch

from launcher.activation.rng import get_cuda_rng_tracker
from launcher.base.errors import CheckpointError
from launcher.checkpoint.values.rng import restore_rng, rng_state
from launcher.checkpoint.values.tree import decode, encode

CPU = torch.device("cpu")


def saved() -> dict[str, Any]:
    """Return the states as a checkpoint would hold them."""
    plain, tensors = encode(rng_state(CPU), "rng")
    state: dict[str, Any] = decode(
        json.loads(json.dumps(plain)), {key: value.clone() for key, value in tensors.items()}
    )
    return state


def drawn() -> list[float]:
    with get_cuda_rng_tracker().fork("layers"):
        tracked = torch.rand(3).tolist()
    return [
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(),
        numpy.random.standard_normal(),
        *torch.randn(5).tolist(),
        *tracked,
    ]


@pytest.fixture(autouse=True)
def _tracked_state() -> Any:
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("layers", 77)
    yield
    tracker.reset()


def test_every_generator_draws_the_same_again() -> None:
    drawn()  # the second of two Gaussian numbers is in the state, too
    state = saved()
    expected = drawn()
    drawn()
    assert restore_rng(state, CPU) == ()
    assert drawn() == expected
    assert restore_rng(state, CPU) == ()
    assert drawn() == expected


def test_saving_draws_nothing() -> None:
    state = saved()
    saved()
    expected = drawn()
    restore_rng(state, CPU)
    assert drawn() == expected


def test_a_generator_that_is_not_here_is_left_out() -> None:
    state = saved()
    state["device"] = {"type": "cuda", "state": torch.zeros(16, dtype=torch.uint8)}
    state["tracked"]["type"] = "xpu"
    expected = random.random()
    assert restore_rng(state, CPU) == ("device", "tracked")
    assert random.random() == expected


def test_without_numpy_its_state_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    state = saved()
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert restore_rng(state, CPU) == ("numpy",)


def test_a_script_s_own_tracked_states_stay() -> None:
    state = saved()
    get_cuda_rng_tracker().add("another", 5)
    restore_rng(state, CPU)
    assert set(get_cuda_rng_tracker().get_states()) == {"layers", "another"}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("python", {"version": 3, "words": torch.zeros(3), "gauss": None}),
        ("python", {}),
        ("numpy", {"words": torch.zeros(624, dtype=torch.int64), "position": 10**6, "has_gauss": 0, "gauss": 0.0}),
        ("numpy", {"words": torch.zeros(5, dtype=torch.int64), "position": 0, "has_gauss": 0, "gauss": 0.0}),
        ("numpy", {"words": torch.full((624,), -1), "position": 0, "has_gauss": 0, "gauss": 0.0}),
        ("torch", torch.zeros(7, dtype=torch.uint8)),
        ("torch", torch.zeros(5056, dtype=torch.float32)),
        ("torch", 3),
        ("device", None),
        ("tracked", {"type": "cpu", "states": {"layers": 3}}),
    ],
)
def test_a_damaged_state_is_refused_by_name(name: str, part: Any) -> None:
    with pytest.raises(CheckpointError, match=name):
        restore_rng({**saved(), name: part}, CPU)


def test_what_is_no_state_at_all_is_refused() -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        restore_rng([1], CPU)  # type: ignore[arg-type]


def test_numpy_s_random_numbers_are_not_loaded_for_it() -> None:
    code = (
        "import sys, torch; from launcher.checkpoint.values.rng import rng_state;"
        "before = 'numpy.random' in sys.modules;"
        "state = rng_state(torch.device('cpu'));"
        "print(before, 'numpy.random' in sys.modules, 'numpy' in state)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after, has_state = result.stdout.split()
    assert before == after == has_state


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_again() -> None:
    device = torch.device("cuda", 0)
    torch.rand(3, device=device)
    plain, tensors = encode(rng_state(device), "rng")
    expected = torch.rand(5, device=device)
    assert restore_rng(decode(plain, tensors), device) == ()
    assert torch.equal(torch.rand(5, device=device), expected)
