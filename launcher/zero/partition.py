"""Form units from a model: repeated blocks first, everything else module by module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from launcher.comm.mesh import ParallelMesh
from launcher.config.policies import Place, ZeroPolicy
from launcher.sharding.grouping import choose_small, form_units, min_unit_numel
from launcher.sharding.layout import CHUNK_ALIGNMENT_NUMEL, ParamInfo, UnitLayout, layout_unit, unsharded_numel
from launcher.zero.leaves import external_parameters, is_leaf, is_tile
from launcher.zero.marks import Mark, is_moe_param
from launcher.zero.parameters import param_info, unit_params_of
from launcher.zero.placement import NO_DISKS, Disks, Placements
from launcher.zero.states import dtype_of
from launcher.zero.unit import FlatUnit, UnitMembers

# ---- The types of torch.autocast ----
# Gathered in fp32 they would be sent with twice the bytes, and autocast would keep a 16-bit copy of each until
# backward: of the whole model, at stage 3 too. The cast before the gather gives the same bits as the one after it.
# The shards stay fp32, and so does what autocast computes in fp32: norms, embeddings, weights that something else
# reads as well.


_COMPUTES_IN_FP32: Mark[bool] = Mark("computes_in_fp32")
_CAST_MODULES = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_CAST_NAMES = ("weight", "bias")


def mark_fp32(module: nn.Module) -> None:
    """Mark a module whose forward runs without autocast."""
    _COMPUTES_IN_FP32.put(module, True)


def params_cast_by_autocast(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that only modules read which hand them to a function of autocast's 16-bit list."""
    cast: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()
    for module in model.modules():
        forward = type(module).forward
        is_cast = any(forward is kind.forward for kind in _CAST_MODULES) and not _COMPUTES_IN_FP32.own_of(module)
        for name, param in module.named_parameters(recurse=False):
            (cast if is_cast and name in _CAST_NAMES else others).add(param)
        others.update(external_parameters(module))
    return cast - others


# ---- Form units from a model ----


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass
class _Member:
    """A parameter that becomes part of a unit."""

    info: ParamInfo
    param: nn.Parameter
    modules: list[nn.Module]  # modules whose forward reads it
    is_persistent: bool = False
    is_cast: bool = False  # by autocast, before every use
    is_expert: bool = False  # other ranks have other experts in its place

    @property
    def key(self) -> tuple[object, ...]:
        """What is equal for parameters that stay together."""
        return (self.is_persistent, self.is_cast, self.info.is_trainable, self.info.dtype, *map(id, self.modules))


def build_units(
    model: nn.Module,
    group_of: dict[nn.Parameter, int],
    policy: ZeroPolicy,
    mesh: ParallelMesh,
    disks: Disks = NO_DISKS,
) -> list[FlatUnit]:
    """Move the parameters of `model` into units, in forward order as registered, with rank 0's values.

    Trained ones always; others where parameters are sharded. group_of: the optimizer group of each parameter that is
    trained. Parameters may be on any device, in any type, or shards of `zero.Init`: a unit is filled from them, sharded
    and released before the next one, so the device never holds more than two unsharded ones. Every rank must call it
    with the same model.
    """
    units: list[FlatUnit] = []
    placements = Placements(policy.offload, disks, sum(unsharded_numel(param) for param in group_of))
    for members, infos in plan_units(model, group_of, policy):
        own_mesh = (mesh.of_experts or mesh) if members.is_expert else mesh
        alignment_numel = _chunk_alignment_numel(len(infos), policy)
        layout = layout_unit(infos, own_mesh.shard.world_size, own_mesh.num_copies, alignment_numel=alignment_numel)
        unit = _build_unit(members, layout, policy, own_mesh, placements)
        unit.index = len(units)
        units.append(unit)
    return units


def _chunk_alignment_numel(num_params: int, policy: ZeroPolicy) -> int:
    """Return what the chunks of a unit are multiples of; 1 for one parameter at stage 3, as DeepSpeed shards it."""
    has_disk = Place.DISK in (policy.offload.optimizer, policy.offload.params)
    is_alone = num_params == 1 and policy.stage.shards_parameters
    return 1 if is_alone and not has_disk else CHUNK_ALIGNMENT_NUMEL


