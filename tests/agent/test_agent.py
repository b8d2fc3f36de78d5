"""A real agent over pipes, spoken to message by message."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.agents import Agent, spawn
from harness.launch.command import DEADLINE_S, ROOT, slowness, wait_until, wait_until_gone
from harness.ports import free_port

from launcher.agent import ports, supervisor
from launcher.agent.wire import (
    Bye,
    Exited,
    Handled,
    Hello,
    Lease,
    LeftBehind,
    MasterTried,
    Output,
    PickPort,
    Ping,
    Pong,
    PortPicked,
    Progress,
    Spawn,
    SpawnFailed,
    Started,
    Stop,
    Sweep,
    TryMaster,
    encode,
)
from launcher.base.processes import members_of_job
from launcher.plan.plan import new_job_id


@pytest.fixture
def agent() -> Iterator[Agent]:
    started = Agent()
    assert isinstance(started.receive(), Hello)
    with started.process:  # closes its pipes
        yield started
        started.process.kill()


def test_an_agent_whose_parent_ignores_the_ends_of_children_ends(tmp_path: Path) -> None:
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # which exec keeps
    try:
        started = Agent()
    finally:
        signal.signal(signal.SIGCHLD, handler)
    with started.process:
        started.send(spawn(scripts.write(tmp_path, "raise SystemExit(3)")))
        ends = [message.status for message in started.receive_all() if isinstance(message, Exited)]
        assert (ends, started.process.wait(DEADLINE_S)) == ([3], 0)


def test_a_start_that_takes_longer_than_the_lease_ends_nothing(agent: Agent, tmp_path: Path) -> None:
    """Each started rank is reported at once, so the launcher hears from the host; its own silence does not count."""
    job = spawn(scripts.write(tmp_path, "import time; time.sleep(600)"), ranks=150, lease_s=0.2, grace_s=0.0)
    begin_s = time.monotonic()
    agent.send(job)
    assert isinstance(agent.receive(), Started)
    agent.send(Lease(60.0))  # read after the start: this test may be slow
    assert len(members_of_job(job.job_id)) < 150, "all were reported together, at the end"
    for _ in range(149):
        assert isinstance(agent.receive(), Started)
    assert time.monotonic() - begin_s > 0.2, "the start was too quick to show anything"
    answers = iter(agent.receive, None)
    assert isinstance(next(one for one in answers if not isinstance(one, Progress)), Pong), "the ranks were ended"
    agent.send(Stop(0.0))
    assert sum(isinstance(message, Exited) for message in agent.receive_all()) == 150
    wait_until_gone(job.job_id)


def test_output_of_every_kind_arrives_whole_and_before_the_exit(agent: Agent, tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, sys
        os.write(1, bytes(range(256)) * 4096)
        os.write(2, b"to stderr")
        sys.exit(4)
        """,
    )
    agent.send(spawn(script))
    messages = agent.receive_all()
    out = b"".join(m.data for m in messages if isinstance(m, Output) and m.stream == "stdout")
    err = b"".join(m.data for m in messages if isinstance(m, Output) and m.stream == "stderr")
    assert out == bytes(range(256)) * 4096
    assert err == b"to stderr"
    assert isinstance(messages[0], Started)
    exited, bye = messages[-2:]
    assert isinstance(exited, Exited)
    assert (exited.rank, exited.status) == (0, 4)
    assert bye == Bye()
    assert agent.process.wait(DEADLINE_S) == 0


def test_a_traceback_comes_as_a_record(agent: Agent, tmp_path: Path) -> None:
    agent.send(spawn(scripts.write(tmp_path, "def f():\n    raise KeyError('missing')\nf()\n")))
    (exited,) = [m for m in agent.receive_all() if isinstance(m, Exited)]
    assert exited.status == 1
    assert exited.record is not None
    assert exited.record["type"] == "KeyError"
    assert "in f" in exited.record["traceback"]
    assert "launcher" not in exited.record["traceback"]  # frames of ours would hide the user's


def test_a_picked_port_can_be_bound(agent: Agent) -> None:
    agent.send(PickPort())
    answer = agent.receive()
    assert isinstance(answer, PortPicked)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", answer.port))
        probe.listen()
        agent.send(PickPort(answer.port))
        assert agent.receive() == PortPicked(0, "is in use")
    agent.send(PickPort(answer.port))
    assert agent.receive() == answer


