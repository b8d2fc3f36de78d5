"""Flat shards updated by the project's own kernels."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from launcher.comm.groups import DataParallelGroup
from launcher.kernels.api import Kernel, Rule, Span
from launcher.optim.api import Around, FlatShard, StateRun, Unused, by_unit
from launcher.optim.lamb import Lamb, trust_ratios, with_trust_ratio
from launcher.optim.muon.matrices import Matrices
from launcher.optim.muon.muon import MUON_KINDS
from launcher.optim.rules import RULES, check_steps, counts_steps, state_names, states_of
from launcher.optim.runs import Runs, check_state, coalesced, options_of, resting_runs, saved_runs


@dataclass(eq=False)
class _Run:
    """Elements of one shard that have taken the same steps."""

    start: int  # within the shard
    stop: int
    num_steps: int = 0
    states: tuple[Tensor, ...] | None = None  # each 1-D [stop - start]; None before the first step


@dataclass(frozen=True)
class KernelChoice:
    """With what, and how, shards are updated."""

    kernels: Mapping[str, Kernel]  # by kind of device
    state_dtype: torch.dtype = torch.float32
    # Sums fp64 [n, 2] over the ranks that each hold a part of every parameter; None: each holds them whole.
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    ranks: DataParallelGroup | None = None  # who bring whole matrices together; None: this process alone


class KernelFlat:
    """One optimizer class whose every step is one call of a kernel: unscale, clip, update, write the 16-bit copy.

    Masters and gradients may be fp32, bf16 or fp16. LAMB and Muon need one shard for each parameter.
    """

    writes_params = True

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        shards: list[FlatShard],
        param_groups: list[dict[str, Any]],
        choice: KernelChoice,
    ) -> None:
        """kind: one of `RULES`; param_groups: the user's, read before every step."""
        self._kind = kind
        self._shards = shards
        self._groups = param_groups
        self._choice = choice
        self._runs = [Runs(_Run(0, shard.master.numel()), self._split) for shard in shards]
        self._by_unit = by_unit(shards)
        self._matrices = Matrices(shards if kind in MUON_KINDS else [], param_groups, choice.ranks)

    @property
    def label(self) -> str:
        names = dict.fromkeys(kernel.name for kernel in self._choice.kernels.values())
        return f"{self._kind.__name__}[{' + '.join(names)}]"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._groups

    @staticmethod
    def _split(old: _Run, at: int) -> tuple[_Run, _Run]:
        length = at - old.start
        before = None if old.states is None else tuple(state[:length] for state in old.states)
        after = None if old.states is None else tuple(state[length:] for state in old.states)
        return _Run(old.start, at, old.num_steps, before), _Run(at, old.stop, old.num_steps, after)

    # ---- the step ----

    def step(self, unused: Unused | None = None, grad_scale: float = 1.0, around: Around | None = None) -> None:
        """Update every shard from its gradient times `grad_scale`, except the `unused` elements.

        Raises: EngineError for an option set since, that asks for steps kernels do not take.
        """
        check_steps(self._groups)
        if around is None:
            self._update(range(len(self._shards)), unused, grad_scale)
            return
        for unit, numbers in self._by_unit.items():
            with around(unit):
                self._update(numbers, unused, grad_scale)

    def prepare(self, unused: Unused | None, grad_scale: float, grads: Mapping[int, Tensor]) -> Callable[[], None]:
        """Count a step with the hyper-parameters of now; return what takes it, in any thread.

        grads: unit index -> 1-D [owned], what is read in place of the shards' own gradients. Not for LAMB and Muon,
        whose steps are collective. Raises: as `step`.
        """
        check_steps(self._groups)
        shards = [replace(shard, grad=grads[shard.unit][_place(shard)]) for shard in self._shards]
        spans = self._spans(range(len(shards)), shards, unused)
        return functools.partial(self._take, [span for of_shard in spans.values() for span in of_shard], grad_scale)

    def _spans(
        self, numbers: Sequence[int], shards: Sequence[FlatShard], unused: Unused | None
    ) -> dict[int, list[Span]]:
        """Count a step of the shards `numbers` and return what it updates, by shard."""
        rules: dict[tuple[int, int], Rule] = {}  # of (group, steps taken)
        spans: dict[int, list[Span]] = {}
        for number in numbers:
            shard, runs = shards[number], self._runs[number]
            resting = {id(run) for run in resting_runs(shard, runs, unused)}
            taking = [run for run in runs if id(run) not in resting and run.start < run.stop]
            if taking:
                spans[number] = [self._span(shard, run, rules) for run in taking]
        return spans

    def _update(self, numbers: Sequence[int], unused: Unused | None, grad_scale: float) -> None:
        spans = self._spans(numbers, self._shards, unused)
        if self._kind is Lamb:
            spans = self._with_trust_ratios(numbers, spans, grad_scale)
        rest = [span for number, of_shard in spans.items() if number not in self._matrices for span in of_shard]
        self._take(rest, grad_scale)
        for descents in self._matrices.descents(numbers, spans, grad_scale):
            self._take(descents, 1.0)

    def _take(self, spans: Sequence[Span], grad_scale: float) -> None:
        for device, kernel in self._choice.kernels.items():
            there = [span for span in spans if span.master.device.type == device]
            if there:
                kernel.update(there, grad_scale)

    def _span(self, shard: FlatShard, run: _Run, rules: dict[tuple[int, int], Rule]) -> Span:
        rule = self._rule(shard.group, run.num_steps + 1, rules)
        num_states = len(states_of(rule))
        if run.states is None or len(run.states) < num_states:  # SGD may be given its momentum later
            run.states, run.num_steps = self._new_states(shard, run, self._groups[shard.group]), 0
            rule = self._rule(shard.group, 1, rules)
        run.num_steps += 1
        master, grad, param = shard.master, shard.grad, shard.param
        if run.stop - run.start < master.numel():
            piece = slice(run.start, run.stop)
            master, grad, param = master[piece], grad[piece], None if param is None else param[piece]
        return Span(rule, master, grad, run.states[:num_states], param)

    def _rule(self, group: int, step: int, rules: dict[tuple[int, int], Rule]) -> Rule:
        if (group, step) not in rules:
            rules[group, step] = RULES[self._kind](self._groups[group], step)
        return rules[group, step]

    def _new_states(self, shard: FlatShard, run: _Run, group: dict[str, Any]) -> tuple[Tensor, ...]:
        first = group.get("initial_accumulator_value", 0.0)
        shape, device = run.stop - run.start, shard.master.device
        return tuple(
            torch.full((shape,), first, dtype=self._choice.state_dtype, device=device)
            for _ in state_names(self._kind, group)
        )

    def _with_trust_ratios(
        self, numbers: Sequence[int], spans: dict[int, list[Span]], grad_scale: float
    ) -> dict[int, list[Span]]:
        """Take LAMB's first pass. Collective where parameters are split: a rank may own nothing of one."""
        sums = torch.zeros(len(numbers), 2, dtype=torch.float64)
        places = {number: row for row, number in enumerate(numbers)}
        for device, kernel in self._choice.kernels.items():
            there = {
                number: of_shard
                for number, of_shard in spans.items()
                if self._shards[number].master.device.type == device
            }
            if there:
                rows = [places[number] for number, of_shard in there.items() for _ in of_shard]
                moments = kernel.lamb_moments([span for of_shard in there.values() for span in of_shard], grad_scale)
                sums.index_add_(0, torch.tensor(rows), moments.cpu())
        if self._choice.sum_over_ranks is not None:
            sums = self._choice.sum_over_ranks(sums)
        ratios = trust_ratios(sums, [self._groups[self._shards[number].group] for number in numbers])
        return {
            number: [with_trust_ratio(span, ratios[places[number]]) for span in of_shard]
            for number, of_shard in spans.items()
        }

    # ---- states ----

    def state_numel(self) -> int:
        """Return how many elements of optimizer state this rank holds."""
        return sum(state.numel() for runs in self._runs for run in runs for state in run.states or ())

    def sizes_of_states(self, shard: int) -> dict[str, int]:
        """Return the bytes of each state, by name, that a shard is going to have."""
        names = state_names(self._kind, self._groups[self._shards[shard].group])
        return dict.fromkeys(names, self._shards[shard].master.numel() * self._choice.state_dtype.itemsize)

    def states(self, shard: int) -> list[StateRun]:
        """Return the live states of one shard, in element order; runs that have not taken a step have none."""
        names = RULES[self._kind](self._groups[self._shards[shard].group], 1).STATES
        found = []
        for run in self._runs[shard]:
            if run.states:
                state: dict[str, Any] = dict(zip(names, run.states, strict=True))
                if counts_steps(self._kind, self._groups[self._shards[shard].group]):
                    state["step"] = torch.tensor(float(run.num_steps))
                found.append(StateRun(run.start, run.stop, state))
        return found

    def state_dict(self, around: Around | None = None) -> dict[str, Any]:
        """Return `name`, `groups` (hyper-parameters) and `shards` (lists of `StateRun` as dicts)."""
        return {
            "name": self._kind.__name__,
            "groups": [options_of(group) for group in self._groups],
            "shards": saved_runs(self._shards, self.states, around),
        }

    def load_state_dict(self, state: Mapping[str, Any], around: Around | None = None) -> None:
        """Continue from a state of `state_dict()`; its runs may be cut elsewhere. Tensors are copied.

        Raises: EngineError for the state of another optimizer, of other groups or shards, or of steps that kernels do
        not take.
        """
        check_state(state, self._kind.__name__, len(self._groups), len(self._shards))
        check_steps(state["groups"])
        for mine, given in zip(self._groups, state["groups"], strict=True):
            mine.update(copy.deepcopy(given))  # a learning rate may be a tensor
        for unit, numbers in self._by_unit.items():
            with contextlib.nullcontext() if around is None else around(unit):
                for number in numbers:
                    self._load_shard(number, state["shards"][number])

    def _load_shard(self, number: int, entries: Sequence[Mapping[str, Any]]) -> None:
        for run in self._runs[number]:
            run.states, run.num_steps = None, 0
        for entry in coalesced(entries):
            self._load(number, entry)

    def _load(self, number: int, entry: StateRun) -> None:
        shard = self._shards[number]
        group = self._groups[shard.group]
        for run in self._runs[number].within(entry.start, entry.stop):
            piece = slice(run.start - entry.start, run.stop - entry.start)
            run.num_steps = int(entry.state.get("step", 1))  # torch counts no steps where only the first differs
            run.states = tuple(
                entry.state[name].reshape(-1)[piece].to(shard.master.device, self._choice.state_dtype, copy=True)
                for name in RULES[self._kind](group, 1).STATES
            )


def _place(shard: FlatShard) -> slice:
    """Return where a shard is in the owned range of its unit."""
    return slice(shard.start, shard.start + shard.master.numel())
