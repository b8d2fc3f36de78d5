"""A job as immutable data: everything that will happen, before anything does."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.base.secrets import mask_arguments
from launcher.cluster.cluster import Placement

DEFAULT_GRACE_S = 5.0
# Local agents notice the end of their pipe at once. A network can fail without a word, so both sides of one need a
# lease; it must outlast a launcher that is suspended for a moment or busy on a loaded machine.
DEFAULT_LEASE_S = 30.0
REPORT, LADDER = ON_OOM = ("report", "ladder")
_PROGRESS_INTERVAL_S = 1.0
_REPORTS_PER_HANG_TIMEOUT = 8  # a hang is found late by that part of it

# Fields that `--dry-run --json` shows by their names.
_AS_THEY_ARE = (
    "job_id", "master_addr", "master_port", "cwd", "bound_cores", "grace_s", "lease_s", "hang_timeout_s",
    "max_restarts", "on_oom", "engine", "resume", "faults", "has_journal", "metrics_port",
)  # fmt: skip
_ADJECTIVES = ["amber", "bold", "brisk", "calm", "clear", "eager", "fleet", "keen", "lucid", "mellow", "quiet", "swift"]
_ANIMALS = ["badger", "crane", "falcon", "finch", "heron", "ibex", "lynx", "marten", "otter", "raven", "tern", "wren"]


@dataclass(frozen=True)
class Command:
    """What every rank runs."""

    kind: str  # "script", "module", "program"; "internal": a module of this package
    target: str
    arguments: tuple[str, ...]
    passes_local_rank: bool = False
    call: bytes = field(repr=False, default=b"")  # of `launcher.api.rank`: the function call that ranks make

    def for_local_rank(self, local_rank: int) -> list[str]:
        """Return the arguments of `launcher.worker` for one rank."""
        extra = [f"--local_rank={local_rank}"] if self.passes_local_rank else []
        return [self.kind, self.target, *extra, *self.arguments]

    def for_ranks(self, num_ranks: int) -> list[list[str]]:
        """Return what `for_local_rank` says of each rank of a node; one entry when it is the same for all."""
        return [self.for_local_rank(i) for i in range(num_ranks if self.passes_local_rank else 1)]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run does beside its hosts and its command. The options of `launch run` write these fields by their names.

    A plan has them unchanged, so that a new one needs no line between the option and the code that obeys it.
    """

    grace_s: float = DEFAULT_GRACE_S
    lease_s: float = DEFAULT_LEASE_S  # a silence of this length, over a network, means that the other side is gone
    hang_timeout_s: float | None = None  # end the job when a rank makes no progress for so long
    stop_signals: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # of the launcher: end the job
    bound_cores: tuple[int, ...] | None = None  # bind ranks to shares of these; (): of all; None: do not bind
    saves_pid: bool = False  # write the launcher's pid into the run folder
    run_id: str | None = None  # what all nodes call the job where each runs its own command; None: job_id
    max_restarts: int = 0
    on_oom: str = REPORT  # what `--on-oom` says: what follows when memory ends
    engine: str = "auto"  # what `--engine` says
    resume: str = ""  # what `--resume` says: "auto", "never", a folder, or nothing
    faults: tuple[str, ...] = ()  # what is rehearsed at the first start, see `journal.faults`
    has_journal: bool = True  # record what the run does, see `journal.records`
    metrics_port: int | str | None = None  # where Prometheus reads the figures of the job, see `fields.Address`
    otlp: str | None = None  # which collector of OpenTelemetry gets them: a URL, or "auto"


@dataclass(frozen=True)
class JobPlan(Settings):
    """One run, decided. Values of the environment are secrets: `describe` names them only, and masks arguments."""

    job_id: str
    placement: Placement
    command: Command
    cwd: str
    run_folder: Path
    master_addr: str
    master_port: int | None  # None: an agent on node 0 picks a free one
    transports: dict[int, str]  # node rank -> "local", "ssh" or "srun"
    forwarded_env: dict[str, str] = field(repr=False)  # for ranks on other hosts
    given_env: dict[str, str] = field(repr=False, default_factory=dict)  # from files and --env, for all ranks
    notes: tuple[str, ...] = ()  # what the user should know about how it came to be
    device_tokens: tuple[str, ...] = ()  # of this machine, see cluster.devices
    agent_commands: dict[int, str] = field(default_factory=dict)  # node rank -> what starts the agent; to be shown
    restart: int = 0  # how often the job was started again
    num_failures: int = 0  # of those restarts, how many came after a failure: what `max_restarts` limits
    rungs: tuple[dict[str, Any], ...] = ()  # how the ladder of `on_oom` has changed the config, in order

    @property
    def progress_interval_s(self) -> float:
        """How often agents report the heartbeats of their ranks."""
        if self.hang_timeout_s is None:
            return _PROGRESS_INTERVAL_S
        return min(_PROGRESS_INTERVAL_S, self.hang_timeout_s / _REPORTS_PER_HANG_TIMEOUT)

    @property
    def is_here(self) -> bool:
        """Whether every rank is on this machine."""
        return set(self.transports.values()) == {"local"} and not self.placement.elsewhere

    def describe(self) -> dict[str, object]:
        """Return the plan as plain data for `--dry-run --json`; no environment values."""
        return {
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            "run_id": self.run_id or self.job_id,
            "world_size": self.placement.world_size,
            "run_folder": str(self.run_folder),
            "command": {
                "kind": self.command.kind,
                "target": self.command.target,
                "arguments": mask_arguments(self.command.arguments),
            },
            "environment": sorted(self.given_env),
            "forwarded_environment": sorted(self.forwarded_env),
            "nodes": [
                {
                    "node_rank": node.node_rank,
                    "host": node.host.name,
                    "transport": self.transports[node.node_rank],
                    "slots": list(node.host.slots),
                    "ranks": list(node.ranks),
                    "agent_command": self.agent_commands.get(node.node_rank),
                }
                for node in self.placement.nodes
            ],
        }


def new_job_id() -> str:
    """Return a fresh id a person can say: `calm-otter-4f2a`."""
    adjective, animal, *rest = os.urandom(4)  # `secrets` would load OpenSSL for it
    return f"{_ADJECTIVES[adjective % len(_ADJECTIVES)]}-{_ANIMALS[animal % len(_ANIMALS)]}-{bytes(rest).hex()}"
