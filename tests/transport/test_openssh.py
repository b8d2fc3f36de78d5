"""The system's `ssh` as transport, against a real sshd: where it is chosen, what it reaches, how it fails and ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.launch.command import DEADLINE_S, Launch, Result, nap, run_here, run_launch, wait_until
from harness.launch.sshd import DroppingServer, LoopbackSshd, StalledServer, free_port, make_key

from launcher.base.errors import TransportError
from launcher.base.processes import descendants
from launcher.cluster.cluster import Host
from launcher.transport.openssh import OpenSshTransport
from launcher.transport.ssh import choice
from launcher.transport.ssh.choice import reason_for_openssh
from launcher.transport.ssh.config import Targets
from launcher.transport.ssh.options import SshOptions
from launcher.transport.ssh.transport import SshTransport

HOST = Host("127.0.0.1", (0,))
QUICK = "KexAlgorithms curve25519-sha256"  # OpenSSH's first choice costs a tenth of a second more
SCRIPT = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"


@pytest.fixture
def config(sshd: LoopbackSshd, tmp_path: Path) -> Path:
    """A copy of the server's ssh_config that a test may change."""
    path = tmp_path / "config"
    path.write_text(f"{sshd.ssh_config.read_text()}  {QUICK}\n")
    return path


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("127.0.0.[1-2] slots=1\n")
    return path


def sign(authority: Path, key: Path, *words: str) -> None:
    """Make `key`-cert.pub. words: the names that it is for, and what else ssh-keygen is to know."""
    command = ["ssh-keygen", "-q", "-s", str(authority), "-I", key.name, *words, f"{key}.pub"]
    subprocess.run(command, check=True, capture_output=True)


def public(key: Path) -> str:
    return " ".join(Path(f"{key}.pub").read_text().split()[:2])


@pytest.fixture
def certified(sshd: LoopbackSshd, tmp_path: Path) -> Iterator[Path]:
    """An ssh_config whose hosts show certificates, want one of the user, and are behind a bastion."""
    folder, authority, mine = tmp_path / "certified", tmp_path / "authority", tmp_path / "mine"
    make_key(authority)
    make_key(mine)
    server = LoopbackSshd(folder, settings=f"HostCertificate {folder}/host_key-cert.pub\n")
    sign(authority, server.host_key, "-h", "-n", "127.0.0.1,127.0.0.2")
    sign(authority, mine, "-n", server.user)
    certificate = (tmp_path / "mine-cert.pub").rename(tmp_path / "certificate")
    (folder / "authorized_keys").write_text(f"cert-authority {public(authority)}\n")
    server.known_hosts.write_text(f"@cert-authority [127.0.0.*]:{server.port} {public(authority)}\n")
    text = server.ssh_config.read_text().replace(str(server.user_key), str(mine))
    way = f"ssh -F {sshd.ssh_config} -o {QUICK.replace(' ', '=')} -W %h:%p 127.0.0.77"
    path = tmp_path / "certified_config"
    path.write_text(f"{text}  {QUICK}\n  CertificateFile {certificate}\n  ProxyCommand {way}\n")
    with server:
        yield path


