"""The script that runs other projects' tests, on a suite that was made up: what each engine passes, crashes, hangs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.launch.command import ROOT
from test_benchmarks import PROVENANCE

sys.path.insert(0, str(ROOT / "benchmarks"))
import peer_plugin  # benchmarks are not a package
import peer_suites
from common import is_installed

# Whether the built-in engine answers, in this process and in one that it starts.
ENGINE = """
import os, signal, subprocess, sys, time
import pytest
CODE = "import sys; print(any(getattr(one, 'answers_for', '') == 'deepspeed' for one in sys.meta_path))"
IS_OURS = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True).stdout == "True\\n"
assert IS_OURS == any(getattr(one, "answers_for", "") == "deepspeed" for one in sys.meta_path)
"""
FILES = {
    "test_kinds.py": """
def test_ours(): assert IS_OURS
def test_real(): assert not IS_OURS
@pytest.mark.parametrize("number", [1, 2])
def test_first_parameters(number): assert number == 1
def test_neither(): raise ValueError("never\\nmore")
def test_skipped(): pytest.skip("no such device")
def test_real_not_skipped():
    if IS_OURS: pytest.skip("not here")
@pytest.fixture
def torn():
    yield
    raise KeyError("torn")
def test_teardown(torn): pass
""",
    "test_dies.py": """
def test_before(): pass
def test_dies():
    if IS_OURS: os.kill(os.getpid(), signal.SIGKILL)
def test_after(): pass
""",
    "test_import.py": """
