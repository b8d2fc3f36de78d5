"""Journals as a job would have written them: steps of ranks in lockstep, with faults of any kind in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from launcher.journal.verdicts import Verdict, Verdicts

Record = dict[str, Any]
Change = Callable[[int, int, Record], None]  # rank, step, record: whose phases and loss may be changed

START_S = 1_000_000.0
OWN = {"data": 0.002, "forward": 0.06, "backward": 0.11, "update": 0.02, "script": 0.004}


@dataclass
class FakeJob:
    """A job whose ranks wait for each other in each step."""

    num_ranks: int = 4
    num_hosts: int = 2
    num_steps: int = 300
    is_plain: bool = False  # without the engine: waits are within backward, and the forward is the script's
    noise: float = 0.0  # of each phase, as a share of it
    seed: int = 0
    changes: tuple[Change, ...] = ()
    scale: float = 1.0  # of all times
    extra: list[tuple[int | None, Record]] = field(default_factory=list)

    def job_record(self) -> Record:
        """Return the head of the launcher's journal."""
        each = self.num_ranks // self.num_hosts
        hosts = [
            {"name": f"node-{chr(97 + host)}", "ranks": list(range(host * each, (host + 1) * each)), "transport": "ssh"}
            for host in range(self.num_hosts)
        ]
        return {"kind": "job", "time_s": START_S, "world_size": self.num_ranks, "hosts": hosts}

    def records(self) -> Iterator[tuple[int | None, Record]]:
        """Yield the records of all files by time."""
        rng, now_s = random.Random(self.seed), START_S
        yield None, self.job_record()
        waiting = sorted(self.extra, key=lambda each: each[1]["time_s"])
        for step in range(1, self.num_steps + 1):
            records = [self._step(rng, rank, step) for rank in range(self.num_ranks)]
            duration_s = max(sum(each["phases"].values()) for each in records)
            now_s += duration_s
            for rank, record in enumerate(records):
                wait = "backward" if self.is_plain else "communication"
                waited_s = duration_s - sum(record["phases"].values())
                record["phases"][wait] = record["phases"].get(wait, 0.0) + waited_s
                record.update(time_s=now_s, duration_s=duration_s, slowest_s=duration_s)
                yield rank, record
            while waiting and waiting[0][1]["time_s"] <= now_s:
                yield waiting.pop(0)
        yield from waiting

    def _step(self, rng: random.Random, rank: int, step: int) -> Record:
        phases = {name: self.scale * time_s * max(0.2, rng.gauss(1.0, self.noise)) for name, time_s in OWN.items()}
        phases["communication"] = self.scale * 0.01
        if self.is_plain:
            phases["script"] += phases.pop("forward")
            phases["backward"] += phases.pop("communication")
        loss = None if self.is_plain else 2.0 + 4.0 / (1 + step / 30) + rng.gauss(0, 0.1)
        record = {
            "kind": "step", "step": step, "num_steps": 1, "phases": phases, "loss": loss, "norm": 1.0,
            "loss_scale": None, "skipped": 0, "samples": 8, "tokens": 1024, "memory_bytes": 1 << 30,
        }  # fmt: skip
        for change in self.changes:
            change(rank, step, record)
        return record

    def verdicts(self) -> list[Verdict]:
        """Return all verdicts on it, looked at once a second."""
        verdicts, look_s = Verdicts(), 0.0
        for rank, record in self.records():
            verdicts.feed(rank, record)
            if record["time_s"] >= look_s + 1:
                look_s = record["time_s"]
                verdicts.current(look_s)
        return verdicts.all()


def longer(phase: str, time_s: float, ranks: set[int] | None = None, first_step: int = 50, every: int = 1) -> Change:
    """Return a change that adds seconds to a phase. ranks: None is all of them."""

    def change(rank: int, step: int, record: Record) -> None:
        if step >= first_step and step % every == 0 and (ranks is None or rank in ranks):
            record["phases"][phase] = record["phases"].get(phase, 0.0) + time_s

    return change


def changed(ranks: set[int] | None = None, first_step: int = 50, **values: Any) -> Change:
    """Return a change of fields; a function gets the value and the step."""

    def change(rank: int, step: int, record: Record) -> None:
        if step >= first_step and (ranks is None or rank in ranks):
            for name, value in values.items():
                record[name] = value(record[name], step) if callable(value) else value

    return change
