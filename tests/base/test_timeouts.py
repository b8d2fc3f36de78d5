"""Waits that no option sets are scaled by one variable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher.base import env
from launcher.base.errors import UsageError
from launcher.base.timeouts import Timeouts, timeouts


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    timeouts.cache_clear()
    yield
    timeouts.cache_clear()


def test_the_variable_scales_every_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TIMEOUT_SCALE.name, "0.5")
    defaults = Timeouts()
    assert {name: 2 * value for name, value in timeouts().as_dict().items()} == defaults.as_dict()


def test_without_it_the_defaults_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.TIMEOUT_SCALE.name, raising=False)
    assert timeouts() == Timeouts()


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "nan", "inf"])
def test_what_is_not_a_usable_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TIMEOUT_SCALE.name, text)
    with pytest.raises(UsageError, match="is not a number from") as caught:
        timeouts()
    assert str(caught.value).startswith(env.TIMEOUT_SCALE.name)
