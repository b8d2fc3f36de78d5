"""Real jobs on this machine: environment, output, failures, signals, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT, Launch, run_launch, slowness, wait_until, wait_until_gone

from launcher.base.processes import descendants, members_of_job
from launcher.cluster.devices import all_devices


def values(out: str, rank: int, label: str) -> str:
    match = re.search(rf"^\[{rank}\] {label} (.*)$", out, re.MULTILINE)
    assert match is not None, out
    return match.group(1)


def test_every_rank_gets_its_environment(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, scripts.ENVIRONMENT)
    clean = {"OMP_NUM_THREADS": "7"}
    result = run_launch(tmp_path, "--num_gpus", "3", script, "--flag", "a b", "$HOME;'", env=clean)
    assert result.code == 0
    ports = set()
    for rank in range(3):
        environment = json.loads(values(result.out, rank, "ENV"))
        ports.add(environment.pop("MASTER_PORT"))
        assert environment == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "LOCAL_SIZE": "3",
            "NODE_RANK": "0",
            "GROUP_RANK": "0",
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "CUDA_VISIBLE_DEVICES": "0,1,2" if all_devices().tokens else None,
            "OMP_NUM_THREADS": "7",
        }
        assert json.loads(values(result.out, rank, "ARGV")) == ["--flag", "a b", "$HOME;'"]
        assert values(result.out, rank, "CWD") == str(tmp_path)
    assert len(ports) == 1
    assert 1024 < int(ports.pop()) < 65536


def test_a_parent_that_ignores_the_ends_of_children_does_not_matter(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import signal; print('DEFAULT', signal.getsignal(signal.SIGCHLD) == 0)")
    ignoring = "import os, signal as s, sys; s.signal(s.SIGCHLD, s.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    launch = (sys.executable, ROOT / "launcher" / "__main__.py")
    result = Launch(tmp_path, "--num-gpus", "1", script, program=("-c", ignoring, *launch)).wait()
    assert (result.code, "DEFAULT True" in result.out) == (0, True), result.err


def test_two_jobs_at_once_get_different_ports(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import os, time; print('PORT', os.environ['MASTER_PORT']); time.sleep(0.5)")
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    jobs = [Launch(folder, script) for folder in folders]
    results = [job.wait() for job in jobs]
    assert [result.code for result in results] == [0, 0]
    assert len({values(result.out, 0, "PORT") for result in results}) == 2


@pytest.mark.parametrize(
    ("kind", "code", "reason"),
    [
        ("exit", 3, "exit code 3"),
        ("raise", 1, "ValueError: the data is bad"),
        ("message", 1, "no such dataset"),
        ("SIGKILL", 137, "killed by SIGKILL"),
        ("SIGSEGV", 139, "killed by SIGSEGV"),
    ],
)
def test_the_first_failure_stops_all_and_is_named(tmp_path: Path, kind: str, code: int, reason: str) -> None:
    script = scripts.write(tmp_path, scripts.BIPOLAR)
    result = run_launch(tmp_path, "--num_gpus", "3", script, kind)
    assert result.code == code
    assert "✗ rank 1 (localhost, pid " in result.err
    report = result.err[result.err.index("✗ rank 1") :]
    assert reason in report
    assert report.count("Traceback (most recent call last)") == (1 if kind == "raise" else 0)
    if kind == "raise":
        assert "worker.py" not in report, "the traceback shows the user's frames only"
    assert "2 other ranks were stopped" in report
    saved = json.loads((tmp_path / "runs" / result.job_id / "report.json").read_text())
    assert saved["failure"]["rank"] == 1
    assert saved["exit_code"] == code
    assert not members_of_job(result.job_id)


CRASHES = """
    import ctypes, os, sys, time
    def in_native_code():
        ctypes.string_at(0)
    if sys.argv[1:] == ["in a fork"]:
        if os.fork() == 0:
            in_native_code()
        os.wait()
        while not os.path.exists("go"):
            time.sleep(0.02)
    else:
        in_native_code()
