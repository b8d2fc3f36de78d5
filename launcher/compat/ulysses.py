"""Sequence parallelism by DeepSpeed's names: groups, a loader, attention, and a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from launcher.base.errors import EngineError, EngineKeyError, EngineValueError
from launcher.comm.groups import RankGroup, init_distributed, world_group
from launcher.comm.mesh import current_mesh, subgroup
from launcher.parallel.sequence import exchange
from launcher.parallel.sequence.batch import cut, part_of_batch, with_positions
from launcher.parallel.sequence.exchange import sequence_ranks
from launcher.parallel.sequence.hugging_face import check_implementation, check_model, hugging_face_models
from launcher.sharding.mesh import MeshSizes

_made: list[SequenceGroups] = []  # the last one


class SequenceGroups:
    """The groups of neighbouring ranks that have parts of one sequence: what `initialize(mpu=...)` takes."""

    def __init__(self, size: int, *, disable_in_eval: bool = False) -> None:
        """size: ranks of one sequence. disable_in_eval: in eval mode each rank has whole sequences of its own.

        Every rank must call it. Raises: EngineError for a size that does not divide the ranks.
        """
        init_distributed()
        self._world = world_group()
        num_ranks = self._world.world_size
        if size < 1 or num_ranks % size:
            raise EngineError(
                f"sequence_parallel_size {size} does not divide the {num_ranks} ranks of this job",
                hint=f"start a multiple of {max(size, 1)} ranks, or use a size that divides them",
            )
        self._sizes = MeshSizes(num_ranks // size, sequence=size)
        neighbours = self._sizes.ranks_along("sequence")
        self._ranks = self._world.subset(subgroup(neighbours, "sequence")) if size > 1 else None
        self._mesh_before = current_mesh()
        self.disable_in_eval = disable_in_eval
        _made[:] = [self]

    def get_sequence_parallel_group(self) -> ProcessGroup:
        """Return the ranks that have parts of this rank's sequences. Raises: EngineError where it is alone."""
        return existing(None if self._ranks is None else self._ranks.process_group)

    def get_sequence_parallel_world_size(self) -> int:
        """Return how many these are."""
        return self._sizes.sequence

    def get_sequence_parallel_rank(self) -> int:
        """Return which part of a sequence this rank has."""
        return 0 if self._ranks is None else self._ranks.rank

    def get_sequence_data_parallel_group(self) -> ProcessGroup | None:
        """Return the ranks that shard and average gradients together: all."""
        return self._world.process_group

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return how many these are."""
        return self._world.world_size

    def get_sequence_data_parallel_rank(self) -> int:
        """Return this rank's number among these."""
        return self._world.rank


def existing(group: ProcessGroup | None) -> ProcessGroup:
    """Return a group that there is. Raises: EngineError; None would mean all ranks to torch."""
    if group is None:
        raise EngineKeyError(
            "there is no group of sequence parallelism: each rank has whole sequences",
            hint='set "sequence_parallel_size" in the config, or sp_size in accelerate\'s ParallelismConfig',
        )
    return group


def sequence_axis() -> tuple[ProcessGroup | None, int, int]:
    """Return the ranks of one sequence, how many they are, and this rank's number among them.

    They are those of the groups that were made last, or of an engine that was built after them.
    """
    made, mesh = _made[0] if _made else None, current_mesh()
    ranks = made._ranks if made is not None and made._mesh_before is mesh else None if mesh is None else mesh.sequence
    return (None, 1, 0) if ranks is None else (ranks.process_group, ranks.world_size, ranks.rank)


