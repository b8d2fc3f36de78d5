"""Which other systems get the figures of a job: what `--metrics-port` and `--otlp` say. Imported by every job.

The packages behind it are extras, and are imported only where they are asked for, before any rank starts.
"""

from __future__ import annotations

import errno
import importlib
from typing import TYPE_CHECKING

from launcher.base.errors import UsageError
from launcher.base.fields import address_of, named
from launcher.job.events import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from launcher.job.events import RunReport
    from launcher.metrics.otlp import OtlpPusher
    from launcher.metrics.prometheus import MetricsServer
    from launcher.plan.plan import JobPlan


class Exports:
    """The figures of a job and who gets them: nobody, where its plan names none."""

    def __init__(self, plan: JobPlan) -> None:
        """Listen where the plan says. Raises: UsageError when a package is missing, or the port cannot be had."""
        self.notes: list[str] = []  # what the user should know
        self._plan = plan
        self._server: MetricsServer | None = None
        self._pusher: OtlpPusher | None = None
        if not self._is_on:
            return
        self._otlp = None if plan.otlp is None else _module("otlp", "otlp", "launcher.metrics.otlp")
        figures = importlib.import_module("launcher.metrics.figures")
        self._figures = figures.RunFigures(plan, keeps_ended=plan.otlp is not None)
        if plan.metrics_port is not None:
            module = _module("metrics_port", "metrics", "launcher.metrics.prometheus")
            host, port = address_of(plan.metrics_port)
            try:
                self._server = module.MetricsServer(self._figures, host, port)
            except (OSError, UnicodeError) as error:
                raise _no_port(host, port, error) from error
            self.notes.append(f"metrics {self._server.url}")
        num_shown, num_ranks = len(figures.ranks_shown(plan.placement)), len(plan.placement.ranks)
        if num_shown < num_ranks:
            self.notes.append(f"{num_shown:,} of {num_ranks:,} ranks have metrics of their own: firsts of their hosts")

    @property
    def _is_on(self) -> bool:
        return self._plan.metrics_port is not None or self._plan.otlp is not None

    def beside(self, watcher: Watcher) -> Watcher:
        """Return a watcher that passes the events of the job on to another one, and to the figures."""
        return _Both(watcher, self._figures) if self._is_on else watcher

    def begin(self, warn: Callable[[str], object]) -> None:
        """Begin to push, where the plan says so. warn: may be called from any thread."""
        if self._is_on and self._otlp is not None and self._plan.otlp is not None:
            self._pusher = self._otlp.OtlpPusher(self._figures, self._plan.otlp, warn)

    def close(self, report: RunReport | None = None) -> None:
        """Give the last figures, and end. report: of the last run; None: there was none. May wait for some seconds."""
        if self._is_on and report is not None:
            self._figures.finish(report)
        pusher, self._pusher = self._pusher, None
        if pusher is not None:
            pusher.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()


class _Both(Watcher):
    """Passes every event on to two watchers."""

    def __init__(self, first: Watcher, second: Watcher) -> None:
        self.watchers = (first, second)


def _to_both(event: str) -> Callable[..., None]:
    def pass_on(both: _Both, *values: Any) -> None:
        for watcher in both.watchers:
            getattr(watcher, event)(*values)

    return pass_on


for _event in vars(Watcher):
    if not _event.startswith("_"):
        setattr(_Both, _event, _to_both(_event))


def _no_port(host: str, port: int, error: Exception) -> UsageError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        message, hint = f"port {port} is in use", "give another port, or 0 for a free one"
    else:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        message, hint = f"cannot listen on {host}, port {port}: {reason}", "give PORT, or ADDRESS:PORT of this machine"
    return UsageError(message, where=named("metrics_port"), hint=hint)


def _module(setting: str, extra: str, name: str) -> ModuleType:
    """Import what a setting needs. Raises: UsageError when its packages are not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "launcher":
            raise
        raise UsageError(
            f"the package for it is not installed here (no module {error.name})",
            where=named(setting),
            hint=f"pip install 'launch-zero[{extra}]'",
        ) from error
