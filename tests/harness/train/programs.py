"""Programs of calls on engines, run on ranks and in plain torch at the same time.

A program is a list of settings, one for each engine, and a list of acts. The parent sends one act after another to a
pool of ranks, where an `EngineSide` does it, and lets a `PlainSide` do it here. After every act both must tell the
same, or every rank must raise the error that the documentation names, and none may hang.
"""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness.launch.command import slowness
from harness.train.calls import Act, Setting, Told, do_act, start_acts
from harness.train.plain_calls import OPEN, SKIPPED, PerRank, PlainSide, Rank0, Refused
from harness.train.ranks import RankPool

HANG_S = 40.0  # of one act, where the engine itself gives up after half of its usual times
# How far numbers may be from the plain loop's, which is in fp32: relative to the largest, and absolute.
FP32, BF16 = (5e-5, 2e-6), (0.05, 0.02)  # a lost write is 0.1 away


class Crew(RankPool):
    """Ranks that do acts; ended as soon as one of them tells something else than it should."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.folder = Path(tempfile.mkdtemp(prefix="sequences-"))
        self.is_open = True
        self.is_even = True  # whatever was raised, all ranks have raised it

    def close(self) -> None:
        """End the processes."""
        self.is_open = False
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def tell(self, body: Callable[..., Told], *args: Any, limit_s: float = HANG_S) -> list[Told]:
        """Have every rank call `body`; return what each tells. Raises: AssertionError where one hangs."""
        for _, pipe in self._ranks:
            pipe.send((body, args))
        found: list[Told] = []
        end_s = time.monotonic() + limit_s * slowness()
        for rank, (_, pipe) in enumerate(self._ranks):
            try:
                if not pipe.poll(max(0.0, end_s - time.monotonic())):
                    raise AssertionError(f"rank {rank} hung:\n{self._dump_and_close()}")
                is_fine, value = pipe.recv()
                found.append(value if is_fine else {"error": ("in the harness", value)})
            except (EOFError, ConnectionError):
                found.append({"error": ("ended", self.said())})
                self.is_even = False
        self.is_even &= len({"error" in told for told in found}) == 1
        return found

    def end_program(self) -> None:
        """After a failure: end the program where the ranks still can, else the ranks."""
        if not self.is_open:
            return
        for told in self.tell(do_act, -1, ("finish", 0), (), limit_s=5.0) if self.is_even else [{"error": ""}]:
            if "error" in told and self.is_open:
                self.close()

    def said(self) -> str:
        """Return what the ranks have written of errors."""
        path = self.folder / "errors"
        return path.read_text(errors="replace") if path.exists() else ""


_crews: dict[int, Crew] = {}


@atexit.register
def _close_all() -> None:
    for crew in _crews.values():
        if crew.is_open:
            crew.close()


def _crew_of(world_size: int) -> Crew:
    crew = _crews.get(world_size)
    if crew is None or not crew.is_open:
        crew = _crews[world_size] = Crew(world_size)
    return crew


def expanded(acts: Sequence[Act], num_engines: int) -> Iterator[Act]:
    """Return the acts one by one, and those that look at everything at the end."""
    ends: list[Act] = []
    for index in range(num_engines):
        ends += [("boundary", index, True), ("train", index), ("read", index, "state_dict"), ("read", index, "fp32")]
    for act in [*acts, *ends]:
        if act[0] in ("train", "pass"):
            yield ("forward", act[1], "whole", True)
            yield ("backward", act[1], "engine", False, False)
            if act[0] == "train":
                yield ("step", act[1])
        elif act[0] == "overflow":
            yield ("forward", act[1], "whole", True, math.inf)
        else:
            yield act


def run_program(settings: Sequence[Setting], acts: Sequence[Act], errors: dict[str, tuple[str, str]]) -> None:
    """Run a program on ranks and in plain torch. errors: kind -> class and a part of the text.

    Raises: AssertionError with the program and the first act that told something else.
    """
    plain = PlainSide(settings)
    crew = _crew_of(plain.world_size)
    folder = Path(tempfile.mkdtemp(dir=crew.folder))
    done: list[Act] = []
    try:
        _compare(crew.tell(start_acts, list(settings), folder, crew.folder / "errors"), {}, {}, errors)
        for number, act in enumerate(expanded(acts, len(settings))):
            expected = plain.do(number, act)
            if expected is SKIPPED:
                continue
            done.append(act)
            if act[0] == "move":
                crew = _move(crew, plain, number, folder, errors)
                continue
            found = crew.tell(do_act, number, plain.resolved, plain.drops)
            _compare(found, expected, plain.common(), errors, is_rounded=plain.is_rounded)
            if isinstance(expected, Refused) and expected.ends:
                crew.end_program()
                return
        _compare(crew.tell(do_act, -1, ("finish", 0), ()), {}, {}, errors)
    except AssertionError as error:
        crew.end_program()
        lines = "\n".join(f"    {act!r}," for act in acts)
        text = f"run_program(\n  {list(settings)!r},\n  [\n{lines}\n  ],\n)"
        last = f"in act {len(done)}, {done[-1]!r}" if done else "at the start"
        raise AssertionError(f"{last}: {error}\n{text}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(crew: Crew, plain: PlainSide, number: int, folder: Path, errors: dict[str, tuple[str, str]]) -> Crew:
    """Save, and load on as many ranks as the plain side has now. Returns these."""
    _, settings = plain.resolved
    for index in range(len(settings)):
        _compare(crew.tell(do_act, number, ("save", index), ()), {}, {}, errors)
    _compare(crew.tell(do_act, number, ("finish", 0), ()), {}, {}, errors)
    crew = _crew_of(plain.world_size)
    _compare(crew.tell(start_acts, settings, folder, crew.folder / "errors"), {}, {}, errors)
    for index in range(len(settings)):
        told = crew.tell(do_act, number, ("load", index), ())
    _compare(told, {}, plain.common(), errors)
    return crew


def _compare(
    found: list[Told],
    expected: Told | Refused | Rank0,
    common: Told,
    errors: dict[str, tuple[str, str]],
    *,
    is_rounded: bool = False,
) -> None:
    """Raise AssertionError where a rank has told something else."""
    problems: list[str] = []
    ends = [told.pop("error", None) for told in found]
    for rank, (told, error) in enumerate(zip(found, ends, strict=True)):
        if isinstance(expected, Refused):
            kind, text = errors[expected.kind]
            if error is None or error[0] != kind or text not in error[1]:
                problems.append(f"rank {rank} should raise {kind} with {text!r}, and got {error or told}")
            continue
        if error is not None:
            problems.append(f"rank {rank} raised {error[0]}: {error[1]}")
            continue
        wanted = {**common}
        if isinstance(expected, Rank0):
            wanted.update(expected.told if rank == 0 else {})
        else:
            wanted.update(expected)
        if common and wanted.keys() != told.keys():
            problems.append(f"rank {rank} told of {sorted(told)} in place of {sorted(wanted)}")
            continue
        for name, value in wanted.items():
            value = value.values[rank] if isinstance(value, PerRank) else value
            if value is not OPEN and not _is_close(told[name], value, *(BF16 if is_rounded else FP32)):
                problems.append(f"rank {rank}, {name}: {_shown(told[name], value)}")
    assert not problems, "\n".join(problems)


def _is_close(found: Any, expected: Any, relative: float, absolute: float) -> bool:
    if isinstance(expected, list):
        return all(value is None or value == other for value, other in zip(expected, found, strict=True))
    if expected is None or found is None:
        other = found if expected is None else expected  # what has not been used has none, or zeros
        return other is None or (isinstance(other, np.ndarray) and not other.any())
    if isinstance(expected, np.ndarray):
        if not np.isfinite(expected).all():
            return bool(not np.isfinite(found).all())
        return bool(np.abs(found - expected).max() <= relative * np.abs(expected).max() + absolute)
    if isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=relative, abs_tol=absolute) or (
            not math.isfinite(expected) and not math.isfinite(found)
        )
    return bool(found == expected)


def _shown(found: Any, expected: Any) -> str:
    if isinstance(found, np.ndarray) and isinstance(expected, np.ndarray):
        off = np.abs(found - expected).max()
        return f"off by {off:.3g}, {found.ravel()[:3]} in place of {expected.ravel()[:3]}"
    return f"{found!r} in place of {expected!r}"
