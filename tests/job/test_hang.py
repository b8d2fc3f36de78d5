"""Hangs: found by the progress counters, named with the stack; stacks on demand."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
from harness import scripts
from harness.launch.command import Launch, run_launch, slowness, wait_until

from launcher.base.processes import members_of_job
from launcher.job.hang import HangWatch, find_straggler
from launcher.job.logs import RankLog
from launcher.job.node import Rank


def healthy_hang_s() -> float:
    """Return a hang timeout for jobs that are healthy: on a machine with other work a start of Python takes a while."""
    return 4.0 * slowness()


# All ranks count together until rank 2 gets stuck; the others then wait for it, as in a collective.
ONE_HANGS = """
    import os, time
    import launcher
    rank = int(os.environ["RANK"])
    def wait_for_the_others():
        time.sleep(600)
    def read_a_broken_disk():
        time.sleep(600)
    open(f"begun-{rank}", "w").close()
    while not all(os.path.exists(f"begun-{other}") for other in range(3)):
        time.sleep(0.01)
    for step in range(5):
        time.sleep(0.1)
        if step == 3 and rank == 2:
            with launcher.phase("reading the data"):
                read_a_broken_disk()
        launcher.heartbeat()
    with launcher.phase("waiting"):
        wait_for_the_others()
"""


def test_the_rank_that_hangs_is_named_with_its_stack(tmp_path: Path) -> None:
    hang_s = healthy_hang_s()
    result = run_launch(tmp_path, "--num_gpus", "3", "--hang-timeout", str(hang_s), scripts.write(tmp_path, ONE_HANGS))
    assert result.code == 124
    report = result.err[result.err.index("✗ rank 2") :]
    assert f"no progress for {hang_s:g} s, reading the data" in report
    assert "in read_a_broken_disk" in report
    assert "wait_for_the_others" not in report
    assert "2 other ranks were stopped" in report
    (stacks,) = tmp_path.glob("runs/*/stacks.txt")
    assert stacks.read_text().count("in wait_for_the_others") == 2
    assert not members_of_job(result.job_id)


def test_output_counts_as_progress_for_scripts_without_heartbeats(tmp_path: Path) -> None:
    hang_s = healthy_hang_s()
    script = scripts.write(tmp_path, f"import time\nfor _ in range(10): time.sleep({hang_s / 8}); print('working')\n")
    result = run_launch(tmp_path, "--hang-timeout", str(hang_s), script)
    assert result.code == 0


def test_a_script_that_falls_silent_hangs(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "--hang-timeout", "1", scripts.write(tmp_path, "import time; time.sleep(600)"))
    assert result.code == 124
    assert "time.sleep" not in result.out
    assert "✗ rank 0" in result.err
    assert "other rank" not in result.err


def test_stacks_on_demand_leave_the_job_alone(tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, time
        def busy():
            print("UP", flush=True)
            while not os.path.exists("go"):
                time.sleep(0.05)
        busy()
        """,
    )
    job = Launch(tmp_path, "--num_gpus", "2", script, env={"LAUNCH_TIMEOUT_SCALE": "100"})  # for ranks that answer late
    wait_until(lambda: job.out.count("UP") == 2, "the ranks")
    for _ in range(2):
        job.signal(signal.SIGQUIT)
        wait_until(lambda: bool(list(tmp_path.glob("runs/*/stacks.txt"))), "the stacks")
        (path,) = tmp_path.glob("runs/*/stacks.txt")
        wait_until(lambda path=path: path.read_text().count("in busy") == 2, "both stacks")  # type: ignore[misc]
        path.unlink()
    (tmp_path / "go").touch()
    assert job.wait().code == 0


