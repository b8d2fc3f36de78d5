"""Runs steps, each a process group with a time limit of its own, so that one failure loses none of the others.

A step writes rows to the file that $STEP_ROWS names, a line of JSON each; what it has written before it is killed
counts. After every step the page and the JSON are written anew: a part that is cut off leaves what was done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from common import ROOT, Goal, goals_table, table

ROWS = "STEP_ROWS"
PACKAGE = f"{ROOT / 'launcher'}/"  # begins the names of its files
OUTPUT_CHARS = 6_000  # of the end of a step's output, of those that failed
MAX_COLUMNS = 16
LEAST_S = 15.0  # with less time left no step begins
LAST_WORDS_S = 1.0  # of a step that is killed
# Of a job that this runs within; a step is no rank of it.
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Row = dict[str, Any]
T = TypeVar("T")


# ---- In the process of a step ----


def row(case: str, **facts: Any) -> None:
    """Write one row of a step's result. ok=False: what was asked of it does not hold."""
    line = json.dumps({"case": case, **facts}, default=str)
    if ROWS in os.environ:
        with open(os.environ[ROWS], "a") as file:
            file.write(line + "\n")
    print(line, flush=True)


def commands(
    description: str | None, calls: Sequence[Callable[..., None]]
) -> tuple[argparse.ArgumentParser, dict[Callable[..., None], argparse.ArgumentParser]]:
    """Return a parser with a command for each function, which `options.call` is, and the parsers of these."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    added, found = parser.add_subparsers(required=True), {}
    for call in calls:
        found[call] = added.add_parser(call.__name__, help=call.__doc__)
        found[call].add_argument("--device", choices=["cuda", "cpu"], default="cuda")
        found[call].set_defaults(call=call)
    return parser, found


def attempt(case: str, call: Callable[[], T]) -> T | None:
    """Call; an error becomes a row with the place in the package where it was raised, and None is returned."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001  # the other cases are run
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(PACKAGE)]
        places = [f"{os.path.relpath(f.filename, ROOT)}:{f.lineno}" for f in reversed(frames[-4:])]
        row(case, ok=False, detail=f"{type(error).__name__}: {str(error)[:400]} at {' < '.join(places)}")
        traceback.print_exc()
        return None


# ---- In the process that runs them ----


@dataclass(frozen=True)
class Step:
    """One thing to do, as a command."""

    name: str
    argv: Sequence[str]
    limit_s: float
    group: str = ""  # the table its rows go to; default: one of its own
    env: Mapping[str, str] = field(default_factory=dict)
    is_alone: bool = False  # it measures: nothing else runs beside it
    lacks: str | None = None  # why it cannot run here, which is no failure


def module(name: str, *words: str) -> tuple[str, ...]:
    """Return the command that runs a module of this folder."""
    return (sys.executable, "-m", f"gpu.{name}", *words)


