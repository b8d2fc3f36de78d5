"""Tensors between stages on different ranks: what a stage returns travels on, its gradients travel back.

[Note: shapes] The receiver must know the shape of what comes before it can wait for it. Micro-batches whose inputs have
the same types and shapes have the same shapes everywhere, so all ranks of a pipeline agree, before a step, on a
signature of each micro-batch (`agree`). The first micro-batch of a signature is announced: its shapes travel ahead of
it, through host memory. Later ones are received at once, beside the computing. So shapes may differ from one
micro-batch to the next.

[Note: order] NCCL takes the transfers of a process group one after the other, whoever the peer is: a receive from the
rank before, started early, would hold up a send to the rank after. So neighbouring pairs of ranks use different groups
(`links` of the mesh): two, and a third one for the pair of the last and the first rank where their number is odd. All
ranks start all transfers in one total order, of which each group has a part: no order can deadlock.

[Note: receives beside the computing] A transfer of NCCL waits for all that is queued on the stream on which it is
started. What is sent is computed on that stream; what is received is not. So a receive is started on a side stream
(`Side.RECEIVE`), and arrives while the micro-batch before is computed. Its memory belongs to that stream, and autograd
frees it at an unknown time: `record_stream` keeps it until the computing has used it.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.comm.communicator import Transfer
from launcher.comm.groups import RankGroup
from launcher.comm.pending import Pending
from launcher.comm.streams import Side, Streams
from launcher.comm.torch_internals import tree_flatten
from launcher.sharding.pipeline import link_between

RankOf = Callable[[int], int]  # from a stage to the rank of the pipeline that has it
_ANNOUNCEMENT_BYTES = 4096
_MAX_SENDS = 16  # in flight at once, each of which keeps its tensors
_READS_NONE, _ENDED = -1, -2  # in place of signatures, which are not negative


@dataclass(frozen=True)
class TensorFacts:
    """What the receiver of a tensor must know."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool  # a gradient of it travels back


@dataclass(frozen=True)
class Receiving:
    """Tensors that are on their way to this rank."""

    pending: Pending
    tensors: tuple[Tensor, ...]
    streams: Streams

    def wait(self) -> tuple[Tensor, ...]:
        """Return the tensors when they are there; on a GPU the current stream waits, and the host does not."""
        self.pending.wait()
        for each in self.tensors:
            self.streams.record_stream(each)
        return self.tensors


