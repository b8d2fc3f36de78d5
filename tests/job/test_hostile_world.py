"""Surroundings no program hopes for: closed and full streams, no home, no working directory, absurd options."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import scripts
from harness.launch.command import (
    ROOT,
    Launch,
    Result,
    nap,
    run_here,
    run_launch,
    running,
    slowness,
    wait_until,
    wait_until_gone,
    with_limits,
)
from harness.launch.sshd import LoopbackSshd

from launcher.agent import scratch
from launcher.agent.spawn import spawn_failure
from launcher.agent.wire import Spawn
from launcher.base.processes import descendants, members_of_job, num_open
from launcher.base.timeouts import timeouts
from launcher.job.logs import RankLog


def run_in_shell(folder: Path, line: str, **variables: str) -> Result:
    """Run a line of bash in which LAUNCH stands for the command."""
    command = shlex.join([sys.executable, "-m", "launcher"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state"), **variables}
    done = subprocess.run(
        ["bash", "-c", line.replace("LAUNCH", command)], cwd=folder, env=environment, capture_output=True
    )
    return Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


@pytest.mark.parametrize(
    "streams",
    [">/dev/full", "2>/dev/full", ">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-", "2>&1 >/dev/null | head -1"],
)
def test_no_stream_of_the_launcher_ends_the_job(tmp_path: Path, streams: str) -> None:
    text = "import sys\nfor i in range(9999): print(i); print(i, file=sys.stderr)\nsys.exit(3)"
    scripts.write(tmp_path, text)
    result = run_in_shell(tmp_path, f"set -o pipefail; LAUNCH script.py {streams}")
    assert result.code == 3, result.err
    assert "Traceback" not in result.err
    (log,) = (tmp_path / "runs").glob("*/rank_0.log")
    assert len(log.read_text().splitlines()) == 2 * 9999


def test_a_full_disk_below_standard_output_is_told(tmp_path: Path) -> None:
    scripts.write(tmp_path, "print('a line')")
    assert "No space left on device" in run_in_shell(tmp_path, "LAUNCH script.py >/dev/full").err
    plan = run_in_shell(tmp_path, "LAUNCH --dry-run script.py >/dev/full")
    assert (plan.code, plan.err) == (1, "✗ No space left on device\n")


def test_nothing_is_lost_on_a_stream_that_does_not_block(tmp_path: Path) -> None:
    scripts.write(tmp_path, "for i in range(20000): print(i, 'x' * 50)")
    read, write = os.pipe()
    os.set_blocking(write, False)
    command = [sys.executable, "-m", "launcher", "script.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=write) as process, open(read, "rb") as file:
        os.close(write)
        time.sleep(1.5)  # until the pipe is full
        lines = [line for line in file.read().splitlines() if line.startswith(b"[0] ")]
    assert process.returncode == 0
    assert lines == [b"[0] %d %s" % (i, b"x" * 50) for i in range(20000)]


def test_a_run_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    scripts.write(tmp_path, "print('RAN')")
    result = run_in_shell(tmp_path, "LAUNCH --log_dir $'a\\xff' script.py")
    assert result.code == 0, result.err
    assert "RAN" in result.out


@pytest.mark.parametrize("command", ["script.py", "--no_python true", "exec -- true", "check"])
def test_a_working_directory_that_was_removed_is_one_message(tmp_path: Path, command: str) -> None:
    result = run_in_shell(tmp_path, f"mkdir z; cd z; rmdir ../z; LAUNCH {command}")
    assert result.code == 2
    assert result.err.startswith("✗ the working directory cannot be used: No such file or directory\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody without a home")
def test_a_user_without_a_home_can_start_a_job(tmp_path: Path) -> None:
    code = (
        "import os, launcher.cli.launching, launcher.cli.commands.run, launcher.cli.main as main\n"
        "from launcher.registry import registry\n"
        "os.setuid(54321); os.environ.pop('HOME')\n"
        "try: registry.jobs_folder()\n"
        "except registry.UsageError as error: print(error)\n"
        "main.cli.main(['--dry-run', '--no_python', 'true'], standalone_mode=False)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XDG_STATE_HOME"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd="/", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "this user has no home folder; set XDG_STATE_HOME" in done.stdout
    assert "nothing was started" in done.stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--num_gpus", "9" * 30),
        ("--num_gpus", "100000000"),
        ("--num_nodes", "9" * 12, "--node_rank", "0"),
        ("--grace", "nan"),
        ("--grace", "inf"),
        ("--lease", "nan"),
        ("--hang_timeout", "nan"),
        ("--hostfile", ""),
    ],
)
def test_absurd_values_are_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    result = run_here(tmp_path, *options, scripts.write(tmp_path, "pass"))
    assert result.code == 2
    assert "Traceback" not in result.err


def test_arguments_of_many_ranks_travel_once(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import sys; print('GOT', len(sys.argv))")
    result = run_launch(tmp_path, "--num_gpus", "2", script, *(["x" * 100_000] * 18))
    assert result.out.count("GOT 19") == 2
    from launcher.plan.plan import Command

    words = ("x",) * 3
    assert len(Command("script", "s.py", words).for_ranks(40)) == 1
    assert Command("script", "s.py", words, passes_local_rank=True).for_ranks(2)[1][2] == "--local_rank=1"


@pytest.mark.parametrize("words", [[""], ["true", "a\0b"], ["true", "\ud800"]])
def test_a_program_that_cannot_be_given_its_words_is_one_message(tmp_path: Path, words: list[str]) -> None:
    script, *arguments = words
    job = {"script": script, "args": arguments, "options": {"no_python": True}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    result = run_launch(tmp_path, tmp_path / "job.yaml")
    assert result.code == 1
    assert "cannot be passed on" in result.err
    assert "Traceback" not in result.err


def test_a_variable_that_no_process_can_have_is_named_as_the_cause(tmp_path: Path) -> None:
    scripts.write(tmp_path, "pass")
    (tmp_path / "job.yaml").write_text('script: script.py\nenvironment: {A: "x\\0y"}\n')
    result = run_launch(tmp_path, tmp_path / "job.yaml")
    assert result.code == 1
    assert "✗ could not start ranks on localhost: embedded null byte" in result.err
    assert "Traceback" not in result.err


def test_too_few_descriptors_for_all_ranks_are_the_cause(tmp_path: Path) -> None:
    scripts.write(tmp_path, "import time; time.sleep(60)")
    result = run_in_shell(tmp_path, "ulimit -n 24; LAUNCH --num_gpus 8 script.py")
    assert result.code == 1
    assert "✗ could not start ranks on localhost: 8 ranks need 56 open files" in result.err
    assert "hard limit there is 24" in result.err
    assert "ulimit -Hn" in result.err


def test_more_ranks_than_the_soft_limit_of_open_files_start_and_get_that_limit_themselves(tmp_path: Path) -> None:
    scripts.write(tmp_path, "import resource; print('LIMIT', resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    result = run_in_shell(tmp_path, "ulimit -Sn 40; LAUNCH --num_gpus 24 --no_python python -S script.py")
    assert result.code == 0, result.err
    assert result.out.count("LIMIT 40\n") == 24
    (folder,) = (tmp_path / "runs").iterdir()
    assert sum("LIMIT 40" in log.read_text() for log in folder.glob("rank_*.log")) == 24


def test_logs_beyond_the_hard_limit_of_open_files_are_opened_for_each_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launcher.job import logs

    ranks = tuple(range(50))
    plan: Any = SimpleNamespace(run_folder=tmp_path, saves_pid=False, placement=SimpleNamespace(ranks=ranks))
    monkeypatch.setattr(logs, "allow_files", lambda num_needed: num_needed - 1)
    before = num_open()
    opened = logs.open_logs(plan)
    for text in (b"first ", b"second"):
        for log in opened.values():
            log.write(text)
    assert num_open() == before
    assert {path.read_bytes() for path in tmp_path.glob("rank_*.log")} == {b"first second"}
    (tmp_path / "rank_7.log").unlink()
    (tmp_path / "rank_7.log").mkdir()
    opened[7].write(b"x")
    assert opened[7].write_error is not None


def test_a_full_folder_for_temporary_files_is_passed_over_and_named_when_all_are_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    write = os.write

    def write_unless_full(descriptor: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(full)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_unless_full)
    monkeypatch.setattr(scratch, "_places", lambda: [str(full), str(tmp_path)])
    folder = scratch.Scratch("calm-otter-0000")
    assert Path(folder.path).parent == tmp_path
    folder.remove()
    assert list(full.iterdir()) == []
    monkeypatch.setattr(scratch, "_places", lambda: [str(full)])
    with pytest.raises(OSError, match="No space left") as caught:
        scratch.Scratch("calm-otter-0000")
    spec = Spawn("calm-otter-0000", [], "/", {}, [], None, 1.0)
    failure = spawn_failure(caught.value, spec)
    assert failure.reason == f"{full}: No space left on device"
    assert "TMPDIR" in str(failure.hint)


def test_a_limit_of_the_size_of_files_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    scripts.write(tmp_path, "print('RAN')")
    result = run_in_shell(tmp_path, "ulimit -f 8; LAUNCH script.py")
    assert result.code == 1
    assert "File too large" in result.err
    assert "ulimit -f" in result.err


def test_where_no_temporary_file_can_be_written_tmpdir_is_named() -> None:
    spec = Spawn("calm-otter-0000", [], "/", {}, [], None, 1.0)
    failure = spawn_failure(OSError(errno.EROFS, "Read-only file system", "/tmp"), spec)
    assert "TMPDIR" in str(failure.hint)


def test_a_log_that_is_opened_for_each_write_stays_in_our_folder(tmp_path: Path) -> None:
    """Whoever owns the folder above may put another in place of the run folder, with links for logs."""
    ours, victim = tmp_path / "run", tmp_path / "victim"
    ours.mkdir(mode=0o700)
    victim.touch()
    logs = [RankLog(ours / f"rank_{rank}.log", keeps_open=False) for rank in range(2)]
    logs[0].write(b"a line\n")
    assert (ours / "rank_0.log").read_bytes() == b"a line\n"
    (ours / "rank_0.log").unlink()
    (ours / "rank_0.log").symlink_to(victim)
    logs[0].write(b"more\n")
    ours.rename(tmp_path / "moved")
    ours.mkdir()
    (ours / "rank_1.log").hardlink_to(victim)
    logs[1].write(b"more\n")
    assert all(log.write_error is not None for log in logs)
    assert victim.read_bytes() == b""


def test_a_hang_up_means_nothing_under_nohup(tmp_path: Path) -> None:
    scripts.write(tmp_path, "import time; print('READY', flush=True); time.sleep(1.5)")
    line = (
        "trap '' HUP; LAUNCH script.py & p=$!; until grep -q READY runs/*/rank_0.log; do sleep .05; done; kill -HUP $p"
    )
    result = run_in_shell(tmp_path, f"{line}; wait $p")
    assert result.code == 0, result.out + result.err


def test_ctrl_c_while_the_command_loads_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    result = run_launch(tmp_path, "--version", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert (result.code, result.err) == (130, "")


def test_a_suspended_agent_does_not_keep_the_launcher_from_ending(tmp_path: Path) -> None:
    """Every further Ctrl-C used to begin the wait anew."""
    script = scripts.write(tmp_path, "import time; print('READY', flush=True); time.sleep(600)")
    job = Launch(tmp_path, "--grace", "0", script, env=with_limits(0.3))
    wait_until(lambda: "READY" in job.out, "the rank")
    (agent,) = [pid for pid in descendants(job.process.pid) if len(descendants(pid)) == 1]
    os.kill(agent, signal.SIGSTOP)
    start_s = time.monotonic()
    while job.process.poll() is None and time.monotonic() - start_s < 30.0 * slowness():
        job.signal(signal.SIGINT)
        time.sleep(1.0)
    job.wait()
    assert time.monotonic() - start_s < 25.0 * slowness()
    wait_until_gone(job.job_id)


@pytest.mark.parametrize("insists", [False, True])
def test_a_suspended_agent_does_not_make_the_end_longer_than_the_grace(tmp_path: Path, insists: bool) -> None:
    """What the ranks have started ends, too, whatever is in its environment, and no folder stays."""
    words = ["sleep", nap("600.")]
    job = Launch(tmp_path, "--grace", "60" if insists else "1", scripts.write(tmp_path, scripts.ORPHAN), words[1])
    wait_until(lambda: "READY" in job.out, "the rank")
    (agent,) = [pid for pid in descendants(job.process.pid) if len(descendants(pid)) == 2]
    os.kill(agent, signal.SIGSTOP)
    job.signal(signal.SIGTERM)
    if insists:
        job.signal(signal.SIGTERM, after="stopping all ranks")
    wait_until(lambda: job.process.poll() is not None, "the end", 3 + timeouts().local_answer_s + SLOW_S)
    assert job.wait().code == 143
    assert not members_of_job(job.job_id)
    assert not running(*words)
    assert not folders_of(job.job_id)


@pytest.mark.parametrize("also", [[], ["launcher"], ["guard"]])
def test_a_killed_agent_leaves_nothing_that_does_not_carry_the_job_s_id(tmp_path: Path, also: list[str]) -> None:
    words = ["sleep", nap("600.")]
    job = Launch(tmp_path, "--grace", "60", scripts.write(tmp_path, scripts.ORPHAN), words[1])
    wait_until(lambda: "READY" in job.out, "the rank")
    assert running(*words)
    (agent,) = [pid for pid in descendants(job.process.pid) if len(descendants(pid)) == 2]
    (guard,) = [pid for pid in descendants(job.process.pid) if len(descendants(pid)) == 3]
    pids = {"launcher": job.process.pid, "guard": guard}
    for pid in (*(pids[name] for name in also), *([] if also == ["guard"] else [agent])):
        os.kill(pid, signal.SIGKILL)
    assert job.wait().code == (-9 if "launcher" in also else 69)
    job_id = job.job_id
    wait_until(lambda: not (running(*words) or members_of_job(job_id) or folders_of(job_id)), "the end of all", 20)


def test_a_suspended_agent_ends_after_its_launcher_was_killed(tmp_path: Path) -> None:
    words = ["sleep", nap("600.")]
    job = Launch(tmp_path, scripts.write(tmp_path, scripts.ORPHAN), words[1])
    wait_until(lambda: "READY" in job.out, "the rank")
    (agent,) = [pid for pid in descendants(job.process.pid) if len(descendants(pid)) == 2]
    os.kill(agent, signal.SIGSTOP)
    job_id = job.job_id
    job.signal(signal.SIGKILL)
    job.process.wait()
    wait_until(lambda: not (running(*words) or members_of_job(job_id) or folders_of(job_id)), "the end of all", 20)


@pytest.mark.cluster
def test_a_suspended_agent_on_another_host_ends_with_its_connection(sshd: LoopbackSshd, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.2 slots=1\n")
    words = ["sleep", nap("600.")]
    job = Launch(
        tmp_path, "--hostfile", "hosts", "--ssh_config", sshd.ssh_config, "--grace", "0",
        scripts.write(tmp_path, scripts.ORPHAN), words[1],
        env=with_limits(0.2),
    )  # fmt: skip
    wait_until(lambda: "READY" in job.out, "the rank")
    (child,) = running(*words)
    os.kill(parent_of(parent_of(child)), signal.SIGSTOP)
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143
    job_id = job.job_id
    wait_until(lambda: not (running(*words) or members_of_job(job_id) or folders_of(job_id)), "the end of all", 20)


SLOW_S = 10.0  # a machine with other work


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def folders_of(job_id: str) -> list[Path]:
    return [path for place in ("/tmp", "/var/tmp") for path in Path(place).glob(f"launch-agent-{job_id}-*")]
