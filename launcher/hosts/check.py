"""Ask every host of a cluster whether a job could run there: what each has, then whether they reach each other."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.agent.ports import UNRESOLVED
from launcher.base.errors import LauncherError
from launcher.base.fields import named
from launcher.base.timeouts import timeouts
from launcher.base.units import counted, format_bytes, format_duration
from launcher.cluster.cluster import Cluster, Host
from launcher.cluster.nodeset import fold
from launcher.fleet.transports import Transports
from launcher.hosts.fanout import Fanout
from launcher.hosts.session import HostResult, Task
from launcher.plan.plan import new_job_id
from launcher.transport.command import last_json

# ---- What the facts about a host mean ----


MAX_SKEW_S = 1.0
MIN_FREE_BYTES = 1 << 30  # of memory, and of disk


@dataclass(frozen=True)
class Finding:
    """One thing about a host."""

    message: str
    remedy: str
    is_error: bool = True  # False: a job can run all the same
    shared: tuple[str, str] | None = None  # message and remedy for several hosts at once, where they name this one

    @property
    def for_many(self) -> tuple[str, str]:
        """Message and remedy that several hosts may have in common."""
        return self.shared or (self.message, self.remedy)


def judge_error(result: HostResult) -> Finding:
    """Return the finding about a host that gave no answer."""
    if result.error is not None:
        lines = result.error.message.splitlines()
        first = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
        plain = "see what a plain command does: launch exec -- true"
        shared = result.error.shared
        return Finding(first, result.error.hint or plain, shared=shared and (shared[0], shared[1] or plain))
    last = "".join(bytes(result.stderr).decode(errors="replace").strip().splitlines()[-1:])
    remedy = "see what a plain command does: launch exec -- true"
    if "No module named" in last:
        remedy = "install the same launch-zero there, or use the same checkout path on every host"
    return Finding(f"the check ended with exit code {result.exit_code}: {last or 'no message'}", remedy)


def judge(
    about: tuple[Host, Mapping[str, Any], float],
    reference: tuple[str, Mapping[str, Any]],
    folder: str,
    is_shared: bool | None,
) -> list[Finding]:
    """Return the findings about one host, errors first.

    about: host, its facts (agent.probe) and its clock minus ours, in seconds. reference: name and facts of the host
    that others are compared with. is_shared: whether `folder` shows what this machine wrote there; None: not known.
    """
    host, facts, skew_s = about
    findings = [
        *_versions(host.name, facts, reference),
        *_devices(host, facts, reference),
        *_folder(host.name, facts, folder, is_shared),
        *_room(facts, folder),
    ]
    if abs(skew_s) > MAX_SKEW_S:
        side = "ahead" if skew_s > 0 else "behind"
        message = f"its clock is {format_duration(abs(skew_s))} {side}"
        findings.append(Finding(message, f"on {host.name}: set the clock, and let chrony or ntpd keep it", False))
    return sorted(findings, key=lambda finding: not finding.is_error)


def _versions(name: str, facts: Mapping[str, Any], reference: tuple[str, Mapping[str, Any]]) -> Iterator[Finding]:
    first, expected = reference
    torch, wanted = facts["packages"]["torch"], expected["packages"]["torch"]
    if torch is None:
        yield Finding("torch is not installed", f"on {name}: {facts['python_path']} -m pip install torch")
    elif wanted is not None and torch != wanted:
        is_same_release = torch.partition("+")[0] == wanted.partition("+")[0]
        install = f"pip install torch=={wanted.partition('+')[0]}"
        remedy = "install the same build on both" if is_same_release else f"on {name}: {install}"
        yield Finding(f"torch {torch} differs from {first}'s {wanted}", remedy)
    if facts["launch"] != expected["launch"]:
        wanted = expected["launch"]
        yield Finding(
            f"launch {facts['launch']} differs from {first}'s {wanted}", f"install launch-zero {wanted} there"
        )
    if facts["python"].split(".")[:2] != expected["python"].split(".")[:2]:
        message = f"python {facts['python']} differs from {first}'s {expected['python']}"
        yield Finding(message, "objects that ranks send each other may not be readable: use one version", False)


def _devices(host: Host, facts: Mapping[str, Any], reference: tuple[str, Mapping[str, Any]]) -> Iterator[Finding]:
    count, needed = facts["devices"], max(host.slots) + 1
    if count == 0 and reference[1]["devices"] > 0:
        yield Finding(f"no GPU is visible, {reference[0]} has {reference[1]['devices']}", "see: nvidia-smi, there")
    elif 0 < count < needed:
        message = f"{counted(count, 'device')} for slots up to {needed - 1}"
        yield Finding(message, f"write slots={count} into the hostfile")


def _folder(name: str, facts: Mapping[str, Any], folder: str, is_shared: bool | None) -> Iterator[Finding]:
    if not facts["is_folder"]:
        yield Finding(f"{folder} does not exist", f"create it on {name}, or start from a folder that all hosts share")
    elif is_shared is False:
        message = f"{folder} is another folder than here"
        yield Finding(message, f"put it on a shared disk, or copy scripts, configs and data to {name}", False)


def _room(facts: Mapping[str, Any], folder: str) -> Iterator[Finding]:
    memory, disk = facts["memory_available"], facts["disk_free"]
    if memory is not None and memory < MIN_FREE_BYTES:
        yield Finding(f"{format_bytes(memory)} of memory free", "see what holds it there: ps aux --sort=-rss", False)
    if disk is not None and disk < MIN_FREE_BYTES:
        yield Finding(f"{format_bytes(disk)} of disk free", f"make room on the disk of {folder}", False)


def blame(
    failed: Mapping[tuple[int, int], str],
    names: Sequence[str],
    peers: Sequence[tuple[str, int]],
    partners: Sequence[Sequence[int]],
) -> Iterator[tuple[int, Finding]]:
    """Yield (index, finding) for the hosts that explain why connections failed.

    failed: (from, to) -> reason. names and peers (address and port): of every host. partners: to whom each host tried
    to connect. A host that none of them reaches is at fault itself; what is left is said of the hosts that could not
    connect.
    """
    tried = {(source, to) for source, targets in enumerate(partners) for to in targets}
    unreached = {to for _, to in failed} - {to for source, to in tried if (source, to) not in failed}
    for to in sorted(unreached):
        reason = next(reason for (_, target), reason in failed.items() if target == to)
        yield to, _unreached(*peers[to], reason)
    for source in range(len(names)):
        targets = [to for origin, to in failed if origin == source and to not in unreached]
        if targets:
            reason = failed[source, targets[0]]
            message = f"it cannot connect to {fold([names[to] for to in targets])}: {reason}"
            remedy = "open the TCP ports between these hosts; do they share a network?"
            if reason == UNRESOLVED:
                remedy = "its DNS or /etc/hosts must know all hosts: compare with a host that reaches them"
            yield source, Finding(message, remedy)


def _unreached(address: str, port: int, reason: str) -> Finding:
    if reason == UNRESOLVED:
        return Finding(
            f'no other host can resolve the name "{address}"',
            "put it into DNS or every host's /etc/hosts, or name an address that all hosts reach: in the hostfile, or"
            f" for node 0 with {named('master_addr')}",
        )
    message = f"no other host can connect to {address} port {port}: {reason}"
    return Finding(message, f"open the TCP ports between the hosts in its firewall; is {address} its address?")


# ---- The check of a cluster ----


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
        transports: Transports,
        on_waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        """on_waiting: called at most once in each round, with what is waited for."""
        self._transports = transports
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
                return self._transports.address_of(check.host)
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
        self._transports.prepare([task.host for task in tasks])
        run = Fanout(tasks, self._transports.for_host, new_job_id(), self._on_waiting)
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
