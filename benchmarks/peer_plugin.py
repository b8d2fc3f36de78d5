"""A pytest plugin that notes each outcome at once, in a file that outlives a crash: `peer_suites.py` loads it.

It runs in the interpreter that has the engine under test, so it needs pytest and the standard library only. Each line
of the file is an object: what was collected and chosen, a file that cannot be collected or is skipped whole, a test
that begins, the outcome of a test.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

NOTES = "PEER_NOTES"  # the file to write to
CHOICE = "PEER_CHOICE"  # a JSON list of the tests to run; otherwise the first parametrisation of each function
EVERY_PARAMETRISATION = "PEER_EVERY_PARAMETRISATION"  # "1": all of them
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST_CAUSE = 240


def function_of(test: str) -> str:
    """Return a test's name without its parameters."""
    return test.partition("[")[0]


def _note(**facts: object) -> None:
    with open(os.environ[NOTES], "a") as file:
        file.write(json.dumps(facts) + "\n")


def pytest_configure() -> None:
    """Have the server that DeepSpeed's tests fork ranks from import what each rank would import."""
    multiprocessing.set_forkserver_preload(["torch", "deepspeed"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose what runs, behind the marks of the suite's own pytest.ini."""
    names = [item.nodeid for item in items]
    chosen = set(_chosen(names))
    _note(collected=names, chosen=[name for name in names if name in chosen])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def _chosen(names: list[str]) -> list[str]:
    if CHOICE in os.environ:
        return list(json.loads(Path(os.environ[CHOICE]).read_text()))
    if os.environ.get(EVERY_PARAMETRISATION) == "1":
        return names
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(function_of(name), name)
    return list(first.values())


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be imported, or that skips itself."""
    if report.failed:
        _note(file_fails=_last_error(str(report.longrepr)))
    elif report.skipped:
        _note(file_skips=_reason(report.longrepr))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note what begins: the last one that has no outcome is the one that ended the process."""
    _note(begins=nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Note the outcome of a test."""
    report: pytest.TestReport = (yield).get_result()
    if report.failed:
        cause = cause_of(call.excinfo.value) if call.excinfo is not None else _first_line(str(report.longrepr))
        _note(test=item.nodeid, outcome="failed", cause=cause)
    elif report.skipped:
        _note(test=item.nodeid, outcome="skipped", cause=getattr(report, "wasxfail", "") or _reason(report.longrepr))
    elif report.when == "call":
        _note(test=item.nodeid, outcome="passed", cause="")


def cause_of(error: BaseException) -> str:
    """Return the class of an error and its first line, or the source line where it has no text.

    An `assert` in a rank has no text: pytest writes one for the process that it runs in.
    """
    text = _first_line(str(error)) or _source_line(str(error.__cause__ or ""))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _source_line(traceback: str) -> str:
    """Return the last line of source in a traceback that came as text, from a rank."""
    lines = [line.strip() for line in traceback.splitlines() if line.strip(' "~^\n')]
    places = [index for index, line in enumerate(lines) if line.startswith('File "')]
    return lines[places[-1] + 1] if places and places[-1] + 1 < len(lines) else ""


def _last_error(report: str) -> str:
    """Return the error at the end of what pytest shows of a file that it cannot import."""
    errors = [line[1:].strip() for line in _COLOURS.sub("", report).splitlines() if line.startswith("E ")]
    named = [line for line in errors if re.match(r"[\w.]+(Error|Exception|Exit|Warning|Failed)\b", line)]
    return _first_line((named or errors or [report])[-1])


def _first_line(text: str) -> str:
    lines = [line.strip() for line in _COLOURS.sub("", text).splitlines() if line.strip()]
    return re.sub(r"0x[0-9a-f]+|/\S*/(?=pytest-of-|test_)\S*", "…", lines[0])[:_LONGEST_CAUSE] if lines else ""


def _reason(longrepr: object) -> str:
    """Return why something is skipped; pytest has it as file, line and reason."""
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return _first_line(str(text).removeprefix("Skipped: "))
