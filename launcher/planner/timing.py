"""Seconds of one optimizer step of one rank: the schedule that the engine runs, with a machine's figures.

A step is m micro-batches, each a forward and a backward over the rank's units. At stage 3 each unit is gathered before
it is used, at most so far ahead as the policy says, and reduced when its backward has passed; below, units are reduced
as backward completes them, of the last micro-batch alone at stages 0 and 1. Then come the norm, the update and, at
stages 1 and 2, the gather of what was updated. On a GPU one stream computes and one communicates; on a CPU both take
the same cores, so their seconds add up. Pipelines repeat the slowest stage's micro-batch and are idle for what
`sharding.pipeline` says of the schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.config.policies import Place
from launcher.planner.computing import Computation, Groups, RankModel
from launcher.planner.hardware import Hardware
from launcher.planner.memory import REDUCING_UNITS, Setting
from launcher.planner.rehearsal import DeviceWork

PARTS = COMPUTE, KERNELS, GATHER, REDUCE, MODEL, BUBBLE, TRANSFER, UPDATE = (
    "compute", "kernels", "gather", "reduce", "model parallel", "bubble", "transfer", "update",
)  # fmt: skip


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by what the rank waits for or does."""

    parts: Mapping[str, float] = field(default_factory=dict)  # that are not hidden behind another

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """What takes most beside computing, if it takes much; else that."""
        others = {name: each for name, each in self.parts.items() if name != COMPUTE}
        name = max(others, key=lambda each: others[each], default=COMPUTE)
        return name if others.get(name, 0.0) > 0.2 * self.seconds else COMPUTE


@dataclass(frozen=True)
class _Unit:
    """Seconds of one unit in a micro-batch."""

    numel: int
    forward_s: float
    backward_s: float
    gather_s: float = 0.0  # before forward
    regather_s: float = 0.0  # before backward; 0: it was kept
    reduce_s: float = 0.0


def step_time(
    rank: RankModel,
    computation: Computation,
    setting: Setting,
    hardware: Hardware,
    gpus_per_node: int,
    num_micro_batches: int,
) -> StepTime:
    """Return the seconds of one step of a rank."""
    groups = Groups.of(setting, gpus_per_node)
    computes = [_device_s(each, setting, hardware) for each in (computation.forward, computation.backward)]
    kernels_s = (computation.forward.num_kernels + computation.backward.num_kernels) * hardware.kernel_s
    if not hardware.is_cpu:  # the host launches ahead of the device
        kernels_s = max(0.0, kernels_s - sum(computes))
    parts = dict.fromkeys(PARTS, 0.0)
    parts[COMPUTE] = num_micro_batches * sum(computes)
    parts[KERNELS] = num_micro_batches * kernels_s
    exchange_s = sum(
        each.times * hardware.collective_s(each.kind, each.num_bytes, each.num_ranks, each.ranks_per_node)
        for each in computation.exchanges
    )
    parts[MODEL] = num_micro_batches * exchange_s
    busy_s = [(each + kernels_s * each / (sum(computes) or 1.0)) for each in computes]
    for is_first, reduces, count in _kinds(setting, num_micro_batches):
        units = _units(rank, setting, hardware, groups, busy_s, num_micro_batches, is_first=is_first, reduces=reduces)
        takes_turns = hardware.is_cpu or not setting.policy.overlap_comm
        gather_s, reduce_s = _added(units) if takes_turns else _waited(units, setting)
        parts[GATHER] += count * gather_s
        parts[REDUCE] += count * reduce_s
    own = setting.policy.mesh.shard_ranks(setting.sizes.num_replicas) if setting.stage >= 1 else 1
    parts[TRANSFER] = _transfers(rank, setting, hardware, own, num_micro_batches)
    parts[UPDATE] = _update(rank, setting, hardware, own, num_micro_batches)
    parts[BUBBLE] = _bubble(parts, computation, setting, hardware, gpus_per_node, num_micro_batches)
    if hardware.learnt is not None:
        parts = {name: hardware.learnt.of(name) * seconds for name, seconds in parts.items()}
    return StepTime({name: seconds for name, seconds in parts.items() if seconds > 0})


def _device_s(work: DeviceWork, setting: Setting, hardware: Hardware) -> float:
    """Return how long a device takes: products by what bounds them, all else by its memory.

    Williams et al. 2009, "Roofline: an insightful visual performance model", Communications of the ACM 52 (4).
    """
    flops = hardware.matmul_flops[setting.policy.precision.compute]
    products_s = max(work.flops / flops, work.product_bytes / hardware.memory_bytes_per_s)
    return products_s + work.moved_bytes / hardware.memory_bytes_per_s


