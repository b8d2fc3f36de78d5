"""`launcher.run`: what comes back from ranks, what is raised, on any thread, and that nothing is left."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import scripts
from harness.launch.command import nap, running, slowness
from harness.launch.sshd import LoopbackSshd

import launcher
from launcher.api import pickling
from launcher.api.parameters import Parameters
from launcher.base.errors import HostfileError, LauncherError, TransportError, UsageError
from launcher.base.processes import members_of_job
from launcher.base.units import format_duration
from launcher.cli.commands.run import run as run_command
from launcher.cli.options.command import Option
from launcher.plan.plan import Command
from launcher.plan.planning import Here


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def job_ids(folder: Path) -> list[str]:
    """The jobs that have left logs in a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_two_at_once_on_other_threads_are_two_jobs_and_one_that_hangs_is_ended(folder: Path) -> None:
    def wait(seconds: float) -> str:
        time.sleep(seconds)
        return os.environ["LAUNCH_JOB_ID"]

    start_s, limit_s = time.monotonic(), 2.0 * slowness()
    with ThreadPoolExecutor(2) as threads:
        quick = threads.submit(launcher.run, wait, 0.0, log_dir="quick")
        slow = threads.submit(launcher.run, wait, 600.0, log_dir="slow", timeout_s=limit_s)
    assert quick.result() == job_ids(folder / "quick")
    with pytest.raises(launcher.JobTimeout, match=re.escape(f"not ended after {format_duration(limit_s)},")) as caught:
        slow.result()
    assert isinstance(caught.value, TimeoutError)
    assert time.monotonic() - start_s < 60 * slowness()
    assert not members_of_job(job_ids(folder / "slow")[0])


def test_a_setup_runs_before_the_ranks() -> None:
    options = launcher.Options(setup="export FROM_SETUP=1")
    assert launcher.run(os.getenv, "FROM_SETUP", ranks=2, options=options) == ["1", "1"]


def test_the_time_of_a_job_counts_before_its_ranks_start(folder: Path) -> None:
    with pytest.raises(launcher.JobTimeout):
        launcher.run(time.sleep, 600, timeout_s=1e-6)
    with pytest.raises(launcher.JobError):  # whoever catches the base class catches it
        launcher.run(time.sleep, 600, timeout_s=1e-6, log_dir="logs")


@pytest.mark.filterwarnings("error")  # of a thread that dies
def test_a_time_without_end_is_one() -> None:
    assert launcher.run(os.getpid, timeout_s=math.inf)


def test_a_script_that_fails_raises_and_what_it_wrote_is_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = scripts.write(folder, "import sys; print('READ', sys.argv[1:]); sys.exit(7)")
    with pytest.raises(launcher.RankFailed, match=r"rank 0: failed .* exit code 7") as caught:
        launcher.run(script, "--lr", 0.5, folder / "data", 3)
    error = caught.value
    words = ["--lr", "0.5", str(folder / "data"), "3"]
    assert (error.rank, error.exit_code, error.signal, error.__cause__) == (0, 7, None, None)
    assert capsys.readouterr().out == f"[0] READ {words}\n"
    assert error.log == error.outcome.logs[0]
    assert error.log.read_text() == f"READ {words}\n"
    assert error.outcome.failure is not None
    assert not members_of_job(error.outcome.job_id)


def test_a_restart_calls_again_and_forgets_what_came_before() -> None:
    def second_time() -> str:
        count = os.environ["LAUNCH_RESTART_COUNT"]
        if count == "0" and os.environ["RANK"] == "1":
            raise ValueError("the first time")
        return count

    assert launcher.run(second_time, ranks=2, max_restarts=1, output="files") == ["1", "1"]


def test_what_takes_the_lines_and_fails_ends_the_job_and_is_raised(folder: Path) -> None:
    def work() -> None:
        print("one")
        time.sleep(600)

    def take_line(rank: int, stream: str, line: str) -> None:
        raise KeyError(line)

    with pytest.raises(KeyError, match="one"):
        launcher.run(work, output=take_line)
    assert not members_of_job(job_ids(folder / "runs")[0])