@pytest.mark.cluster
def test_a_job_through_a_bastion_with_certificates(certified: Path, hosts: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--hostfile", str(hosts), "-F", str(certified), "train.py"]
    result = run_launch(tmp_path, *words)
    assert result.code == 0, result.err
    assert sorted(line.partition("] ")[2] for line in result.out.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    note = "127.0.0.[1-2]: by the system's ssh, for ProxyCommand of the SSH config"
    assert note in result.err
    plan = run_here(tmp_path, "--dry-run", "-v", *words).out
    assert note in plan
    assert re.search(r"ssh -T .* -- 127\.0\.0\.2 '?exec /bin/sh", plan), "the command is one to try in a shell"
    refused = run_here(tmp_path, "--ssh", "paramiko", *words)
    assert refused.code == 69
    assert "ProxyCommand of the SSH config for 127.0.0.1 needs the system's ssh" in refused.err


@pytest.mark.cluster
def test_commands_and_checks_by_openssh(config: Path, hosts: Path, tmp_path: Path) -> None:
    words = ["-H", str(hosts), "-F", str(config), "--ssh", "openssh"]
    plain = run_here(tmp_path, "exec", *words, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (plain.out_of_hosts, plain.code) == ({"127.0.0.1": "out\n", "127.0.0.2": "out\n"}, 3)
    assert plain.said.splitlines()[1:2] == ["err"]
    supervised = run_here(tmp_path, "exec", *words, "--supervise", "echo", "hi")
    assert (supervised.out_of_hosts, supervised.code) == ({"127.0.0.1": "hi\n", "127.0.0.2": "hi\n"}, 0), supervised.err
    check = run_launch(tmp_path, "check", *words)
    assert check.code == 0, check.out + check.err
    shown = run_here(tmp_path, "exec", "-v", *words, "true").err
    assert "ssh: 127.0.0.1: Authenticated to 127.0.0.1" in shown


def children(launch: Launch) -> set[int]:
    """Return the connections of this launcher; those that the sshd runs for it, and `ssh -G`, are left out."""
    found = set()
    for pid in descendants(launch.process.pid):
        with contextlib.suppress(FileNotFoundError):  # `ssh -G` takes a moment
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[0] == b"ssh" and b"-G" not in words:
                found.add(pid)
    return found


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left(certified: Path, hosts: Path, tmp_path: Path, number: int) -> None:
    sleeper = f"echo $$ > {tmp_path}/pid.$RANK; exec sleep {nap('81.')}"
    job = Launch(tmp_path, "exec", "-H", hosts, "-F", certified, "--", "sh", "-c", sleeper)
    wait_until(lambda: len([f for f in tmp_path.glob("pid.*") if f.read_text()]) == 2, "the commands")
    far = {int(file.read_text()) for file in tmp_path.glob("pid.*")}
    near = children(job)
    assert len(near) == 4, "two hosts, and the way to each"
    assert {os.getsid(pid) for pid in near}.isdisjoint({os.getsid(job.process.pid)}), "a terminal's Ctrl-C reaches us"
    job.signal(number)
    assert job.wait().code == (130 if number == signal.SIGINT else -9)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in near | far), "the end of all")


@pytest.mark.cluster
def test_ctrl_c_ends_the_wait_for_a_host(config: Path, hosts: Path, tmp_path: Path) -> None:
    config.write_text(f"Host *\n  ConnectTimeout 500\n{config.read_text()}")
    with StalledServer() as server:
        job = Launch(
            tmp_path, "exec", "-H", hosts, "-F", config, "--ssh", "openssh", "--ssh-port", str(server.port), "true"
        )
        wait_until(lambda: len(children(job)) == 2, "the connections")
        near = children(job)
        job.signal(signal.SIGINT)
        assert job.wait().code in (69, 130)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in near), "the end of all")


def refusal(config: Path, host: Host = HOST, **options: object) -> str:
    transport = OpenSshTransport(SshOptions(ssh_config=config, shell_only=True, **options))  # type: ignore[arg-type]
    with pytest.raises(TransportError) as caught:
        transport.open(host)
    transport.close()
    assert str(caught.value).startswith(f"{host.name}: ")
    found = caught.value.diagnostics[0]
    assert host.name not in str(found.shared), "hosts that fail alike are shown together"
    return str(caught.value)


@pytest.mark.cluster
def test_errors_have_a_cause_and_a_remedy(config: Path, tmp_path: Path) -> None:
    port = free_port()
    text = refusal(config, ssh_port=port)
    assert "connection refused: ssh: connect to host 127.0.0.1 port" in text
    assert text.endswith(f"Try: ssh -F {config} -p {port} 127.0.0.1 true")
    assert "the host name cannot be resolved: ssh: Could not res" in refusal(config, Host("no-such-host.invalid", (0,)))
    empty = tmp_path / "empty"
    empty.touch()
    assert "the host key is not known: No ED25519 host key is known" in refusal(config, known_hosts=empty)
    make_key(tmp_path / "stranger")
    empty.write_text(f"* {public(tmp_path / 'stranger')}\n")
    assert f"the host key has changed: Offending ED25519 key in {empty}:1" in refusal(config, known_hosts=empty)
    config.write_text(re.sub(r"IdentityFile .*", f"IdentityFile {tmp_path / 'stranger'}", config.read_text()))
    text = refusal(config)
    assert "the login was refused: " in text
    assert "Permission denied (publickey)" in text
    config.write_text("Host *\n  NoSuchOption yes\n")
    assert f"{config}: line 2: Bad configuration option: nosuchoption" in refusal(config)


