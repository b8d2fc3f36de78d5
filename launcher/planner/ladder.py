"""The ladder: what needs less memory than a run that has ended for the lack of it, the least costly first, as data.

`launch` goes down it after such an end, `launch rehearse --ladder` before there is a run; `launch estimate` compares
settings of it. The order is that of the field's guides: smaller micro-batches, recomputation, higher ZeRO stages, host
memory, disk. Standard library only: the launcher needs no config, and an engine of any version says what it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

DEVICE, HOST = "device", "host"  # whose memory has ended
ON_DEVICE, ON_HOST, ON_DISK = _PLACES = ("none", "cpu", "nvme")  # the values of a config's `device` keys
EXAMPLE_NVME_PATH = "/local_nvme"  # what a config that is printed names, for its reader to replace


class Standing(NamedTuple):
    """Where model states are: the ZeRO stage, and what is offloaded to where."""

    stage: int
    optimizer: str = ON_DEVICE
    param: str = ON_DEVICE

    @property
    def depth(self) -> tuple[int, int, int]:
        """How far down it is, in each of the three ways."""
        return self.stage, _PLACES.index(self.optimizer), _PLACES.index(self.param)

    @property
    def text(self) -> str:
        """What it is called on a line."""
        return f"stage {self.stage}, optimizer {self.optimizer}, param {self.param}"


# From the quickest to the smallest, as the guides advise to go.
STANDINGS = (
    Standing(0),
    Standing(1),
    Standing(2),
    Standing(2, ON_HOST),
    Standing(3),
    Standing(3, ON_HOST),
    Standing(3, ON_HOST, ON_HOST),
    Standing(3, ON_DISK, ON_DISK),
)
# Pipeline stages divide parameters and gradients, and ZeRO the optimizer.
PIPELINE_STANDINGS = (Standing(0), Standing(1), Standing(1, ON_HOST))
# Forward alone needs parameters: whole, sharded, and kept elsewhere.
INFERENCE_STANDINGS = (
    Standing(0),
    Standing(3),
    Standing(3, ON_DEVICE, ON_HOST),
    Standing(3, ON_DEVICE, ON_DISK),
)


def standings_below(now: Standing, standings: Sequence[Standing] = STANDINGS) -> list[Standing]:
    """Return those that need less memory, the quickest first: deeper in one of the ways, less deep in none."""
    return [
        one
        for one in standings
        if one.depth != now.depth and all(a >= b for a, b in zip(one.depth, now.depth, strict=True))
    ]


def standings_above(now: Standing, standings: Sequence[Standing] = STANDINGS) -> list[Standing]:
    """Return those that need more memory, the one that needs least first: less deep in one of the ways."""
    return [
        one
        for one in reversed(standings)
        if one.depth != now.depth and all(a <= b for a, b in zip(one.depth, now.depth, strict=True))
    ]


def standing_keys(standing: Standing, nvme_path: str = EXAMPLE_NVME_PATH) -> dict[str, Any]:
    """Return the keys of an engine config that ask for a standing."""
    zero: dict[str, Any] = {"stage": standing.stage}
    for name, place in (("offload_optimizer", standing.optimizer), ("offload_param", standing.param)):
        if place != ON_DEVICE:
            zero[name] = {"device": place, **({"nvme_path": nvme_path} if place == ON_DISK else {})}
    return {"zero_optimization": zero}


# ---- what an engine says of itself ----


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Where an engine stands on the ladder, as it says when it is built."""

    device: str  # its type: "cuda", "cpu"
    stage: int
    optimizer: str = ON_DEVICE  # where its states are
    param: str = ON_DEVICE
    num_shards: int = 1  # ranks that a state is divided over
    micro_batch: int
    accumulation: int
    # A smaller micro-batch takes effect: the engine's own loader, or a script that asks for its size, follows it.
    follows_micro_batch: bool = False
    recomputes: bool = False
    can_recompute: bool = False  # it finds blocks to recompute
    trains: bool = True
    has_pipeline: bool = False
    nvme_path: str | None = None  # that the config names, of whatever
    num_params: int | None = None
    precision: str = "fp32"  # of the parameters
    optimizer_type: str | None = None  # of the config; None: a client's
    refused: tuple[str, ...] = ()  # texts of standings that do not go with its other keys, or with its optimizer

    @property
    def standing(self) -> Standing:
        """Where its model states are."""
        return Standing(self.stage, self.optimizer, self.param)

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> EngineFacts | None:
        """Return what a rank has written, None for what no engine wrote: any script can write to the file."""
        if data is None:
            return None
        values = {field.name: data.get(field.name, field.default) for field in dataclasses.fields(cls)}
        are_sound = all(_fits(values[field.name], str(field.type)) for field in dataclasses.fields(cls))
        is_known = are_sound and values["optimizer"] in _PLACES and values["param"] in _PLACES
        return cls(**values) if is_known and values["micro_batch"] > 0 and values["accumulation"] > 0 else None


