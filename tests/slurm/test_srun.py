"""The two pipes of one srun under a flood: no node and no direction waits for another. A script plays srun."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import DEADLINE_S, ROOT, wait_until

from launcher.agent.wire import Call, Decoder, Output, Ping, Pong, Spawn, Started, Stop, encode
from launcher.base import env
from launcher.base.errors import TransportError
from launcher.cluster.cluster import Host
from launcher.fleet.agent_link import AgentLink
from launcher.job.node import pieces_of
from launcher.plan.plan import new_job_id
from launcher.slurm import srun
from launcher.slurm.framing import ALL, DATA, LineReader, encode_lines
from launcher.slurm.srun import SrunChannel, SrunTransport

NUM_SRUN_BUFFERS = 1024  # a line each, for all nodes together
FLOOD_BYTES = 8 << 20


def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, nodes: int = 2) -> list[SrunChannel]:
    """Open channels to nodes behind a script that stands for srun."""
    program = tmp_path / "srun"
    program.write_text(f"#!{sys.executable}\nimport sys, time\nsys.path.insert(0, {str(ROOT)!r})\n{body}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = [Host(f"n{number + 1}", (0,)) for number in range(nodes)]
    transport = SrunTransport(hosts, root=ROOT)
    return [transport.open(host) for host in hosts]


def test_a_channel_nobody_reads_keeps_nothing_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"""
from launcher.slurm.framing import DATA, encode_lines
sys.stdout.buffer.write(encode_lines("n1", DATA, bytes({FLOOD_BYTES})) + encode_lines("n2", DATA, b"alive"))
sys.stdout.flush()
sys.stdin.read()
"""
    first, second = play(tmp_path, monkeypatch, body)
    assert second.read(100) == b"alive"
    num_bytes = 0
    while num_bytes < FLOOD_BYTES:
        num_bytes += len(first.read(1 << 16))
    first.close()
    second.close()


TELL_PIDS = """
import os, signal
def tell(*pids):
    with open(f"{__file__}.part", "w") as file:
        print(*pids, file=file)
    os.rename(file.name, f"{__file__}.pids")
"""
# srun and the process it forks, of which neither ends by itself, as when Slurm has gone.
STUCK = f"""{TELL_PIDS}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    tell(os.getpid(), child)
while True:
    signal.pause()
"""
SHORTLY = "launcher.slurm.srun._ORPHAN_S", "launcher.slurm.srun._FORK_S"


def pids_of_srun(tmp_path: Path) -> list[int]:
    path = tmp_path / "srun.pids"
    wait_until(path.exists, "srun")
    return [int(word) for word in path.read_text().split()]


def is_group_empty(leader: int) -> bool:
    """Tell whether no process of the group is alive; init may take its time to bury one."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state not in ("Z", "X"):
                return False
    return True


def test_a_stuck_srun_does_not_outlive_a_killed_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SHORTLY:
        monkeypatch.setattr(name, 1)
    launcher = os.fork()
    if launcher == 0:
        try:
            play(tmp_path, monkeypatch, STUCK)
            signal.pause()
        finally:
            os._exit(1)
    leader, fork = pids_of_srun(tmp_path)
    assert os.getpgid(fork) == leader
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    wait_until(lambda: is_group_empty(leader), "the end of srun and its guard")


def test_a_stuck_srun_is_ended_with_its_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SHORTLY, "launcher.slurm.srun._END_S"):
        monkeypatch.setattr(name, 1)
    channels = play(tmp_path, monkeypatch, STUCK)
    leader, _ = pids_of_srun(tmp_path)
    for channel in channels:
        channel.close()
    wait_until(lambda: is_group_empty(leader), "the end of srun's fork and its guard")


def test_the_guard_goes_with_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    channels = play(tmp_path, monkeypatch, f"{TELL_PIDS}\ntell(os.getpid())\nsys.stdin.read()")
    (leader,) = pids_of_srun(tmp_path)
    for channel in channels:
        channel.close()
    wait_until(lambda: is_group_empty(leader), "the end of the guard")