def test_lines_are_whole_whatever_pieces_they_come_in() -> None:
    def work() -> None:
        out = os.fdopen(1, "wb", buffering=0)
        for piece in (b"caf\xc3", b"\xa9\n\n", b"\r 10%", b"\r 20", b"%\rdone\r", b"\nno end"):
            out.write(piece)
            time.sleep(0.2)

    lines: list[tuple[int, str, str]] = []
    launcher.run(work, output=lambda *line: lines.append(line))
    assert {(rank, stream) for rank, stream, _ in lines} == {(0, "stdout")}
    assert [line for _, _, line in lines] == ["café", "", " 10%", " 20%", "done", "no end"]


@pytest.mark.cluster
def test_over_ssh_large_calls_and_results_come_through_whole_and_an_error_with_its_cause(sshd: LoopbackSshd) -> None:
    """12 MB are three windows of the protocol; nothing is shared but the connection."""
    data = os.urandom(12 << 20)

    def work(given: bytes) -> tuple[str, bytes]:
        if os.environ["RANK"] == "1" and not given:
            raise KeyError("no data")
        return hashlib.sha256(given).hexdigest(), given[::-1]

    on_hosts = functools.partial(
        launcher.run,
        hosts=["127.0.0.2", "127.0.0.3 slots=1"],
        ranks=1,
        output="files",
        options=launcher.Options(ssh_config=sshd.ssh_config),
    )
    results: list[Any] = on_hosts(work, data)
    assert results == [(hashlib.sha256(data).hexdigest(), data[::-1])] * 2
    with pytest.raises(launcher.RankFailed, match="KeyError: 'no data'") as caught:
        on_hosts(work, b"")
    assert (caught.value.rank, caught.value.host) == (1, "127.0.0.3")
    assert isinstance(caught.value.__cause__, KeyError)
    assert not members_of_job(caught.value.outcome.job_id)


def test_a_host_that_cannot_be_reached_is_named(sshd: LoopbackSshd, folder: Path) -> None:
    empty = folder / "config"
    empty.write_text(f"Host *\n  Port {sshd.port}\n  UserKnownHostsFile /dev/null\n  GlobalKnownHostsFile none\n")
    with pytest.raises(TransportError, match=r"127\.0\.0\.2") as caught:
        launcher.run(print, hosts=["127.0.0.2"], ranks=1, options=launcher.Options(ssh_config=empty))
    assert "Options(accept_new_host_keys=)" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"ranks": 0}, UsageError, r"ranks=: expected a whole number from 1 to 1024, or gpu, cpu, auto, got 0"),
        ({"timeout_s": -1}, UsageError, "timeout_s=: expected seconds, more than 0, got -1"),
        ({"timeout_s": "2"}, UsageError, "timeout_s=: expected seconds, more than 0, got '2'"),
        ({"max_restarts": -1}, UsageError, "max_restarts=: expected a whole number of at least 0, got -1"),
        ({"max_restarts": "2"}, UsageError, "max_restarts=: expected a whole number of at least 0, got '2'"),
        ({"hosts": [5]}, UsageError, "hosts is a list of host names"),
        ({"output": "nowhere"}, UsageError, "output is 'nowhere'"),
        ({"hosts": "node-a"}, UsageError, "hosts is a list of host names"),
        ({"hosts": ["node-a"], "hostfile": "x"}, UsageError, "takes the place of hostfile"),
        ({"hosts": ["node-a"]}, UsageError, "does not say how many ranks it gets"),
        ({"hosts": ["slots-a"]}, UsageError, '"slots-a" does not say how many ranks it gets'),
        ({"hosts": ["node-a slots=x"]}, HostfileError, 'hosts:1:.*slots is "x"'),
        ({"hosts": ["a", "b"], "ranks": 1, "include": "c"}, HostfileError, 'include=: host "c" is not in the cluster'),
        ({"hostfile": "nowhere"}, HostfileError, "hostfile cannot be read"),
        ({"hosts": ["localhost", "b"], "ranks": 1}, UsageError, r"Options\(master_addr="),
        ({"options": {"grace_s": 1}}, UsageError, r"options is a dict.*such as options=launcher\.Options\(grace_s=1\)"),
        ({"env": ["A=1"]}, UsageError, "env is a list"),
        ({"include": ["a"]}, UsageError, "include is a list"),
        ({"env": {"RANK": "1"}}, UsageError, "RANK would have no effect"),
        ({"env": {"A=B": "1"}}, UsageError, "env: A=B"),
        ({"env": {"A": 1}}, UsageError, "env: A"),
        ({"env": {"A": "x\0y"}}, UsageError, "env: A: it holds a NUL byte"),
    ],
)
def test_what_is_wrong_is_said_in_the_words_of_python_before_anything_starts(
    folder: Path, values: dict[str, Any], error: type[LauncherError], message: str
) -> None:
    with pytest.raises(error, match=message):
        launcher.run(print, **values)
    assert list(folder.iterdir()) == []


