"""A few rounds of tests/soak/random_kills.py."""

from __future__ import annotations

import os
import subprocess
import sys

from harness.launch.command import ROOT


def test_random_kills_leave_nothing_behind() -> None:
    command = [
        sys.executable,
        str(ROOT / "tests/soak/random_kills.py"),
        "--count",
        "4",
    ]  # more of them in `make soak-short`
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
