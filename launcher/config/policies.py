"""What a config asks the engine for, as frozen dataclasses: what is sharded, precision, offload, reduction.

`zero_policy` is the one translator from a config's keys. The engine is built with its result and the planner counts the
bytes of it, so nothing here needs torch: dtypes are names, and `TORCH_DTYPES` of `zero.states` has torch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from launcher.config.schema import FLOAT16, Config


class DType(Enum):
    """A floating-point type, by the name that configs use."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FP32 else 2


@dataclass(frozen=True)
class Stage:
    """What one stage shards over the ranks of the data-parallel group."""

    number: int
    shards_optimizer: bool  # optimizer states and fp32 master weights; gradients are reduced to their owner
    shards_gradients: bool  # each micro-batch is reduced during backward, only the owner keeps the sum
    shards_parameters: bool  # parameters are kept as shards and are gathered around their use


STAGES = {
    0: Stage(0, shards_optimizer=False, shards_gradients=False, shards_parameters=False),
    1: Stage(1, shards_optimizer=True, shards_gradients=False, shards_parameters=False),
    2: Stage(2, shards_optimizer=True, shards_gradients=True, shards_parameters=False),
    3: Stage(3, shards_optimizer=True, shards_gradients=True, shards_parameters=True),
}


@dataclass(frozen=True)
class Precision:
    """Types of what is computed, kept and sent. Sums over ranks are fp32 on gloo, on NCCL of the type that is sent."""

    param: DType  # of the model
    keeps_fp32_master: bool = True  # of a 16-bit model
    grad: DType = DType.FP32  # of sums over micro-batches
    wire: DType | None = None  # of gradients on their way; None: 16 bits where that loses nothing
    autocast: DType | None = None  # of what the forward computes under torch.autocast
    has_16bit_states: bool = False  # optimizer states are as the 16-bit master

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates fp32 copies; in fp32 the parameters are their own master."""
        return self.param is not DType.FP32 and self.keeps_fp32_master

    @property
    def compute(self) -> DType:
        """The type in which the forward computes."""
        return self.autocast or self.param

    @property
    def state(self) -> DType:
        """The type of the optimizer's states."""
        return self.param if self.has_16bit_states else DType.FP32

    @property
    def label(self) -> str:
        """Name for the start line."""
        name = self.param.value
        if self.autocast is not None:
            return f"{name} (autocast {self.autocast.value})"
        if self.param is DType.FP32:
            return name
        return f"{name} (fp32 master)" if self.keeps_fp32_master else f"{name} (no fp32 master)"


@dataclass(frozen=True)
class Reduction:
    """How gradients of ranks become one."""

    is_mean: bool = True  # else their sum over ranks with different samples
    num_sequence_ranks: int = 1  # that have parts of the same samples: over these it is always the mean
    predivide: float = 1.0  # they are divided by this before they are sent, the rest of the mean after the sum
    scatters: bool = True  # each rank gets its part of the sum only; else every rank the whole
    at_step_only: bool = False  # `engine.step()` alone decides where accumulation ends

    def factor(self, world_size: int) -> float:
        """Return what the sum over ranks is multiplied by in all."""
        return 1.0 / (world_size if self.is_mean else self.num_sequence_ranks)


@dataclass(frozen=True)
class ParameterPolicy:
    """When sharded parameters are gathered and released; counts are elements. Names follow the config's."""

    persistence_threshold: int = 0  # smaller parameters stay unsharded ...
    model_persistence_threshold: int = 0  # ... up to this many elements of them
    prefetch_numel: int = 0  # gathered ahead of their use
    max_live_numel: int = 0  # whole at the same time: above it nothing is fetched ahead or kept
    max_reuse_distance: int = 0  # kept when used again within so many elements
    num_read_ahead: int = 0  # shards read from disk before they are fetched
    granularity_threshold: int = 0  # modules whose parts are smaller on average are gathered as one


class Place(Enum):
    """Where something is kept between its uses."""

    DEVICE = "none"  # the values are those of the config's `device` keys
    HOST = "cpu"
    DISK = "nvme"