_TYPES: dict[str, type] = {"str": str, "int": int, "bool": bool, "None": type(None)}


def _fits(value: object, annotation: str) -> bool:
    if annotation == "tuple[str, ...]":  # a list in JSON
        return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    return type(value) in [_TYPES[name] for name in annotation.split(" | ")]


# ---- the rungs ----


@dataclass(frozen=True)
class Rung:
    """One step down the ladder."""

    change: str  # what it changes
    patch: dict[str, Any]  # of the config as it ran; null removes a key (RFC 7396)
    evidence: str  # what of the run it acts on
    cost: str  # in time
    needs: str = ""  # what the script must do for it to take effect; "": nothing


def rungs(facts: EngineFacts, memory: str, nvme_path: str | None = None) -> list[Rung]:
    """Return what needs less of a memory than a run, the least costly first.

    memory: DEVICE or HOST. Without a GPU both are one. nvme_path: a folder on a disk, where the config names none.
    """
    path = facts.nvme_path or nvme_path
    if memory == HOST and facts.device != "cpu":  # of what is there, the engine can only move its states to disk
        found = [one for one in (_off_the_host(facts.standing),) if one != facts.standing]
        return [_standing_rung(facts, one, path) for one in found] if path is not None else []
    acting = (each(facts) for each in _ACTIVATION_RUNGS)
    first = [rung for rung in acting if rung is not None] if facts.trains else []
    standings = PIPELINE_STANDINGS if facts.has_pipeline else STANDINGS if facts.trains else INFERENCE_STANDINGS
    below = [one for one in standings if _is_below(facts, one) and _helps(facts, one) and one.text not in facts.refused]
    return first + [_standing_rung(facts, one, path) for one in below if path is not None or not _is_on_disk(one)]


