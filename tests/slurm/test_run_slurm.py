"""`launch` inside an allocation of a real Slurm: three nodes, one srun step, no hostfile."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT, Launch, nap, run_launch, running, slowness, wait_until, wait_until_gone
from harness.launch.slurm import LoopbackSlurm

from launcher.base.processes import members_of_job
from launcher.base.timeouts import Timeouts
from launcher.cluster.cluster import Host
from launcher.slurm import srun

pytestmark = pytest.mark.cluster
NODES = ("n1", "n2", "n3")


@pytest.fixture
def allocation(slurm: LoopbackSlurm) -> Iterator[dict[str, str]]:
    with slurm.allocation("--gres=gpu:2") as environment:
        yield environment


def relays() -> list[int]:
    """Return the pids of relays on our own nodes, and of the agents they have started."""
    ours = f"XDG_STATE_HOME={os.environ['XDG_STATE_HOME']}".encode()  # slurmd hands it on
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            is_ours = ours in (path / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if is_ours and b"launcher.agent.relay" in words and words[0].endswith(b"python"):
            found.append(int(path.name))
    return sorted(found)


def node_of(pid: int) -> str:
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(entry.partition(b"=")[2].decode() for entry in environ if entry.startswith(b"SLURMD_NODENAME="))


def agent_on(node: str) -> int:
    """Return the pid of the agent, which is the child of the relay."""
    pids = relays()
    return next(pid for pid in pids if node_of(pid) == node and _parent(pid) in pids)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def environments(out: str) -> list[dict[str, str]]:
    found = [json.loads(text) for text in re.findall(r"ENV (\{.*\})$", out, re.MULTILINE)]
    return sorted(found, key=lambda environment: int(environment["RANK"]))


def test_a_call_with_data_reaches_every_node_whole(allocation: dict[str, str], tmp_path: Path) -> None:
    """Its pieces are sent to all nodes in one line each, beside what is for one of them."""
    (tmp_path / "sums.py").write_text(
        "import hashlib, launcher, os\n"
        "def digest(data):\n    return os.environ['RANK'] + hashlib.sha256(data).hexdigest()\n"
        "if __name__ == '__main__':\n"
        "    data = os.urandom(9 << 20)\n"
        "    wanted = [str(rank) + hashlib.sha256(data).hexdigest() for rank in range(6)]\n"
        "    print(launcher.run(digest, data, output='files') == wanted)\n"
    )
    environ = {**os.environ, **allocation, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run([sys.executable, "sums.py"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_ranks_are_numbered_over_the_nodes_of_the_allocation(allocation: dict[str, str], tmp_path: Path) -> None:
    script = scripts.write(tmp_path, scripts.ENVIRONMENT)
    result = run_launch(tmp_path, script, "it's; $HOME", env=allocation)
    assert result.code == 0, result.err
    assert "3 hosts × 2 ranks = world 6" in result.err
    found = environments(result.out)
    assert [environment["RANK"] for environment in found] == list("012345")
    assert [environment["NODE_RANK"] for environment in found] == list("001122")
    assert [environment["LOCAL_RANK"] for environment in found] == list("010101")
    assert {environment["CUDA_VISIBLE_DEVICES"] for environment in found} == {"0,1"}
    assert {environment["MASTER_ADDR"] for environment in found} == {"n1"}
    assert len({environment["MASTER_PORT"] for environment in found}) == 1
    assert result.out.count('ARGV ["it\'s; $HOME"]') == 6
    assert result.out.count(f"CWD {tmp_path}") == 6
    wait_until(lambda: not relays(), "the end of the step")


def test_nodes_and_slots_can_be_chosen(allocation: dict[str, str], tmp_path: Path) -> None:
    script = scripts.write(tmp_path, scripts.ENVIRONMENT)
    result = run_launch(tmp_path, "--include", "n3:1@n2", script, env=allocation)
    assert result.code == 0, result.err
    found = environments(result.out)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in found] == ["0,1", "0,1", "1"]
    assert {environment["MASTER_ADDR"] for environment in found} == {"n2"}


def test_cpu_ranks_and_the_share_of_a_node(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    """The second job on a node gets the second GPU, and its slot 0 means that one."""
    script = scripts.write(tmp_path, scripts.ENVIRONMENT)
    with (
        slurm.allocation("--gres=gpu:1", nodes="n1"),
        slurm.allocation("--gres=gpu:1", nodes="n1") as second,
        slurm.allocation(nodes="n[1-2]") as without_gpus,
    ):
        result = run_launch(tmp_path, script, env=second)
        assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments(result.out)] == ["1"]
        result = run_launch(tmp_path, "--num_gpus", "2", script, env=without_gpus)
        assert [environment["LOCAL_RANK"] for environment in environments(result.out)] == list("0101"), result.err


def test_nodes_may_have_different_numbers_of_gpus(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    script = scripts.write(tmp_path, scripts.ENVIRONMENT)
    slurm.wait_idle()  # Slurm gives fewer than three where a GPU of another test's job is not free yet
    with slurm.allocation("--gpus=3", nodes="n[1-2]") as environment:
        result = run_launch(tmp_path, script, env=environment)
        assert result.code == 0, result.err
        found = environments(result.out)
        given = [(entry["NODE_RANK"], entry["CUDA_VISIBLE_DEVICES"]) for entry in found]
        assert given in ([("0", "0,1")] * 2 + [("1", "0")], [("0", "0")] + [("1", "0,1")] * 2)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        pytest.param("exit", 3, marks=pytest.mark.long),
        ("raise", 1),
        pytest.param("SIGKILL", 137, marks=pytest.mark.long),
    ],
)
def test_a_failing_rank_ends_all_nodes_with_its_code(
    allocation: dict[str, str], tmp_path: Path, kind: str, code: int
) -> None:
    result = run_launch(tmp_path, scripts.write(tmp_path, scripts.BIPOLAR), kind, env=allocation)
    assert result.code == code
    assert "✗ rank 1 (n1, pid " in result.err
    assert "5 other ranks were stopped" in result.err
    assert not members_of_job(result.job_id)
    wait_until(lambda: not relays(), "the end of the step")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_all_nodes(allocation: dict[str, str], tmp_path: Path, number: int) -> None:
    script = scripts.write(tmp_path, scripts.STUBBORN)
    job = Launch(tmp_path, "--grace", "0.5", script, env=allocation)
    wait_until(lambda: job.out.count("READY") == 6, "the ranks")
    assert len(members_of_job(job.job_id)) == 12
    os.killpg(job.process.pid, number)  # as a terminal does: srun must not hear it
    result = job.wait(20)
    assert result.code == (-number if number == signal.SIGKILL else 128 + number)
    wait_until_gone(job.job_id)
    wait_until(lambda: not relays(), "the end of the step")


def test_scancel_ends_everything(slurm: LoopbackSlurm, allocation: dict[str, str], tmp_path: Path) -> None:
    script = scripts.write(tmp_path, scripts.STUBBORN)
    job = Launch(tmp_path, "--grace", "0.5", script, env=allocation)
    wait_until(lambda: job.out.count("READY") == 6, "the ranks")
    slurm.run("scancel", allocation["SLURM_JOB_ID"])
    assert job.wait(30).code != 0
    wait_until_gone(job.job_id)
    wait_until(lambda: not relays(), "the end of the step")


def test_a_killed_agent_is_a_lost_node(allocation: dict[str, str], tmp_path: Path) -> None:
    script = scripts.write(tmp_path, scripts.STUBBORN)
    job = Launch(tmp_path, "--grace", "0.5", script, env=allocation)
    wait_until(lambda: job.out.count("READY") == 6, "the ranks")
    os.kill(agent_on("n2"), signal.SIGKILL)
    result = job.wait(30)
    assert result.code == 69
    assert "✗ n2 was lost" in result.err
    wait_until_gone(job.job_id)
    wait_until(lambda: not relays(), "the end of the step")


def test_what_a_killed_agent_leaves_ends_whatever_it_has_in_its_environment(
    allocation: dict[str, str], tmp_path: Path
) -> None:
    words = ["sleep", nap("600.")]
    job = Launch(tmp_path, "--grace", "0.5", scripts.write(tmp_path, scripts.ORPHAN), words[1], env=allocation)
    wait_until(lambda: job.out.count("READY") == 6, "the ranks")
    assert len(running(*words)) == 6
    os.kill(agent_on("n2"), signal.SIGKILL)
    assert job.wait().code == 69
    wait_until(lambda: not (running(*words) or relays()), "the end of all")


def test_a_dead_node_ends_the_job(slurm: LoopbackSlurm, allocation: dict[str, str], tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import time; print('READY', flush=True); time.sleep(600)")
    job = Launch(tmp_path, "--grace", "0.5", "--lease", "8", script, env=allocation)
    wait_until(lambda: job.out.count("READY") == 6, "the ranks")
    try:
        slurm.stop_node("n3")
        result = job.wait(90)
    finally:
        slurm.start_node("n3")
    assert result.code == 69
    wait_until_gone(job.job_id)
    wait_until(lambda: not relays(), "the end of the step")


def test_a_silent_node_is_lost(allocation: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped relay says nothing; its channel ends, the other node's continues."""
    for name, value in allocation.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(srun, "timeouts", lambda: Timeouts(srun_silence_s=7.0 * slowness()))
    hosts = [Host(name, (0,)) for name in ("n1", "n2")]
    transport = srun.SrunTransport(hosts, root=ROOT)
    first, second = (transport.open(host) for host in hosts)
    try:
        assert first.read(1 << 16)
        assert second.read(1 << 16)
        relay = next(pid for pid in relays() if node_of(pid) == "n2" and _parent(pid) not in relays())
        os.kill(relay, signal.SIGSTOP)
        assert second.read(1 << 16) == b""
        assert first.wait(0.1) is None
    finally:
        first.close()
        second.close()
        transport.close()
    wait_until(lambda: not relays(), "the end of the step")


