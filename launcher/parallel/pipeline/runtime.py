"""Runs the actions of one rank of a pipeline: computes its stages' parts of each micro-batch and exchanges tensors.

Torch's own runtime of pipelines has fixed shapes, runs the model once more to learn them, and cuts a batch along the
first dimension of every tensor. This one takes micro-batches as they are, of any structure and of differing shapes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from launcher.base.errors import ConfigError, EngineError
from launcher.comm.torch_internals import divided_backward
from launcher.parallel.pipeline.links import RankOf, Receiving, StageTransfers
from launcher.parallel.pipeline.stages import StagedModel
from launcher.sharding.pipeline import PipelinePlan

# ---- What each rank of a pipeline does in one step, in order: computing, sending and receiving ----
# The orders of interleaved and zero-bubble schedules, and the places of the transfers in every order, are computed by
# `torch.distributed.pipelining`. All transfers stand in one order of the whole pipeline, of which each rank has its
# own part. So a rank may wait wherever it is: what it waits for comes earlier in that order.


class Kind(Enum):
    """What an action does. The values are torch's."""

    FORWARD = "F"
    BACKWARD = "B"  # of the inputs and of the parameters
    BACKWARD_INPUT = "I"  # of the inputs alone: the stage before waits for it
    BACKWARD_WEIGHT = "W"  # the gradients of the parameters, later
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"


_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class Action(NamedTuple):
    """One action of one rank."""

    kind: Kind
    stage: int
    micro_batch: int


@dataclass
class _TorchStage:
    """What torch's schedules ask of a stage to compute their order."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    has_backward: bool = True
    submod: nn.Module = field(default_factory=nn.Identity)
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


_Order = dict[int, list[Any]]  # by rank, what it computes: torch's actions
_TORCH_SCHEDULES = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zero_bubble_v": "ScheduleZBVZeroBubble",
}


@functools.cache
def _torch_schedules() -> Any:
    """Import torch's schedules, for runs with a pipeline alone: they take 1.8 s of a processor, and 150 MiB."""
    return importlib.import_module("torch.distributed.pipelining.schedules")


def training_actions(plan: PipelinePlan, rank: int) -> list[Action]:
    """Return what a rank of the pipeline does in one step. Raises: ConfigError for micro-batches that do not fit."""
    problem = plan.problem()
    if problem is not None:
        raise ConfigError(problem[0], where="gradient_accumulation_steps", hint=problem[1])
    if plan.schedule in _TORCH_SCHEDULES:
        return _with_transfers(_torch_order(plan), plan, rank)
    order: _Order = {}
    for each in range(plan.num_ranks):
        # Forwards before the first backward: all of them, or as many as there are stages behind this one.
        num_ahead = plan.num_micro_batches if plan.schedule == "gpipe" else plan.num_ranks - 1 - each
        order[each] = _one_stage_order(each, min(num_ahead, plan.num_micro_batches), plan.num_micro_batches)
    return _with_transfers(order, plan, rank)


def evaluation_actions(plan: PipelinePlan, rank: int) -> list[Action]:
    """Return what a rank does in an evaluation: forwards alone.

    Micro-batches pass in rounds of as many as there are ranks, so that no rank waits for its own next stage.
    """
    order = {
        each: [
            _of_torch(Kind.FORWARD, stage, micro_batch)
            for first in range(0, plan.num_micro_batches, plan.num_ranks)
            for stage in plan.stages_of(each)
            for micro_batch in range(first, min(first + plan.num_ranks, plan.num_micro_batches))
        ]
        for each in range(plan.num_ranks)
    }
    return _with_transfers(order, plan, rank)


def _one_stage_order(stage: int, num_ahead: int, num_micro_batches: int) -> list[Any]:
    """Return `num_ahead` forwards, then one forward and one backward in turns, then what is left of the backwards."""
    forwards = [_of_torch(Kind.FORWARD, stage, each) for each in range(num_micro_batches)]
    backwards = [_of_torch(Kind.BACKWARD, stage, each) for each in range(num_micro_batches)]
    in_turns = zip(forwards[num_ahead:], backwards, strict=False)
    return [*forwards[:num_ahead], *chain.from_iterable(in_turns), *backwards[num_micro_batches - num_ahead :]]


