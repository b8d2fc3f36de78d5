"""What is left when a save is killed: ours, DeepSpeed's and torch.distributed.checkpoint's side by side.

    python benchmarks/checkpoint_peers.py [--count 10] [--seed 0] [--output FILE]

Two cases, beside one in which nothing happens. A checkpoint is saved again under the tag it has, as a job does that is
started again, and all ranks are killed at a random instant of that. And a step later another one is saved while one
rank's disk is slow, and all ranks are killed before that rank has written. Then two new ranks load what `latest` names,
where there is such a file, else the newest folder that can be one, and take two steps: the losses must be those after
one of the saves. Writes a section of docs/benchmarks.md; exit code 1 when ours lost a checkpoint.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import torch
from checkpoint_time import CANDIDATES, TorchsDcp
from common import Section, argument_parser, table
from soak.checkpoint_kills import HANG_S, Ranks

import launcher

MILLIONS, STAGE = 8, 2
SLOW_S = 30.0  # of the rank whose disk is slow: longer than it lives
NAMES = [name for name in ("ours", "DeepSpeed", "DCP") if name in CANDIDATES]


def say(rank: int, pipe: int, text: str) -> None:
    """Write a line from rank 0."""
    if rank == 0:
        os.write(pipe, text.encode() + b"\n")


def start(name: str) -> Any:
    """Return the candidate, after a step."""
    torch.set_num_threads(1)
    launcher.init_distributed()
    return CANDIDATES[name](MILLIONS, STAGE)


def place_of(candidate: Any, root: Path, step: int) -> Path:
    """Return where it saves: DCP knows no tags, so scripts give each checkpoint a folder."""
    return root / f"step{step}" if isinstance(candidate, TorchsDcp) else root


def saved_again(rank: int, pipe: int, name: str, root: Path) -> None:
    """Save, and save again for the same step, until it is killed."""
    candidate = start(name)
    candidate.save(place_of(candidate, root, 1))
    while True:
        say(rank, pipe, '{"saving": 1}')
        start_s = time.monotonic()
        candidate.save(place_of(candidate, root, 1))
        say(rank, pipe, f'{{"took": {time.monotonic() - start_s}}}')


def left_alone(rank: int, pipe: int, name: str, root: Path) -> None:
    """Save once: that loading works at all."""
    candidate = start(name)
    candidate.save(place_of(candidate, root, 1))
    torch.distributed.barrier()
    say(rank, pipe, '{"saving": 1}')
    time.sleep(HANG_S)


def with_a_slow_rank(rank: int, pipe: int, name: str, root: Path) -> None:
    """Save, take a step, and save while what rank 1 writes takes long."""
    candidate = start(name)
    candidate.save(place_of(candidate, root, 1))
    candidate.step()

    def slow(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            time.sleep(SLOW_S * rank)
            return real(*arguments, **options)

        return call

    say(rank, pipe, '{"saving": 2}')
    with mock.patch("torch.save", slow(torch.save)), mock.patch("os.pwrite", slow(os.pwrite)):
        candidate.save(place_of(candidate, root, 2))


def loaded(rank: int, pipe: int, name: str, root: Path) -> None:
    """Take another step, load, and say the next two losses."""
    candidate = start(name)
    candidate.step()
    folder = root
    if isinstance(candidate, TorchsDcp):
        folder = max((path for path in root.iterdir() if (path / ".metadata").exists()), default=root)
    candidate.load(folder)
    say(rank, pipe, f'{{"losses": [{candidate.step()!r}, {candidate.step()!r}]}}')


def undisturbed(rank: int, pipe: int, name: str, root: Path) -> None:
    """Say the losses after one step and after two."""
    del root
    candidate = start(name)
    losses = [candidate.step() for _ in range(3)]
    say(rank, pipe, f'{{"losses": {losses!r}}}')


def outcome(name: str, root: Path) -> tuple[list[float] | None, str]:
    """Load in new ranks. Returns the losses, or None and why there are none."""
    ranks = Ranks(loaded, name, root)
    losses = next((message["losses"] for message in ranks.messages(HANG_S)), None)
    log = ranks.end()
    errors = [line.strip() for line in log.splitlines() if "Error" in line or "Exception" in line]
    return losses, "" if losses else errors[0][:160] if errors else "it did not load"


def killed(name: str, case: Callable[..., None], root: Path, chance: random.Random, save_s: list[float]) -> None:
    """Run a case until it is killed: `saved_again` at a random instant, else while it waits."""
    ranks = Ranks(case, name, root)
    num_saves = 2 if case is saved_again else 1
    for message in ranks.messages(HANG_S):
        save_s += [message["took"]] if "took" in message else []
        num_saves -= "saving" in message
        if not num_saves:
            break
    wait_s = chance.random() * save_s[-1] if case is saved_again else 2.0
    with contextlib.suppress(StopIteration):
        end_s = time.monotonic() + wait_s
        while time.monotonic() < end_s:
            next(ranks.messages(max(0.0, end_s - time.monotonic())))
    ranks.kill("all ranks")
    ranks.end()


def main() -> None:
    """Kill, load, and write what happened."""
    parser = argument_parser(__doc__)
    parser.add_argument("--count", type=int, default=10, help="kills of each case and package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(NAMES))
    options = parser.parse_args()
    page = Section("Saves that are killed, beside the peers'", "torch", "deepspeed")
    cases = {
        "nothing happens": left_alone,
        "saved again under its tag": saved_again,
        "one rank is slow": with_a_slow_rank,
    }
    rows, num_ours = [], 0
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as text:
            ranks = Ranks(undisturbed, name, Path(text))
            expected = next(message["losses"] for message in ranks.messages(HANG_S))
            ranks.end()
        for case, body in cases.items():
            chance, save_s = random.Random(options.seed), [0.3]
            found: collections.Counter[str] = collections.Counter()
            why = ""
            for _ in range(options.count if body is saved_again else max(1, options.count // 5)):
                with tempfile.TemporaryDirectory() as text:
                    killed(name, body, Path(text), chance, save_s)
                    losses, error = outcome(name, Path(text))
                    is_known = losses in (expected[0:2], expected[1:3])
                    found["loaded" if is_known else "another state" if losses else "lost"] += 1
                    why = error or why
            bad = found["lost"] + found["another state"]
            num_ours += bad if name == "ours" else 0
            rows.append([case, name, str(sum(found.values())), str(found["loaded"]), str(bad or "none"), why])
    columns = ["killed while", "", "times", "loaded, with the same losses", "lost, or another state", "the error"]
    text = f"2 ranks, {MILLIONS} M parameters, stage {STAGE}, sync saves; seed {options.seed}.\n\n"
    page.write(
        f"{options.count} kills of each while it saves again",
        text + table(columns, sorted(rows, key=lambda row: row[0])),
        options.output,
    )
    sys.exit(num_ours > 0)


if __name__ == "__main__":
    main()
