"""Which variables of the launcher's environment a remote rank gets, and the variables of each rank.

A rank on this machine inherits everything. A rank on another host gets that host's own environment plus the
variables listed here, inside the protocol: never on a command line, where `ps` would show a token to everyone.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.base import env
from launcher.base.errors import UsageError
from launcher.cluster.cluster import NodePlacement, Placement
from launcher.cluster.devices import visible_devices
from launcher.job.plan import JobPlan

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
    own = {variable.name for variable in env.ALL if variable.direction == "set"} - {env.OMP_NUM_THREADS.name}
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
            hint="ask for the same number on each node with --gpus-per-node, or lower --num-gpus",
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
    }


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
