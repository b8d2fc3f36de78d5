"""How a job of `launcher.run` ended: results by rank, an outcome, or one exception."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.api.pickling import RAISED, RETURNED, unpack_answer
from launcher.base.errors import JobError
from launcher.base.exit_codes import ExitCode
from launcher.base.units import format_duration
from launcher.job.events import Failure, RunReport


@dataclass(frozen=True)
class Outcome:
    """The end of a job whose ranks ran a script, or of one that failed."""

    job_id: str
    exit_code: int  # as `launch` would exit: that of the first rank that failed, 128 + signal when it was killed
    run_folder: Path
    logs: tuple[Path, ...]  # everything each rank wrote, by rank
    duration_s: float
    failure: Failure | None  # the first one; all others followed from it


class RankFailed(JobError):
    """A rank failed, or a host was lost; all other ranks were ended because of it.

    Its `__cause__` is the rank's own exception where that can be pickled.
    """

    def __init__(self, failure: Failure, outcome: Outcome) -> None:
        lines = failure.traceback.rstrip() or "\n".join(failure.last_lines)
        reason, where, hint = failure.reason, failure.host, failure.hint
        if failure.rank is not None:
            reason = f"failed {format_duration(failure.after_s)} after start: {failure.reason}"
            where, hint = f"rank {failure.rank}", f"complete output: {failure.log}"
            lines += f"\n\nnext: {failure.hint}" if failure.hint else ""
        super().__init__(reason, exit_code=outcome.exit_code, where=where, hint=hint, details=lines)
        self.rank = failure.rank  # None: the host itself was lost, or could not start its ranks
        self.host = failure.host
        self.signal = failure.signal_name  # such as "SIGKILL"; None: the rank ended by itself
        self.traceback = failure.traceback  # as text, "" where there is none
        self.log = None if failure.log is None else Path(failure.log)
        self.outcome = outcome


class JobTimeout(JobError, TimeoutError):
    """A job did not end in the time it had; its ranks were ended."""

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, exit_code=ExitCode.HANG, where=where, hint=hint)


@dataclass(frozen=True)
class Ended:
    """A job that has ended, as plain data: what a batch job leaves for the process that waits for it."""

    report: RunReport  # of the last run
    run_folder: Path  # of the last run
    answers: dict[int, bytes]  # what ranks have sent back, see `pickling.unpack_answer`

    def outcome(self) -> Outcome:
        """Return how it ended. Raises: RankFailed."""
        report = self.report
        outcome = Outcome(
            report.job_id,
            report.exit_code,
            self.run_folder,
            tuple(self.run_folder / f"rank_{rank}.log" for rank in range(report.world_size)),
            report.duration_s,
            report.failure,
        )
        if report.failure is not None:
            raise RankFailed(report.failure, outcome) from self._error_of(report.failure.rank)
        return outcome

    def results(self) -> list[Any]:
        """Return what the function has returned on each rank, by rank. Raises: RankFailed, JobError."""
        self.outcome()
        return [self._result_of(rank) for rank in range(self.report.world_size)]

    def _error_of(self, rank: int | None) -> Exception | None:
        """Return the exception of a rank, None where it sent none or it cannot be rebuilt here."""
        kind, data = self._answer_of(rank)
        try:
            error = pickle.loads(data) if kind == RAISED else None
        except Exception:  # noqa: BLE001  # rebuilding an exception runs its own __init__
            return None
        return error if isinstance(error, Exception) else None

    def _result_of(self, rank: int) -> Any:
        kind, data = self._answer_of(rank)
        if kind != RETURNED:
            raise JobError(
                f"ended with exit code {self.report.exit_code} before the function returned",
                exit_code=self.report.exit_code or ExitCode.FAILURE,
                where=f"rank {rank}",
                hint="return from the function instead of leaving the process with sys.exit() or os._exit()",
            )
        try:
            return pickle.loads(data)
        except Exception as error:
            raise JobError(
                f"its result cannot be rebuilt here: {error}",
                exit_code=ExitCode.FAILURE,
                where=f"rank {rank}",
                hint="return plain data or tensors on the CPU",
            ) from error

    def _answer_of(self, rank: int | None) -> tuple[bytes, bytes]:
        answer = None if rank is None else unpack_answer(self.answers.get(rank, b""))
        return answer or (b"", b"")