class Runner:
    """Runs the steps of one part and keeps the page."""

    def __init__(
        self, folder: Path, part: int, about: Row, budget_s: float, goals: Callable[[Row], list[Goal]]
    ) -> None:
        """folder: gets gpu.md and gpu.json, where other parts stay. about: title, provenance and hardware of this part.

        goals: from the results of all parts.
        """
        self.page, self.json = folder / "gpu.md", folder / "gpu.json"
        self._logs = folder / "gpu_steps"
        self._logs.mkdir(parents=True, exist_ok=True)
        self.results: Row = {"parts": {}}
        with contextlib.suppress(OSError, ValueError):
            self.results = json.loads(self.json.read_text())
        before = self.results["parts"].get(str(part), {"steps": []})
        self.part: Row = {**about, "steps": before["steps"]}
        self.results["parts"][str(part)] = self.part
        self._goals = goals
        self._end_s = time.monotonic() + budget_s
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = Lock()

    def run(self, steps: Sequence[Step], jobs: int, *, keeps: bool) -> list[str]:
        """Run steps in order, `jobs` at a time but for those that measure; return the names of those that failed.

        keeps: results of other steps of this part stay.
        """
        names = {step.name for step in steps}
        self.part["steps"] = [done for done in self.part["steps"] if keeps and done["name"] not in names]
        together: list[Step] = []
        for step in [*steps, None]:
            if step is not None and not step.is_alone:
                together.append(step)
                continue
            with ThreadPoolExecutor(jobs) as pool:
                try:
                    list(pool.map(self._one, together))
                except BaseException:  # Ctrl-C: the pool waits for what runs
                    self._stop()
                    raise
            together = []
            if step is not None:
                self._one(step)
        return [done["name"] for done in self.part["steps"] if done["name"] in names and is_failure(done)]

    def _stop(self) -> None:
        self._end_s = 0.0  # nothing begins any more
        for process in list(self._running):
            _kill(process)

    def _one(self, step: Step) -> None:
        left_s = self._end_s - time.monotonic()
        if step.lacks is not None:
            self._note(step, f"not run: {step.lacks}")
        elif left_s < LEAST_S:
            self._note(step, "not run: no time is left")
        else:
            self._run(step, min(step.limit_s, left_s))

    def _run(self, step: Step, limit_s: float) -> None:
        stem = re.sub(r"\W+", "_", step.name)
        rows_file, log_file = self._logs / f"{stem}.jsonl", self._logs / f"{stem}.log"
        rows_file.unlink(missing_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        env = {**inherited, **step.env, ROWS: str(rows_file), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        start_s = time.monotonic()
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                step.argv,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGABRT)  # each process writes its stacks
                time.sleep(LAST_WORDS_S)
            finally:
                _kill(process)  # and what it has left behind
                self._running.discard(process)
        rows = _rows_of(rows_file)
        wrong = sum(each.get("ok") is False for each in rows)
        outcome = (
            "ok" if code == 0 else f"killed after {limit_s:.0f} s" if code is None else f"failed, exit code {code}"
        )
        if wrong:
            outcome = f"{wrong} of {len(rows)} rows are wrong" + (f", {outcome}" if code != 0 else "")
        output = log_file.read_text(errors="replace")[-OUTPUT_CHARS:] if outcome != "ok" else ""
        self._note(step, outcome, rows=rows, output=output, seconds=round(time.monotonic() - start_s, 1))

    def _note(self, step: Step, outcome: str, **facts: Any) -> None:
        with self._lock:
            common = {"name": step.name, "group": step.group or step.name, "command": list(step.argv)}
            self.part["steps"].append({**common, "outcome": outcome, "rows": [], "output": "", "seconds": 0.0, **facts})
            print(f"{facts.get('seconds', 0.0):7.1f} s  {step.name:<45} {outcome}", flush=True)
            self.json.write_text(json.dumps(self.results, indent=1) + "\n")
            self.page.write_text(page_of(self.results, self._goals(self.results)))


def is_failure(done: Row) -> bool:
    """Whether a step has shown nothing that it could have shown here."""
    outcome: str = done["outcome"]
    return outcome != "ok" and (not outcome.startswith("not run") or outcome.endswith("no time is left"))


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rows_of(path: Path) -> list[Row]:
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # it was killed while it wrote
            rows.append(json.loads(line))
    return rows


# ---- The page ----


def page_of(results: Row, goals: Sequence[Goal]) -> str:
    """Return the page: goals, then of each part how it was measured, its steps, their tables, and what failed."""
    blocks = ["# The GPU path"]
    if goals:
        blocks += ["## Goals", goals_table(goals)]
    for number, part in sorted(results["parts"].items()):
        steps = part["steps"]
        outcomes = [[done["name"], f"{done['seconds']:.0f}", done["outcome"]] for done in steps]
        blocks += [f"## Part {number}: {part['title']}", part["provenance"], table(["step", "s", "outcome"], outcomes)]
        for group in dict.fromkeys(done["group"] for done in steps):
            rows = [each for done in steps if done["group"] == group for each in done["rows"]]
            blocks += _rows_text(group, rows)
        for done in steps:
            if done["output"]:
                blocks += [f"### {done['name']}: the end of its output", f"```\n{done['output'].strip()}\n```"]
    return "\n\n".join(blocks) + "\n"


def _rows_text(title: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    keys = [key for key in dict.fromkeys(key for each in rows for key in each) if key not in ("case", "detail")]
    cells = [[each["case"], *(_cell(each.get(key)) for key in keys[:MAX_COLUMNS])] for each in rows]
    details = [f"* {each['case']}: {each['detail']}" for each in rows if each.get("detail")]
    return [f"### {title}", table(["case", *keys[:MAX_COLUMNS]], cells), *(["\n".join(details)] if details else [])]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())[:400]
    return str(value).replace("|", "/").replace("\n", " ")
