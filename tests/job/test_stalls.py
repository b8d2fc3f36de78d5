"""A pager that pauses, a log disk that stalls, a launcher that is suspended: no rank is lost, no wait is endless."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT, Launch, run_launch, slowness, wait_until, wait_until_gone
from harness.launch.sshd import LoopbackSshd
from harness.launch.stalls import DRIVER, LOUD, StalledLog, UnreadPipe

from launcher.base.processes import members_of_job


@pytest.fixture
def lease_s() -> float:
    """Short, but longer on an overloaded machine: heartbeats come late there."""
    return 3.0 * slowness()


@pytest.fixture
def ssh(sshd: LoopbackSshd, tmp_path: Path, lease_s: float) -> list[str]:
    """Options for two hosts with one rank each and a short lease."""
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    return ["--hostfile", "hosts", "--ssh_config", str(sshd.ssh_config), "--lease", str(lease_s), "--grace", "1"]


@pytest.fixture
def pipe() -> UnreadPipe:
    return UnreadPipe()


@pytest.fixture
def job_id() -> str:
    """An id that no other test has, also where tests run beside each other."""
    return f"stalled-job-{os.getpid():x}-{time.monotonic_ns():x}"


def driven(folder: Path, job_id: str, limit_s: float, *args: str | Path) -> Launch:
    """Start a job with an id, and with a limit for disks that stall."""
    driver = scripts.write(folder, DRIVER, "driver.py")
    return Launch(folder, job_id, str(limit_s), *args, program=(driver,))


def job_in(folder: Path) -> str:
    """Wait for the one run folder and return its job's id; the start line may be in a pipe that nobody reads."""
    wait_until(lambda: bool(list(folder.glob("runs/*/rank_0.log"))), "the run folder")
    return next((folder / "runs").iterdir()).name


def whole_lines(output: bytes, prefix: str) -> int:
    """Check that the numbered lines of one rank are all there, in order. Returns how many."""
    numbers = [int(n) for n in re.findall(rb"^%sline (\d+) x{80}$" % re.escape(prefix.encode()), output, re.MULTILINE)]
    assert numbers == list(range(len(numbers)))
    assert b"%sLAST %d\n" % (prefix.encode(), len(numbers)) in output
    return len(numbers)


@pytest.mark.long  # as tests/soak/stalls.py, for shorter
@pytest.mark.cluster
def test_a_reader_that_pauses_for_longer_than_the_lease_ends_nothing(
    ssh: list[str], tmp_path: Path, pipe: UnreadPipe, lease_s: float
) -> None:
    script = scripts.write(tmp_path, LOUD)
    job = Launch(tmp_path, *ssh, script, "1000", stdout=pipe.write_end)
    pipe.started()
    job_id = job_in(tmp_path)
    wait_until(lambda: len(members_of_job(job_id)) == 2, "the ranks")
    time.sleep(2 * lease_s)
    assert len(members_of_job(job_id)) == 2
    (tmp_path / "enough").touch()
    output = pipe.read_all()
    assert job.wait().code == 0, job.err
    for rank in range(2):
        log = (tmp_path / "runs" / job_id / f"rank_{rank}.log").read_bytes()
        assert whole_lines(output, f"[{rank} 127.0.0.{rank + 1}] ") == whole_lines(log, "") > 1000


ONE_FAILS = """
    import os, sys, time
    if os.environ["RANK"] == "1":
        time.sleep(1.0)
        raise ValueError("the data is bad")
    while True:
        print("x" * 100)
"""


def test_a_failure_stops_the_job_while_nobody_reads_its_output(tmp_path: Path, pipe: UnreadPipe) -> None:
    job = Launch(tmp_path, "--num_gpus", "2", "--grace", "1", scripts.write(tmp_path, ONE_FAILS), stdout=pipe.write_end)
    pipe.started()
    job_id = job_in(tmp_path)
    wait_until(lambda: len(members_of_job(job_id)) == 2, "the ranks")
    wait_until_gone(job_id)
    report = tmp_path / "runs" / job_id / "report.json"
    wait_until(lambda: report.exists() and "waiting for standard output" in job.err, "the end of the run")
    assert '"exit_code": 1' in report.read_text()
    assert job.process.poll() is None
    job.signal(signal.SIGINT)
    assert job.wait().code == 1, "the code of the rank, not of Ctrl-C"
    assert "Traceback" not in job.err
    assert "ValueError: the data is bad" in (report.parent / "rank_1.log").read_text()
    pipe.close()


