"""Every environment variable this project reads or sets: name, meaning, and who uses it.

`docs/environment.md` is checked against this table.
"""

from __future__ import annotations

from launcher.base.record import Record


class EnvVar(Record):
    """One environment variable."""

    name: str
    doc: str
    direction: str  # "set": given to every rank; "read": a user or Slurm may set it


RANK = EnvVar("RANK", "number of this process among all ranks, from 0", "set")
LOCAL_RANK = EnvVar("LOCAL_RANK", "number of this rank on its node, from 0", "set")
WORLD_SIZE = EnvVar("WORLD_SIZE", "number of ranks of the job", "set")
LOCAL_WORLD_SIZE = EnvVar("LOCAL_WORLD_SIZE", "number of ranks on this node", "set")
LOCAL_SIZE = EnvVar("LOCAL_SIZE", "same as LOCAL_WORLD_SIZE, the name DeepSpeed scripts read", "set")
NODE_RANK = EnvVar("NODE_RANK", "number of this node, from 0", "set")
GROUP_RANK = EnvVar("GROUP_RANK", "same as NODE_RANK, the name torchrun scripts read", "set")
CROSS_RANK = EnvVar("CROSS_RANK", "same as NODE_RANK, the name DeepSpeed scripts read", "set")
CROSS_SIZE = EnvVar("CROSS_SIZE", "number of nodes of the job, the name DeepSpeed scripts read", "set")
GROUP_WORLD_SIZE = EnvVar("GROUP_WORLD_SIZE", "same as CROSS_SIZE, the name torchrun scripts read", "set")
ROLE_RANK = EnvVar("ROLE_RANK", "same as RANK: all ranks have one role, as torchrun's by default", "set")
ROLE_WORLD_SIZE = EnvVar("ROLE_WORLD_SIZE", "same as WORLD_SIZE, the name torchrun scripts read", "set")
ROLE_NAME = EnvVar("ROLE_NAME", "`default`, the name of torchrun's role", "set")
MASTER_ADDR = EnvVar("MASTER_ADDR", "address of node 0 that every node can reach", "set")
MASTER_PORT = EnvVar("MASTER_PORT", "port on node 0 for the rendezvous of the process group", "set")
CUDA_VISIBLE_DEVICES = EnvVar(
    "CUDA_VISIBLE_DEVICES", "the node's slots, as device indices; not set on a node without GPUs", "set"
)
OMP_NUM_THREADS = EnvVar("OMP_NUM_THREADS", "CPU threads of a rank; a value already set is kept", "set")
JOB_ID = EnvVar("LAUNCH_JOB_ID", "id of the job; every process of the job carries it", "set")
ERROR_FILE = EnvVar("LAUNCH_ERROR_FILE", "where a rank leaves its error record (JSON)", "set")
ENGINE_FILE = EnvVar(
    "LAUNCH_ENGINE_FILE", "where the engine of a rank leaves where it stands on the ladder of `--on-oom` (JSON)", "set"
)
ARGUMENTS_FD = EnvVar(
    "LAUNCH_ARGUMENTS_FD",
    "where the worker reads the script's arguments; unset before the script runs",
    "set",
)
CALL_FD = EnvVar(
    "LAUNCH_CALL_FD",
    "where a rank of `launcher.run` reads the call; unset before the function runs",
    "set",
)
RESULT_FD = EnvVar(
    "LAUNCH_RESULT_FD",
    "where a rank of `launcher.run` leaves the result; unset before the function runs",
    "set",
)
STDIN_FD = EnvVar(
    "LAUNCH_STDIN_FD",
    "where the agent finds the standard input of `launch`, for a job of one rank; unset before the rank starts",
    "set",
)
SETUP_CHANGED = EnvVar(
    "LAUNCH_SETUP_CHANGED",
    "names of the variables that `--setup` has changed on a host; unset before the rank starts",
    "set",
)
JOURNAL_FD = EnvVar(
    "LAUNCH_JOURNAL_FD",
    "where a rank writes its journal, as PID:DESCRIPTOR: a child of the rank has none (`--no-journal`: no rank has)",
    "set",
)
FAULTS = EnvVar("LAUNCH_FAULTS", "the faults that ranks rehearse (`--fault`); at the first start only", "set")
PROGRESS_FILE = EnvVar("LAUNCH_PROGRESS_FILE", "where `launcher.heartbeat()` counts", "set")
TRACE_FILE = EnvVar(
    "LAUNCH_TRACE_FILE", "where a rank finds what `launch trace` asks of it, beside the pipe for its answer", "set"
)
CRASH_FILE = EnvVar(
    "LAUNCH_CRASH_FILE",
    "where a rank that crashes in native code leaves its Python stacks; unset before the script runs",
    "set",
)
STACKS_FILE = EnvVar(
    "LAUNCH_STACKS_FILE",
    "where a rank dumps its Python stacks; unset before the script runs",
    "set",
)
COLLECTIVES_FILE = EnvVar(
    "LAUNCH_COLLECTIVES_FILE",
    "where a rank says which collectives it has entered (JSON), when its agent opens the pipe of that name and"
    " `.request`",
    "set",
)
REQUEST_SUFFIX = ".request"  # of the pipe beside COLLECTIVES_FILE
FR_BUFFER_SIZE = EnvVar(
    "TORCH_FR_BUFFER_SIZE",
    "collectives that torch's flight recorder keeps, for the report of a hang; a value already set is kept, as is"
    " TORCH_NCCL_TRACE_BUFFER_SIZE",
    "set",
)
NCCL_BUFFER_SIZE = EnvVar(
    "TORCH_NCCL_TRACE_BUFFER_SIZE", "the older name of TORCH_FR_BUFFER_SIZE, which is not set beside it", "read"
)
RESTART_COUNT = EnvVar("LAUNCH_RESTART_COUNT", "how often the job was started again, from 0", "set")
TORCHELASTIC_RESTART_COUNT = EnvVar(
    "TORCHELASTIC_RESTART_COUNT", "same as LAUNCH_RESTART_COUNT, the name torchrun scripts read", "set"
)
TORCHELASTIC_MAX_RESTARTS = EnvVar(
    "TORCHELASTIC_MAX_RESTARTS", "how often the job may be started again (`--max-restarts`)", "set"
)
TORCHELASTIC_ERROR_FILE = EnvVar(
    "TORCHELASTIC_ERROR_FILE", "where torch's `@record` leaves an error; it is copied to `rank_N.error.json`", "set"
)
TORCHELASTIC_RUN_ID = EnvVar(
    "TORCHELASTIC_RUN_ID",
    "name of the job that all its ranks share: LAUNCH_JOB_ID, or `--job-id` where each node runs its own command",
    "set",
)
RESUME = EnvVar(
    "LAUNCH_RESUME",
    "what the run continues from: `auto`, `never`, a folder, or nothing (`--resume`)",
    "set",
)
CONFIG_PATCH = EnvVar(
    "LAUNCH_CONFIG_PATCH",
    "JSON that changes the config of every engine, sections merged key by key, null removes a key;"
    " `--on-oom ladder` sets it",
    "read",
)
ENGINE = EnvVar("LAUNCH_ENGINE", "what `import deepspeed` finds: `auto` or `builtin` (`--engine`)", "set")
LOG_DIR = EnvVar("LAUNCH_LOG_DIR", "parent folder of run folders, instead of ./runs", "read")
TERM_IS_NOTICE = EnvVar(
    "LAUNCH_TERM_IS_NOTICE",
    "1: the first SIGTERM is a preemption notice; set by the batch scripts of `launch sbatch --requeue`",
    "read",
)
TIMEOUT_SCALE = EnvVar(
    "LAUNCH_TIMEOUT_SCALE",
    "multiplies how long `launch` waits where no option says it (`launcher/base/timeouts.py`); default 1",
    "read",
)
CPU_KERNEL = EnvVar(
    "LAUNCH_CPU_KERNEL",
    "C++ optimizer kernels: `AVX-512`, `AVX2`, `SSE2`, `NEON`, or `off`; default the best of this CPU",
    "read",
)
REHEARSAL = EnvVar(
    "LAUNCH_REHEARSAL",
    "file of the rank that `launch rehearse` runs, and of its result; a script may ask whether it is rehearsed",
    "set",
)
REDUCE_GROUP = EnvVar(
    "LAUNCH_REDUCE_GROUP",
    "communicator of gradient reductions: `own`, or `shared` with gathers; default shared on NCCL, own on gloo",
    "read",
)
# Set by Slurm; see schedulers/slurm.py for their forms.
SLURM_JOB_ID = EnvVar("SLURM_JOB_ID", "set by Slurm: number of the job", "read")
SLURM_JOB_NODELIST = EnvVar("SLURM_JOB_NODELIST", "set by Slurm: nodes of the job, compressed", "read")
SLURM_JOB_NUM_NODES = EnvVar("SLURM_JOB_NUM_NODES", "set by Slurm: number of nodes of the job", "read")
SLURM_GPUS = EnvVar("SLURM_GPUS", "set by Slurm: GPUs of the whole job, where --gpus was given", "read")
SLURM_GPUS_PER_NODE = EnvVar("SLURM_GPUS_PER_NODE", "set by Slurm: GPUs of each node, maybe with a type", "read")
SLURM_GPUS_ON_NODE = EnvVar("SLURM_GPUS_ON_NODE", "set by Slurm: GPUs of this node", "read")
SLURM_JOB_GPUS = EnvVar("SLURM_JOB_GPUS", "set by Slurm: indices of this node's GPUs", "read")
SLURM_TASKS_PER_NODE = EnvVar("SLURM_TASKS_PER_NODE", "set by Slurm: ranks of each node without GPUs", "read")
SLURM_STEP_ID = EnvVar("SLURM_STEP_ID", "set by srun: number of the step", "read")
SLURM_STEP_NODELIST = EnvVar("SLURM_STEP_NODELIST", "set by srun: nodes of the step, compressed", "read")
SLURM_STEP_NUM_TASKS = EnvVar("SLURM_STEP_NUM_TASKS", "set by srun: tasks of the step; WORLD_SIZE of its ranks", "read")
SLURM_STEP_TASKS_PER_NODE = EnvVar("SLURM_STEP_TASKS_PER_NODE", "set by srun: tasks of each node of the step", "read")
SLURM_PROCID = EnvVar("SLURM_PROCID", "set by srun: number of the task; RANK under `srun launch`", "read")
SLURM_LOCALID = EnvVar("SLURM_LOCALID", "set by srun: number of the task on its node; LOCAL_RANK", "read")
SLURM_NODEID = EnvVar("SLURM_NODEID", "set by srun: number of the node in the step; NODE_RANK", "read")
SLURM_RESTART_COUNT = EnvVar("SLURM_RESTART_COUNT", "set by Slurm: how often the job went back into the queue", "read")
SLURM_HET_SIZE = EnvVar("SLURM_HET_SIZE", "set by Slurm: parts of a heterogeneous job, which is refused", "read")
SLURMD_NODENAME = EnvVar("SLURMD_NODENAME", "set by Slurm: name of the node a process runs on", "read")
# Set by other launchers, for each process they start; see schedulers/rank.py.
OMPI_RANK = EnvVar("OMPI_COMM_WORLD_RANK", "set by Open MPI's mpirun: RANK, where that is not set", "read")
OMPI_SIZE = EnvVar("OMPI_COMM_WORLD_SIZE", "set by Open MPI's mpirun: WORLD_SIZE", "read")
OMPI_LOCAL_RANK = EnvVar("OMPI_COMM_WORLD_LOCAL_RANK", "set by Open MPI's mpirun: LOCAL_RANK", "read")
OMPI_LOCAL_SIZE = EnvVar("OMPI_COMM_WORLD_LOCAL_SIZE", "set by Open MPI's mpirun: LOCAL_WORLD_SIZE", "read")
MV2_RANK = EnvVar("MV2_COMM_WORLD_RANK", "set by MVAPICH2's mpirun: RANK, where that is not set", "read")
MV2_SIZE = EnvVar("MV2_COMM_WORLD_SIZE", "set by MVAPICH2's mpirun: WORLD_SIZE", "read")
MV2_LOCAL_RANK = EnvVar("MV2_COMM_WORLD_LOCAL_RANK", "set by MVAPICH2's mpirun: LOCAL_RANK", "read")
MV2_LOCAL_SIZE = EnvVar("MV2_COMM_WORLD_LOCAL_SIZE", "set by MVAPICH2's mpirun: LOCAL_WORLD_SIZE", "read")
PMI_RANK = EnvVar("PMI_RANK", "set by MPICH's and Intel's mpiexec: RANK, where that is not set", "read")
PMI_SIZE = EnvVar("PMI_SIZE", "set by MPICH's and Intel's mpiexec: WORLD_SIZE", "read")
MPI_LOCALRANKID = EnvVar("MPI_LOCALRANKID", "set by MPICH's and Intel's mpiexec: LOCAL_RANK", "read")
MPI_LOCALNRANKS = EnvVar("MPI_LOCALNRANKS", "set by MPICH's and Intel's mpiexec: LOCAL_WORLD_SIZE", "read")
PMIX_RANK = EnvVar("PMIX_RANK", "set by PMIx: that this is a rank of a job, whose size something else must say", "read")
PMIX_NAMESPACE = EnvVar("PMIX_NAMESPACE", "set by PMIx: name of the job, from which MASTER_PORT follows", "read")
# Set by schedulers that start one command on each node; see schedulers/detect.py.
PET_NNODES = EnvVar("PET_NNODES", "set by Kubeflow, torchrun's --nnodes: number of nodes", "read")
PET_NPROC_PER_NODE = EnvVar("PET_NPROC_PER_NODE", "set by Kubeflow, torchrun's --nproc-per-node: ranks here", "read")
PET_NODE_RANK = EnvVar("PET_NODE_RANK", "set by Kubeflow, torchrun's --node-rank: number of this node", "read")
PET_MASTER_ADDR = EnvVar("PET_MASTER_ADDR", "set by Kubeflow, torchrun's --master-addr: address of node 0", "read")
PET_MASTER_PORT = EnvVar("PET_MASTER_PORT", "set by Kubeflow, torchrun's --master-port: port on node 0", "read")
PET_RDZV_ENDPOINT = EnvVar("PET_RDZV_ENDPOINT", "set by Kubeflow: address and port of node 0, without those", "read")
NNODES = EnvVar("NNODES", "set by some schedulers, with MASTER_ADDR and NODE_RANK: number of nodes", "read")
# Devices of other vendors; see cluster/devices.py.
HIP_VISIBLE_DEVICES = EnvVar("HIP_VISIBLE_DEVICES", "AMD: GPUs that may be used; ranks get the node's slots", "read")
ROCR_VISIBLE_DEVICES = EnvVar("ROCR_VISIBLE_DEVICES", "AMD: GPUs that HIP sees, which HIP numbers from 0", "read")
ZE_AFFINITY_MASK = EnvVar("ZE_AFFINITY_MASK", "Intel: GPUs that may be used; ranks get the node's slots", "read")
ASCEND_RT_VISIBLE_DEVICES = EnvVar(
    "ASCEND_RT_VISIBLE_DEVICES", "Ascend: NPUs that may be used; ranks get the node's slots", "read"
)
DS_ENV_FILE = EnvVar("DS_ENV_FILE", "name or path of the file that is read in place of `.deepspeed_env`", "read")
XDG_STATE_HOME = EnvVar(
    "XDG_STATE_HOME", "parent folder of launch/jobs, what launch ps reads; default ~/.local/state", "read"
)

ALL: tuple[EnvVar, ...] = tuple(value for value in list(globals().values()) if isinstance(value, EnvVar))
