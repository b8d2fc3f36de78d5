"""Names of hosts: `node[01-03,7]-ib` expanded to node01-ib, node02-ib, node03-ib and node7-ib, and many folded to that.

Zero padding is kept, several brackets multiply. Brackets that hold an IPv6 address are not ranges: `parse_address`
takes them off before `expand`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address

from launcher.base.errors import Diagnostic, HostfileError
from launcher.base.fields import MAX_PORT
from launcher.cluster.cluster import MAX_EXPANSION

_MAX_DIGITS = 9


def expand(text: str) -> tuple[str, ...]:
    """Return the names `text` stands for, in the order written; a plain name is returned alone.

    Raises: HostfileError when brackets or ranges are malformed, or there are more than MAX_EXPANSION names.
    """
    pieces = _split(text)
    total = 1
    for piece in pieces:
        total *= len(piece)
        if total > MAX_EXPANSION:
            raise HostfileError(_too_many(text), hint="split it, or check the range for a typo")
    return tuple("".join(combination) for combination in itertools.product(*pieces))


def _split(text: str) -> list[tuple[str, ...]]:
    """Cut `a[1-2]b` into (("a",), ("1", "2"), ("b",))."""
    pieces: list[tuple[str, ...]] = []
    rest = text
    while rest:
        literal, bracket, tail = rest.partition("[")
        if "]" in literal:
            raise HostfileError(f'"]" without "[" in "{text}"', hint='ranges are written "node[01-16]"')
        if literal:
            pieces.append((literal,))
        if not bracket:
            break
        body, closing, rest = tail.partition("]")
        if not closing:
            raise HostfileError(f'"[" without "]" in "{text}"', hint='ranges are written "node[01-16]"')
        pieces.append(expand_numbers(body, text))
    return pieces


def expand_numbers(body: str, whole: str) -> tuple[str, ...]:
    """Return the zero-padded numbers of `01-03,7`; `whole` is only named in errors.

    Raises: HostfileError for anything that is not a comma list of numbers and ascending ranges.
    """
    numbers: list[str] = []
    for part in body.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (_is_number(first) and _is_number(last)):
            raise HostfileError(
                f'"{part}" is not a number or a range of numbers in "{whole}"',
                hint='expected for example "0-3" or "01,02,07"',
            )
        low, high = int(first), int(last)
        if high < low:
            raise HostfileError(f'range "{part}" in "{whole}" runs backwards', hint=f'write "{last}-{first}"')
        if len(last) != len(first) and ((first.startswith("0") and first != "0") or last.startswith("0")):
            raise HostfileError(
                f'range "{part}" in "{whole}" mixes paddings', hint="give both ends the same number of digits"
            )
        if len(numbers) + high - low + 1 > MAX_EXPANSION:
            raise HostfileError(_too_many(whole), hint="split it, or check the range for a typo")
        numbers.extend(str(number).zfill(len(first)) for number in range(low, high + 1))
    return tuple(numbers)


def _is_number(text: str) -> bool:
    return 0 < len(text) <= _MAX_DIGITS and text.isascii() and text.isdigit()


def _too_many(text: str) -> str:
    return f'"{text}" names more than {MAX_EXPANSION} entries'


# ---- The reverse: many names as one expression ----


_DIGITS = re.compile(r"(\d+)")


def fold(names: Sequence[str]) -> str:
    """Return `node[01-03],gpu-a` for node01, node02, node03 and gpu-a; groups stand in the order they appear.

    One number of a name is folded, the one that gives the fewest groups; a name's padding is kept.
    """
    pieces = {name: [name] if ":" in name else _DIGITS.split(name) for name in names}
    # Digits stand at odd positions, counted here from the end: -2 is the last number of a name.
    deepest = max((len(parts) for parts in pieces.values()), default=0)
    groupings = [_group(pieces, -position) for position in range(2, max(deepest, 2) + 1, 2)]
    best = min(groupings, key=len)
    return ",".join(_write(key, numbers) for key, numbers in best.items())


def fold_findings(findings: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Return `findings` with those that say the same of several hosts made one; they stand where the first of them did.

    `where` of each must be the name of a host.
    """
    alike: dict[tuple[str, str | None], list[Diagnostic]] = {}
    for finding in findings:
        alike.setdefault(finding.shared or (finding.message, finding.hint), []).append(finding)
    return [
        members[0]
        if len(members) == 1
        else Diagnostic(message, fold([member.where for member in members if member.where]) or None, hint)
        for (message, hint), members in alike.items()
    ]