@pytest.mark.cluster
def test_new_keys_are_recorded_when_asked_for(config: Path, tmp_path: Path) -> None:
    known = tmp_path / "known"
    options = SshOptions(ssh_config=config, known_hosts=known, shell_only=True, accept_new_host_keys=True)
    transport = OpenSshTransport(options)
    transport.open(HOST)
    transport.close()
    assert "ssh-ed25519" in known.read_text()


@pytest.mark.cluster
def test_a_silent_host_and_one_that_drops_connections(config: Path, sshd: LoopbackSshd, tmp_path: Path) -> None:
    with StalledServer() as server:
        text = refusal(config, ssh_port=server.port, connect_timeout_s=1.0)
        assert "no answer in time: Connection to 127.0.0.1 port" in text
    known = tmp_path / "known"
    with DroppingServer(sshd.port, 1) as server:
        known.write_text(f"[127.0.0.*]:{server.port} {sshd.host_key_line}\n")
        options = SshOptions(ssh_config=config, known_hosts=known, ssh_port=server.port, shell_only=True)
        transport = OpenSshTransport(options)
        channel = transport.open(HOST)
        channel.write(b"exit 5\n")
        assert channel.wait(DEADLINE_S) == 5
        transport.close()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose name leaves room in the path of a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.cluster
def test_an_open_connection_is_shared(config: Path, short_folder: Path, sshd: LoopbackSshd) -> None:
    """As people with one-time passwords do it: they log in once, and everything else goes through that."""
    config.write_text(f"{config.read_text()}  ControlPath {short_folder}/cm-%r@%h\n")
    options = SshOptions(ssh_config=config)
    assert reason_for_openssh(HOST, Targets(options)) is None
    master = subprocess.Popen(["ssh", "-F", config, "-MN", HOST.name], stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: reason_for_openssh(HOST, Targets(options)) is not None, "the connection")
        assert reason_for_openssh(HOST, Targets(options)) == "ControlPath of the SSH config"
        config.write_text(config.read_text().replace(str(sshd.user_key), "none"))
        transport = OpenSshTransport(SshOptions(ssh_config=config, shell_only=True))
        channel = transport.open(HOST)
        channel.write(b"echo hello; exit 5\n")
        assert channel.read(100) == b"hello\n"
        assert channel.wait(DEADLINE_S) == 5
        transport.close()
        assert master.poll() is None
    finally:
        master.kill()  # after SIGTERM it may wait for a session that is about to end
        master.wait()


def test_without_ssh_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ssh cannot be started: No such file" in refusal(tmp_path / "config")
    with pytest.raises(TransportError, match=r"ssh, which evaluates .*, cannot be started.*--ssh-config none"):
        Targets(SshOptions(ssh_config=tmp_path / "config")).of(HOST)
    assert Targets(SshOptions(ssh_config=Path("none"))).of(HOST).port == 22, "without a config nobody is asked"


@pytest.mark.cluster
@pytest.mark.parametrize("client", ["openssh", "paramiko"])
def test_a_pipe_may_be_the_config_of_many(config: Path, hosts: Path, tmp_path: Path, client: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(config.read_bytes(),), daemon=True).start()
    result: Result = run_here(tmp_path, "exec", "-H", hosts, "-F", "pipe", "--ssh", client, "echo", "here")
    assert (result.code, result.out_of_hosts) == (0, {"127.0.0.1": "here\n", "127.0.0.2": "here\n"}), result.err


