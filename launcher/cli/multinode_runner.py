"""`deepspeed.launcher.multinode_runner`: commands of pdsh, MPI and Slurm that start the ranks of a script.

pdsh runs `launch` on each host. Under MPI and srun each rank is the script itself: `init_distributed` reads its number
from the variables that those set. `launch --hostfile` needs none of them.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from launcher.cli.deepspeed_runner import LAUNCH, parse_range_list
from launcher.cluster.cores import shares

_PLAIN = re.compile(r"[\w@%+=:,./-]*")  # what a shell reads as it is
_MAX_FAN_OUT = 1024
Pool = Mapping[str, int | Sequence[int]]  # a host's name -> its number of slots, or the slots


class MultiNodeRunner(ABC):
    """Makes a command that starts a script on several hosts."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str) -> None:
        """args: of `runner.parse_args`. world_info_base64: of `runner.encode_world_info`. Raises: ValueError."""
        self.args = args
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.world_info_base64 = world_info_base64
        self.exports: dict[str, str] = {}

    @abstractmethod
    def backend_exists(self) -> bool:
        """Whether the program is installed here."""

    @abstractmethod
    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Pool) -> Any:
        """Return the command, as a list of words."""

    def add_export(self, key: str, var: str) -> None:
        """Have ranks see a variable; a value that a shell would change is quoted."""
        value = var.strip()
        self.exports[key.strip()] = value if _PLAIN.fullmatch(value) else f'"{value}"'

    def parse_user_args(self) -> list[str]:
        """Return the arguments of the script."""
        return list(self.args.user_args)

    @property
    def name(self) -> str:
        """Return the value of `--launcher`."""
        return type(self).__name__

    def validate_args(self) -> None:  # noqa: B027 - most take all options
        """Check the options. Raises: ValueError."""


class PDSHRunner(MultiNodeRunner):
    """`launch` on each host, by pdsh over SSH."""

    def backend_exists(self) -> bool:
        """Whether pdsh is installed here."""
        return shutil.which("pdsh") is not None

    @property
    def name(self) -> str:
        """Return the value of `--launcher`."""
        return "pdsh"

    def parse_user_args(self) -> list[str]:
        """Return the arguments of the script, quoted for the shells of the hosts."""
        return [shlex.quote(argument) for argument in self.args.user_args]

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Pool
    ) -> tuple[list[str], list[str], MutableMapping[str, str]]:
        """Return the command, one that ends what it has started, and the environment for both.

        Raises: ValueError for hosts with different numbers of slots.
        """
        args, hosts = self.args, list(active_resources)
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if args.ssh_port is not None:
            before = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{before} -p {args.ssh_port}".strip()
        pdsh = ["pdsh", "-S", "-f", str(_MAX_FAN_OUT), "-w", ",".join(hosts), *shlex.split(args.launcher_args)]
        port, num_slots = f"--master-port={args.master_port}", _equal_slots(active_resources)
        master = f"--master-addr={args.master_addr or hosts[0]}"
        command, job = [shlex.quote(sys.executable), shlex.quote(str(LAUNCH))], f"pdsh-{uuid.uuid4().hex[:12]}"
        launch = [*command, "run", "--node-rank=%n", f"--job-id={job}"]
        launch += [f"--num-nodes={len(hosts)}", f"--num-gpus={num_slots}", master, port]
        launch += [f"--{option}" for option in ("module", "no_python", "save_pid", "quiet") if getattr(args, option)]
        if args.bind_core_list is not None:
            launch.append(f"--bind-core-list={args.bind_core_list}")
        elif args.bind_cores_to_rank:
            launch.append("--bind-cores-to-rank")
        first = [] if args.venv_script is None else [f". {shlex.quote(args.venv_script)};"]
        first += [*(f"export {key}={value};" for key, value in self.exports.items()), f"cd {shlex.quote(os.getcwd())};"]
        kill = [*pdsh, *command, "kill", job]
        return [*pdsh, *first, *launch, shlex.quote(self.user_script), *self.user_arguments], kill, environment