def test_every_byte_of_all_ranks_arrives(allocation: dict[str, str], tmp_path: Path) -> None:
    """All nodes write at once, as fast as they can, bytes that are not text; the last ones just before they end."""
    script = scripts.write(
        tmp_path,
        """
        import hashlib, os, random, sys
        random.seed(int(os.environ["RANK"]))
        data = random.randbytes(3_000_000)
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        open(f"sum_{os.environ['RANK']}", "w").write(hashlib.sha256(data).hexdigest())
        """,
    )
    result = run_launch(tmp_path, "-q", script, env=allocation)
    assert result.code == 0, result.err
    (folder,) = (tmp_path / "runs").iterdir()
    for rank in range(6):
        written = hashlib.sha256((folder / f"rank_{rank}.log").read_bytes()).hexdigest()
        assert written == (tmp_path / f"sum_{rank}").read_text()


def test_a_flood_starves_no_node(allocation: dict[str, str], tmp_path: Path) -> None:
    """srun prefers some nodes when it cannot follow: of one of them nothing came through, nor a sign of life."""
    script = scripts.write(tmp_path, "import sys\nwhile True: sys.stdout.write('x' * 65535 + chr(10))")
    job = Launch(tmp_path, "--num_gpus", "1", "--grace", "0.5", "-q", script, env=allocation)
    wait_until(lambda: len(list(tmp_path.glob("runs/*/rank_*.log"))) == 3, "the logs")
    logs = sorted(tmp_path.glob("runs/*/rank_*.log"))
    # The others never stop: what is starved would get nothing however long it waits.
    wait_until(lambda: min(log.stat().st_size for log in logs) > 2_000_000, "2 MB of every rank", 60)
    job.signal(signal.SIGTERM)
    assert job.wait(20).code == 143
    wait_until(lambda: not relays(), "the end of the step")