class StageTransfers:
    """The transfers of one rank of a pipeline, in the order of its actions."""

    def __init__(self, group: RankGroup, rank_of: RankOf, links: Sequence[RankGroup] = ()) -> None:
        """group: the ranks of one pipeline. links: groups of the same ranks for transfers. Every rank must call it."""
        self.group = group
        self._links = tuple(links) or (group,)
        self._hosts = group.host_group
        self._rank_of = rank_of
        # NCCL connects the ranks of a group in its first collective, which must not be a transfer between two of them:
        # see the documentation of `torch.distributed.batch_isend_irecv`.
        for each in dict.fromkeys((group, *self._links)):
            each.communicator.gather_scalars(0.0)
        self._facts: dict[tuple[int, int], tuple[TensorFacts, ...]] = {}  # by receiving stage and signature
        self._sends: deque[tuple[Pending, list[Tensor]]] = deque()

    # ---- before a step ----

    def agree(self, micro_batches: Sequence[Any] | None, num_micro_batches: int, *, compares_values: bool) -> list[int]:
        """Return the signatures of the micro-batches, the same on all ranks. Collective over the pipeline.

        micro_batches: None on a rank that reads none; fewer than asked for where the data has ended. compares_values:
        whether the values of the first one are compared, too. Raises, on all ranks: StopIteration where the data of one
        has ended; EngineError where two have different micro-batches.
        """
        own = [_READS_NONE] * (num_micro_batches + 1)
        if micro_batches is not None and len(micro_batches) < num_micro_batches:
            own[0] = _ENDED
        elif micro_batches is not None:
            own = [signature_of(each) for each in micro_batches]
            own.append(_values_of(micro_batches[0]) if compares_values else 0)
        found = self._gathered(own)
        if any(row[0] == _ENDED for row in found):
            raise StopIteration("the data ended before the micro-batches of a step were complete")
        reading = {rank: row for rank, row in enumerate(found) if row[0] != _READS_NONE}
        first, *others = reading
        differing = [rank for rank in others if reading[rank] != reading[first]]
        if differing:
            raise EngineError(
                f"stages of a pipeline got different micro-batches: its rank {differing[0]} others than rank {first}",
                hint="all stages of a pipeline need the same samples in the same order: give training_data to"
                " initialize(), or num_replicas=engine.dp_world_size, rank=engine.get_data_parallel_rank() to the"
                " sampler, and the same seed on all ranks",
            )
        return reading[first][:-1]

    def _gathered(self, own: list[int]) -> list[list[int]]:
        """Return the numbers of all ranks of the pipeline. Collective, between hosts."""
        if self._hosts is None:
            return [own]
        rows = [torch.empty(len(own), dtype=torch.int64) for _ in range(self.group.world_size)]
        dist.all_gather(rows, torch.tensor(own, dtype=torch.int64), group=self._hosts)
        return [row.tolist() for row in rows]

    # ---- forward ----

    def send_forward(self, outputs: Sequence[Tensor], stage: int, signature: int) -> None:
        """Start sending what `stage` has returned to the stage after it.

        Raises: EngineError where the shapes are others than those of an earlier micro-batch with the same signature.
        """
        facts = tuple(TensorFacts(tuple(each.shape), each.dtype, each.requires_grad) for each in outputs)
        known = self._facts.get((stage + 1, signature))
        if known is None:
            self._announce(facts, stage + 1)
            self._facts[stage + 1, signature] = facts
        elif known != facts:
            raise EngineError(
                f"stage {stage} returned {_shown(facts)}, and {_shown(known)} for an earlier micro-batch with inputs of"
                " the same shapes",
                hint="the shapes that a stage returns must follow from the shapes of its inputs, not from their values",
            )
        self._send([each.detach() for each in outputs], stage + 1)

    def receive_forward(self, stage: int, signature: int) -> Receiving:
        """Start receiving the inputs of `stage`. Waits for their announcement the first time."""
        if (stage, signature) not in self._facts:
            self._facts[stage, signature] = self._announced(stage - 1)
        return self._receive(self._facts[stage, signature], stage - 1)

    def facts_of(self, stage: int, signature: int) -> tuple[TensorFacts, ...]:
        """Return what is known of the inputs of `stage`."""
        return self._facts[stage, signature]

    # ---- backward ----

    def send_backward(self, gradients: Sequence[Tensor], stage: int) -> None:
        """Start sending the gradients of the inputs of `stage` to the stage before it."""
        self._send(gradients, stage - 1)

    def receive_backward(self, stage: int, signature: int) -> Receiving:
        """Start receiving the gradients of what `stage` has sent, of those that need one."""
        return self._receive([facts for facts in self._facts[stage + 1, signature] if facts.needs_grad], stage + 1)

    # ---- both ----

    def finish_sends(self, num_left: int = 0) -> None:
        """Wait until at most `num_left` sends are in flight."""
        while len(self._sends) > num_left:
            self._sends.popleft()[0].wait()

    def _between(self, peer: int) -> RankGroup:
        """Return the group whose transfers wait for no other neighbour of this rank. See [Note: order]."""
        if len(self._links) == 1:
            return self._links[0]
        return self._links[link_between(self.group.rank, peer, self.group.world_size)]

    def _drop_sent(self) -> None:
        """Free the tensors of sends that the device has ended: each may be as large as a micro-batch's activations."""
        while self.group.runtime.is_async_device and self._sends and self._sends[0][0].has_arrived:
            self._sends.popleft()[0].wait()

    def _send(self, tensors: Sequence[Tensor], to_stage: int) -> None:
        self._drop_sent()
        dense = [each.contiguous() for each in tensors if each.numel()]
        self.finish_sends(_MAX_SENDS - 1)  # each is received at an earlier place of the order than the next one
        peer = self._rank_of(to_stage)
        pending = self._between(peer).communicator.transfer(
            [Transfer(_bytes(each), peer, is_sent=True) for each in dense]
        )
        self._sends.append((pending, dense))

    def _receive(self, facts: Sequence[TensorFacts], from_stage: int) -> Receiving:
        peer, streams = self._rank_of(from_stage), self.group.streams
        with streams.on(Side.RECEIVE):
            tensors = tuple(torch.empty(each.shape, dtype=each.dtype, device=self.group.device) for each in facts)
            transfers = [Transfer(_bytes(each), peer, is_sent=False) for each in tensors if each.numel()]
            pending = self._between(peer).communicator.transfer(transfers)
        return Receiving(pending, tensors, streams)

    def _announce(self, facts: tuple[TensorFacts, ...], to_stage: int) -> None:
        plain = [[each.shape, str(each.dtype).removeprefix("torch."), each.needs_grad] for each in facts]
        text = json.dumps(plain).encode()
        if len(text) > _ANNOUNCEMENT_BYTES:
            raise EngineError(
                f"stage {to_stage - 1} returns {len(facts)} tensors",
                hint="have layers pass on fewer tensors, such as one stacked tensor in place of a list",
            )
        self.send_text(text.ljust(_ANNOUNCEMENT_BYTES), to_stage)

    def _announced(self, from_stage: int) -> tuple[TensorFacts, ...]:
        plain = json.loads(self.receive_text(from_stage))
        return tuple(TensorFacts(tuple(shape), getattr(torch, dtype), needs_grad) for shape, dtype, needs_grad in plain)

    def send_text(self, text: bytes, to_stage: int) -> None:
        """Send the rank of a stage what it expects to `receive_text`."""
        hosts = self._hosts
        assert hosts is not None, "a single rank announces nothing"
        hosts.send([torch.frombuffer(bytearray(text), dtype=torch.uint8)], self._rank_of(to_stage), 0).wait()

    def receive_text(self, from_stage: int) -> bytes:
        """Return what the rank of a stage has sent."""
        hosts = self._hosts
        assert hosts is not None, "a single rank announces nothing"
        received = torch.empty(_ANNOUNCEMENT_BYTES, dtype=torch.uint8)
        hosts.recv([received], self._rank_of(from_stage), 0).wait()
        return received.numpy().tobytes()


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, 1-D: backends lack types that tensors have."""
    return tensor.view(-1).view(torch.uint8)


def _shown(facts: Sequence[TensorFacts]) -> str:
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in facts) or "no tensor"


def signature_of(micro_batch: Any) -> int:
    """Return a number for the structure of a micro-batch and the types and shapes in it, never negative."""
    leaves, structure = tree_flatten(micro_batch)
    described = [(str(leaf.dtype), tuple(leaf.shape)) if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves]
    return zlib.crc32(repr((str(structure), described, torch.is_grad_enabled())).encode())


def _plain(leaf: Any) -> Any:
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf).__qualname__


def _values_of(micro_batch: Any) -> int:
    """Return a number for the values of the tensors in a micro-batch, never negative."""
    found = 0
    for leaf in tree_flatten(micro_batch)[0]:
        if isinstance(leaf, Tensor):
            dense = leaf.detach().cpu().contiguous().view(-1)
            found = zlib.crc32(dense.view(torch.uint8).numpy().tobytes(), found)
    return found