def register_with_transformers(
    model_name_or_path: Any,
    core_attn_implementation: str | None = None,
    sequence_parallel_size: int = 1,
    micro_batch_size: int | None = None,
    seq_length: int | None = None,
    seq_length_is_variable: bool = True,
    disable_in_eval: bool = False,
    max_length: int | None = None,
) -> SequenceGroups | None:
    """Make the groups of sequence parallelism for a model of transformers; `initialize(mpu=...)` does the rest.

    model_name_or_path: the model, or the name of one that is built later. core_attn_implementation: what the model
    computes attention with; None: what it has. seq_length: of all batches, where it does not vary; `max_length` is its
    older name. micro_batch_size: not needed. Every rank must call it. Returns None for a size of 1.
    Raises: EngineError for a model, an attention or a length that cannot be cut.
    """
    if sequence_parallel_size == 1:
        return None
    where = "register_with_transformers"
    length = seq_length or max_length
    if not seq_length_is_variable and (length is None or length % sequence_parallel_size):
        raise EngineValueError(
            f"seq_length {length} is not a multiple of the {sequence_parallel_size} ranks of one sequence",
            where=where,
            hint="pad sequences to one, or let the length vary: seq_length_is_variable=True",
        )
    models = hugging_face_models(model_name_or_path) if isinstance(model_name_or_path, nn.Module) else []
    for model in models:
        check_model(model, sequence_parallel_size)
        own = model.config._attn_implementation
        if core_attn_implementation not in (None, own):
            raise EngineValueError(
                f'core_attn_implementation "{core_attn_implementation}" is not the model\'s, which is "{own}"',
                where=where,
                hint="load the model with the same attn_implementation",
            )
    if core_attn_implementation is not None:
        check_implementation(core_attn_implementation, where)
    return SequenceGroups(sequence_parallel_size, disable_in_eval=disable_in_eval)


