"""How quick a rank's device and its links are: from a table of GPUs, or as `launch probe` has measured them."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from launcher.base.errors import UsageError
from launcher.config.policies import DType
from launcher.planner.speed import Fit, Speed, fits_of
from launcher.planner.tuning import Factors

GB = 10**9
# What of a data sheet's figure programs get: large matrix products, copies in memory, collectives of many bytes.
# benchmarks/plan.py holds the seconds that follow from it against runs that others have published.
MATMUL_SHARE, MEMORY_SHARE, LINK_SHARE = 0.5, 0.8, 0.75
KERNEL_S = 5e-6  # until the host has launched one operation of torch
HOP_WITHIN_NODE_S, HOP_BETWEEN_NODES_S = 3e-6, 8e-6  # of a collective, from one rank to the next
NETWORK_BYTES_PER_S = 50 * GB  # of each GPU: 400 Gb/s
HOST_MEMORY_BYTES_PER_S = 200 * GB  # of a node
DISK_BYTES_PER_S = 6 * GB  # of a node


@dataclass(frozen=True)
class Gpu:
    """A GPU as its data sheet describes it, without sparsity."""

    name: str
    memory_gb: int
    half_tflops: float  # bf16, or fp16 where it has no bf16
    single_tflops: float  # fp32 outside of tensor cores, which is torch's default
    memory_gb_per_s: int
    link_gb_per_s: int  # to GPUs of its node, in each direction
    host_gb_per_s: int  # to and from its host: PCIe


# Data sheets of NVIDIA and AMD. Links without NVLink are those of PCIe.
_GPUS = (
    Gpu("T4-16GB", 16, 65, 8.1, 320, 16, 16),
    Gpu("V100-16GB", 16, 125, 15.7, 900, 150, 16),
    Gpu("V100-32GB", 32, 125, 15.7, 900, 150, 16),
    Gpu("RTX3090-24GB", 24, 71, 35.6, 936, 32, 32),
    Gpu("RTX4090-24GB", 24, 165, 82.6, 1008, 32, 32),
    Gpu("A10G-24GB", 24, 70, 31.5, 600, 32, 32),
    Gpu("L4-24GB", 24, 121, 30.3, 300, 32, 32),
    Gpu("L40S-48GB", 48, 362, 91.6, 864, 32, 32),
    Gpu("A100-40GB", 40, 312, 19.5, 1555, 300, 32),
    Gpu("A100-80GB", 80, 312, 19.5, 2039, 300, 32),
    Gpu("H100-80GB", 80, 989, 67, 3350, 450, 64),
    Gpu("H100-PCIE-80GB", 80, 756, 51, 2000, 64, 64),
    Gpu("H200-141GB", 141, 989, 67, 4800, 450, 64),
    Gpu("B200-180GB", 180, 2250, 80, 7700, 900, 64),
    Gpu("MI300X-192GB", 192, 1307, 163, 5300, 448, 64),
)


def gpu_names() -> list[str]:
    """Return the names of the GPUs in the table."""
    return [gpu.name for gpu in _GPUS]


def _plain(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "", name.upper())


def gpu_named(name: str) -> Gpu:
    """Return a GPU by its name, with or without its memory: H100-80GB, h100. Raises: UsageError."""
    for gpu in _GPUS:
        if _plain(name) in (_plain(gpu.name), _plain(re.sub(r"-\d+GB$", "", gpu.name))):
            return gpu
    known = ", ".join(gpu_names())
    hint = f"known are {known}; `launch probe` measures any other"
    raise UsageError(f"there is no GPU {name[:50]!r} in the table", where="--gpu", hint=hint)


@dataclass(frozen=True)
class Hardware:
    """What one rank gets of its machines while all others do the same."""

    name: str
    matmul_flops: Mapping[DType, float]
    memory_bytes_per_s: float
    kernel_s: float
    link_bytes_per_s: float  # to ranks of its node
    network_bytes_per_s: float  # to other nodes
    host_memory_bytes_per_s: float
    to_device_bytes_per_s: float | None  # None: the device is the host
    disk_bytes_per_s: float
    hop_s: tuple[float, float] = (HOP_WITHIN_NODE_S, HOP_BETWEEN_NODES_S)
    # What was measured of a collective, by its kind and whether it is between nodes, with the ranks it was measured on.
    fits: Mapping[tuple[str, bool], tuple[Fit, int]] = field(default_factory=dict)
    learnt: Factors | None = None  # what `launch tune` has made of the parts of a step

    @property
    def is_cpu(self) -> bool:
        """Whether ranks train on the CPU: then collectives take the cores that compute, and nothing overlaps."""
        return self.to_device_bytes_per_s is None

    def collective_s(self, kind: str, num_bytes: float, num_ranks: int, ranks_per_node: int) -> float:
        """Return the seconds of a collective. num_bytes: of the whole buffer.

        num_ranks: of the group. ranks_per_node: how many of them are on one node.
        """
        if num_ranks <= 1 or num_bytes <= 0:
            return 0.0
        on_link = num_bytes * (num_ranks - 1) / num_ranks * (2 if kind == "all_reduce" else 1)
        num_nodes = math.ceil(num_ranks / ranks_per_node)
        fit = self._fit(kind, is_between_nodes=num_nodes > 1)
        if fit is not None:
            line, num_measured = fit
            return line.latency_s * math.log2(2 * num_ranks) / math.log2(2 * num_measured) + on_link / line.bytes_per_s
        within_s, between_s = self.hop_s
        # Rings pass through every rank, and trees through the logarithm: NCCL takes a tree to reduce many nodes.
        hops_s = (ranks_per_node - 1) * within_s
        hops_s += (2 * math.log2(num_nodes) if kind == "all_reduce" else num_nodes - 1) * between_s
        rate = self.link_bytes_per_s
        if num_nodes > 1:  # each rank of a node brings its own network
            rate = min(rate, self.network_bytes_per_s * ranks_per_node)
        if kind == "all_to_all" and num_nodes > 1:  # no ring: what is for other nodes leaves by each rank's own
            rate = self.network_bytes_per_s
        return hops_s + on_link / rate

    def transfer_s(self, num_bytes: float, *, is_between_nodes: bool) -> float:
        """Return the seconds of a transfer to one other rank."""
        fit = self._fit("all_gather", is_between_nodes=is_between_nodes)
        if fit is not None:
            return fit[0].latency_s + num_bytes / fit[0].bytes_per_s
        rate = self.network_bytes_per_s if is_between_nodes else self.link_bytes_per_s
        return self.hop_s[is_between_nodes] + num_bytes / rate

    def _fit(self, kind: str, *, is_between_nodes: bool) -> tuple[Fit, int] | None:
        """Return what was measured of a collective; one that was not is like an all-gather."""
        return self.fits.get((kind, is_between_nodes)) or self.fits.get(("all_gather", is_between_nodes))


def hardware_of(gpu: Gpu, gpus_per_node: int, network_bytes_per_s: float = NETWORK_BYTES_PER_S) -> Hardware:
    """Return what programs get of a GPU of the table."""
    return Hardware(
        name=gpu.name,
        matmul_flops={
            DType.FP32: gpu.single_tflops * 1e12 * MATMUL_SHARE,
            **dict.fromkeys((DType.BF16, DType.FP16), gpu.half_tflops * 1e12 * MATMUL_SHARE),
        },
        memory_bytes_per_s=gpu.memory_gb_per_s * GB * MEMORY_SHARE,
        kernel_s=KERNEL_S,
        link_bytes_per_s=gpu.link_gb_per_s * GB * LINK_SHARE,
        network_bytes_per_s=network_bytes_per_s * LINK_SHARE,
        host_memory_bytes_per_s=HOST_MEMORY_BYTES_PER_S * MEMORY_SHARE / gpus_per_node,
        to_device_bytes_per_s=gpu.host_gb_per_s * GB * LINK_SHARE,
        disk_bytes_per_s=DISK_BYTES_PER_S / gpus_per_node,
    )


def probed_hardware(speed: Speed, gpus_per_node: int, network_bytes_per_s: float = NETWORK_BYTES_PER_S) -> Hardware:
    """Return what ranks get of machines that were measured. The slowest rank counts: the others wait for it.

    network_bytes_per_s: between nodes, where one node alone was measured.
    """
    ranks = speed.ranks
    is_cpu = all(each.device == "cpu" for each in ranks)
    flops = {
        DType(kind): min(each.matmul_flops.get(kind, math.inf) for each in ranks)
        for kind in ("fp32", "bf16", "fp16")
        if any(kind in each.matmul_flops for each in ranks)
    }
    memory = min(each.memory_bytes_per_s for each in ranks)
    num_nodes = len({each.node for each in ranks})
    num_ranks = {(one.kind, one.group): one.num_ranks for one in speed.collectives}
    fits: dict[tuple[str, bool], tuple[Fit, int]] = {}
    # Of all ranks first: a group within a node, or between nodes, says the same more exactly.
    for (kind, group), fit in sorted(fits_of(speed.collectives).items(), key=lambda item: item[0][1] != "all ranks"):
        fits[kind, num_nodes > 1 and group != "within a node"] = (fit, num_ranks[kind, group])
    disks = [min(r, w) for each in ranks if (r := each.disk_read_bytes_per_s) and (w := each.disk_write_bytes_per_s)]
    to_device = [each.to_device_bytes_per_s for each in ranks if each.to_device_bytes_per_s]
    within, between = (
        [fit.bytes_per_s for (_, is_between), (fit, _) in fits.items() if is_between is wanted]
        for wanted in (False, True)
    )
    return Hardware(
        name=f"{len(ranks)} × {ranks[0].device}, measured {speed.measured} UTC",
        matmul_flops=flops,
        memory_bytes_per_s=memory,
        kernel_s=max(each.kernel_s for each in ranks) or KERNEL_S,
        link_bytes_per_s=statistics.median(within) if within else memory,
        network_bytes_per_s=statistics.median(between) if between else network_bytes_per_s * LINK_SHARE,
        host_memory_bytes_per_s=memory if is_cpu else HOST_MEMORY_BYTES_PER_S * MEMORY_SHARE / gpus_per_node,
        to_device_bytes_per_s=None if is_cpu or not to_device else min(to_device),
        disk_bytes_per_s=(min(disks) if disks else DISK_BYTES_PER_S) / gpus_per_node,
        fits=fits,
    )


def scaled(hardware: Hardware, figure: str, factor: float) -> Hardware:
    """Return hardware with `matmul`, `link`, `network` or `disk` so many times as quick. Raises: UsageError."""
    if figure == "matmul":
        return replace(hardware, matmul_flops={key: each * factor for key, each in hardware.matmul_flops.items()})
    if figure not in ("link", "network", "disk"):
        raise UsageError(f"{figure} is no figure of a machine", hint="matmul, link, network or disk")
    name = f"{figure}_bytes_per_s"
    fits = {
        key: (replace(fit, bytes_per_s=fit.bytes_per_s * factor) if figure == ("link", "network")[key[1]] else fit, num)
        for key, (fit, num) in hardware.fits.items()
    }
    return replace(hardware, fits=fits, **{name: getattr(hardware, name) * factor})
