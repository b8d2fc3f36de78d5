"""How a host is reached is what OpenSSH says of its configuration, in every form that one may have."""

from __future__ import annotations

import getpass
import os
import pwd
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from harness.launch.command import Launch, running, wait_until

from launcher.base.errors import TransportError
from launcher.base.timeouts import timeouts
from launcher.cluster.cluster import Host
from launcher.transport.ssh import config as ssh_config
from launcher.transport.ssh.config import Targets
from launcher.transport.ssh.connect import usable
from launcher.transport.ssh.options import SshOptions

ME = getpass.getuser()
HOME = pwd.getpwuid(os.getuid()).pw_dir
CURVE = "curve25519-sha256@libssh.org"
# name -> (config, host, what is expected). @ is the folder of the test, where `inc` and `d/*` are files.
FILES = {
    "inc": "Host other\n  Port 2222\n",
    "inner": "User inner\n",
    "nested": "Include @/inc\nPort 77\n",
    "d/1": "Host n1\n  User one\n",
    "d/2": "Host n*\n  User two\n  Port 22222\n",
}
DEFAULT = object()  # of a wait: it is longer on a busy machine
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "empty": ("", "n1", {"user": ME, "port": 22, "address": "n1", "connect_timeout_s": DEFAULT}),
    "include first": ("Include @/inc\nUser bob\nConnectTimeout 3", "n1", {"user": "bob", "connect_timeout_s": 3.0}),
    "include first, its host": ("Include @/inc\nUser bob", "other", {"user": "bob", "port": 2222}),
    "include in a host": ("Host n*\n  Include @/inc\n  User carol", "n1", {"user": "carol", "port": 22}),
    "include in a host, its own host": ("Host n*\n  Include @/inc\n  User carol", "other", {"user": ME, "port": 22}),
    "include in a host, without blocks": ("Host n*\n  Include @/inner\n  User x", "n1", {"user": "inner"}),
    "include in another host": ("Host m*\n  Include @/inner\nHost *\n  User x", "n1", {"user": "x"}),
    "include nested": ("Host n1\n  Include @/nested\n  User x", "n1", {"user": "x", "port": 77}),
    "include glob": ("Include @/d/*\nPort 9", "n1", {"user": "one", "port": 22222}),
    "include of nothing": ("Include @/no-such-*\nPort 9", "n1", {"port": 9}),
    "include of two": ("Include @/inc @/inner\nPort 9", "n1", {"port": 9, "user": "inner"}),
    "include with =": ("include=@/inner", "n1", {"user": "inner"}),
    "include in quotes": ('Include "@/inner"', "n1", {"user": "inner"}),
    "comment": ("User u1  # me\nPort 5 # five", "n1", {"user": "u1", "port": 5}),
    "comment line": ("# User no\n   # Port 3\nUser u1", "n1", {"user": "u1", "port": 22}),
    "equals": ("User=u1\nPort = 7", "n1", {"user": "u1", "port": 7}),
    "quotes": ('User "u1"\nIdentityFile "@/a b"', "n1", {"user": "u1", "key_files": ["@/a b"]}),
    "crlf": ("Host n1\r\n  User u1\r\n  Port 5\r\n", "n1", {"user": "u1", "port": 5}),
    "case of keywords": ("hOST n1\n  uSER u1", "n1", {"user": "u1"}),
    "first wins": ("Host n1\n  User u1\nHost *\n  User u2\n  Port 4", "n1", {"user": "u1", "port": 4}),
    "negation": ("Host n* !n1\n  User u1\nHost *\n  User u2", "n1", {"user": "u2"}),
    "negation of another": ("Host n* !n2\n  User u1", "n1", {"user": "u1"}),
    "question mark": ("Host n?\n  User u1", "n1", {"user": "u1"}),
    "several patterns": ("Host a b n1\n  User u1", "n1", {"user": "u1"}),
    "match host": ("Match host n1\n  User u1", "n1", {"user": "u1"}),
    "match negated": ("Match !host n1\n  User u1", "n1", {"user": ME}),
    "match list": ("Match host n2,n1\n  User u1", "n1", {"user": "u1"}),
    "match host after HostName": ("HostName far\nMatch host far\n  User u1", "n1", {"user": "u1", "address": "far"}),
    "match originalhost": ("HostName far\nMatch originalhost n1\n  User u1", "n1", {"user": "u1"}),
    "match user": ("User u1\nMatch user u1\n  Port 8", "n1", {"port": 8}),
    "match the user of the hostfile": ("Match user boss\n  Port 8", "boss@n1", {"port": 8, "user": "boss"}),
    "match localuser": (f"Match localuser {ME}\n  Port 8", "n1", {"port": 8}),
    "match exec": ('Match exec "test %n = n1"\n  Port 8', "n1", {"port": 8}),
    "match exec fails": ("Match exec false\n  Port 8", "n1", {"port": 22}),
    "match all": ("Host m\n  Port 3\nMatch all\n  Port 8", "n1", {"port": 8}),
    "match final": ("Match final host n1\n  Port 8", "n1", {"port": 8}),
    "the port of the hostfile": ("Port 8", "n1:99", {"port": 99}),
    "HostName with a token": ("HostName %h.example.org", "n1", {"address": "n1.example.org"}),
    "canonical names": ("CanonicalizeHostname always\nMatch canonical\n  Port 8", "127.0.0.1", {"port": 8}),
    "tokens": (
        "HostName far\nUser u1\nIdentityFile ~/k-%h-%n-%r-%p-%u-%%",
        "n1",
        {"key_files": [f"{HOME}/k-far-n1-u1-22-{ME}-%"]},
    ),
    "home": ("IdentityFile %d/x", "n1", {"key_files": [f"{HOME}/x"]}),
    "a variable": ("IdentityFile ${TEST_FOLDER}/x", "n1", {"key_files": ["@/x"]}),
    "several keys": ("IdentityFile @/a\nHost *\n  IdentityFile @/b", "n1", {"key_files": ["@/a", "@/b"]}),
    "no key": ("IdentityFile none\nIdentitiesOnly yes", "n1", {"key_files": [], "identities_only": True}),
    "default keys": ("User u1", "n1", {"key_files": [f"{HOME}/.ssh/id_{t}" for t in ("ed25519", "ecdsa", "rsa")]}),
    "no agent": ("IdentityAgent none", "n1", {"agent_socket": None}),
    "the agent of a variable": ("IdentityAgent $TEST_FOLDER", "n1", {"agent_socket": "@"}),
    "an agent by path": ("IdentityAgent @/agent-%n", "n1", {"agent_socket": "@/agent-n1"}),
    "the usual agent": ("IdentityAgent SSH_AUTH_SOCK", "n1", {"agent_socket": "/tmp/sock"}),
    "no timeout": ("ConnectTimeout none", "n1", {"connect_timeout_s": DEFAULT}),
    "a timeout": ("ConnectTimeout 2m", "n1", {"connect_timeout_s": 120.0}),
    "a jump": ("ProxyJump me@b:33,c", "n1", {"jumps": ["me@b:33", "c"]}),
    "no jump": ("Host n1\n  ProxyJump none\nHost *\n  ProxyJump b", "n1", {"jumps": []}),
    "known hosts": (
        'UserKnownHostsFile @/k ~/l "@/m n"\nGlobalKnownHostsFile none',
        "n1",
        {"known_hosts_files": ["@/k", f"{HOME}/l", "@/m n"]},
    ),
    "known hosts by default": (
        "",
        "n1",
        {
            "known_hosts_files": [
                *(f"{HOME}/.ssh/known_hosts{end}" for end in ("", "2")),
                *(f"/etc/ssh/ssh_known_hosts{end}" for end in ("", "2")),
            ]
        },
    ),
    "an alias": ("HostKeyAlias Cluster", "n1", {"host_key_name": "cluster"}),
    "a proxy command": ("ProxyCommand nc %h %p", "n1", {"only_openssh": ["ProxyCommand"]}),
    "no proxy command": ("ProxyCommand none", "n1", {"only_openssh": []}),
    "kerberos": ("GSSAPIAuthentication yes", "n1", {"allows_gssapi": True}),
    "IPv6": ("", "fe80::1", {"address": "fe80::1"}),
}


