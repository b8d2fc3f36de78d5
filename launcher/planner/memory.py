"""Bytes per rank, as this engine lays memory out: every stage, precision and offload.

For P parameters and N ranks. A precision says how many bytes each kind of thing takes; a stage says what is divided by
N; offload moves a kind to the host or to disk. The engine's tests hold the model states to this within 2 %.
The layout is that of Rajbhandari et al. 2020, "ZeRO", section 5, with gradients summed in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from launcher.base.errors import UsageError
from launcher.config.policies import DType, OffloadPolicy, Place, ZeroPolicy
from launcher.planner.model import ModelFacts, TransformerShape
from launcher.sharding.mesh import MeshSizes
from launcher.sharding.pipeline import PipelinePlan, num_links

# Whole gradient buffers of stages 2 and 3 at once: those on their way to their owners, one being filled, and that of
# the parameters beside the blocks, which backward meets first (output layer) and last (embedding).
REDUCING_UNITS = 2
GRADIENT_UNITS = REDUCING_UNITS + 2
# Whose states on disk are in memory at once: one is read, one updated, one written.
UNITS_IN_MEMORY = 3
MIB = 2**20
# Rules of thumb for recent GPUs; docs/memory.md says how to find those of yours.
CUDA_CONTEXT_BYTES = 600 * MIB
NCCL_BYTES = 400 * MIB  # of a communicator of several ranks
NCCL_ALONE_BYTES = 200 * MIB  # of that of a rank without others, which `launch` starts, too
CUBLAS_BYTES = 32 * MIB  # a workspace on Hopper; the thread of backward has one of its own
# Triton's kernels find their elements by int32 for every so many, once for the update and once for the norm.
_TABLES_BYTES, _TABLES_NUMEL = 2 * 4, 1024


@dataclass(frozen=True)
class States:
    """What an optimizer keeps of each element: this many states, each in the precision of states."""

    num_of_element: float = 2
    num_beside_matrices: int | None = None  # of elements outside of hidden matrices, where it differs

    def average(self, model: ModelFacts) -> float:
        """Return the states that the trained elements of a model have on average."""
        if self.num_beside_matrices is None or not model.num_trainable:
            return self.num_of_element
        part = model.num_in_matrices / model.num_trainable
        return part * self.num_of_element + (1 - part) * self.num_beside_matrices


@dataclass(frozen=True)
class Setting:
    """One way to train, or to run forward: the policy an engine would be built with, and what its optimizer keeps."""

    stage: int  # as it was asked for: the policy of a single rank has stage 0
    policy: ZeroPolicy
    states: States = States()
    sizes: MeshSizes = field(default_factory=lambda: MeshSizes(1))
    pipeline: PipelinePlan = field(default_factory=PipelinePlan)
    partition: str = "best"  # of a pipeline's stages
    trains: bool = True  # False: inference, without optimizer and gradients

    def __post_init__(self) -> None:
        if self.policy.offload.optimizer is not Place.DEVICE and self.stage == 0:
            raise UsageError("the optimizer is offloaded at stages 1, 2 and 3 only", hint="use --stage 1, 2 or 3")

    @property
    def offload_label(self) -> str:
        """What goes where, for tables."""
        optimizer, params = self.policy.offload.optimizer.value, self.policy.offload.params.value
        if optimizer == params:
            return "none" if optimizer == "none" else f"optimizer + param {params}"
        parts = {"optimizer": optimizer, "param": params}
        return " + ".join(f"{name} {place}" for name, place in parts.items() if place != "none")

    @property
    def element(self) -> ElementBytes:
        """Bytes of one element of each kind."""
        precision = self.policy.precision
        master = DType.FP32.itemsize if precision.has_master else 0
        gathered = precision.param if precision.autocast is None else precision.autocast
        return ElementBytes(
            precision.param.itemsize, master, precision.grad.itemsize, precision.state.itemsize, gathered.itemsize
        )


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of one element of each kind."""

    param: int
    master: int  # 0: the parameters are their own master
    grad: int  # of the sum over micro-batches and ranks
    state: int  # of one state of the optimizer
    gathered: int  # of a parameter that stage 3 gathers, and autocast casts


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
    context: int = 0  # CUDA's own, and what libraries take

    @property
    def model_states(self) -> int:
        """What lives on the device from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def device(self) -> int:
        """Everything on the device at the peak."""
        return self.model_states + self.in_flight + self.activations + self.context


def rank_memory(model: ModelFacts, setting: Setting, world_size: int) -> RankMemory:
    """Return the bytes of model states and of units in flight of one rank; no activations, no context.

    model: what the ranks of one pipeline stage have; without a pipeline, all. world_size: all ranks.
    """
    mesh = setting.policy.mesh
    owned = _owned_numel(model, setting, world_size)
    everything = model.part_of(setting.sizes.tensor)
    model = everything.with_part_of_experts(setting.sizes.expert)
    world_size = mesh.shard_ranks(world_size // setting.sizes.num_model_parts)
    stage, offload, element = setting.stage, setting.policy.offload, setting.element
    small = model.numel_below(setting.policy.parameters.persistence_threshold) if stage == 3 else 0
    whole = small if stage == 3 else model.num_params
    sharded = (everything.num_params - small) / world_size if stage == 3 else 0.0
    second = (model.num_params - small) / mesh.node_size if mesh.node_size is not None else 0.0
    is_here = offload.params is Place.DEVICE
    parameters = _whole(element.param * (whole + second + (sharded if is_here else 0.0)))
    largest = max(_units(model, setting), default=0) / world_size
    param_host, param_disk = _split_params(setting, element.param * sharded, largest)
    in_flight = in_flight_bytes(model, setting, world_size)
    if not setting.trains:
        return RankMemory(parameters, 0, 0, in_flight, _whole(param_host), _whole(param_disk))
    offloads_optimizer = offload.optimizer is not Place.DEVICE
    ratio = offload.optimizer_ratio if offloads_optimizer else 0.0
    is_beside = offload.optimizer is offload.params and not offload.updates_beside
    kept = element.master + element.state * setting.states.average(model)
    away = (kept + _own_param_bytes(element, offload.optimizer, is_beside_param=is_beside)) * owned * ratio
    if offload.is_speculative:  # a copy from before updates that may be rolled back
        away += (kept + (0 if element.master else element.param)) * owned * ratio
    here = (kept + _own_param_bytes(element, Place.DEVICE, is_beside_param=is_here)) * owned * (1 - ratio)
    keeps_sum = stage <= 1  # the whole gradient stays on the device until the step
    grads_away = element.grad * owned * ratio * (2 if offload.is_delayed else 1)
    grads = element.grad * (model.num_trainable if keeps_sum else owned * (1 - ratio))
    in_memory = min(1.0, UNITS_IN_MEMORY * largest / owned) if owned else 0.0
    optimizer_host, optimizer_disk = _split_optimizer(offload, away + grads_away, in_memory)
    return RankMemory(
        parameters=parameters,
        gradients=_whole(grads),
        optimizer=_whole(here),
        in_flight=in_flight,
        host=_whole(optimizer_host + param_host),
        disk=_whole(optimizer_disk + param_disk),
    )


def _owned_numel(model: ModelFacts, setting: Setting, world_size: int) -> float:
    """Return the elements that a rank updates."""
    model = model.part_of(setting.sizes.tensor)
    if setting.stage < 1:
        return model.with_part_of_experts(setting.sizes.expert).num_trainable
    # All ranks together own each element once, also those of experts, which are sharded over fewer ranks each.
    return model.num_trainable / setting.policy.mesh.shard_ranks(world_size // setting.sizes.num_model_parts)


def library_bytes(model: ModelFacts, setting: Setting, world_size: int) -> int:
    """Return what NCCL, cuBLAS and the optimizer's kernel take on a GPU. Parameters: as of `rank_memory`."""
    num_communicators = communicators(setting, world_size)
    nccl = num_communicators * NCCL_BYTES if num_communicators else NCCL_ALONE_BYTES
    if not setting.trains:
        return nccl + CUBLAS_BYTES
    offload = setting.policy.offload
    updated = _owned_numel(model, setting, world_size)
    if offload.optimizer is not Place.DEVICE:
        updated *= 1 - offload.optimizer_ratio
    return nccl + 2 * CUBLAS_BYTES + _whole(_TABLES_BYTES * updated / _TABLES_NUMEL)


