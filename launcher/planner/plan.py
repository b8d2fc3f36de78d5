"""Which way to train is quickest: every setting that the engine runs, with the bytes and seconds that it would take.

A setting is a rung of the ladder (stage and offload), a mesh, a micro-batch and whether blocks are recomputed; the
global batch is the same in all of them. Bytes are those of `planner.memory`, seconds those of `planner.timing`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from launcher.base.errors import UsageError
from launcher.base.units import format_bytes
from launcher.config.policies import Place, zero_policy
from launcher.config.schema import Config
from launcher.planner.computing import Computes, RankModel
from launcher.planner.estimate import Machines, RankPart, part_memory, rank_parts
from launcher.planner.hardware import Hardware
from launcher.planner.ladder import PIPELINE_STANDINGS, STANDINGS, Standing
from launcher.planner.memory import RankMemory, Setting, Share
from launcher.planner.model import ModelFacts
from launcher.planner.settings import as_config, at, refusals, standing_of, states_of
from launcher.planner.timing import (
    BUBBLE,
    COMPUTE,
    GATHER,
    KERNELS,
    MODEL,
    REDUCE,
    TRANSFER,
    UPDATE,
    StepTime,
    step_time,
)
from launcher.sharding.mesh import MeshSizes
from launcher.sharding.pipeline import PipelinePlan

_MAX_MICRO_BATCHES = 12  # sizes of a micro-batch that are tried
# What of a GPU's memory is not lost between blocks of torch's allocator.
USABLE_MEMORY = 0.95
_LARGE_PREFETCH = 500_000_000  # elements: ten times the default
_SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1))
_REASONS = {
    COMPUTE: "computing",
    KERNELS: "the host launches operations more slowly than the device runs them",
    GATHER: "parameters are waited for",
    REDUCE: "gradients are waited for",
    MODEL: "exchanges within layers",
    BUBBLE: "pipeline ranks are idle",
    TRANSFER: "transfers to and from the host",
    UPDATE: "the update",
}


@dataclass(frozen=True)
class Question:
    """What is to be trained, on what."""

    model: ModelFacts
    computes: Computes
    machines: Machines
    hardware: Hardware
    base: Config  # a resolved config: precision, optimizer, buffers
    global_batch: int  # samples of a step
    axes: frozenset[str] = frozenset({"tensor", "pipeline", "sequence", "expert"})  # that may have several ranks

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a transformer, samples of a script."""
        return self.global_batch * self.computes.samples.length

    @property
    def base_precision(self) -> str:
        """Name of the precision."""
        return zero_policy(self.base, self.machines.world_size).precision.label


@dataclass(frozen=True)
class Row:
    """One way to train."""

    setting: Setting
    micro_batch: int
    num_micro_batches: int
    is_checkpointed: bool
    memory: RankMemory
    host_per_node: int
    disk_per_node: int
    time: StepTime
    patch: Mapping[str, Any] = field(default_factory=dict)  # keys of ZeRO beside stage and offload
    is_rehearsed: bool = False  # its bytes are those of a rehearsal

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.time.seconds

    def misfit(self, machines: Machines) -> str | None:
        """Return which memory it does not fit, None where it fits."""
        gpu, host = machines.gpu_memory_bytes, machines.cpu_memory_bytes
        if gpu is not None and self.memory.device > USABLE_MEMORY * gpu:
            return f"needs {format_bytes(self.memory.device)} of a GPU's {format_bytes(gpu)}"
        if host is not None and self.host_per_node > USABLE_MEMORY * host:
            return f"needs {format_bytes(self.host_per_node)} of a host's {format_bytes(host)}"
        return None

    @property
    def reason(self) -> str:
        """What its time is spent on, beside computing."""
        limit = self.time.limit
        share = self.time.parts.get(limit, 0.0) / self.seconds
        return f"{_REASONS[limit]}: {share:.0%} of the step"

    def config(self) -> dict[str, Any]:
        """Return the keys of an engine config that ask for this row."""
        keys = as_config(self.setting)
        keys["zero_optimization"] = {**keys["zero_optimization"], **self.patch}
        if self.is_checkpointed:
            keys["activation_checkpointing"] = {"blocks": True}
        batch = {
            "train_batch_size": self.micro_batch * self.num_micro_batches * self.setting.sizes.data,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.num_micro_batches,
        }
        return {**batch, **keys}

    def as_patch(self) -> dict[str, Any]:
        """Return what makes any config one that asks for this row: null removes what the row has not (RFC 7396)."""
        keys = self.config()
        zero = {"offload_optimizer": None, "offload_param": None, **keys["zero_optimization"]}
        return {**keys, "zero_optimization": zero, "activation_checkpointing": {"blocks": self.is_checkpointed or None}}


