"""SIGUSR1 to `launch` is a notice to every rank, and what the ranks answer is the exit code."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import Launch, run_launch, wait_until

OBEDIENT = """
    import os, sys, time
    import launcher
    print("READY", flush=True)
    while not launcher.preempted():
        time.sleep(0.01)
    time.sleep(float(os.environ["RANK"]))
    print("SAVED", flush=True)
    sys.exit(launcher.EXIT_REQUEUE)
"""
DEAF = """
    import time
    print("READY", flush=True)
    time.sleep(1.5)
    print("DONE", flush=True)
"""
OWN_HANDLER = """
    import signal, sys, time
    def handle(*_):
        print("MINE", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGUSR1, handle)
    print("READY", flush=True)
    time.sleep(600)
"""


def run_and_notify(folder: Path, text: str, *options: str) -> tuple[int, str]:
    job = Launch(folder, "--num_gpus", "2", *options, scripts.write(folder, text))
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    job.signal(signal.SIGUSR1)
    result = job.wait()
    return result.code, result.out


def test_all_ranks_save_before_the_job_ends(tmp_path: Path) -> None:
    code, out = run_and_notify(tmp_path, OBEDIENT)
    assert code == 75
    assert out.count("SAVED") == 2


def test_ranks_that_do_not_know_the_notice_go_on(tmp_path: Path) -> None:
    code, out = run_and_notify(tmp_path, DEAF)
    assert code == 0
    assert out.count("DONE") == 2


ENDING = """
    import os, signal
    class Late:
        def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR1):
            kill(pid, number)
    late = Late()
    HANDLER
    print("DONE", flush=True)
"""


@pytest.mark.parametrize("handler", ["pass", "signal.signal(signal.SIGUSR1, lambda *_: None)"])
def test_a_notice_that_comes_while_python_ends_fails_no_rank(tmp_path: Path, handler: str) -> None:
    """Modules are destroyed when Python has given up its handlers of signals."""
    script = scripts.write(tmp_path, ENDING.replace("HANDLER", handler))
    result = run_launch(tmp_path, "--num_gpus", "2", script)
    assert (result.code, result.out.count("DONE")) == (0, 2), result.err


def test_a_program_goes_on_too(tmp_path: Path) -> None:
    program = scripts.write(tmp_path, "", "program.sh")
    program.write_text("#!/bin/sh\necho READY\nsleep 1.5\necho DONE\n")
    program.chmod(0o755)
    job = Launch(tmp_path, "--num_gpus", "2", "--no_python", program)
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    job.signal(signal.SIGUSR1)
    result = job.wait()
    assert result.code == 0, result.err
    assert result.out.count("DONE") == 2


def test_a_program_that_handles_the_notice_gets_it(tmp_path: Path) -> None:
    program = scripts.write(tmp_path, "", "program.sh")
    program.write_text("#!/bin/sh\ntrap told=1 USR1\necho READY\nuntil test $told; do sleep 0.02; done\nexit 75\n")
    program.chmod(0o755)
    job = Launch(tmp_path, "--num_gpus", "2", "--no_python", program)
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    job.signal(signal.SIGUSR1)
    result = job.wait(30)
    assert result.code == 75, result.err


def test_a_handler_of_the_script_s_own_gets_the_notice(tmp_path: Path) -> None:
    code, out = run_and_notify(tmp_path, OWN_HANDLER)
    assert code == 0
    assert out.count("MINE") == 2


@pytest.mark.parametrize("code", [75, 3])
def test_without_a_notice_every_code_is_a_failure(tmp_path: Path, code: int) -> None:
    script = scripts.write(
        tmp_path, f"import os, sys, time\nif os.environ['RANK'] == '1': sys.exit({code})\ntime.sleep(600)\n"
    )
    result = Launch(tmp_path, "--num_gpus", "2", script).wait()
    assert result.code == code
    assert "✗ rank 1 " in result.err


def test_a_notice_that_comes_while_launch_is_still_starting_is_kept_for_the_ranks(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    os.mkfifo(hostfile)  # `launch` waits for its hosts, long before it knows of any rank
    job = Launch(tmp_path, "--hostfile", hostfile, scripts.write(tmp_path, OBEDIENT))
    wait_until(lambda: catches(job.process.pid, signal.SIGUSR1), "launch to take the notice")
    job.signal(signal.SIGUSR1)
    hostfile.write_text("localhost slots=2\n")
    result = job.wait()
    assert result.code == 75, result.err
    assert result.out.count("SAVED") == 2


def test_a_notice_that_is_sent_before_python_has_started_waits_where_it_is_blocked(tmp_path: Path) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        job = Launch(tmp_path, "--num_gpus", "2", scripts.write(tmp_path, OBEDIENT))
        job.signal(signal.SIGUSR1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    result = job.wait(60)
    assert (result.code, result.out.count("SAVED")) == (75, 2), result.err


BOTH = """
    import multiprocessing, os, signal, sys, time
    import launcher
    if os.environ["RANK"] == "1":
        while not os.path.exists("enough"):
            time.sleep(0.02)
        sys.exit(3)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join()
    print("CHILD", child.exitcode, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("PREEMPTED", launcher.preempted(), flush=True)
    open("enough", "w").close()
    time.sleep(600)
"""


def test_where_slurm_s_sigterm_is_a_notice_that_of_the_agent_still_ends_ranks(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, BOTH)
    job = Launch(tmp_path, "--num_gpus", "2", "--grace", "200", script, env={"LAUNCH_TERM_IS_NOTICE": "1"})
    result = job.wait(60)
    assert result.code == 3
    assert "CHILD -15\n" in result.out
    assert "PREEMPTED True\n" in result.out
    assert "1 other rank was stopped" in result.err


def catches(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal: proc(5), SigCgt."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) & 1 << (number - 1))