if IS_OURS: from os import nothing_of_this_name
def test_one(): pass
def test_two(): pass
""",
    "zenflow/test_internal.py": "def test_internal(): pass",
}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "project/tests/unit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ENGINE + text)
    return tmp_path / "project"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/peer_suites.py", "--suite", "deepspeed", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)


def test_the_page_counts_tests_of_private_parts_apart() -> None:
    names = [f"unit/test_unwrap_model.py::{name}" for name in ("TestUnwrapModel::test_hooks", "test_a", "test_b")]
    passed, failed = ("passed", ""), ("failed", "no such name")
    real = peer_suites.Outcomes(dict.fromkeys(names, passed), names)
    ours = peer_suites.Outcomes({**dict.fromkeys(names, failed), names[2]: passed}, names)
    reasons = peer_suites.SUITES["deepspeed"].reasons
    text = peer_suites.page_text({"unit/test_unwrap_model.py": {"real": real, "ours": ours}}, True, reasons)
    assert "Of 3 tests that the real one passes, ours passes 1 (33.3%); 50.0% of the 2 that do not fail because" in text
    assert "| open | 1 |" in text


@pytest.mark.long
@pytest.mark.timeout(3600)  # it starts pytest a dozen times
def test_each_test_is_counted_once_with_its_cause(suite: Path, tmp_path: Path) -> None:
    page, outcomes = tmp_path / "page.md", tmp_path / "outcomes.json"
    done = run("--tests", suite, "--real", "--jobs", 2, "--limit", 900, "--json", outcomes, "--output", page)
    assert done.returncode == 0, done.stderr
    results = peer_suites.read_json(outcomes, ("ours", "real"))
    found = {
        name.partition("::")[2]: kind for tests in results.values() for name, kind in peer_suites.kinds(tests).items()
    }
    assert found == {
        "test_ours": "only ours",
        "test_real": "only real",
        "test_first_parameters[1]": "both passed",
        "test_neither": "neither",
        "test_skipped": "skipped",
        "test_real_not_skipped": "only real",
        "test_teardown": "neither",
        "test_before": "both passed",
        "test_dies": "only real",
        "test_after": "both passed",
        "test_one": "only real",
        "test_two": "only real",
    }
    text = page.read_text()
    assert PROVENANCE.search(text) is not None, text
    assert "Of 8 tests that the real one passes, ours passes 3 (37.5%)." in text
    assert "| all | 3 | 5 | 1 | 2 | 1 |" in text
    assert "the real one is DeepSpeed not installed" in text or is_installed("deepspeed")
    assert "| 1 | `the process was killed by SIGKILL` | `test_dies::test_dies` |" in text
    assert "| 1 | `ValueError: never` | `test_kinds::test_neither` |" in text
    assert "| 1 | `KeyError: 'torn'` | `test_kinds::test_teardown` |" in text
    assert "`test_import::test_one`, `test_import::test_two`" in text
    assert not list((suite / "tests").rglob("__pycache__"))  # they ran in a copy

    assert "| open | 5 |" in text  # why ours does not pass these is not in the suite's table

    # What has been run stays, and the page says which commit ran it.
    document = json.loads(outcomes.read_text())
    document["unit/test_import.py"]["ours"] = {"commit": "0123456789", "chosen": [], "file_fails": "of before"}
    del document["unit/test_dies.py"]["ours"]
    outcomes.write_text(json.dumps(document))
    again = run("--tests", suite, "--real", "--json", outcomes, "--continue", "--output", page)
    assert again.returncode == 0, again.stderr
    text = page.read_text()
    assert "1 files at commit 0123456789" in text
    assert "| 2 | `of before` | `test_import::test_one`, `test_import::test_two` |" in text
    assert "| 1 | `the process was killed by SIGKILL` | `test_dies::test_dies` |" in text

    only_ours = run("--tests", suite, "--real-from", outcomes, "--only", "*import*")
    assert "| unit/test_import.py |  | 2 |" in only_ours.stdout, only_ours.stdout + only_ours.stderr


@pytest.mark.soak
def test_a_test_that_blocks_fails_alone(suite: Path, tmp_path: Path) -> None:
    blocking = suite / "tests/unit/test_blocks.py"
    blocking.write_text(ENGINE + "def test_blocks(): time.sleep(1000)\ndef test_after(): pass\n")
    done = run("--tests", suite, "--only", "*blocks*", "--limit", 20, "--json", tmp_path / "outcomes.json")
    assert done.returncode == 0, done.stderr
    tests = json.loads((tmp_path / "outcomes.json").read_text())["unit/test_blocks.py"]["ours"]["tests"]
    outcome, cause = tests.pop("unit/test_blocks.py::test_blocks")
    assert outcome == "failed"
    assert re.fullmatch(r"no end within 20 s, in test_blocks \(test_blocks\.py:\d+\)", cause), cause
    assert tests == {"unit/test_blocks.py::test_after": ["passed", ""]}


def test_what_does_not_count_is_listed_with_its_reason(suite: Path, tmp_path: Path) -> None:
    listed = dict(line.split("\t") for line in run("--tests", suite, "--list").stdout.splitlines())
    assert listed["zenflow/test_internal.py"].startswith("internals: ")
    assert listed["test_kinds.py"] == "counts"
    missing = run("--tests", tmp_path)
    assert missing.returncode == 1
    assert "name its checkout by --tests" in missing.stderr


def test_modules_are_changed_in_every_process_and_files_in_the_copy(tmp_path: Path) -> None:
    suite = peer_suites.Suite(
        "colorsys", ".", changes={"colorsys": "ONE_THIRD = 'changed'"}, edits={"a.py": {"()": "(1,)"}}
    )
    (tmp_path / "a.py").write_text("shape = ()")
    suite.edit(tmp_path)
    assert (tmp_path / "a.py").read_text() == "shape = (1,)"
    runner = peer_suites.Runner("real", sys.executable, suite, tmp_path, 1.0, False, tmp_path)
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import colorsys; print(colorsys.ONE_THIRD)'])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=runner._environment(0, tmp_path), capture_output=True, text=True)
    assert done.stdout == "changed\n", done.stderr


def test_an_assertion_of_a_rank_is_named_by_its_source() -> None:
    error = AssertionError()
    error.__cause__ = RuntimeError(
        'Traceback:\n  File "a.py", line 3, in test\n    assert loss == 1\n    ~~~^^^\nAssertionError'
    )
    assert peer_plugin.cause_of(error) == "AssertionError: assert loss == 1"