def test_hosts_get_the_slots_that_their_lines_leave_out() -> None:
    lines = ["slots-a", "b # slots=4", "# none", "c slots = 3", ""]
    parameters = Parameters(command=Command("script", "t.py", ()), num_gpus=2, hosts=lines)
    cluster = parameters.given_hosts(Here({}, "/", (), 1))
    assert cluster is not None
    assert [(host.name, len(host.slots)) for host in cluster.hosts] == [("slots-a", 2), ("b", 2), ("c", 3)]


def test_options_are_of_the_values_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"Options\(ssh=\): expected one of auto, paramiko, openssh, got 'plink'"):
        launcher.Options(ssh="plink")


@pytest.mark.parametrize(
    "values",
    [
        {"grace_s": math.inf},
        {"grace_s": "5"},
        {"lease_s": 0},
        {"hang_timeout_s": 0},
        {"hang_timeout_s": math.nan},
        {"master_port": 99_999},
        {"ssh_port": 0},
        {"num_nodes": 0},
        {"min_nodes": 1.5},
    ],
)
def test_options_have_the_limits_of_the_command(values: dict[str, Any]) -> None:
    ((name, value),) = values.items()
    expected = rf"Options\({name}=\): expected (seconds|a whole number).*, got '?{re.escape(str(value))}'?$"
    with pytest.raises(UsageError, match=expected):
        launcher.Options(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop_signals": (signal.SIGTERM, signal.SIGKILL)}, "SIGKILL cannot stop a job: no program can handle it"),
        ({"stop_signals": (999,)}, "999 cannot stop a job: there is none of that number"),
        ({"stop_signals": "SIGTERM"}, r"expected whole numbers such as \(0, 1\), got 'SIGTERM'"),
        ({"bound_cores": "0-3"}, r"expected whole numbers such as \(0, 1\), got '0-3'"),
        ({"num_nodes": "4:1"}, "expected MIN:MAX, got '4:1'"),
        ({"engine": "deepspeed"}, "expected one of auto, builtin, got 'deepspeed'"),
    ],
)
def test_options_of_more_than_one_number_have_the_limits_of_the_command(values: dict[str, Any], message: str) -> None:
    (name,) = values
    with pytest.raises(UsageError, match=rf"Options\({name}=\): {message}"):
        launcher.Options(**values)