def test_the_master_is_tried_before_there_are_ranks(agent: Agent) -> None:
    closed = free_port()
    cases = (
        ("127.0.0.1", closed, None),
        ("127.0.0.1", 0, None),
        ("no-such-host.invalid", closed, "cannot be resolved"),
    )
    for address, port, problem in cases:
        agent.send(TryMaster(address, port))
        assert agent.receive() == MasterTried(problem)


def test_a_master_that_gives_no_answer_is_no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_MASTER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        with contextlib.closing(socket.create_connection(("127.0.0.1", port))):  # there is room for no other
            assert ports.problem_of_master("127.0.0.1", port) == f"gives no answer at port {port}"


def test_a_picked_port_is_none_that_outgoing_connections_take(agent: Agent) -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if low < 32_768:
        pytest.skip("this machine takes ports for outgoing connections from an unusual range")
    for _ in range(20):
        agent.send(PickPort())
        answer = agent.receive()
        assert isinstance(answer, PortPicked)
        assert not low <= answer.port <= high


def test_all_that_a_failing_rank_wrote_is_there_at_its_end(agent: Agent, tmp_path: Path) -> None:
    """The rank's end is seen while most of what it wrote is still in its pipe."""
    agent.send(spawn(scripts.write(tmp_path, "import os; os.write(1, b'x' * 900_000); os._exit(3)")))
    messages = agent.receive_all()
    assert sum(len(m.data) for m in messages if isinstance(m, Output)) == 900_000
    assert [type(m) for m in messages[-2:]] == [Exited, Bye]


