"""Which parameters a rank of DeepSpeed has, in which groups of its optimizer, and where their elements are.

DeepSpeed's files name no elements: a group's parameters follow one another in the order of the optimizer, cut into one
part a rank (stages 1 and 2), or each parameter is cut by itself (stage 3). Ranks that share a set of experts number
their own from 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats.deepspeed import DeepSpeedCheckpoint
from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint.formats.source import HALVES, CheckpointSource, StoredParam

_EXPERT = re.compile(r"(?P<layer>(?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(?P<number>\d+)(?P<rest>\..*)")
_PART_ALIGNMENT_NUMEL = 2  # of stages 1 and 2: a rank's part begins at 4 bytes in 16 bits
_PARAM_ALIGNMENT_BYTES = 16  # with "parameter_alignment"
_SUB_GROUP_NUMEL = 10**9


@dataclass(frozen=True)
class Member:
    """A parameter as one rank knows it."""

    name: str
    stored: str  # its name in the source: of an expert the number is that in the whole layer
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """Elements of a parameter in a rank's tensor."""

    member: Member
    elements: range
    at: int  # the first one's place in the tensor


@dataclass(frozen=True)
class Flat:
    """One tensor of a rank's optimizer: pieces of parameters, and zeros between and after them."""

    members: tuple[Member, ...]  # of all ranks' tensors together
    numel: int
    lean_numel: int  # without the zeros at the end
    pieces: tuple[Piece, ...]
    gaps: tuple[int, ...] = ()  # zeros after each member


@dataclass(frozen=True)
class Group:
    """A group of a rank's optimizer."""

    options: Mapping[str, Any]
    members: tuple[Member, ...]
    num_parts: int  # ranks that share it
    part: int


@dataclass(frozen=True)
class Expert:
    """One expert of a layer."""

    layer: str  # what its parameters' names begin with
    number: int  # in the whole layer
    rest: str

    @classmethod
    def of(cls, name: str) -> Expert | None:
        """Return which expert a parameter belongs to; None for none that DeepSpeed spreads."""
        found = _EXPERT.fullmatch(name)
        return None if found is None else cls(found["layer"], int(found["number"]), found["rest"])