def test_every_option_of_the_command_is_one_of_the_function() -> None:
    ours = {*inspect.signature(launcher.run).parameters} | {
        field.name for field in dataclasses.fields(launcher.Options)
    }
    in_place = {
        "num_gpus": "ranks", "bind_cores": "bound_cores", "bind_core_list": "bound_cores", "standalone": "hosts",
        "venv_script": "setup", "module": "target", "no_python": "target", "quiet": "output", "plain": "output",
        "redirects": "output", "tee": "output", "local_ranks_filter": "output", "no_prefix": "output",
        "log_level": "output", "no_journal": "has_journal",
    }  # fmt: skip
    assert set(in_place.values()) <= ours
    # A call runs, and starts all nodes; the others have no effect in the command either.
    without = {"dry_run", "as_json", "node_rank", "no_ssh", "no_local_rank", "launcher"}
    shown = {option.name for option in run_command.params if isinstance(option, Option) and not option.hidden}
    assert shown - ours == in_place.keys() | without


def test_options_reach_the_ranks(folder: Path) -> None:
    (folder / "more.env").write_text("FROM_FILE=1")
    (folder / "script.py").write_text(
        "import os, sys; print(sys.argv[1:], os.environ['FROM_FILE'], os.environ['LAUNCH_RESUME'],"
        " len(os.sched_getaffinity(0)))"
    )
    core = min(os.sched_getaffinity(0))
    options = launcher.Options(
        env_files=["more.env"], resume="checkpoints", bound_cores=(core,), pass_local_rank=True, saves_pid=True
    )
    lines: list[str] = []
    outcome = launcher.run("script.py", ranks=1, options=options, output=lambda *line: lines.append(line[2]))
    assert lines == [f"['--local_rank=0'] 1 {folder / 'checkpoints'} 1"]
    assert (outcome.run_folder / "launch.pid").read_text() == f"{os.getpid()}\n"
    with pytest.raises(UsageError, match=r"Options\(pass_local_rank=\) is for scripts"):
        launcher.run(print, options=options)


def test_targets_and_arguments_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no\.py does not exist"):
        launcher.run("no.py")
    with pytest.raises(UsageError, match="neither a function nor the path"):
        launcher.run(3)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="cannot be an argument of a script"):
        launcher.run(__file__, {"a": 1})
    with pytest.raises(UsageError, match="arguments cannot be pickled"):
        launcher.run(print, threading.Lock())


def test_more_than_can_be_sent_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling, "MAX_PICKLE_BYTES", 1000)
    with pytest.raises(UsageError, match=r"arguments takes .* at most 1000 B .*keep large data in a file"):
        launcher.run(print, b"x" * 1000)
    with pytest.raises(UsageError, match=r"the result takes .* keep large data in a file"):
        pickling.pack_answer(pickling.RETURNED, b"x" * 1000, "the result")


def test_a_result_that_cannot_be_pickled_is_shown_without_our_frames() -> None:
    with pytest.raises(launcher.RankFailed, match="the result, a lock, cannot be pickled") as caught:
        launcher.run(threading.Lock)
    assert "pickling.py" not in str(caught.value)


def test_an_answer_that_is_not_whole_is_none() -> None:
    data = pickling.pack_answer(pickling.RETURNED, [1], "the result")
    assert pickling.unpack_answer(data) is not None
    assert [pickling.unpack_answer(data[:end]) for end in (0, 5, len(data) - 1)] == [None] * 3


STUBBORN = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    command = "trap '' TERM; echo deaf; exec sleep " + sys.argv[1]
    child = subprocess.Popen(["sh", "-c", command], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
    print("READY", flush=True)
    time.sleep(600)
"""


def test_a_reader_of_the_output_that_raises_ends_everything_below_the_ranks(folder: Path) -> None:
    def raises(rank: int, stream: str, line: str) -> None:
        raise RuntimeError(f"cannot take {line}")

    words = ["sleep", nap("600.")]
    with pytest.raises(RuntimeError, match="cannot take READY"):
        launcher.run(
            scripts.write(folder, STUBBORN),
            words[1],
            ranks=1,
            output=raises,
            log_dir="logs",
            options=launcher.Options(grace_s=0.5),
        )
    assert not members_of_job(job_ids(folder / "logs")[0])
    assert not running(*words)