class SequenceLoader(IterableDataset[dict[str, Any]]):
    """Gives parts of the batches of a loader that has other samples on every rank, as one for data parallelism has.

    P ranks of one sequence take P batches at a time: they come one after another, each in P parts, the batch of the
    group's first rank first. So each rank gets P times as many batches, and all ranks together see the same samples a
    pass. How a batch is cut: see `launcher.shard_sequence`. Each rank receives its parts only.
    """

    # What accelerate's `skip_first_batches` asks a loader, to begin in the middle of a pass.
    batch_size = None
    drop_last = False
    prefetch_factor = None

    def __init__(
        self, dl: Iterable[Any], sp_rank: int, sp_group: ProcessGroup, sp_world_size: int, device: Any = None
    ) -> None:
        """dl: gives dicts of tensors, and equally many on every rank. device: where parts come to.

        Raises: EngineError where the rank and the size are not those of `sp_group`.
        """
        if (sp_group.rank(), sp_group.size()) != (sp_rank, sp_world_size):
            raise EngineError(
                f"sp_rank {sp_rank} of {sp_world_size} is not that of the group, {sp_group.rank()} of {sp_group.size()}"
            )
        self.dl = dl
        self._ranks = sequence_ranks(sp_group)
        self._device = torch.device(device or (self._ranks.device if self._ranks is not None else "cpu"))
        self._pass: Iterator[dict[str, Any]] | None = None

    @property
    def dataset(self) -> SequenceLoader:
        """These batches."""
        return self

    def __len__(self) -> int:
        """Return the batches of a pass."""
        return len(self.dl) * (1 if self._ranks is None else self._ranks.world_size)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next pass, where the loader has one."""
        for owner in (self.dl, getattr(self.dl, "dataset", None)):
            if callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(epoch)  # type: ignore[union-attr]
                return

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin a pass. Every rank of the group must, and take equally many batches."""
        if self._ranks is None:
            for batch in self.dl:
                yield self._moved(part_of_batch(batch, 0, 1))
            return
        batches = iter(self.dl)
        while True:
            parts, description = self._cut(next(batches, None))
            described = self._ranks.communicator.gather_objects(description)
            if all(each is None for each in described):
                return
            _check_alike(described)
            yield from self._received(self._ranks, parts, described)

    def __next__(self) -> dict[str, Any]:
        """Return the next batch of a pass that begins with the first call, and again after its end."""
        self._pass = self._pass or iter(self)
        try:
            return next(self._pass)
        except StopIteration:
            self._pass = None
            raise

    def _cut(self, batch: Any) -> tuple[list[dict[str, Any]], Any]:
        """Return a batch in parts, and its description: tensors by type and shape; why it cannot be cut; None: none."""
        ranks = self._ranks
        if batch is None or ranks is None:
            return [], None
        try:
            parts = [cut(batch, rank, ranks.world_size) for rank in range(ranks.world_size)]
        except EngineError as error:  # all ranks raise it: one alone would leave the others waiting
            return [], str(error)
        return parts, {
            name: (value.dtype, value.shape) if isinstance(value, Tensor) else value for name, value in parts[0].items()
        }

    def _received(
        self, ranks: RankGroup, parts: list[dict[str, Any]], described: list[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """Exchange the parts; return this rank's of every batch, in the order of ranks."""
        sent = [_as_bytes(part, ranks.device) for part in parts]
        arrived = [sent[0].new_empty(sum(_num_bytes(entry) for entry in each.values())) for each in described]
        ranks.communicator.exchange(sent, arrived).wait()
        for description, received in zip(described, arrived, strict=True):
            taken = iter(received.split([_num_bytes(entry) for entry in description.values()]))
            part = {
                # A copy: in the middle of a buffer there may be no place for a wider type.
                name: data.clone().view(entry[0]).view(entry[1]) if _is_tensor(entry) else entry
                for (name, entry), data in zip(description.items(), taken, strict=True)
            }
            yield with_positions(self._moved(part), ranks.rank, ranks.world_size)

    def _moved(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {name: value.to(self._device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _check_alike(described: list[Any]) -> None:
    wrong = next((each for each in described if isinstance(each, str)), None)
    if wrong is not None:
        raise EngineError(wrong)
    if any(each is None for each in described):
        raise EngineError(
            "the loaders of the ranks of one sequence have different numbers of batches",
            hint="let the sampler give each rank equally many: drop_last, or even_batches of accelerate",
        )


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], torch.dtype)


def _num_bytes(entry: Any) -> int:
    return math.prod(entry[1]) * entry[0].itemsize if _is_tensor(entry) else 0


def _as_bytes(part: dict[str, Any], device: torch.device) -> Tensor:
    tensors = [value.to(device) for value in part.values() if isinstance(value, Tensor)]
    return torch.cat([value.contiguous().view(-1).view(torch.uint8) for value in tensors])


class DistributedAttention(exchange.DistributedAttention):
    """`launcher.DistributedAttention` with DeepSpeed's arguments."""

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        """sequence_process_group: None for that of the engine. sp_stream, num_kv_heads: without effect: one exchange
        carries query, key and value, and keys tell their heads.
        """
        super().__init__(local_attention, sequence_process_group, scatter_idx, gather_idx)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Do what `launcher.DistributedAttention` does. batch_dim_idx: 0 or 1; the other one is the sequence.

        Raises: EngineError for another one, and for `rotary_pos_emb`.
        """
        if batch_dim_idx not in (0, 1) or rotary_pos_emb is not None:
            raise EngineError(
                f"DistributedAttention(batch_dim_idx={batch_dim_idx}, rotary_pos_emb=...) is not supported",
                hint="use a batch_dim_idx of 0 or 1, and rotate queries and keys before the attention",
            )
        self.gather_idx = 1 - batch_dim_idx
        return super().forward(query, key, value, *args, **kwargs)


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, sp_group: ProcessGroup
) -> Tensor:
    """Return the loss of every token of the whole sequence, [length, batch], in fp32. Collective.

    vocab_parallel_logits: [length of this part, batch, vocabulary], the whole vocabulary. target: [length of this
    part, batch]. Backward sums the gradients that all ranks have for this part, as each has the same loss and the
    engine takes the mean.
    """
    losses = F.cross_entropy(vocab_parallel_logits.float().movedim(-1, 1), target, reduction="none")
    return torch.cat(all_gather(losses, group=sp_group))


class UlyssesSPAttentionHF:
    """Attention of transformers on parts of sequences; the engine puts it into the model."""

    register_with_transformers = staticmethod(register_with_transformers)


def apply_rotary_pos_emb(t: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Return `t` turned by its positions: the first elements of the last dimension, as many as the tables have.

    t: [..., dim]. freqs_cos, freqs_sin: [..., even number up to dim], which broadcast to `t`.
    """
    turned, rest = t[..., : freqs_cos.shape[-1]], t[..., freqs_cos.shape[-1] :]
    turned = (turned * freqs_cos) + (_rotate_half(turned) * freqs_sin)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def _rotate_half(x: Tensor) -> Tensor:
    """Return both halves of the last dimension, the second one negative and first."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
