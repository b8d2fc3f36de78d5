"""Errors a user can cause or must act on, and the exit code of each.

An error states what is wrong, where, and what to do. `cli.main` is the one place that turns an error
into text and an exit code; libraries raise these and never print.
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher.base.exit_codes import ExitCode
from launcher.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class Diagnostic(Record):
    """One finding about user input."""

    message: str
    where: str | None = None  # "file:line:column", an option, a host or a rank
    hint: str | None = None  # what to do: "did you mean ...?", a command, an expected form
    # (message, hint) as they are said once of several hosts that share this finding; None: the two above fit all.
    shared: tuple[str, str | None] | None = None

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}; {self.hint}" if self.hint else text


class LauncherError(Exception):
    """Base of every error with a message made for the user. Shown without a traceback."""

    exit_code: int = ExitCode.FAILURE

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.diagnostics: tuple[Diagnostic, ...] = (Diagnostic(message, where, hint),)
        super().__init__(str(self.diagnostics[0]))

    @classmethod
    def from_diagnostics(cls, diagnostics: Sequence[Diagnostic]) -> LauncherError:
        """Build one error that carries several findings, so that a user sees them all in one run."""
        if not diagnostics:
            raise ValueError("an error needs at least one diagnostic")
        error = cls.__new__(cls)
        error.diagnostics = tuple(diagnostics)
        Exception.__init__(error, "\n".join(str(d) for d in diagnostics))
        return error


class UsageError(LauncherError):
    """Options that contradict each other or do not fit the machine."""

    exit_code = ExitCode.USAGE


class ConfigError(LauncherError, ValueError):
    """A config file or dict that breaks a rule of the schema."""

    exit_code = ExitCode.USAGE


class ConfigAssertionError(ConfigError, AssertionError):
    """Keys that do not fit together, or not the number of ranks: DeepSpeed asserts these."""


class HostfileError(LauncherError):
    """A hostfile, host list or include/exclude filter that cannot be read as meant."""

    exit_code = ExitCode.USAGE


class TransportError(LauncherError):
    """A host that could not be reached, or an agent that did not start there."""

    exit_code = ExitCode.UNREACHABLE


class ProtocolError(LauncherError):
    """Controller and agent do not understand each other: versions differ or a stream is damaged."""

    exit_code = ExitCode.UNREACHABLE


class JobError(LauncherError):
    """A job that a notebook started and that did not end well. `exit_code` is the job's own."""

    def __init__(
        self, message: str, *, exit_code: int, where: str | None = None, hint: str | None = None, details: str = ""
    ) -> None:
        """details: the traceback or the last lines of the rank that failed, shown below the message."""
        super().__init__(message, where=where, hint=hint)
        self.exit_code = exit_code
        self.details = details

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n\n{self.details}" if self.details else text

    def _render_traceback_(self) -> list[str]:
        """Tell IPython what to show: the frames between cell and launcher would bury what the rank said."""
        return [f"{type(self).__name__}: {self}"]


class EngineError(LauncherError):
    """A call to the engine that its state or its config does not allow."""


class CheckpointError(LauncherError):
    """A checkpoint that cannot be written or read."""


# ---- what scripts written for DeepSpeed catch: each is raised where DeepSpeed raises the class of Python ----


class EngineAssertionError(EngineError, AssertionError):
    """A call that DeepSpeed asserts against."""


class EngineValueError(EngineError, ValueError):
    """An argument of a call, where DeepSpeed raises ValueError."""


class EngineRuntimeError(EngineError, RuntimeError):
    """A call, where DeepSpeed raises RuntimeError."""


class EngineKeyError(EngineError, KeyError):
    """Something asked for by its name, where DeepSpeed raises KeyError."""

    __str__ = Exception.__str__  # KeyError's shows the message quoted


class CheckpointAssertionError(CheckpointError, AssertionError):
    """A checkpoint that ranks save differently, where DeepSpeed asserts."""


class CheckpointValueError(CheckpointError, ValueError):
    """An argument of a call that saves or loads, where DeepSpeed raises ValueError."""


# ---- The nearest known name for a mistyped one ----


def nearest(name: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the choice most like `name` (case ignored), or None when none is near."""
    import difflib

    by_lower = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: str, choices: Iterable[str]) -> str | None:
    """Return `did you mean "X"?` for the nearest choice, or None when none is near."""
    near = nearest(name, choices)
    return None if near is None else f'did you mean "{near}"?'
