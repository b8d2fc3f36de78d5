"""`launch ps`, `launch logs` and `launch kill` on real jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness import scripts
from harness.launch.command import DEADLINE_S, ROOT, Launch, Result, run_launch, wait_until, wait_until_gone
from harness.launch.fake_job import FakeJob
from harness.launch.sshd import LoopbackSshd
from harness.ports import free_port

from launcher.base.errors import UsageError
from launcher.base.processes import members_of_job
from launcher.cli.commands.jobs import logs, ps

COUNT = "import sys, time\nfor i in range(int(sys.argv[1])): print('line', i, flush=True); time.sleep(0.1)\n"


def launch(folder: Path, *args: str) -> Result:
    """Run a short command beside a job of the same folder, whose output files stay untouched."""
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def jobs_of(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(launch(folder, "ps", "--json").out)
    return found


def test_a_job_is_shown_while_it_runs_and_after(tmp_path: Path) -> None:
    assert launch(tmp_path, "ps").out == "no job is running, and none ended today\n"
    scripts.write(tmp_path, scripts.STUBBORN)
    job = Launch(tmp_path, "--num_gpus", "2", "script.py", "--flag", "a b")
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    (entry,) = jobs_of(tmp_path)
    assert entry["job_id"] == job.job_id
    assert entry["state"] == "running"
    assert entry["pid"] == job.process.pid
    assert entry["hosts"] == ["localhost"]
    assert entry["run_folder"] == str(tmp_path / "runs" / job.job_id)
    line = launch(tmp_path, "ps").out.splitlines()[1]
    assert line.startswith(f"{job.job_id}  running  ")
    assert line.endswith("script.py --flag 'a b'")
    killed = launch(tmp_path, "kill", "--now", job.job_id)
    assert (killed.code, job.wait().code) == (0, 143), killed.err
    assert not members_of_job(job.job_id)
    assert "exit 143" in launch(tmp_path, "ps").out
    assert [entry["state"] for entry in jobs_of(tmp_path)] == ["ended"]


def test_kill_ends_a_job_gently_and_says_so(tmp_path: Path) -> None:
    text = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("SAVED", flush=True), sys.exit(0)))
        print("READY", flush=True)
        time.sleep(600)
    """
    job = Launch(tmp_path, scripts.write(tmp_path, text))
    wait_until(lambda: "READY" in job.out, "the rank")
    result = launch(tmp_path, "kill", job.job_id[:7])
    assert result.code == 0
    assert result.out.startswith(f"{job.job_id} has ended (")
    assert "SAVED" in job.wait().out
    again = launch(tmp_path, "kill", job.job_id)
    assert again.code == 0
    assert "had ended already (exit code 143); nothing was left" in again.out