def _smaller_micro_batch(facts: EngineFacts) -> Rung | None:
    """Halve the micro-batch, or less where that does not divide it: each is split into equal ones, so no step changes.

    The effective batch, micro-batch x accumulation x ranks, stays exactly what it was.
    """
    micro = facts.micro_batch
    if micro == 1:
        return None
    size = max(each for each in range(1, micro // 2 + 1) if micro % each == 0)
    accumulation = facts.accumulation * (micro // size)
    return Rung(
        change=f"micro-batch {micro} → {size}, accumulation {facts.accumulation} → {accumulation}",
        # The third size of the batch equation follows from these, on any number of ranks.
        patch={
            "train_micro_batch_size_per_gpu": size,
            "gradient_accumulation_steps": accumulation,
            "train_batch_size": None,
        },
        evidence=f"activations of {micro} samples at once",
        cost="smaller products use a device less well",
        needs="" if facts.follows_micro_batch else "take the batch size from engine.train_micro_batch_size_per_gpu()",
    )


def _recomputation(facts: EngineFacts) -> Rung | None:
    if facts.recomputes or not facts.can_recompute:
        return None
    return Rung(
        change="the blocks of the model are recomputed in backward",
        patch={"activation_checkpointing": {"blocks": True}},
        evidence="the activations of all blocks at once",
        cost="a third more computing: one more forward",
    )


_ACTIVATION_RUNGS: tuple[Callable[[EngineFacts], Rung | None], ...] = (_smaller_micro_batch, _recomputation)


def _is_below(facts: EngineFacts, standing: Standing) -> bool:
    """Whether a standing needs less memory than that of the run, for any model.

    Parameters that many ranks shard are less, with all their states, than whole ones alone: 18 bytes of each element
    divided by the ranks, in 16-bit training, against 2. Then the optimizer comes back from the host first.
    """
    is_back = (facts.standing, standing) == (Standing(2, ON_HOST), Standing(3)) and facts.num_shards > _MANY_SHARDS
    return is_back or standing in standings_below(facts.standing, [standing])


def _helps(facts: EngineFacts, standing: Standing) -> bool:
    """Whether a standing needs less of the device than that of the run, which is above it."""
    now = facts.standing
    moves = [(now.optimizer, standing.optimizer), (now.param, standing.param)]
    if facts.device == "cpu" and any(before != after == ON_HOST for before, after in moves):
        return False  # to where it is already
    return facts.num_shards > 1 or any(before != after for before, after in moves)  # one rank shards nothing


def _off_the_host(now: Standing) -> Standing:
    """Return where states are once those in host memory are on disk. Stages above 0 shard them there alike."""
    return Standing(now.stage, *(ON_DISK if place == ON_HOST else place for place in now[1:]))


def _is_on_disk(standing: Standing) -> bool:
    return ON_DISK in standing[1:]


def _standing_rung(facts: EngineFacts, to: Standing, nvme_path: str | None) -> Rung:
    now = facts.standing
    changes, evidence, costs = [], [], []
    if to.stage != now.stage:
        changes.append(f"ZeRO stage {now.stage} → {to.stage}")
        sharded = [what for stage, what in _SHARDED if now.stage < stage <= to.stage]
        evidence.append(f"every rank holds all {' and '.join(sharded)}")
        costs.append(_COST_OF_STAGE[to.stage])
    moves = (("optimizer", now.optimizer, to.optimizer), ("parameters", now.param, to.param))
    for place in (ON_HOST, ON_DISK):
        moved = [(what, before) for what, before, after in moves if before != after == place]
        if moved:
            names = " and ".join(what for what, _ in moved)
            changes.append(f"{names} → {_PLACE_NAMES[place]}")
            evidence.append(f"{names} in {_PLACE_NAMES[moved[0][1]]}")
            costs.append(_COST_OF_PLACE[place])
    keys = standing_keys(to, EXAMPLE_NVME_PATH if nvme_path is None else nvme_path)
    if now.optimizer != to.optimizer == ON_DEVICE:
        changes.append(f"optimizer → {_PLACE_NAMES[ON_DEVICE]}")
        keys["zero_optimization"]["offload_optimizer"] = {"device": ON_DEVICE}
    return Rung(", ".join(changes), keys, "; ".join(evidence), "; ".join(costs))


_MANY_SHARDS = 9
_SHARDED = ((1, "states of the optimizer"), (2, "gradients"), (3, "parameters"))
_COST_OF_STAGE = {
    1: "none: as much is sent",
    2: "with accumulation, gradients are sent after each micro-batch",
    3: "half more is sent: parameters are gathered for forward and backward",
}
_PLACE_NAMES = {ON_DEVICE: "device memory", ON_HOST: "host memory", ON_DISK: "disk"}
_COST_OF_PLACE = {
    ON_HOST: "transfers between device and host in each step",
    ON_DISK: "the disk is read and written in each step",
}


# ---- after the end of a run ----


@dataclass(frozen=True)
class Advice:
    """What to do about a run that has ended for lack of memory."""

    memory: str  # DEVICE or HOST
    rung: Rung | None = None  # the next one that takes effect by itself
    skipped: Rung | None = None  # one before it, which the script has to follow
    end: str = ""  # why there is no next one
    freed_bytes: int | None = None  # of the device, on each rank, where that can be predicted

    @property
    def has_ladder(self) -> bool:
        """Whether an engine was there, whose config can be changed."""
        return bool(self.rung is not None or self.end)


def advice_for(memory: str, facts: EngineFacts | None, tried: Sequence[Mapping[str, Any]] = ()) -> Advice:
    """Return the next rung for a run, or why there is none. facts: of the rank that died; None: it built no engine.

    tried: patches of the rungs before. One that would come again has had no effect.
    """
    if facts is None:
        return Advice(memory)
    found = rungs(facts, memory)
    skipped = next((rung for rung in found if rung.needs), None)
    rung = next((rung for rung in found if not rung.needs), None)
    if rung is not None and rung.patch in tried:
        end = f"the ladder ends here: its last rung had no effect ({rung.change}), the script decides that itself"
        return Advice(memory, None, skipped, end)
    return Advice(memory, rung, skipped, "" if rung is not None else _end(facts, memory))


def _end(facts: EngineFacts, memory: str) -> str:
    """Return the sentence for the end of the ladder."""
    with_disk = rungs(facts, memory, EXAMPLE_NVME_PATH)
    if any(not rung.needs for rung in with_disk):
        return (
            "the ladder ends before the disk: that rung needs a local folder,"
            " zero_optimization.offload_optimizer.nvme_path of the config"
        )
    if memory == HOST and facts.device != "cpu":
        return "no rung helps: the engine keeps nothing in host memory that a disk could hold; fewer ranks on a host do"
    return "the ladder ends here: more ranks, or more memory for each"


def combined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patch that does what two do one after the other."""
    merged = dict(first)
    for key, value in second.items():
        is_section = isinstance(value, Mapping) and isinstance(first.get(key), Mapping)
        merged[key] = combined(first[key], value) if is_section else value
    return merged