def test_a_controller_that_reads_slowly_holds_the_ranks_up(agent: Agent, tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os
        for number in range(40):
            os.write(1, b"x" * 1_000_000)
            print(number, file=open("part", "w"), flush=True)
            os.replace("part", "written")
        """,
    )
    agent.send(spawn(script))
    assert isinstance(agent.receive(), Started)
    written = tmp_path / "written"
    wait_until(written.exists, "the first output")
    text = ""
    while text != (text := written.read_text()):
        time.sleep(1.0)
    # What may wait: 4 MiB in the agent, a pipe of 1 MiB before it, one behind it, and what one turn reads.
    assert int(text) < 8
    memory = Path(f"/proc/{agent.pid}/status").read_text()
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", memory)
    assert int(peak_kib) < 64 << 10
    assert sum(len(m.data) for m in agent.receive_all() if isinstance(m, Output)) == 40_000_000


def test_a_slot_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from launcher.agent import spawn as spawning
    from launcher.base.errors import UsageError
    from launcher.cluster.devices import NVIDIA, Devices

    def check(devices: str, num_devices: int) -> None:
        here = Devices(NVIDIA, tuple("01234567"[:num_devices]))
        monkeypatch.setattr(spawning, "_devices_here", lambda: here)
        rank_envs = [{"RANK": "0", "CUDA_VISIBLE_DEVICES": devices}]
        spawning.check_devices(Spawn("a-b-0000", [], "/", {}, rank_envs, None, 1.0))

    check("0,1", 2)
    check("7", 0)  # no GPU at all: the ranks run on the CPU
    with pytest.raises(UsageError, match="slot 2 has no GPU: this host has 2"):
        check("0,2", 2)


def test_a_signal_together_with_an_order_to_start_ranks_ends_the_agent_in_order(tmp_path: Path) -> None:
    """The agent is stopped while both arrive, so that it finds them at the same moment."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        agent = Agent(stderr=subprocess.PIPE)
        assert isinstance(agent.receive(), Hello)
        spec = spawn(scripts.write(tmp_path, "import time; time.sleep(600)"), grace_s=0.2)
        with agent.process:
            os.kill(agent.pid, signal.SIGSTOP)
            agent.send(spec)
            os.kill(agent.pid, number)
            os.kill(agent.pid, signal.SIGCONT)
            agent.receive_all()
            assert agent.process.stderr is not None
            assert b"Traceback" not in agent.process.stderr.read()
            assert agent.process.wait(DEADLINE_S) == 0
        wait_until_gone(spec.job_id)


@pytest.mark.parametrize("state", ["waiting", "flushing"])
def test_an_agent_leaves_when_the_controller_is_silent_before_ranks_and_after_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str
) -> None:
    """The stream to the controller is open and nobody reads it, as after a network was cut."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'launcher.agent.main' in sys.orig_argv:\n"
        "    from launcher.agent import supervisor\n    supervisor._WAITING_LEASE_S = 1.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    agent = Agent()
    with agent.process:
        if state == "flushing":
            script = scripts.write(tmp_path, "import os; os.write(1, b'x' * 3_000_000)")
            agent.send(spawn(script, lease_s=2.0))
        assert agent.process.wait(DEADLINE_S) == 0


def test_damage_in_what_the_agent_is_sent_ends_it_with_a_word(tmp_path: Path) -> None:
    agent = Agent(stderr=subprocess.PIPE)
    with agent.process:
        assert isinstance(agent.receive(), Hello)
        assert agent.process.stdin is not None
        agent.process.stdin.write(b"\xff" * 8)
        agent.process.stdin.flush()
        assert agent.process.wait(DEADLINE_S) == 0
        assert agent.process.stderr is not None
        assert agent.process.stderr.read() == b"the agent's stream is damaged: impossible frame length\n"


def test_children_of_ranks_of_which_one_failed_get_no_time_and_no_word(agent: Agent, tmp_path: Path) -> None:
    """Whatever the last rank ended with: a launcher that is slow to say so has not asked for the end yet."""
    script = scripts.write(
        tmp_path,
        """
        import os, subprocess, sys, time
        if os.environ["RANK"] == "0":
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            open("failed", "w").close()
            sys.exit(3)
        while not os.path.exists("failed"):
            time.sleep(0.02)
        time.sleep(1.0)  # rank 0 is to end first
        """,
    )
    order = spawn(script, ranks=2)
    agent.send(order)
    messages = agent.receive_all()
    assert [message.status for message in messages if isinstance(message, Exited)] == [3, 0]
    assert not any(isinstance(message, LeftBehind) for message in messages)
    assert messages[-1] == Bye()
    wait_until_gone(order.job_id)


def test_a_later_order_with_a_longer_grace_changes_nothing(agent: Agent, tmp_path: Path) -> None:
    agent.send(spawn(scripts.write(tmp_path, scripts.STUBBORN)))
    while not isinstance(message := agent.receive(), Output):
        assert message is not None
    assert message.data.startswith(b"READY")
    agent.send(Stop(0.3))
    agent.send(Stop(10_000.0))
    assert agent.receive_all()[-1] == Bye()


def test_stop_gives_one_grace_to_all_and_then_kills(agent: Agent, tmp_path: Path) -> None:
    spec = spawn(scripts.write(tmp_path, scripts.STUBBORN), ranks=3)
    agent.send(spec)
    ready = 0
    while ready < 3:
        message = agent.receive()
        ready += isinstance(message, Output) and b"READY" in message.data
    grace_s = 2.0 * slowness()
    start_s = time.monotonic()
    agent.send(Stop(grace_s))
    messages = agent.receive_all()
    assert grace_s <= time.monotonic() - start_s < 2.75 * grace_s, "one grace, and not one after the other"
    assert sorted(m.status for m in messages if isinstance(m, Exited)) == [-9, -9, -9]
    assert messages[-1] == Bye()
    assert not members_of_job(spec.job_id)


def test_a_silent_controller_ends_the_lease(agent: Agent, tmp_path: Path) -> None:
    spec = spawn(scripts.write(tmp_path, "import time; time.sleep(600)"), lease_s=3.0, grace_s=0.5)
    agent.send(spec)
    for _ in range(12):  # as long as messages come, the lease lasts
        time.sleep(0.3)
        agent.send(Ping())
    assert agent.process.poll() is None
    assert agent.process.wait(DEADLINE_S) == 0
    wait_until_gone(spec.job_id)


def test_a_closed_stream_ends_the_ranks(agent: Agent, tmp_path: Path) -> None:
    spec = spawn(scripts.write(tmp_path, "import time; time.sleep(600)"), grace_s=0.5)
    agent.send(spec)
    assert isinstance(agent.receive(), Started)
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    assert agent.process.wait(DEADLINE_S) == 0
    wait_until_gone(spec.job_id)


@pytest.mark.parametrize("killed", ["agent", "guard"])
def test_a_killed_agent_takes_its_ranks_along(agent: Agent, tmp_path: Path, killed: str) -> None:
    spec = spawn(scripts.write(tmp_path, "import time; print('UP'); time.sleep(600)"))
    agent.send(spec)
    while not isinstance(agent.receive(), Output):
        pass
    os.kill(agent.pid if killed == "agent" else agent.process.pid, signal.SIGKILL)
    assert not any(isinstance(message, Bye) for message in agent.receive_all())
    assert not members_of_job(spec.job_id), "all had ended at the end of the stream"


def test_heartbeats_are_reported_as_often_as_was_asked_for(agent: Agent, tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import time, launcher
        for _ in range(40):
            launcher.heartbeat()
            time.sleep(0.02)
        """,
    )
    agent.send(spawn(script, progress_interval_s=0.05))
    counts = [message.count for message in agent.receive_all() if isinstance(message, Progress)]
    assert len(set(counts)) >= 4, "a report a second would be one or two"
    assert counts == sorted(counts)