def plan_units(
    model: nn.Module, group_of: dict[nn.Parameter, int], policy: ZeroPolicy
) -> list[tuple[UnitMembers, list[ParamInfo]]]:
    """Return what each unit is going to have, in the order of `build_units`, and change nothing. No values are read."""
    found = _members(model, group_of, policy)
    offloads = policy.offload.optimizer is not Place.DEVICE
    min_numel = min_unit_numel(shards_params=policy.stage.shards_parameters, offloads_optimizer=offloads)
    numels, keys = [member.info.numel for member in found], [member.key for member in found]
    kinds = [member.is_expert for member in found]
    planned = []
    for indices in form_units(numels, keys, kinds, min_numel=min_numel, max_numel=policy.max_unit_numel):
        chosen = [found[index] for index in indices]
        modules = dict.fromkeys(module for member in chosen for module in member.modules)
        first = chosen[0]
        params = [member.param for member in chosen]
        members = UnitMembers(params, list(modules), first.is_persistent, first.is_cast, first.is_expert)
        planned.append((members, [member.info for member in chosen]))
    return planned


def _build_unit(
    members: UnitMembers, layout: UnitLayout, policy: ZeroPolicy, mesh: ParallelMesh, placements: Placements
) -> FlatUnit:
    """Build a unit; parameters that `zero.Init` has sharded are unsharded while it takes their values over."""
    built_sharded = [found for found in dict.fromkeys(map(unit_params_of, members.params)) if found is not None]
    for unit_params in built_sharded:
        unit_params.start_gather()
    for unit_params in built_sharded:
        unit_params.wait()
    unit = FlatUnit(members, layout, policy, mesh, placements)
    for unit_params in built_sharded:
        unit_params.free()
    del built_sharded
    mesh.shard.buffers.note_freed(layout.numel)
    return unit


def _members(model: nn.Module, group_of: dict[nn.Parameter, int], policy: ZeroPolicy) -> list[_Member]:
    """Return the parameters that become parts of units, each with the modules that read it."""
    shards_parameters = policy.stage.shards_parameters
    members = {
        param: _Member(param_info(name, param, dtype_of(policy.precision, param), group_of.get(param)), param, [])
        for name, param in model.named_parameters()
        if param in group_of or (shards_parameters and param.is_floating_point())
    }
    for member in members.values():
        member.is_expert = is_moe_param(member.param)
    for unit_module, covered in _unit_modules(model, policy):
        for module in covered:
            for param in (*module.parameters(recurse=False), *external_parameters(module)):
                if param in members and unit_module not in members[param].modules:
                    members[param].modules.append(unit_module)
    found = list(members.values())
    if shards_parameters:
        limits = policy.parameters.persistence_threshold, policy.parameters.model_persistence_threshold
        for index in choose_small([member.info.numel for member in found], *limits):
            found[index].modules, found[index].is_persistent = [model], True
        cast = params_cast_by_autocast(model) if policy.precision.autocast is not None else set()
        for member in found:
            member.is_cast = not member.is_persistent and member.info.dtype == "float32" and member.param in cast
    return found


# ---- which module's forward reads which modules' parameters ----


def _unit_modules(model: nn.Module, policy: ZeroPolicy) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
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
    if _is_persistent(module, policy):
        yield module, list(module.modules())
        return
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield module, [module]
    for child in module.children():
        yield from _split(child, policy)


def _is_persistent(module: nn.Module, policy: ZeroPolicy) -> bool:
    """Whether a module with everything inside is gathered as one."""
    if is_leaf(module) or is_tile(module) or not any(True for _ in module.children()):
        return True
    if any(is_tile(part) for part in module.modules()):
        return False
    numel = sum(unsharded_numel(param) for param in module.parameters())
    return numel <= _largest_block(policy) or _is_fine_grained(module, policy)


def _largest_block(policy: ZeroPolicy) -> int:
    """Return how many elements a block may have that is one unit, however many are fetched ahead."""
    if not policy.stage.shards_parameters:
        return policy.max_unit_numel
    return min(policy.max_unit_numel, policy.parameters.max_live_numel)


def _is_fine_grained(module: nn.Module, policy: ZeroPolicy) -> bool:
    """Whether a module has so many small parts that fetching each would cost more than fetching all."""
    num_parts = sum(1 for part in module.modules() if any(True for _ in part.parameters(recurse=False)))
    numel = sum(unsharded_numel(param) for param in module.parameters())
    return num_parts > 1 and numel / num_parts < policy.parameters.granularity_threshold
