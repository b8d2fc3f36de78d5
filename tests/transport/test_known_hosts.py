"""The known_hosts file: what is recorded stands on a line of its own, and a changed key is never accepted."""

from __future__ import annotations

import base64
import threading
from pathlib import Path

import pytest
from harness.launch.sshd import LoopbackSshd, make_key

from launcher.base.errors import TransportError
from launcher.cluster.cluster import Host
from launcher.transport.ssh.known_hosts import Verdict, check_key, find_keys, record_new_key
from launcher.transport.ssh.options import SshOptions
from launcher.transport.ssh.transport import SshTransport

OLD, NEW, OTHER = b"old key", b"new key", b"other key"


def line(name: str, blob: bytes) -> str:
    return f"{name} ssh-ed25519 {base64.b64encode(blob).decode()}"


def test_a_file_without_a_last_newline_loses_no_host(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(line("old", OLD))
    assert record_new_key([file], "new", "ssh-ed25519", NEW).verdict is Verdict.KNOWN
    assert file.read_text() == f"{line('old', OLD)}\n{line('new', NEW)}\n"
    assert check_key(find_keys("old", [file]), OLD).verdict is Verdict.KNOWN
    assert check_key(find_keys("old", [file]), OTHER).verdict is Verdict.CHANGED


def test_a_host_that_another_launch_has_recorded_is_judged_by_that(tmp_path: Path) -> None:
    own, system = tmp_path / "folder" / "known_hosts", tmp_path / "system"
    assert record_new_key([own, system], "host", "ssh-ed25519", NEW).verdict is Verdict.KNOWN
    assert (own.stat().st_mode & 0o777, own.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert record_new_key([own, system], "host", "ssh-ed25519", OTHER).verdict is Verdict.CHANGED
    system.write_text(line("second", OLD) + "\n")
    assert record_new_key([own, system], "second", "ssh-ed25519", OTHER).verdict is Verdict.CHANGED
    assert own.read_text() == f"{line('host', NEW)}\n"


def test_many_at_once_write_whole_lines_and_each_host_once(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    threads = [
        threading.Thread(target=record_new_key, args=([file], f"host{number % 8}", "ssh-ed25519", NEW))
        for number in range(32)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(file.read_text().splitlines()) == sorted(line(f"host{number}", NEW) for number in range(8))


@pytest.mark.cluster
def test_accepting_new_keys_accepts_no_changed_one(sshd: LoopbackSshd, tmp_path: Path) -> None:
    def refusal(known: Path) -> str | None:
        options = SshOptions(ssh_config=sshd.ssh_config, known_hosts=known, shell_only=True, accept_new_host_keys=True)
        transport = SshTransport(options)
        try:
            transport.open(Host("127.0.0.1", (0,))).close()
        except TransportError as error:
            return str(error)
        finally:
            transport.close()
        return None

    name = f"[127.0.0.1]:{sshd.port}"
    make_key(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    changed = tmp_path / "changed"
    changed.write_text(f"{name} {other}")  # and no newline: nothing may hide this line
    assert "has changed" in str(refusal(changed))
    assert changed.read_text() == f"{name} {other}"
    new = tmp_path / "new"
    assert refusal(new) is None
    assert new.read_text() == f"{name} {sshd.host_key_line}\n"


@pytest.mark.cluster
def test_an_authority_is_named_and_its_key_is_no_host_key(sshd: LoopbackSshd, tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_text(f"# all hosts\n@cert-authority * {sshd.host_key_line}\n")
    transport = SshTransport(SshOptions(ssh_config=sshd.ssh_config, known_hosts=known, shell_only=True))
    with pytest.raises(TransportError) as caught:
        transport.open(Host("127.0.0.1", (0,)))
    transport.close()
    text = str(caught.value)
    assert f"is not known: {known}:2 trusts an authority, but host certificates need --ssh openssh" in text
    assert "--accept-new-host-keys" in text
    assert "accept the key with: ssh" not in text, "OpenSSH would record nothing"
