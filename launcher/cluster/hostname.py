"""Read one host address: `host`, `user@host`, `host:22`, `::1`, `[::1]:22`, `user@node[01-16]:2222`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address

from launcher.base.errors import HostfileError
from launcher.cluster.nodeset import expand

MAX_PORT = 65_535
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
    """Tell whether `text` is a bare IPv6 address, an interface suffix (`%eth0`) allowed."""
    try:
        IPv6Address(text)
    except AddressValueError:
        return False
    return True


def is_host(text: str) -> bool:
    """Tell whether `text` is one name or address, without user and port."""
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
    """Tell whether `address` means to every machine that machine itself."""
    import ipaddress

    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() in ("localhost", "localhost.localdomain")