def _kinds(setting: Setting, num_micro_batches: int) -> list[tuple[bool, bool, int]]:
    """Return the kinds of micro-batches of a step, whether first and whether reduced, with how many there are."""
    always = setting.policy.stage.shards_gradients
    if num_micro_batches == 1:
        return [(True, True, 1)]
    return [(True, always, 1), (False, always, num_micro_batches - 2), (False, True, 1)]


def _units(
    rank: RankModel,
    setting: Setting,
    hardware: Hardware,
    groups: Groups,
    busy_s: Sequence[float],
    num_micro_batches: int,
    *,
    is_first: bool,
    reduces: bool,
) -> list[_Unit]:
    """Return the units in the order of forward, with what they compute and communicate in one micro-batch."""
    numels, element, stage = rank.unit_numels, setting.element, setting.stage
    total = sum(numels) or 1
    kept = _kept_from(numels, setting)
    # Below stage 2 the sum of several micro-batches is sent, in its own type; else what autograd has made.
    sent = element.grad if num_micro_batches > 1 and stage <= 1 else element.param
    kind = "all_reduce" if stage == 0 else "reduce_scatter"

    @functools.cache  # most units are alike
    def collectives_s(numel: int) -> tuple[float, float, float]:
        gather_s = regather_s = reduce_s = 0.0
        if stage == 3:
            from_host_s = _from_host_s(setting, hardware, element.param * numel / groups.shard[0])
            gather_s = from_host_s + hardware.collective_s("all_gather", element.gathered * numel, *groups.shard)
            regather_s = from_host_s + hardware.collective_s("all_gather", element.gathered * numel, *groups.second)
        elif stage >= 1 and is_first:  # what the step before has updated
            gather_s = hardware.collective_s("all_gather", element.param * numel, *groups.shard)
        if reduces:
            reduce_s = hardware.collective_s(kind, sent * numel, *groups.shard)
            part = numel / groups.shard[0]
            reduce_s += hardware.collective_s("all_reduce", element.grad * part, *groups.copies)
        return gather_s, regather_s, reduce_s

    found = []
    for index, numel in enumerate(numels):
        gather_s, regather_s, reduce_s = collectives_s(numel)
        share = numel / total
        if index >= kept:
            regather_s = 0.0
        found.append(_Unit(numel, busy_s[0] * share, busy_s[1] * share, gather_s, regather_s, reduce_s))
    return found


def _kept_from(numels: Sequence[int], setting: Setting) -> int:
    """Return the first unit that stays gathered from forward to backward: see `zero.schedule`."""
    policy, after = setting.policy.parameters, 0
    for index in range(len(numels) - 1, -1, -1):
        if 2 * after > policy.max_reuse_distance or after + numels[index] > policy.max_live_numel:
            return index + 1
        after += numels[index]
    return 0


def _added(units: Sequence[_Unit]) -> tuple[float, float]:
    """Return the seconds of gathers and reductions that take turns with computing."""
    return sum(each.gather_s + each.regather_s for each in units), sum(each.reduce_s for each in units)


def _waited(units: Sequence[_Unit], setting: Setting) -> tuple[float, float]:
    """Return for how long computing waits for gathers, and for reductions, that run beside it in one order."""
    ahead = len(units)  # how many units are fetched before they are used
    if setting.stage == 3:
        prefetch_numel = setting.policy.parameters.prefetch_numel
        ahead = 0 if prefetch_numel == 0 else 1 + prefetch_numel // max((unit.numel for unit in units), default=1)
    compute_s = link_s = gather_wait_s = 0.0
    begun: list[float] = []

    def may_begin(index: int) -> float:
        """Return when the gather of the unit that is used next may begin."""
        return compute_s if ahead == 0 else begun[index - ahead] if index >= ahead else 0.0

    for index, unit in enumerate(units):
        if unit.gather_s:
            link_s = max(link_s, may_begin(index)) + unit.gather_s
            gather_wait_s += max(0.0, link_s - compute_s)
            compute_s = max(compute_s, link_s)
        begun.append(compute_s)
        compute_s += unit.forward_s
    reduced: list[float] = []
    reduce_wait_s = 0.0
    for index, unit in enumerate(reversed(units), start=len(units)):
        if unit.regather_s:
            link_s = max(link_s, may_begin(index)) + unit.regather_s
            gather_wait_s += max(0.0, link_s - compute_s)
            compute_s = max(compute_s, link_s)
        if len(reduced) >= REDUCING_UNITS:
            reduce_wait_s += max(0.0, reduced[-REDUCING_UNITS] - compute_s)
            compute_s = max(compute_s, reduced[-REDUCING_UNITS])
        begun.append(compute_s)
        compute_s += unit.backward_s
        if unit.reduce_s:
            link_s = max(link_s, compute_s) + unit.reduce_s
            reduced.append(link_s)
    return gather_wait_s, reduce_wait_s + max(0.0, (reduced or [0.0])[-1] - compute_s)


