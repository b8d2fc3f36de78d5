"""Say for which hosts paramiko will not do: what the SSH configuration asks for there that only OpenSSH can."""

from __future__ import annotations

import base64
import binascii
import functools
import os
import subprocess
from pathlib import Path

from launcher.base.errors import TransportError
from launcher.cluster.cluster import Host
from launcher.transport.ssh.config import SshTarget, Targets, run_briefly
from launcher.transport.ssh.connect import usable
from launcher.transport.ssh.known_hosts import find_keys

_HARDWARE_KEY_FILES = ("~/.ssh/id_ed25519_sk", "~/.ssh/id_ecdsa_sk")  # OpenSSH tries them unasked
_HARDWARE_KEY = "a key on a security token"
_HARDWARE_TYPES = (b"sk-ssh-ed25519", b"sk-ecdsa-sha2")
_MAX_KEY_FILE_BYTES = 1 << 14
_KLIST_S = 5.0  # a ticket may be kept by a service of this machine, which may not answer


def reason_for_openssh(host: Host, targets: Targets) -> str | None:
    """Return why `host` is reached by OpenSSH and not by paramiko, None for paramiko."""
    try:
        return next((reason for hop in targets.route(host) if (reason := _reason_of(hop))), None)
    except TransportError:  # whoever opens the host says why it cannot be reached
        return None


def _reason_of(target: SshTarget) -> str | None:
    if target.only_openssh:
        return f"{target.only_openssh[0]} of the SSH config"
    known = find_keys(target.known_name, target.known_hosts_files)
    authority = next((key for key in known if key.is_authority), None)
    if authority is not None and all(key.is_authority or key.revoked for key in known):
        return f"certificates of hosts, {authority.file}:{authority.line}"
    if any(_is_hardware_key(path) for path in target.key_files):
        return _HARDWARE_KEY
    reason = None
    if any(Path(os.path.expanduser(name)).is_file() for name in _HARDWARE_KEY_FILES):
        reason = _HARDWARE_KEY
    elif target.allows_gssapi and _has_ticket():
        reason = "a Kerberos ticket, as there is no key"
    if reason is not None and not _has_key(target):
        return reason
    unusable = next((name for name, names in usable(target).items() if not names), None)
    return None if unusable is None else f"{unusable} of the SSH config"


def _has_key(target: SshTarget) -> bool:
    is_there = any(path.is_file() for path in target.key_files)
    return is_there or _agent_has_keys(target.agent_socket, target.connect_timeout_s)


@functools.lru_cache(maxsize=1)
def _has_ticket() -> bool:
    """Whether the user has a Kerberos ticket that is still valid."""
    try:
        return run_briefly(["klist", "-s"], _KLIST_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):  # no Kerberos here
        return False


@functools.lru_cache(maxsize=8)
def _agent_has_keys(path: str | None, timeout_s: float) -> bool:
    if path is None:
        return False
    from paramiko import SSHException  # most hosts are decided without it

    from launcher.transport.ssh.keys import SshAgent

    try:
        agent = SshAgent(path, timeout_s)
    except (SSHException, OSError):
        return False
    try:
        return bool(agent.get_keys())
    finally:
        agent.close()


@functools.lru_cache(maxsize=64)
def _is_hardware_key(path: Path) -> bool:
    """Whether a key file, private or public, is the handle of a key on a security token."""
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_KEY_FILE_BYTES)
    except OSError:
        return False
    if data.startswith(_HARDWARE_TYPES):
        return True
    body = b"".join(line for line in data.splitlines() if not line.startswith(b"-----"))
    try:
        return any(kind in base64.b64decode(body) for kind in _HARDWARE_TYPES)
    except (binascii.Error, ValueError):
        return False
