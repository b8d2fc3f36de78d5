"""Read hostfiles: one `host slots=N` a line, see docs/hostfiles.md.

A host without `slots=` is an error: the number of its devices cannot be known before it is reached, and
guessing 1 would run a smaller job than the user meant without a word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import Diagnostic, HostfileError, did_you_mean
from launcher.base.fields import named
from launcher.cluster.cluster import MAX_EXPANSION, MAX_SLOTS, Cluster, Host
from launcher.cluster.nodeset import Address, parse_address, parse_port

MAX_HOSTFILE_BYTES = 16 * 1024 * 1024  # of a whole file, which is read into memory at once
_MAX_DIAGNOSTICS = 50  # a file that is not a hostfile at all must not print a line for each of its lines
_EXAMPLE = 'expected "host slots=N", for example "node-a slots=8"'
_KEYS = ("slots", "port")
# One word, or `key = value` with optional blanks around "=". A value stops at a blank, "=" or "#".
_TOKEN = re.compile(r"(?P<key>[^\s=]+)[ \t]*=[ \t]*(?P<value>[^\s=]*)|(?P<word>[^\s=]+|=)")


@dataclass(frozen=True)
class _Token:
    column: int  # from 1
    text: str  # the word, or the key when `value` is not None
    value: str | None = None
    value_column: int = 0


class _LineError(Exception):
    """A finding at one column of the line in hand; never leaves this file."""

    def __init__(self, column: int, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.column, self.message, self.hint = column, message, hint


def read_hostfile(path: str | Path) -> Cluster:
    """Read and parse the hostfile at `path`.

    Raises: HostfileError when it is missing, unreadable, not UTF-8 text, or has errors (all listed at once).
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_HOSTFILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise HostfileError(
            f"hostfile cannot be read: {reason}",
            where=str(path),
            hint=f"give an existing file, or leave {named('hostfile')} out to run on this machine only",
        ) from None
    if len(data) > MAX_HOSTFILE_BYTES:
        raise HostfileError(f"hostfile is larger than {MAX_HOSTFILE_BYTES} bytes", where=str(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise HostfileError("hostfile is not UTF-8 text", where=f"{path}:{line}", hint="save it as UTF-8") from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, source: str) -> Cluster:
    """Parse hostfile text; `source` names it in errors as `source:line:column`.

    Raises: HostfileError with every error of the text.
    """
    hosts: list[Host] = []
    lines_of: dict[str, int] = {}
    findings: list[Diagnostic] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if len(findings) >= _MAX_DIAGNOSTICS:
            findings.append(Diagnostic("more errors follow and are not shown", source))
            break
        try:
            for host in _parse_line(line):
                _check_new(host, lines_of, number)
                hosts.append(host)
                if len(hosts) > MAX_EXPANSION:
                    raise _LineError(1, f"the hostfile names more than {MAX_EXPANSION} hosts")
        except _LineError as error:
            findings.append(Diagnostic(error.message, f"{source}:{number}:{error.column}", error.hint))
    if findings:
        raise HostfileError.from_diagnostics(findings)
    if not hosts:
        raise HostfileError("hostfile names no host", where=source, hint=_EXAMPLE)
    return Cluster(tuple(hosts))


def _check_new(host: Host, lines_of: dict[str, int], number: int) -> None:
    """Refuse a second entry of a machine. Names differ in case only = same machine (DNS ignores case)."""
    key = host.name.lower()
    if key in lines_of:
        raise _LineError(
            1,
            f'host "{host.name}" is listed twice, on line {lines_of[key]} and on line {number}',
            "keep one line for each host and give it all slots",
        )
    lines_of[key] = number


def _parse_line(line: str) -> list[Host]:
    """Return the hosts of one line, none for blanks and comments."""
    tokens = _tokens(line.partition("#")[0])
    if not tokens:
        return []
    head, *rest = tokens
    if head.value is not None:
        raise _LineError(head.column, f'line starts with "{head.text}=" instead of a host', _EXAMPLE)
    address = _address(head)
    options = _options(rest)
    if "slots" not in options:
        hint = _EXAMPLE
        if address.port is not None:  # as MPI's files have it
            hint = f'write "{head.text.rpartition(":")[0]} slots={address.port}": behind ":" stands a port of SSH'
        raise _LineError(len(line.partition("#")[0].rstrip()) + 1, f'host "{head.text}" has no slots', hint)
    slots = tuple(range(_slot_count(options["slots"])))
    port = _port(options.get("port"), address)
    return [Host(name, slots, address.user, port) for name in address.names]


def has_slots(line: str) -> bool:
    """Return whether a line says how many slots its host has, or has no host."""
    tokens = _tokens(line.partition("#")[0])
    return not tokens or any(token.text == "slots" and token.value is not None for token in tokens)


def _tokens(line: str) -> list[_Token]:
    tokens = []
    for match in _TOKEN.finditer(line):
        if match["word"] is not None:
            tokens.append(_Token(match.start() + 1, match["word"]))
        else:
            tokens.append(_Token(match.start() + 1, match["key"], match["value"], match.start("value") + 1))
    return tokens


def _options(tokens: list[_Token]) -> dict[str, _Token]:
    """Return the `key=value` tokens by key; anything else on the line is an error."""
    options: dict[str, _Token] = {}
    for token in tokens:
        if token.value is None:
            raise _LineError(token.column, f'unexpected "{token.text}"', _EXAMPLE)
        if token.text not in _KEYS:
            hint = did_you_mean(token.text, _KEYS) or "known: slots=N, port=N"
            raise _LineError(token.column, f'unknown key "{token.text}"', hint)
        if token.text in options:
            raise _LineError(token.column, f'"{token.text}" is given twice on this line')
        options[token.text] = token
    return options


def _address(token: _Token) -> Address:
    try:
        return parse_address(token.text)
    except HostfileError as error:
        finding = error.diagnostics[0]
        raise _LineError(token.column, finding.message, finding.hint) from None


def _slot_count(token: _Token) -> int:
    text = token.value or ""
    if not (text.isascii() and text.isdigit()):
        raise _LineError(token.value_column, f'slots is "{text}", not a whole number', "expected for example slots=8")
    digits = text.lstrip("0")
    if not digits:
        raise _LineError(
            token.value_column, "slots=0 gives the host no rank", "remove the line or comment it out with #"
        )
    if len(digits) > 9 or int(digits) > MAX_SLOTS:
        raise _LineError(token.value_column, f"slots={text[:20]} is more than {MAX_SLOTS}")
    return int(digits)


def _port(token: _Token | None, address: Address) -> int | None:
    if token is None:
        return address.port
    if address.port is not None:
        raise _LineError(token.column, "the port is given twice", 'keep either "host:port" or "port=N"')
    try:
        return parse_port(token.value or "")
    except HostfileError as error:
        raise _LineError(token.value_column, error.diagnostics[0].message) from None
