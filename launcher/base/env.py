"""Every environment variable this project reads or sets: name, meaning, and who uses it.

`docs/environment.md` is checked against this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EnvVar:
    """One environment variable."""

    name: str
    doc: str
    direction: str  # "set": given to every rank; "read": a user may set it


RANK = EnvVar("RANK", "number of this process among all ranks, from 0", "set")
LOCAL_RANK = EnvVar("LOCAL_RANK", "number of this rank on its node, from 0", "set")
WORLD_SIZE = EnvVar("WORLD_SIZE", "number of ranks of the job", "set")
LOCAL_WORLD_SIZE = EnvVar("LOCAL_WORLD_SIZE", "number of ranks on this node", "set")
LOCAL_SIZE = EnvVar("LOCAL_SIZE", "same as LOCAL_WORLD_SIZE, the name DeepSpeed scripts read", "set")
NODE_RANK = EnvVar("NODE_RANK", "number of this node, from 0", "set")
GROUP_RANK = EnvVar("GROUP_RANK", "same as NODE_RANK, the name torchrun scripts read", "set")
CROSS_RANK = EnvVar("CROSS_RANK", "same as NODE_RANK, the name DeepSpeed scripts read", "set")
CROSS_SIZE = EnvVar("CROSS_SIZE", "number of nodes of the job, the name DeepSpeed scripts read", "set")
MASTER_ADDR = EnvVar("MASTER_ADDR", "address of node 0 that every node can reach", "set")
MASTER_PORT = EnvVar("MASTER_PORT", "port on node 0 for the rendezvous of the process group", "set")
CUDA_VISIBLE_DEVICES = EnvVar("CUDA_VISIBLE_DEVICES", "the node's slots, as device indices", "set")
OMP_NUM_THREADS = EnvVar("OMP_NUM_THREADS", "CPU threads of a rank; a value already set is kept", "set")
JOB_ID = EnvVar("LAUNCH_JOB_ID", "id of the job; every process of the job carries it", "set")
ERROR_FILE = EnvVar("LAUNCH_ERROR_FILE", "where a rank leaves its error record (JSON)", "set")
AGENT_PID = EnvVar("LAUNCH_AGENT_PID", "pid of the agent; the worker takes it out before the script runs", "set")
LOG_DIR = EnvVar("LAUNCH_LOG_DIR", "parent folder of run folders, instead of ./runs", "read")
XDG_STATE_HOME = EnvVar(
    "XDG_STATE_HOME", "parent folder of launch/jobs, what launch ps reads; default ~/.local/state", "read"
)

ALL: tuple[EnvVar, ...] = tuple(value for value in list(globals().values()) if isinstance(value, EnvVar))
