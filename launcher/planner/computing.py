"""What a rank computes, exchanges and keeps in a micro-batch: of a transformer by its shape, of a rehearsed script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from launcher.config.policies import Place
from launcher.planner.estimate import RankPart
from launcher.planner.memory import RankMemory, Setting, Share, Workload, activation_bytes, layer_bytes
from launcher.planner.model import ModelFacts, TransformerShape
from launcher.planner.rehearsal import PHASES_OF_STEP, DeviceWork, RankRehearsal
from launcher.sharding.grouping import block_of

# Operations of torch in a block's forward, and beside the blocks, as rehearsals of transformers' Llama count them;
# backward has twice as many.
_BLOCK_KERNELS, _OTHER_KERNELS = 43, 14
# How often forward reads and writes what a block keeps for backward, by the same count; backward does twice as much.
_PASSES = 4


class Groups(NamedTuple):
    """How many ranks there are in each group, and how many of them are on one node: neighbours in rank are."""

    tensor: tuple[int, int]
    sequence: tuple[int, int]
    expert: tuple[int, int]
    shard: tuple[int, int]  # that share one copy of the shards
    second: tuple[int, int]  # that share the second one, hpZ
    copies: tuple[int, int]  # that have the same shard, MiCS

    @classmethod
    def of(cls, setting: Setting, gpus_per_node: int) -> Groups:
        """Return the groups of a setting."""
        sizes, mesh = setting.sizes, setting.policy.mesh
        shard = mesh.shard_ranks(sizes.num_replicas)

        def group(num_ranks: int, stride: int) -> tuple[int, int]:
            return num_ranks, max(1, min(num_ranks, gpus_per_node // stride))

        return cls(
            tensor=group(sizes.tensor, 1),
            sequence=group(sizes.sequence, sizes.tensor),
            expert=group(sizes.expert, sizes.tensor * sizes.sequence),
            shard=group(shard, sizes.tensor),
            second=group(mesh.node_size or shard, sizes.tensor),
            copies=group(sizes.num_replicas // shard, sizes.tensor * shard),
        )


@dataclass(frozen=True)
class RankModel:
    """What one rank has of a model, as far as seconds follow from it."""

    unit_numels: tuple[int, ...]  # of the engine's units, in the order of forward
    num_trainable: int
    num_states: float  # of the optimizer, of an element on average
    matmul_numel: float  # elements of its blocks that each token is multiplied with, of all tensor ranks
    num_blocks: int = 0
    has_head: bool = True  # the output layer

    @classmethod
    def of(cls, part: RankPart, shape: TransformerShape | None, setting: Setting) -> RankModel:
        """Return what a rank has of a pipeline rank's part. shape: None: of a script, whose products are known."""
        sizes = setting.sizes
        model = part.model.part_of(sizes.tensor).with_part_of_experts(sizes.expert)
        bound = setting.policy.max_unit_numel
        if setting.stage == 3:
            bound = min(bound, setting.policy.parameters.max_live_numel)
        numels = model.unit_numels(
            bound,
            shards_params=setting.stage == 3,
            offloads_optimizer=setting.policy.offload.optimizer is not Place.DEVICE,
            are_experts_apart=sizes.expert > 1,
        )
        return cls(
            tuple(numels), model.num_trainable, setting.states.average(model),
            0.0 if shape is None else _matmul_numel(part.model, shape),
            len({block_of(param.name) for param in part.model.params} - {""}), part.share.num_heads > 0,
        )  # fmt: skip


def _matmul_numel(model: ModelFacts, shape: TransformerShape) -> float:
    active = 1.0 if not shape.num_experts else shape.num_active_experts / shape.num_experts
    blocks = (param for param in model.params if block_of(param.name))
    return sum(param.numel * (active if param.is_expert else 1.0) for param in blocks)


