"""Check a server's key against known_hosts files (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT).

Our own reader rather than paramiko's, because a changed key must be reported with its file and line, and
`@revoked` must refuse. Only `record_new_key` writes, and only when a user asked for it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import fnmatch
import functools
import hashlib
import heapq
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

DEFAULT_PORT = 22
_PATTERN_CHARACTERS = frozenset("*?!")  # what makes a name a pattern


class Verdict(Enum):
    """What the files say about a key."""

    KNOWN = "the host has this key"
    UNKNOWN = "no file has a key of the host"
    CHANGED = "the files have other keys of the host, but not this one"
    REVOKED = "a file marks this key as revoked for the host"


@dataclass(frozen=True)
class KnownKey:
    """One line of a file that applies to the host looked up."""

    file: Path
    line: int  # from 1
    key_type: str  # "ssh-ed25519", ...
    blob: bytes
    revoked: bool
    is_authority: bool = False  # a @cert-authority line: it vouches for certificates, not for this key itself


@dataclass(frozen=True)
class HostKeyFinding:
    """A verdict and the line it stands on; for UNKNOWN the line of an authority of the host, None without one."""

    verdict: Verdict
    key: KnownKey | None = None


def lookup_name(host: str, port: int) -> str:
    """Return the name that known_hosts files use: `host`, or `[host]:port` for another port than 22."""
    return host if port == DEFAULT_PORT else f"[{host}]:{port}"


def find_keys(name: str, files: Sequence[Path]) -> list[KnownKey]:
    """Return the keys that `files` hold for `name` (see `lookup_name`); unreadable files count as empty."""
    keys: list[KnownKey] = []
    for file in files:
        try:
            found = os.stat(file)
            lines = _read(file, (found.st_mtime_ns, found.st_size, found.st_ino))
        except OSError:
            continue
        plain = lines.plain.get(name.lower(), [])
        numbers = heapq.merge(plain, lines.others) if plain else lines.others
        keys.extend(key for n in numbers if (key := _parse(lines.texts[n], name, file, n + 1)) is not None)
    return keys


def check_key(keys: Sequence[KnownKey], blob: bytes) -> HostKeyFinding:
    """Judge a server's public key `blob` by the `keys` known of that server. A revocation always wins."""
    for key in keys:
        if key.revoked and key.blob == blob:
            return HostKeyFinding(Verdict.REVOKED, key)
    usable = [key for key in keys if not (key.revoked or key.is_authority)]
    for key in usable:
        if key.blob == blob:
            return HostKeyFinding(Verdict.KNOWN, key)
    if usable:
        return HostKeyFinding(Verdict.CHANGED, usable[0])
    return HostKeyFinding(Verdict.UNKNOWN, next((key for key in keys if key.is_authority), None))


def record_new_key(files: Sequence[Path], name: str, key_type: str, blob: bytes) -> HostKeyFinding:
    """Append the key of a host that `files` do not know to the first of them, made if need be.

    Safe from several threads and several launchers: the files are read again under a lock, and a host that they know by
    then is only judged. Returns the finding about the key. Raises: OSError.
    """
    own = files[0]
    own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(own, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: one write() appends whole all the same
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        finding = check_key(find_keys(name, files), blob)
        if finding.verdict is not Verdict.UNKNOWN:
            return finding
        size_bytes = os.fstat(descriptor).st_size
        is_cut = size_bytes > 0 and os.pread(descriptor, 1, size_bytes - 1) != b"\n"
        line = f"{name} {key_type} {base64.b64encode(blob).decode()}\n".encode()
        os.write(descriptor, b"\n" + line if is_cut else line)
    finally:
        os.close(descriptor)
    return HostKeyFinding(Verdict.KNOWN)


@dataclass(frozen=True)
class _Lines:
    """A file, read once for all hosts: with a line for each of 1,000 hosts, reading all for each is a million."""

    texts: list[str]
    plain: dict[str, list[int]]  # lower-case name -> lines that list it without wildcards
    others: list[int]  # lines with patterns or hashed names, which may apply to any host


@functools.lru_cache(maxsize=32)
def _read(file: Path, _state: tuple[int, int, int]) -> _Lines:
    """Return the lines of `file` in the state that stat() shows. Raises: OSError."""
    lines = _Lines([raw.decode("utf-8", "replace") for raw in file.read_bytes().splitlines()], {}, [])
    for number, text in enumerate(lines.texts):
        fields = text.split(maxsplit=2)
        names = fields[1] if len(fields) > 1 and fields[0].startswith("@") else fields[0] if fields else ""
        if names.startswith("|") or not _PATTERN_CHARACTERS.isdisjoint(names):
            lines.others.append(number)
            continue
        for name in {name.lower() for name in names.split(",")}:
            lines.plain.setdefault(name, []).append(number)
    return lines


def _parse(line: str, name: str, file: Path, number: int) -> KnownKey | None:
    fields = line.split()
    marker = fields.pop(0) if fields and fields[0].startswith("@") else None
    if len(fields) < 3 or fields[0].startswith("#") or marker not in (None, "@revoked", "@cert-authority"):
        return None
    if not _matches(fields[0], name):
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    return KnownKey(file, number, fields[1], blob, marker == "@revoked", marker == "@cert-authority")


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        return _hash_matches(patterns, name)
    matched = False
    for pattern in patterns.lower().split(","):
        negated = pattern.startswith("!")
        if _wildcard_matches(pattern.lstrip("!"), name.lower()):
            if negated:
                return False
            matched = True
    return matched


def _wildcard_matches(pattern: str, name: str) -> bool:
    # "[" starts a character set for fnmatch but stands for itself in known_hosts.
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def _hash_matches(field: str, name: str) -> bool:
    """Compare with a hashed entry `|1|salt|HMAC-SHA1(salt, name)`."""
    parts = field.split("|")
    if len(parts) != 4:
        return False
    try:
        salt, digest = base64.b64decode(parts[2]), base64.b64decode(parts[3])
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.new(salt, name.lower().encode(), hashlib.sha1).digest(), digest)
