"""Shards updated by the project's own kernels."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.comm.groups import RankGroup
from launcher.kernels.api import DeviceScale, GradScale, Kernel, Rule, Span
from launcher.optim.api import ParamShard, PreparedUpdate, UnitOptimizer, is_same_memory
from launcher.optim.classes import Lamb, trust_ratios, with_trust_ratio
from launcher.optim.muon.matrices import Matrices
from launcher.optim.muon.muon import MUON_KINDS
from launcher.optim.rules import COLLECTIVE, RULES, check_steps, counts_steps, state_names


@dataclass(frozen=True)
class KernelSet:
    """With what, and how, shards are updated."""

    kernels: Mapping[str, Kernel]  # by kind of device
    state_dtype: torch.dtype = torch.float32
    # Sums fp64 [n, 2] over the ranks that each hold a part of every parameter; None: each holds them whole.
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    ranks: RankGroup | None = None  # who bring whole matrices together; None: this process alone


class KernelFlat(UnitOptimizer):
    """One optimizer class whose every step is one call of a kernel: unscale, clip, update, write the 16-bit copy.

    Masters and gradients may be fp32, bf16 or fp16. States of a unit's shards that share a group follow one another in
    memory, as the shards do: neighbours that take the same step are one span.
    """

    writes_params = True

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        shards: Sequence[ParamShard],
        param_groups: list[dict[str, Any]],
        choice: KernelSet,
    ) -> None:
        """kind: one of `RULES`; shards: of the same parameters, in the same order, on every rank."""
        super().__init__(kind.__name__, shards, param_groups)
        self._kind = kind
        self._choice = choice
        self._memory: dict[ParamShard, dict[str, Tensor]] = {}  # of states, which may not have taken a step
        self._matrices = Matrices(shards if kind in MUON_KINDS else [], param_groups, choice.ranks)
        self._neighbours = {unit: self._joined(of_unit) for unit, of_unit in self._of_unit.items()}
        self._counted: list[tuple[Sequence[ParamShard], Sequence[str], int]] = []  # shards, states, number of the step

    @property
    def label(self) -> str:
        names = dict.fromkeys(kernel.name for kernel in self._choice.kernels.values())
        return f"{self.name}[{' + '.join(names)}]"

    # ---- the step ----

    @property
    def takes_device_scale(self) -> bool:
        """Whether the scale may be known to the device only: not where the host computes norms or matrices."""
        return self._kind not in COLLECTIVE

    def step(self, grad_scale: GradScale = 1.0, unused: Collection[str] = ()) -> None:
        """Update every shard from its gradient times `grad_scale`, except those of `unused` parameters.

        Raises: EngineError for an option set since, that asks for steps kernels do not take.
        """
        if not isinstance(grad_scale, DeviceScale):
            self._update(list(self._of_unit), grad_scale, unused)
            return
        check_steps(self.param_groups)
        spans = self._spans(self._of_unit, unused)
        self._take(list(spans.values()), grad_scale)

    def take_back(self) -> None:
        """Uncount the last step, which the device has skipped: values and states are those from before it."""
        _uncount(self._counted)
        self._counted.clear()

    def step_unit(self, unit: int, grad: Tensor, grad_scale: float, unused: Collection[str] = ()) -> None:
        """Update the shards of one unit. Collective for LAMB and Muon: same units, same order. Raises: as `step`.

        grad: 1-D [owned], fp32, bf16 or fp16.
        """
        self._update([unit], grad_scale, unused, {unit: grad})

    def prepare(self, grad_scale: float, unused: Collection[str], grads: Mapping[int, Tensor]) -> Callable[[], None]:
        """Count a step with the hyper-parameters of now; return what takes it, in any thread.

        grads: unit index -> what `step_unit` reads. Not for LAMB and Muon, whose steps are collective. Raises: as
        `step`.
        """
        check_steps(self.param_groups)
        spans = self._spans(self._of_unit, unused, grads)
        return functools.partial(self._take, list(spans.values()), grad_scale)

    def prepare_unit(self, unit: int, grad: Tensor, grad_scale: float) -> PreparedUpdate:
        """Count a step of one unit with the hyper-parameters of now. Not for LAMB and Muon. Raises: as `step`."""
        check_steps(self.param_groups)
        spans = list(self._spans([unit], (), {unit: grad}).values())
        written = [tensor for span in spans for tensor in (span.master, *span.states)]
        take = functools.partial(self._take, spans, grad_scale)
        return PreparedUpdate(written, take, functools.partial(_uncount, list(self._counted)))

    def _update(
        self,
        units: Sequence[int],
        grad_scale: float,
        unused: Collection[str],
        grads: Mapping[int, Tensor] | None = None,
    ) -> None:
        check_steps(self.param_groups)
        spans = self._spans(units, unused, grads)
        shards = [shard for unit in units for shard in self._of_unit[unit]] if self._kind in COLLECTIVE else []
        if self._kind is Lamb:
            spans = self._with_trust_ratios(shards, spans, grad_scale)
        self._take([span for shard, span in spans.items() if shard not in self._matrices], grad_scale)
        matrices = [shard for shard in shards if shard in self._matrices]
        for updates in self._matrices.updates(matrices, spans, grad_scale):
            self._take(updates, 1.0)

    def _take(self, spans: Sequence[Span], grad_scale: GradScale) -> None:
        for device, kernel in self._choice.kernels.items():
            there = [span for span in spans if span.master.device.type == device]
            if there:
                kernel.update(there, grad_scale)

    def _joined(self, shards: Sequence[ParamShard]) -> list[list[ParamShard]]:
        """Return the shards of a unit that have elements, neighbours together where they may be one span."""
        joined: list[list[ParamShard]] = []
        for shard in (each for each in shards if each.owned):
            last = joined[-1][-1] if joined else None
            is_apart = self._kind is Lamb or shard in self._matrices
            if last is None or is_apart or last.group != shard.group or last.place.stop != shard.start:
                joined.append([shard])
            else:
                joined[-1].append(shard)
        return joined

    def _spans(
        self, units: Iterable[int], unused: Collection[str], grads: Mapping[int, Tensor] | None = None
    ) -> dict[ParamShard, Span]:
        """Count a step of the units' shards; return spans by their first shard. grads: as `prepare` has them."""
        names_of = [self._names(group) for group in range(len(self.param_groups))]
        rules: dict[tuple[int, int], Rule] = {}  # of (group, step)
        self._counted.clear()
        spans: dict[ParamShard, Span] = {}
        for neighbours in (joined for unit in units for joined in self._neighbours[unit]):
            names = names_of[neighbours[0].group]
            for step, alike in _by_step(neighbours, names, unused):
                key = (alike[0].group, step)
                if key not in rules:
                    rules[key] = RULES[self._kind](self.param_groups[key[0]], step)
                self._count(alike, names, step)
                self._counted.append((alike, names, step))
                spans[alike[0]] = _span(rules[key], names, alike, grads)
        return spans

    def _count(self, shards: Sequence[ParamShard], names: Sequence[str], step: int) -> None:
        for shard in shards if step == 1 else ():
            first = self.param_groups[shard.group].get("initial_accumulator_value", 0.0)
            shard.state.update({name: self._memory_of(shard, name).fill_(first) for name in names})
        for shard in shards if names else ():
            shard.state["step"] = step

    def _with_trust_ratios(
        self, shards: Sequence[ParamShard], spans: Mapping[ParamShard, Span], grad_scale: float
    ) -> dict[ParamShard, Span]:
        """Take LAMB's first pass. Collective where parameters are split: a rank may own nothing of one."""
        rows = {shard: row for row, shard in enumerate(shards)}
        sums = torch.zeros(len(shards), 2, dtype=torch.float64)
        for device, kernel in self._choice.kernels.items():
            there = {shard: span for shard, span in spans.items() if shard.master.device.type == device}
            if there:
                moments = kernel.lamb_moments(list(there.values()), grad_scale)
                sums.index_add_(0, torch.tensor([rows[shard] for shard in there]), moments.cpu())
        if self._choice.sum_over_ranks is not None:
            sums = self._choice.sum_over_ranks(sums)
        ratios = trust_ratios(sums, [self.param_groups[shard.group] for shard in shards])
        return {shard: with_trust_ratio(span, ratios[rows[shard]]) for shard, span in spans.items()}

    # ---- states ----

    def state_sizes(self, unit: int) -> list[tuple[str, int]]:
        """Return name and bytes of each tensor of states that a unit is going to have."""
        groups = dict.fromkeys(shard.group for shard in self._of_unit[unit])
        sizes = {group: sum(len(shard.owned) for shard in self._alike(unit, group)) for group in groups}
        size = self._choice.state_dtype.itemsize
        return [(name, sizes[group] * size) for group in groups for name in self._names(group) if sizes[group]]

    def _names(self, group: int) -> tuple[str, ...]:
        return state_names(self._kind, self.param_groups[group])

    def _alike(self, unit: int, group: int) -> list[ParamShard]:
        """Return the shards of a unit in one group of which this rank owns something."""
        return [shard for shard in self._of_unit[unit] if shard.group == group and shard.owned]

    def _memory_of(self, shard: ParamShard, name: str) -> Tensor:
        """Return memory for one state of a shard, 1-D, made for all of its unit and group together."""
        if name not in self._memory.get(shard, {}):
            alike = self._alike(shard.unit, shard.group)
            ends = list(itertools.accumulate(len(each.owned) for each in alike))
            flat = torch.empty(ends[-1], dtype=self._choice.state_dtype, device=shard.master.device)
            for each, end in zip(alike, ends, strict=True):
                self._memory.setdefault(each, {})[name] = flat[end - len(each.owned) : end]
        return self._memory[shard][name]

    def _saved(self, shard: ParamShard) -> dict[str, Any]:
        """Return the live state of a shard as torch's optimizers would have it."""
        group = self.param_groups[shard.group]
        names = RULES[self._kind](group, 1).STATES
        saved = {name: shard.state[name] for name in names if name in shard.state}
        if saved and counts_steps(self._kind, group):
            saved["step"] = torch.tensor(float(shard.state["step"]))
        return saved

    def load_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take hyper-parameters over. Raises: EngineError also for steps that kernels do not take."""
        check_steps(groups)
        super().load_groups(groups)

    def room_of(self, shard: ParamShard, name: str) -> Tensor | None:
        """Return the memory that a state by element will have, 1-D; None for one that the steps do not keep."""
        if name not in RULES[self._kind](self.param_groups[shard.group], 1).STATES:
            return None
        memory = self._memory_of(shard, name)
        return memory if memory.untyped_storage().nbytes() else None

    def load_unit(self, unit: int, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the states of a unit's shards by copies of `states`, by name."""
        for shard in self._of_unit.get(unit, ()):
            memory = self._memory.get(shard, {}).values()
            if any(not flat.untyped_storage().nbytes() for flat in memory):  # it is on disk, for the states of before
                self._memory.pop(shard, None)
        super().load_unit(unit, states)

    def load_state(self, shard: ParamShard, state: Mapping[str, Any]) -> None:
        """Replace the state of a shard by a copy of `state`, of the same elements."""
        shard.state.clear()
        for name in RULES[self._kind](self.param_groups[shard.group], 1).STATES:
            if name in state:
                memory, value = self._memory_of(shard, name), state[name].view(-1)
                shard.state[name] = memory if is_same_memory(memory, value) else memory.copy_(value)
        if shard.state:
            shard.state["step"] = int(state.get("step", 1))  # torch counts no steps where only the first differs


