"""SSH against a real sshd that fails in every way: each failure names the host and what to do."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest
from harness.launch.command import DEADLINE_S, run_here, run_launch, slowness
from harness.launch.sshd import DroppingServer, LoopbackSshd, StalledServer, free_port, make_key

from launcher.base.errors import TransportError
from launcher.cluster.cluster import Host
from launcher.transport.ssh import choice, connect, library, transport
from launcher.transport.ssh.config import Targets
from launcher.transport.ssh.options import SshOptions
from launcher.transport.ssh.transport import SshTransport

pytestmark = pytest.mark.cluster
TESTS = Path(__file__).resolve().parents[1]
HOST = Host("127.0.0.1", (0,))
# `ssh -G` alone may take the first on a machine with other work.
_TIMEOUTS_S = (0.5, 5.0, 50.0)


def make_transport(config: Path, **options: object) -> SshTransport:
    return SshTransport(
        SshOptions(ssh_config=config, agent_module="harness.launch.echo_agent", root=TESTS, **options)  # type: ignore[arg-type]
    )


def failure(config: Path, host: Host = HOST, **options: object) -> str:
    opened = make_transport(config, **options)
    with pytest.raises(TransportError) as caught:
        opened.open(host)
    opened.close()
    assert str(caught.value).startswith(f"{host.name}: ")
    return str(caught.value)


def works(config: Path, host: Host = HOST, **options: object) -> bool:
    transport = make_transport(config, **options)
    channel = transport.open(host)
    channel.write(b"exit 5\n")
    status = channel.wait(DEADLINE_S)
    transport.close()
    return status == 5


@pytest.fixture
def config(sshd: LoopbackSshd, tmp_path: Path) -> Path:
    """A copy of the server's ssh_config that a test may change."""
    path = tmp_path / "config"
    path.write_text(sshd.ssh_config.read_text())
    return path


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_refused(config: Path) -> None:
    port = free_port()
    text = failure(config, ssh_port=port)
    assert re.search(rf"connection refused by \w+@127\.0\.0\.1 port {port}", text)
    assert f"ssh -F {config} -p {port} 127.0.0.1 true" in text


def test_stalled(config: Path) -> None:
    with StalledServer() as server:
        for timeout_s in _TIMEOUTS_S:
            message = failure(config, ssh_port=server.port, connect_timeout_s=timeout_s)
            if "SSH config" not in message:
                break
    assert f"no SSH answer within {timeout_s:g} s" in message


def test_unresolvable(config: Path) -> None:
    assert "cannot be resolved" in failure(config, Host("no-such-host.invalid", (0,)))


def test_unknown_host_key(config: Path, tmp_path: Path, sshd: LoopbackSshd) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    text = failure(config, known_hosts=empty)
    assert "is not known" in text
    assert "--accept-new-host-keys" in text
    command = re.findall(r"accept the key with: (ssh .+ true);", text)[0]
    # What a person answers to its question, this option does for a test.
    command = command.replace("ssh ", "ssh -o StrictHostKeyChecking=accept-new ", 1)
    subprocess.run(["/bin/sh", "-c", command], check=True, capture_output=True)
    assert works(config, known_hosts=empty), "the remedy must help"
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(empty)], check=True, capture_output=True)
    assert works(config, known_hosts=empty), "hashed entries must be found"


def test_strict_checking_cannot_be_switched_off(config: Path, tmp_path: Path) -> None:
    config.write_text("Host *\n  StrictHostKeyChecking no\n" + config.read_text())
    assert "is not known" in failure(config, known_hosts=tmp_path / "none")