class _RankPerProcess(MultiNodeRunner):
    """The script itself in each process that another program starts."""

    program = "mpirun"

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Pool) -> None:
        """resource_pool: the hosts of the hostfile. Raises: ValueError."""
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    def backend_exists(self) -> bool:
        """Whether the program is installed here."""
        return shutil.which(self.program) is not None

    def _num_ranks(self) -> int:
        return sum(_count(slots) for slots in self.resource_pool.values())

    def _python(self) -> list[str]:
        args = self.args
        return [] if args.no_python else [sys.executable, "-u", *(["-m"] if args.module else [])]

    def _script(self) -> list[str]:
        return [*self._python(), self.user_script, *self.user_arguments]


class _MpiRunner(_RankPerProcess):
    def validate_args(self) -> None:
        """Check the options: MPI starts ranks on all slots of the hostfile. Raises: ValueError."""
        args = self.args
        if args.include or args.exclude or max(args.num_nodes, args.num_gpus) >= 0:
            raise ValueError(
                f"{self.name}: it starts ranks on all slots of the hostfile, and --include, --exclude, --num_nodes and"
                " --num_gpus leave some out: shorten the hostfile, or use `launch --hostfile`"
            )


class OpenMPIRunner(_MpiRunner):
    """mpirun of Open MPI."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Pool) -> None:
        """Have UCX use TCP, unless the script's exports say otherwise. Raises: ValueError."""
        super().__init__(args, world_info_base64, resource_pool)
        self.add_export("UCX_TLS", "tcp")

    def backend_exists(self) -> bool:
        """Whether Open MPI is installed here."""
        return shutil.which("ompi_info") is not None

    @property
    def name(self) -> str:
        """Return the value of `--launcher`."""
        return "openmpi"

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Pool) -> list[str]:
        """Return the command. The network is eth0, unless `--launcher_args` name another."""
        given = shlex.split(self.args.launcher_args)
        is_named = "btl_tcp_if_include" in given
        network = ["--mca", "btl", "^openib", *([] if is_named else ["--mca", "btl_tcp_if_include", "eth0"])]
        exports = [word for key, value in self.exports.items() for word in ("-x", f"{key}={_unquoted(value)}")]
        hosts = ["-n", str(self._num_ranks()), "-hostfile", str(self.args.hostfile)]
        return ["mpirun", *hosts, *network, *given, *exports, *self._script()]


class MPICHRunner(_MpiRunner):
    """mpirun of MPICH."""

    @property
    def name(self) -> str:
        """Return the value of `--launcher`."""
        return "mpich"

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Pool) -> list[str]:
        """Return the command. Raises: ValueError for hosts with different numbers of slots."""
        return ["mpirun", "-n", str(self._num_ranks()), *self._options(), *self._script()]

    def _options(self) -> list[str]:
        """Return the words between the number of ranks and the script."""
        args, num_slots = self.args, _equal_slots(self.resource_pool)
        hosts = list(self.resource_pool)
        values = {key: _unquoted(value) for key, value in self.exports.items()} | {
            "MASTER_ADDR": args.master_addr or hosts[0],
            "MASTER_PORT": str(args.master_port),
            "WORLD_SIZE": str(self._num_ranks()),
            "LOCAL_SIZE": str(num_slots),
        }
        exports = [word for key, value in values.items() for word in ("-genv", key, value)]
        return ["-ppn", str(num_slots), *shlex.split(args.launcher_args), *exports, "-hosts", ",".join(hosts)]


class IMPIRunner(MPICHRunner):
    """mpirun of Intel MPI. Each rank has a part of the command of its own, with its number and its cores."""

    @property
    def name(self) -> str:
        """Return the value of `--launcher`."""
        return "impi"

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Pool) -> list[str]:
        """Return the command. Raises: ValueError for hosts with different numbers of slots."""
        args, num_slots = self.args, _equal_slots(self.resource_pool)
        cores: list[list[int]] = []
        command = ["mpirun", *self._options(), "-genv", "I_MPI_PIN", "0"]
        if args.bind_cores_to_rank:
            cores = shares(parse_range_list(args.bind_core_list) if args.bind_core_list else (), num_slots)
            command += ["-genv", "OMP_NUM_THREADS", str(len(cores[0]))]
        for rank in range(self._num_ranks()):
            local_rank = rank % num_slots
            bound = ["taskset", "-c", ",".join(map(str, cores[local_rank]))] if cores else []
            own = ["-n", "1", "-env", "RANK", str(rank), "-env", "LOCAL_RANK", str(local_rank), *bound]
            command += [*([":"] if rank else []), *own, *self._script()]
        return command


