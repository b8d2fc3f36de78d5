"""`deepspeed.launcher.runner` and `multinode_runner`: what scripts ask them, and commands that start ranks."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.launch.command import ROOT, wait_until
from harness.ports import free_port

from launcher.cli import deepspeed_runner as runner
from launcher.cli import multinode_runner as multinode

HOSTS = {"node-a": [0, 1, 2, 3], "node-b": [0, 1]}
SHOW = "import os, sys; sys.stdout.write(f\"rank {os.environ['RANK']} {sys.argv[1:]}\\n\")\n"


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", HOSTS),
        ("node-b", "", {"node-b": [0, 1]}),
        ("node-a:1@node-a:0,1", "", {"node-a": [0, 1]}),
        ("", "node-a:0-2@node-b", {"node-a": [3]}),
        ("", "node-a@node-b", {}),
    ],
)
def test_filters_leave_hosts_and_slots(include: str, exclude: str, left: dict[str, list[int]]) -> None:
    assert runner.parse_resource_filter(HOSTS, include, exclude) == left
    assert runner.parse_inclusion_exclusion({"node-a": 4, "node-b": 2}, include, exclude) == left


@pytest.mark.parametrize(("include", "exclude"), [("a", "b"), ("node-c", ""), ("", "node-b:2"), ("", "node-a@b:1@5")])
def test_what_is_no_filter_is_a_value_error(include: str, exclude: str) -> None:
    with pytest.raises(ValueError, match=r"include|exclude"):
        runner.parse_resource_filter(HOSTS, include_str=include, exclude_str=exclude)


def test_hostfiles_are_counts_of_slots(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two\nnode-a slots=4\nnode-b slots=2\n")
    assert runner.fetch_hostfile(str(file)) == {"node-a": 4, "node-b": 2}
    assert runner.fetch_hostfile(str(tmp_path / "none")) is None
    with pytest.raises(ValueError, match=r"hostfile:2:1: .*listed twice"):
        runner._parse_hostfile(["node-a slots=4\n", "node-a slots=2\n"])


def test_lists_of_cores_ascend() -> None:
    assert runner.parse_range_list("0,2-4") == [0, 2, 3, 4]
    for wrong in ("8,2-6", "0-3,3", "6-2", "x"):
        with pytest.raises(ValueError, match=r"CPU"):
            runner.parse_range_list(wrong)


def test_ranks_end_with_the_command_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text(
        "import os, time; open('pid.new', 'w').write(str(os.getpid())); os.rename('pid.new', 'pid'); time.sleep(600)"
    )
    call = [sys.executable, "-c", "from launcher.cli.deepspeed_runner import main; main()", "--num_gpus", "1", script]
    with subprocess.Popen(call, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}) as command:
        wait_until((tmp_path / "pid").exists, "the rank")
        command.kill()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the rank")


@pytest.mark.parametrize("option", ["--num_nodes", "--num_gpus"])
def test_a_number_with_a_filter_is_a_value_error(option: str) -> None:
    with pytest.raises(ValueError, match="cannot be used together"):
        runner.main([option, "1", "-i", "localhost", "train.py"])


def test_main_runs_the_script_and_ends_as_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "show.py").write_text(SHOW + "sys.exit(int(sys.argv[2]))\n")
    monkeypatch.chdir(tmp_path)
    runner.main(["--num_gpus", "2", "show.py", "a 'b'", "0"])
    printed = capfd.readouterr().out
    assert all(f"rank {rank} [\"a 'b'\", '0']" in printed for rank in (0, 1))
    with pytest.raises(SystemExit, match="3"):
        runner.main(["--num_gpus", "1", "show.py", "a", "3"])


def options(*words: str, script: str = "train.py") -> argparse.Namespace:
    return runner.parse_args([*words, script, "--text", "it's 6' tall"])


def test_pdsh_runs_launch_on_each_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a shell on each host would run, as pdsh writes it: the number of the node in place of %n."""
    (tmp_path / "show.py").write_text(SHOW)
    monkeypatch.chdir(tmp_path)
    given = options("--ssh_port", "2222", "--master_port", str(free_port()), script="show.py")
    pdsh = multinode.PDSHRunner(given, runner.encode_world_info({"127.0.0.1": 2}))
    pdsh.add_export("SLURM_JOB_CPUS_PER_NODE", "64(x2)")
    command, kill, environ = pdsh.get_cmd({}, {"127.0.0.1": [0, 1]})
    assert command[:6] == ["pdsh", "-S", "-f", "1024", "-w", "127.0.0.1"]
    (job,) = (word.partition("=")[2] for word in command if word.startswith("--job-id="))
    assert kill == [*command[:6], *command[command.index("run") - 2 : command.index("run")], "kill", job]
    assert environ == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": "-p 2222"}
    line = " ".join(command[6:]).replace("%n", "0")
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert all(f"rank {rank} ['--text', \"it's 6' tall\"]" in done.stdout for rank in (0, 1)), done.stderr


