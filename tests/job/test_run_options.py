"""Options of `launch run`, each on real ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness import scripts
from harness.launch.command import ROOT, Launch, nap, run_here, run_launch, running, wait_until, with_limits
from harness.launch.sshd import LoopbackSshd

from launcher.cli.main import cli
from launcher.cli.options.output import OutputOptions

LOOPBACK = str(ROOT / "hostfiles" / "loopback")


def test_variables_reach_ranks_on_every_host_and_stand_in_no_plan(sshd: LoopbackSshd, tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import os; print('GOT', os.environ['TOKEN'], os.environ['FROM_FILE'])")
    (tmp_path / ".launch_env").write_text("FROM_FILE='a b'\n")
    options = ("--hostfile", LOOPBACK, "--ssh_config", str(sshd.ssh_config), "--env", "TOKEN=s3cr3t")
    result = run_launch(tmp_path, *options, script)
    assert result.code == 0, result.err
    assert result.out.count("GOT s3cr3t a b") == 2
    plan = run_launch(tmp_path, *options, "--dry-run", script)
    assert "TOKEN" in plan.out
    assert "s3cr3t" not in plan.out + plan.err


def test_setup_runs_before_python_on_the_host(sshd: LoopbackSshd, tmp_path: Path) -> None:
    (tmp_path / "venv.sh").write_text("export FROM_VENV=1\n")
    script = scripts.write(tmp_path, "import os; print('GOT', os.environ['FROM_VENV'], os.environ['FROM_SETUP'])")
    options = ("--hostfile", LOOPBACK, "--ssh_config", str(sshd.ssh_config))
    setup = ("--venv_script", str(tmp_path / "venv.sh"), "--setup", "export FROM_SETUP=2")
    result = run_launch(tmp_path, *options, *setup, script)
    assert result.code == 0, result.err
    assert result.out.count("GOT 1 2") == 2


def test_a_setup_wins_over_this_shell_on_other_hosts_too(sshd: LoopbackSshd, tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import os; print('GOT', os.environ['NCCL_DEBUG'], os.environ['HF_HOME'])")
    options = (
        "--hostfile",
        LOOPBACK,
        "--ssh_config",
        str(sshd.ssh_config),
        "--setup",
        "export NCCL_DEBUG=setup HF_HOME=a",
    )
    env = {"NCCL_DEBUG": "shell", "HF_HOME": "shell"}
    result = run_launch(tmp_path, *options, "--env", "HF_HOME=given", script, env=env)
    assert (result.code, result.out.count("GOT setup given")) == (0, 2), result.err
    words = ("exec", *options, "--", "sh", "-c", "echo $NCCL_DEBUG $LAUNCH_SETUP_CHANGED")
    assert set(run_launch(tmp_path, *words, env=env).out_of_hosts.values()) == {"setup\n"}


def test_a_setup_that_fails_is_told(sshd: LoopbackSshd, tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "pass")
    options = ("--hostfile", LOOPBACK, "--ssh_config", str(sshd.ssh_config))
    result = run_launch(tmp_path, *options, "--setup", "echo no module cuda >&2; false", script)
    assert result.code == 69
    assert "no module cuda" in result.err


@pytest.mark.parametrize("lines", [None, f"{socket.gethostname()} slots=1\nlocalhost slots=1\n"])
def test_setup_runs_on_this_machine_too(tmp_path: Path, lines: str | None) -> None:
    (tmp_path / "venv.sh").write_text("export FROM_VENV=1\n")
    script = scripts.write(tmp_path, "import os; print('GOT', os.environ['FROM_VENV'], os.environ['FROM_SETUP'])")
    (tmp_path / "hosts").write_text(lines or "")
    hosts = ("--hostfile", "hosts") if lines else ()
    setup = ("--venv-script", "venv.sh", "--setup", "export FROM_SETUP=2")
    result = run_launch(tmp_path, *hosts, *setup, script)
    assert (result.code, result.out.count("GOT 1 2")) == (0, 2 if lines else 1), result.err
    planned = run_here(tmp_path, *hosts, *setup, "--dry-run", script)
    assert "  setup       . ./venv.sh && export FROM_SETUP=2\n" in planned.out
    failing = run_here(tmp_path, *hosts, "--setup", "echo no module cuda >&2; false", script)
    assert (failing.code, "it failed (exit status 1): no module cuda" in failing.err) == (69, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash", None])
def test_a_setup_that_takes_long_ends_with_the_launcher(
    sshd: LoopbackSshd, tmp_path: Path, number: int, shell: str | None
) -> None:
    """shell: the user's own, here; None: on a host reached over SSH, its account's."""
    is_remote = shell is None
    hosts = ("--hostfile", LOOPBACK, "--ssh_config", str(sshd.ssh_config)) if is_remote else ("--num-gpus", "1")
    words = ("sleep", nap("1234"))
    setup = f"trap '' HUP INT TERM; {' '.join(words)}; true"
    env = {**with_limits(1 / 3), **({} if shell is None else {"SHELL": shell})}
    run = Launch(tmp_path, *hosts, "--setup", setup, scripts.write(tmp_path, ""), env=env)
    wait_until(lambda: len(running(*words)) == 1 + is_remote, "the setup")
    run.signal(number)
    assert run.wait().code == (130 if number == signal.SIGINT else -signal.SIGKILL)
    wait_until(lambda: not running(*words), "the end of what the setup has started")


def test_a_setup_waits_for_its_own_jobs_alone(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "--num-gpus", "1", "--setup", "sleep 0.1 & wait", scripts.write(tmp_path, ""))
    assert (result.code, "setup" in result.err) == (0, False), result.err


@pytest.mark.parametrize("is_remote", [False, True], ids=["here", "ssh"])
def test_what_a_setup_runs_in_the_background_ends_with_the_ranks(
    sshd: LoopbackSshd, tmp_path: Path, is_remote: bool
) -> None:
    hosts = ("--hostfile", LOOPBACK, "--ssh_config", str(sshd.ssh_config)) if is_remote else ("--num-gpus", "1")
    words = ("sleep", nap("1234"))
    script = scripts.write(tmp_path, "import os; os.kill(int(os.environ['JOB']), 0); print('IT RUNS')")
    result = run_launch(tmp_path, *hosts, "--setup", f"{' '.join(words)} & export JOB=$!", script)
    assert (result.code, result.out.count("IT RUNS")) == (0, 1 + is_remote), result.err
    assert not running(*words)


@pytest.mark.parametrize("is_remote", [False, True], ids=["here", "ssh"])
def test_what_a_setup_prints_while_the_ranks_run_harms_nothing(
    sshd: LoopbackSshd, tmp_path: Path, is_remote: bool
) -> None:
    hosts = ("--hostfile", LOOPBACK, "--ssh_config", str(sshd.ssh_config)) if is_remote else ("--num-gpus", "1")
    setup = f"cd {tmp_path}; (until test -e go; do sleep 0.02; done; echo tunnel is up; mkdir said.$$) &"
    script = scripts.write(
        tmp_path,
        f"""
        import glob, os, time
        open("go", "w").close()
        while len(glob.glob("said.*")) < {1 + is_remote}:
            time.sleep(0.02)
        print("OUT")
        """,
    )
    result = run_launch(tmp_path, *hosts, "--setup", setup, script)
    assert (result.code, result.out.count("OUT"), "tunnel" in result.out) == (0, 1 + is_remote, False), result.err


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ("exit 7", "it failed (exit status 7)\n"),
        ("exit", "it ended its shell (exit status 0)\n"),
        ("set -e; false; true", "it failed (exit status 1)\n"),
    ],
)
def test_a_setup_that_ends_its_shell_is_told(tmp_path: Path, setup: str, words: str) -> None:
    result = run_here(tmp_path, "--num-gpus", "1", "--setup", setup, scripts.write(tmp_path, ""))
    assert (result.code, f"--setup or --venv-script: {words}" in result.err) == (69, True), result.err


def test_a_plan_shows_the_beginning_of_long_commands(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "")
    setup = ("--setup", "export A=" + "x" * 300)
    short = run_here(tmp_path, *setup, "--dry-run", script)
    whole = run_here(tmp_path, *setup, "--dry-run", "-v", script)
    assert "… (-v: all of it)\n" in short.out
    assert "launcher.agent.main" not in short.out
    assert "launcher.agent.main" in whole.out


def test_new_host_keys_are_recorded_when_asked(sshd: LoopbackSshd, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    config = tmp_path / "ssh_config"
    text = re.sub(r"(?m)^(\s*)UserKnownHostsFile .*$", rf"\1UserKnownHostsFile {known}", sshd.ssh_config.read_text())
    config.write_text(text)
    script = scripts.write(tmp_path, "pass")
    options = ("--hostfile", LOOPBACK, "--ssh_config", str(config))
    assert run_launch(tmp_path, *options, script).code == 69
    accepting = run_launch(tmp_path, *options, "--accept-new-host-keys", script)
    assert accepting.code == 0, accepting.err
    assert len(known.read_text().splitlines()) == 2
    assert run_launch(tmp_path, *options, script).code == 0


def test_cores_are_shared_out(tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path, "import os; print('CPUS', sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    )
    cpus = sorted(os.sched_getaffinity(0))[:2]
    assert len(cpus) == 2
    result = run_launch(tmp_path, "--num_gpus", "2", "--bind_core_list", ",".join(map(str, cpus)), script)
    assert result.code == 0, result.err
    for rank, cpu in enumerate(cpus):
        assert f"[{rank}] CPUS [{cpu}] 1" in result.out
    too_many = run_launch(tmp_path, "--num_gpus", "3", "--bind_core_list", str(cpus[0]), script)
    assert too_many.code == 2
    assert "✗ could not start ranks on localhost: 3 ranks cannot be bound to 1 core" in too_many.err
    assert "was lost" not in too_many.err
    assert "next  start fewer ranks on the host" in too_many.err


def test_nodes_started_by_hand_find_each_other(tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, socket, time
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if rank == 0:  # meets the others as a process group's store does
            with socket.create_server(address) as server:
                peers = [server.accept()[0] for _ in range(world_size - 1)]
            total = sum(int(peer.recv(9)) for peer in peers)
            for peer in peers:
                peer.sendall(b"%d" % total)
        else:
            while True:
                try:
                    peer = socket.create_connection(address)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.02)
            peer.sendall(b"%d" % rank)
            total = int(peer.recv(9))
        print("RUN", os.environ["TORCHELASTIC_RUN_ID"])
        print("SUM", total, os.environ["NODE_RANK"], os.environ["LOCAL_RANK"], os.environ["CROSS_SIZE"])
        """,
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = ("--nnodes", "2", "--num_gpus", "2", "--master_addr", "127.0.0.1", "--master_port", port)
    jobs = []
    for node in range(2):
        folder = tmp_path / str(node)
        folder.mkdir()
        jobs.append(Launch(folder, *shared, "--no_ssh", "--node_rank", str(node), script))
    results = [job.wait() for job in jobs]
    assert [result.code for result in results] == [0, 0], results
    for node, result in enumerate(results):
        for local in range(2):
            assert f"[{2 * node + local}] RUN 127.0.0.1-{port}\n" in result.out
            assert f"[{2 * node + local}] SUM 6 {node} {local} 2" in result.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--nnodes", "2", "--node_rank", "0"), "need --master-addr and --master-port"),
        (("--node_rank", "3"), "only 1 nodes"),
        (
            ("--hostfile", LOOPBACK, "--no_ssh", "--master_addr", "x", "--master_port", "1"),
            "not a host of the hostfile",
        ),
        (("--standalone", "--hostfile", LOOPBACK), "this machine alone"),
        (("--signals_to_handle", "SIGUSR3"), "there is no signal SIGUSR3"),
        (("--signals_to_handle", "KILL"), "SIGKILL cannot stop a job: no program can handle it"),
        (("--signals_to_handle", "TERM,TSTP"), "SIGTSTP cannot stop a job: it suspends launch"),
        (("--signals_to_handle", "CONT"), "SIGCONT cannot stop a job"),
        (("--signals_to_handle", "SEGV"), "SIGSEGV cannot stop a job: it tells that launch itself has failed"),
        (("--signals_to_handle", "INT,quit"), "SIGQUIT cannot stop a job: it asks for the stacks"),
        (("--job_id", "a b"), '"a b" cannot be a job id'),
        (("--bind_core_list", "x"), "not a CPU number"),
        (("--env", "NOT_SET_ANYWHERE"), "not set here"),
        (("--min_nodes", "1"), "goes with --max-restarts"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    result = run_here(tmp_path, *args, scripts.write(tmp_path, "pass"))
    assert result.code == 2
    assert message in result.err
    assert not (tmp_path / "runs").exists()


def test_a_chosen_signal_ends_the_job(tmp_path: Path) -> None:
    job = Launch(tmp_path, "--signals-to-handle", "USR1,TERM", scripts.write(tmp_path, "print('UP')\nwhile True: pass"))
    wait_until(lambda: "UP" in job.out, "the rank")
    job.signal(signal.SIGUSR1)
    assert job.wait().code == 128 + signal.SIGUSR1


def test_the_pid_of_the_launcher_is_saved(tmp_path: Path) -> None:
    job = Launch(tmp_path, "--save_pid", scripts.write(tmp_path, "print('UP')"))
    pid = job.process.pid
    assert job.wait().code == 0
    (path,) = tmp_path.glob("runs/*/launch.pid")
    assert int(path.read_text()) == pid


@pytest.mark.parametrize(
    ("level", "shown"), [("debug", "warning"), ("info", "warning"), ("error", "error"), ("critical", "critical")]
)
def test_the_stricter_one_of_quiet_and_log_level_holds(level: str, shown: str) -> None:
    assert OutputOptions(quiet=True, log_level=level).level == shown
    assert OutputOptions(log_level=level).level == level


def test_log_levels(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "print('OUT')")
    quiet, info, debug = (run_launch(tmp_path, "--log_level", level, script) for level in ("error", "info", "debug"))
    assert quiet.out == "[0] OUT\n"
    assert quiet.err == ""
    assert "job " in info.err
    assert "launcher.agent" in debug.err
    assert "launcher.agent" not in info.err
    assert info.out == debug.out == quiet.out


def test_without_prefixes_stdout_is_what_the_script_wrote(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import sys; sys.stdout.write('{\"a\": 1}\\n\\x1b[1mno end')")
    assert run_launch(tmp_path, "--num_gpus", "1", "--no-prefix", script).out == '{"a": 1}\n\x1b[1mno end'
    two = run_launch(tmp_path, "--num_gpus", "2", "--no-prefix", script)
    assert sorted(two.out.splitlines()) == sorted(['{"a": 1}', "\x1b[1mno end"] * 2)


def test_each_rank_log_under_deepspeed_s_name(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "--enable_each_rank_log", "logs", scripts.write(tmp_path, "print('OUT')"))
    assert result.code == 0
    (log,) = tmp_path.glob("logs/*/rank_0.log")
    assert log.read_text() == "OUT\n"
    assert json.loads((log.parent / "report.json").read_text())["exit_code"] == 0


def test_a_master_port_in_use_ends_before_any_rank_starts(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "open('ran', 'w')")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        result = run_launch(tmp_path, "--num_gpus", "2", "--master_port", port, script)
    assert result.code == 2
    assert f"✗ localhost: port {port} is in use\n  → give another --master-port" in result.err
    assert not (tmp_path / "ran").exists()


def test_a_privileged_master_port_is_not_said_to_be_in_use(tmp_path: Path) -> None:
    port = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) - 1
    if port < 1:
        pytest.skip("this machine lets everybody use every port")
    # root may use it: PR_CAPBSET_DROP of CAP_NET_BIND_SERVICE takes that from what it starts
    drop = "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 10); sys.argv[0] = sys.executable"
    program = ("-c", f"{drop}; os.execv(sys.executable, sys.argv)", ROOT / "launcher" / "__main__.py")
    words = ("--num_gpus", "2", "--master_port", str(port), scripts.write(tmp_path, ""))
    result = Launch(tmp_path, *words, program=program).wait()
    assert (result.code, result.out) == (2, "")
    assert f"✗ localhost: port {port} is privileged: permission denied, as to all below " in result.err
    assert "  → give another --master-port, or leave it out: a free one is chosen" in result.err


def test_asking_lost_hosts_is_no_part_of_the_time_ranks_needed_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_sweep(*_: object) -> tuple[str, ...]:
        time.sleep(1.0)
        return ()

    monkeypatch.setattr("launcher.job.controller.sweep_lost_hosts", slow_sweep)
    script = scripts.write(
        tmp_path, "import os, sys, time; sys.exit(1) if os.environ['RANK'] == '0' else time.sleep(60)"
    )
    words = ["run", "--num-gpus", "2", "--log-dir", str(tmp_path / "runs"), str(script)]
    assert CliRunner().invoke(cli, words).exit_code == 1
    (found,) = tmp_path.glob("runs/*/report.json")
    report = json.loads(found.read_text())
    assert report["num_stopped"] == 1
    assert report["stop_s"] + 1.0 <= report["duration_s"]
