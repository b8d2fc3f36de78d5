"""The same over a real sshd: two loopback hosts, one job."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT, Launch, run_launch, wait_until, wait_until_gone
from harness.launch.sshd import LoopbackSshd

from launcher.base.processes import members_of_job

pytestmark = pytest.mark.cluster
HOSTFILE = ROOT / "hostfiles" / "loopback"


def options(sshd: LoopbackSshd) -> list[str]:
    return ["--hostfile", str(HOSTFILE), "--ssh_config", str(sshd.ssh_config)]


def test_ranks_are_numbered_over_hosts(sshd: LoopbackSshd, tmp_path: Path) -> None:
    script = scripts.write(tmp_path, scripts.ENVIRONMENT)
    result = run_launch(tmp_path, *options(sshd), script, "it's; $HOME")
    assert result.code == 0, result.err
    found = [json.loads(text) for text in re.findall(r"^\[\d \S+\] ENV (.*)$", result.out, re.MULTILINE)]
    found.sort(key=lambda environment: environment["RANK"])
    assert [environment["RANK"] for environment in found] == ["0", "1"]
    assert [environment["NODE_RANK"] for environment in found] == ["0", "1"]
    assert [environment["LOCAL_RANK"] for environment in found] == ["0", "0"]
    assert {environment["MASTER_ADDR"] for environment in found} == {"127.0.0.1"}
    assert len({environment["MASTER_PORT"] for environment in found}) == 1
    assert result.out.count('ARGV ["it\'s; $HOME"]') == 2
    assert result.out.count(f"CWD {tmp_path}") == 2


def test_a_master_that_no_host_resolves_is_an_error_before_any_rank_starts(sshd: LoopbackSshd, tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "print('started')")
    result = run_launch(tmp_path, *options(sshd), "--master-addr", "no-such-host.invalid", script)
    assert (result.code, result.out) == (69, "")
    assert (
        "✗ 127.0.0.1: no-such-host.invalid, where ranks are to meet, cannot be resolved on 127.0.0.[1-2]\n"
        "  → give --master-addr an address of 127.0.0.1 that all hosts reach\n"
    ) in result.err


def test_a_node_of_its_own_command_waits_for_the_name_of_node_0(tmp_path: Path) -> None:
    """Kubernetes makes the name of node 0 when node 0 is there."""
    script = scripts.write(tmp_path, "print('started')")
    words = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "no-such-host.invalid", "--master-port", "4711")
    result = run_launch(tmp_path, *words, "--num-gpus", "1", script)
    assert (result.code, "started" in result.out) == (0, True)
    assert "! node-1: no-such-host.invalid, where ranks are to meet, cannot be resolved there; give" in result.err


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        pytest.param("exit", 3, marks=pytest.mark.long),
        ("raise", 1),
        pytest.param("SIGKILL", 137, marks=pytest.mark.long),
    ],
)
def test_a_failure_on_one_host_stops_the_other(sshd: LoopbackSshd, tmp_path: Path, kind: str, code: int) -> None:
    result = run_launch(tmp_path, *options(sshd), scripts.write(tmp_path, scripts.BIPOLAR), kind)
    assert result.code == code
    assert "✗ rank 1 (127.0.0.2, pid " in result.err
    assert not members_of_job(result.job_id)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_ranks_on_all_hosts(sshd: LoopbackSshd, tmp_path: Path, number: int) -> None:
    script = scripts.write(tmp_path, scripts.STUBBORN)
    job = Launch(tmp_path, *options(sshd), "--grace", "0.5", script)
    wait_until(lambda: job.out.count("READY") == 2, "the ranks")
    assert len(members_of_job(job.job_id)) == 4
    job.signal(number)
    job.wait(15)
    wait_until_gone(job.job_id)


def test_secrets_and_arguments_stand_in_no_command_line(sshd: LoopbackSshd, tmp_path: Path) -> None:
    """Environment values and arguments are in no /proc/*/cmdline but that of `launch` itself, which the user typed."""
    script = scripts.write(
        tmp_path,
        "import os, sys, time; print('GOT', os.environ['WANDB_KEY'], sys.argv[1], flush=True); time.sleep(600)",
    )
    job = Launch(tmp_path, *options(sshd), script, "argument-5519", env={"WANDB_KEY": "s3cr3t-value-7781"})
    wait_until(lambda: job.out.count("GOT s3cr3t-value-7781 argument-5519") == 2, "the ranks")
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if int(path.parent.name) != job.process.pid:
                lines.append(path.read_bytes())
        except OSError:  # the process has ended
            continue
    job.signal(signal.SIGTERM)
    assert job.wait(15).code == 143
    assert not any(b"s3cr3t-value-7781" in line or b"argument-5519" in line for line in lines)
    assert not any(b"s3cr3t" in path.read_bytes() for path in tmp_path.glob("runs/*/report.json"))
    agents = [line for line in lines if b"launcher.agent" in line]
    assert agents
    assert not any(b"script.py" in line for line in agents)


def test_a_missing_folder_on_a_host_is_named(sshd: LoopbackSshd, tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "print('hi')")
    result = run_launch(tmp_path, *options(sshd), "--remote_python", "/no/such/python", script)
    assert result.code == 69
    assert "✗ 127.0.0.[1-2]: python was not found" in result.err
    assert "/no/such/python" in result.err


# The order for the second host cannot be made, which turns out a while after that for the first one was.
REFUSED = """
import time
from launcher.base.errors import UsageError
from launcher.job import node
device_tokens = node.device_tokens
def refuse(plan, placement, devices):
    if placement.node_rank == 1:
        time.sleep(1.5)
        raise UsageError("it has too few devices")
    return device_tokens(plan, placement, devices)
node.device_tokens = refuse
from launcher.__main__ import main
main()
"""


def test_no_rank_runs_where_the_order_for_another_host_is_refused(sshd: LoopbackSshd, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    driver = scripts.write(tmp_path, REFUSED, "driver.py")
    script = scripts.write(tmp_path, "open('ran', 'w')")
    options = ["--hostfile", "hosts", "--ssh_config", str(sshd.ssh_config)]
    result = Launch(tmp_path, *options, script, program=(driver,)).wait()
    assert result.code == 2, result.err
    assert not (tmp_path / "ran").exists()
