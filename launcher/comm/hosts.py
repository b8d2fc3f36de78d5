"""Small facts that hosts exchange while their devices work, and numbers that a device sends its host.

[Note: what a step needs to know, and when]
Before the optimizer updates anything all ranks must know three things of the backward pass: whether a rank has
gradients that came after their sum was begun, whether one has parameters without a gradient, and whether all issued
their collectives in one order. These are facts of the hosts. Each host knows its own when `backward()` returns, long
before its GPU has computed a gradient, so they must not travel through the GPU. A collective of NCCL is queued behind
the kernels of its stream and the reductions of its communicator, and to read its result the host waits for them. A
communicator and a stream of its own would not help: NCCL does not promise that operations of two communicators make
progress at the same time on one GPU (its user guide, "Using multiple NCCL communicators concurrently"). The facts
travel between hosts, through a gloo group beside NCCL's: about log2(ranks) messages of a few bytes, while the GPU works
through its queue.

The device could instead skip an update that turns out to be wrong, and repeat it later. But until then ranks would read
parameters that lack the update, and the repetition is collective, where a read is not.

The norm, and with it the factor of clipping and whether the step is skipped, are facts of the device. The optimizer
reads them there. A copy goes to pinned host memory with an event, and the host reads it when it is needed, at
the latest when the next backward begins: see `AsyncHostCopy`, and `launcher.engine.last_step` for what follows.

What is late, unused or in another order is thus known before the update is queued, as on a CPU, and never guessed.
On a CPU all facts travel together in one collective, and the host reads them at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.base import env
from launcher.base.errors import EngineError
from launcher.comm.groups import RankGroup, group_of_flags
from launcher.comm.pending import Pending, begin_call, end_call, name_next

HOST_EXCHANGE = "host_all_reduce_max"  # the kind of these calls


def host_all_reduce_max(group: RankGroup, values: Sequence[int]) -> list[int]:
    """Return the largest of all ranks' numbers, each for itself. Every rank must call it; no device is waited for.

    In round k a rank sends what it knows to the rank 2^k further on. A maximum may be taken twice of the same number,
    so this is right for any number of ranks, after log2 of it rounds. Messages bear the number of the call: where an
    exception has interrupted one, what is left of it is never taken for the next one, and ranks that are in different
    calls get an error from `launcher.zero.order_watch`. Raises: EngineError for ranks without a `host_process_group`.
    """
    hosts = group.host_process_group
    if hosts is None:
        if group.world_size > 1:
            raise EngineError(f"a group of {group.world_size} ranks has no process group of their hosts")
        return list(values)
    known, distance = torch.tensor(values, dtype=torch.int64), 1
    name_next(f"the largest over hosts of {list(values)}")
    tag = begin_call(HOST_EXCHANGE, hosts).number % 2**31
    try:
        while distance < group.world_size:
            received = torch.empty_like(known)
            to, source = (group.rank + distance) % group.world_size, (group.rank - distance) % group.world_size
            Pending([hosts.send([known], to, tag), hosts.recv([received], source, tag)]).wait()
            known = torch.maximum(known, received)
            distance *= 2
    finally:
        end_call()
    largest: list[int] = known.tolist()
    return largest


def any_rank(group: RankGroup, flags: Sequence[bool]) -> list[bool]:
    """Return which flags any rank has set. Every rank must call it."""
    if group.runtime.is_async_device:
        return [bool(value) for value in host_all_reduce_max(group, [int(flag) for flag in flags])]
    counts = torch.tensor([float(flag) for flag in flags], dtype=torch.float64, device=group.device)
    return [bool(value) for value in group.communicator.sum_scalars(counts).tolist()]


def node_sizes(world: RankGroup) -> list[int]:
    """Return how many ranks each node has, in the order of ranks; one node where ranks know of none. Collective.

    Raises: EngineError where the ranks of a node do not follow each other: neighbours would be on different nodes.
    """
    own = [os.environ.get(env.LOCAL_WORLD_SIZE.name, world.world_size), os.environ.get(env.LOCAL_RANK.name, -1)]
    facts = torch.tensor([float(value) for value in own], dtype=torch.float64, device=world.device)
    of_ranks = [(int(size), int(place)) for size, place in world.communicator.gather_rows(facts).tolist()]
    sizes: list[int] = []
    while (first := sum(sizes)) < len(of_ranks):
        sizes.append(max(of_ranks[first][0], 1))
        places = [place for _, place in of_ranks[first : first + sizes[-1]]]
        if -1 not in places and sorted(places) != list(range(len(places))):
            raise EngineError(
                f"the ranks of a node do not follow each other: ranks {first} to {first + len(places) - 1} are the"
                f" numbers {', '.join(map(str, places))} of their nodes ({env.LOCAL_RANK.name})",
                hint="place neighbouring ranks on one node: srun --distribution=block, mpirun --map-by slot",
            )
    return sizes


def node_names(world: RankGroup) -> list[str]:
    """Return the node of each rank, by number. Collective."""
    names = [f"node {number}" for number, size in enumerate(node_sizes(world)) for _ in range(size)]
    return names[: world.world_size]


class AsyncHostCopy:
    """An asynchronous copy of numbers from a device to pinned host memory."""

    def __init__(self, values: Tensor) -> None:
        """values: 1-D fp64; they are copied when the device's work queued so far has ended. The host does not wait."""
        self._values: list[float] | None = None
        self._arrival: torch.Event | None = None
        if values.device.type == "cpu":
            self._host = values.clone()
        else:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrival = torch.Event(values.device)
            self._arrival.record(torch.accelerator.current_stream(values.device))

    def values(self) -> list[float]:
        """Return the numbers, and wait for them the first time."""
        if self._values is None:
            if self._arrival is not None:
                self._arrival.synchronize()
            self._values = self._host.tolist()
        return self._values


# ---- A fact that ranks learn of one by one, and must act on together ----


class AsyncFlag:
    """Tells every rank, in the same round, that a flag is set on one of them.

    A round is one all-reduce of a number in host memory: a device is not waited for, and what happens between `begin`
    and `result` hides it. Every rank must make one, and take part in every round.
    """

    def __init__(self) -> None:
        self._process_group = group_of_flags()
        self._flag: Tensor = torch.zeros(1, dtype=torch.int32)
        self._pending: Pending | None = None
        self._was_set = False

    def begin(self, *, is_set: bool) -> None:
        """Begin a round. is_set: on this rank."""
        self.result()  # an exception has left a round open
        self._flag.fill_(is_set)
        if self._process_group is None:
            self._pending = Pending()
            return
        begin_call("all_reduce", self._process_group)
        work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._process_group, async_op=True)
        self._pending = Pending([work] if work is not None else [])
        end_call()

    def result(self) -> bool:
        """End the round, and return whether the flag was set on any rank, now or in an earlier round."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
            self._was_set = self._was_set or bool(self._flag.item())
        return self._was_set