def _group(pieces: dict[str, list[str]], position: int) -> dict[tuple[str, str, bool], list[str]]:
    """Return (what stands before, what stands behind, is there a number) -> the numbers, in the order of the names."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for name, parts in pieces.items():
        if len(parts) < -position:
            groups[name, "", False] = []
            continue
        key = "".join(parts[:position]), "".join(parts[position:][1:]), True
        groups.setdefault(key, []).append(parts[position])
    return groups


def _write(key: tuple[str, str, bool], numbers: list[str]) -> str:
    if not numbers:
        return key[0]
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda text: (int(text), len(text))):
        if runs and _follows(runs[-1][-1], number):
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    body = texts[0] if len(numbers) == 1 else f"[{','.join(texts)}]"
    return key[0] + body + key[1]


def _follows(first: str, second: str) -> bool:
    is_padded = first.startswith("0") or second.startswith("0")
    return int(second) == int(first) + 1 and (len(first) == len(second) or (not is_padded or first == "0"))


# ---- Addresses of hosts ----


_MAX_NAME_LENGTH = 255
# A leading "-" would read as an option wherever a name reaches another program's command line.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*\$?")


@dataclass(frozen=True)
class Address:
    """Host names written as one word, with the user and port that hold for each of them."""

    names: tuple[str, ...]
    user: str | None = None
    port: int | None = None


def parse_address(text: str) -> Address:
    """Read one address word. Raises: HostfileError naming the part that is wrong."""
    user, at, rest = text.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise HostfileError(f'user name "{user}" is not valid', hint='expected "user@host"')
    names, port_text = _split_port(rest)
    port = None if port_text is None else parse_port(port_text)
    return Address(names, user if at else None, port)


def parse_port(text: str) -> int:
    """Read a TCP port. Raises: HostfileError unless it is 1..65535."""
    if not (0 < len(text) <= 5 and text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_PORT):
        raise HostfileError(f'port "{text}" is not a number from 1 to {MAX_PORT}')
    return int(text)


def is_ipv6(text: str) -> bool:
    """Return whether `text` is a bare IPv6 address, an interface suffix (`%eth0`) allowed."""
    try:
        IPv6Address(text)
    except AddressValueError:
        return False
    return True


def is_host(text: str) -> bool:
    """Return whether `text` is one name or address, without user and port."""
    return is_ipv6(text) or bool(len(text) <= _MAX_NAME_LENGTH and _NAME.fullmatch(text))


def _split_port(text: str) -> tuple[tuple[str, ...], str | None]:
    """Return the names and the port text of `text`, which has no user part any more."""
    if is_ipv6(text):
        return (text,), None
    if text.startswith("["):
        inner, closing, tail = text[1:].partition("]")
        if closing and is_ipv6(inner):
            if tail and not tail.startswith(":"):
                raise HostfileError(f'unexpected "{tail}" after "[{inner}]"', hint='expected "[address]:port"')
            return (inner,), tail[1:] if tail else None
    if text.count(":") > 1:
        raise HostfileError(f'"{text}" is not an IPv6 address', hint='with a port write "[address]:port"')
    body, colon, port_text = text.partition(":")
    names = expand(body)
    for name in names:
        if len(name) > _MAX_NAME_LENGTH or not _NAME.fullmatch(name):
            raise HostfileError(
                f'"{name[:80]}" is not a host name', hint='letters, digits, ".", "-" and "_" are allowed'
            )
    return names, port_text if colon else None


def split_endpoint(text: str) -> tuple[str, str | None]:
    """Return host and port of `HOST[:PORT]` as texts, unchecked; port None where there is none, as of a bare `::1`."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or is_ipv6(text):
        return text.removeprefix("[").removesuffix("]"), None
    return host.removeprefix("[").removesuffix("]"), port


def is_loopback(address: str) -> bool:
    """Return whether `address` means to every machine that machine itself."""
    import ipaddress

    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() in ("localhost", "localhost.localdomain")
