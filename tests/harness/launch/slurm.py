"""A throwaway Slurm on 127.0.0.0/8: one controller and several nodes, each a real slurmd, on this machine.

Also a command, to try things by hand: `PYTHONPATH=tests python -m harness.launch.slurm FOLDER` prints the path of its
slurm.conf (export it as SLURM_CONF) and serves until its stdin ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from harness.launch.command import slowness, wait_until
from harness.launch.nodes import MortalNodes
from harness.launch.sshd import Server
from harness.ports import free_port

NUM_NODES = 3
GPUS_PER_NODE = 2
_DAEMONS = ("munged", "slurmctld", "slurmd")
_START_TIMEOUT_S = 60.0
_SETTINGS = """\
ClusterName=loopback
SlurmctldHost={host}({address})
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its old credentials have expired, by default for two minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# The parts of a heterogeneous job are only started by the backfill scheduler, by default every 30 s.
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=2,bf_interval=1
ReturnToService=2
KillWait=5
MinJobAge=60
SlurmdTimeout=120
JobRequeue=1
GresTypes=gpu
{nodes}
# Jobs in `high` preempt those in `low`, in Slurm's default way; those in `main` neither preempt nor are preempted.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES PriorityTier=1 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def available() -> str | None:
    """Return why no Slurm can be started here, None when one can."""
    for name in _DAEMONS:
        if _find(name) is None:
            return f"{name} is not installed (apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "the daemons of Slurm need root"
    return None


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class LoopbackSlurm(Server):
    """`n1`, `n2`, `n3` with two GPUs each (character devices that nobody opens); a context manager.

    `env` is what commands such as sbatch need. `stop_node` and `start_node` play a machine that dies.
    """

    def __init__(self, folder: Path | None = None, network: MortalNodes | None = None) -> None:
        """network: run each slurmd inside one of these nodes, so that it can crash or be cut off."""
        self._network = network
        self._owns_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        self.conf = self.folder / "slurm.conf"
        self.nodes = tuple(f"n{i + 1}" for i in range(NUM_NODES))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def env(self) -> dict[str, str]:
        """The variables of a shell on this cluster."""
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SALLOC", "LAUNCH_"))}
        return {**outside, "SLURM_CONF": str(self.conf)}

    def run(self, *command: str | Path, timeout_s: float = 60.0, cwd: Path | None = None) -> str:
        """Run a command on the cluster's head and return its stdout; a failure raises with its stderr."""
        result = subprocess.run(
            [str(part) for part in command],
            env=self.env,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        if result.returncode != 0:
            raise RuntimeError(f"{command[0]} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
        return result.stdout

    def run_batch(self, *words: str | Path, cwd: Path) -> int:
        """Run a batch script to its end and return its exit code. `sbatch --wait` would look every 10 s."""
        job, shown = self.run("sbatch", "--parsable", *words, cwd=cwd).strip(), [""]

        def has_ended() -> bool:
            shown.append(self.run("scontrol", "show", "job", job))
            return re.search(r"JobState=(PENDING|RUNNING|COMPLETING|CONFIGURING)", shown[-1]) is None

        wait_until(has_ended, f"the end of job {job}", 90)
        return int(re.findall(r"\bExitCode=(\d+):", shown[-1])[0])

    def start(self) -> None:
        """Start all daemons and wait until every node is idle."""
        reason = available()
        if reason is not None:
            raise RuntimeError(reason)
        self._write_files()
        self._start("munged", "munged", "--foreground", *self._munge_options())
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._start("slurmctld", "slurmctld", "-D", "-c", "-f", str(self.conf))
        for node in self.nodes:
            self.start_node(node)
        self.wait_idle()

    def start_node(self, node: str) -> None:
        """Start the slurmd of one node."""
        inside = self._network.nodes[self.nodes.index(node)].enter if self._network is not None else []
        self._start(node, "slurmd", "-D", "-f", str(self.conf), "-N", node, inside=inside)

    def daemon_pid(self, node: str) -> int:
        """Return the pid of one node's slurmd."""
        return self._processes[node].pid

    def stop_node(self, node: str) -> None:
        """Kill one node's slurmd and the step managers it started: what the loss of a machine looks like."""
        process = self._processes.pop(node)
        for pid in self.step_managers(node):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()

    def step_managers(self, node: str) -> list[int]:
        """Return the pids of the slurmstepd processes of one node: their log is the node's."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if (path / "comm").read_text().strip() != "slurmstepd":
                    continue
                targets = [os.readlink(link) for link in (path / "fd").iterdir()]
            except OSError:  # it has ended
                continue
            if str(self.folder / f"slurmd-{node}.log") in targets:
                found.append(int(path.name))
        return found

    @contextlib.contextmanager
    def allocation(self, *options: str, nodes: str = f"n[1-{NUM_NODES}]") -> Iterator[dict[str, str]]:
        """Hold an allocation of `nodes`; yields the environment that salloc gives to a shell in it."""
        count = len(self.run("scontrol", "show", "hostnames", nodes).split())
        command = ["salloc", "--no-shell", f"--nodes={count}", f"--nodelist={nodes}", *options]
        granted = subprocess.run(command, env=self.env, capture_output=True, text=True)
        match = re.search(r"Granted job allocation (\d+)", granted.stderr)
        if match is None:
            raise RuntimeError(granted.stderr)
        try:
            yield {
                **self.env,
                "SLURM_JOB_ID": match[1],
                "SLURM_JOBID": match[1],
                "SLURM_JOB_NODELIST": nodes,
                "SLURM_NODELIST": nodes,
                "SLURM_JOB_NUM_NODES": str(count),
                "SLURM_NNODES": str(count),
                "SLURM_TASKS_PER_NODE": f"1(x{count})",
            }
        finally:
            subprocess.run(["scancel", match[1]], env=self.env)

    def wait_idle(self) -> None:
        """Wait until no job runs and every node takes jobs."""
        self._wait(lambda: self._idle() == NUM_NODES, "idle nodes")

    def stop(self) -> None:
        """End every daemon, nodes first. Idempotent."""
        for name in [*self.nodes, "slurmctld", "munged"]:
            process = self._processes.pop(name, None)
            if process is None:
                continue
            if name in self.nodes:
                for pid in self.step_managers(name):
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        os.kill(pid, signal.SIGKILL)
            process.terminate()
            try:
                process.wait(10 * slowness())
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _write_files(self) -> None:
        (self.folder / "state").mkdir(exist_ok=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        gpus = []
        for i in range(GPUS_PER_NODE):
            path = self.folder / f"gpu{i}"
            if not path.exists():
                os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
            gpus.append(path)
        host = socket.gethostname().partition(".")[0]
        lines = []
        controller_port, *ports = (free_port() for _ in range(1 + NUM_NODES))
        address, addresses = "127.0.0.1", [f"127.0.0.{11 + i}" for i in range(NUM_NODES)]
        if self._network is not None:
            address, addresses = self._network.address, [node.address for node in self._network.nodes]
        for i, (node, port) in enumerate(zip(self.nodes, ports, strict=True)):
            (self.folder / "spool" / node).mkdir(parents=True, exist_ok=True)
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr={addresses[i]} Port={port} CPUs=8 RealMemory=2000"
                f" Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
            )
        self.conf.write_text(
            _SETTINGS.format(
                host=host, address=address, controller_port=controller_port, folder=self.folder, nodes="\n".join(lines)
            )
        )
        names = f"n[1-{NUM_NODES}]"
        (self.folder / "gres.conf").write_text(
            f"NodeName={names} Name=gpu File={self.folder}/gpu[0-{GPUS_PER_NODE - 1}]\n"
        )
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _munge_options(self) -> list[str]:
        folder = self.folder
        return [
            "--force",
            f"--key-file={folder}/munge.key",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
        ]

    def _start(self, name: str, program: str, *options: str, inside: Sequence[str] = ()) -> None:
        path = _find(program)
        if path is None:
            raise RuntimeError(f"{program} is not installed")
        with (self.folder / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                # A test run that is killed leaves no daemon behind.
                ["setpriv", "--pdeathsig", "TERM", *inside, path, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.env,
                start_new_session=True,
            )

    def _idle(self) -> int:
        result = subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%D"], env=self.env, capture_output=True, text=True)
        return sum(int(line) for line in result.stdout.split() if line.isdigit())

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S * slowness()
        while not condition():
            ended = [name for name, process in self._processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(
                    f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log"))
                )
                raise RuntimeError(f"no {what} after {_START_TIMEOUT_S} s, ended: {ended}\n{logs}")
            time.sleep(0.1)


if __name__ == "__main__":
    with LoopbackSlurm(Path(sys.argv[1])) as cluster:
        print(cluster.conf, flush=True)
        sys.stdin.read()
