"""The journal of a run, on the launcher's side: its own file, and one of each rank, from what ranks send.

All files are written on the thread of the run folder. A disk that takes no more ends a file, with one warning, and not
the job.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.base.progress import RankProgress
from launcher.base.secrets import mask_arguments
from launcher.job.events import RunReport
from launcher.job.logs import RankLog, RunFolder
from launcher.journal.rank import encoded
from launcher.journal.records import DOUBLED_EVERY_BYTES, LAUNCHER_FILE, VERSION
from launcher.plan.plan import JobPlan

_PROGRESS_INTERVAL_S = 1.0  # between two records of progress; longer where there are many ranks, or records
_RANKS_A_SECOND = 100
_CLOCK_INTERVAL_S = 60.0
_GIT_TIMEOUT_S = 10.0
_MAX_SCRIPT_BYTES = 16 << 20  # a larger one is a program, whose digest is not worth the reading
_PACKAGE_FOLDER = re.compile(r"(?P<name>.+?)-(?P<version>\d[^-]*)\.dist-info")


class RunJournal:
    """Writes the journal of one run. `add` and `write_rank` are for any thread, the rest for the controller's."""

    def __init__(self, plan: JobPlan, files: RunFolder, warn: Callable[[str], object]) -> None:
        self._plan, self._files, self._warn = plan, files, warn
        self._is_on = plan.has_journal
        self._logs: dict[str, RankLog] = {}  # by the names of files
        self._num_bytes = 0
        self._progress: dict[int, RankProgress] = {}  # news that are not written
        self._progress_at_s = self._clock_at_s = 0.0
        self._interval_s = max(_PROGRESS_INTERVAL_S, plan.placement.world_size / _RANKS_A_SECOND)
        self._on_record: Callable[[dict[str, Any]], object] = lambda record: None
        self._on_rank: Callable[[int, bytes], object] = lambda rank, data: None
        self._git_lock = threading.Lock()
        self._git: subprocess.Popen[str] | None = None
        self._is_closed = False

    def begin(self) -> None:
        """Write the head: what this run is, and soon after it, from another thread, the environment."""
        plan = self._plan
        if not self._is_on:
            return
        self.add(
            "job",
            version=VERSION,
            job_id=plan.job_id,
            restart=plan.restart,
            monotonic_s=time.monotonic(),
            world_size=plan.placement.world_size,
            hosts=[
                {"name": node.host.name, "ranks": list(node.ranks), "transport": plan.transports[node.node_rank]}
                for node in plan.placement.nodes
            ],
            command=[plan.command.target, *mask_arguments(plan.command.arguments)],
            cwd=plan.cwd,
            variables=sorted({*plan.given_env, *plan.forwarded_env}),
            rungs=list(plan.rungs),
            faults=list(plan.faults) if plan.restart == 0 else [],
        )
        threading.Thread(target=self._add_environment, name="environment", daemon=True).start()

    def follow(self, on_record: Callable[[dict[str, Any]], object], on_rank: Callable[[int, bytes], object]) -> None:
        """Have every record of the launcher, and all that ranks send, passed on as well. Any thread."""
        self._on_record, self._on_rank = on_record, on_rank

    def add(self, kind: str, **fields: Any) -> None:
        """Add a record of the launcher. Does not wait for the disk. Any thread."""
        if self._is_on:
            record = {"kind": kind, "time_s": round(time.time(), 4), **fields}
            data = encoded(record)
            self._on_record(record)
            self._num_bytes += len(data)
            self._files.put(lambda: self._append(LAUNCHER_FILE, data))

    def note_progress(self, rank: int, progress: RankProgress) -> None:
        """Note that a rank has progressed; `look` writes it."""
        self._progress[rank] = progress

    def look(self, now_s: float, clock_offsets: Callable[[], Mapping[str, float]]) -> None:
        """Write what has gathered, when its time has come. clock_offsets: by host, ours minus that of the host."""
        if self._progress and now_s >= self._progress_at_s:
            self._progress_at_s = now_s + self._interval_s * (1 << (self._num_bytes // DOUBLED_EVERY_BYTES))
            ranks = [
                [rank, each.heartbeats, each.step, each.loss, each.phase, each.total_steps]
                for rank, each in sorted(self._progress.items())
            ]
            self._progress.clear()
            self.add("progress", ranks=ranks)
        if now_s >= self._clock_at_s:
            self._clock_at_s = now_s + _CLOCK_INTERVAL_S
            for host, offset_s in clock_offsets().items():
                self.add("clock", host=host, offset_s=round(offset_s, 6))

    def end(self, report: RunReport) -> None:
        """Write the last record."""
        self.add("end", **self.end_of(report))

    def end_of(self, report: RunReport) -> dict[str, Any]:
        """Write what has gathered, and return the fields of the last record."""
        self.look(math.inf, dict)
        failure = report.failure
        found = None
        if failure is not None:
            found = {name: getattr(failure, name) for name in ("kind", "host", "rank", "exit_code", "reason")}
        return {"exit_code": int(report.exit_code), "duration_s": round(report.duration_s, 3), "failure": found}

    def write_rank(self, rank: int, data: bytes, then: Callable[[], object]) -> None:
        """Append to the journal of a rank, later, and call `then`."""

        def write() -> None:
            self._append(f"rank_{rank}.jsonl", data)
            then()

        self._files.put(write)
        self._on_rank(rank, data)

    def close(self) -> None:
        """Close the files, later. A `git` that still looks at a large folder ends now: the job is over."""
        with self._git_lock:
            self._is_closed = True
            if self._git is not None:
                self._git.kill()

        def close() -> None:
            for log in self._logs.values():
                log.close()

        self._files.put(close)

    # ---- on the thread of the run folder ----

    def _append(self, name: str, data: bytes) -> None:
        log = self._logs.get(name)
        if log is None and self._is_on:
            path = self._plan.run_folder / name
            try:
                log = self._logs[name] = RankLog(path, keeps_open=self._files.keeps_open)
            except OSError as error:
                self._is_on = False
                self._warn(f"{path}: {error.strerror}; there is no journal, the job continues")
        if log is not None:
            self._files.append(log, data)

    # ---- on a thread of its own ----

    def _add_environment(self) -> None:
        code = _code_of(self._plan.cwd, self._plan.command.target, self._run_git)
        self.add("environment", packages=_packages(), python=platform.python_version(), code=code)

    def _run_git(self, *arguments: str) -> tuple[int, str]:
        """Return exit code and output of a `git` in the job's folder; -SIGKILL where `close` came first.

        Raises: OSError, subprocess.TimeoutExpired.
        """
        with self._git_lock:
            if self._is_closed:
                return -signal.SIGKILL, ""
            git = self._git = subprocess.Popen(
                ["git", "-C", self._plan.cwd, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # it may not keep the user's own git from its index
                text=True,
            )
        with git:
            try:
                out, _ = git.communicate(timeout=_GIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                git.kill()
                raise
        return git.returncode, out


def _packages() -> dict[str, str]:
    """Return the packages of this environment, by the names of their folders: to read their metadata takes 100 ms."""
    found: dict[str, str] = {}
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or "."):
                match = _PACKAGE_FOLDER.fullmatch(name)
                if match:
                    found.setdefault(match["name"].replace("_", "-").lower(), match["version"])
    return dict(sorted(found.items()))


def _code_of(cwd: str, script: str, git: Callable[..., tuple[int, str]]) -> dict[str, Any] | None:
    """Return the commit of a folder and whether files differ from it, and a digest of the script; None without any."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        path = Path(cwd, script)
        if path.stat().st_size <= _MAX_SCRIPT_BYTES:
            found["script_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        exit_code, commit = git("rev-parse", "HEAD")
        if exit_code == 0:
            found["commit"] = commit.strip()
            exit_code, _ = git("diff", "--quiet", "HEAD")
            if exit_code >= 0:  # else `close` has ended it
                found["is_changed"] = exit_code != 0
    return found or None