@dataclass(frozen=True)
class OffloadPolicy:
    """What leaves the device between its uses."""

    optimizer: Place = Place.DEVICE  # masters, states and gradients, which are updated where they rest
    params: Place = Place.DEVICE  # the shards of stage 3
    optimizer_ratio: float = 1.0  # part of the elements whose optimizer goes away
    pins_optimizer: bool = True  # page-locked host memory
    pins_params: bool = True
    cores_fraction: float = 1.0  # of the threads that update in host memory
    is_delayed: bool = False  # the update runs beside the next forward and backward ...
    num_steps_in_order: int = 0  # ... after so many that do not
    is_speculative: bool = False  # the update of a unit begins when its gradient has arrived, beside backward
    reads_ahead: bool = False  # of the disk: the next unit's states while one is updated
    resident_states: frozenset[str] = frozenset()  # names of optimizer states that stay in memory beside the disk
    max_host_params: int = 0  # elements of shards that are kept in host memory beside the disk

    @property
    def is_any(self) -> bool:
        """Whether anything is offloaded."""
        return self.optimizer is not Place.DEVICE or self.params is not Place.DEVICE

    @property
    def updates_beside(self) -> bool:
        """Whether masters are written while the model computes: nothing that it reads may be a master."""
        return self.is_delayed or self.is_speculative

    @property
    def label(self) -> str:
        """What goes where, for the start line."""
        part = f"{self.optimizer_ratio:.0%} of the optimizer" if self.optimizer_ratio < 1 else "optimizer"
        places = {part: self.optimizer, "parameters": self.params}
        said = [f"{what} → {place.value}" for what, place in places.items() if place is not Place.DEVICE]
        if self.is_delayed:
            said.append(f"updates one step late, from step {self.num_steps_in_order + 1} on")
        if self.is_speculative:
            said.append("updates beside backward")
        return " · ".join(said)


@dataclass(frozen=True)
class MeshPolicy:
    """Which ranks share shards; neighbouring ranks belong together."""

    shard_size: int | None = None  # ranks that share one copy of the shards (`mics_shard_size`); None: all
    node_size: int | None = None  # ranks that share a second set (`zero_hpz_partition_size`); None: there is none

    def shard_ranks(self, world_size: int) -> int:
        """Return over how many of `world_size` ranks one copy is sharded."""
        return self.shard_size or world_size


@dataclass(frozen=True)
class ZeroPolicy:
    """Everything that shapes the sharded machinery."""

    stage: Stage
    precision: Precision
    max_unit_numel: int  # upper bound of a unit
    overlap_comm: bool  # reduce while backward runs, gather while the next forward runs
    max_grad_norm: float  # 0: no clipping
    parameters: ParameterPolicy = ParameterPolicy()
    reduction: Reduction = Reduction()
    offload: OffloadPolicy = OffloadPolicy()
    mesh: MeshPolicy = MeshPolicy()
    skips_overflow: bool = True  # a step whose gradients are not finite
    accepts_unused: bool = True  # parameters that no rank used; else they are an error
    warns_of_new_paths: bool = False  # say when the model used its modules in another order than before
    has_ds_attributes: bool = False  # parameters have DeepSpeed's attributes of stage 3, those of a single rank too


def zero_policy(config: Config, world_size: int) -> ZeroPolicy:
    """Return what a config without `"auto"` asks for. world_size: ranks with the same part of the model."""
    zero = config.zero_optimization
    offload = offload_policy(config)
    # A single rank has no other to shard with; stage 0 is the same arithmetic without the copies.
    stage = STAGES[int(zero.stage) if world_size > 1 or offload.is_any else 0]
    overlaps = zero.overlap_comm is not False
    mesh = _mesh(config)
    return ZeroPolicy(
        stage=stage,
        precision=_precision(config),
        max_unit_numel=_max_unit_numel(config, stage, mesh.shard_ranks(world_size)),
        overlap_comm=overlaps,
        max_grad_norm=float(config.gradient_clipping),
        parameters=ParameterPolicy(
            persistence_threshold=int(zero.stage3_param_persistence_threshold),
            model_persistence_threshold=int(zero.stage3_model_persistence_threshold),
            prefetch_numel=int(zero.stage3_prefetch_bucket_size) if overlaps else 0,
            max_live_numel=int(zero.stage3_max_live_parameters),
            max_reuse_distance=int(zero.stage3_max_reuse_distance),
            num_read_ahead=max(0, int(zero.offload_param.buffer_count) - 1) if offload.params is Place.DISK else 0,
            granularity_threshold=int(zero.stage3_module_granularity_threshold),
        ),
        reduction=_reduction(config, world_size),
        offload=offload,
        mesh=mesh,
        skips_overflow=config.bf16.check_grad_overflow or not config.bf16.enabled,
        accepts_unused=zero.ignore_unused_parameters,
        warns_of_new_paths=zero.log_trace_cache_warnings,
        has_ds_attributes=int(zero.stage) == 3,
    )


