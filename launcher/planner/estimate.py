"""The whole estimate: one row for each setting, what fits, and the first setting that does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.config.schema import Config
from launcher.planner.memory import (
    CUDA_CONTEXT_BYTES,
    RankMemory,
    Setting,
    Share,
    Workload,
    activation_bytes,
    library_bytes,
    rank_memory,
)
from launcher.planner.model import ModelFacts, Parameter
from launcher.planner.settings import as_config, ladder, refusals
from launcher.sharding.grouping import block_of
from launcher.sharding.pipeline import PipelinePlan, partition

# ---- What each rank of a pipeline has of a model ----


@dataclass(frozen=True)
class RankPart:
    """What one pipeline rank has."""

    model: ModelFacts  # with the parameters of its stages alone
    share: Share  # of the activations
    rank: int = 0  # of the pipeline

    def share_of(self, plan: PipelinePlan) -> Share:
        """Return its share where a step has another number of micro-batches."""
        if plan.num_ranks == 1:
            return self.share
        has_head = self.share.num_heads > 0
        num_heads = 0 if not has_head else plan.num_micro_batches if plan.schedule == "gpipe" else 1
        return Share(self.share.layers, plan.in_flight(self.rank), num_heads)


def rank_parts(model: ModelFacts, plan: PipelinePlan, method: str = "best") -> list[RankPart]:
    """Return what each pipeline rank has. Raises: ConfigError for fewer blocks than stages.

    method: `pipeline.partition`; one by class counts blocks, as "uniform" does, and one by time counts parameters.
    What stands before the blocks goes with the first of them, and what stands behind with the last. A model without an
    output layer has its embedding there, too: the two share a weight, of which both stages hold a copy.
    """
    layers = _layers(model)
    counts_blocks = method.lower().startswith(("uniform", "type:"))
    weights = [1 if counts_blocks else sum(param.numel for param in layer) for layer in layers]
    stages = partition(weights, plan.num_stages)
    last = len(stages) - 1
    parts = []
    for rank in range(plan.num_ranks):
        own = plan.stages_of(rank)
        params = tuple(param for stage in own for index in stages[stage] for param in layers[index])
        num_layers = max(len(stages[stage]) for stage in own)
        part = RankPart(replace(model, params=params), Share(num_layers / max(1, len(layers)), 1, last in own), rank)
        parts.append(replace(part, share=part.share_of(plan)))
    return parts


def _layers(model: ModelFacts) -> list[list[Parameter]]:
    layers: list[list[Parameter]] = []
    before: list[Parameter] = []
    key = None
    for param in model.params:
        block = block_of(param.name)
        if block and block != key:
            layers.append([*before, param])
            before, key = [], block
        elif layers:
            layers[-1].append(param)
        else:
            before.append(param)
    if not layers:
        return [before]
    return [*layers[:-1], [*layers[-1], *_tied_head(model, layers)]]


def _tied_head(model: ModelFacts, layers: Sequence[Sequence[Parameter]]) -> list[Parameter]:
    """Return the copy of the embedding on the last stage, where no output layer is listed."""
    if model.shape is None or not model.shape.vocab_size or len(layers) < 2:
        return []
    embedding = max((param for param in layers[0] if not block_of(param.name)), key=lambda p: p.numel, default=None)
    has_head = any(not block_of(param.name) and param.numel >= _numel(embedding) // 2 for param in layers[-1])
    return [] if embedding is None or has_head else [replace(embedding, name=f"tied to {embedding.name}")]


def _numel(param: Parameter | None) -> int:
    return 0 if param is None else param.numel


# ---- The estimate ----


_FP32_BUILD_BYTES = 4


@dataclass(frozen=True)
class Machines:
    """Where ranks would run; None: not known, so nothing is ruled out by it."""

    num_nodes: int = 1
    gpus_per_node: int = 1
    gpu_memory_bytes: int | None = None
    cpu_memory_bytes: int | None = None  # of one node
    context_bytes: int = CUDA_CONTEXT_BYTES  # 0: ranks train on the CPU

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
    needed = [part_memory(part, machines, setting, workload) for part in parts]
    memory = max(needed, key=lambda one: (one.device, one.host))  # of the ranks of a pipeline, the one that needs most
    per_node = machines.gpus_per_node
    return Row(setting, memory, memory.host * per_node, memory.disk * per_node, tuple(refusals(setting)))


def part_memory(part: RankPart, machines: Machines, setting: Setting, workload: Workload | None) -> RankMemory:
    """Return what a pipeline rank needs, with CUDA's and its libraries' own. workload: None leaves activations out."""
    memory = rank_memory(part.model, setting, machines.world_size)
    context = machines.context_bytes
    if context:  # on a GPU
        context += library_bytes(part.model, setting, machines.world_size)
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