@pytest.mark.parametrize("handled", ["INT", ""])
def test_kill_says_that_a_job_has_ended_when_its_ranks_have(tmp_path: Path, handled: str) -> None:
    text = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(0)))
        print("READY", flush=True)
        time.sleep(600)
    """
    job = Launch(tmp_path, "--signals-to-handle", handled, scripts.write(tmp_path, text))
    wait_until(lambda: "READY" in job.out, "the rank")
    result = launch(tmp_path, "kill", job.job_id)
    assert not members_of_job(job.job_id)
    assert result.code == 0, result.err
    assert result.out.startswith(f"{job.job_id} has ended (")
    assert job.wait().code == (128 + signal.SIGINT if handled else -signal.SIGTERM)


def test_kill_ends_a_job_whose_launcher_is_stopped(tmp_path: Path) -> None:
    job = Launch(tmp_path, scripts.write(tmp_path, "import time; print('READY', flush=True); time.sleep(600)"))
    wait_until(lambda: "READY" in job.out, "the rank")
    job.signal(signal.SIGSTOP)
    result = launch(tmp_path, "kill", job.job_id)
    job.signal(signal.SIGCONT)
    assert result.code == 0, result.err
    assert job.wait().code == 143


def test_kill_takes_the_name_that_the_launchers_of_all_nodes_have_in_common(tmp_path: Path) -> None:
    text = "import time; print('READY', flush=True); time.sleep(600)"
    own = ("--node-rank", "0", "--num-nodes", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    job = Launch(tmp_path, *own, "--job-id", "shared-name", scripts.write(tmp_path, text))
    wait_until(lambda: "READY" in job.out, "the rank")
    result = launch(tmp_path, "kill", "shared-name")
    assert (result.code, job.wait().code) == (0, 143), result.err
    assert 'no job "shared-name"' in launch(tmp_path, "kill", "shared-name").err


def test_kill_after_the_launcher_was_lost_sweeps_what_it_left(tmp_path: Path) -> None:
    job = Launch(tmp_path, scripts.write(tmp_path, "import time; print('READY', flush=True); time.sleep(600)"))
    wait_until(lambda: "READY" in job.out, "the rank")
    job.signal(signal.SIGKILL)
    job.wait()
    wait_until_gone(job.job_id)
    stray = subprocess.Popen(["sleep", "600"], env={"LAUNCH_JOB_ID": job.job_id})
    wait_until(lambda: stray.pid in members_of_job(job.job_id), "the stray process")
    assert "launcher gone" in launch(tmp_path, "ps").out
    result = launch(tmp_path, "kill", job.job_id)
    assert result.code == 0
    assert "had lost its launcher; 1 process was left" in result.out
    assert stray.wait(DEADLINE_S) == -signal.SIGKILL


def test_logs_of_all_ranks_and_of_one(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import os; print('a\\nb'); print('rank', os.environ['RANK'], end='')")
    job_id = run_launch(tmp_path, "--num_gpus", "2", script).job_id
    assert launch(tmp_path, "logs", job_id).out == "[0] a\n[0] b\n[0] rank 0\n[1] a\n[1] b\n[1] rank 1\n"
    assert launch(tmp_path, "logs", job_id, "--rank", "1").out == "a\nb\nrank 1"
    assert launch(tmp_path, "logs", job_id, "--tail", "1").out == "[0] rank 0\n[1] rank 1\n"
    missing = launch(tmp_path, "logs", job_id, "--rank", "2")
    assert missing.code == 2
    assert "it has ranks 0 to 1" in missing.err


def test_following_ends_with_the_job_and_misses_nothing(tmp_path: Path) -> None:
    job = Launch(tmp_path, "--num_gpus", "2", scripts.write(tmp_path, COUNT), "12")
    job_id = job.job_id
    followed = launch(tmp_path, "logs", "--follow", job_id)
    assert followed.code == 0
    assert job.wait().code == 0
    for rank in (0, 1):
        lines = [line for line in followed.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert lines == [f"[{rank}] line {i}" for i in range(12)]


def test_a_start_that_failed_has_an_entry_but_no_logs(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("no-such-host slots=1\n")
    result = run_launch(tmp_path, "--hostfile", "hosts", "--module", "x")
    assert result.code == 69
    (entry,) = jobs_of(tmp_path)
    assert (entry["state"], entry["exit_code"]) == ("ended", 69)
    missing = launch(tmp_path, "logs", str(entry["job_id"]))
    assert missing.code == 1
    assert "it ended before any rank was started" in missing.err


@pytest.mark.parametrize("command", ["logs", "kill"])
def test_an_unknown_job_is_an_error_with_the_nearest_one(tmp_path: Path, command: str) -> None:
    job_id = run_launch(tmp_path, scripts.write(tmp_path, "")).job_id
    result = launch(tmp_path, command, job_id[:-1] + "z")
    assert result.code == 2
    assert f'did you mean "{job_id}"?' in result.err


def test_a_job_of_another_machine_is_not_killed_from_here(tmp_path: Path) -> None:
    job_id = run_launch(tmp_path, scripts.write(tmp_path, "")).job_id
    path = tmp_path / "state/launch/jobs" / f"{job_id}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "node-z", "ended_s": None}))
    result = launch(tmp_path, "kill", job_id)
    assert result.code == 2
    assert "runs on node-z" in result.err
    assert "on node-z" in launch(tmp_path, "ps").out
    path.write_text(json.dumps(json.loads(path.read_text()) | {"slurm_job": "4711"}))
    result = launch(tmp_path, "kill", job_id)
    assert f"→ scancel 4711 ends its Slurm job; or on node-z: launch kill {job_id}" in result.err
    assert "on node-z, Slurm job 4711" in launch(tmp_path, "ps").out


def test_following_ends_with_the_machine_of_the_job(tmp_path: Path) -> None:
    job_id = run_launch(tmp_path, scripts.write(tmp_path, "print('all')")).job_id
    path = tmp_path / "state/launch/jobs" / f"{job_id}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "node-z", "ended_s": None}))
    os.utime(path, (1000.0, 1000.0))
    assert launch(tmp_path, "logs", "--follow", job_id).out == "[0] all\n"


def test_a_job_that_is_lost_today_is_shown_and_logs_elsewhere_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    job = FakeJob(tmp_path, 1)
    job.register(process="of another boot", started_s=time.time() - 3 * 24 * 3600)
    shown = CliRunner().invoke(ps, ["--json"])
    assert [entry["state"] for entry in json.loads(shown.output)] == ["lost"]
    job.register(machine="node-z", run_folder=str(tmp_path / "not-here"))
    with pytest.raises(UsageError, match="the run folder of calm-otter-4f2a is not here; it is on node-z"):
        CliRunner().invoke(logs, [job.job_id], catch_exceptions=False)


def test_dry_runs_leave_no_entry(tmp_path: Path) -> None:
    assert run_launch(tmp_path, "--dry-run", scripts.write(tmp_path, "")).code == 0
    assert jobs_of(tmp_path) == []


@pytest.mark.cluster
def test_kill_ends_a_job_on_all_hosts(sshd: LoopbackSshd, tmp_path: Path) -> None:
    options = ["--hostfile", str(ROOT / "hostfiles" / "loopback"), "--ssh_config", str(sshd.ssh_config)]
    job = Launch(tmp_path, *options, "--grace", "60", scripts.write(tmp_path, scripts.STUBBORN))
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    assert "127.0.0.[1-2]" in launch(tmp_path, "ps").out
    result = launch(tmp_path, "kill", "--now", job.job_id)
    assert result.code == 0, result.err
    assert job.wait().code in (143, -signal.SIGTERM)  # `kill --now` repeats SIGTERM, perhaps when all is over
    assert not members_of_job(job.job_id)


@pytest.mark.parametrize("command", ["logs", "kill", "stacks"])
def test_a_command_without_its_job_says_where_jobs_are_listed(tmp_path: Path, command: str) -> None:
    result = launch(tmp_path, command)
    assert result.code == 2
    assert "no JOB is named" in result.err
    assert "launch ps" in result.err