def test_a_step_ends_where_the_ends_of_children_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # which exec keeps
words = sys.argv[sys.argv.index("--chdir=/") + 1 :]
os.execv(words[0], words)
"""
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    (channel,) = play(tmp_path, monkeypatch, body, nodes=1)
    channel.close_stdin()
    while channel.read(1 << 16):
        pass
    assert channel.wait(DEADLINE_S) == 0, channel.stderr_tail()
    channel.close()


def test_srun_does_not_get_the_options_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("SLURM_CPUS_PER_TASK", "SLURM_EXACT", "SRUN_CPUS_PER_TASK")
    for name in names:
        monkeypatch.setenv(name, "1")
    body = f"""
import os
from launcher.slurm.framing import DATA, END, encode_lines
got = [name for name in {names!r} if name in os.environ]
sys.stdout.buffer.write(encode_lines("n1", DATA, repr(got).encode()))
sys.stdout.flush()
sys.stdin.read()
"""
    (channel,) = play(tmp_path, monkeypatch, body, nodes=1)
    assert channel.read(100) == b"[]"
    channel.close()


def test_writing_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What srun does not take is kept, in order, and no writer waits for it."""
    body = f"""
import hashlib, os
from launcher.slurm.framing import DATA, LineReader, encode_lines
while not os.path.exists({str(tmp_path / "go")!r}) and os.getppid() != 1:
    time.sleep(0.01)
reader, told = LineReader(), hashlib.sha256()
while data := os.read(0, 1 << 16):
    for line in reader.feed(data):
        if line.kind == DATA:
            told.update(line.body)
sys.stdout.buffer.write(encode_lines("n1", DATA, told.digest()))
"""
    (channel,) = play(tmp_path, monkeypatch, body, nodes=1)
    sent = os.urandom(FLOOD_BYTES)
    channel.write(sent[: FLOOD_BYTES // 2])
    channel.write(sent[FLOOD_BYTES // 2 :])
    channel.close_stdin()
    (tmp_path / "go").touch()
    assert channel.read(100) == hashlib.sha256(sent).digest()
    channel.close()


@pytest.mark.parametrize("nodes", [1, 3, 64, 200])
def test_output_of_all_nodes_leaves_buffers_of_srun_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """When all are taken, srun passes on what comes from one node and nothing of another."""
    channels = play(tmp_path, monkeypatch, "sys.stdin.read()\n", nodes)
    lines = 0
    for channel in channels:
        data = bytes(channel.window_bytes)
        lines += encode_lines(channel.host_name, DATA, encode(Output(99_999, "stdout", data))).count(b"\n")
        channel.close()
    assert lines <= NUM_SRUN_BUFFERS - nodes  # a line of each has to pass beside it


@pytest.fixture
def relay() -> Iterator[subprocess.Popen[bytes]]:
    environ = {**os.environ, env.SLURMD_NODENAME.name: "n1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher.agent.relay"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    )
    yield process
    process.send_signal(signal.SIGKILL)
    process.communicate()


def _has_room(pipe: Path) -> bool:
    with pipe.open("wb", buffering=0) as end:
        poller = select.poll()
        poller.register(end, select.POLLOUT)
        return bool(poller.poll(0))


def test_an_agent_hears_orders_while_srun_takes_no_output(relay: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert relay.stdin is not None
    assert relay.stdout is not None
    script = scripts.write(tmp_path, "import sys\nwhile True: sys.stdout.write('x' * 65536)")
    spawn = Spawn(new_job_id(), [["script", str(script)]], str(tmp_path), {}, [{"RANK": "0"}], None, 0.0)
    relay.stdin.write(encode_lines("n1", DATA, encode(spawn)))
    relay.stdin.flush()
    reader, decoder, pid = LineReader(), Decoder(expect_magic=True), 0
    has_flooded = False
    while not has_flooded:
        for line in reader.feed(os.read(relay.stdout.fileno(), 1 << 16)):
            for message in decoder.feed(line.body):
                pid = message.pid if isinstance(message, Started) else pid
                has_flooded = has_flooded or isinstance(message, Output)
    # From here on nobody reads: the relay waits in a write.
    wait_until(lambda: not _has_room(Path(f"/proc/{relay.pid}/fd/1")), "a full pipe")
    relay.stdin.write(encode_lines("n1", DATA, encode(Stop(0.0))))
    relay.stdin.flush()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the rank")


def test_what_is_for_all_nodes_passes_srun_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    channels = play(
        tmp_path, monkeypatch, f"open({str(tmp_path / 'seen')!r}, 'wb').write(sys.stdin.buffer.read())\n", 3
    )
    pieces = pieces_of(bytes(range(256)) * (40 << 12))
    assert len(pieces) == 40

    def start(channel: SrunChannel) -> None:
        for frame in (encode(Ping()), *pieces, encode(Stop(float(channel.host_name[1:])))):
            channel.write(frame)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(start, channels))
    for channel in channels:
        channel.close_stdin()
    channels[0]._step._process.wait(DEADLINE_S)  # `close` would give it seconds only
    for channel in channels:
        channel.close()
    lines = list(LineReader().feed((tmp_path / "seen").read_bytes()))
    for number in range(1, 4):
        decoder = Decoder(expect_magic=False)
        mine = b"".join(line.body for line in lines if line.node in (f"n{number}", ALL) and line.kind == DATA)
        *others, last = decoder.feed(mine)
        assert last == Stop(float(number))
        others.remove(Ping())  # a piece may overtake it
        assert others == [*Decoder(expect_magic=False).feed(b"".join(pieces))]
    assert sum(len(line.body) for line in lines if line.node == ALL) == sum(map(len, pieces))


def test_what_is_for_all_nodes_waits_for_room_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "never")
    (channel,) = play(tmp_path, monkeypatch, f"open({str(tmp_path / 'never')!r})\n", 1)
    pieces, ended = pieces_of(bytes(100 << 20)), threading.Event()

    def start() -> None:
        with contextlib.suppress(TransportError):
            for piece in pieces:
                channel.write(piece)
        ended.set()

    threading.Thread(target=start).start()
    step = channel._step
    wait_until(lambda: step._shared_room._value == 0, "the queue to fill")
    assert step._outbox.qsize() <= srun._MAX_SHARED
    assert not ended.is_set()
    step._process.kill()
    assert ended.wait(DEADLINE_S)
    channel.close()


def test_a_relay_passes_on_what_is_for_all_nodes(relay: subprocess.Popen[bytes]) -> None:
    assert relay.stdin is not None
    assert relay.stdout is not None
    relay.stdin.write(encode_lines("n2", DATA, encode(Stop(0.0))) + encode_lines(ALL, DATA, encode(Ping())))
    relay.stdin.flush()
    reader, decoder, has_answered = LineReader(), Decoder(expect_magic=True), False
    while not has_answered:
        for line in reader.feed(os.read(relay.stdout.fileno(), 1 << 16)):
            has_answered = any(isinstance(message, Pong) for message in decoder.feed(line.body)) or has_answered


def test_a_call_is_encoded_once_for_all_nodes() -> None:
    pieces = pieces_of(b"x" * (3 << 20))
    assert [*Decoder(expect_magic=False).feed(b"".join(pieces))] == [Call(b"x" * (1 << 20))] * 3
    agents = [AgentLink(Host(name, (0,))) for name in ("a", "b")]
    for agent in agents:
        for piece in pieces:
            agent.send_frame(piece)
        assert all(agent._sender._outbox.get() is piece for piece in pieces)
