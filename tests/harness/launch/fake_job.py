"""A job that only its files know: a run folder with a journal, as `launch` writes one, and an entry in the registry."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.registry.registry import jobs_folder, process_identity


class FakeJob:
    """Writes what launcher and ranks of a job would write. Times in seconds since the epoch."""

    def __init__(self, folder: Path, num_ranks: int, *, ranks_a_host: int = 8, job_id: str = "calm-otter-4f2a") -> None:
        self.job_id, self.num_ranks, self.start_s = job_id, num_ranks, time.time() - 60
        self.run_folder = self.try_folder = folder / "runs" / job_id
        firsts = range(0, num_ranks, ranks_a_host)
        self.hosts = {f"node-{i}": list(range(f, min(num_ranks, f + ranks_a_host))) for i, f in enumerate(firsts)}
        self.run_folder.mkdir(parents=True)

    def begin(self, restart: int = 0) -> None:
        """Write the head of the launcher's journal, and that all ranks have started; of a restart into its folder."""
        if restart:
            self.try_folder = self.run_folder / f"restart_{restart}"
            self.try_folder.mkdir()
        hosts = [{"name": name, "ranks": ranks, "transport": "ssh"} for name, ranks in self.hosts.items()]
        facts = {"version": 1, "job_id": self.job_id, "world_size": self.num_ranks, "hosts": hosts}
        self.launcher("job", time_s=self.start_s, restart=restart, command=["train.py"], cwd="/", **facts)
        for host, ranks in self.hosts.items():
            for rank in ranks:
                self.launcher("start", rank=rank, pid=1000 + rank, host=host)

    def launcher(self, kind: str, /, **fields: Any) -> None:
        """Add a record of the launcher."""
        _append(self.try_folder / "launcher.jsonl", kind, fields)

    def rank(self, rank: int, kind: str, /, **fields: Any) -> None:
        """Add a record of a rank."""
        _append(self.try_folder / f"rank_{rank}.jsonl", kind, fields)

    def step(self, rank: int, step: int, *, own_s: float = 0.3, duration_s: float = 0.5, **fields: Any) -> None:
        """Add the record of one step. own_s: without waiting for others."""
        phases = {"forward": own_s / 3, "backward": own_s * 2 / 3, "communication": duration_s - own_s}
        facts = {"step": step, "num_steps": 1, "duration_s": duration_s, "phases": phases, "tokens": 1024}
        self.rank(rank, "step", **{**facts, "loss": 8 / step, "memory_bytes": 1 << 30, "peak_bytes": 1 << 31, **fields})

    def write_log(self, rank: int, text: str) -> None:
        """Add to the log of a rank."""
        with (self.try_folder / f"rank_{rank}.log").open("a") as file:
            file.write(text)

    def register(self, **changed: Any) -> None:
        """Write the entry of the job: its launcher is this process, so that it runs."""
        entry = {
            "job_id": self.job_id,
            "machine": os.uname().nodename,
            "pid": os.getpid(),
            "process": process_identity(os.getpid()),
            "started_s": self.start_s,
            "hosts": list(self.hosts),
            "num_ranks": self.num_ranks,
            "command": ["train.py", "--steps", "10"],
            "cwd": "/",
            "run_folder": str(self.run_folder),
            "grace_s": 5.0,
        }
        jobs_folder().mkdir(parents=True, exist_ok=True)
        path = jobs_folder() / f"{self.job_id}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(entry | changed))
        new.rename(path)


def _append(path: Path, kind: str, fields: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"kind": kind, "time_s": time.time(), **fields}, separators=(",", ":")) + "\n")


@contextmanager
def grown(path: Path, num_bytes: int) -> Iterator[None]:
    """Leave the first bytes of a file within the block, and bring the rest back after it."""
    whole = path.read_bytes()
    path.write_bytes(whole[:num_bytes])
    yield
    with path.open("ab") as file:
        file.write(whole[num_bytes:])