def test_journals_are_read_with_the_heartbeats(agent: Agent, tmp_path: Path) -> None:
    """The first is read at the start, too; the last when the rank has exited."""
    write = "os.write(int(os.environ['LAUNCH_JOURNAL_FD'].partition(':')[2]), b'x' * 100)"
    agent.send(spawn(scripts.write(tmp_path, f"import os, time\nfor _ in range(200): {write}; time.sleep(0.01)")))
    begin_s = time.monotonic()
    reads = [m for m in agent.receive_all() if isinstance(m, Output) and m.stream == "journal"]
    assert sum(len(m.data) for m in reads) == 20_000
    assert len(reads) <= time.monotonic() - begin_s + 3


FLOOD = """
import fcntl, os
fd = int(os.environ["LAUNCH_JOURNAL_FD"].partition(":")[2])
fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, {pipe_bytes})
for _ in range({num_bytes} // 1024):
    os.write(fd, b"x" * 1024)
"""


@pytest.mark.parametrize(("pipe_bytes", "num_bytes"), [(65_536, 8 << 20), (4_096, 512 << 10)])
def test_a_journal_that_is_flooded_is_read_as_it_comes(
    agent: Agent, tmp_path: Path, pipe_bytes: int, num_bytes: int
) -> None:
    """Heartbeats alone would take 128 of them: one for each time that the pipe is full."""
    script = scripts.write(tmp_path, FLOOD.format(pipe_bytes=pipe_bytes, num_bytes=num_bytes))
    agent.send(spawn(script, progress_interval_s=1.0))
    begin_s = time.monotonic()
    reads = [m for m in agent.receive_all() if isinstance(m, Output) and m.stream == "journal"]
    assert sum(len(m.data) for m in reads) == num_bytes
    assert len(reads) > 2 * (time.monotonic() - begin_s)


def test_all_journals_are_read_where_there_is_room_for_a_part_of_one_at_a_time(agent: Agent, tmp_path: Path) -> None:
    """As under srun on many nodes: at each heartbeat the first ranks took the room, and the last waited for 32 more."""
    wait = "while not os.path.exists('end'): time.sleep(0.01)"
    script = scripts.write(tmp_path, f"import time\n{FLOOD.format(pipe_bytes=65_536, num_bytes=32 << 10)}\n{wait}")
    agent.send(spawn(script, ranks=4, window_bytes=4096, progress_interval_s=2.0))
    begin_s = time.monotonic()
    received: dict[int, int] = defaultdict(int)
    while any(received[rank] < 32 << 10 for rank in range(4)):
        message = agent.receive()
        if isinstance(message, Output) and message.stream == "journal":
            received[message.rank] += len(message.data)
            agent.send(Handled(message.cost_bytes))
    assert time.monotonic() - begin_s < 20 * slowness()
    (tmp_path / "end").touch()
    assert [m.status for m in agent.receive_all() if isinstance(m, Exited)] == [0] * 4


def test_a_folder_that_is_missing_is_named(agent: Agent, tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "pass")
    agent.send(Spawn(new_job_id(), [["script", str(script)]], str(tmp_path / "gone"), {}, [{"RANK": "0"}], None, 1.0))
    messages = agent.receive_all()
    assert isinstance(messages[0], SpawnFailed)
    assert re.search(r"gone: No such file or directory", messages[0].reason)
    assert messages[-1] == Bye()


def test_sweep_ends_what_carries_the_job_id_and_nothing_else(agent: Agent) -> None:
    job_id = new_job_id()
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    processes = [
        subprocess.Popen(sleeper, env={**os.environ, "LAUNCH_JOB_ID": name}, start_new_session=True)
        for name in (job_id, job_id + "0")  # the second one's id only begins alike
    ]
    try:
        wait_until(lambda: len(members_of_job(job_id)) == 1, "the first sleeper")
        agent.send(Sweep(job_id))
        assert agent.receive_all() == [Bye()]
        assert processes[0].wait(DEADLINE_S) == -9
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_the_agent_imports_nothing_but_the_standard_library() -> None:
    code = "import sys, launcher.agent.main, launcher.worker; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(eval(done.stdout))
    assert not loaded & {"torch", "click", "paramiko", "pydantic", "yaml", "rich", "numpy"}


