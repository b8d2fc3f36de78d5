"""Form units from a model: repeated blocks first, everything else module by module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from launcher.comm.mesh import ParallelMesh
from launcher.zero.home import NO_DISKS, Disks, Homes
from launcher.zero.layout import (
    UnitLayout,
    join_small,
    layout_unit,
    min_unit_numel,
    split_by_size,
)
from launcher.zero.leaves import external_parameters, is_leaf, is_tile
from launcher.zero.parameters import home_of
from launcher.zero.stages import ParameterPolicy, Place, ZeroPolicy
from launcher.zero.unit import FlatUnit, UnitMembers

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass
class _Run:
    """Parameters in registration order that are read by the same modules."""

    anchors: list[nn.Module]
    is_trained: bool
    is_persistent: bool
    named: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(full_numel(param) for _, param in self.named)


def full_numel(param: nn.Parameter) -> int:
    """Return the elements of a parameter, also of one that `zero.Init` has sharded."""
    return int(getattr(param, "ds_numel", param.numel()))


def build_units(
    model: nn.Module,
    group_of: dict[nn.Parameter, int],
    policy: ZeroPolicy,
    mesh: ParallelMesh,
    disks: Disks = NO_DISKS,
) -> list[FlatUnit]:
    """Move the parameters of `model` into units, in forward order as registered.

    Trained ones always; others where parameters are sharded. group_of: the optimizer group of each parameter that is
    trained. Parameters must have the policy's dtype and the mesh's device. Every
    rank must call it with the same model.
    """
    units: list[FlatUnit] = []
    homes = Homes(policy.offload, disks, sum(full_numel(param) for param in group_of))
    for run in _runs(model, set(group_of), policy):
        numels = [full_numel(param) for _, param in run.named]
        for part in split_by_size(numels, policy.max_unit_numel):
            named = run.named[part.start : part.stop]
            params = [param for _, param in named]
            groups = [group_of[param] for param in params] if run.is_trained else []
            members = UnitMembers([name for name, _ in named], params, run.anchors, groups, run.is_persistent)
            layout = layout_unit(
                numels[part.start : part.stop], groups or [0] * len(params), mesh.shard.world_size, mesh.num_copies
            )
            unit = _adopt(members, layout, policy, mesh, homes)
            unit.index = len(units)
            units.append(unit)
    return units


def _adopt(members: UnitMembers, layout: UnitLayout, policy: ZeroPolicy, mesh: ParallelMesh, homes: Homes) -> FlatUnit:
    """Build a unit; parameters that `zero.Init` has sharded are whole while it takes their values over."""
    before = [home for home in map(home_of, members.params) if home is not None]
    for home in before:
        home.start_gather()
    for home in before:
        home.wait()
    unit = FlatUnit(members, layout, policy, mesh, homes)
    for home in before:
        home.abandon()
    del before
    mesh.shard.buffers.note_freed(sum(slot.numel for slot in layout.slots))
    return unit


def _runs(model: nn.Module, trained: set[nn.Parameter], policy: ZeroPolicy) -> list[_Run]:
    """Return the parameters that become units, by the modules that read them."""
    shards_parameters = policy.stage.shards_parameters
    names = {
        param: name
        for name, param in model.named_parameters()
        if param in trained or (shards_parameters and param.is_floating_point())
    }
    persistent = _persistent(names, policy.parameters) if shards_parameters else set()
    readers: dict[nn.Parameter, list[nn.Module]] = {param: [] for param in names}
    for home, modules in _homes(model, policy):
        for module in modules:
            for param in (*module.parameters(recurse=False), *external_parameters(module)):
                if param in readers and home not in readers[param]:
                    readers[param].append(home)
    runs: dict[tuple[object, ...], _Run] = {}
    for param, name in names.items():
        anchors = [model] if param in persistent else readers[param]
        key = (param in persistent, param in trained, *map(id, anchors))
        run = runs.setdefault(key, _Run(anchors, param in trained, param in persistent))
        run.named.append((name, param))
    return _joined(list(runs.values()), policy)


def _persistent(names: dict[nn.Parameter, str], policy: ParameterPolicy) -> set[nn.Parameter]:
    """Return the parameters small enough to stay whole."""
    chosen, total = set(), 0
    for param in names:
        numel = full_numel(param)
        if numel < policy.persistence_threshold and total + numel <= policy.model_persistence_threshold:
            chosen.add(param)
            total += numel
    return chosen


def _joined(runs: list[_Run], policy: ZeroPolicy) -> list[_Run]:
    """Join small neighbours."""
    joined: list[_Run] = []
    offloads = policy.offload.optimizer is not Place.DEVICE
    min_numel = min_unit_numel(shards_params=policy.stage.shards_parameters, offloads_optimizer=offloads)
    for part in join_small([run.numel for run in runs], min_numel, policy.max_unit_numel):
        together = runs[part.start : part.stop]
        anchors = dict.fromkeys(anchor for run in together for anchor in run.anchors)
        named = [entry for run in together for entry in run.named]
        joined.append(_Run(list(anchors), together[0].is_trained, together[0].is_persistent, named))
    return joined


# ---- which module's forward reads which modules' parameters ----


def _homes(model: nn.Module, policy: ZeroPolicy) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield modules whose forward a unit is tied to, each with the modules whose own parameters it covers."""
    blocks = dict.fromkeys(_blocks(model))
    inside = {module for block in blocks for module in block.modules()}
    for module in model.modules():
        if module in blocks:
            yield from _split(module, policy)
        elif module not in inside:
            yield module, [module]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the items of the outermost lists of modules, and modules that are marked as leaves."""
    if is_leaf(module):
        yield module
    elif isinstance(module, _LISTS) and len(module) > 1:
        yield from _items(module)
    else:
        for child in module.children():
            yield from _blocks(child)


def _items(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the items of a list, those of lists in lists too: a list has no forward of its own to hook."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _items(child)
        else:
            yield child


def _split(module: nn.Module, policy: ZeroPolicy) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield a module whole, or where it is too large or holds tiles its parts."""
    if _stays_whole(module, policy):
        yield module, list(module.modules())
        return
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield module, [module]
    for child in module.children():
        yield from _split(child, policy)


def _stays_whole(module: nn.Module, policy: ZeroPolicy) -> bool:
    """Say whether a module with everything inside is gathered as one."""
    if is_leaf(module) or is_tile(module) or not any(True for _ in module.children()):
        return True
    if any(is_tile(part) for part in module.modules()):
        return False
    numel = sum(full_numel(param) for param in module.parameters())
    return numel <= _largest_block(policy) or _is_fine_grained(module, policy)


def _largest_block(policy: ZeroPolicy) -> int:
    """Return how many elements may be gathered at once; less than a fetch ahead would leave nothing to overlap."""
    if not policy.stage.shards_parameters or policy.parameters.prefetch_numel == 0:
        return policy.max_unit_numel
    return min(policy.max_unit_numel, policy.parameters.prefetch_numel)


def _is_fine_grained(module: nn.Module, policy: ZeroPolicy) -> bool:
    """Say whether a module has so many small parts that fetching each would cost more than fetching all."""
    num_parts = sum(1 for part in module.modules() if any(True for _ in part.parameters(recurse=False)))
    numel = sum(full_numel(param) for param in module.parameters())
    return num_parts > 1 and numel / num_parts < policy.parameters.granularity_threshold
