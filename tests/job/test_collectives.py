"""In which collective ranks wait and for whom: concluded from what ranks say, and said of real jobs that hang."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any, cast

import pytest
from harness import scripts
from harness.launch.command import ROOT, Launch, run_launch, slowness, wait_until
from harness.launch.sshd import LoopbackSshd
from hypothesis import given
from hypothesis import strategies as st

from launcher.job.collectives import Account, Call, Kind, Stream, Stuck, find_stuck, named_ranks, streams_of
from launcher.job.hang import find_straggler, format_stacks, group_by_stack, name_hang, place_of, summary_of
from launcher.job.logs import RankLog
from launcher.job.node import Rank

REDUCE = Call(5, "all_reduce", "16 × float32")


def stream(num_entered: int, waits_in: int | None = None, *, call: Call = REDUCE, **more: Any) -> Stream:
    """Return the stream "world" of ranks 0 to 2, or the one that `more` describes."""
    facts = {"name": "world", "group": "the world", "ranks": (0, 1, 2), "waits_s": 9.0, **more}
    calls = {} if waits_in is None else {waits_in: Call(waits_in, call.operation, call.size)}
    return Stream(num_entered=num_entered, waits_in=waits_in, calls=calls, **facts)


def accounts(*of_ranks: Stream | dict[str, Stream] | None, **more: Any) -> list[Account]:
    """Return an account of each rank. None: it does not answer. more: of that rank."""
    found = []
    for rank, own in enumerate(of_ranks):
        streams = {own.name: own} if isinstance(own, Stream) else (own or {})
        silent: dict[str, Any] = {"is_silent": True, **more} if own is None else {}
        found.append(Account(rank, streams, **silent))
    return found


def conclusion(*of_ranks: Stream | dict[str, Stream] | None, **more: Any) -> Stuck:
    found = find_stuck(accounts(*of_ranks, **more))
    assert found is not None
    return found


def test_a_rank_that_has_not_entered_is_the_one_that_others_wait_for() -> None:
    found = conclusion(stream(5, 5), stream(5, 5), stream(4))
    assert (found.kind, found.culprits, found.waiting) == (Kind.MISSING, (2,), (0, 1))
    assert found.reason == "has not entered all_reduce #5 of the world (16 × float32), which ranks 0-1 wait in"
    assert found.lines == (f"rank 2 {found.reason}",)


def test_several_missing_ranks_are_all_named() -> None:
    found = conclusion(stream(4), stream(5, 5), stream(4))
    assert found.culprits == (0, 2)
    assert found.reason.endswith("which rank 1 waits in, nor has rank 2")
    assert found.lines[1].startswith("rank 2 has not entered it")


def test_a_missing_rank_is_shown_with_what_it_does() -> None:
    call = {4: Call(4, "broadcast", "3 × int64")}
    own = Stream("world", "the world", (0, 1), 4, calls=call)
    last = Account(1, {"world": own}, place="train.py:88 in load_batch", phase="reading the data")
    found = find_stuck([Account(0, {"world": stream(5, 5, ranks=(0, 1))}), last])
    assert found is not None
    assert found.reason.endswith(
        "; it is at train.py:88 in load_batch, in the phase reading the data, after broadcast #4 of the world"
    )


def test_a_rank_that_does_not_answer_is_named_with_why() -> None:
    found = conclusion(stream(5, 5), None, stream(5, 5), why_silent="stopped: state T")
    assert (found.kind, found.culprits) == (Kind.SILENT, (1,))
    assert found.reason.startswith("does not answer (stopped: state T); ranks 0, 2 wait for it in all_reduce #5")


def test_a_rank_that_has_exited_is_missing() -> None:
    ended = Account(1, is_running=False, is_silent=True)
    found = find_stuck([Account(0, {"world": stream(5, 5, ranks=(0, 1))}), ended])
    assert found is not None
    assert (found.kind, found.culprits) == (Kind.MISSING, (1,))
    assert found.reason.endswith("; it has exited")


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (Call(5, "broadcast", "16 × float32"), True),
        (Call(5, "all_reduce", "8 × float32"), True),
        (Call(5, "all_reduce", "16 × float64"), True),
        (Call(5, "all_reduce", ""), False),  # its size is not known
    ],
)
def test_other_collectives_at_the_same_number(other: Call, differs: bool) -> None:
    found = conclusion(stream(5, 5), stream(5, 5, call=other), stream(5, 5))
    assert found.kind == (Kind.DIFFERS if differs else Kind.NETWORK)
    assert found.culprits == ((1,) if differs else ())


def test_sizes_that_may_differ_by_rank_are_no_difference() -> None:
    gather, scattered = Call(5, "gather", "16 × float32"), Call(5, "gather", "32 × float32")
    assert conclusion(stream(5, 5, call=gather), stream(5, 5, call=scattered), stream(5, 5, call=gather)).culprits == ()


def test_two_ranks_that_differ_are_named_alike() -> None:
    other = Call(5, "barrier")
    found = conclusion(stream(5, 5, ranks=(0, 1)), stream(5, 5, call=other, ranks=(0, 1)))
    assert (found.kind, found.culprits) == (Kind.DIFFERS, ())
    assert "rank 0 has entered all_reduce #5" in found.lines[0]
    assert "rank 1 has entered barrier #5" in found.lines[0]


def test_what_all_have_entered_may_be_the_network() -> None:
    found = conclusion(stream(6, 5), stream(5, 5), stream(5))  # rank 2 has ended it: a broadcast's source, say
    assert (found.kind, found.culprits, found.waiting) == (Kind.NETWORK, (), (0, 1))
    assert "network" in found.reason


def test_a_rank_of_another_launcher_may_be_missing() -> None:
    found = find_stuck(accounts(stream(5, 5), stream(5, 5)))
    assert found is not None
    assert (found.kind, found.culprits) == (Kind.NETWORK, ())
    assert found.reason.endswith("all its ranks here have entered and which does not end: rank 2 may be missing")


def pair(number: int, waits_in: int | None, name: str, ranks: tuple[int, ...]) -> dict[str, Stream]:
    return {name: stream(number, waits_in, name=name, group=f"group {name}", ranks=ranks)}


def test_the_rank_at_the_end_of_a_chain_is_named() -> None:
    """Rank 0 waits for rank 1 in one group, which waits for rank 2 in another: rank 2 is the one."""
    first, second = pair(1, 1, "a", (0, 1)), pair(3, 3, "b", (1, 2))
    found = conclusion(first, second | pair(0, None, "a", (0, 1)), pair(2, None, "b", (1, 2)))
    assert (found.kind, found.culprits, found.waiting) == (Kind.MISSING, (2,), (1,))


def test_ranks_that_wait_for_each_other_in_two_groups() -> None:
    found = conclusion(
        pair(1, 1, "a", (0, 1)) | pair(0, None, "b", (0, 1)), pair(0, None, "a", (0, 1)) | pair(1, 1, "b", (0, 1))
    )
    assert (found.kind, found.culprits) == (Kind.CIRCLE, ())
    assert "rank 0 waits in all_reduce #1 of group a (16 × float32) for rank 1" in found.lines


def test_a_wait_that_has_just_begun_is_none() -> None:
    assert find_stuck(accounts(stream(5, 5, waits_s=0.2), stream(5, 5, waits_s=0.2), stream(4))) is None
    assert find_stuck(accounts(stream(5), stream(5), stream(4))) is None
    assert find_stuck([]) is None


@given(st.lists(st.integers(1, 40), min_size=2, max_size=6), st.integers(2, 6))
def test_of_ranks_that_go_through_the_same_collectives_the_last_ones_are_named(entered: list[int], seed: int) -> None:
    """The collective after the fewest that any rank has entered is the first that cannot end."""
    sizes = [seed * number for number in range(50)]
    ranks, fewest = tuple(range(len(entered))), min(entered)
    found = find_stuck(
        accounts(
            *(
                stream(
                    number,
                    fewest + 1 if number > fewest else None,
                    ranks=ranks,
                    call=Call(0, "all_reduce", f"{sizes[fewest + 1]} × float32"),
                )
                for number in entered
            )
        )
    )
    if len(set(entered)) == 1:
        assert found is None
    else:
        assert found is not None
        assert found.culprits == tuple(rank for rank in ranks if entered[rank] == fewest)
        assert found.waiting == tuple(rank for rank in ranks if entered[rank] > fewest)


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "ranks", "calls"]), inner),
)


@given(JSON, JSON)
def test_an_answer_may_hold_anything(streams: Any, calls: Any) -> None:
    whole = {"name": "a", "group": "", "ranks": [0], "num_entered": 1, "waits_in": 1, "waits_s": 9.0, "calls": calls}
    for answer in ({"streams": streams}, {"streams": [whole, streams]}):
        find_stuck([Account(0, streams_of(answer)), Account(1)])


def test_ranks_are_named_by_ranges() -> None:
    assert named_ranks([3]) == "rank 3"
    assert named_ranks([2, 0, 1, 5]) == "ranks 0-2, 5"
    assert named_ranks(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and others"


def test_the_place_of_a_rank_is_in_the_users_code() -> None:
    frames = (
        ("/x/lib/python3.11/threading.py", 3, "wait"),
        ("/home/u/train.py", 88, "load_batch"),
        ("/home/u/m.py", 1, "f"),
    )
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    head = "Current thread 0x01 (most recent call first):"
    assert place_of("\n".join([head, *lines])) == "train.py:88 in load_batch"
    assert place_of("\n".join([head, lines[0]])) == "threading.py:3 in wait"
    assert place_of("  (no Python stack)") == ""


def ranks_of(num_ranks: int) -> list[Rank]:
    return [Rank(number, cast(RankLog, None), moved_s=0.0, num_heartbeats=5) for number in range(num_ranks)]


def test_what_is_known_of_a_collective_beats_guesses() -> None:
    ranks = ranks_of(3)
    ranks[0].num_heartbeats = 4  # behind the others
    assert find_straggler(ranks) is ranks[0]
    found = conclusion(stream(5, 5), stream(5, 5), stream(4))
    assert find_straggler(ranks, found) is ranks[2]
    rank, reason = name_hang(ranks[:1], ranks, found, 60.0)  # it need not be silent itself: it may print
    assert rank is ranks[2]
    assert reason == f"hangs: {found.reason}; no progress for 60 s"
    assert name_hang(ranks, ranks, None, 60.0)[1] == "no progress for 60 s, starting Python"


def test_ranks_that_wait_for_one_that_has_exited_hang_for_it() -> None:
    ranks = ranks_of(3)
    ranks[2].is_running = False
    rank, reason = name_hang(ranks[:2], ranks, conclusion(stream(5, 5), stream(5, 5), stream(4)), 60.0)
    assert rank is ranks[0]
    assert reason.startswith("hangs: waits in all_reduce #5 of the world (16 × float32) for rank 2, which has exited;")


def test_the_summary_is_above_the_stacks_and_no_stack() -> None:
    text = format_stacks({0: "a\n", 1: "a\n", 2: ""}, ["rank 2 has not entered it", "more"])
    assert summary_of(text) == "rank 2 has not entered it\nmore"
    assert [ranks for ranks, _ in group_by_stack(text)] == [[2], [0, 1]]
    assert summary_of(format_stacks({0: "a\n"})) == ""


# ---- Real jobs ----

# While torch is imported, which takes long on a busy machine, output keeps the job alive: of another process, as an
# import may hold the interpreter's lock for longer than the job may be silent.
ALIVE = """
    import ctypes, os, signal, subprocess, time
    dots = subprocess.Popen(["sh", "-c", "while sleep 0.2; do echo .; done"])
    import torch
    import torch.distributed as dist
    rank = int(os.environ["RANK"])