class Exchange(NamedTuple):
    """Collectives of tensor, sequence or expert parallelism in one micro-batch."""

    times: float  # forward and backward together
    kind: str
    num_bytes: float  # of the whole buffer
    num_ranks: int
    ranks_per_node: int


@dataclass(frozen=True)
class Computation:
    """One micro-batch of one rank."""

    forward: DeviceWork
    backward: DeviceWork  # with what checkpointing computes again
    exchanges: tuple[Exchange, ...] = ()
    boundary_bytes: float = 0.0  # that a pipeline stage sends to the next


class Computes(Protocol):
    """What is computed: the two classes below."""

    @property
    def samples(self) -> Workload:
        """A micro-batch of one sample, and how blocks compute it."""

    @property
    def shape(self) -> TransformerShape | None:
        """Of the blocks; None: it is not known, so that only data parallelism is planned."""

    @property
    def choices(self) -> Sequence[bool]:
        """Whether blocks are recomputed: what there is to choose from."""

    def activation_bytes(self, setting: Setting, share: Share, micro_batch: int, *, is_checkpointed: bool) -> int:
        """Return what a rank keeps at its peak."""

    def computation(
        self, rank: RankModel, setting: Setting, micro_batch: int, gpus_per_node: int, *, is_checkpointed: bool
    ) -> Computation:
        """Return one micro-batch."""


# ---- of a transformer ----


@dataclass(frozen=True)
class Transformer:
    """A stack of blocks, all alike."""

    shape: TransformerShape
    samples: Workload
    choices = (False, True)

    def _workload(self, setting: Setting, micro_batch: int, *, is_checkpointed: bool) -> Workload:
        return replace(
            self.samples,
            batch_size=micro_batch, is_checkpointed=is_checkpointed, num_sequence_ranks=setting.sizes.sequence,
        )  # fmt: skip

    def activation_bytes(self, setting: Setting, share: Share, micro_batch: int, *, is_checkpointed: bool) -> int:
        """Return what a rank keeps at its peak."""
        work = self._workload(setting, micro_batch, is_checkpointed=is_checkpointed)
        return activation_bytes(self.shape, work, setting.element.param, setting.sizes.tensor, share)

    def computation(
        self, rank: RankModel, setting: Setting, micro_batch: int, gpus_per_node: int, *, is_checkpointed: bool
    ) -> Computation:
        """Return one micro-batch: two operations for each element and token in forward, and four in backward."""
        shape, num_tensor, element_bytes = self.shape, setting.sizes.tensor, setting.element.gathered
        work = self._workload(setting, micro_batch, is_checkpointed=is_checkpointed)
        tokens, own_blocks = work.num_tokens, rank.num_blocks
        length = work.length if work.is_eager else work.length / 2  # fused attention skips what the causal mask hides
        flops = tokens * (2 * rank.matmul_numel + 4 * length * shape.query_size * own_blocks) / num_tensor
        kept = own_blocks * layer_bytes(shape, work, element_bytes, num_tensor)
        weights = rank.matmul_numel * element_bytes / num_tensor
        blocks = DeviceWork(flops, weights + 2 * kept, _PASSES * kept, own_blocks * _BLOCK_KERNELS)
        head = DeviceWork()
        if rank.has_head:  # logits, their log-softmax in fp32 and its gradient
            flops = 2 * tokens * shape.hidden_size * shape.vocab_size / num_tensor
            weights = shape.hidden_size * shape.vocab_size * element_bytes / num_tensor
            logits = tokens * shape.vocab_size
            head = DeviceWork(flops, weights + logits * element_bytes, logits * (element_bytes + 2 * 4), _OTHER_KERNELS)
        forward = blocks.plus(head)
        backward = forward.times(2).plus(blocks) if is_checkpointed else forward.times(2)
        exchanges = _exchanges(shape, setting, Groups.of(setting, gpus_per_node), work, own_blocks)
        return Computation(forward, backward, tuple(exchanges), tokens * shape.hidden_size * element_bytes)