def test_a_rank_that_is_stopped_is_shown_as_such(tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, signal, time
        import launcher
        launcher.heartbeat()
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            launcher.heartbeat()
            time.sleep(0.05)
        """,
    )
    result = run_launch(tmp_path, "--num_gpus", "2", "--hang-timeout", "1", "--grace", "1", script)
    assert result.code == 124
    report = result.err[result.err.index("✗ rank 1") :]
    assert "stopped by a signal: state T in /proc; kill -CONT" in report


def test_programs_survive_the_question_for_their_stacks(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "--hang-timeout", "0.5", "--no_python", "/bin/sleep", "600")
    assert result.code == 124
    assert "(no Python stack)" in result.err


def ranks_of(num_ranks: int) -> list[Rank]:
    return [Rank(number, cast(RankLog, None), moved_s=0.0) for number in range(num_ranks)]


def hung(watch: HangWatch, now_s: float) -> list[int]:
    return [rank.number for rank in watch.hung_ranks(now_s)]


def test_output_of_any_rank_and_its_end_keep_the_job_alive() -> None:
    watch = HangWatch(10.0, ranks := ranks_of(3), now_s=0.0)
    ranks[0].wrote_s = 8.0
    assert hung(watch, 17.9) == []
    ranks[0].is_running = False
    watch.ended(18.0)
    assert hung(watch, 27.9) == []
    assert hung(watch, 28.1) == [1, 2]


def test_heartbeats_of_rank_0_alone_keep_the_others_alive() -> None:
    watch = HangWatch(10.0, ranks := ranks_of(2), now_s=0.0)
    for second in range(1, 100):
        watch.beat(ranks[0], second, second)
        assert hung(watch, second) == []
    assert hung(watch, 109.1) == [0, 1]
    assert find_straggler(ranks) is None  # rank 1 makes no heartbeats: it is not behind


def test_a_count_that_stands_still_is_no_progress() -> None:
    watch = HangWatch(10.0, ranks := ranks_of(1), now_s=0.0)
    watch.beat(ranks[0], 1, 5.0)
    watch.beat(ranks[0], 1, 14.0)
    assert hung(watch, 15.1) == [0]


def test_a_rank_that_falls_silent_while_others_make_heartbeats_hangs() -> None:
    watch = HangWatch(10.0, ranks := ranks_of(3), now_s=0.0)
    for second in range(1, 31):
        for rank in ranks:
            if rank.number != 1 or second <= 15:
                watch.beat(rank, second, second)
        if second <= 18:
            ranks[1].wrote_s = second
        assert hung(watch, second) == ([1] if second > 28 else [])


def test_a_rank_that_never_came_to_a_heartbeat_hangs_where_most_ranks_make_them() -> None:
    watch = HangWatch(10.0, ranks := ranks_of(3), now_s=0.0)
    for second in range(1, 21):
        watch.beat(ranks[0], second, second)
        watch.beat(ranks[1], second, second)
        assert hung(watch, second) == ([2] if second > 10 else [])


def test_an_evaluation_that_rank_0_prints_is_no_hang_of_the_ranks_that_wait() -> None:
    watch = HangWatch(10.0, ranks := ranks_of(2), now_s=0.0)
    watch.beat(ranks[1], 7, 1.0)
    watch.beat(ranks[0], 7, 3.0)
    for second in range(4, 100):
        ranks[0].wrote_s = second
        assert hung(watch, second) == []
    assert hung(watch, 110.0) == [0, 1]


def test_time_for_which_the_launcher_held_ranks_up_does_not_count() -> None:
    watch = HangWatch(10.0, ranks := ranks_of(2), now_s=0.0)
    ranks[0].wrote_s = 1.0
    watch.hold(8.0)
    assert hung(watch, 17.9) == []
    assert hung(watch, 18.1) == [0, 1]


ONLY_RANK_0 = """
    import os, time
    import launcher
    for step in range(10):
        time.sleep({interval_s})
        if os.environ["RANK"] == "0":
            {progress}
"""


@pytest.mark.parametrize("progress", ["print(step, flush=True)", "launcher.heartbeat(1.0)"])
def test_progress_of_rank_0_alone_is_enough(tmp_path: Path, progress: str) -> None:
    hang_s = healthy_hang_s()
    script = scripts.write(tmp_path, ONLY_RANK_0.format(progress=progress, interval_s=hang_s / 8))
    result = run_launch(tmp_path, "--num_gpus", "2", "--hang-timeout", str(hang_s), script)
    assert result.code == 0, result.err


def test_an_evaluation_that_prints_for_longer_than_the_timeout_is_healthy(tmp_path: Path) -> None:
    hang_s = healthy_hang_s()
    script = scripts.write(
        tmp_path,
        f"""
        import os, time
        import launcher
        launcher.heartbeat()
        for batch in range(10):
            time.sleep({hang_s / 8})
            if os.environ["RANK"] == "0":
                print("evaluating", batch, flush=True)
        """,
    )
    result = run_launch(tmp_path, "--num_gpus", "2", "--hang-timeout", str(hang_s), script)
    assert result.code == 0, result.err


def test_a_rank_that_hangs_while_another_makes_heartbeats_is_named(tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, time
        import launcher
        def read_a_broken_disk():
            time.sleep(600)
        for step in range(6000):
            launcher.heartbeat()
            if os.environ["RANK"] == "1" and step == 3:
                read_a_broken_disk()
            print("step", step, flush=True)
            time.sleep(0.1)
        """,
    )
    result = run_launch(tmp_path, "--num_gpus", "2", "--hang-timeout", "2", script)
    assert result.code == 124
    report = result.err[result.err.index("✗ rank 1") :]
    assert "alike" not in report
    assert "in read_a_broken_disk" in report