def test_a_drained_pipe_that_is_filled_as_fast_as_it_is_read_does_not_hold_the_agent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from launcher.agent import ranks
    from launcher.agent import spawn as spawning
    from launcher.agent.wire import Outbox

    real_read = os.read
    reads: list[int] = []

    def read_while_a_child_writes(descriptor: int, num_bytes: int) -> bytes:
        reads.append(descriptor)
        assert len(reads) < 100
        os.write(write, b"x" * 1000)
        return real_read(descriptor, num_bytes)

    commands, output = os.pipe()
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.write(write, b"x" * 1000)
    process = subprocess.Popen(["true"], stdout=subprocess.PIPE)
    rank = spawning.RankProcess(0, process, {read: "stdout"}, defaultdict(str), 0)
    of_node = ranks.Ranks(Outbox(output), selectors.DefaultSelector())
    with process:
        monkeypatch.setattr(ranks.os, "read", read_while_a_child_writes)
        of_node._drain(rank, read)
        monkeypatch.undo()
    assert len(reads) == 1
    for descriptor in (commands, output, read, write):
        os.close(descriptor)


def test_a_message_that_waits_to_be_read_renews_the_lease() -> None:
    """The agent may get no processor between its look for messages and its look at the clock."""
    (commands, sender), (reader, output) = os.pipe(), os.pipe()
    agent = supervisor.Supervisor(commands, output)
    agent._selector.register(commands, selectors.EVENT_READ)
    agent._lease_s = -1.0
    os.write(sender, encode(Ping()))
    agent._check_deadlines()
    assert agent._outbox.is_connected
    os.read(commands, 1 << 16)
    agent._check_deadlines()
    assert not agent._outbox.is_connected
    for descriptor in (commands, sender, reader, output):
        os.close(descriptor)


def test_an_environment_that_is_too_large_is_named(agent: Agent, tmp_path: Path) -> None:
    spec = spawn(scripts.write(tmp_path, ""), env={"HUGE": "x" * (200 << 10)})
    agent.send(spec)
    (failed,) = [m for m in agent.receive_all() if isinstance(m, SpawnFailed)]
    assert "the largest variable is HUGE, 200.0 KiB; one may have 128.0 KiB" in failed.reason
    assert "into a file" in str(failed.hint)


def test_a_notice_before_a_rank_listens_waits_for_it(tmp_path: Path) -> None:
    """The rank is stopped in its first moment, and told: it must neither die nor miss it."""
    hold = scripts.write(tmp_path, "import launcher, sys; sys.exit(75 if launcher.preempted() else 3)")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\nif 'launcher.worker' in sys.orig_argv: os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    agent = Agent()
    assert isinstance(agent.receive(), Hello)
    with agent.process:
        agent.send(spawn(hold, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}))
        (exited,) = [m for m in agent.receive_all() if isinstance(m, Exited)]
    assert exited.status == 75


def test_no_more_output_is_on_its_way_than_the_window(agent: Agent, tmp_path: Path) -> None:
    """What is not handled holds the rank up, and nothing else: the agent answers, and the rank can be ended."""
    script = scripts.write(tmp_path, "import sys; sys.stdout.write('x' * 8_000_000); open('done', 'w').close()")
    window_bytes = 1 << 20
    agent.send(spawn(script, window_bytes=window_bytes))
    num_bytes = cost_bytes = 0
    while True:
        agent.send(Ping())
        while not isinstance(message := agent.receive(), (Pong, Exited)):  # the rank may end before the answer
            if isinstance(message, Output):
                num_bytes += len(message.data)
                cost_bytes += message.cost_bytes
        assert cost_bytes <= window_bytes + 2 * Output(0, "", b"").cost_bytes  # the last of each stream may go over it
        if isinstance(message, Exited):
            break
        if cost_bytes > window_bytes * 3 // 4:  # it waits for more room than there is
            assert not (tmp_path / "done").exists() or num_bytes > 5_000_000  # the rest may be in the rank's pipe
            agent.send(Handled(cost_bytes))
            cost_bytes = 0
    assert num_bytes == 8_000_000
    assert [type(message) for message in agent.receive_all() if not isinstance(message, Pong)] == [Bye]