def given(text: str, folder: Path) -> tuple[Path, Host]:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content.replace("@", str(folder)))
    config, host = CASES[text][:2]
    (folder / "config").write_bytes(config.replace("@", str(folder), config.count("@/")).encode())
    user, _, rest = host.rpartition("@")
    name, port = (rest, None) if host.count(":") != 1 else (rest.partition(":")[0], int(rest.partition(":")[2]))
    return folder / "config", Host(name, (0,), user or None, port)


def said_by_ssh(config: Path, host: Host) -> dict[str, list[str]]:
    words = [*(["-l", host.user] if host.user else []), *(["-p", str(host.port)] if host.port else [])]
    out = subprocess.run(
        ["ssh", "-G", "-T", "-F", config, *words, host.name], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, list[str]] = {}
    for line in out.splitlines():
        found.setdefault(line.partition(" ")[0], []).append(line.partition(" ")[2])
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_host_is_reached_as_openssh_would(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/sock")
    config, host = given(case, tmp_path)
    found = Targets(SshOptions(ssh_config=config)).of(host)
    for field, value in CASES[case][2].items():
        wanted = [one.replace("@/", f"{tmp_path}/") for one in value] if isinstance(value, list) else value
        wanted = timeouts().connect_s if value is DEFAULT else wanted
        got = getattr(found, field)
        if isinstance(value, str):
            wanted = value.replace("@", str(tmp_path), 1 if value.startswith("@") else 0)
        assert ([*map(str, got)] if isinstance(got, tuple) else got) == wanted, field
    said = said_by_ssh(config, host)
    assert [found.user, found.address, str(found.port)] == [said[key][0] for key in ("user", "hostname", "port")]
    assert found.host_key_name == said.get("hostkeyalias", [""])[0]
    assert found.identities_only == (said["identitiesonly"] == ["yes"])


@pytest.mark.parametrize(
    ("line", "setting", "wanted"),
    [
        ("KexAlgorithms ecdh-sha2-nistp256,curve25519-sha256", "KexAlgorithms", ("ecdh-sha2-nistp256", CURVE)),
        ("KexAlgorithms -ecdh*", "KexAlgorithms", None),
        ("KexAlgorithms ^ecdh-sha2-nistp521", "KexAlgorithms", None),
        ("Ciphers aes256-ctr", "Ciphers", ("aes256-ctr",)),
        ("Ciphers +aes128-cbc", "Ciphers", None),
        ("MACs hmac-sha2-512", "MACs", ("hmac-sha2-512",)),
        ("HostKeyAlgorithms rsa-sha2-512", "HostKeyAlgorithms", ("rsa-sha2-512",)),
        ("HostKeyAlgorithms -ssh-ed25519", "HostKeyAlgorithms", None),
    ],
)
def test_algorithms_are_those_that_the_config_allows(
    line: str, setting: str, wanted: tuple[str, ...] | None, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(line)
    said = said_by_ssh(tmp_path / "config", Host("n1", (0,)))[setting.lower()][0].split(",")
    found = usable(Targets(SshOptions(ssh_config=tmp_path / "config")).of(Host("n1", (0,))))[setting]
    said = [{"curve25519-sha256": CURVE}.get(name, name) for name in said]
    assert found
    assert list(found) == [name for name in dict.fromkeys(said) if name in found], "the order is that of the config"
    if wanted is None:
        ours = usable(Targets(SshOptions(ssh_config=Path("none"))).of(Host("n1", (0,))))[setting]
        assert set(found) == set(said) & set(ours)
    else:
        assert found == wanted


def test_without_a_word_of_the_config_algorithms_are_paramikos(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("User u1\n")
    plain = Targets(SshOptions(ssh_config=Path("none"))).of(Host("n1", (0,)))
    assert usable(Targets(SshOptions(ssh_config=tmp_path / "config")).of(Host("n1", (0,)))) == usable(plain)


NAMES = ["n1", "n2", "other", "far", "n10", "n1.example.org", "N1", "10.0.0.1", "10.0.0.11", "10.0.0.011"]


@pytest.mark.parametrize("case", CASES)
def test_many_hosts_are_reached_as_each_of_them(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    config, _ = given(case, tmp_path)
    options = SshOptions(ssh_config=config)
    hosts = [*(Host(name, (0,)) for name in NAMES), Host("n2", (0,), "boss", 99)]
    together = Targets(options)
    together.ask_for(hosts)
    assert [together.of(host) for host in hosts] == [Targets(options).of(host) for host in hosts]


@pytest.mark.parametrize(
    ("patterns", "others", "answers"),
    [("Host n*", [], 2), ("Host n? n1?  !n11", [11], 3), ("Match host n1", [n for n in range(20) if n != 1], 21)],
)
def test_hosts_that_the_config_does_not_tell_apart_are_asked_for_once(
    patterns: str, others: list[int], answers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(f"Include {tmp_path}/more\n{patterns}\n  ProxyJump bastion\n")
    (tmp_path / "more").write_text("Host n*\n  User u1\nHost *\n  ConnectTimeout 3\n")
    asked: list[str] = []
    ask_ssh = ssh_config._ask_ssh

    def counted(host: Host, options: SshOptions) -> ssh_config.Answer:
        asked.append(host.name)
        return ask_ssh(host, options)

    monkeypatch.setattr(ssh_config, "_ask_ssh", counted)
    targets = Targets(SshOptions(ssh_config=tmp_path / "config"))
    hosts = [Host(f"n{number}", (0,)) for number in range(20)]
    targets.ask_for(hosts)
    assert len(asked) == answers, asked
    asked.clear()
    targets.ask_for([Host(f"10.1.0.{number}", (0,)) for number in range(20, 40)])
    assert len(asked) == (20 if "Match" in patterns else 0), "the answer of the bastion, which no line matches either"
    assert all(targets.of(host).user == "u1" and targets.of(host).address == host.name for host in hosts)
    assert [len(targets.route(host)) for host in hosts] == [1 if n in others else 2 for n in range(20)]


def test_a_config_that_is_never_evaluated_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(f'Match exec "touch {tmp_path}/begun; exec sleep 86.{os.getpid()}"\n  Port 1\n')
    for timeout_s in (0.5, 5.0, 50.0):  # a machine with other work does not come to that program within the first
        options = SshOptions(ssh_config=tmp_path / "config", connect_timeout_s=timeout_s)
        with pytest.raises(
            TransportError, match=rf"n1: the SSH config was not evaluated within {timeout_s:g} s; does a"
        ):
            Targets(options).of(Host("n1", (0,)))
        if (tmp_path / "begun").exists():
            break
    assert (tmp_path / "begun").exists()
    wait_until(lambda: not running("sleep", f"86.{os.getpid()}"), "the end of what it has started")


@pytest.mark.parametrize("words", [("run", "train.py"), ("check",), ("exec", "true")])
def test_what_evaluates_the_config_ends_at_ctrl_c(tmp_path: Path, words: tuple[str, ...]) -> None:
    sleep = ("sleep", f"{80 + len(words[0])}.{os.getpid()}")
    (tmp_path / "config").write_text(f'Match host n* exec "exec {" ".join(sleep)}"\n  Port 1\n')
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    (tmp_path / "train.py").touch()
    options = ["--hostfile", "hosts", "--ssh-config", "config"]
    job = Launch(tmp_path, words[0], *options, *words[1:])
    wait_until(lambda: bool(running(*sleep)), "the program of the config")
    job.signal(signal.SIGINT)
    assert job.wait(30).code == 130
    wait_until(lambda: not running(*sleep), "the end of what it has started", 10)
