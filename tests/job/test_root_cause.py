"""Which failure is called the first, whatever order the news arrives in."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, cast

import pytest

from launcher.agent.wire import Exited, SpawnFailed
from launcher.cluster.cluster import Cluster, Host, NodePlacement, place
from launcher.job.events import Failure
from launcher.job.logs import RankLog
from launcher.job.node import Node, Rank
from launcher.job.root_cause import RootCause, memory_of
from launcher.plan.plan import Command, JobPlan
from launcher.planner.ladder import EngineFacts

PLAN = JobPlan(
    "job", place(Cluster((Host("a", (0,)),))), Command("script", "t.py", ()), "/", Path("runs"), "a", None, {}, {}
)


class NoChannel:
    window_bytes = None

    def stderr_tail(self) -> str:
        return "Connection to node-b closed."


def node(name: str = "node-a", clock_offset_s: float = 0.0) -> Node:
    made = Node(NodePlacement(0, Host(name, (0, 1)), 0), PLAN, *[cast(Any, None)] * 4)
    made.channel, made.clock_offset_s = cast(Any, NoChannel()), clock_offset_s
    return made


def exited(rank: int, status: int, time_s: float, message: str = "", **more: Any) -> Exited:
    record = {"time_s": time_s, "type": "RuntimeError", "message": message, "traceback": message} if message else None
    return Exited(rank, status, time_s, record, more.get("max_rss_bytes", 0), more.get("oom"))


class Book:
    """The root cause of a run whose ranks appear with their failures."""

    def __init__(self, start_s: float) -> None:
        self.root = RootCause(start_s)

    @property
    def cause(self) -> Failure | None:
        return self.root.cause

    def add(self, where: Node, message: Exited, path: Path, output: bytes = b"") -> Failure | None:
        """Add the end of a rank; path: of its log."""
        log = RankLog(path)
        log.remember(output)
        log.close()
        return self.root.add_exit(where, Rank(message.rank, log, 0.0), message)


def book_of(tmp_path: Path, now_s: float, *exits: tuple[Node, Exited]) -> Book:
    book = Book(now_s - 10)
    for number, (where, message) in enumerate(exits):
        if number == 1:
            book.root.stopping(by_user=False)
        book.add(where, message, tmp_path / f"{len(list(tmp_path.iterdir()))}.log")
    return book


@pytest.mark.parametrize("stop_is_known", [False, True])
def test_clocks_are_compared_by_what_is_known_at_last(tmp_path: Path, stop_is_known: bool) -> None:
    now_s, there, here = time.monotonic(), node("node-b", clock_offset_s=1003.0), node()
    book = Book(now_s - 10)
    assert book.add(here, exited(0, 1, now_s - 1.0), tmp_path / "0.log")
    if stop_is_known:
        book.root.stopping(by_user=False)
    book.add(there, exited(1, 1, now_s - 1002.0), tmp_path / "1.log")
    assert rank_of(book) == 0, "the second one seems to have died in one second"
    there.clock_offset_s = 1000.1  # a later message took less time
    assert rank_of(book) == 1


def rank_of(book: Book) -> int | None:
    assert book.cause is not None
    return book.cause.rank


def test_the_earliest_death_is_the_cause(tmp_path: Path) -> None:
    now_s = time.monotonic()
    book = book_of(tmp_path, now_s, (node(), exited(1, 1, now_s, "b")), (node(), exited(0, 3, now_s - 0.1, "a")))
    assert rank_of(book) == 0


SAVE = "ckpt: rank 1: shard-1.bin: No space left on device"


def test_an_error_that_all_ranks_raise_is_that_of_the_rank_on_which_it_began(tmp_path: Path) -> None:
    now_s = time.monotonic()
    first, second = (node(), exited(0, 1, now_s - 0.1, SAVE)), (node("node-b"), exited(1, 1, now_s, SAVE))
    assert rank_of(book_of(tmp_path, now_s, first, second)) == 1
    assert rank_of(book_of(tmp_path, now_s, second, first)) == 1


@pytest.mark.parametrize("message", [SAVE, SAVE.replace("rank 1", "rank 0") + f"; {SAVE}"])
def test_an_error_that_names_a_rank_counts_where_that_one_has_not_failed_before(tmp_path: Path, message: str) -> None:
    now_s = time.monotonic()
    own, victim = (node(), exited(0, 1, now_s - 0.1, message)), (node(), exited(2, 1, now_s, "later"))
    assert rank_of(book_of(tmp_path, now_s, own, victim)) == 0
    both = book_of(tmp_path, now_s, own, (node(), exited(1, 1, now_s, message)))
    assert rank_of(both) == (0 if message != SAVE else 1)


GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"
GLHF = "This is typically caused by a remote worker crashing. Check the logs of the remote worker. GLHF!"
# Type and message as torch 2.13 raises them when the other rank is killed, raises, or is late.
LOST_PEER = [
    ("RuntimeError", f"{GLOO}/pair.cc:537] Read error [127.0.0.1]:17816: Connection reset by peer. {GLHF}"),
    ("RuntimeError", f"{GLOO}/pair.cc:553] Connection closed by peer [127.0.0.1]:20916. {GLHF}"),
    ("RuntimeError", f"{GLOO}/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"),
    ("RuntimeError", "NCCL communicator was aborted on rank 1."),
    ("DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?"),
    ("DistNetworkError", "The client socket has timed out after 3000ms while trying to connect to (127.0.0.1, 29145)."),
    ("DistStoreError", "Timed out after 4 seconds waiting for clients. 1/2 clients joined."),
    ("DistBackendError", "NCCL error in: ProcessGroupNCCL.cpp:123, remote process exited or there was a network error"),
]
# Errors of ranks that failed by themselves, whatever their words and the folders in their tracebacks.
OWN = [
    ("ConnectionRefusedError", "[Errno 111] Connection refused"),
    ("OperationalError", "connection to server at 10.0.0.7, port 5432 failed: Connection refused"),
    ("BrokenPipeError", "[Errno 32] Broken pipe"),
    ("TimeoutError", "timed out waiting for the data server: socket timeout"),
    ("RuntimeError", "DataLoader worker (pid 17) exited unexpectedly: connection reset by peer"),
    ("RuntimeError", "gloo"),
    ("ValueError", "expected [/home/x/gloo/train.py:3] to be a number"),
]


def raised(rank: int, time_s: float, kind: str, message: str, cause: str = "") -> Exited:
    """Return the end of a rank of a project in a folder called gloo. cause: the error that was raised from."""
    chain = f"{cause}\n\nThe above exception was the direct cause of the following exception:\n\n" if cause else ""
    module = "torch.distributed." if kind.startswith("Dist") else ""
    trace = f'{chain}Traceback (most recent call last):\n  File "/x/gloo/train.py", line 3\n{module}{kind}: {message}\n'
    record = {"time_s": time_s, "type": kind, "message": message, "traceback": trace, "exit_code": 1}
    return Exited(rank, 1, time_s, record, 0, None)


@pytest.mark.parametrize(("kind", "message"), LOST_PEER)
def test_an_error_about_a_lost_peer_is_no_cause_if_there_is_another(tmp_path: Path, kind: str, message: str) -> None:
    now_s = time.monotonic()
    victim = raised(0, now_s - 0.01, kind, message)
    assert rank_of(book_of(tmp_path, now_s, (node(), victim), (node(), exited(1, -9, now_s)))) == 1
    assert rank_of(book_of(tmp_path, now_s, (node(), victim))) == 0


def test_an_error_raised_from_one_about_a_lost_peer_is_no_cause_either(tmp_path: Path) -> None:
    now_s = time.monotonic()
    victim = raised(0, now_s - 0.01, "RuntimeError", "step 7 failed", cause=f"RuntimeError: {LOST_PEER[1][1]}")
    assert rank_of(book_of(tmp_path, now_s, (node(), victim), (node(), exited(1, 3, now_s)))) == 1


def test_a_rank_that_left_the_loop_before_the_others_is_named(tmp_path: Path) -> None:
    now_s = time.monotonic()
    lost, own = raised(0, now_s, *LOST_PEER[1]), raised(0, now_s, "KeyError", "'x'")
    for done_s, failed, is_named in ((0.2, lost, True), (0.2, own, False), (-9.0, lost, False)):
        book = book_of(tmp_path, now_s, (node(), exited(1, 0, now_s - done_s)), (node(), failed))
        assert book.cause is not None
        assert book.cause.rank == 0
        assert ("rank 1 had exited with 0 before" in (book.cause.hint or "")) == is_named


@pytest.mark.parametrize(("kind", "message"), OWN)
def test_words_of_the_network_in_other_errors_and_in_paths_mean_nothing(
    tmp_path: Path, kind: str, message: str
) -> None:
    now_s = time.monotonic()
    first, second = raised(0, now_s - 0.01, kind, message), raised(1, now_s, "KeyError", "'x'")
    assert rank_of(book_of(tmp_path, now_s, (node(), first), (node(), second))) == 0


def test_the_abort_of_nccls_watchdog_is_no_cause_if_there_is_another(tmp_path: Path) -> None:
    now_s = time.monotonic()
    words = b"[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\nterminate called\n"
    book = Book(now_s - 10)
    book.add(node(), exited(0, -6, now_s - 0.1), tmp_path / "0.log", words)
    assert rank_of(book) == 0
    book.add(node(), exited(1, -11, now_s), tmp_path / "1.log")
    assert rank_of(book) == 1


@pytest.mark.parametrize("status", [-15, -9, 143, 137])
def test_ranks_that_we_ended_are_no_cause_even_beside_one_that_lost_its_peer(tmp_path: Path, status: int) -> None:
    now_s = time.monotonic()
    book = Book(now_s - 10)
    book.add(node(), raised(0, now_s - 0.01, *LOST_PEER[0]), tmp_path / "0.log")
    book.root.stopping(by_user=False)
    assert book.add(node(), exited(1, status, time.monotonic() + 0.1), tmp_path / "1.log") is None
    assert rank_of(book) == 0


def test_what_helps_is_said_of_common_errors(tmp_path: Path) -> None:
    now_s = time.monotonic()
    book = book_of(tmp_path, now_s, (node(), raised(0, now_s, "OutOfMemoryError", "CUDA out of memory.")))
    assert book.cause is not None
    assert "micro-batch" in str(book.cause.hint)


def test_ranks_that_could_not_be_started_are_no_lost_host(tmp_path: Path) -> None:
    for is_usage, exit_code in ((False, 1), (True, 2)):
        book = Book(time.monotonic())
        book.root.add_not_started(node(), SpawnFailed("no space", "make room", is_usage))
        assert book.cause is not None
        assert book.cause.is_start_failure
        assert (book.cause.exit_code, book.cause.reason, book.cause.hint) == (exit_code, "no space", "make room")


def test_clocks_of_different_hosts_are_compared_on_ours(tmp_path: Path) -> None:
    now_s = time.monotonic()
    ahead = node("node-b", clock_offset_s=-3600.0)  # its clock is an hour ahead
    book = book_of(
        tmp_path, now_s, (node(), exited(0, 1, now_s, "late")), (ahead, exited(1, 1, now_s + 3600 - 0.2, "early"))
    )
    assert rank_of(book) == 1


def test_deaths_by_our_own_hand_are_no_failures(tmp_path: Path) -> None:
    now_s = time.monotonic()
    later = now_s + 0.2
    book = book_of(
        tmp_path, now_s, (node(), exited(0, 3, now_s)), (node(), exited(1, -15, later)), (node(), exited(2, -9, later))
    )
    assert book.cause is not None
    assert book.cause.exit_code == 3


def test_what_a_rank_does_on_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    book = Book(time.monotonic())
    book.root.stopping(by_user=True)
    failing = exited(0, 1, time.monotonic() + 0.1, "interrupted")
    assert book.add(node(), failing, tmp_path / "0.log") is None
    assert book.cause is None


def test_a_lost_host_is_a_cause_with_what_its_agent_said_last(tmp_path: Path) -> None:
    book = Book(time.monotonic())
    book.root.add_host(node("node-b"), "the connection was lost")
    assert book.cause is not None
    assert (book.cause.host, book.cause.rank, book.cause.exit_code) == ("node-b", None, 69)
    assert book.cause.last_lines == ("Connection to node-b closed.",)


def test_out_of_memory_is_said(tmp_path: Path) -> None:
    now_s = time.monotonic()
    book = book_of(tmp_path, now_s, (node(), exited(0, -9, now_s, oom="the limit was reached", max_rss_bytes=1 << 30)))
    assert book.cause is not None
    assert (book.cause.exit_code, book.cause.reason) == (137, "killed by SIGKILL, out of memory")
    assert (book.cause.oom, book.cause.max_rss_bytes) == ("the limit was reached", 1 << 30)


def test_a_rank_that_is_killed_on_its_way_out_keeps_its_own_code(tmp_path: Path) -> None:
    now_s = time.monotonic()
    record = {"time_s": now_s, "type": "SystemExit", "message": "7", "traceback": "", "exit_code": 7}
    book = Book(now_s - 1)
    book.add(node(), Exited(0, -15, now_s + 0.4, record, 0, None), tmp_path / "0.log")
    assert book.cause is not None
    assert (book.cause.exit_code, book.cause.signal_name, book.cause.reason) == (7, None, "exit code 7")


@pytest.mark.parametrize("is_warned", [True, False])
def test_a_rank_that_has_saved_and_is_killed_on_its_way_out_asks_for_a_requeue(tmp_path: Path, is_warned: bool) -> None:
    """Slurm's SIGTERM may come while the interpreter ends, when no handler is there any more."""
    book = Book(0.0)
    book.root.was_warned = is_warned
    record = {"time_s": 5.0, "type": "SystemExit", "exit_code": 75, "message": "75", "traceback": ""}
    failure = book.add(node(), Exited(0, -15, 5.1, record, 0, None), tmp_path / "0.log")
    assert book.root.wants_requeue == is_warned
    assert (failure is None) == is_warned