def test_environment_values_stand_in_no_command_line(allocation: dict[str, str], tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path, "import os, time; print('GOT', os.environ['WANDB_KEY'], flush=True); time.sleep(600)"
    )
    job = Launch(tmp_path, script, env={**allocation, "WANDB_KEY": "s3cr3t-value-9182"})
    wait_until(lambda: job.out.count("GOT s3cr3t-value-9182") == 6, "the ranks")
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:  # the process has ended
            continue
    job.signal(signal.SIGTERM)
    assert job.wait(20).code == 143
    assert any(line.startswith(b"srun\0") or b"/srun\0" in line for line in lines)
    assert not any(b"s3cr3t-value-9182" in line for line in lines)


def test_a_missing_srun_is_named(allocation: dict[str, str], tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "print('hi')")
    result = run_launch(tmp_path, script, env={**allocation, "PATH": "/nowhere"})
    assert result.code == 69
    assert "srun is not in PATH" in result.err


def test_a_restart_gets_a_new_step(allocation: dict[str, str], tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, sys
        print("TRY", os.environ["LAUNCH_RESTART_COUNT"], flush=True)
        sys.exit(3 if os.environ["LAUNCH_RESTART_COUNT"] == "0" and os.environ["RANK"] == "2" else 0)
        """,
    )
    result = run_launch(tmp_path, "--max_restarts", "1", script, env=allocation)
    assert result.code == 0, result.err
    assert result.out.count("TRY 1") == 6


def test_what_belongs_to_ssh_is_refused(allocation: dict[str, str], tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "print('never')")
    result = run_launch(tmp_path, "--setup", "module load cuda", script, env=allocation)
    assert result.code == 2
    assert "put the commands into the batch script" in result.err
