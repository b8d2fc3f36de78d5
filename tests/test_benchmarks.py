"""Benchmarks run seldom: that all of them still fit the code they measure is seen here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORT_EACH = """
import importlib, sys, traceback
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        traceback.print_exc()
        print(name)
"""


def test_every_benchmark_can_be_imported() -> None:
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    folders = os.pathsep.join(str(ROOT / folder) for folder in ("benchmarks", "tests", ""))
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, *names],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": folders},
    )
    assert result.stdout.split() == [], result.stderr
    assert result.returncode == 0, result.stderr