"""


@pytest.mark.parametrize("options", [(), ("--module",)], ids=["script", "module"])
def test_the_stack_of_a_crash_has_the_frames_of_the_script_only(options: tuple[str, ...], tmp_path: Path) -> None:
    scripts.write(tmp_path, CRASHES, "crashes.py")
    result = run_launch(tmp_path, *options, "crashes" if options else "crashes.py")
    assert result.code == 139
    log = (tmp_path / "runs" / result.job_id / "rank_0.log").read_text()
    for text in (log, result.err):
        assert "Fatal Python error: Segmentation fault" in text
        assert re.search(r'crashes\.py", line \d+ in in_native_code', text)
        assert not re.search(r"worker\.py|start\.py|runpy", text)


def test_the_stack_of_a_fork_that_crashes_is_shown_while_the_rank_runs(tmp_path: Path) -> None:
    job = Launch(tmp_path, scripts.write(tmp_path, CRASHES), "in a fork")
    wait_until(lambda: "in in_native_code" in job.err, "the stack")
    (tmp_path / "go").touch()
    result = job.wait()
    assert result.code == 0
    assert "worker.py" not in result.err
    assert result.err.count("Segmentation fault") == 1


def test_stubborn_ranks_and_their_children_are_killed_in_one_grace(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, scripts.STUBBORN)
    grace_s = 2.0 * slowness()
    job = Launch(tmp_path, "--num_gpus", "3", "--grace", str(grace_s), script)
    wait_until(lambda: job.out.count("READY") == 3, "the ranks")
    job.signal(signal.SIGTERM)
    result = job.wait()
    assert result.code == 143
    assert not members_of_job(result.job_id)
    seconds = json.loads((tmp_path / "runs" / result.job_id / "report.json").read_text())["stop_s"]
    assert grace_s <= seconds < 2.75 * grace_s, "one grace, and not one after the other"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_end_all_ranks(tmp_path: Path, number: int, code: int) -> None:
    script = scripts.write(tmp_path, "import time; print('READY', flush=True); time.sleep(600)")
    job = Launch(tmp_path, "--num_gpus", "2", script)
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    job.signal(number)
    result = job.wait()
    assert result.code == code
    assert "✗" not in result.err
    assert not members_of_job(result.job_id)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_process_and_group_leaves_the_ranks_their_grace(tmp_path: Path, number: int) -> None:
    """GNU timeout and others signal a process, and a moment later its group."""
    job = Launch(tmp_path, "--num_gpus", "2", "--grace", "60", scripts.write(tmp_path, scripts.SAVES))
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    os.kill(job.process.pid, number)
    wait_until(lambda: "stopping all ranks" in job.err, "the first signal's effect", 20)
    if number == signal.SIGTERM:  # for SIGINT this may be too late by now
        os.killpg(job.process.pid, number)
    result = job.wait()
    assert result.code == 128 + number
    assert "again" not in result.err
    assert (result.out.count("ASKED"), result.out.count("SAVED")) == (2, 2)


def test_a_second_ctrl_c_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, scripts.STUBBORN)
    job = Launch(tmp_path, "--num_gpus", "2", "--grace", "300", script)
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    job.signal(signal.SIGINT)
    wait_until(lambda: "SIGINT: stopping" in job.err, "the first signal's effect")
    job.signal(signal.SIGINT)
    assert job.wait().code == 130
    wait_until_gone(job.job_id)


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, scripts.STUBBORN)
    job = Launch(tmp_path, "--num_gpus", "2", "--grace", "0.5", script)
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    assert len(members_of_job(job.job_id)) == 4
    job.signal(signal.SIGKILL)
    job.process.wait()
    wait_until_gone(job.job_id)


def test_a_killed_agent_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, scripts.STUBBORN)
    job = Launch(tmp_path, "--num_gpus", "2", script)
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    ranks = members_of_job(job.job_id)
    (agent,) = (pid for pid in descendants(job.process.pid) if pid not in ranks and descendants(pid) == ranks)
    os.kill(agent, signal.SIGKILL)
    result = job.wait()
    assert result.code == 69
    assert "localhost was lost" in result.err
    assert not members_of_job(result.job_id)
    assert not list(Path(tempfile.gettempdir()).glob(f"launch-agent-{result.job_id}-*"))


def test_output_of_any_bytes_is_complete_in_the_log(tmp_path: Path) -> None:
    code = """
    import os, sys
    data = bytes(range(256)) * 4000 + b"no newline at the end"
    sys.stdout.buffer.write(data); sys.stdout.flush()
    """
    result = run_launch(tmp_path, scripts.write(tmp_path, code))
    assert result.code == 0
    log = (tmp_path / "runs" / result.job_id / "rank_0.log").read_bytes()
    assert log == bytes(range(256)) * 4000 + b"no newline at the end"
    assert "[0] " in result.out


def test_stdout_and_stderr_stay_apart(tmp_path: Path) -> None:
    result = run_launch(tmp_path, scripts.write(tmp_path, "import sys; print('one'); print('two', file=sys.stderr)"))
    assert "[0] one\n" in result.out
    assert "[0] two\n" in result.err
    assert "two" not in result.out


def test_a_missing_import_of_one_rank_is_an_error_with_its_traceback(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "--num_gpus", "2", scripts.write(tmp_path, "import no_such_module"))
    assert result.code == 1
    assert "ModuleNotFoundError: No module named 'no_such_module'" in result.err


def test_modules_and_programs(tmp_path: Path) -> None:
    scripts.write(tmp_path, "import sys; print('MODULE', __name__, sys.argv[1:])", "tool.py")
    assert "[0] MODULE __main__ ['x']" in run_launch(tmp_path, "--module", "tool", "x").out
    result = run_launch(tmp_path, "--num_gpus", "2", "--no_python", "sh", "-c", "echo rank $RANK; exit 4")
    assert result.code == 4
    assert "rank" in result.out


def test_a_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    scripts.write(tmp_path, "VALUE = 42", "neighbour.py")
    code = """
    import multiprocessing, neighbour, pickle, sys
    class Thing: pass
    def work(x): return x + neighbour.VALUE
    if __name__ == "__main__":
        assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print("RESULT", pool.map(work, [1])[0], __file__.endswith("script.py"))
    """
    assert "[0] RESULT 43 True" in run_launch(tmp_path, scripts.write(tmp_path, code)).out


def test_a_bad_config_stops_the_job_before_any_rank(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{\n  "zero_optimzation": {}\n}')
    script = scripts.write(tmp_path, "print('STARTED')")
    result = run_launch(tmp_path, script, "--deepspeed", "ds.json")
    assert result.code == 2
    assert 'ds.json:2:3: unknown key "zero_optimzation"' in result.err
    assert 'did you mean "zero_optimization"?' in result.err
    assert "STARTED" not in result.out


def test_local_rank_is_passed_on_request_only(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, scripts.ENVIRONMENT)
    assert json.loads(values(run_launch(tmp_path, script, "x").out, 0, "ARGV")) == ["x"]
    result = run_launch(tmp_path, "--pass_local_rank", script, "x")
    assert json.loads(values(result.out, 0, "ARGV")) == ["--local_rank=0", "x"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("x = (\n", (), "SyntaxError: '(' was never closed"),
        ("\0", (), "null bytes"),
        ("pass", ("--module",), "No module named"),
    ],
)
def test_errors_without_a_frame_of_the_script_are_shown(
    tmp_path: Path, text: str, options: tuple[str, ...], message: str
) -> None:
    script = tmp_path / "broken.py"
    script.write_text(text)
    result = run_launch(tmp_path, *options, "no_such_module" if options else script)
    assert result.code == 1
    assert message in result.err[result.err.index("✗ rank 0") :]


def test_the_traceback_is_shown_once_and_those_of_victims_are_in_their_logs_only(tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, signal, time
        def on_term(number, frame):
            raise ConnectionError(f"peer of {os.environ['RANK']} has gone")
        signal.signal(signal.SIGTERM, on_term)
        print("before", flush=True)
        open(f"ready_{os.environ['RANK']}", "w").close()
        if os.environ["RANK"] == "1":
            while not all(os.path.exists(f"ready_{rank}") for rank in (0, 2)):
                time.sleep(0.05)
            raise ValueError("the cause")
        time.sleep(600)
        """,
    )
    result = run_launch(tmp_path, "--num_gpus", "3", script)
    shown = result.out + result.err
    assert result.code == 1
    assert shown.count("ValueError: the cause") == 1
    assert "has gone" not in shown
    for rank, text in ((0, "peer of 0 has gone"), (1, "ValueError: the cause"), (2, "peer of 2 has gone")):
        (log,) = tmp_path.glob(f"runs/*/rank_{rank}.log")
        lines = log.read_text().splitlines()
        assert lines[0] == "before"
        assert text in lines[-1]