def test_ctrl_c_ends_a_job_whose_output_nobody_reads(tmp_path: Path, pipe: UnreadPipe) -> None:
    script = scripts.write(tmp_path, LOUD)
    job = Launch(tmp_path, "--num_gpus", "2", "--grace", "1", script, "1000000000", stdout=pipe.write_end)
    pipe.started()
    job_id = job_in(tmp_path)
    logs = [tmp_path / "runs" / job_id / f"rank_{rank}.log" for rank in range(2)]
    # Of both: the rank that starts first may fill all that is held for the two.
    wait_until(lambda: sum(log.stat().st_size for log in logs) > 1 << 18, "output")
    job.signal(signal.SIGINT)
    wait_until_gone(job_id)
    wait_until((tmp_path / "runs" / job_id / "report.json").exists, "the end of the run")

    def has_left() -> bool:
        job.signal(signal.SIGINT)  # again and again, as users do: two before the launcher runs are one for Python
        return job.process.poll() is not None

    wait_until(has_left, "the end of launch")
    assert job.wait().code == 130
    pipe.close()


# ---- the disk of the logs ----


@pytest.mark.long  # as tests/soak/stalls.py, for shorter
@pytest.mark.cluster
def test_a_disk_that_stalls_for_longer_than_the_lease_ends_nothing(ssh: list[str], tmp_path: Path, job_id: str) -> None:
    log = StalledLog(tmp_path / "runs", job_id)
    log.open()
    job = driven(tmp_path, job_id, 60.0, *ssh, scripts.write(tmp_path, LOUD), "20000")
    # 20,000 lines are 1.8 MB: more than the pipe takes, and less than the display shows without the disk.
    wait_until(lambda: all(f"[{n} 127.0.0.{n + 1}] line 15000 " in job.out for n in range(2)), "the display")
    said = f"runs/{job_id}: its disk has taken no output for 5 s"  # more than twice the lease
    wait_until(lambda: said in job.err, "the line about the disk")
    assert len(members_of_job(job_id)) == 2
    (tmp_path / "enough").touch()
    written = log.read_all()
    assert job.wait().code == 0, job.err
    assert whole_lines(written, "") == whole_lines(job.out.encode(), "[0 127.0.0.1] ") >= 20000


def test_a_disk_that_never_answers_again_is_given_up(tmp_path: Path, job_id: str) -> None:
    log = StalledLog(tmp_path / "runs", job_id)
    log.open()
    (tmp_path / "enough").touch()
    job = driven(tmp_path, job_id, 6.0, scripts.write(tmp_path, LOUD), "5000")  # launch warns after 2 s
    result = job.wait()
    assert result.code == 0
    assert whole_lines(result.out.encode(), "[0] ") == 5000
    assert f"waiting for the disk of runs/{job_id}" in result.err
    assert f"! runs/{job_id}: its disk does not answer; the logs are incomplete" in result.err
    assert f"! runs/{job_id}/report.json could not be written: the disk does not answer" in result.err
    log.close()


def test_ctrl_c_ends_the_wait_for_a_disk_and_keeps_the_exit_code(tmp_path: Path, job_id: str) -> None:
    log = StalledLog(tmp_path / "runs", job_id)
    log.open()
    (tmp_path / "enough").touch()
    job = driven(tmp_path, job_id, 600.0, scripts.write(tmp_path, LOUD), "5000")
    wait_until(lambda: "waiting for the disk of" in job.err, "the line about the wait")
    job.signal(signal.SIGINT)
    assert job.wait().code == 0
    log.close()


def test_ctrl_c_ends_the_wait_for_a_run_folder_that_does_not_answer(tmp_path: Path, job_id: str) -> None:
    StalledLog(tmp_path / "runs", job_id)  # nobody opens it: opening it stalls, before any rank is started
    job = driven(tmp_path, job_id, 600.0, scripts.write(tmp_path, "print('RAN')"))
    wait_until(lambda: "waiting for the disk of" in job.err, "the line about the wait")
    job.signal(signal.SIGINT)
    result = job.wait(10)
    assert result.code == 130
    assert "RAN" not in result.out
    assert not members_of_job(job_id)


# ---- a launcher that does not run ----

TICKS = """
    import os, time
    print("READY", flush=True)
    while not os.path.exists("enough"):
        time.sleep(0.05)
"""


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.long  # as tests/soak/stalls.py, for shorter
@pytest.mark.cluster
def test_ctrl_z_for_longer_than_the_lease_ends_nothing(ssh: list[str], tmp_path: Path, lease_s: float) -> None:
    job = Launch(tmp_path, *ssh, scripts.write(tmp_path, TICKS), in_our_session=True)
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    job.signal(signal.SIGTSTP)
    wait_until(lambda: state_of(job.process.pid) == "T", "the suspension")
    assert "suspended: the ranks run on" in job.err
    time.sleep(2 * lease_s)
    assert len(members_of_job(job.job_id)) == 2
    job.signal(signal.SIGCONT)
    wait_until(lambda: "continued after " in job.err, "the end of the suspension")
    time.sleep(1.5 * lease_s)  # heartbeats keep the old lease again
    (tmp_path / "enough").touch()
    assert job.wait().code == 0, job.err


