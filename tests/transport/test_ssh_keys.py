"""Which keys a server is offered: what logs in with OpenSSH's own client logs in here, with a real agent."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.launch.sshd import LoopbackSshd, make_key

from launcher.base.errors import TransportError
from launcher.cluster.cluster import Host
from launcher.transport.ssh import connect as ssh_connect
from launcher.transport.ssh.options import SshOptions
from launcher.transport.ssh.transport import SshTransport

pytestmark = pytest.mark.cluster
HOST = Host("127.0.0.1", (0,))
_QUICK = "KexAlgorithms=curve25519-sha256"  # OpenSSH's first choice costs a tenth of a second more


@dataclass
class World:
    """A folder with keys, an agent and an SSH config for one server."""

    folder: Path
    sshd: LoopbackSshd
    agent: str

    def key(self, name: str, passphrase: str = "") -> Path:
        path = self.folder / name
        if not path.exists():
            make_key(path, passphrase)
        return path

    def right(self) -> Path:
        """Copy the key that the server accepts into the folder."""
        path = self.folder / "right"
        shutil.copy(self.sshd.user_key, path)
        shutil.copy(f"{self.sshd.user_key}.pub", f"{path}.pub")
        return path

    def add(self, *keys: Path) -> None:
        """Let the agent hold these keys, in this order."""
        subprocess.run(
            ["ssh-add", "-q", *map(str, keys)], check=True, capture_output=True, env=os.environ | self.variables
        )

    def wrong(self, count: int) -> list[Path]:
        return [self.key(f"wrong_{number}") for number in range(count)]

    @property
    def variables(self) -> dict[str, str]:
        return {"SSH_AUTH_SOCK": self.agent}

    def configure(self, *lines: str) -> Path:
        """Write an SSH config with these lines for the host."""
        path = self.folder / "config"
        kept = [line for line in self.sshd.ssh_config.read_text().splitlines() if "Identit" not in line]
        path.write_text("\n".join([*kept, *(f"  {line}" for line in lines), ""]))
        return path

    def openssh_logs_in(self) -> bool:
        command = ["ssh", "-F", str(self.folder / "config"), "-o", "BatchMode=yes", "-o", _QUICK, HOST.name, "true"]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env=os.environ)
        return done.returncode == 0

    def refusal(self) -> str | None:
        """Log in with our client; return why that failed."""
        transport = SshTransport(SshOptions(ssh_config=self.folder / "config", shell_only=True))
        try:
            transport.open(HOST).close()
        except TransportError as error:
            return str(error)
        finally:
            transport.close()
        return None


@pytest.fixture
def world(sshd: LoopbackSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    started = subprocess.run(["ssh-agent", "-s"], check=True, capture_output=True, text=True).stdout
    values = dict(re.findall(r"(SSH_\w+)=([^;]+);", started))
    monkeypatch.setenv("SSH_AUTH_SOCK", values["SSH_AUTH_SOCK"])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no keys of whoever runs the tests
    try:
        yield World(tmp_path, sshd, values["SSH_AUTH_SOCK"])
    finally:
        os.kill(int(values["SSH_AGENT_PID"]), 15)


def right_key_last_and_named(world: World) -> None:
    world.add(*world.wrong(8), right := world.right())
    world.configure(f"IdentityFile {right}")


def public_key_named(world: World) -> None:
    right = world.right()
    world.add(*world.wrong(8), right)
    right.unlink()
    world.configure(f"IdentityFile {right}.pub", "IdentitiesOnly yes")


def locked_key_without_public_file(world: World) -> None:
    right = world.right()
    world.add(right)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(right)], check=True, capture_output=True)
    Path(f"{right}.pub").unlink()
    world.configure(f"IdentityFile {right}", "IdentitiesOnly yes")


def socket_named(world: World) -> None:
    world.add(world.right())
    os.environ["SSH_AUTH_SOCK"] = "/nonexistent"
    world.configure(f"IdentityAgent {world.agent}")


def socket_in_another_variable(world: World) -> None:
    world.add(world.right())
    os.environ["SSH_AUTH_SOCK"] = "/nonexistent"
    os.environ["OTHER_AGENT"] = world.agent
    world.configure("IdentityAgent $OTHER_AGENT")


def usual_socket_named(world: World) -> None:
    world.add(world.right())
    world.configure("IdentityAgent SSH_AUTH_SOCK")


def variable_in_the_path(world: World) -> None:
    world.right()
    os.environ["KEY_FOLDER"] = str(world.folder)
    world.configure("IdentityFile ${KEY_FOLDER}/right", "IdentityAgent none")


@pytest.mark.parametrize(
    "prepare",
    [
        right_key_last_and_named,
        public_key_named,
        locked_key_without_public_file,
        socket_named,
        socket_in_another_variable,
        usual_socket_named,
        variable_in_the_path,
    ],
)
def test_what_openssh_lets_in(world: World, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[World], None]) -> None:
    monkeypatch.setenv("OTHER_AGENT", "")
    monkeypatch.setenv("KEY_FOLDER", "")
    prepare(world)
    assert world.openssh_logs_in()
    assert world.refusal() is None


def identities_only(world: World) -> str:
    world.add(world.right())
    world.configure(f"IdentityFile {world.key('named')}", "IdentitiesOnly yes")
    return f"tried: {world.folder / 'named'}; install one"


def agent_off(world: World) -> str:
    world.add(world.right())
    world.configure("IdentityAgent none", "IdentityFile none")
    return "tried: none found"


def key_that_others_may_read(world: World) -> str:
    world.right().chmod(0o644)
    world.configure(f"IdentityFile {world.folder / 'right'}", "IdentityAgent none")
    return f"others may read it (mode 0644): chmod 600 {world.folder / 'right'}"


def public_key_without_its_private_one(world: World) -> str:
    world.right().unlink()
    world.configure(f"IdentityFile {world.folder / 'right'}.pub", "IdentitiesOnly yes")
    return "right.pub is a public key, and the agent does not hold its private one"


def certificate_file(world: World) -> str:
    world.configure(f"IdentityFile {world.key('named')}", "IdentitiesOnly yes", "CertificateFile /x-cert.pub")
    return "CertificateFile of the SSH config needs --ssh openssh"


@pytest.mark.parametrize(
    "prepare",
    [
        identities_only,
        agent_off,
        key_that_others_may_read,
        public_key_without_its_private_one,
        certificate_file,
    ],
)
def test_what_openssh_keeps_out(world: World, prepare: Callable[[World], str]) -> None:
    expected = prepare(world)
    assert not world.openssh_logs_in()
    assert expected in str(world.refusal())


@pytest.mark.parametrize("where", ["beside the key", "beside the agent's key", "in the agent"])
def test_certificates(world: World, tmp_path: Path, where: str) -> None:
    authority, key = world.key("authority"), world.key("mine")
    user = subprocess.run(["id", "-un"], check=True, capture_output=True, text=True).stdout.strip()
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", user, f"{key}.pub"]
    if where != "beside the agent's key":
        subprocess.run(sign, check=True, capture_output=True)
    with LoopbackSshd(tmp_path / "own") as own:
        world.sshd = own
        (own.folder / "authorized_keys").write_text(f"cert-authority {Path(f'{authority}.pub').read_text()}")
        if where != "beside the key":
            world.add(key)
            key.unlink()
        if where == "beside the agent's key":
            subprocess.run(sign, check=True, capture_output=True)
        world.configure(f"IdentityFile {key}", "IdentitiesOnly yes")
        assert world.openssh_logs_in()
        assert world.refusal() is None
        (tmp_path / "mine-cert.pub").unlink()
        if where != "in the agent":
            assert "accepts none of our keys" in str(world.refusal())


def test_wrong_keys_do_not_use_up_the_tries_of_the_right_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add(*world.wrong(8))
    world.configure(f"IdentityFile {world.right()}")
    assert not world.openssh_logs_in(), "here we are kinder"
    assert world.refusal() is None
    monkeypatch.setattr(ssh_connect, "_MAX_OFFERED_KEYS", 7)
    refusal = str(world.refusal())
    assert refusal.count("agent key wrong_") == 7
    assert "name the right one with IdentityFile" in refusal
    monkeypatch.setattr(ssh_connect, "_MAX_OFFERED_KEYS", 20)
    monkeypatch.setattr(ssh_connect, "_MAX_LOGINS", 1)
    refusal = str(world.refusal())
    assert refusal.count("agent key wrong_") == 6
    assert "name the right one with IdentityFile" in refusal