"""
PLAIN = f"""{ALIVE}
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    descriptor = os.open("lock", os.O_RDWR)
    def load_batch():
        while not os.path.exists("loaded"):
            time.sleep(0.02)
    def hold_the_lock():
        ctypes.PyDLL(None).read(descriptor, ctypes.create_string_buffer(1), 1)
    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)
    for hinder in (None, None, load_batch, hold_the_lock, stop):  # in its second step DDP sends some facts around
        if rank == 1 and hinder is not None:
            open(hinder.__name__, "w").close()
            hinder()
        model(torch.ones(1, 3)).sum().backward()
    dist.barrier()
    dots.kill()
    if rank == 1:
        open("parted", "w").close()
        dist.all_gather([torch.ones(4) for _ in range(3)], torch.ones(4))  # it has skipped a sum
    dist.all_reduce(torch.ones(8))
"""
ENGINE = f"""{ALIVE}
    import launcher
    model = torch.nn.Linear(8, 8)
    config = {{"train_micro_batch_size_per_gpu": 1, "optimizer": {{"type": "AdamW"}}}}
    engine, *_ = launcher.initialize(model=model, model_parameters=model.parameters(), config=config)
    def load_batch():
        with launcher.phase("reading the data"):
            time.sleep(600)
    for step in range(3):
        if step == 2:
            dots.kill()
            if rank == 1:
                load_batch()
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
"""
HANG_S = 2.0


class StacksOf:
    """`launch stacks` of a job, again and again until it says what it shall."""

    def __init__(self, job: Launch) -> None:
        self._job = job
        self._folder = job.folder / "beside"
        self._folder.mkdir()
        self.said = ""

    def wait_for(self, begun: str, pattern: str, *options: str) -> str:
        """Return what it says once its first line begins with a pattern. begun: the file that appears before."""
        wait_until(lambda: (self._job.folder / begun).exists(), begun)
        wait_until(lambda: re.match(pattern, self._first_line(options)) is not None, pattern)
        return self.said

    def part_of(self, rank: int) -> str:
        """Return what was said of one rank."""
        parts = re.split(r"(?m)^(?=ranks? [\d, ]+:$)", self.said)
        return next(part for part in parts if part.startswith(f"rank {rank}:"))

    def _first_line(self, options: tuple[str, ...]) -> str:
        state = {"XDG_STATE_HOME": str(self._job.folder / "state")}
        self.said = run_launch(self._folder, "stacks", *options, self._job.job_id, env=state).out
        return self.said.partition("\n")[0]


def test_a_plain_job_says_who_is_missing_in_which_collective(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    script = scripts.write(tmp_path, PLAIN)
    job = Launch(tmp_path, "--num_gpus", "3", "--hang-timeout", str(HANG_S), "--grace", "1", script)
    stacks = StacksOf(job)

    said = stacks.wait_for(
        "load_batch",
        r"rank 1 has not entered (all_reduce #\d+) of the world \(4 × float32\), which ranks 0, 2 wait in; it"
        r" is at script\.py:\d+ in load_batch, after ",
    )
    assert "collectives.py" not in said  # the thread that answers is nobody's business
    (tmp_path / "loaded").touch()

    said = stacks.wait_for(
        "hold_the_lock",
        r"rank 1 does not answer \(.* a native call holds the interpreter's lock.*\); ranks 0, 2 wait for",
        "--native",
    )
    assert "in hold_the_lock" in said  # by faulthandler
    assert "by py-spy:" in said or "(no native stack: " in said  # of ranks that look alike once
    if "by py-spy:" in stacks.part_of(1):
        assert re.search(r"\bread \(.*\n(.*\n)* +hold_the_lock \(script\.py:\d+\)", stacks.part_of(1))
    with open(tmp_path / "lock", "wb") as file:
        file.write(b"x")

    said = stacks.wait_for(
        "stop",
        r"rank 1 does not answer \(stopped by a signal: state T in /proc; .*\); ranks 0, 2 wait for it in all_reduce #",
    )
    os.kill(int(said.partition("kill -CONT ")[2].partition(" ")[0]), signal.SIGCONT)

    wait_until(lambda: "rank 1 hangs: " in job.err, "the report of the hang")
    after_s = time.time() - (tmp_path / "parted").stat().st_mtime
    assert after_s < HANG_S + 5.0 * slowness()
    result = job.wait()
    assert result.code == 124
    failure = json.loads(next(tmp_path.glob("runs/*/report.json")).read_text())["failure"]
    assert failure["rank"] == 1
    assert failure["reason"].startswith("hangs: has entered all_gather #")
    assert "where ranks 0, 2 have entered all_reduce #" in failure["reason"]
    assert (failure["stuck"]["kind"], failure["stuck"]["culprits"]) == ("differs", [1])


@pytest.mark.cluster
def test_an_engine_on_two_hosts_names_the_rank_that_reads_data(sshd: LoopbackSshd, tmp_path: Path) -> None:
    options = ["--hostfile", str(ROOT / "hostfiles" / "loopback"), "--ssh_config", str(sshd.ssh_config)]
    script = scripts.write(tmp_path, ENGINE)
    result = run_launch(tmp_path, *options, "--hang-timeout", str(HANG_S), "--grace", "1", script)
    assert result.code == 124
    failure = json.loads(next(tmp_path.glob("runs/*/report.json")).read_text())["failure"]
    assert (failure["rank"], failure["host"]) == (1, "127.0.0.2")
    assert failure["reason"].startswith("hangs: has not entered the reduction of ")
    assert "which rank 0 waits in; it is at script.py:" in failure["reason"]
    assert "in load_batch, in the phase reading the data" in failure["reason"]
    assert (failure["stuck"]["kind"], failure["stuck"]["culprits"]) == ("missing", [1])
    (path,) = tmp_path.glob("runs/*/stacks.txt")
    assert path.read_text().startswith("rank 1 has not entered the reduction of ")
