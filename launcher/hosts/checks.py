"""What the facts about a host mean: what keeps a job from running, what is only worth knowing, and one remedy each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.agent.ports import UNRESOLVED
from launcher.base.units import counted, format_bytes, format_duration
from launcher.cluster.cluster import Host
from launcher.cluster.fold import fold
from launcher.hosts.session import HostResult

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
            " for node 0 with --master-addr",
        )
    message = f"no other host can connect to {address} port {port}: {reason}"
    return Finding(message, f"open the TCP ports between the hosts in its firewall; is {address} its address?")
