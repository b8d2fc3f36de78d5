"""A flat unit: the parameters that communicate together, with their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.comm.mesh import ParallelMesh
from launcher.comm.streams import Side
from launcher.config.policies import Place, ZeroPolicy
from launcher.optim.api import ParamShard, UnitOptimizer
from launcher.sharding.layout import ParamSlot, UnitLayout
from launcher.zero.described import describe
from launcher.zero.disk import UnitSwap
from launcher.zero.gradients import UnitGradients
from launcher.zero.marks import Mark
from launcher.zero.parameters import ShardSpec, UnitParameters, any_thread, unit_params_of
from launcher.zero.placement import ON_DEVICE, Placements
from launcher.zero.states import TORCH_DTYPES


@dataclass
class UnitMembers:
    """The parameters of a unit, by slot, and the modules that read them."""

    params: list[nn.Parameter]
    modules: list[nn.Module]  # modules whose forward reads the unit's parameters
    is_persistent: bool = False  # stays unsharded at every stage
    is_cast: bool = False  # autocast casts the parameters before every use
    is_expert: bool = False  # parameters of experts: other ranks may have others in their place


class FlatUnit:
    """One unit on this rank. `owned` is what it updates: the full buffer at stage 0, one chunk from stage 1 on."""

    def __init__(
        self,
        members: UnitMembers,
        layout: UnitLayout,
        policy: ZeroPolicy,
        mesh: ParallelMesh,
        placements: Placements,
    ) -> None:
        """placements: asked where the unit is kept."""
        self.members = members
        self.layout = layout
        self.index = -1  # position among the engine's units
        self.mesh = mesh
        self.group = group = mesh.shard
        alone = group.process_group is None
        owned = (
            range(layout.padded_numel) if alone or not policy.stage.shards_optimizer else layout.chunk_range(group.rank)
        )
        self.owned = owned
        rests_away = policy.offload.params is not Place.DEVICE
        is_sharded = policy.stage.shards_parameters and not members.is_persistent and (rests_away or not alone)
        shard_placement = placements.of_shard(len(owned)) if is_sharded else ON_DEVICE
        dtype = getattr(torch, layout.slots[0].param.dtype)  # of all of them
        is_sharded_before = all(unit_params_of(param) is not None for param in members.params)
        # What a sharded unit is gathered in under torch.autocast; None: in its own type.
        autocast = policy.precision.autocast if is_sharded and members.is_cast else None
        cast_to = None if autocast is None else TORCH_DTYPES[autocast]
        self.gathered_dtype = gathered = None if cast_to == dtype else cast_to
        spec = ShardSpec(dtype, owned, is_sharded, shard_placement, self.label, is_sharded_before, gathered)
        self.params = UnitParameters(members.params, layout, mesh, spec)
        self.params.register()
        for param in members.params:
            _UNIT.put(param, self)
        self.params.refuses_writes = is_sharded
        self.params.release()
        self.shards: list[ParamShard] = []  # of what is trained, in layout order; optimizers keep their states there
        self._resident_states = policy.offload.resident_states
        self.swap: UnitSwap | None = None  # None: what the optimizer works on is always in memory
        self.grads: UnitGradients | None = None  # None: every parameter is frozen
        self.complete_sums: Callable[[], None] = lambda: None  # of the gradients of all units; collective
        self.is_read = False  # a module whose forward runs reads it, and has waited for it
        if layout.is_trainable:
            placement = placements.of_optimizer(layout.numel)
            master = self.params.keep_master(policy.precision, placement, is_apart=policy.offload.updates_beside)
            self.grads = UnitGradients(
                members.params, layout, policy, mesh, owned, placement=placement, label=self.label
            )
            if placement.disk is not None and master is not None and self.grads.swap is not None:
                self.swap = UnitSwap(placement.disk, master, self.grads.swap)
        if policy.has_ds_attributes:
            describe(self.params)  # at once: `ds_tensor` of `zero.Init` keeps the shard alive that this unit has copied

    def sync_external_writes(self) -> None:
        """Take over what was written into whole parameters from outside since the last step: a clamp, an average."""
        params = self.params
        is_apart = params.master is not params.shard
        is_written = params.first_written() is not None  # also through a list of parameters from before the last step
        if not self.is_sharded and (params.may_be_edited or is_written) and is_apart and not self._is_behind:
            params.is_touched |= is_written  # ranks compare their values in the step
            params.wait()
            with self.in_memory():
                params.sync_external_writes()

    def find_lost(self) -> EngineError | None:
        """Return the error of what the next step would lose; None where it loses nothing.

        That is a write into a sharded parameter, a parameter with other memory, and a sharded one that is open: a block
        that ends after the update would write the values of before back.
        """
        params = self.params
        if self.is_sharded and params.num_blocks:
            return EngineError(
                f"engine.step() was called within a block of launcher.zero.GatheredParameters that has {self.label}",
                hint="end the block before engine.step()",
            )
        slot = params.first_elsewhere()
        if slot is not None:
            whose = f"the parameter {slot.name}"
            return self._lost(whose, "was given other memory after initialize() (param.data = ...)")
        if not self.is_sharded:
            params.wait()
            if params.written_in_flight is not None:
                whose = f"the parameter {params.written_in_flight.name}"
                return self._lost(whose, "was written before the updates of other ranks had arrived in it")
            return self.find_lost_to_update()
        slot = params.first_written()
        if slot is None:
            return None
        return self._lost(f"the parameter {slot.name}", "was written in place while it was sharded, or in a forward")

    def find_lost_to_update(self) -> EngineError | None:
        """Return the error of a write into whole parameters that an update under way will overwrite; None without."""
        if self.is_sharded or not self._is_behind:
            return None
        slot = self.params.first_written()
        if slot is None and not self.params.is_changed:
            return None
        whose = f"the parameter {slot.name}" if slot is not None else f"a parameter of {self.label}"
        return self._lost(whose, "was written while an update that will overwrite it was under way (delayed_update)")

    def forget_lost(self) -> None:
        """Have `find_lost` find no write that it has found: it is reported once."""
        self.params.written_in_flight = None
        if self.is_sharded or self._is_behind:
            self.params.forget_written()

    @property
    def _is_behind(self) -> bool:
        """Whether an update is under way that the parameters will follow."""
        return self.params.pending is not None and not self.params.pending.is_written_back

    def _lost(self, whose: str, what: str) -> EngineError:
        hint = "write it in place: param.data.copy_(...)"
        if self.is_sharded or self._is_behind:
            hint = "write it within launcher.zero.GatheredParameters(params, modifier_rank=0): param.data.copy_(...)"
        elif self.params.written_in_flight is not None:
            hint = (
                "get the parameters after engine.step(), each time (model.parameters(), module.weight), or call"
                " engine.synchronize_parameters() before"
            )
        return EngineError(f"{whose} {what}: the engine would not train that value", hint=hint)

    def free(self) -> None:
        """End the unit: parameters belong to no engine. Sharded ones stay shards, which another engine takes over."""
        self.params.wait()
        self.params.check_thread = any_thread
        for param in self.members.params:
            if unit_of(param) is self:
                _UNIT.remove(param)
        if not self.is_sharded:
            self.params.unregister()

    @property
    def label(self) -> str:
        """Its parameters, for messages."""
        first, *others = self.layout.names
        return f"{first} and {len(others)} more" if others else first

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """The fully qualified name of each parameter."""
        return dict(zip(self.members.params, self.layout.names, strict=True))

    @property
    def numel(self) -> int:
        """Elements of the unit, padding included."""
        return self.layout.padded_numel

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are kept as shards."""
        return self.params.is_sharded

    @contextlib.contextmanager
    def in_memory(self, *, writes: bool = True) -> Iterator[None]:
        """Have in memory what the optimizer works on: master, states, gradient. writes: they are changed."""
        if self.params.pending is not None:
            self.params.pending.wait()
        if self.swap is None:
            if writes:
                self.group.streams.join(Side.TO_HOST)  # an asynchronous save may still copy them
            with self.params.offloaded.on_device(writes=writes):
                yield
            return
        self.swap.bring_in()
        try:
            yield
        finally:
            self.group.copier.synchronize()  # copies still read memory that others get from here on
            if writes:
                self.swap.send_out(self.state_tensors(), keeps_gradient=True)
            else:
                self.swap.drop()

    @contextlib.contextmanager
    def with_new_states(self) -> Iterator[None]:
        """Have in memory what `in_memory` has, for states that take the place of those there are."""
        if self.swap is not None:
            self.swap.forget_states()
        with self.in_memory():
            yield

    @contextlib.contextmanager
    def readable(self, *, writes: bool = False) -> Iterator[None]:
        """Have master and states in memory. writes: the master is changed."""
        if self.swap is None and self.params.master is self.params.shard:
            with self.params.shard_in_memory(writes=writes):
                yield
        else:
            with self.in_memory(writes=writes):
                yield

    def make_shards(self) -> list[ParamShard]:
        """Return what this rank owns of each parameter, for the optimizer; an empty list where all are frozen."""
        if self.grads is None:
            return []
        with self.swap.with_memory() if self.swap is not None else contextlib.nullcontext():
            is_split = len(self.owned) < self.layout.padded_numel
            ranks = range(self.group.world_size)
            chunks = tuple(self.layout.chunk_range(rank) if is_split else self.owned for rank in ranks)
            for slot in self.layout.slots:
                self.shards.append(self._shard(slot, self.grads.optimizer_grad, chunks))
        return self.shards

    def _shard(self, slot: ParamSlot, grad: Tensor, chunks: tuple[range, ...]) -> ParamShard:
        params = self.params
        start = self.shards[-1].place.stop if self.shards else 0
        owned = slot.within(self.owned)
        place = slice(start, start + len(owned))
        return ParamShard(
            name=slot.name,
            shape=torch.Size(slot.shape),
            owned=owned,
            master=params.master[place],
            grad=grad[place],
            group=slot.group,
            unit=self.index,
            start=start,
            param=None if params.copy is None else params.copy[place],
            offset=slot.offset,
            chunks=chunks,
        )

    def prepare_for(self, optimizer: UnitOptimizer) -> None:
        """Have offloaded gradients wait for an optimizer that reads 16 bits, and take room on disk for its states.

        Raises: EngineError when there is not enough.
        """
        if self.grads is not None:
            self.grads.keeps_16_bits = True
        if self.swap is not None:
            sizes = optimizer.state_sizes(self.index)
            self.swap.reserve(num_bytes for name, num_bytes in sizes if name not in self._resident_states)

    def write_back(self, *, is_written: bool, overlaps: bool, unused: Collection[str] = ()) -> None:
        """Have the parameters follow the masters, which must be in memory. Every rank must call it in the same order.

        is_written: the optimizer has written `ParamShard.param` too. overlaps: whoever reads the parameters waits.
        unused: the names of parameters that the update has left out, which have their values of before.
        """
        self.params.write_back(is_written=is_written, unused=unused)
        if not overlaps:
            self.params.wait()

    def state_tensors(self) -> list[Tensor]:
        """Return the optimizer's states of the owned range that there are now, by element, and go where masters go."""
        return [
            value
            for shard in self.shards
            for name, value in shard.state.items()
            if isinstance(value, Tensor) and value.dim() > 0 and name not in self._resident_states
        ]

    def memory(self) -> dict[str, list[Tensor]]:
        """Return what lasts from step to step, by kind: parameters, gradients, and what the optimizer works on."""
        params, grads = self.params, self.grads
        kept = [params.shard] if params.is_sharded else [params.flat]
        found = {"parameters": [*kept, *params.copies()], "optimizer": self.state_tensors()}
        if params.master is not params.shard:
            found["optimizer"].append(params.master)
        if grads is not None:
            found["gradients"] = grads.buffers()
        return found

    def optimizer_state(self, name: str) -> Tensor | None:
        """Return a copy of a state of the owned range, 1-D [owned]; zeros where no step was taken. None: nowhere."""
        found = [(shard, torch.as_tensor(shard.state[name])) for shard in self.shards if name in shard.state]
        if not found:
            return None
        state = torch.zeros(len(self.owned), dtype=found[0][1].dtype, device=self.group.device)
        for shard, value in found:
            state[shard.place] = value.reshape(-1)
        return state

    def unsharded(self, owned: Tensor) -> Tensor:
        """Return all of something of which each rank holds its owned range. Collective.

        owned: 1-D [owned]. Returns 1-D [padded], a new tensor of the same dtype.
        """
        if len(self.owned) == self.layout.padded_numel:
            return owned.to(self.group.device, copy=True)
        flat = torch.empty(self.layout.padded_numel, dtype=owned.dtype, device=self.group.device)
        flat[self.owned.start : self.owned.stop] = owned
        self.group.communicator.all_gather(flat).wait()
        return flat


_UNIT: Mark[FlatUnit] = Mark("unit")


def unit_of(param: nn.Parameter) -> FlatUnit | None:
    """Return the unit an engine has put a parameter in; None for one that no engine has taken."""
    return _UNIT.of(param)


def lost_anywhere(own: EngineError | None, mesh: ParallelMesh) -> EngineError:
    """Return the error of the first rank that has one, for all ranks to raise. Collective."""
    report = None
    if own is not None:
        [found] = own.diagnostics
        report = found.message, f"rank {mesh.world.rank}", found.hint
    for reported in mesh.data.communicator.gather_objects(report):
        if reported is not None:
            message, where, hint = reported
            return EngineError(message, where=where, hint=hint)
    return EngineError(
        "on a rank with another part of the model a parameter was written where the engine would not train that value",
        hint="see the error of that rank",
    )
