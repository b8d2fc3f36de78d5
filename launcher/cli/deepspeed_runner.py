"""`deepspeed.launcher.runner` for scripts that call it: hostfiles, filters, options, and `main`, which is `launch`.

Values have DeepSpeed's form: a host's name -> its number of slots, or the slots. What is refused is a ValueError there.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from launcher.base.errors import LauncherError
from launcher.base.log import get_logger
from launcher.base.processes import die_with_parent
from launcher.cluster.cluster import Cluster, Host
from launcher.cluster.cores import parse_core_list
from launcher.cluster.filters import chosen_slots
from launcher.cluster.hostfile import parse_hostfile, read_hostfile

LAUNCH = Path(__file__).resolve().parents[1] / "__main__.py"  # the command `launch`, as a file that python runs
# Options of `deepspeed` with a value: type and default.
_VALUES: dict[str, tuple[type, str | int | None]] = {
    "--num_nodes": (int, -1),
    "--min_elastic_nodes": (int, -1),
    "--max_elastic_nodes": (int, -1),
    "--master_port": (int, 29500),
    "--master_addr": (str, ""),
    "--node_rank": (int, -1),
    "--launcher": (str, "pdsh"),
    "--launcher_args": (str, ""),
    "--enable_each_rank_log": (str, "None"),
    "--autotuning": (str, ""),
    "--bind_core_list": (str, None),
    "--ssh_port": (int, None),
    "--venv_script": (str, None),
    "--log_level": (str, "info"),
}
_FLAGS = (
    *("--module", "--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid"),
    *("--elastic_training", "--bind_cores_to_rank"),
)


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of `deepspeed`, the script and its arguments. Nothing is run.

    args: without the program's name; None: those of this process. Raises: SystemExit for options that are none.
    """
    parser = argparse.ArgumentParser(prog="deepspeed", description="Run a script on every rank, as `launch` does.")
    parser.add_argument("-H", "--hostfile", default="/job/hostfile")
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1)
    for option, (kind, default) in _VALUES.items():
        parser.add_argument(option, type=kind, default=default)
    for option in _FLAGS:
        parser.add_argument(option, action="store_true")
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Run `launch` with the options of `deepspeed`, and wait for its end.

    args: without the program's name; None: those of this process.
    Raises: ValueError for a number of hosts or slots together with a filter; SystemExit unless the ranks end well.
    """
    options = parse_args(args)
    if (options.include or options.exclude) and max(options.num_nodes, options.num_gpus) >= 0:
        raise ValueError("--num_nodes and --num_gpus cannot be used together with --include or --exclude")
    given = sys.argv[1:] if args is None else args
    dies_with_this = functools.partial(die_with_parent, os.getpid())
    run = [sys.executable, str(LAUNCH), "run", *given]
    code = subprocess.run(run, preexec_fn=dies_with_this, check=False).returncode
    if code:
        sys.exit(code if code > 0 else 128 - code)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return the hosts of a file and their number of slots, None where there is no such file. Raises: ValueError."""
    if not Path(hostfile_path).is_file():
        get_logger().warning("%s: there is no such hostfile: only this machine is used", hostfile_path)
        return None
    with _value_errors():
        return _num_slots(read_hostfile(hostfile_path))


def _parse_hostfile(hostfile_lines: Iterable[str]) -> dict[str, int]:
    """Do the same for the lines of a file."""
    with _value_errors():
        return _num_slots(parse_hostfile("\n".join(line.rstrip("\n") for line in hostfile_lines), "hostfile"))


def _num_slots(cluster: Cluster) -> dict[str, int]:
    return {host.name: len(host.slots) for host in cluster.hosts}


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Return the hosts and slots that a filter such as "node-a@node-b:0,2" leaves; hosts without slots are left out.

    host_info: a host's name -> its slots. Raises: ValueError for both filters, and for hosts and slots that are none.
    """
    if include_str and exclude_str:
        raise ValueError("include_str and exclude_str cannot be used together")
    if not include_str and not exclude_str:
        return {name: list(slots) for name, slots in host_info.items()}
    cluster = Cluster(tuple(Host(name, tuple(slots)) for name, slots in host_info.items()))
    with _value_errors():
        chosen = chosen_slots(cluster, include_str or exclude_str, "include" if include_str else "exclude")
    left = {
        name: [slot for slot in slots if (slot in chosen.get(name, ())) == bool(include_str)]
        for name, slots in host_info.items()
    }
    return {name: slots for name, slots in left.items() if slots}


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """Do the same for hosts with a number of slots."""
    slots = {name: list(range(number)) for name, number in resource_pool.items()}
    return parse_resource_filter(slots, include_str=inclusion, exclude_str=exclusion)


def encode_world_info(world_info: Mapping[str, int | Sequence[int]]) -> str:
    """Return hosts and slots as text without blanks: JSON in base64."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def parse_range_list(range_str: str) -> list[int]:
    """Return the CPU numbers of such as "0,2-4". Raises: ValueError unless they ascend."""
    with _value_errors():
        cores = list(parse_core_list(range_str))
    if cores != sorted(cores):
        raise ValueError(f'"{range_str}": CPU numbers ascend: sort the parts of the list')
    return cores


@contextlib.contextmanager
def _value_errors() -> Iterator[None]:
    """Raise what is wrong as scripts catch it."""
    try:
        yield
    except LauncherError as error:
        raise ValueError(str(error)) from None