def _exchanges(
    shape: TransformerShape, setting: Setting, groups: Groups, work: Workload, own_blocks: int
) -> Iterator[Exchange]:
    sizes, element_bytes, tokens = setting.sizes, setting.element.gathered, work.num_tokens
    hidden_bytes = tokens * shape.hidden_size * element_bytes
    times = (3 if work.is_checkpointed else 2) * own_blocks  # once more where blocks are recomputed
    if sizes.tensor > 1:  # behind attention and behind the feed-forward part
        yield Exchange(2 * times, "all_reduce", hidden_bytes, *groups.tensor)
    if sizes.sequence > 1:  # query, key and value to all heads, and attention's result back
        for width in (shape.query_size + 2 * shape.key_size, shape.query_size):
            yield Exchange(times, "all_to_all", tokens * element_bytes * width // sizes.tensor, *groups.sequence)
    if sizes.expert > 1 and shape.num_experts:  # to the experts, and back
        yield Exchange(2 * times, "all_to_all", hidden_bytes * shape.num_active_experts, *groups.expert)


# ---- of a script ----


@dataclass(frozen=True)
class Script:
    """What rehearsals of a script have counted: as it is and, where it could be, with its blocks recomputed."""

    samples: Workload
    rehearsals: Mapping[bool, RankRehearsal]  # by whether blocks are recomputed
    shape: None = None

    @property
    def choices(self) -> list[bool]:
        """Whether blocks are recomputed: as the script was rehearsed."""
        return list(self.rehearsals)

    def activation_bytes(self, setting: Setting, share: Share, micro_batch: int, *, is_checkpointed: bool) -> int:
        """Return what a rank keeps at its peak: in proportion to the micro-batch."""
        one = self.rehearsals[is_checkpointed]
        kinds = ("activations", "temporary", "script")
        most = max(sum(peak.get(kind, 0) for kind in kinds) for peak in one.peaks.values())
        return most * micro_batch // one.micro_batch

    def computation(
        self, rank: RankModel, setting: Setting, micro_batch: int, gpus_per_node: int, *, is_checkpointed: bool
    ) -> Computation:
        """Return one micro-batch: in proportion to the samples, but for operations and the weights that are read."""
        one = self.rehearsals[is_checkpointed]
        scale = micro_batch / one.micro_batch
        weights = sum(rank.unit_numels) * setting.element.gathered

        def of_phase(name: str, weights: float, summed_bytes: float = 0.0) -> DeviceWork:
            work = one.work.get(name, DeviceWork()).times(1 / one.num_micro_batches)
            weights = min(weights, work.product_bytes)
            return DeviceWork(
                work.flops * scale,
                weights + (work.product_bytes - weights) * scale,
                max(0.0, work.moved_bytes - summed_bytes) * scale,
                work.num_kernels,
            )

        # The update counts the sums of gradients, which the engine adds up in backward.
        summed = rank.num_trainable * (2 * setting.element.grad + setting.element.param)
        return Computation(of_phase("forward", weights), of_phase("backward", 2 * weights, summed))


def rehearsed_memory(one: RankRehearsal, context_bytes: int) -> RankMemory:
    """Return what a rehearsed rank has at its peak, with CUDA's and its libraries' own."""
    peaks = [peak for phase, peak in one.peaks.items() if phase in PHASES_OF_STEP]
    most = max(peaks, key=lambda kinds: sum(kinds.values()) - kinds.get("host", 0))
    named = {"parameters", "gradients", "optimizer", "in flight", "host"}
    return RankMemory(
        parameters=most.get("parameters", 0),
        gradients=most.get("gradients", 0),
        optimizer=most.get("optimizer", 0),
        in_flight=most.get("in flight", 0),
        activations=sum(size for kind, size in most.items() if kind not in named),
        host=one.host_bytes,
        disk=one.disk_bytes,
        context=context_bytes,
    )