def known_authority(folder: Path) -> str:
    make_key(folder / "key")
    (folder / "known").write_text(f"@cert-authority *.cluster,n1 {public(folder / 'key')}\n")
    return f"UserKnownHostsFile {folder}/known"


def known_host(folder: Path) -> str:
    line = known_authority(folder)
    with (folder / "known").open("a") as file:
        file.write(f"n1 {public(folder / 'key')}\n")
    return line


def token(folder: Path) -> str:
    (folder / "id_sk").write_text("private\n")
    (folder / "id_sk.pub").write_text("sk-ssh-ed25519@openssh.com AAAA me\n")
    return f"IdentityFile {folder}/id_sk.pub"


def no_ticket(folder: Path) -> str:
    return f"GSSAPIAuthentication yes\n  IdentityFile {folder}/none\n  IdentityAgent none"


def ticket(folder: Path) -> str:
    (folder / "klist").write_text("#!/bin/sh\ntest $1 = -s\n")
    (folder / "klist").chmod(0o755)
    return no_ticket(folder)


def mute_klist(folder: Path) -> str:
    lines = ticket(folder)
    (folder / "klist").write_text("#!/bin/sh\nexec sleep 60\n")
    return lines


def ticket_and_key(folder: Path) -> str:
    (folder / "none").touch()
    return ticket(folder)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("ProxyJump bastion", None),
        ("ProxyCommand nc %h %p", "ProxyCommand of the SSH config"),
        ("ProxyCommand none", None),
        ("CertificateFile ~/mine", "CertificateFile of the SSH config"),
        ("PKCS11Provider /usr/lib/token.so", "PKCS11Provider of the SSH config"),
        ("SecurityKeyProvider internal", None),
        ("HostbasedAuthentication yes", "HostbasedAuthentication of the SSH config"),
        ("ControlMaster auto\n  ControlPath ~/.ssh/no-such-%C", None),
        ("PreferredAuthentications gssapi-with-mic,publickey", "PreferredAuthentications of the SSH config"),
        ("ProxyJump far", "ProxyCommand of the SSH config"),
        ("RevokedHostKeys /etc/ssh/revoked", "RevokedHostKeys of the SSH config"),
        ("KexAlgorithms sntrup761x25519-sha512@openssh.com", "KexAlgorithms of the SSH config"),
        ("KexAlgorithms ^ecdh-sha2-nistp256", None),
        ("IdentityFile %d/key-%C", "IdentityFile of the SSH config"),
        ("Port many", None),
        (known_authority, r"certificates of hosts, .*/known:1"),
        (known_host, None),
        (token, "a key on a security token"),
        (ticket, "a Kerberos ticket, as there is no key"),
        (no_ticket, None),
        (mute_klist, None),
        (ticket_and_key, None),
    ],
)
def test_openssh_is_chosen_where_paramiko_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str | Callable[[Path], str], reason: str | None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    choice._has_ticket.cache_clear()
    monkeypatch.setattr(choice, "_KLIST_S", 1.0)
    text = lines if isinstance(lines, str) else lines(tmp_path)
    (tmp_path / "config").write_text(f"Host far\n  ProxyCommand nc %h %p\nHost n1\n  {text}\n")
    found = reason_for_openssh(Host("n1", (0,)), Targets(SshOptions(ssh_config=tmp_path / "config")))
    assert found is None if reason is None else re.fullmatch(reason, str(found)), found


@pytest.mark.cluster
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_jump_is_still_paramikos(config: Path, sshd: LoopbackSshd) -> None:
    config.write_text(f"Host 127.0.0.9\n  ProxyJump 127.0.0.7\n{config.read_text()}")
    options = SshOptions(ssh_config=config, shell_only=True)
    host = Host("127.0.0.9", (0,))
    assert reason_for_openssh(host, Targets(options)) is None
    for transport in (SshTransport(options), OpenSshTransport(options)):
        channel = transport.open(host)
        channel.write(b"exit 5\n")
        assert channel.wait(DEADLINE_S) == 5
        transport.close()