def _torch_order(plan: PipelinePlan) -> _Order:
    stages = [_TorchStage(stage, plan.num_stages, plan.num_ranks) for stage in plan.stages_of(0)]
    try:
        schedule = getattr(_torch_schedules(), _TORCH_SCHEDULES[plan.schedule])(
            stages, plan.num_micro_batches, loss_fn=_no_loss
        )
    except ValueError as error:
        raise ConfigError(
            f"torch cannot order {plan.num_micro_batches} micro-batches in {plan.schedule}: {error}",
            where="gradient_accumulation_steps",
            hint=f"use {plan.num_ranks} or more, or a multiple of the number of ranks",
        ) from error
    order: _Order = schedule.pipeline_order
    return order


def _no_loss(*_: Any) -> None:
    """Tell torch's schedules that there is a backward."""


def _with_transfers(order: _Order, plan: PipelinePlan, rank: int) -> list[Action]:
    # None stands for a wait. An input's gradient is sent before those of the weights, also where these come next.
    computing = {each: [action for action in actions if action is not None] for each, actions in order.items()}
    lowered = _torch_schedules()._add_send_recv(computing, plan.rank_of, plan.num_stages)
    own: list[Any] = lowered[rank]
    return [Action(_kind_of(each.computation_type), each.stage_index, each.microbatch_index) for each in own]


def _of_torch(kind: Kind, stage: int, micro_batch: int) -> Any:
    torch_schedules = _torch_schedules()
    return torch_schedules._Action(stage, torch_schedules._ComputationType.from_str(kind.value), micro_batch)


def _kind_of(computation_type: Any) -> Kind:
    return next(kind for kind in Kind if _torch_schedules()._ComputationType.from_str(kind.value) is computation_type)


# ---- How much of a step a rank of a pipeline computes; the rest it waits for other stages: the bubble ----


_Marks = tuple[torch.Event, torch.Event]


class Stopwatch:
    """Measures one step. On a GPU by events, which cost the host nothing until the result is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_async = device.type != "cpu"
        self._begun_s = self._ended_s = self._busy_s = 0.0
        self._begun: torch.Event | None = None
        self._ended: torch.Event | None = None
        self._computed: list[_Marks] = []
        self._is_running = False  # an evaluation is not measured

    def begin(self) -> None:
        """Begin with a step."""
        self._is_running = True
        self._computed.clear()
        self._busy_s, self._begun_s = 0.0, time.perf_counter()
        self._begun = self._mark() if self._is_async else None

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Count this block as computing."""
        if not self._is_running:
            yield
            return
        start_s, first = time.perf_counter(), self._mark() if self._is_async else None
        yield
        if first is not None:
            self._computed.append((first, self._mark()))
        self._busy_s += time.perf_counter() - start_s

    def end(self) -> None:
        """End the step, where all ranks of the pipeline have."""
        self._is_running = False
        self._ended_s = time.perf_counter()
        self._ended = self._mark() if self._is_async else None

    def _mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    @property
    def idle_fraction(self) -> float:
        """The part of the last step in which this rank did not compute. On a GPU the host waits for the step."""
        if self._begun is None or self._ended is None:
            total_s = self._ended_s - self._begun_s
            return 1.0 - self._busy_s / total_s if total_s > 0 else 0.0
        self._ended.synchronize()
        total_ms = self._begun.elapsed_time(self._ended)
        return 1.0 - sum(first.elapsed_time(last) for first, last in self._computed) / total_ms


_Place = tuple[int, int]  # a stage and a micro-batch


# ---- What runs the actions ----


@dataclass(frozen=True)
class EngineVerbs:
    """What the engine does around the parts of a step."""

    forward: Callable[[], contextlib.AbstractContextManager[Any]]  # around a forward
    backward: Callable[[bool], contextlib.AbstractContextManager[Any]]  # around a backward; is it the last of the step?
    scaled: Callable[[Tensor], Tensor]  # the loss that goes back, of that of one micro-batch
    take_gradients: Callable[[], None]  # take over gradients that no hook of autograd has seen
    before_backward: Callable[[], None]  # before the first backward of a step; it may raise, on every rank


@dataclass
class _Forward:
    """A forward whose backward is to come."""

    inputs: tuple[Tensor, ...]  # received; leaves of the graph
    outputs: tuple[Tensor, ...]  # sent; or the loss that goes back