def save_of(question: Question) -> tuple[float, float]:
    """Return the bytes of a checkpoint with its states on each node, and the seconds that its disk writes them for.

    Parameters in their precision, masters and states, of which the ranks write each element once.
    """
    machines = question.machines
    element = Setting(0, zero_policy(question.base, 1), states_of(question.base)).element
    states = element.master + element.state * states_of(question.base).average(question.model)
    num_bytes = (element.param * question.model.num_params + states * question.model.num_trainable) / machines.num_nodes
    return num_bytes, num_bytes / (question.hardware.disk_bytes_per_s * machines.gpus_per_node)


@dataclass(frozen=True)
class Plan:
    """All rows, the quickest that fits first, then those that do not fit, the smallest first."""

    question: Question
    rows: tuple[Row, ...]

    @cached_property
    def fitting(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.misfit(self.question.machines) is None)

    @property
    def best(self) -> Row | None:
        return self.fitting[0] if self.fitting else None

    def of_each_kind(self, *, fits: bool = True) -> list[Row]:
        """Return the quickest row of each rung and mesh."""
        chosen: dict[Any, Row] = {}
        for row in self.fitting if fits else self.rows:
            setting = row.setting
            offload = setting.policy.offload
            key = (setting.stage, offload.optimizer, offload.params, setting.sizes, tuple(row.patch.items()))
            chosen.setdefault(key, row)
        return list(chosen.values())

    def days(self, num_tokens: float) -> float | None:
        """Return the days until so many tokens are trained on; None where nothing fits."""
        if self.best is None:
            return None
        return num_tokens / self.question.tokens_per_step * self.best.seconds / 86_400


def plan(question: Question) -> Plan:
    """Return every way to train, ranked. Raises: UsageError where the global batch fits no mesh."""
    rows = [row for sizes in meshes(question) for row in _rows_of_mesh(question, sizes)]
    if not rows:
        num_ranks = question.machines.world_size
        raise UsageError(
            f"a global batch of {question.global_batch} sequences cannot be divided over {num_ranks} ranks",
            where="--global-batch",
            hint=f"use a multiple of {num_ranks}",
        )
    return ranked(question, rows)


def ranked(question: Question, rows: Iterable[Row]) -> Plan:
    """Return rows in their order: the quickest that fits first, then what does not fit, the smallest first."""
    machines = question.machines

    def key(row: Row) -> tuple[bool, float, float]:
        fits = row.misfit(machines) is None
        return (not fits, row.seconds if fits else row.memory.device, row.memory.device)

    return Plan(question, tuple(sorted(rows, key=key)))


# ---- what there is to choose from ----


