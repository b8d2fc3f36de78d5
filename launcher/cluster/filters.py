"""Choose hosts and slots of a cluster: include, exclude, `num_nodes`, `num_gpus`.

Grammar: `NODE[:SLOTS][@NODE[:SLOTS]...]`. NODE is a host name as the hostfile has it, without user and port,
or a range `node[01-04]`; IPv6 addresses stand in brackets when slots follow: `[::1]:0,1`. SLOTS is a comma
list of slot numbers and ranges: `0,2` or `0-3`. A NODE without SLOTS means all its slots. A NODE named twice
means the union. `user@host` also works: a part followed by a known host is read as a user only when it is no
host of the cluster itself and the user is the one the hostfile gives that host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from launcher.base.errors import Diagnostic, HostfileError, UsageError, did_you_mean
from launcher.base.fields import named
from launcher.base.units import counted
from launcher.cluster.cluster import Cluster, Host
from launcher.cluster.nodeset import expand, expand_numbers, fold, is_ipv6

_FORM = 'expected "host", "host:0,2" or several of them joined by "@"'
_MORE_HOSTS = {"hostfile": "add hosts to the hostfile", "Slurm": "ask Slurm for more nodes"}
_MORE_SLOTS = {
    "hostfile": "raise slots= in the hostfile if there are more devices",
    "Slurm": "ask Slurm for more with --gpus-per-node",
}
_MAX_LISTED = 8  # host names or slots listed in a message
_MAX_DIAGNOSTICS = 50  # a mistyped range must not print a line for each of its hosts
_BRACKETED = re.compile(r"\[(?P<address>[^\]]*)\](?::(?P<slots>.*))?", re.DOTALL)


@dataclass(frozen=True)
class _Term:
    names: tuple[str, ...]
    slots: tuple[int, ...] | None  # None = all slots of the host


def select(
    cluster: Cluster,
    *,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
    source: str = "hostfile",
) -> Cluster:
    """Return the part of `cluster` that the options choose, in cluster order, hosts without slots dropped.

    source: where the hosts come from, for hints: "hostfile" or "Slurm".
    Raises: UsageError when options contradict each other or ask for more than there is; HostfileError
    when a filter is malformed, names an unknown host or slot, or leaves nothing.
    """
    include, exclude = include.strip(), exclude.strip()
    if include and exclude:
        raise UsageError(f"{named('include')} and {named('exclude')} cannot be used together", hint="keep one of them")
    if (include or exclude) and (num_nodes is not None or num_gpus is not None):
        option = named("include" if include else "exclude")
        other = named("num_nodes" if num_nodes is not None else "num_gpus")
        raise UsageError(f"{other} cannot be used together with {option}", hint="keep one of them")
    if include:
        return _keep(cluster, chosen_slots(cluster, include, named("include")))
    if exclude:
        return _drop(cluster, chosen_slots(cluster, exclude, named("exclude")))
    return _first(cluster, num_nodes, num_gpus, source)


def _first(cluster: Cluster, num_nodes: int | None, num_gpus: int | None, source: str) -> Cluster:
    """Return the first `num_nodes` hosts with their first `num_gpus` slots."""
    hosts = cluster.hosts
    if num_nodes is not None:
        if num_nodes < 1:
            raise UsageError(f"{named('num_nodes')} is {num_nodes}", hint="give 1 or more")
        if num_nodes > len(hosts):
            raise UsageError(
                f"{named('num_nodes')} is {num_nodes}, but there are only {len(hosts)} hosts: {_listed(cluster)}",
                hint=f"{_MORE_HOSTS[source]}, or lower {named('num_nodes')}",
            )
        hosts = hosts[:num_nodes]
    if num_gpus is not None:
        if num_gpus < 1:
            raise UsageError(f"{named('num_gpus')} is {num_gpus}", hint="give 1 or more")
        short: dict[int, list[str]] = {}
        for host in hosts:
            if len(host.slots) < num_gpus:
                short.setdefault(len(host.slots), []).append(host.name)
        if short:
            raise UsageError.from_diagnostics([_short(num_gpus, *members, source) for members in short.items()])
        hosts = tuple(replace(host, slots=host.slots[:num_gpus]) for host in hosts)
    return Cluster(hosts)


def _short(num_gpus: int, num_slots: int, names: list[str], source: str) -> Diagnostic:
    """Return the finding that hosts have fewer slots than are asked for."""
    subject = "the host has" if len(names) == 1 else "each of these hosts has"
    option = named("num_gpus")
    hint = f"{_MORE_SLOTS[source]}, or lower {option}"
    if names == ["localhost"]:
        hint = f"lower {option}, or let this process use more devices with CUDA_VISIBLE_DEVICES"
    return Diagnostic(f"{option} is {num_gpus}, but {subject} only {counted(num_slots, 'slot')}", fold(names), hint)


def _keep(cluster: Cluster, chosen: dict[str, set[int]]) -> Cluster:
    return Cluster(
        tuple(replace(host, slots=tuple(sorted(chosen[host.name]))) for host in cluster.hosts if chosen.get(host.name))
    )


def _drop(cluster: Cluster, dropped: dict[str, set[int]]) -> Cluster:
    hosts = []
    for host in cluster.hosts:
        left = tuple(slot for slot in host.slots if slot not in dropped.get(host.name, ()))
        if left:
            hosts.append(replace(host, slots=left))
    if not hosts:
        raise HostfileError(
            f"{named('exclude')} leaves no slot on any host",
            where=named("exclude"),
            hint="exclude fewer hosts or slots",
        )
    return Cluster(tuple(hosts))


def chosen_slots(cluster: Cluster, text: str, option: str) -> dict[str, set[int]]:
    """Return the slots that `text` names by host name. `option` says where, in errors.

    Raises: HostfileError with every finding.
    """
    by_name = {host.name.lower(): host for host in cluster.hosts}
    chosen: dict[str, set[int]] = {}
    findings: list[Diagnostic] = []
    for part in _parts(text, by_name):
        if len(findings) >= _MAX_DIAGNOSTICS:
            break
        try:
            term = _term(part)
        except HostfileError as error:
            finding = error.diagnostics[0]
            findings.append(Diagnostic(finding.message, option, finding.hint))
            continue
        for name in term.names:
            host = by_name.get(name.lower())
            if host is None:
                findings.append(_unknown(cluster, name, option))
                if len(findings) >= _MAX_DIAGNOSTICS:
                    break
                continue
            slots = host.slots if term.slots is None else term.slots
            findings.extend(_missing_slots(host, slots, option))
            chosen.setdefault(host.name, set()).update(slots)
    if findings:
        raise HostfileError.from_diagnostics(findings)
    return chosen


def _parts(text: str, by_name: dict[str, Host]) -> list[str]:
    """Cut at "@", and fold `user@host` into `host` where the cluster says that user belongs to that host."""
    parts: list[str] = []
    pieces = text.split("@")
    for index, piece in enumerate(pieces):
        following = pieces[index + 1] if index + 1 < len(pieces) else ""
        if piece.strip().lower() not in by_name and _is_user_of(piece, following, by_name):
            continue
        parts.append(piece.strip())
    return parts


def _is_user_of(piece: str, following: str, by_name: dict[str, Host]) -> bool:
    try:
        names = _term(following.strip()).names
    except HostfileError:
        return False
    hosts = [by_name.get(name.lower()) for name in names]
    return bool(hosts) and all(host is not None and host.user == piece.strip() for host in hosts)


def _term(part: str) -> _Term:
    if not part:
        raise HostfileError("an empty host name", hint=_FORM)
    bracketed = _BRACKETED.fullmatch(part)
    if bracketed and is_ipv6(bracketed["address"]):
        names, slots_text = (bracketed["address"],), bracketed["slots"]
        return _Term(names, None if slots_text is None else _slots(slots_text, part))
    if is_ipv6(part):
        return _Term((part,), None)
    if part.count(":") > 1:
        raise HostfileError(f'"{part}" has more than one ":"', hint='write IPv6 addresses as "[::1]:0,1"')
    name, colon, slots_text = part.partition(":")
    if not name:
        raise HostfileError(f'"{part}" has no host name', hint=_FORM)
    return _Term(expand(name), _slots(slots_text, part) if colon else None)


def _slots(text: str, part: str) -> tuple[int, ...]:
    if not text.strip():
        raise HostfileError(f'"{part}" has ":" without slots', hint='leave ":" away to take all slots')
    compact = ",".join(piece.strip() for piece in text.split(","))
    return tuple(sorted({int(number) for number in expand_numbers(compact, part)}))


def _missing_slots(host: Host, slots: tuple[int, ...], option: str) -> list[Diagnostic]:
    missing = [slot for slot in slots if slot not in host.slots]
    if not missing:
        return []
    listed = ", ".join(map(str, missing[:_MAX_LISTED])) + (", ..." if len(missing) > _MAX_LISTED else "")
    has = f"slots {host.slots[0]}-{host.slots[-1]}" if len(host.slots) > 1 else f"slot {host.slots[0]} only"
    word = "slot" if len(missing) == 1 else "slots"
    return [Diagnostic(f'host "{host.name}" has no {word} {listed}', option, f"it has {has}")]


def _unknown(cluster: Cluster, name: str, option: str) -> Diagnostic:
    hint = did_you_mean(name, [host.name for host in cluster.hosts]) or f"known: {_listed(cluster)}"
    return Diagnostic(f'host "{name[:80]}" is not in the cluster', option, hint)


def _listed(cluster: Cluster) -> str:
    names = [host.name for host in cluster.hosts[:_MAX_LISTED]]
    return ", ".join(names) + (", ..." if len(cluster.hosts) > _MAX_LISTED else "")
