"""A rank that has raised but has not exited: it is shown at once, and holds up the job for a limited time."""

from __future__ import annotations

import time
from pathlib import Path

from harness import scripts
from harness.launch.command import Launch, run_launch, slowness, wait_until, wait_until_gone

HANGS_ON_THE_WAY_OUT = """
    import atexit, os, sys, threading, time
    if os.environ["RANK"] == "1":
        print("last words", flush=True)
        if sys.argv[1] == "thread":
            threading.Thread(target=time.sleep, args=(600,)).start()
        elif sys.argv[1] == "handler":
            atexit.register(time.sleep, 600)
        else:
            atexit.register(lambda: os._exit(0))
            atexit.register(lambda: [time.sleep(0.05) for _ in iter(lambda: os.path.exists("may_end"), True)])
        if sys.argv[2] == "raise":
            raise ValueError("the data is bad")
        sys.exit(7)
    time.sleep(600 if sys.argv[1] != "recovers" else 0)
"""


def test_a_thread_that_lives_on_hides_no_traceback(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, HANGS_ON_THE_WAY_OUT)
    grace_s = 6.0 * slowness()
    job = Launch(tmp_path, "--num_gpus", "2", "--grace", str(grace_s), script, "thread", "raise")
    wait_until(lambda: "last words" in job.out, "the failure")
    start_s = time.monotonic()
    wait_until(lambda: "ValueError: the data is bad" in (tmp_path / "launch.err").read_text(), "the traceback")
    assert time.monotonic() - start_s < grace_s, "only shown when the rank was given up"
    (log,) = tmp_path.glob("runs/*/rank_1.log")
    assert log.read_text().splitlines()[:2] == ["last words", "Traceback (most recent call last):"]
    assert job.process.poll() is None
    result = job.wait(grace_s + 20)  # the grace; then the stop, which a sleeping thread does not resist
    assert result.code == 1
    assert result.err.count("ValueError: the data is bad") == 1
    assert "rank 1 (localhost, pid" in result.err
    assert "(its traceback is above)" in result.err
    assert "rank 1 failed (exit code 1) but has not exited" in result.err
    assert log.read_text().count("ValueError: the data is bad") == 1
    wait_until_gone(result.job_id)


def test_an_exit_code_outlives_an_exit_handler_that_hangs(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, HANGS_ON_THE_WAY_OUT)
    result = run_launch(tmp_path, "--num_gpus", "2", "--grace", "1", script, "handler", "exit")
    assert result.code == 7
    assert "✗ rank 1" in result.err
    assert result.err.count("last words") == 1  # in place of a traceback: at once; at the end they are still there
    assert "(its last lines are above)" in result.err


def test_a_rank_that_ends_well_after_all_is_no_failure(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, HANGS_ON_THE_WAY_OUT)
    job = Launch(tmp_path, "--num_gpus", "2", "--grace", "600", script, "recovers", "raise")
    wait_until(lambda: "has failed but has not exited" in (tmp_path / "launch.err").read_text(), "the warning")
    (tmp_path / "may_end").touch()
    result = job.wait()
    assert result.code == 0
    assert "✗" not in result.err


def test_a_fork_that_fails_is_not_the_rank(tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, time
        if os.fork() == 0:
            raise ValueError("only the child")
        os.wait()
        if os.fork() == 0:
            os._exit(0)  # its end wakes the agent
        time.sleep(2.5)
        """,
    )
    result = run_launch(tmp_path, "--num_gpus", "1", "--grace", "0.5", script)
    assert result.code == 0, result.err
    assert result.err.count("[0] ValueError: only the child") == 1
    assert "has not exited" not in result.err