def meshes(question: Question) -> Iterator[MeshSizes]:
    """Yield the meshes that fit the ranks, the model and the global batch; tensor and sequence ranks stay in a node."""
    shape, machines, axes = question.computes.shape, question.machines, question.axes
    world_size, per_node = machines.world_size, machines.gpus_per_node
    if shape is None:
        if question.global_batch % world_size == 0:
            yield MeshSizes(world_size)
        return
    heads = min(shape.num_heads, shape.num_kv_heads or shape.num_heads)
    for tensor in _sizes("tensor" in axes, per_node, heads):
        for sequence in _sizes("sequence" in axes, per_node // tensor, shape.num_heads // tensor):
            for pipeline in _sizes("pipeline" in axes and sequence == 1, world_size, shape.num_layers):
                data, rest = divmod(world_size, tensor * sequence * pipeline)
                if rest or data == 0 or question.global_batch % data:
                    continue
                for expert in _sizes("expert" in axes and shape.num_experts > 0, data, shape.num_experts):
                    if data % expert == 0:
                        yield MeshSizes(data, pipeline, sequence, tensor, expert)


def _sizes(is_allowed: bool, most: int, dividend: int) -> list[int]:
    """Return the powers of two up to `most` that divide."""
    if not is_allowed:
        return [1]
    return [2**power for power in range(max(1, most).bit_length()) if 2**power <= most and dividend % 2**power == 0]


def _variants(question: Question, setting: Setting) -> list[dict[str, Any]]:
    """Return keys of stage 3 that change what is gathered from where, and when."""
    variants: list[dict[str, Any]] = [{}]
    if setting.stage != 3:
        return variants
    variants.append({"stage3_max_reuse_distance": 0})  # nothing is kept from forward to backward
    variants.append({"stage3_prefetch_bucket_size": _LARGE_PREFETCH})
    per_node, data = question.machines.gpus_per_node, setting.sizes.data
    is_plain = setting.sizes.is_data_alone and not setting.policy.offload.is_any
    if is_plain and per_node > 1 and data > per_node and data % per_node == 0:
        variants += [{"mics_shard_size": per_node}, {"zero_hpz_partition_size": per_node}]
    return variants


def _rows_of_mesh(question: Question, sizes: MeshSizes) -> Iterator[Row]:
    has_disk = question.base.zero_optimization.offload_optimizer.nvme_path is not None
    num_samples = question.global_batch // sizes.data  # of a rank and step
    for schedule, num_virtual in _SCHEDULES if sizes.pipeline > 1 else _SCHEDULES[:1]:
        if question.computes.shape is not None and sizes.pipeline * num_virtual > question.computes.shape.num_layers:
            continue
        standings: tuple[Standing, ...] = PIPELINE_STANDINGS
        if sizes.pipeline == 1:  # with the config's own, which may be none of the ladder's
            standings = (*STANDINGS, standing_of(question.base))
        for stage, optimizer, param in dict.fromkeys(standings):
            if Place.DISK.value in (optimizer, param) and not has_disk:
                continue
            if stage and sizes.num_replicas == 1 and optimizer == param == Place.DEVICE.value:
                continue  # a single rank has no other to shard with
            config = at(question.base, stage, optimizer, param)
            pipeline = PipelinePlan(sizes.pipeline, num_virtual, schedule)
            setting = Setting(stage, zero_policy(config, sizes.num_replicas), states_of(config), sizes, pipeline)
            if refusals(setting):
                continue
            for keys in _variants(question, setting):
                changed = setting
                if keys:
                    zero = config.zero_optimization.model_copy(update=keys)
                    policy = zero_policy(config.model_copy(update={"zero_optimization": zero}), sizes.num_replicas)
                    changed = replace(setting, policy=policy)
                yield from _rows_of_setting(question, changed, keys, num_samples)


def _rows_of_setting(question: Question, setting: Setting, keys: Mapping[str, Any], num_samples: int) -> Iterator[Row]:
    machines, sizes, computes = question.machines, setting.sizes, question.computes
    per_node = machines.gpus_per_node
    parts = [RankPart(question.model, Share())]
    if sizes.pipeline > 1:
        parts = rank_parts(question.model, setting.pipeline)
    ranks = dict.fromkeys(RankModel.of(part, computes.shape, setting) for part in parts)  # each kind once
    states = [part_memory(part, machines, setting, None) for part in parts]
    for micro_batch in micro_batches(num_samples):
        num_micro_batches = num_samples // micro_batch
        pipeline = replace(setting.pipeline, num_micro_batches=num_micro_batches)
        if sizes.pipeline > 1 and (pipeline.problem() or num_micro_batches < sizes.pipeline):
            continue
        staged = replace(setting, pipeline=pipeline)
        for again in computes.choices:
            needed = [
                replace(
                    one,
                    activations=computes.activation_bytes(
                        staged, part.share_of(pipeline), micro_batch, is_checkpointed=again
                    ),
                )
                for one, part in zip(states, parts, strict=True)
            ]
            memory = max(needed, key=lambda one: (one.device, one.host))
            times = []
            for rank in ranks:
                one = computes.computation(rank, staged, micro_batch, per_node, is_checkpointed=again)
                times.append(step_time(rank, one, staged, question.hardware, per_node, num_micro_batches))
            yield Row(
                staged, micro_batch, num_micro_batches, again, memory,
                memory.host * per_node, memory.disk * per_node,
                max(times, key=lambda one: one.seconds),  # the other ranks of a pipeline wait for the slowest
                keys,
            )  # fmt: skip


def micro_batches(num_samples: int) -> list[int]:
    """Return sizes of a micro-batch to try: divisors of a rank's samples, at most so many, the smallest first."""
    small = [size for size in range(1, math.isqrt(num_samples) + 1) if num_samples % size == 0]
    divisors = sorted({*small, *(num_samples // size for size in small)})
    if len(divisors) <= _MAX_MICRO_BATCHES:
        return divisors
    step = (len(divisors) - 1) / (_MAX_MICRO_BATCHES - 1)
    return sorted({divisors[round(index * step)] for index in range(_MAX_MICRO_BATCHES)})


# ---- what the guides say ----


def guide_says(question: Question) -> str:
    """Return what the decision trees of Hugging Face's guides to parallelism come to, which know no figures."""
    machines, model = question.machines, question.model
    element_bytes = 18  # of a parameter and its states in mixed precision, as the guides count
    gpu = machines.gpu_memory_bytes
    fits = gpu is None or element_bytes * model.num_params <= gpu
    layer_fits = gpu is None or element_bytes * model.largest_layer_numel <= gpu
    if machines.world_size == 1:
        if fits:
            return "one GPU that the model fits: train as usual"
        return "one GPU that the model does not fit: ZeRO with offload to the host, then to NVMe"
    if machines.num_nodes == 1:
        if fits:
            return "one node, the model fits a GPU: data parallelism (stage 0), or ZeRO"
        if layer_fits:
            return (
                "one node, the model does not fit a GPU: a pipeline, ZeRO or tensor parallelism; try which is quicker"
            )
        return "one node, its largest layer does not fit a GPU: tensor parallelism, or ZeRO"
    if question.hardware.network_bytes_per_s * machines.gpus_per_node >= 0.5 * question.hardware.link_bytes_per_s:
        return "several nodes, a fast network: ZeRO, or pipeline × tensor × data"
    return "several nodes, a slow network: data × pipeline × tensor with ZeRO-1"