class Plan:
    """A checkpoint as so many ranks of DeepSpeed would have saved it."""

    def __init__(self, source: CheckpointSource, stage: int, num_ranks: int) -> None:
        """Raises: CheckpointError for what DeepSpeed cannot load in this way."""
        self.source, self.stage, self.num_ranks = source, stage, num_ranks
        facts: Mapping[str, Any] = source.facts if isinstance(source, NativeSource) else {}
        self.tied: Mapping[str, str] = facts.get("tied", {})
        if isinstance(source, DeepSpeedCheckpoint):
            self.tied = source.tied
        self.names = _in_order([*facts.get("order", ()), *source.params], source.params)
        self._in_groups = _in_order([*facts.get("order_of_optimizer", ()), *self.names], source.params)
        self.expert_size = int(facts.get("expert_parallel", 1)) if self.layers else 1
        self._check()

    def _check(self) -> None:
        if not self.layers:
            return
        if self.stage == 3:
            raise self.error("DeepSpeed has no experts at stage 3", "write it for stage 2")
        counts = {*self.num_experts, self.num_ranks}
        if any(count % self.expert_size for count in counts):
            message = f"experts over {self.expert_size} ranks divide neither into {self.num_ranks} ranks nor otherwise"
            raise self.error(message, f"use a multiple of {self.expert_size} ranks")

    def error(self, message: str, hint: str) -> CheckpointError:
        """Return an error about the checkpoint."""
        return CheckpointError(message, where=self.source.where, hint=hint)

    # ---- experts ----

    @cached_property
    def layers(self) -> dict[str, int]:
        """The layers of experts in the order of the model, each with its number of experts."""
        found: dict[str, int] = {}
        for expert in filter(None, map(Expert.of, self.names)):
            found[expert.layer] = max(found.get(expert.layer, 0), expert.number + 1)
        return found

    @property
    def num_experts(self) -> list[int]:
        """The number of experts of each layer."""
        return list(self.layers.values())

    def member(self, name: str, rank: int) -> Member | None:
        """Return a parameter as a rank knows it; None for one of an expert that others have."""
        stored, expert = self.source.params[name], Expert.of(name)
        if expert is None:
            return Member(name, name, stored.shape)
        num_local = self.layers[expert.layer] // self.expert_size
        owner, number = divmod(expert.number, num_local)
        local = f"{expert.layer}{number}{expert.rest}"
        return Member(local, name, stored.shape) if owner == rank % self.expert_size else None

    # ---- groups ----

    def groups(self, rank: int) -> list[Group]:
        """Return the groups of a rank's optimizer. Experts form groups of their own, behind the others."""
        found: list[Group] = []
        of_experts: list[Group] = []
        for index, options in enumerate(self.source.state.groups):
            names = [name for name in self._in_groups if self._is_in(index, self.source.params[name])]
            plain = [name for name in names if Expert.of(name) is None]
            spread = [name for name in names if Expert.of(name) is not None]
            if plain:
                found.append(Group(options, self._members(plain, rank), self.num_ranks, rank))
            if spread:
                marked = {**options, "moe": True, "name": f"ep_size_{self.expert_size}"}
                num_parts, part = self.num_ranks // self.expert_size, rank // self.expert_size
                group = Group(marked, self._members(spread, rank), num_parts, part)
                (of_experts if plain else found).append(group)
        return found + of_experts

    @staticmethod
    def _is_in(index: int, stored: StoredParam) -> bool:
        return stored.is_trainable and stored.group == index and stored.numel > 0

    def _members(self, names: Iterable[str], rank: int) -> tuple[Member, ...]:
        return tuple(member for member in (self.member(name, rank) for name in names) if member is not None)

    def frozen(self) -> list[Member]:
        """Return the parameters that are not trained, those without elements included."""
        params = self.source.params.items()
        return [
            Member(name, name, stored.shape) for name, stored in params if not stored.is_trainable or not stored.numel
        ]

    # ---- tensors ----

    def flats(self, group: Group) -> list[Flat]:
        """Return the tensors that ZeRO makes of a group: one, at stage 3 one for each sub-group."""
        if self.stage < 3:
            return [self._cut_together(group)]
        return [_cut_each(members, group) for members in self._sub_groups(group)]

    def _cut_together(self, group: Group) -> Flat:
        members = group.members
        if self._zero_option("round_robin_gradients"):
            members = tuple(each for first in range(group.num_parts) for each in members[first :: group.num_parts])
        gaps = self._gaps(members)
        numel = sum(member.numel for member in members) + sum(gaps)
        step = group.num_parts * _PART_ALIGNMENT_NUMEL
        part_numel = -(-numel // step) * step // group.num_parts
        owned = range(group.part * part_numel, (group.part + 1) * part_numel)
        pieces, first = [], 0
        for member, gap in zip(members, gaps, strict=True):
            start, stop = (min(max(place - first, 0), member.numel) for place in (owned.start, owned.stop))
            if start < stop:
                pieces.append(Piece(member, range(start, stop), first + start - owned.start))
            first += member.numel + gap
        lean_numel = min(max(numel - owned.start, 0), part_numel)
        return Flat(members, part_numel, lean_numel, tuple(pieces), gaps)

    def _gaps(self, members: Sequence[Member]) -> tuple[int, ...]:
        if not self._zero_option("parameter_alignment"):
            return (0,) * len(members)
        dtype = self.source.params[members[0].stored].dtype
        numel = max(1, _PARAM_ALIGNMENT_BYTES // (2 if dtype in HALVES else 4))
        gaps, first = [], 0
        for member in members[:-1]:
            first += member.numel
            gaps.append(-first % numel)
            first += gaps[-1]
        return (*gaps, 0)

    def _sub_groups(self, group: Group) -> Iterator[tuple[Member, ...]]:
        limit = self._zero_option("sub_group_size")
        limit = limit if type(limit) is int and limit >= 0 else _SUB_GROUP_NUMEL
        found: list[Member] = []
        for member in group.members:
            found.append(member)
            if sum(-(-each.numel // group.num_parts) for each in found) >= limit:
                yield tuple(found)
                found = []
        if found:
            yield tuple(found)

    def _zero_option(self, key: str) -> Any:
        section = self.source.state.config.get("zero_optimization")
        return section.get(key) if isinstance(section, Mapping) else None


def whole(member: Member) -> Flat:
    """Return a tensor that has one parameter, as without ZeRO."""
    return joined((member,))


def joined(members: Sequence[Member]) -> Flat:
    """Return a tensor that has parameters one after another."""
    pieces, first = [], 0
    for member in members:
        pieces.append(Piece(member, range(member.numel), first))
        first += member.numel
    return Flat(tuple(members), first, first, tuple(pieces))


def _cut_each(members: tuple[Member, ...], group: Group) -> Flat:
    pieces, at = [], 0
    for member in members:
        part_numel = -(-member.numel // group.num_parts)
        elements = range(min(group.part * part_numel, member.numel), min((group.part + 1) * part_numel, member.numel))
        if elements:
            pieces.append(Piece(member, elements, at))
        at += part_numel
    return Flat(members, at, at, tuple(pieces))


def _in_order(names: Iterable[str], known: Mapping[str, StoredParam]) -> list[str]:
    """Return names once each, the experts of a layer by number where the first of them stands."""
    found = [name for name in dict.fromkeys(names) if name in known]
    layers: dict[str, int] = {}
    rests: dict[tuple[str, str], int] = {}
    keys: dict[str, tuple[int, int, int]] = {}
    for place, name in enumerate(found):
        expert = Expert.of(name)
        if expert is None:
            keys[name] = place, 0, 0
            continue
        first = layers.setdefault(expert.layer, place)
        keys[name] = first, expert.number, rests.setdefault((expert.layer, expert.rest), place)
    return sorted(found, key=keys.__getitem__)