def communicators(setting: Setting, world_size: int) -> int:
    """Return how many NCCL communicators of several ranks a rank has: those that `comm.mesh.build_mesh` makes."""
    sizes, mesh = setting.sizes, setting.policy.mesh
    data = world_size // sizes.model_size
    groups = [world_size]  # gathers and reductions
    if sizes.expert > 1:
        groups += [sizes.expert, data // sizes.expert]
    elif sizes.model_size > 1:
        groups += [data * sizes.sequence, sizes.tensor, sizes.sequence, sizes.pipeline]
        if sizes.pipeline > 1:
            links = num_links(sizes.pipeline)
            groups += [sizes.pipeline] * (links if links > 1 else 0)
            groups.append(data * sizes.sequence * sizes.tensor)  # ranks with the same layers
            groups += [sizes.pipeline * sizes.tensor] if sizes.tensor > 1 else []
    for size in (mesh.shard_size, mesh.node_size):
        if size is not None and size < data:
            groups.append(size)
    if mesh.shard_size is not None and mesh.shard_size < data:
        groups.append(data // mesh.shard_size)
    return sum(size > 1 for size in groups)


def in_flight_bytes(model: ModelFacts, setting: Setting, world_size: int) -> int:
    """Return the bytes of whole units that are alive for a moment: gathered parameters, gradients on their way.

    A gradient of one micro-batch travels in the precision of the parameters, and each rank holds what the others sent
    until it has been added.
    """
    stage, offload = setting.stage, setting.policy.offload
    units = sorted(_units(model, setting), reverse=True)
    total = _gradients_in_flight(model, setting, units, world_size) if setting.trains else 0
    if stage == 3 and (world_size > 1 or offload.params is not Place.DEVICE):
        element, numel = setting.element, _gathered_numel(units, setting)
        total += element.gathered * numel  # autocast leaves embeddings as they are
        total += (element.param - element.gathered) * min(numel, model.largest_embedding_numel)
    return total


def _gradients_in_flight(model: ModelFacts, setting: Setting, units: list[int], world_size: int) -> int:
    stage, element = setting.stage, setting.element
    offloads_optimizer = setting.policy.offload.optimizer is not Place.DEVICE
    total = element.param * model.largest_param_numel  # autograd's own gradient, before it is moved
    received = (world_size - 1) / world_size
    if stage >= 2 and (world_size > 1 or offloads_optimizer):
        total += element.param * sum(units[:GRADIENT_UNITS] if setting.policy.overlap_comm else units)
        if offloads_optimizer:  # sums on their way to host memory; those of further micro-batches are fp32
            total += _whole(4 * sum(units[:REDUCING_UNITS]) / world_size)
    elif world_size > 1 and element.param < element.grad:
        # What is sent has fewer bits than the sum: gradients are collected in it, or it is a copy.
        total += element.param * sum(units[: GRADIENT_UNITS if setting.policy.overlap_comm else REDUCING_UNITS])
    return total + _whole(element.param * received * sum(units[:REDUCING_UNITS]))


def _units(model: ModelFacts, setting: Setting) -> list[int]:
    is_offloaded = setting.policy.offload.optimizer is not Place.DEVICE
    bound = setting.policy.max_unit_numel
    if setting.stage == 3:
        bound = min(bound, setting.policy.parameters.max_live_numel)
    return model.unit_numels(
        bound,
        shards_params=setting.stage == 3,
        offloads_optimizer=is_offloaded,
        are_experts_apart=setting.sizes.expert > 1,
    )


def _gathered_numel(units: list[int], setting: Setting) -> int:
    """Return the elements of units that are whole at once at stage 3: in use, fetched ahead, kept for backward."""
    policy = setting.policy.parameters
    largest = units[0] if units else 0
    ahead = policy.prefetch_numel + largest if policy.prefetch_numel else 0
    kept_numel = min(policy.max_live_numel, policy.max_reuse_distance) if setting.trains else 0
    kept = kept_numel + largest if kept_numel else 0
    return min(sum(units), max(largest + ahead, kept))


def _own_param_bytes(element: ElementBytes, place: Place, *, is_beside_param: bool) -> int:
    """Return what one element takes where it is updated, which is `place`, beside its master and states.

    is_beside_param: its parameter is kept there too, and is free while it is updated.
    """
    # Without a master of its own a parameter is that where it is updated; beside one, the host has a 16-bit copy that
    # the update writes and the device is sent.
    return element.param if not is_beside_param and (place is Place.HOST or not element.master) else 0


def _split_optimizer(offload: OffloadPolicy, total: float, in_memory: float) -> tuple[float, float]:
    """Return what of the offloaded optimizer is in host memory and what on disk. in_memory: part that is at a time."""
    if offload.optimizer is not Place.DISK:
        return total, 0.0
    return total * in_memory, total


def _split_params(setting: Setting, total: float, largest_numel: float) -> tuple[float, float]:
    """Return what of the offloaded parameters is in host memory and what on disk."""
    offload, element_bytes = setting.policy.offload, setting.element.param
    if offload.params is Place.DEVICE:
        return 0.0, 0.0
    if offload.params is Place.HOST:
        return total, 0.0
    kept = min(total, offload.max_host_params * element_bytes)
    buffers = (setting.policy.parameters.num_read_ahead + 1) * largest_numel * element_bytes
    return kept + min(total - kept, buffers), total - kept


def _whole(num_bytes: float) -> int:
    return -int(-num_bytes // 1)


# ---- Activations ----
# After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1: their
# 34·s·b·h + 5·a·s²·b bytes of a 16-bit GPT block with dropout are these elements for `is_eager`, `has_dropout`.


_FP32 = 4
_MASK = 1  # bytes of an element of a dropout mask


@dataclass(frozen=True)
class Workload:
    """One micro-batch of one rank, and how the model computes it."""

    batch_size: int  # sequences
    length: int  # tokens of a sequence
    is_checkpointed: bool = False  # only the input of each block is kept, its inside is computed again
    is_eager: bool = False  # attention keeps its scores; torch's fused attention does not
    has_dropout: bool = False
    num_sequence_ranks: int = 1  # that have a part of every sequence each
    is_inference: bool = False  # no backward follows: blocks keep nothing but keys and values

    @property
    def num_tokens(self) -> int:
        """Tokens of one rank. Attention has all tokens and a part of the heads: the product is the same."""
        return -(-self.batch_size * self.length // self.num_sequence_ranks)


@dataclass(frozen=True)
class Share:
    """What a rank computes of a model. The default: all of it, one micro-batch after the other."""

    layers: float = 1.0  # part of the blocks, of the largest of its pipeline stages
    num_kept: int = 1  # forwards of a stage that wait for their backward at once
    num_heads: int = 1  # forwards of the output layer that do; 0: another rank has it


def layer_bytes(shape: TransformerShape, work: Workload, element_bytes: int, num_ranks: int = 1) -> int:
    """Return the bytes that one block keeps for its backward. num_ranks: tensor-parallel ranks that share it.

    These have what is inside of attention and of the feed-forward part in parts (section 4.2.1), and the rest each.
    """
    # Inputs of two norms, of the projections to query, key and value, and of the feed-forward part.
    elements = 4 * shape.hidden_size
    inside = 2 * shape.query_size + 2 * shape.key_size  # query, key, value, input of the output projection
    # Around the activation function: its input and output; with a gate both factors and their product too.
    inside += (4 if shape.is_gated else 2) * shape.ffn
    per_token = (elements + inside // num_ranks) * element_bytes
    num_heads = -(-shape.num_heads // num_ranks)
    if work.has_dropout:
        per_token += 2 * shape.hidden_size * _MASK  # behind attention and behind the feed-forward part
    if work.is_eager:
        scores = element_bytes + (element_bytes + _MASK if work.has_dropout else 0)
        per_token += num_heads * work.length * scores
    else:
        per_token += num_heads * _FP32  # fused attention keeps the log of each row's sum
    return work.num_tokens * per_token


def activation_bytes(
    shape: TransformerShape, work: Workload, element_bytes: int, num_ranks: int = 1, share: Share | None = None
) -> int:
    """Return the bytes alive at the peak, which is at the end of forward or in the first block's recomputation.

    share: of a pipeline rank; None: the whole model.
    """
    share = share or Share()
    if work.is_inference:
        return _inference_bytes(shape, work, element_bytes, num_ranks, share)
    block = layer_bytes(shape, work, element_bytes, num_ranks)
    block_input = work.num_tokens * shape.hidden_size * element_bytes
    num_blocks = share.num_kept * math.ceil(share.layers * shape.num_layers)
    kept = num_blocks * (block_input if work.is_checkpointed else block)
    # The logits, their log-softmax in fp32 and the gradient of it.
    logits = work.num_tokens * shape.vocab_size * (element_bytes + 2 * _FP32)
    head = share.num_heads * (2 * block_input + logits)  # with the input and output of the last norm
    return kept + (max(head, block) if work.is_checkpointed else head)


def _inference_bytes(shape: TransformerShape, work: Workload, element_bytes: int, num_ranks: int, share: Share) -> int:
    """Return the bytes alive at the peak of a forward without gradients, with the keys and values of all its tokens."""
    cache = math.ceil(share.layers * shape.num_layers) * 2 * shape.key_size // num_ranks
    # Of one block: query, key, value and what attention returns, and what is around the activation function.
    block = 2 * (shape.query_size + shape.key_size) // num_ranks
    block += (3 if shape.is_gated else 2) * shape.ffn // num_ranks
    if work.is_eager:
        block += 2 * -(-shape.num_heads // num_ranks) * work.length  # scores and their softmax
    head = shape.vocab_size if share.num_heads else 0
    # With the input of the block, or of the output layer, and its norm.
    return work.num_tokens * (cache + 2 * shape.hidden_size + max(block, head)) * element_bytes
