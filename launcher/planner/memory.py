"""Bytes per rank, as this engine lays memory out: every stage, precision and offload.

For P parameters and N ranks. A precision says how many bytes each kind of thing takes; a stage says what is divided by
N; offload moves a kind to the host or to disk. The engine's tests hold the model states to this within 2 %.
The layout is that of Rajbhandari et al. 2020, "ZeRO", section 5, with gradients summed in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.base.errors import UsageError
from launcher.planner.model import ModelFacts

PRECISIONS = ("fp32", "bf16", "fp16")
PLACES = ("none", "cpu", "nvme")
# Whole gradient buffers of stages 2 and 3 at once: those on their way to their owners, one being filled, and that of
# the parameters beside the blocks, which backward meets first (output layer) and last (embedding).
REDUCING_UNITS = 2
GRADIENT_UNITS = REDUCING_UNITS + 2
# Whose states on disk are in memory at once: one is read, one updated, one written.
UNITS_IN_MEMORY = 3
MIB = 2**20
# Rules of thumb for recent GPUs; docs/memory.md says how to find those of yours.
CUDA_CONTEXT_BYTES = 600 * MIB
NCCL_BYTES = 400 * MIB


@dataclass(frozen=True)
class Precision:
    """Bytes of one element of each kind."""

    name: str
    param_bytes: int
    master_bytes: int  # 0: the parameters are their own master
    grad_bytes: int  # of the sum over micro-batches and ranks
    state_bytes: float  # all states of the optimizer together
    state_bytes_beside_matrices: int | None = None  # of parameters other than hidden matrices, where it differs

    @classmethod
    def of(
        cls, name: str, *, has_16bit_master: bool = False, has_16bit_states: bool = False, num_states: int = 2
    ) -> Precision:
        """Build one by name.

        has_16bit_master: `fp16_master_weights_and_grads` and its bf16 twin: no fp32 copy, gradients summed in 16 bit.
        has_16bit_states: `bf16_optimizer_states`. num_states: per parameter; Adam has two.
        Raises: UsageError.
        """
        if name not in PRECISIONS:
            raise UsageError(f"unknown precision {name}", hint=f"one of {', '.join(PRECISIONS)}")
        if name == "fp32":
            if has_16bit_master or has_16bit_states:
                raise UsageError("16-bit masters or states need a 16-bit precision", hint="choose bf16 or fp16")
            return cls(name, 4, 0, 4, 4 * num_states)
        master, grad = (0, 2) if has_16bit_master else (4, 4)
        return cls(name, 2, master, grad, (2 if has_16bit_states else 4) * num_states)

    def averaged_over(self, model: ModelFacts) -> Precision:
        """Return one whose elements all have the states that those of a model have on average."""
        beside = self.state_bytes_beside_matrices
        if beside is None or not model.num_trainable:
            return self
        part = model.num_in_matrices / model.num_trainable
        average = part * self.state_bytes + (1 - part) * beside
        return replace(self, state_bytes=average, state_bytes_beside_matrices=None)


@dataclass(frozen=True)
class Offload:
    """Where optimizer and parameters rest, and the buffers between disk and host; defaults are DeepSpeed's."""

    optimizer: str = "none"
    param: str = "none"
    optimizer_ratio: float = 1.0  # part of the states that is offloaded
    param_buffers: int = 5
    param_buffer_numel: int = 100_000_000
    param_numel_in_cpu: int = 1_000_000_000  # kept in host memory beside the disk
    sub_group_numel: int = 1_000_000_000  # updated at once
    is_delayed: bool = False  # the host updates while the next gradients come in and the parameters are read

    def __str__(self) -> str:
        if self.optimizer == self.param == "none":
            return "none"
        if self.optimizer == self.param:
            return f"optimizer + param {self.param}"
        parts = {"optimizer": self.optimizer, "param": self.param}
        return " + ".join(f"{name} {place}" for name, place in parts.items() if place != "none")


