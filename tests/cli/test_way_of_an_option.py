"""The way of an option through the code is short: a new one touches few files."""

from __future__ import annotations

import re

import pytest
from harness.launch.command import ROOT

MAX_FILES = 4


@pytest.mark.parametrize("name", ["bound_cores", "hang_timeout_s", "saves_pid", "metrics_port"])
def test_an_option_is_named_by_four_files_at_most(name: str) -> None:
    """From its declaration to the code that obeys it: of an agent, of the controller, of the logs."""
    word = re.compile(rf"\b{name}\b")
    files = [path for path in (ROOT / "launcher").rglob("*.py") if word.search(path.read_text())]
    names = [str(path.relative_to(ROOT)) for path in files]
    assert 2 <= len(names) <= MAX_FILES, names
