"""Form units from a model: repeated blocks first, everything else beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from launcher.comm.groups import DataParallelGroup
from launcher.zero.layout import layout_unit, split_by_size
from launcher.zero.stages import ZeroPolicy
from launcher.zero.unit import FlatUnit, UnitMembers

# Neighbouring blocks are joined up to this size: a collective has a fixed cost of about 0.3 ms on gloo.
MIN_UNIT_NUMEL = 2**18


@dataclass
class _Run:
    """Parameters in registration order that are read by the same modules."""

    anchors: list[nn.Module]
    named: list[tuple[str, nn.Parameter]]

    @property
    def numel(self) -> int:
        return sum(param.numel() for _, param in self.named)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the items of the outermost lists of modules."""
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
        yield from module
        return
    for child in module.children():
        yield from _blocks(child)


def _runs(model: nn.Module) -> list[_Run]:
    names = {param: name for name, param in model.named_parameters() if param.requires_grad}
    owners: dict[nn.Parameter, set[int]] = {param: set() for param in names}
    blocks = list(_blocks(model))
    for number, block in enumerate(blocks):
        for param in block.parameters():
            if param in owners:
                owners[param].add(number)
    # A parameter that two blocks share, or a block and the rest (tied weights), must be there for both.
    inside_one = {param: next(iter(found)) for param, found in owners.items() if len(found) == 1}
    for module in model.modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        for param in module.parameters(recurse=False):
            owner = inside_one.get(param)
            if owner is not None and not any(module is inner for inner in blocks[owner].modules()):
                del inside_one[param]
    rest = _Run([model], [(name, param) for param, name in names.items() if param not in inside_one])
    runs = [rest] if rest.named else []
    for number, block in enumerate(blocks):
        named = [(name, param) for param, name in names.items() if inside_one.get(param) == number]
        last = runs[-1] if runs and runs[-1] is not rest else None
        if last is not None and last.numel + sum(p.numel() for _, p in named) <= MIN_UNIT_NUMEL:
            last.anchors.append(block)
            last.named += named
        elif named:
            runs.append(_Run([block], named))
    return runs


def build_units(
    model: nn.Module,
    group_of: dict[nn.Parameter, int],
    policy: ZeroPolicy,
    group: DataParallelGroup,
) -> list[FlatUnit]:
    """Move the trainable parameters of `model` into units, in forward order as registered.

    group_of: the optimizer group of each trainable parameter. Parameters must have the policy's dtype and the
    group's device. Every rank must call it with the same model.
    """
    units = []
    for run in _runs(model):
        numels = [param.numel() for _, param in run.named]
        for part in split_by_size(numels, policy.max_unit_numel):
            named = run.named[part.start : part.stop]
            params = [param for _, param in named]
            groups = [group_of[param] for param in params]
            members = UnitMembers([name for name, _ in named], params, run.anchors, groups)
            layout = layout_unit([param.numel() for param in params], groups, group.world_size)
            units.append(FlatUnit(members, layout, policy, group))
    return units