@dataclass(frozen=True)
class Setting:
    """One way to train: what is sharded, in which precision, what is offloaded."""

    stage: int
    precision: Precision
    offload: Offload = Offload()
    max_unit_numel: int = 500_000_000  # `reduce_bucket_size`
    persistent_numel: int = 100_000  # smaller parameters stay whole at stage 3
    overlaps: bool = True  # gradients are reduced while backward runs
    prefetch_numel: int = 50_000_000  # stage 3: gathered ahead of its use
    kept_numel: int = 1_000_000_000  # stage 3: kept whole between forward and backward, when used again so soon

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise UsageError(f"there is no ZeRO stage {self.stage}", hint="0, 1, 2 or 3")
        for place in (self.offload.optimizer, self.offload.param):
            if place not in PLACES:
                raise UsageError(f"nothing can be offloaded to {place}", hint=f"one of {', '.join(PLACES)}")
        if self.offload.param != "none" and self.stage != 3:
            raise UsageError(f"parameters are offloaded at stage 3 only, not at {self.stage}", hint="use --stage 3")
        if self.offload.optimizer != "none" and self.stage == 0:
            raise UsageError("the optimizer is offloaded at stages 1, 2 and 3 only", hint="use --stage 1, 2 or 3")


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. Device: the GPU, or the host's memory where ranks train on the CPU."""

    parameters: int
    gradients: int
    optimizer: int  # master weights and states
    in_flight: int  # gathered units, gradient buffers of units, the gradient autograd has just made
    host: int = 0  # offloaded to host memory, and buffers between it and disk
    disk: int = 0
    activations: int = 0
    context: int = 0  # CUDA context, NCCL

    @property
    def model_states(self) -> int:
        """What lives on the device from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def device(self) -> int:
        """Everything on the device at the peak."""
        return self.model_states + self.in_flight + self.activations + self.context


def rank_memory(model: ModelFacts, setting: Setting, world_size: int) -> RankMemory:
    """Return the bytes of model states and of units in flight of one rank; no activations, no context."""
    stage, precision, offload = setting.stage, setting.precision.averaged_over(model), setting.offload
    owned = model.num_trainable / (world_size if stage >= 1 else 1)
    small = model.numel_below(setting.persistent_numel) if stage == 3 else 0
    whole = small if stage == 3 else model.num_params
    sharded = (model.num_params - small) / world_size if stage == 3 else 0.0
    ratio = offload.optimizer_ratio if offload.optimizer != "none" else 0.0
    is_beside = offload.optimizer == offload.param and not offload.is_delayed
    away = _optimizer_bytes(precision, offload.optimizer, is_beside_param=is_beside) * owned * ratio
    here = _optimizer_bytes(precision, "none", is_beside_param=offload.param == "none") * owned * (1 - ratio)
    keeps_sum = stage <= 1  # the whole gradient stays on the device until the step
    grads_away = precision.grad_bytes * owned * ratio * (2 if offload.is_delayed else 1)
    grads = precision.grad_bytes * (model.num_trainable if keeps_sum else owned * (1 - ratio))
    params_here = whole + (sharded if offload.param == "none" else 0.0)
    largest = min(offload.sub_group_numel, max(_units(model, setting), default=0) / world_size)
    in_memory = min(1.0, UNITS_IN_MEMORY * largest / owned) if owned else 0.0
    optimizer_host, optimizer_disk = _split_optimizer(offload, away + grads_away, in_memory)
    param_host, param_disk = _split_params(offload, precision.param_bytes * sharded, precision.param_bytes, largest)
    return RankMemory(
        parameters=_whole(precision.param_bytes * params_here),
        gradients=_whole(grads),
        optimizer=_whole(here),
        in_flight=in_flight_bytes(model, setting, world_size),
        host=_whole(optimizer_host + param_host),
        disk=_whole(optimizer_disk + param_disk),
    )


def in_flight_bytes(model: ModelFacts, setting: Setting, world_size: int) -> int:
    """Return the bytes of whole units that are alive for a moment: gathered parameters, gradients on their way.

    A gradient of one micro-batch travels in the precision of the parameters, and each rank holds what the others sent
    until it has been added.
    """
    precision, offload = setting.precision, setting.offload
    units = sorted(_units(model, setting), reverse=True)
    total = precision.param_bytes * model.largest_param_numel  # autograd's own gradient, before it is moved
    received = (world_size - 1) / world_size
    if setting.stage >= 2 and (world_size > 1 or offload.optimizer != "none"):
        total += precision.param_bytes * sum(units[:GRADIENT_UNITS] if setting.overlaps else units)
        if offload.optimizer != "none":  # sums, always in fp32, on their way to host memory
            total += _whole(4 * sum(units[:REDUCING_UNITS]) / world_size)
    elif world_size > 1 and precision.param_bytes < precision.grad_bytes:
        total += precision.param_bytes * sum(units[:REDUCING_UNITS])  # what is sent is a copy in fewer bits
    total += _whole(precision.param_bytes * received * sum(units[:REDUCING_UNITS]))
    if setting.stage == 3 and (world_size > 1 or offload.param != "none"):
        total += precision.param_bytes * _gathered_numel(units, setting)
    return total


def _units(model: ModelFacts, setting: Setting) -> list[int]:
    is_sharded, is_offloaded = setting.stage == 3, setting.offload.optimizer != "none"
    return model.unit_numels(setting.max_unit_numel, shards_params=is_sharded, offloads_optimizer=is_offloaded)


def _gathered_numel(units: list[int], setting: Setting) -> int:
    """Return the elements of units that are whole at once at stage 3: in use, fetched ahead, kept for backward."""
    largest = units[0] if units else 0
    ahead = setting.prefetch_numel + largest if setting.prefetch_numel and setting.overlaps else 0
    kept = setting.kept_numel + largest if setting.kept_numel else 0
    return min(sum(units), max(largest + ahead, kept))


def _optimizer_bytes(precision: Precision, place: str, *, is_beside_param: bool) -> float:
    """Return what one element takes where it is updated, which is `place`.

    is_beside_param: its parameter is kept there too, and is free while it is updated.
    """
    kept = precision.master_bytes + precision.state_bytes
    # Without a master of its own a parameter is that where it is updated; beside one, the host has a 16-bit copy that
    # the update writes and the device is sent.
    needs_own = not is_beside_param and (place == "cpu" or not precision.master_bytes)
    return kept + (precision.param_bytes if needs_own else 0)


def _split_optimizer(offload: Offload, total: float, in_memory: float) -> tuple[float, float]:
    """Return what of the offloaded optimizer is in host memory and what on disk. in_memory: part that is at a time."""
    if offload.optimizer != "nvme":
        return total, 0.0
    return total * in_memory, total


def _split_params(offload: Offload, total: float, element_bytes: int, largest_numel: float) -> tuple[float, float]:
    """Return what of the offloaded parameters is in host memory and what on disk."""
    if offload.param == "none":
        return 0.0, 0.0
    if offload.param == "cpu":
        return total, 0.0
    kept = min(total, offload.param_numel_in_cpu * element_bytes)
    buffers = offload.param_buffers * min(offload.param_buffer_numel, largest_numel) * element_bytes
    return kept + min(total - kept, buffers), total - kept


def _whole(num_bytes: float) -> int:
    return -int(-num_bytes // 1)