def ended_by(kind: str, message: str, trace: str = "", status: int = 1) -> Exited:
    trace = trace or f'Traceback (most recent call last):\n  File "train.py", line 3\n{kind}: {message}\n'
    record = {"time_s": 1.0, "type": kind.rpartition(".")[2], "message": message, "traceback": trace, "exit_code": 1}
    return Exited(0, status, 1.0, record, 0, None)


ENFORCE = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator:"
CAUSED = "\n\nThe above exception was the direct cause of the following exception:\n\nValueError: step 7 failed\n"


@pytest.mark.parametrize(
    ("message", "memory"),
    [
        (ended_by("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."), "device"),
        (ended_by("torch.cuda.OutOfMemoryError", "HIP out of memory. Tried to allocate 2.00 GiB."), "device"),
        (ended_by("RuntimeError", "CUDA out of memory. Tried to allocate 20.00 MiB"), "device"),
        (ended_by("torch.AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors might be"), "device"),
        (
            ended_by("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "device",
        ),
        (ended_by("ValueError", "step 7 failed", "torch.OutOfMemoryError: CUDA out of memory." + CAUSED), "device"),
        (ended_by("RuntimeError", f"{ENFORCE} can't allocate memory: you tried to allocate 8 bytes."), "host"),
        (ended_by("RuntimeError", f"{ENFORCE} not enough memory: you tried to allocate 8 bytes."), "host"),
        (ended_by("MemoryError", ""), "host"),
        (ended_by("numpy._core._exceptions._ArrayMemoryError", "Unable to allocate 7.28 TiB for an array"), "host"),
        (ended_by("OSError", "[Errno 12] Cannot allocate memory"), "host"),
        (ended_by("RuntimeError", "unable to mmap 80 bytes from file <x>: Cannot allocate memory (12)"), "host"),
        (ended_by("RuntimeError", "std::bad_alloc"), "host"),
        (Exited(0, -9, 1.0, None, 0, "the memory limit of the cgroup was reached"), "host"),
        (Exited(0, -9, 1.0, None, 0, None), None),
        (ended_by("ValueError", "the table is out of memory locations"), None),
        (ended_by("RuntimeError", "the server said: CUDA out of memory"), None),
        (ended_by("OSError", "[Errno 122] Disk quota exceeded"), None),
        (ended_by("torch.distributed.DistBackendError", "ibv_reg_mr failed: Cannot allocate memory"), None),
        (ended_by("RuntimeError", "CUDA error: an illegal memory access was encountered"), None),
    ],
)
def test_whose_memory_has_ended(message: Exited, memory: str | None) -> None:
    assert memory_of(message) == memory


def test_a_thread_that_finds_no_memory_leaves_its_words_alone() -> None:
    lines = ["terminate called after throwing an instance of 'std::bad_alloc'", "  what():  std::bad_alloc"]
    assert memory_of(Exited(0, -6, 1.0, None, 0, None), lines) == "host"
    assert memory_of(Exited(0, -6, 1.0, None, 0, None), ["Aborted"]) is None


def test_what_an_engine_has_left_is_part_of_the_failure(tmp_path: Path) -> None:
    facts = EngineFacts(device="cuda", stage=2, micro_batch=4, accumulation=1)
    killed = Exited(0, -9, time.monotonic(), None, 0, "the host ran out of memory", None, dataclasses.asdict(facts))
    book = book_of(tmp_path, time.monotonic(), (node(), killed))
    assert book.cause is not None
    assert (book.cause.memory, book.cause.engine) == ("host", facts)
