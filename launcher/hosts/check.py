"""Ask every host of a cluster whether a job could run there: what each has, then whether they reach each other."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.base.errors import LauncherError
from launcher.base.timeouts import timeouts
from launcher.cluster.cluster import Cluster, Host
from launcher.hosts.checks import Finding, blame, judge, judge_error
from launcher.hosts.fanout import Fanout
from launcher.hosts.session import HostResult, Task
from launcher.job.plan import new_job_id
from launcher.job.reach import Reach
from launcher.transport.command import last_json

MAX_PARTNERS = 16  # that each host connects to; in a cluster of up to so many others these are all of them
_ANYWHERE = "/"  # a folder that every host has


@dataclass
class HostCheck:
    """What is known about one host."""

    host: Host
    is_reachable: bool = False
    transport: str = ""  # name of what reaches it: "local" for this machine
    connect_s: float | None = None
    skew_s: float | None = None  # its clock minus ours; on a busy machine too small
    certain_skew_s: float = 0.0  # what of it no delay explains
    facts: dict[str, Any] | None = None  # see agent.probe
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """True when nothing keeps a job from running there."""
        return not any(finding.is_error for finding in self.findings)


@dataclass
class CheckReport:
    """The end of a check."""

    hosts: list[HostCheck]
    num_pairs: int = 0  # ordered pairs of hosts that were tried
    num_connected: int = 0
    notes: list[str] = field(default_factory=list)
    interrupted_by: int | None = None  # number of a signal


class Checker:
    """One check of a cluster. Use once, from the main thread."""

    def __init__(
        self,
        cluster: Cluster,
        reach: Reach,
        on_waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        """on_waiting: called at most once in each round, with what is waited for."""
        self._reach = reach
        self._on_waiting = on_waiting
        self._report = CheckReport([HostCheck(host) for host in cluster.hosts])
        self._token = secrets.token_hex(16)

    def run(self, folder: str) -> CheckReport:
        """Check every host for a job that is started in `folder`."""
        results = self._ask(folder)
        with_facts = [check for check in self._report.hosts if check.facts is not None]
        if self._report.interrupted_by is None and len(with_facts) > 1:
            ports = {id(c): r.port for c, r in zip(self._report.hosts, results, strict=True)}
            self._connect_all(with_facts, [ports[id(check)] or 0 for check in with_facts])
        return self._report

    # ---- what each host has ----

    def _ask(self, folder: str) -> list[HostResult]:
        name = f".launch-check-{self._token[:8]}"
        wrote = self._write_token(Path(folder, name))
        try:
            command = ("internal", "launcher.agent.probe", folder, name)
            results = self._run([Task(check.host, command, _ANYWHERE) for check in self._report.hosts])
        finally:
            if wrote:
                with contextlib.suppress(OSError):
                    os.unlink(Path(folder, name))
        for check, result in zip(self._report.hosts, results, strict=True):
            self._take_facts(check, result)
        reference = next((check for check in self._report.hosts if check.facts is not None), None)
        for check in self._report.hosts:
            if check.facts is not None and reference is not None and reference.facts is not None:
                shared = check.facts["token"] == self._token if wrote else None
                about = (check.host, check.facts, check.certain_skew_s)
                check.findings += judge(about, (reference.host.name, reference.facts), folder, shared)
        return results

    def _write_token(self, path: Path) -> bool:
        try:
            path.write_text(self._token)
        except OSError as error:
            self._report.notes.append(f"{path.parent}: {error.strerror}; whether all hosts share it was not checked")
            return False
        return True

    def _take_facts(self, check: HostCheck, result: HostResult) -> None:
        check.connect_s = result.connect_s
        check.is_reachable = result.started_s is not None
        check.transport = result.transport
        facts = last_json(result.printed)
        if facts is None:
            check.findings.append(judge_error(result))
            return
        check.facts = facts
        if result.started_s is not None and result.answered_s is not None:
            check.skew_s = facts["time_s"] - (result.answered_s - (result.round_trip_s or 0.0) / 2)
            # The clock was read between the two moments: only what lies outside of both is certain.
            earliest, latest = facts["time_s"] - result.answered_s, facts["time_s"] - result.started_s
            check.certain_skew_s = max(0.0, earliest) + min(0.0, latest)

    # ---- whether all reach each other ----

    def _connect_all(self, checks: Sequence[HostCheck], ports: Sequence[int]) -> None:
        addresses = [self._address(check, len(checks) > 1) for check in checks]
        peers = list(zip(addresses, ports, strict=True))
        partners = choose_partners(len(checks))
        if len(partners[0]) < len(checks) - 1:
            self._report.notes.append(f"each host was connected to {len(partners[0])} others only, chosen at random")
        specs = [
            json.dumps(
                {
                    "index": index,
                    "token": self._token,
                    "port": peers[index][1],
                    "peers": {other: peers[other] for other in others},
                    "timeout_s": timeouts().peer_connect_s,
                }
            )
            for index, others in enumerate(partners)
        ]
        tasks = [
            Task(check.host, ("internal", "launcher.agent.ports", spec), _ANYWHERE)
            for check, spec in zip(checks, specs, strict=True)
        ]
        results = self._run(tasks, lambda result: last_json(result.printed) is not None)
        failed: dict[tuple[int, int], str] = {}
        for source, (check, result) in enumerate(zip(checks, results, strict=True)):
            answer = last_json(result.printed)
            if answer is None:
                check.findings.append(judge_error(result))
                continue
            self._report.num_pairs += len(partners[source])
            self._report.num_connected += len(partners[source]) - len(answer["failed"])
            failed.update({(source, int(peer)): reason for peer, reason in answer["failed"].items()})
        names = [check.host.name for check in checks]
        for index, finding in blame(failed, names, peers, partners):
            checks[index].findings.append(finding)

    def _address(self, check: HostCheck, has_others: bool) -> str:
        if check.transport != "local":
            with contextlib.suppress(LauncherError):
                return self._reach.address_of(check.host)
            return check.host.name
        if check.host.name == "localhost" and has_others:
            check.findings.append(
                Finding("other hosts cannot reach this machine as localhost", "write its own name into the hostfile")
            )
            return socket.gethostname()
        return check.host.name

    def _run(
        self, tasks: Sequence[Task], is_enough: Callable[[HostResult], bool] = lambda _: False
    ) -> list[HostResult]:
        self._reach.prepare([task.host for task in tasks])
        run = Fanout(tasks, self._reach.for_host, new_job_id(), self._on_waiting)
        results = run.run(timeouts().check_round_s, is_enough)
        self._report.interrupted_by = self._report.interrupted_by or run.interrupted_by
        return results


def choose_partners(num_hosts: int) -> list[list[int]]:
    """Return which others each host connects to, by index: at most `MAX_PARTNERS`, and as many connect to each host.

    The next host is always one of them, so that all hosts hang together.
    """
    distances = list(range(1, num_hosts))
    if len(distances) > MAX_PARTNERS:
        distances = [1, *random.sample(distances[1:], MAX_PARTNERS - 1)]
    return [[(index + distance) % num_hosts for distance in distances] for index in range(num_hosts)]
