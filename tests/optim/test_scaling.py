"""The loss scale: when it is halved, when doubled, when the run ends."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.base.errors import EngineError
from launcher.optim.scaling import MAX_OVERFLOWS_AT_MINIMUM, LossScaler, LossScaleRules


def scales(steps: str, **rules: Any) -> list[float]:
    """Return the scale after each step; steps: "x" overflows, "." does not."""
    scaler = LossScaler(LossScaleRules(**{"initial_scale": 16.0, "window": 3, "hysteresis": 1, **rules}))
    found = []
    for step in steps:
        scaler.update(overflow=step == "x")
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize(
    ("steps", "rules", "expected"),
    [
        ("xx.", {}, [8, 4, 4]),
        (".......", {}, [16, 16, 16, 32, 32, 32, 64]),
        ("..x....", {}, [16, 16, 8, 8, 8, 8, 16]),  # an overflow starts the window anew
        ("xxx", {"hysteresis": 2}, [16, 8, 4]),  # hysteresis tolerates the first overflow, not each second one
        ("x.x", {"hysteresis": 2}, [16, 16, 8]),  # a good step alone does not refill it
        ("x....x", {"hysteresis": 2}, [16, 16, 16, 16, 32, 32]),  # a window of them does
        ("x.x", {"hysteresis": 2, "consecutive_hysteresis": True}, [16, 16, 16]),
        ("xxxx", {"min_scale": 4.0}, [8, 4, 4, 4]),
        ("xx....", {"is_dynamic": False}, [16] * 6),
    ],
)
def test_the_scale_after_each_step(steps: str, rules: dict[str, Any], expected: list[float]) -> None:
    assert scales(steps, **rules) == expected


def test_what_is_said_of_an_overflow() -> None:
    scaler = LossScaler(LossScaleRules(2.0**18, hysteresis=2))
    assert scaler.update(overflow=False) is None
    skipping = "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 262144"
    assert scaler.update(overflow=True) == f"{skipping}, but hysteresis is 2. Reducing hysteresis to 1"
    assert scaler.update(overflow=True) == f"{skipping}, reducing to 131072"
    assert LossScaler(LossScaleRules(2.0**18, is_dynamic=False)).update(overflow=True) == f"{skipping}, which is fixed"


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_a_run_that_no_scale_can_help_ends(is_dynamic: bool) -> None:
    steps = "x" * (MAX_OVERFLOWS_AT_MINIMUM - 1)
    scales(f"{steps}.{steps}", initial_scale=1.0, is_dynamic=is_dynamic)
    with pytest.raises(
        EngineError, match=rf"\(1\) and gradients overflowed in {len(steps) + 1} steps in a row"
    ) as caught:
        scales(steps + "x", initial_scale=1.0, is_dynamic=is_dynamic)
    assert "use bf16" in str(caught.value.diagnostics[0].hint)


def test_a_scaler_continues_where_another_was() -> None:
    rules = LossScaleRules(16.0, window=4, hysteresis=2)
    first, second = LossScaler(rules), LossScaler(rules)
    for step in "xx..":
        first.update(overflow=step == "x")
    second.load_state_dict(first.state_dict())
    for step in "..x...x":
        assert first.update(overflow=step == "x") == second.update(overflow=step == "x")
        assert first.scale == second.scale


def test_overflows_in_a_row_are_counted_across_a_restart() -> None:
    rules = LossScaleRules(1.0, hysteresis=1)
    before, after = LossScaler(rules), LossScaler(rules)
    for _ in range(MAX_OVERFLOWS_AT_MINIMUM - 1):
        before.update(overflow=True)
    after.load_state_dict(before.state_dict())
    with pytest.raises(EngineError, match="overflowed in 20 steps in a row"):
        after.update(overflow=True)