class PipelineRuntime:
    """One rank of a pipeline. All ranks of the pipeline must call each method together."""

    def __init__(self, model: StagedModel, links: StageTransfers, rank_of: RankOf, verbs: EngineVerbs) -> None:
        """links: to the other ranks of the pipeline."""
        self._model = model
        self._links = links
        self._rank_of = rank_of
        self._rank = links.group.rank
        self._verbs = verbs
        self._last_stage = model.num_stages - 1
        self.stopwatch = Stopwatch(links.group.device)
        self._has_compared = False
        self._micro_batches: Sequence[Any] | None = None
        self._signatures: list[int] = []
        self._receiving: dict[tuple[Kind, int, int], Receiving] = {}
        self._local: dict[tuple[Kind, int, int], tuple[Tensor, ...]] = {}  # from another stage of this rank
        self._forwards: dict[_Place, _Forward] = {}
        self._gradients: dict[_Place, tuple[Tensor, ...]] = {}  # of the inputs, to be sent
        self._weight_graphs: dict[_Place, Callable[[], None]] = {}  # backwards of the weights that are to come
        self.losses: list[Tensor] = []  # of the step, detached; on the rank of the last stage
        self.outputs: list[Any] = []  # of the last stage, without gradients

    def run(
        self, actions: Sequence[Action], micro_batches: Sequence[Any] | None, count: int, *, wants_loss: bool
    ) -> None:
        """Run one step, or one evaluation within `torch.no_grad()`; then `losses` and `outputs` have what it gave.

        micro_batches: `count` of them; None on a rank whose stages read none. Raises: see `StageTransfers.agree`;
        EngineError for stages that return what cannot be sent.
        """
        self._forget()
        self._signatures = self._links.agree(micro_batches, count, compares_values=not self._has_compared)
        self._micro_batches, self._has_compared = micro_batches, True
        if torch.is_grad_enabled():
            self.stopwatch.begin()
        num_backwards = sum(action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT) for action in actions)
        first_backward = next((action for action in actions if action.kind in _BACKWARDS), None)
        for action in actions:
            place = action.stage, action.micro_batch
            if action is first_backward:
                # Where it raises on all ranks none waits: each has sent by then what others receive up to here.
                self._verbs.before_backward()
            if action.kind is Kind.FORWARD:
                self._forward(*place, wants_loss=wants_loss)
            elif action.kind is Kind.BACKWARD:
                num_backwards -= 1
                self._backward(*place, is_last=not num_backwards)
            elif action.kind is Kind.BACKWARD_INPUT:
                self._backward_input(*place)
            elif action.kind is Kind.BACKWARD_WEIGHT:
                num_backwards -= 1
                self._backward_weight(*place, is_last=not num_backwards)
            else:
                self._transfer(action)
        self._links.finish_sends()

    def _forget(self) -> None:
        """Forget an earlier step, also one that an exception ended."""
        for held in (self._receiving, self._local, self._forwards, self._gradients, self._weight_graphs):
            held.clear()
        self.losses, self.outputs = [], []

    # ---- forward ----

    def _forward(self, stage: int, index: int, *, wants_loss: bool) -> None:
        inputs = self._inputs_of(stage, index)
        micro_batch = None if self._micro_batches is None else self._micro_batches[index]
        with self.stopwatch.computing(), self._verbs.forward():
            returned = self._model(stage, inputs, micro_batch)
            if stage == self._last_stage:
                outputs = self._ends_with(returned, micro_batch, wants_loss=wants_loss)
            else:
                outputs = _checked(returned, stage)
        if torch.is_grad_enabled():
            self._forwards[stage, index] = _Forward(inputs, outputs)
        if stage == self._last_stage:
            return
        if self._rank_of(stage + 1) == self._rank:
            self._local[Kind.FORWARD, stage + 1, index] = outputs
        elif not torch.is_grad_enabled():
            self._forwards[stage, index] = _Forward((), outputs)  # until it is sent

    def _inputs_of(self, stage: int, index: int) -> tuple[Tensor, ...]:
        """Return the inputs of a stage as leaves that get a gradient where one travels back."""
        if stage == 0:
            return ()
        given = self._local.pop((Kind.FORWARD, stage, index), None)
        if given is not None:
            return tuple(each.detach().requires_grad_(each.requires_grad) for each in given)
        received = self._receiving.pop((Kind.RECEIVE_FORWARD, stage, index)).wait()
        facts = self._links.facts_of(stage, self._signatures[index])
        return tuple(each.requires_grad_(known.needs_grad) for each, known in zip(received, facts, strict=True))

    def _ends_with(self, outputs: Any, micro_batch: Any, *, wants_loss: bool) -> tuple[Tensor, ...]:
        """Take the outputs of the last stage; return the loss that goes back."""
        if not torch.is_grad_enabled():
            self.outputs.append(outputs)
        if not wants_loss:
            return ()
        loss = self._model.loss(outputs, micro_batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise EngineError(f"the loss of a micro-batch is not a scalar: {got}", hint="reduce it with loss.mean()")
        self.losses.append(loss.detach().float().reshape(()))
        return (self._verbs.scaled(loss),) if torch.is_grad_enabled() else ()

    # ---- backward ----

    def _backward(self, stage: int, index: int, *, is_last: bool) -> None:
        done, given = self._forwards.pop((stage, index)), self._gradients_given(stage, index)
        with self.stopwatch.computing(), self._verbs.backward(is_last):
            _go_back(done.outputs, given)
        self._keep_gradients(stage, index, done.inputs)

    def _backward_input(self, stage: int, index: int) -> None:
        """Compute the gradients of the inputs alone, and keep what those of the weights need.

        The first stage has no inputs to compute gradients of: all of its backward comes later.
        """
        done, given = self._forwards.pop((stage, index)), self._gradients_given(stage, index)
        outputs = [each for each in done.outputs if each.requires_grad]
        if not any(each.requires_grad for each in done.inputs):
            self._weight_graphs[stage, index] = lambda: _go_back(outputs, given)
            self._keep_gradients(stage, index, done.inputs)
            return
        weights = [param for param in self._model.parameters() if param.requires_grad]  # others are not in this graph
        with self.stopwatch.computing(), self._verbs.backward(False):
            needed = [each for each in done.inputs if each.requires_grad]
            _, groups = divided_backward().stage_backward_input(outputs, given, needed, iter(weights))
        self._keep_gradients(stage, index, done.inputs)

        def go_back() -> None:
            divided_backward().stage_backward_weight(iter(weights), groups)
            self._verbs.take_gradients()

        self._weight_graphs[stage, index] = go_back

    def _backward_weight(self, stage: int, index: int, *, is_last: bool) -> None:
        go_back = self._weight_graphs.pop((stage, index))
        with self.stopwatch.computing(), self._verbs.backward(is_last):
            go_back()

    def _gradients_given(self, stage: int, index: int) -> list[Tensor] | None:
        """Return the gradients of what a stage has returned, of what needs one; None for the loss."""
        if stage == self._last_stage:
            return None
        given = self._local.pop((Kind.BACKWARD, stage, index), None)
        if given is not None:
            return list(given)
        return list(self._receiving.pop((Kind.RECEIVE_BACKWARD, stage, index)).wait())

    def _keep_gradients(self, stage: int, index: int, inputs: tuple[Tensor, ...]) -> None:
        if stage == 0:
            return
        found = []
        for each in inputs:
            if each.requires_grad:
                found.append(torch.zeros_like(each) if each.grad is None else each.grad)
                each.grad = None
        if self._rank_of(stage - 1) == self._rank:
            self._local[Kind.BACKWARD, stage - 1, index] = tuple(found)
        else:
            self._gradients[stage, index] = tuple(found)

    # ---- transfers ----

    def _transfer(self, action: Action) -> None:
        stage, index = action.stage, action.micro_batch
        if action.kind is Kind.SEND_FORWARD:
            is_kept = torch.is_grad_enabled()
            sent = self._forwards[stage, index] if is_kept else self._forwards.pop((stage, index))
            self._links.send_forward(sent.outputs, stage, self._signatures[index])
        elif action.kind is Kind.RECEIVE_FORWARD:
            received = self._links.receive_forward(stage, self._signatures[index])
            self._receiving[action.kind, stage, index] = received
        elif action.kind is Kind.SEND_BACKWARD:
            self._links.send_backward(self._gradients.pop((stage, index)), stage)
        else:
            received = self._links.receive_backward(stage, self._signatures[index])
            self._receiving[action.kind, stage, index] = received


def _checked(returned: Any, stage: int) -> tuple[Tensor, ...]:
    """Return what a stage passes on. Raises: EngineError for anything but tensors."""
    found = returned if isinstance(returned, tuple) else (returned,)
    for each in found:
        if not isinstance(each, Tensor):
            raise EngineError(
                f"stage {stage} passes on a {type(each).__name__}: only tensors travel between stages",
                hint="have layers take and return tensors or tuples of them",
            )
    return found


def _go_back(outputs: Sequence[Tensor], given: list[Tensor] | None) -> None:
    """Compute gradients. given: those of the outputs that need one; None for the loss."""
    needing = [each for each in outputs if each.requires_grad]
    if needing:
        torch.autograd.backward(needing, given)
