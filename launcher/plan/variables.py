"""Environment files and `--env` options: variables for every rank of a job.

`.deepspeed_env` (or what DS_ENV_FILE names) and `.launch_env` are read from the home folder and from the working
directory, then the files of `--env-file`, then `--env`; later ones win.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.base import env
from launcher.base.errors import Diagnostic, UsageError
from launcher.base.fields import named
from launcher.cluster.cluster import NodePlacement, Placement
from launcher.cluster.devices import visible_devices
from launcher.plan.plan import JobPlan

STANDARD_FILES = (".deepspeed_env", ".launch_env")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Of the variables that ranks get from `launch`, those that a file or an option may still change.
_CHANGEABLE = {
    env.OMP_NUM_THREADS,
    env.FR_BUFFER_SIZE,
    env.RESUME,
    env.RESTART_COUNT,
    env.TORCHELASTIC_RESTART_COUNT,
    env.TORCHELASTIC_MAX_RESTARTS,
    env.TORCHELASTIC_RUN_ID,
}
_SET_FOR_RANKS = {variable.name for variable in env.ALL if variable.direction == "set" and variable not in _CHANGEABLE}
_SET_FOR_RANKS |= {env.HIP_VISIBLE_DEVICES.name, env.ZE_AFFINITY_MASK.name, env.ASCEND_RT_VISIBLE_DEVICES.name}
_IS_SET = "`launch` sets it for every rank"
# What a user sets in place of a variable.
_FIELDS = {
    env.MASTER_ADDR.name: ("master_addr",),
    env.MASTER_PORT.name: ("master_port",),
    env.WORLD_SIZE.name: ("num_gpus", "num_nodes"),
    env.LOCAL_WORLD_SIZE.name: ("num_gpus",),
    env.NODE_RANK.name: ("node_rank",),
}


@dataclass(frozen=True)
class JobEnvironment:
    """Variables for every rank, and what the user should know about where they come from."""

    values: dict[str, str] = field(repr=False)
    notes: tuple[str, ...]


def parse_env_file(text: str, source: str) -> dict[str, str]:
    """Return the variables of `KEY=VALUE` lines; blank lines, comments, `export` and quotes are understood.

    An unquoted value goes to the end of the line or to ` #`. Nothing is expanded.
    Raises: UsageError with every bad line.
    """
    values: dict[str, str] = {}
    problems: list[Diagnostic] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        name, equals, rest = line.partition("=")
        name = name.strip()
        value = _value(rest.strip())
        if not equals or not _NAME.fullmatch(name):
            problems.append(Diagnostic("expected KEY=VALUE", f"{source}:{number}", "such as NCCL_DEBUG=INFO"))
        elif name in _SET_FOR_RANKS:
            problems.append(
                Diagnostic(f"{name} would have no effect: {_IS_SET}", f"{source}:{number}", _hint_for(name))
            )
        elif "\0" in line:
            problems.append(Diagnostic(f"{name} holds a NUL byte, which no variable can", f"{source}:{number}"))
        elif value is None:
            problems.append(Diagnostic(f"the quotes of {name} do not match", f"{source}:{number}", "close the quote"))
        else:
            values[name] = value
    if problems:
        raise UsageError.from_diagnostics(problems)
    return values


def _value(text: str) -> str | None:
    """Return the value a line gives, None for quotes that do not match."""
    if text[:1] in ("'", '"'):
        try:
            words = shlex.split(text, comments=True)
        except ValueError:
            return None
        return words[0] if len(words) == 1 else None
    return re.split(r"\s#", text, maxsplit=1)[0].rstrip()


def job_environment(
    options: Sequence[str], files: Sequence[Path], environ: Mapping[str, str], folders: Sequence[Path]
) -> JobEnvironment:
    """Return the variables that the files and options give to every rank.

    options: `KEY=VALUE`, or `KEY` for this process's own value. files: must exist. folders: where standard files are
    looked for. Raises: UsageError.
    """
    values: dict[str, str] = {}
    notes: list[str] = []
    names = (environ.get(env.DS_ENV_FILE.name) or STANDARD_FILES[0], *STANDARD_FILES[1:])
    for path in dict.fromkeys(folder / name for folder in folders for name in names):
        try:
            data = _read_trusted(path)
        except PermissionError as error:  # a home folder that is not ours: sudo, containers
            notes.append(f"{path} is left out: {error.strerror}")
            continue
        if data is not None:
            found = _variables(data, path)
            notes.append(f"{path} gives variables to all ranks: {', '.join(found) or 'none'}")
            values |= found
    for path in files:
        try:
            values |= _variables(path.read_bytes(), path)
        except OSError as error:
            raise UsageError(f"the environment file cannot be read: {error.strerror}", where=str(path)) from None
    spelled = named("env")
    for option in options:
        name, equals, value = option.partition("=")
        if not _NAME.fullmatch(name):
            raise UsageError(f"{spelled} {option!r} names no variable", hint=f"{spelled} KEY=VALUE, or {spelled} KEY")
        if name in _SET_FOR_RANKS:
            raise UsageError(f"{spelled} {name} would have no effect: {_IS_SET}", hint=_hint_for(name))
        if not equals and name not in environ:
            raise UsageError(
                f"{spelled} {name}: the variable is not set here", hint=f"set it, or give {spelled} {name}=VALUE"
            )
        values[name] = value if equals else environ[name]
    return JobEnvironment(values, tuple(notes))


def _variables(data: bytes, path: Path) -> dict[str, str]:
    return parse_env_file(data.decode("utf-8-sig", "surrogateescape"), str(path))


def _read_trusted(path: Path) -> bytes | None:
    """Return what a file holds that no option has named, None when there is none.

    It decides which code ranks run (PYTHONPATH, LD_PRELOAD), and may lie in a folder that others can write to.
    Raises: UsageError when others own it or can write to it; PermissionError when its folder cannot be searched.
    """
    try:
        link = path.lstat()
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    strangers = [uid for uid in (link.st_uid, status.st_uid) if uid not in (os.geteuid(), 0)]
    if strangers:
        raise UsageError(
            f"the file belongs to another user (uid {strangers[0]}), and would decide what your ranks run",
            where=str(path),
            hint="start from another folder, or replace the file by one of your own",
        )
    try:
        with path.open("rb") as file:
            is_same = os.path.samestat(os.fstat(file.fileno()), status)
            data = file.read()
    except OSError as error:
        raise UsageError(f"the environment file cannot be read: {error.strerror}", where=str(path)) from None
    by_others = bool(status.st_mode & stat.S_IWOTH) or not is_same
    by_group = bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status)
    if by_others or by_group:
        who = "other users" if by_others else f"users of the group {_group_name(status.st_gid)}"
        raise UsageError(
            f"{who} can write to the file, and so decide what your ranks run",
            where=str(path),
            hint=f"chmod go-w {shlex.quote(str(path))}",
        )
    return data


def _is_private_group(status: os.stat_result) -> bool:
    """Whether the group of a file is its owner's own, without other members, as most distributions make one for a user.

    There an editor leaves files that the group can write to. The name is compared, too: a directory of users on the
    network does not always list all whose first group it is.
    """
    import grp
    import pwd

    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    is_own = owner.pw_gid == group.gr_gid and owner.pw_name == group.gr_name
    others = {one.pw_name for one in pwd.getpwall() if one.pw_gid == group.gr_gid} | {*group.gr_mem}
    return is_own and others <= {owner.pw_name}


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _hint_for(name: str) -> str:
    if name == env.CUDA_VISIBLE_DEVICES.name:
        return f"choose GPUs with {named('include')}, or set it for `launch` itself"
    return f"give {' and '.join(map(named, _FIELDS[name]))}" if name in _FIELDS else "leave it out"


# ---- Variables of ranks ----
# A rank on this machine inherits everything. A rank on another host gets that host's own environment plus the
# variables listed here, inside the protocol: never on a command line, where `ps` would show a token to everyone.


FORWARDED_PREFIXES = (
    "NCCL_", "GLOO_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "CUDA_", "CUBLAS_", "TRITON_", "HF_",
    "TRANSFORMERS_", "ACCELERATE_", "TOKENIZERS_", "WANDB_", "MLFLOW_", "COMET_", "OMP_", "MKL_", "KMP_", "UCX_",
    "FI_", "MV2_", "NVSHMEM_", "HSA_", "CCL_", "AWS_", "PYTHON", "CONDA_",
)  # fmt: skip
FORWARDED_NAMES = (
    "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CUDA_HOME", "HUGGING_FACE_HUB_TOKEN", "TMPDIR",
    "LANG", "LC_ALL", "TZ",
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    env.SLURM_JOB_ID.name, env.SLURM_RESTART_COUNT.name,
)  # fmt: skip


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of the launcher's environment goes to ranks on other hosts."""
    kept = {env.OMP_NUM_THREADS.name, env.FR_BUFFER_SIZE.name}  # a value of the user's counts
    own = {variable.name for variable in env.ALL if variable.direction == "set"} - kept
    return {
        name: value
        for name, value in environ.items()
        if name not in own and (name in FORWARDED_NAMES or name.startswith(FORWARDED_PREFIXES))
    }


