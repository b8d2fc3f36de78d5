"""What a rehearsal of ranks has found: memory by phase, collectives, and where two ranks would part."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, zip_longest
from typing import Any, NamedTuple

from launcher.planner.ladder import EngineFacts
from launcher.sharding.mesh import AXES, MeshSizes

FORMAT = 1  # of the JSON
TRANSFERS = ("send", "receive")
# What memory is taken for, on the device.
KINDS = (
    "parameters", "gradients", "optimizer", "buffers", "in flight", "activations", "temporary", "script", "model",
    "initialize",
)  # fmt: skip
PHASES_OF_STEP = ("forward", "backward", "step")


class DeviceWork(NamedTuple):
    """What a device would do."""

    flops: float = 0.0  # of products of matrices, convolutions and attention
    product_bytes: float = 0.0  # that these read and write
    moved_bytes: float = 0.0  # that all other operations read and write
    num_kernels: float = 0.0  # operations of torch, each a launch by the host

    def times(self, factor: float) -> DeviceWork:
        """Return so many times of it."""
        return DeviceWork(*(each * factor for each in self))

    def plus(self, other: DeviceWork) -> DeviceWork:
        """Return both together."""
        return DeviceWork(*(one + each for one, each in zip(self, other, strict=True)))


class Group(NamedTuple):
    """A process group."""

    purpose: str
    ranks: tuple[int, ...]  # of the world


class Call(NamedTuple):
    """A collective, or a transfer between two ranks, as one rank has begun it."""

    kind: str
    group: int  # its place among the rank's groups
    num_bytes: int  # of the whole buffer: what a rank has after a gather, or before a reduction
    what: str  # of the engine's: which unit; of others: file:line
    phase: str
    step: int  # from the end of the step before to its own end, from 1 on; 0: before an engine is built
    peer: int | None  # rank of the world that a transfer is with
    is_of_engine: bool  # by a verb of its communicators; else by the script, DTensor or another library


@dataclass
class RankRehearsal:
    """One rank of a world that was not there."""

    rank: int
    world_size: int
    gpus_per_node: int
    sizes: dict[str, int] = field(default_factory=dict)  # of the mesh, by axis
    engine: EngineFacts | None = None  # where the engine stands on the ladder
    num_steps: int = 0  # that it has taken
    groups: list[Group] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)  # phase -> kind -> bytes, when they were most
    host_bytes: int = 0  # of offloaded states, page-locked on a GPU
    disk_bytes: int = 0
    work: dict[str, DeviceWork] = field(default_factory=dict)  # of a device in the last step, by phase
    config: dict[str, Any] = field(default_factory=dict)  # of the engine, with nothing left to "auto"
    params: list[tuple[str, int, bool]] = field(default_factory=list)  # name, elements, whether it is trained
    reads: dict[str, int] = field(default_factory=dict)  # numbers that the host waited for in it, by file:line
    computed: dict[str, int] = field(default_factory=dict)  # operations whose shapes torch cannot compute alone
    seconds: float = 0.0
    resident_bytes: int = 0  # the most that this process took of the machine
    error: str | None = None  # why it ended before the last step
    announced: dict[str, str] = field(default_factory=dict)  # by stage of a pipeline, what it returns
    needs_earlier_stages: bool = False  # it is not known what the stage before returns

    @property
    def micro_batch(self) -> int:
        """Of the engine; 0 without one."""
        return 0 if self.engine is None else self.engine.micro_batch

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step; 0 without an engine."""
        return 0 if self.engine is None else self.engine.accumulation

    @property
    def peak_bytes(self) -> int:
        """The most that the rank's device has at once in a step."""
        peaks = [kinds for phase, kinds in self.peaks.items() if phase in PHASES_OF_STEP]
        return max((sum(kinds.values()) - kinds.get("host", 0) for kinds in peaks), default=0)

    def calls_of_last_step(self) -> list[Call]:
        """Return what the rank begins in each step, as far as the last one shows."""
        return [call for call in self.calls if call.step == self.num_steps]

    def traffic(self) -> dict[str, int]:
        """Return the bytes that the rank sends in a step, by the links that they take."""
        sent: Counter[str] = Counter()
        for call in self.calls_of_last_step():
            ranks = self.groups[call.group].ranks if call.peer is None else (self.rank, call.peer)
            nodes = {rank // self.gpus_per_node for rank in ranks}
            sent["between nodes" if len(nodes) > 1 else "within a node"] += sent_bytes(call, len(ranks))
        return dict(sent)

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, text: str) -> RankRehearsal:
        """Return what `as_json` has made."""
        found = json.loads(text)
        del found["format"]
        found["groups"] = [Group(purpose, tuple(ranks)) for purpose, ranks in found["groups"]]
        found["calls"] = [Call(*call) for call in found["calls"]]
        found["work"] = {phase: DeviceWork(*work) for phase, work in found["work"].items()}
        found["params"] = [tuple(param) for param in found["params"]]
        found["engine"] = EngineFacts.from_json(found["engine"])
        return cls(**found)