def test_a_hook_of_the_script_still_sees_the_error(tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import sys
        sys.excepthook = lambda kind, error, trace: print("HOOK", kind.__name__, error)
        raise ValueError("seen")
        """,
    )
    result = run_launch(tmp_path, script)
    assert "[0] HOOK ValueError seen" in result.out
    assert "✗ rank 0" in result.err


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("def (", 1, "SyntaxError"),
        ("class E(Exception):\n    def __str__(self): raise RuntimeError('no')\nraise E", 1, "in <module>"),
        ("class E(Exception):\n    def __str__(self): raise SystemExit(9)\nraise E", 1, "in <module>"),
        ("class E(SystemExit):\n    def __str__(self): raise RuntimeError('no')\nraise E(5)", 5, "exit code 5"),
        ("import sys\nsys.exit(10**5000)", 255, "exit code 255"),
        ("import os\nos.environ['RANK'] = 'x'\nraise ValueError('the data is bad')", 1, "the data is bad"),
        ("import traceback\ntraceback.format_exception = None\nraise ValueError('the data is bad')", 1, "is bad"),
        ("raise ValueError('FIRST' + 'x' * 10**7 + 'LAST')", 1, "ValueError: FIRST"),
        ("import sys\ndef hook(*_): raise OSError('hook')\nsys.excepthook = hook\n1 / 0", 1, "OSError: hook"),
    ],
)
def test_the_oddest_errors_are_shown_without_frames_of_ours(tmp_path: Path, text: str, code: int, words: str) -> None:
    result = run_launch(tmp_path, scripts.write(tmp_path, text))
    assert result.code == code, result.err
    assert words in result.err
    assert "worker.py" not in result.err


def test_a_module_that_is_missing_is_named(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "--module", "no_such_module")
    assert result.code == 1
    assert "No module named no_such_module" in result.err


def test_a_rank_killed_after_exit_256_is_a_failure(tmp_path: Path) -> None:
    text = "import atexit, os, sys\natexit.register(os.kill, os.getpid(), 9)\nsys.exit(256)"
    assert run_launch(tmp_path, scripts.write(tmp_path, text)).code == 137


@pytest.mark.parametrize("content", ["'[' * 10**6", "'{}'", "'{\"time_s\": null}'", "None"])
def test_a_record_that_no_worker_wrote_counts_for_nothing(tmp_path: Path, content: str) -> None:
    script = scripts.write(
        tmp_path,
        f"""
        import os
        path, content = os.environ["LAUNCH_ERROR_FILE"], {content}
        os.mkfifo(path) if content is None else open(path, "w").write(content)
        os._exit(3)
        """,
    )
    result = run_launch(tmp_path, script)
    assert result.code == 3, result.err
    assert "exit code 3" in result.err


def test_last_lines_that_are_still_on_the_screen_are_not_repeated(tmp_path: Path) -> None:
    result = run_launch(
        tmp_path, scripts.write(tmp_path, "import os; print('no such data set', flush=True); os._exit(3)")
    )
    assert result.code == 3
    assert (result.out + result.err).count("no such data set") == 1
    assert "(its last lines are above)" in result.err