def device_tokens(plan: JobPlan, node: NodePlacement, devices: list[str] | None) -> tuple[str, ...]:
    """Return what CUDA_VISIBLE_DEVICES says for each slot of a node, () when slots are device indices.

    devices: what the node's agent was given, which counts inside a Slurm allocation.
    Raises: UsageError when Slurm gave the node fewer than it has slots.
    """
    transport = plan.transports[node.node_rank]
    if transport != "srun":
        return plan.device_tokens if transport == "local" else ()
    if devices is None:
        return ()  # Slurm does not manage the GPUs of this node: slots are device indices
    num_wanted = max(node.host.slots) + 1
    if devices and num_wanted > len(devices):
        raise UsageError(
            f"slot {num_wanted - 1} is wanted, but Slurm gave the step fewer GPUs on this node: {','.join(devices)}",
            where=node.host.name,
            hint=f"ask for the same number on each node with --gpus-per-node, or lower {named('num_gpus')}",
        )
    return tuple(devices) or ("",) * num_wanted


def job_variables(plan: JobPlan) -> dict[str, str]:
    """Return the variables that all ranks of all hosts share and that come from the plan alone."""
    return {
        env.ENGINE.name: plan.engine,
        env.RESUME.name: plan.resume,
        env.RESTART_COUNT.name: str(plan.restart),
        env.TORCHELASTIC_RESTART_COUNT.name: str(plan.restart),
        env.TORCHELASTIC_MAX_RESTARTS.name: str(plan.max_restarts),
        env.TORCHELASTIC_RUN_ID.name: plan.run_id or plan.job_id,
        **({env.FAULTS.name: ",".join(plan.faults)} if plan.faults and plan.restart == 0 else {}),
    }