def _uncount(counted: Iterable[tuple[Sequence[ParamShard], Sequence[str], int]]) -> None:
    """Have shards be as before the steps that were counted. counted: shards, the names of states, the step."""
    for shards, names, step in counted:
        for shard in shards if names else ():
            if step == 1:
                for name in (*names, "step"):
                    shard.state.pop(name, None)
            else:
                shard.state["step"] = step - 1


def _by_step(
    neighbours: list[ParamShard], names: Sequence[str], unused: Collection[str]
) -> Iterator[tuple[int, list[ParamShard]]]:
    """Yield neighbours that take the same step, and its number, from 1: also where one of the states `names` is new."""
    # SGD may be given its momentum later, and has no state to count for without.
    last = names[-1] if names else None
    steps = [shard.state["step"] + 1 if last in shard.state else 1 for shard in neighbours]
    if not unused and steps.count(steps[0]) == len(steps):
        yield steps[0], neighbours
        return
    taken = [0 if shard.name in unused else step for shard, step in zip(neighbours, steps, strict=True)]
    for step, pairs in itertools.groupby(zip(taken, neighbours, strict=True), key=operator.itemgetter(0)):
        if step:
            yield step, [shard for _, shard in pairs]


def _span(
    rule: Rule, names: Sequence[str], neighbours: Sequence[ParamShard], grads: Mapping[int, Tensor] | None
) -> Span:
    """Return the span of neighbouring shards that take the same step."""
    first, numel = neighbours[0], neighbours[-1].place.stop - neighbours[0].start
    grad = first.grad if grads is None else grads[first.unit][first.place]
    states = tuple(_extended(first.state[name], numel) for name in names)
    param = None if first.param is None else _extended(first.param, numel)
    return Span(rule, _extended(first.master, numel), _extended(grad, numel), states, param)


def _extended(tensor: Tensor, numel: int) -> Tensor:
    """Return the `numel` elements of memory that begin where a 1-D tensor does."""
    return tensor if tensor.numel() == numel else tensor.as_strided((numel,), (1,))