class MVAPICHRunner(_MpiRunner):
    """mpirun of MVAPICH2."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Pool) -> None:
        """Have MVAPICH2 serve training: threads, no binding of cores, traces of failures. Raises: ValueError."""
        super().__init__(args, world_info_base64, resource_pool)
        for key, value in {
            "MV2_SMP_USE_CMA": "0",
            "MV2_DEBUG_SHOW_BACKTRACE": "1",
            "MV2_SUPPORT_DL": "1",
            "MV2_ENABLE_AFFINITY": "0",
        }.items():
            self.add_export(key, value)

    def backend_exists(self) -> bool:
        """Whether MVAPICH2 is installed here."""
        if shutil.which("mpiname") is None:
            return False
        return "MVAPICH2" in subprocess.run(["mpiname"], capture_output=True, text=True, check=False).stdout

    @property
    def name(self) -> str:
        """Return the value of `--launcher`."""
        return "mvapich"

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Pool) -> list[str]:
        """Return the command. Raises: ValueError for hosts with different numbers of slots.

        Side effects: a file of the hosts' names, which mpirun reads.
        """
        num_slots = _equal_slots(self.resource_pool)
        with tempfile.NamedTemporaryFile("w", prefix="launch-mvapich-hosts-", delete=False) as hosts:
            hosts.writelines(f"{host}\n" for host in self.resource_pool)
        exports = [word for key, value in self.exports.items() for word in ("-env", f"{key}={_unquoted(value)}")]
        counts = ["-np", str(self._num_ranks()), "-ppn", str(num_slots), "--hostfile", str(Path(hosts.name))]
        return ["mpirun", *counts, *shlex.split(self.args.launcher_args), *exports, *self._script()]


class SlurmRunner(_RankPerProcess):
    """srun of Slurm."""

    program = "srun"

    @property
    def name(self) -> str:
        """Return the value of `--launcher`."""
        return "slurm"

    def validate_args(self) -> None:
        """Check the options: Slurm chooses the devices of a host. Raises: ValueError."""
        if ":" in self.args.include + self.args.exclude:
            raise ValueError("slurm: --include and --exclude name whole hosts: leave the slots behind ':' away")

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Pool) -> list[str]:
        """Return the command."""
        args = self.args
        command = ["srun", "-n", str(self._num_ranks()), *shlex.split(args.launcher_args)]
        if comment := getattr(args, "slurm_comment", ""):
            command += ["--comment", comment]
        for option, hosts in (("--nodelist", args.include), ("--exclude", args.exclude)):
            command += [option, hosts.replace("@", ",")] if hosts else []
        for option, number in (("--nodes", args.num_nodes), ("--gpus-per-node", args.num_gpus)):
            command += [option, str(number)] if number > 0 else []
        exports = ",".join(["ALL", *(f"{key}={_unquoted(value)}" for key, value in self.exports.items())])
        return [*command, f"--export={exports}", *self._script()]


def _count(slots: int | Sequence[int]) -> int:
    return slots if isinstance(slots, int) else len(slots)


def _equal_slots(pool: Pool) -> int:
    """Return the slots of each host. Raises: ValueError unless all have as many."""
    counts = {_count(slots) for slots in pool.values()}
    if len(counts) != 1:
        raise ValueError(f"each host needs as many slots as the others, got {dict(pool)}: use `launch --hostfile`")
    return counts.pop()


def _unquoted(value: str) -> str:
    """Return a value as a rank shall see it: no shell reads these commands."""
    return value[1:-1] if value[:1] == value[-1:] == '"' and len(value) > 1 else value