def ladder_variables(plan: JobPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with which a job continues below the first rung of the ladder; {} above it.

    environ: of this process; what the user's own patch changes stays. Raises: ConfigError for one that is none.
    """
    if not plan.rungs:
        return {}
    from launcher.config.load import read_json  # pydantic: not for runs without a ladder
    from launcher.planner.ladder import combined

    name = env.CONFIG_PATCH.name
    given = plan.given_env.get(name) or environ.get(name) or "{}"
    return {name: json.dumps(functools.reduce(combined, plan.rungs, read_json(given, name).value))}


def rank_variables(
    placement: Placement, node: NodePlacement, master: tuple[str, int], device_tokens: tuple[str, ...]
) -> list[dict[str, str]]:
    """Return the variables of each rank of `node`, in rank order.

    master: address and port of the rendezvous. device_tokens: what CUDA_VISIBLE_DEVICES says for each slot, ()
    when slots are device indices.
    """
    shared = {
        env.WORLD_SIZE.name: str(placement.world_size),
        env.LOCAL_WORLD_SIZE.name: str(node.num_ranks),
        env.LOCAL_SIZE.name: str(node.num_ranks),
        env.NODE_RANK.name: str(node.node_rank),
        env.GROUP_RANK.name: str(node.node_rank),
        env.CROSS_RANK.name: str(node.node_rank),
        env.CROSS_SIZE.name: str(placement.num_nodes),
        env.GROUP_WORLD_SIZE.name: str(placement.num_nodes),
        env.ROLE_WORLD_SIZE.name: str(placement.world_size),
        env.ROLE_NAME.name: "default",
        env.MASTER_ADDR.name: master[0],
        env.MASTER_PORT.name: str(master[1]),
        env.CUDA_VISIBLE_DEVICES.name: visible_devices(node.host.slots, device_tokens),
    }
    return [
        shared | {env.RANK.name: str(rank), env.ROLE_RANK.name: str(rank), env.LOCAL_RANK.name: str(local_rank)}
        for local_rank, rank in enumerate(node.ranks)
    ]