def test_mpirun_starts_a_rank_on_each_slot(tmp_path: Path) -> None:
    if shutil.which("ompi_info") is None:
        pytest.skip("mpirun is not installed (apt-get install openmpi-bin)")
    (tmp_path / "show.py").write_text(SHOW.replace("RANK", "OMPI_COMM_WORLD_RANK"))
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    arguments = "--allow-run-as-root --oversubscribe --mca btl_tcp_if_include lo"
    given = options("-H", str(tmp_path / "hosts"), "--launcher_args", arguments, script=str(tmp_path / "show.py"))
    mpi = multinode.OpenMPIRunner(given, "", {"localhost": 2})
    assert mpi.backend_exists()
    command = mpi.get_cmd({}, {"localhost": 2})
    assert "eth0" not in command
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert all(f"rank {rank} ['--text', \"it's 6' tall\"]" in done.stdout for rank in (0, 1)), done.stderr


def test_commands_of_the_other_programs() -> None:
    pool: multinode.Pool = {"node-a": 2, "node-b": [0, 1]}
    script = [sys.executable, "-u", "train.py", "--text", "it's 6' tall"]
    mpich = multinode.MPICHRunner(options(), "", pool).get_cmd({}, pool)
    assert mpich[:5] == ["mpirun", "-n", "4", "-ppn", "2"]
    assert mpich[-7:] == ["-hosts", "node-a,node-b", *script]
    intel = multinode.IMPIRunner(options("--bind_cores_to_rank", "--bind_core_list", "0"), "", {"node-a": 1})
    bound = intel.get_cmd({}, {})
    of_rank_0 = ["-n", "1", "-env", "RANK", "0", "-env", "LOCAL_RANK", "0"]
    assert bound[-16:] == [*of_rank_0, *("taskset", "-c", "0"), *script]
    mvapich = multinode.MVAPICHRunner(options(), "", pool).get_cmd({}, pool)
    hosts = Path(mvapich[mvapich.index("--hostfile") + 1])
    assert hosts.read_text() == "node-a\nnode-b\n"
    hosts.unlink()
    srun = multinode.SlurmRunner(options("-i", "node-a@node-b", "--launcher_args=--mpi=none"), "", pool)
    srun.add_export("WORDS", "a b")
    assert srun.get_cmd({}, pool) == [
        *("srun", "-n", "4", "--mpi=none", "--nodelist", "node-a,node-b", "--export=ALL,WORDS=a b"),
        *script,
    ]


def test_hosts_must_be_alike_and_none_left_out() -> None:
    with pytest.raises(ValueError, match="as many slots"):
        multinode.MPICHRunner(options(), "", {"a": 1, "b": 2}).get_cmd({}, {})
    with pytest.raises(ValueError, match="all slots of the hostfile"):
        multinode.OpenMPIRunner(options("-i", "a"), "", {"a": 1})
    with pytest.raises(ValueError, match="whole hosts"):
        multinode.SlurmRunner(options("-i", "a:0"), "", {"a": 1})