def test_changed_and_revoked_host_key(config: Path, tmp_path: Path, sshd: LoopbackSshd) -> None:
    make_key(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    known = tmp_path / "known"
    known.write_text(f"# comment\n[127.0.0.1]:{sshd.port} {other}\n")
    text = failure(config, known_hosts=known)
    assert "has changed" in text
    assert f"{known}:2" in text
    assert f"ssh-keygen -f {known} -R '[127.0.0.1]:{sshd.port}'" in text
    known.write_text(f"* {sshd.host_key_line}\n@revoked * {sshd.host_key_line}\n")
    transport = make_transport(config, known_hosts=known)
    with pytest.raises(TransportError, match=f"{known}:2: .*revoked"):
        transport.open(HOST)


def behind(server: DroppingServer, config: Path, sshd: LoopbackSshd) -> None:
    """Let `config` lead to a server that passes connections on to sshd."""
    known = config.parent / "known_hosts_of_the_dropper"
    known.write_text(f"[127.0.0.*]:{server.port} {sshd.host_key_line}\n")
    text = config.read_text().replace(f"Port {sshd.port}", f"Port {server.port}")
    config.write_text(re.sub(r"UserKnownHostsFile .*", f"UserKnownHostsFile {known}", text))


@pytest.mark.parametrize(("num_dropped", "gets_through"), [(2, True), (9, False)])
def test_a_server_that_drops_connections_is_asked_again(
    config: Path, sshd: LoopbackSshd, num_dropped: int, gets_through: bool
) -> None:
    with DroppingServer(sshd.port, num_dropped) as server:
        behind(server, config, sshd)
        if gets_through:
            assert works(config)
        else:
            assert "SSH negotiation failed" in failure(config)


@pytest.mark.parametrize("num_bytes", [60, 700, 1500, 1800, 2000, 2100])
def test_a_connection_that_breaks_off_has_a_cause_at_every_point(
    config: Path, sshd: LoopbackSshd, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_RETRY_DELAYS_S", ())
    with DroppingServer(sshd.port, 99, num_bytes) as server:
        behind(server, config, sshd)
        message = failure(config)
        assert re.search(r"negotiation failed: \w|be started: \w|none of our keys.*\(\w", message), message


def test_a_connection_that_ends_at_the_last_key_is_the_cause(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken connection looked like a key that is not accepted."""

    def break_off(connection: paramiko.Transport, *_: object) -> list[str]:
        connection.close()
        raise paramiko.AuthenticationException("Authentication failed: transport shut down or saw EOF")

    monkeypatch.setattr(paramiko.Transport, "auth_publickey", break_off)
    assert "user_key (the connection was closed); install one with" in failure(config)


def test_an_error_without_words_has_a_cause() -> None:
    assert library.cause_of(EOFError()) == library.cause_of(None) == "the connection was closed"


def test_a_key_agent_that_gives_no_answer_is_given_up(config: Path, tmp_path: Path, short_folder: Path) -> None:
    agent = short_folder / "agent"
    text = config.read_text()
    limit_s = round(2 * slowness())  # a login has to come to its end in it
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as mute:
        mute.bind(str(agent))
        mute.listen()
        config.write_text(f"{text}  IdentityAgent {agent}\n")
        assert works(config, connect_timeout_s=limit_s), "the key file is taken"
        config.write_text(re.sub("IdentityFile .*", "IdentityFile none", config.read_text()))
        message = failure(config, connect_timeout_s=limit_s)
        assert f"tried: none found (the key agent at {agent} gave no answer within {limit_s} s)" in message
        config.write_text(f"Host *\n  GSSAPIAuthentication yes\n{config.read_text()}")
        options = SshOptions(ssh_config=config, connect_timeout_s=limit_s)
        assert choice._has_key(Targets(options).of(HOST)) is False


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_key_agent_that_never_signs_is_given_up(config: Path, sshd: LoopbackSshd, short_folder: Path) -> None:
    """As one does that asks a person who is not there (ssh-add -c)."""
    blob = base64.b64decode(Path(f"{sshd.user_key}.pub").read_text().split()[1])
    key = struct.pack(">I", len(blob)) + blob + struct.pack(">I", 3) + b"key"
    answer = struct.pack(">BI", 12, 1) + key  # SSH_AGENT_IDENTITIES_ANSWER, one key
    over = threading.Event()

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 10)
            connection.sendall(struct.pack(">I", len(answer)) + answer)
            over.wait()

    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(str(short_folder / "agent"))
        listening.listen()
        threading.Thread(target=serve, args=(listening,)).start()
        config.write_text(f"{config.read_text()}  IdentityAgent {short_folder / 'agent'}\n")
        message = failure(config, connect_timeout_s=2.0)
        over.set()
    assert "gives no answer" in message or f"does the key agent sign with {sshd.user_key} (agent)" in message


def test_a_name_server_that_gives_no_answer_is_given_up(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: over.wait() and [])
    for timeout_s in _TIMEOUTS_S:
        message = failure(config, connect_timeout_s=timeout_s)
        if "SSH config" not in message:
            break
    over.set()
    assert f'no name server has answered for "127.0.0.1" within {timeout_s:g} s' in message


def test_a_dead_address_of_a_name_leaves_time_for_the_next(sshd: LoopbackSshd) -> None:
    addresses = [(socket.AF_INET, ("127.0.0.1", port)) for port in (free_port(), sshd.port)]
    with contextlib.closing(connect._first_connected(addresses, 5.0)) as sock:
        assert sock.getpeername() == ("127.0.0.1", sshd.port)


def test_a_server_that_changes_its_key(tmp_path: Path, sshd: LoopbackSshd) -> None:
    with LoopbackSshd(tmp_path) as server:
        assert works(server.ssh_config)
        server.change_host_key()
        assert "has changed" in failure(server.ssh_config)
        server.stop()
        assert "connection refused" in failure(server.ssh_config)


def test_key_refused_names_the_keys_tried(config: Path, tmp_path: Path, sshd: LoopbackSshd) -> None:
    make_key(tmp_path / "stranger")
    make_key(tmp_path / "locked", passphrase="secret")
    config.write_text(
        config.read_text().replace(str(sshd.user_key), f"{tmp_path / 'stranger'}\n  IdentityFile {tmp_path / 'locked'}")
    )
    text = failure(config)
    assert "accepts none of our keys" in text
    assert str(tmp_path / "stranger") in text
    assert f"ssh-add {tmp_path / 'locked'}" in text
    assert "ssh-copy-id" in text


def test_several_identity_files_and_include(config: Path, tmp_path: Path, sshd: LoopbackSshd) -> None:
    make_key(tmp_path / "stranger")
    first = tmp_path / "first"
    first.write_text(f"Include {config}\n")
    config.write_text(
        config.read_text().replace("IdentityFile", f"IdentityFile {tmp_path / 'stranger'}\n  IdentityFile")
    )
    assert works(first)


def test_host_name_and_hostfile_port_win(config: Path, sshd: LoopbackSshd) -> None:
    config.write_text(
        "Host alias\n  HostName 127.0.0.3\n  Port 1\n" + config.read_text().replace("Host 127", "Host alias 127")
    )
    assert works(config, Host("alias", (0,), sshd.user, sshd.port))


def test_agent_keys_are_used(config: Path, sshd: LoopbackSshd, monkeypatch: pytest.MonkeyPatch) -> None:
    started = subprocess.run(["ssh-agent", "-s"], check=True, capture_output=True, text=True).stdout
    values = dict(re.findall(r"(SSH_\w+)=([^;]+);", started))
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    try:
        subprocess.run(["ssh-add", "-q", str(sshd.user_key)], check=True, capture_output=True)
        config.write_text(re.sub(r"  Identit.*\n", "", config.read_text()) + "  IdentityFile none\n")
        assert works(config)
    finally:
        os.kill(int(values["SSH_AGENT_PID"]), 15)


def test_jump_hosts_are_gone_through(config: Path, sshd: LoopbackSshd) -> None:
    text = config.read_text()
    config.write_text(f"Host 127.0.0.9\n  ProxyJump 127.0.0.7,{sshd.user}@127.0.0.8:{sshd.port}\n{text}")
    transport = make_transport(config)
    channel = transport.open(Host("127.0.0.9", (0,)))
    channel.write(b"exit 5\n")
    assert channel.wait(DEADLINE_S) == 5
    assert len(transport._connections) == 3
    transport.close()


def test_circular_jumps_end(config: Path) -> None:
    config.write_text("Host 127.0.0.*\n  ProxyJump 127.0.0.7\n" + config.read_text())
    transport = make_transport(config)
    with pytest.raises(TransportError, match="circle"):
        transport.open(HOST)


def test_proxy_command_and_bad_values_are_refused(config: Path, tmp_path: Path) -> None:
    text = config.read_text()
    config.write_text("Host *\n  ProxyCommand nc %h %p\n" + text)
    assert "leave out --ssh paramiko, or use ProxyJump" in failure(config)
    config.write_text("Host *\n  Port many\n  Pord 2\n" + text)
    assert f"ssh does not accept the SSH config: {config} line 2: Bad" in (refused := failure(config))
    assert f"{config}: line 3: Bad configuration option: pord" in refused


def test_no_proxy_command_is_none(config: Path) -> None:
    config.write_text("Host *\n  ProxyCommand none\n" + config.read_text())
    assert works(config)


def test_a_config_may_be_any_file_that_can_be_read(config: Path, tmp_path: Path) -> None:
    assert SshTransport(SshOptions(ssh_config=Path("/dev/null"))).target(HOST).port == 22
    read, write = os.pipe()
    os.write(write, config.read_bytes())
    os.close(write)
    pipe = Path(f"/dev/fd/{read}")
    assert works(pipe)
    assert works(pipe), "a pipe gives its text once, and a command may ask for it twice"
    os.close(read)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n")
    for name, problem in ((tmp_path, "is a folder"), ("no-such-config", "does not exist")):
        refused = run_here(tmp_path, "exec", "-H", "hosts", "-F", name, "true")
        assert (refused.code, refused.err.splitlines()[0]) == (2, f"✗ -F {name}: the SSH config {problem}")


def test_remedies_name_the_host_as_openssh_knows_it(config: Path, tmp_path: Path, sshd: LoopbackSshd) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    text = config.read_text().replace(str(sshd.known_hosts), str(empty)).replace("Host 127.0.0.*", "Host node")
    config.write_text(f"{text}  HostName 127.0.0.7\n  HostKeyAlias cluster-key\n")
    refusal = failure(config, Host("node", (0,)))
    assert f"accept the key with: ssh -F {config} node true" in refusal
    command = re.findall(r"accept the key with: (ssh .+ true);", refusal)[0]
    command = command.replace("ssh ", "ssh -o StrictHostKeyChecking=accept-new ", 1)
    subprocess.run(["/bin/sh", "-c", command], check=True, capture_output=True)
    assert empty.read_text().startswith("cluster-key ")
    assert works(config, Host("node", (0,)))


@pytest.fixture
def one_session(tmp_path: Path) -> Iterator[Path]:
    """The ssh_config of b1 to b16, all names of one server that allows one session on a connection."""
    with LoopbackSshd(tmp_path / "server", settings="MaxSessions 1\n") as server:
        text = server.ssh_config.read_text().replace("Host 127.0.0.*", "Host b*")
        (tmp_path / "config").write_text(f"{text}  HostName 127.0.0.1\n  HostKeyAlias [127.0.0.1]:{server.port}\n")
        yield tmp_path / "config"


@pytest.mark.parametrize("num_names", [1, 2, 5, 10, 16])
def test_all_names_of_a_server_with_one_session_a_connection_are_opened_at_once(
    one_session: Path, num_names: int
) -> None:
    transport = SshTransport(SshOptions(ssh_config=one_session, shell_only=True))
    with ThreadPoolExecutor(num_names) as pool:
        channels = list(pool.map(transport.open, [Host(f"b{number + 1}", (0,)) for number in range(num_names)]))
    for channel in channels:
        channel.write(b"exit 5\n")
    assert [channel.wait(DEADLINE_S) for channel in channels] == [5] * num_names
    transport.close()


@pytest.mark.parametrize("client", ["paramiko", "openssh"])
def test_commands_on_all_names_of_such_a_server(one_session: Path, tmp_path: Path, client: str) -> None:
    (tmp_path / "hosts").write_text("b[1-16] slots=1\n")
    words = ("-H", "hosts", "-F", one_session, "--ssh", client)
    result = run_here(tmp_path, "exec", *words, "echo", "here")
    assert (result.code, result.out_of_hosts) == (0, {f"b{n}": "here\n" for n in range(1, 17)}), result.err
    (tmp_path / "t.py").write_text("print('here')\n")
    result = run_launch(tmp_path, *words, "-i", "b[1-4]", "--master-addr", "127.0.0.1", "t.py")
    assert (result.code, result.out.count("here")) == (0, 4), result.err


def test_identical_findings_of_hosts_are_told_once(tmp_path: Path, sshd: LoopbackSshd) -> None:
    hostfile, config = tmp_path / "hosts", tmp_path / "config"
    hostfile.write_text("127.0.0.[1-8] slots=1\nno-such-[1-2].invalid slots=1\n")
    config.write_text(sshd.ssh_config.read_text().replace(str(sshd.known_hosts), str(tmp_path / "none")))
    (tmp_path / "train.py").touch()
    result = run_launch(tmp_path, "--hostfile", hostfile, "-F", config, "train.py")
    assert result.code == 69
    assert f"✗ 127.0.0.[1-8]: host key of {sshd.user}@HOST port {sshd.port} is not known\n" in result.err
    assert f"with: ssh -F {config} HOST true; or, on a network you trust" in result.err
    assert '✗ no-such-[1-2].invalid: host name "HOST" cannot be resolved\n' in result.err
    assert len(result.said.splitlines()) == 4
    accepted = run_launch(tmp_path, "exec", "-H", hostfile, "-i", "127.0.0.[1-8]", "-F", config,
                          "--accept-new-host-keys", "true")  # fmt: skip
    assert accepted.code == 0, accepted.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody without a name")
def test_a_user_without_name_and_home_is_told_so() -> None:
    code = (
        "import os\nfrom launcher.transport.ssh.config import *\n"
        "os.setuid(54321); [os.environ.pop(n, 0) for n in ('HOME', 'USER', 'LOGNAME', 'LNAME', 'USERNAME')]\n"
        "try: Targets(SshOptions()).of(Host('a', (0,)))\n"
        "except TransportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert "a: No user exists for uid 54321" in done.stdout, done.stderr
