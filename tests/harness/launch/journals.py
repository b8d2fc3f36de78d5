"""Journals of jobs that never ran: for what reads them."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEGAN_S = 1.8e9
Record = dict[str, Any]


@dataclass
class Try:
    """One start of a job of the engine, which all its ranks write alike but for some noise."""

    first_step: int = 1
    num_steps: int = 20
    num_bytes: int = 0  # of a rank: steps are added until its file is as large
    step_s: float = 0.25
    num_ranks: int = 2
    began_s: float = BEGAN_S
    exit_code: int | None = 0  # None: the launcher was killed
    host_clocks: dict[str, float] = field(default_factory=dict)  # host -> its epoch clock minus the launcher's
    own: list[Record] = field(default_factory=list)  # further records of the launcher
    own_of_ranks: dict[int, list[Record]] = field(default_factory=dict)
    job: Record = field(default_factory=dict)  # fields of the first record

    def write(self, folder: Path) -> None:
        """Write it as the journal in a folder, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        hosts = list(self.host_clocks) or ["node-a"]
        ranks_of = {host: [r for r in range(self.num_ranks) if r % len(hosts) == i] for i, host in enumerate(hosts)}
        lasts = [
            self._write_rank(folder / f"rank_{rank}.jsonl", rank, host)
            for host, ranks in ranks_of.items()
            for rank in ranks
        ]
        _write(folder / "launcher.jsonl", self._launcher_records(ranks_of, max(lasts, default=self.began_s)))

    def _launcher_records(self, ranks_of: dict[str, list[int]], last_s: float) -> list[Record]:
        hosts = [{"name": host, "ranks": ranks, "transport": "ssh"} for host, ranks in ranks_of.items()]
        job: Record = {
            "version": 1,
            "job_id": "calm-otter-0001",
            "restart": 0,
            "monotonic_s": 1000.0,
            "world_size": self.num_ranks,
            "hosts": hosts,
            "command": ["train.py", "--lr", "1e-3"],
            "cwd": "/data",
            "variables": ["LANG"],
            "launch": "0.1.0",
            "rungs": [],
        }
        records = [{"kind": "job", "time_s": self.began_s, **job, **self.job}]
        # A host was started 500 s before the launcher's: its monotonic clock is so much ahead.
        records += [{"kind": "clock", "time_s": self.began_s, "host": host, "offset_s": -500.0} for host in ranks_of]
        records += self.own
        if self.exit_code is not None:
            failure = {"kind": "rank failed", "host": "node-a", "rank": 1, "exit_code": 1, "reason": "exit code 1"}
            end: Record = {"exit_code": self.exit_code, "duration_s": last_s - self.began_s}
            end["failure"] = failure if self.exit_code else None
            records.append({"kind": "end", "time_s": last_s + 1.0, **end})
        return records

    def _write_rank(self, path: Path, rank: int, host: str) -> float:
        """Write a rank's file; return when its last step ended, by the launcher's clock."""
        ahead_s = self.host_clocks.get(host, 0.0)
        noise = random.Random(rank)
        own = {"version": 1, "rank": rank, "local_rank": rank, "host": host, "pid": 100 + rank, "monotonic_s": 1500.0}
        records = [{"kind": "rank", "time_s": self.began_s + ahead_s, **own}]
        num_bytes = number = 0
        with path.open("w") as file:
            while number < self.num_steps or num_bytes < self.num_bytes:
                number += 1
                time_s = self.began_s + number * self.step_s
                records.append(self._step(self.first_step + number - 1, time_s + ahead_s, rank, noise.random()))
                if len(records) > 1000:
                    num_bytes += file.write(_lines(records))
                    records = []
            file.write(_lines(records + self.own_of_ranks.get(rank, [])))
        self.num_steps = number
        return self.began_s + number * self.step_s

    def _step(self, step: int, time_s: float, rank: int, noise: float) -> Record:
        wait_s = 0.02 * self.step_s if rank == 1 else 0.2 * self.step_s
        phases = {"data": 0.01, "forward": 0.3, "backward": 0.4, "update": 0.05}
        times = {name: share * self.step_s for name, share in phases.items()} | {"communication": wait_s}
        times["script"] = self.step_s - sum(times.values())
        return {
            "kind": "step",
            "time_s": round(time_s, 4),
            "step": step,
            "num_steps": 1,
            "duration_s": self.step_s,
            "slowest_s": self.step_s,
            "phases": {name: round(value, 6) for name, value in times.items()},
            "lr": 3e-4 * (1 + noise),
            "loss_scale": None,
            "samples": 8,
            "tokens": 8192,
            "sent_bytes": 25_769_680,
            "memory_bytes": 3_217_612_800 + int(noise * 1e8),
            "peak_bytes": 3_321_761_280 + rank * 2**20,
            "loss": 10 / math.sqrt(step) + 0.1 * noise,
            "norm": 1 + noise,
            "skipped": 0,
        }


def write_job(folder: Path, *tries: Try) -> Path:
    """Write the journal of a job; all starts but the first are restarts. Returns its run folder."""
    for number, each in enumerate(tries):
        each.write(folder if number == 0 else folder / f"restart_{number}")
    return folder


def _lines(records: list[Record]) -> str:
    return "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)


def _write(path: Path, records: list[Record]) -> None:
    path.write_text(_lines(records))
