"""What a rank knows of the experts of one mixture: its own ones, and what the others are called.

A mixture holds its experts as modules in a list, or stacked in parameters. Of a list each rank keeps its own modules
under their numbers in the whole model, and None in place of the others, which `remote` has without values: names,
shapes and state dicts of the whole model come from there. Of stacked parameters each rank keeps its part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from launcher.comm.groups import RankGroup
from launcher.zero.marks import Mark


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """How the experts of one container are sharded over the ranks of a group."""

    group: RankGroup
    num_experts: int  # of all ranks
    remote: dict[int, nn.Module] = field(default_factory=dict)  # of a list: by number, without values

    @property
    def num_local(self) -> int:
        """How many experts each rank has."""
        return self.num_experts // self.group.world_size

    @property
    def local(self) -> range:
        """The numbers of this rank's experts."""
        return range(self.group.rank * self.num_local, (self.group.rank + 1) * self.num_local)

    def __deepcopy__(self, _: Any) -> ExpertPlacement:
        return self  # a process group has no copy


_PLACEMENT: Mark[ExpertPlacement] = Mark("expert_placement")


def placement_of(container: nn.Module) -> ExpertPlacement | None:
    """Return how the experts in a module are sharded; None for one whose experts this rank has all."""
    return _PLACEMENT.of(container)


def set_placement(container: nn.Module, placement: ExpertPlacement) -> None:
    """Record how the experts in a module are sharded."""
    _PLACEMENT.put(container, placement)


def local_experts(experts: nn.ModuleList) -> list[nn.Module]:
    """Return the experts of a list that this rank has, in the order of their numbers."""
    return [module for module in experts._modules.values() if module is not None]


def sharded_containers(model: nn.Module) -> dict[str, tuple[nn.Module, ExpertPlacement]]:
    """Return the modules of a model whose experts several ranks have, by name."""
    found = ((name, module, placement_of(module)) for name, module in model.named_modules())
    return {
        name: (module, placement)
        for name, module, placement in found
        if placement is not None and placement.group.world_size > 1
    }


def expert_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers of this rank's experts of containers that several ranks share, in the order of the model."""
    return [buffer for module, _ in sharded_containers(model).values() for buffer in module.buffers()]


@contextlib.contextmanager
def with_remote_experts(model: nn.Module) -> Iterator[None]:
    """Have lists of experts hold the modules of all ranks within the block: those of others have no values."""
    lists = [(module, placement) for module, placement in sharded_containers(model).values() if placement.remote]
    for module, placement in lists:
        module._modules.update({str(number): expert for number, expert in placement.remote.items()})
    try:
        yield
    finally:
        for module, placement in lists:
            module._modules.update(dict.fromkeys(map(str, placement.remote)))


def remote_expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that only other ranks have, by name in the whole model, without values."""
    return {
        f"{name}.{number}.{own}" if name else f"{number}.{own}": param
        for name, (_, placement) in sharded_containers(model).items()
        for number, expert in placement.remote.items()
        for own, param in expert.named_parameters()
    }


def remote_expert_names(model: nn.Module) -> set[str]:
    """Return the names of parameters and buffers that only other ranks have, in the whole model."""
    return {
        f"{name}.{number}.{own}" if name else f"{number}.{own}"
        for name, (_, placement) in sharded_containers(model).items()
        for number, expert in placement.remote.items()
        for own, _ in (*expert.named_parameters(), *expert.named_buffers())
    }


@torch.no_grad()
def values_of_other_ranks(tensor: Tensor, placement: ExpertPlacement) -> list[Tensor]:
    """Return what each rank of the group has in place of a parameter or buffer of this rank's expert, in rank order.

    The parameter must be unsharded. Every rank of the group must call it, for the expert at the same place.
    """
    own = tensor.detach().to(placement.group.device).contiguous().view(-1)
    flat = own.new_empty(placement.group.world_size * own.numel())
    placement.group.communicator.all_gather(flat, own).wait()
    return [part.view(tensor.shape) for part in flat.chunk(placement.group.world_size)]


@dataclass(frozen=True)
class Counterpart:
    """A parameter or buffer of an expert in a list, and what the experts of other ranks at its place have."""

    tensor: Tensor
    placement: ExpertPlacement
    names: list[str]  # in the whole model, by rank


def counterparts(model: nn.Module) -> list[Counterpart]:
    """Return the parameters and buffers of this rank's experts in lists, in an order that all ranks have alike."""
    found = []
    for name, (module, placement) in sharded_containers(model).items():
        for place, number in enumerate(placement.local if placement.remote else ()):
            expert = module._modules[str(number)]
            assert expert is not None
            numbers = range(place, placement.num_experts, placement.num_local)
            for own, tensor in (*expert.named_parameters(), *expert.named_buffers()):
                found.append(Counterpart(tensor, placement, [f"{name}.{other}.{own}" for other in numbers]))
    return found