def test_launch_stacks_folds_ranks_that_stand_alike(tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, time
        def waiting():
            print("UP", flush=True)
            while not os.path.exists("go"):
                time.sleep(0.05)
        def odd():
            waiting()
        odd() if os.environ["RANK"] == "1" else waiting()
        """,
    )
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    job = Launch(tmp_path, "--num_gpus", "3", script, env=state)
    wait_until(lambda: job.out.count("UP") == 3, "the ranks")
    folder = tmp_path / "other"
    folder.mkdir()
    folded = run_launch(folder, "stacks", job.job_id[:-2], env=state)
    assert folded.code == 0, folded.err
    assert re.findall(r"^ranks? .*:$", folded.out, re.MULTILINE) == ["rank 1:", "ranks 0, 2:"]
    assert folded.out.index("in odd") < folded.out.index("ranks 0, 2:")
    every = run_launch(folder, "stacks", "--all", job.job_id, env=state)
    assert every.out.count("in waiting") == 3
    (tmp_path / "go").touch()
    assert job.wait().code == 0
    over = run_launch(folder, "stacks", job.job_id, env=state)
    assert over.code == 2
    assert "has ended" in over.err


def stack(function: str) -> str:
    return f'Current thread 0x01 (most recent call first):\n  File "t.py", line 3 in {function}\n'


def straggler(stacks: Mapping[int, str], num_heartbeats: Mapping[int, int]) -> int | None:
    """Ask for the straggler among ranks that hang, of which `num_heartbeats` has the numbers."""
    ranks = ranks_of(4)
    for number, count in num_heartbeats.items():
        ranks[number].num_heartbeats, ranks[number].stack = count, stacks.get(number)
    found = find_straggler([ranks[number] for number in num_heartbeats])
    return None if found is None else found.number


def test_who_is_the_straggler() -> None:
    assert straggler({0: stack("a"), 1: stack("a"), 2: stack("b")}, {0: 5, 1: 5, 2: 5}) == 2
    assert straggler({0: stack("a"), 1: stack("a")}, {0: 5, 1: 4}) == 1
    assert straggler({0: stack("a"), 1: stack("b")}, {0: 5, 1: 5}) is None
    assert straggler({0: stack("a"), 1: stack("a"), 2: stack("a")}, {0: 5, 1: 5, 2: 5}) is None
    assert straggler({3: stack("a")}, {3: 1}) == 3
    every = {0: stack("a"), 1: stack("a"), 2: stack("a")}
    assert straggler(every, {0: 5, 1: 5, 2: 0}) == 2  # it never came to its first heartbeat
    assert straggler(every, {0: 5, 1: 0, 2: 0}) is None  # only rank 0 makes heartbeats
    assert straggler(every, {1: 5, 2: 4}) == 2  # rank 0 does not hang
