"""The whole estimate: one row for each setting, what fits, and the first setting that does."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.config.schema import Config
from launcher.planner.activations import Share, Workload, activation_bytes
from launcher.planner.memory import CUDA_CONTEXT_BYTES, NCCL_BYTES, RankMemory, Setting, rank_memory
from launcher.planner.model import ModelFacts
from launcher.planner.pipeline import RankPart, rank_parts
from launcher.planner.settings import as_config, ladder, refusals

_FP32_BUILD_BYTES = 4


@dataclass(frozen=True)
class Machines:
    """Where ranks would run; None: not known, so nothing is ruled out by it."""

    num_nodes: int = 1
    gpus_per_node: int = 1
    gpu_memory_bytes: int | None = None
    cpu_memory_bytes: int | None = None  # of one node
    context_bytes: int = CUDA_CONTEXT_BYTES

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def are_bounded(self) -> bool:
        """Whether a memory is known, so that there is something to fit into."""
        return self.gpu_memory_bytes is not None or self.cpu_memory_bytes is not None


@dataclass(frozen=True)
class Row:
    """One setting and what it needs."""

    setting: Setting
    memory: RankMemory
    host_per_node: int
    disk_per_node: int
    refusals: tuple[str, ...]  # why this release's engine would not run it

    def fits(self, machines: Machines, gpu_memory_bytes: int | None = None) -> bool:
        """Whether it fits. gpu_memory_bytes: instead of the machines'."""
        gpu = gpu_memory_bytes or machines.gpu_memory_bytes
        cpu = machines.cpu_memory_bytes
        return (gpu is None or self.memory.device <= gpu) and (cpu is None or self.host_per_node <= cpu)


@dataclass(frozen=True)
class Estimate:
    """Rows for what was asked, and the ladder of settings to recommend from."""

    model: ModelFacts
    machines: Machines
    workload: Workload | None  # None: activations are not counted
    rows: tuple[Row, ...]
    ladder: tuple[Row, ...]

    def first_fit(self, gpu_memory_bytes: int | None = None, *, runs_here: bool = False) -> Row | None:
        """Return the quickest setting that fits, None when none does.

        gpu_memory_bytes: instead of the machines'. runs_here: leave out what this release's engine refuses.
        """
        rows = (row for row in self.ladder if not (runs_here and row.refusals))
        return next((row for row in rows if row.fits(self.machines, gpu_memory_bytes)), None)

    @property
    def build_bytes(self) -> int:
        """Host memory of a node when every rank builds the whole model in fp32 before it is sharded."""
        return _FP32_BUILD_BYTES * self.model.num_params * self.machines.gpus_per_node

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data; sizes in bytes."""
        first = self.first_fit() if self.machines.are_bounded else None
        return {
            "model": {
                "name": self.model.name,
                "source": self.model.source,
                "num_params": self.model.num_params,
                "num_trainable": self.model.num_trainable,
                "largest_layer_params": self.model.largest_layer_numel,
                "shape": None if self.model.shape is None else asdict(self.model.shape),
                "notes": list(self.model.notes),
            },
            "machines": asdict(self.machines) | {"world_size": self.machines.world_size},
            "workload": None if self.workload is None else asdict(self.workload),
            "build_bytes_per_node": self.build_bytes,
            "rows": [_row_json(row, self.machines) for row in self.rows],
            "first_fit": None if first is None else _row_json(first, self.machines),
        }


def _row_json(row: Row, machines: Machines) -> dict[str, Any]:
    memory = row.memory
    return {
        "stage": row.setting.stage,
        "precision": row.setting.policy.precision.param.value,
        "offload_optimizer": row.setting.policy.offload.optimizer.value,
        "offload_param": row.setting.policy.offload.params.value,
        "gpu_bytes": memory.device,
        "parts": {
            name: getattr(memory, name)
            for name in ("parameters", "gradients", "optimizer", "in_flight", "activations", "context")
        },
        "pipeline_idle_fraction": row.setting.pipeline.idle_fraction,
        "host_bytes_per_node": row.host_per_node,
        "disk_bytes_per_node": row.disk_per_node,
        "fits": row.fits(machines),
        "refused_by_this_release": list(row.refusals),
        "config": as_config(row.setting),
    }


def estimate(
    model: ModelFacts, machines: Machines, settings: list[Setting], base: Config, workload: Workload | None
) -> Estimate:
    """Return what each of `settings` needs, and what the ladder around `base` needs, which is a resolved config.

    settings: all for training, or all for inference. workload: None leaves activations out; so does a model whose shape
    is not known.
    """
    known = workload if model.shape is not None else None
    rows = tuple(_row(model, machines, setting, known) for setting in settings)
    settings_to_try = ladder(base, machines.world_size, trains=settings[0].trains)
    rungs = tuple(_row(model, machines, setting, known) for setting in settings_to_try)
    return Estimate(model, machines, known, rows, rungs)


def _row(model: ModelFacts, machines: Machines, setting: Setting, workload: Workload | None) -> Row:
    parts = [RankPart(model, Share())]
    if setting.pipeline.num_ranks > 1:
        parts = rank_parts(model, setting.pipeline, setting.partition)
    needed = [_memory(part, machines, setting, workload) for part in parts]
    memory = max(needed, key=lambda one: (one.device, one.host))  # of the ranks of a pipeline, the one that needs most
    per_node = machines.gpus_per_node
    return Row(setting, memory, memory.host * per_node, memory.disk * per_node, tuple(refusals(setting)))


def _memory(part: RankPart, machines: Machines, setting: Setting, workload: Workload | None) -> RankMemory:
    memory = rank_memory(part.model, setting, machines.world_size)
    context = machines.context_bytes + (NCCL_BYTES if machines.world_size > 1 else 0)
    activations, shape = 0, part.model.shape
    if workload is not None and shape is not None:
        own = replace(workload, num_sequence_ranks=setting.sizes.sequence)
        activations = activation_bytes(shape, own, setting.element.param, setting.sizes.tensor, part.share)
    return replace(memory, activations=activations, context=context)


def tightest(rows: tuple[Row, ...]) -> Row:
    """Return the setting that needs the least device memory, among equals the least host memory."""
    return min(rows, key=lambda row: (row.memory.device, row.host_per_node))


@dataclass(frozen=True)
class Advice:
    """An option that makes everything smaller, and what it leads to."""

    option: str
    row: Row  # the first setting that fits then, or the tightest
    fits: bool


def advice(found: Estimate) -> list[Advice]:
    """Return options that make the tightest setting smaller, the smallest result first."""
    work, machines = found.workload, found.machines
    tries: list[tuple[str, Machines, Workload | None]] = []
    if work is not None and not (work.is_checkpointed or work.is_inference):
        tries.append(("--checkpointing", machines, replace(work, is_checkpointed=True)))
    if work is not None and work.batch_size > 1:
        tries.append(("--batch 1", machines, replace(work, batch_size=1)))
    twice = replace(machines, num_nodes=2 * machines.num_nodes)
    tries.append((f"--num-nodes {twice.num_nodes}", twice, work))
    before = tightest(found.ladder).memory.device
    better: list[tuple[int, Advice]] = []
    for option, machine, workload in tries:
        rows = tuple(_row(found.model, machine, row.setting, workload) for row in found.ladder)
        least = tightest(rows)
        first = next((row for row in rows if row.fits(machine)), None)
        if first is not None or least.memory.device < before:
            better.append((least.memory.device, Advice(option, first or least, first is not None)))
    return [item for _, item in sorted(better, key=lambda pair: pair[0])]