def _from_host_s(setting: Setting, hardware: Hardware, num_bytes: float) -> float:
    """Return the seconds until a shard of parameters is on the device."""
    offload = setting.policy.offload
    if offload.params is Place.DEVICE:
        return 0.0
    disk_s = num_bytes / hardware.disk_bytes_per_s if offload.params is Place.DISK else 0.0
    return disk_s + num_bytes / (hardware.to_device_bytes_per_s or hardware.memory_bytes_per_s)


def _transfers(rank: RankModel, setting: Setting, hardware: Hardware, num_owners: int, num_micro_batches: int) -> float:
    """Return the seconds in which gradients go to the host and parameters come back, where they are not hidden.

    Gradients leave while backward computes, parameters return while the next unit is updated: what is left is one unit
    of each, and on a CPU all of it.
    """
    if setting.policy.offload.optimizer is Place.DEVICE:
        return 0.0
    owned, element = rank.num_trainable / num_owners, setting.element
    times, first = 1, element.grad
    if setting.stage >= 2:
        times = num_micro_batches
        # What NCCL has summed in 16 bits: see [Note: 16-bit sums in host memory] of `zero.owned_gradient`.
        first = element.grad if hardware.is_cpu else element.param
    rate = hardware.to_device_bytes_per_s or hardware.memory_bytes_per_s
    total_s = (first + (times - 1) * element.grad + element.param) * owned / rate
    if hardware.is_cpu:
        return total_s
    return total_s / max(1, len(rank.unit_numels))


def _update(rank: RankModel, setting: Setting, hardware: Hardware, num_owners: int, num_micro_batches: int) -> float:
    """Return the seconds of the norm and the update, of sums over micro-batches, and of states on disk."""
    element, offload = setting.element, setting.policy.offload
    owned = rank.num_trainable / num_owners
    states = element.state * rank.num_states
    read_and_written = 2 * states + element.grad + (2 * element.master + element.param if element.master else 8)
    is_here = offload.optimizer is Place.DEVICE
    rate = hardware.memory_bytes_per_s if is_here else hardware.host_memory_bytes_per_s
    update_s = (read_and_written + element.grad) * owned / rate
    # Each micro-batch adds to a sum: the whole one below stage 2, or a rank's own part.
    added = rank.num_trainable if setting.stage <= 1 else owned
    summed_rate = hardware.memory_bytes_per_s if is_here or setting.stage <= 1 else rate
    update_s += (num_micro_batches - 1) * added * (2 * element.grad + element.param) / summed_rate
    if offload.optimizer is Place.DISK:  # read, and written
        on_disk_s = 2 * (states + element.master) * owned / hardware.disk_bytes_per_s
        return max(update_s, on_disk_s)
    return update_s


def _bubble(
    parts: Mapping[str, float],
    computation: Computation,
    setting: Setting,
    hardware: Hardware,
    gpus_per_node: int,
    num_micro_batches: int,
) -> float:
    """Return for how long a pipeline rank is idle, transfers between stages included."""
    plan, sizes = setting.pipeline, setting.sizes
    if plan.num_ranks == 1:
        return 0.0
    busy_s = parts[COMPUTE] + parts[KERNELS] + parts[MODEL]
    plan = replace(plan, num_micro_batches=num_micro_batches)
    is_between = sizes.world_size // sizes.pipeline >= gpus_per_node
    transfer_s = hardware.transfer_s(computation.boundary_bytes, is_between_nodes=is_between)
    num_waited = 2 * (plan.num_stages - 1) if not hardware.is_cpu else 2 * num_micro_batches * plan.num_virtual
    return busy_s * plan.idle_fraction / (1 - plan.idle_fraction) + num_waited * transfer_s