def _max_unit_numel(config: Config, stage: Stage, num_shards: int) -> int:
    """Return the most elements of a unit.

    Where parameters are sharded a bucket below the default counts as the default: it would cut blocks into layers, each
    with a gather and a reduction of its own. With Hugging Face's "auto", hidden size², Llama-7B had 227 units in place
    of 35 (benchmarks/start_7b.py). What cuts blocks there is `stage3_max_live_parameters`.
    """
    zero = config.zero_optimization
    bucket = int(zero.reduce_bucket_size)
    if stage.shards_parameters:
        bucket = max(bucket, type(zero).model_fields["reduce_bucket_size"].default)
    return max(1, min(bucket, _max_owned_numel(config) * num_shards))


def _max_owned_numel(config: Config) -> int:
    """Return the most elements of a unit that one rank may own."""
    zero = config.zero_optimization
    is_on_disk = offload_policy(config).params is Place.DISK
    return (
        min(int(zero.sub_group_size), int(zero.offload_param.buffer_size)) if is_on_disk else int(zero.sub_group_size)
    )


def _mesh(config: Config) -> MeshPolicy:
    zero = config.zero_optimization
    if int(zero.stage) != 3:
        return MeshPolicy()
    shard_size, node_size = int(zero.mics_shard_size), int(zero.zero_hpz_partition_size)
    return MeshPolicy(shard_size if shard_size > 0 else None, node_size if node_size > 1 else None)


def _reduction(config: Config, world_size: int) -> Reduction:
    return Reduction(
        is_mean=config.gradient_allreduce_op == "mean",
        num_sequence_ranks=config.sequence_parallel_size,
        predivide=float(world_size) if config.prescale_gradients else float(config.gradient_predivide_factor),
        scatters=config.zero_optimization.reduce_scatter,
        at_step_only=not config.managed_gradient_accumulation,
    )


def offload_policy(config: Config) -> OffloadPolicy:
    """Return what a config without `"auto"` offloads."""
    zero = config.zero_optimization
    optimizer, params = zero.offload_optimizer, zero.offload_param
    return OffloadPolicy(
        optimizer=Place(optimizer.device),
        params=Place(params.device) if int(zero.stage) == 3 else Place.DEVICE,
        optimizer_ratio=float(optimizer.ratio),
        pins_optimizer=optimizer.pin_memory,
        pins_params=params.pin_memory,
        reads_ahead=optimizer.pipeline_read,
        resident_states=frozenset({"momentum_buffer"} if zero.save_muon_momentum_buffer_in_memory else ()),
        max_host_params=int(params.max_in_cpu),
        is_delayed=optimizer.delayed_update,
        is_speculative=optimizer.super_offload,
        num_steps_in_order=int(optimizer.delayed_update_warmup_steps),
        cores_fraction=float(optimizer.cpuadam_cores_perc),
    )


def param_dtype(config: Config) -> DType:
    """Return the type of the model's parameters."""
    return DType.FP16 if config.fp16.enabled else DType.BF16 if config.bf16.enabled else DType.FP32


def _precision(config: Config) -> Precision:
    fp16, bf16, param = config.fp16, config.bf16, param_dtype(config)
    keeps_master = not (
        (fp16.enabled and fp16.fp16_master_weights_and_grads) or (bf16.enabled and bf16.bf16_master_weights_and_grads)
    )
    sums, wire = config.data_types.grad_accum_dtype, config.communication_data_type
    if config.sequence_parallel_size > 1:
        wire = config.seq_parallel_communication_data_type
    return Precision(
        param,
        keeps_fp32_master=keeps_master,
        grad=DType(sums) if sums is not None else DType.FP32 if keeps_master else param,
        wire=None if wire is None else DType(wire),
        autocast=autocast_dtype(config),
        has_16bit_states=bf16.enabled and bf16.bf16_optimizer_states,
    )


def autocast_dtype(config: Config) -> DType | None:
    """Return the type that torch.autocast computes in, for `torch_autocast` or `amp`; None where neither is on."""
    if config.torch_autocast.enabled:
        return DType.FP16 if config.torch_autocast.dtype in FLOAT16 else DType.BF16
    return DType.FP16 if config.amp.enabled and config.amp.opt_level != "O0" else None