def sent_bytes(call: Call, num_ranks: int) -> int:
    """Return the bytes that a rank sends in a collective of a ring: the least there is."""
    if call.kind in TRANSFERS:
        return call.num_bytes if call.kind == "send" else 0
    if call.kind == "barrier":
        return 0
    share = call.num_bytes * (num_ranks - 1) // num_ranks
    return 2 * share if call.kind == "all_reduce" else share


# ---- Ranks beside each other ----


def roles(sizes: MeshSizes, *, all_of_them: bool = False) -> list[int]:
    """Return a rank of each role: the first and the last, one of each pipeline stage and of each set of experts.

    all_of_them: one for each place along the axes of the model, the ranks of tensor and sequence parallelism too.
    """
    world_size = sizes.world_size
    chosen: dict[tuple[int, ...], int] = {}
    for rank in range(world_size):
        pipeline, data, sequence, tensor = sizes.coordinates(rank)
        place = (pipeline, data % sizes.expert, sequence, tensor)
        chosen.setdefault(place if all_of_them else place[:2], rank)
    return sorted({0, world_size - 1, *chosen.values()})


def ranks_of_earlier_stages(sizes: MeshSizes, rank: int) -> list[int]:
    """Return a rank of each pipeline stage before that of a rank, in their order."""
    stage, *_ = sizes.coordinates(rank)
    return [earlier * (sizes.world_size // sizes.pipeline) for earlier in range(stage)]


def sizes_of(found: RankRehearsal) -> MeshSizes:
    """Return the mesh of a rehearsed rank; of one that has built no engine, data parallelism alone."""
    if not found.sizes:
        return MeshSizes(found.world_size)
    return MeshSizes(**{axis: found.sizes[axis] for axis in (*AXES, "expert")})


@dataclass(frozen=True)
class Difference:
    """Where two ranks of a group would wait for each other."""

    group: Group
    position: int  # from 1 on, among the collectives of the group
    ranks: tuple[int, int]
    calls: tuple[Call | None, Call | None]  # None: the rank begins no more

    def __str__(self) -> str:
        sides = [f"rank {rank} {_text(call)}" for rank, call in zip(self.ranks, self.calls, strict=True)]
        return f'collective {self.position} of "{self.group.purpose}" ({_ranks_text(self.group.ranks)}): ' + ", ".join(
            sides
        )


def _text(call: Call | None) -> str:
    return "begins none" if call is None else f"begins {call.kind} of {call.num_bytes:,} bytes ({call.what})"


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


def first_differences(ranks: Iterable[RankRehearsal]) -> list[Difference]:
    """Return the first difference of each group that two rehearsed ranks would begin other collectives in."""
    found: dict[Group, Difference] = {}
    for one, other in combinations(ranks, 2):
        ours, theirs = _by_group(one), _by_group(other)
        for key in {**ours, **theirs}:
            group = key[0]
            if group in found or not {one.rank, other.rank} <= set(group.ranks):
                continue
            pairs = zip_longest(ours.get(key, ()), theirs.get(key, ()))
            for position, (mine, its) in enumerate(pairs, start=1):
                if mine is None or its is None or _identity(mine) != _identity(its):
                    found[group] = Difference(group, position, (one.rank, other.rank), (mine, its))
                    break
    return [*found.values(), *_unmatched(ranks)]


def _identity(call: Call) -> tuple[Any, ...]:
    return call.kind, call.num_bytes, call.step


def _by_group(rank: RankRehearsal) -> dict[tuple[Group, int], list[Call]]:
    """Return the collectives of each group; groups alike in purpose and ranks by the order in which they were made."""
    num_before: Counter[Group] = Counter()
    keys = []
    for group in rank.groups:
        keys.append((group, num_before[group]))
        num_before[group] += 1
    calls: dict[tuple[Group, int], list[Call]] = {key: [] for key in keys}
    for call in rank.calls:
        if call.peer is None:
            calls[keys[call.group]].append(call)
    return calls


def _unmatched(ranks: Iterable[RankRehearsal]) -> list[Difference]:
    """Return the first transfer between two rehearsed ranks that one of them begins, and the other does not."""
    ends: dict[tuple[int, int], dict[str, list[Call]]] = defaultdict(lambda: {kind: [] for kind in TRANSFERS})
    rehearsed = {rank.rank for rank in ranks}
    groups = {}
    for rank in ranks:
        for call in rank.calls:
            if call.peer is not None and call.peer in rehearsed:
                ends[(rank.rank, call.peer) if call.kind == "send" else (call.peer, rank.rank)][call.kind].append(call)
                groups[rank.rank, call.peer] = rank.groups[call.group]
    found = []
    for (sender, receiver), calls in ends.items():
        pairs = zip_longest(calls["send"], calls["receive"])
        for position, (sent, received) in enumerate(pairs, start=1):
            if sent is None or received is None or sent.num_bytes != received.num_bytes:
                group = groups.get((sender, receiver)) or groups[receiver, sender]
                found.append(Difference(group, position, (sender, receiver), (sent, received)))
                break
    return found