@pytest.mark.cluster
def test_a_launcher_that_was_stopped_for_too_long_blames_no_host(ssh: list[str], tmp_path: Path) -> None:
    job = Launch(tmp_path, *ssh, scripts.write(tmp_path, TICKS), in_our_session=True)
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    job_id = job.job_id
    job.signal(signal.SIGSTOP)
    wait_until_gone(job_id, 15.0)
    time.sleep(1.5)
    job.signal(signal.SIGCONT)
    result = job.wait(30)
    assert result.code == 69
    assert re.search(
        r"✗ launch was suspended for \S+ s, longer than its lease \(\d+\.\d s\): 127\.0\.0\.\d ended", result.err
    )
    assert "was lost" not in result.err


# ---- signals between runs, and before them ----


BETWEEN_RUNS = """
import os, sys
number = int(sys.argv.pop(1))
from launcher.job import restart
hosts_of = restart._hosts_of
def interrupted(plan):
    os.kill(os.getpid(), number)
    return hosts_of(plan)
restart._hosts_of = interrupted
from launcher.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_between_two_runs_is_handled_as_during_one(tmp_path: Path, number: int) -> None:
    driver = scripts.write(tmp_path, BETWEEN_RUNS, "driver.py")
    options = ("--max-restarts", "2", "--no_python", "sh", "-c", "exit 5")
    result = Launch(tmp_path, str(int(number)), *options, program=(driver,)).wait()
    code = result.code
    assert code in ((5,) if number == signal.SIGQUIT else (5, 128 + number)), result.err
    num_runs = len(list((tmp_path / "runs" / result.job_id).rglob("rank_0.log")))
    assert num_runs == (3 if number == signal.SIGQUIT else 1)
    (entry,) = (tmp_path / "state" / "launch" / "jobs").glob("*.json")
    assert json.loads(entry.read_text())["exit_code"] == code


def test_a_second_ctrl_c_is_announced_and_told(tmp_path: Path) -> None:
    job = Launch(tmp_path, "--grace", "30", scripts.write(tmp_path, scripts.STUBBORN))
    wait_until(lambda: "READY" in job.out, "the rank")
    job.signal(signal.SIGINT)
    announced = "SIGINT: stopping all ranks\nwaiting for the ranks to end, at most 30.0 s; a second SIGINT kills them\n"
    wait_until(lambda: announced in job.err, "the first")
    job.signal(signal.SIGINT)
    assert job.wait(15).code == 130
    assert "SIGINT again: killing all ranks\n" in job.err


# In place of a package that the command imports: Ctrl-C arrives where Python can raise no exception.
INTERRUPTS = """
import os, signal, sys, time, weakref
class Thing: pass
def interrupt(_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
thing = Thing()
reference = weakref.ref(thing, interrupt)
del thing
sys.exit("the interrupt was lost")
"""


def test_a_ctrl_c_that_python_would_lose_ends_the_command(tmp_path: Path) -> None:
    scripts.write(tmp_path, INTERRUPTS, "click.py")
    result = run_launch(tmp_path, "script.py", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert (result.code, result.err) == (130, "")


def test_an_early_ctrl_c_always_ends_the_command(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import time; time.sleep(60)")
    for number in range(12):
        job = Launch(tmp_path, script)
        wait_until(lambda job=job: listens(job.process.pid), "its signal handlers")
        time.sleep(number * 0.016)
        job.signal(signal.SIGINT)
        result = job.wait()
        assert result.code == 130, f"after {number * 16} ms: {result}"
        assert "Traceback" not in result.err
        assert "ignored" not in result.err


def listens(pid: int) -> bool:
    """Whether the command has installed its handlers, the one for notices last."""
    caught = int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)  # type: ignore[index]
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)


# Signals come while the interpreter ends, long after the exit code is decided.
LATE = """
import atexit, os, signal, sys
def late():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(os.getpid(), number)
atexit.register(late)
from launcher.__main__ import main
main()
"""


def test_a_signal_after_the_end_does_not_change_the_exit_code(tmp_path: Path) -> None:
    driver = scripts.write(tmp_path, LATE, "driver.py")
    result = Launch(tmp_path, "--no_python", "sh", "-c", "exit 5", program=(driver,)).wait()
    assert (result.code, "Traceback" in result.err) == (5, False)
