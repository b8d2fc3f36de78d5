"""What the journal of a run costs an optimizer step: the same engine steps with it and without it, in turns.

    launch --num_gpus 2 benchmarks/journal.py [--rounds 40] [--models mlp,gpt] [--steps 10] [--output FILE]

A turn is some steps in a row with the journal, or without it; both ranks change over together. Each round has one turn
of each, in another order every time. Compared are the steps at each quantile: a machine that others use adds to both.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch.distributed as dist
from common import Goal, Section, argument_parser, goals_table, median, rounds_text, table
from step_time import EngineLoop, build_model, make_batch

import launcher
from launcher.comm import observe
from launcher.journal.rank import own_journal

ON, OFF = "with", "without"
LIMIT = 0.005  # of a step


class Switch:
    """Takes the journal away from an engine, and gives it back."""

    def __init__(self, engine: Any) -> None:
        self._watch = engine._watch
        self._recorder, self._span = self._watch._recorder, observe._step_span
        if self._recorder is None:
            raise SystemExit("this run has no journal: start it by `launch`, without --no-journal")

    def turn(self, *, is_on: bool) -> None:
        """Record from now on, or not."""
        self._watch._recorder = self._recorder if is_on else None
        observe._step_span = self._span if is_on else None


def main() -> None:
    """Measure each model, and let rank 0 write the section."""
    parser = argument_parser(__doc__ or "", rounds=40)
    parser.add_argument("--models", default="mlp,gpt")
    parser.add_argument("--steps", type=int, default=10, help="of a turn (default 10)")
    arguments = parser.parse_args()
    section = Section("What the journal costs", "torch")
    launcher.init_distributed()
    rows, goals = [], []
    for name in arguments.models.split(","):
        samples = measure(name, arguments.rounds, arguments.steps)
        quantiles = {way: statistics.quantiles(times, n=10) for way, times in samples.items()}
        ratios = [quantiles[ON][index] / quantiles[OFF][index] - 1 for index in (0, 1, 4)]
        cost = median(samples[ON]) / median(samples[OFF]) - 1
        milliseconds = [f"{median(samples[way]) * 1e3:.2f}" for way in (OFF, ON)]
        rows.append([name, *milliseconds, *(f"{ratio:+.2%}" for ratio in ratios)])
        goals.append(Goal(f"{name}: median step", "≤ +0.5 %", f"{cost:+.2%}", cost <= LIMIT, "see the quantiles"))
    journal = own_journal()
    if dist.get_rank() == 0:
        header = ["model", "ms a step without", "with", "first decile", "second decile", "median"]
        bytes_text = "" if journal is None else f"The journal of rank 0 has {journal.num_bytes:,} bytes.\n\n"
        samples_text = rounds_text(arguments.rounds, f"turns of {arguments.steps} steps")
        section.write(samples_text, f"{goals_table(goals)}\n\n{bytes_text}{table(header, rows)}", arguments.output)


def measure(name: str, rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Return the seconds of each step, with the journal and without."""
    batch = make_batch(name, 0)
    loop = EngineLoop(launcher.initialize, build_model(name), batch[0].shape[0], {"stage": 2})
    switch = Switch(loop.engine)
    samples: dict[str, list[float]] = {ON: [], OFF: []}
    for number in range(-1, rounds):
        for way in (ON, OFF) if number % 2 else (OFF, ON):
            switch.turn(is_on=way == ON)
            dist.barrier()
            for step in range(num_steps):
                begun_s = time.perf_counter()
                loop.step(batch)
                if number >= 0 and step:  # the first pays for the change
                    samples[way].append(time.perf_counter() - begun_s)
    switch.turn(is_on=True)
    return samples


if __name__ == "__main__":
    main()
