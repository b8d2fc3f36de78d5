"""What each act of a program means, in plain torch: one process that knows the data of all ranks.

Autograd over the same micro-batches, one optimizer, no shards; and where the documentation has a refusal, that. An act
that means nothing in the state that a program has reached (a backward without a forward) is left out, on the ranks too,
so that every list of acts is a program.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from harness.train.calls import (
    DECAY,
    LR,
    MICRO,
    MOMENTUM,
    Act,
    Net,
    Setting,
    Told,
    array,
    grad_of_script,
    inputs_of,
    loss_of,
    named_grads_wanted,
    weight_of,
)
from torch import Tensor, nn


@dataclass(frozen=True)
class Refused:
    """What every rank must raise. ends: nothing is said of the engine after it."""

    kind: str
    ends: bool = False


SKIPPED = Refused("skipped")
OPEN = object()  # a value that is not compared


@dataclass
class Rank0:
    """What rank 0 alone tells."""

    told: Told


@dataclass
class PerRank:
    """A value for each rank."""

    values: list[Any]


# What may come between the write into a shard and the step that finds it.
_AFTER_EDITS = ("forward", "backward", "step", "boundary", "read", "sync", "mode")


@dataclass
class _Pending:
    engines: frozenset[int]
    losses: list[Tensor]  # by rank
    is_of_engines: bool  # computed from what the engines have returned


@dataclass
class _Saved:
    weights: dict[str, Tensor]
    states: list[dict[str, Any]]
    rates: list[float]
    steps: int


@dataclass
class PlainEngine:
    """Model, optimizer and counters."""

    setting: Setting
    model: Net
    optimizer: torch.optim.Optimizer = field(init=False)
    steps: int = 0
    num_summed: int = 0
    accumulation: int = 0
    micro: int = MICRO
    next_sizes: tuple[int, int] = (0, 0)
    has_divided: bool = False
    backward_done: bool = False
    ended_by: str | None = None  # the call that has ended the last micro-step
    override: bool | None = None
    num_drops: int = 0
    norm: float | None = None
    is_broken: bool = False  # an exception has ended a backward, and no call has come since
    shows_grads: bool = False  # the last backward was known to be the last one before a step
    has_set_grad: bool = False  # the script has set `param.grad`
    has_edited_shards: bool = False
    may_be_whole: bool = False  # some shards may be unsharded, for a backward to come
    is_open: bool = False  # such ones were written: what is read before the error is not known
    saved: _Saved | None = None
    is_read: bool = False  # a thread reads

    def __post_init__(self) -> None:
        self.accumulation = self.setting.accumulation
        self.next_sizes = (self.accumulation, self.micro)
        self.begin_optimizer()

    def begin_optimizer(self) -> None:
        params = [param for _, param in named_grads_wanted(self.model)]
        if self.setting.optimizer == "SGD":
            self.optimizer = torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        else:
            self.optimizer = torch.optim.AdamW(params, lr=LR, eps=0.1, weight_decay=DECAY)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.optimizer.param_groups[0]["params"])

    @property
    def at_boundary(self) -> bool:
        if not self.setting.managed:
            return True
        return self.num_summed + 1 >= self.accumulation if self.override is None else self.override

    @property
    def shows_sums(self) -> bool:
        """Whether `param.grad` is what counts for the step."""
        is_whole = not self.setting.stage and self.setting.precision == "fp32"
        return is_whole and self.shows_grads and self.backward_done

    def add_grads(self, grads: dict[nn.Parameter, Tensor | None]) -> None:
        for param in self.params:
            grad = grads[param]
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad + grad
        self.has_divided = self.backward_done = True
        self.may_be_whole = False

    def begin_sum(self) -> None:
        self.num_summed, self.has_divided, self.backward_done = 0, False, False
        self.accumulation, self.micro = self.next_sizes
        self.has_set_grad = False

    def drop(self) -> None:
        """Drop the gradients: the accumulation begins anew."""
        self.optimizer.zero_grad()
        self.begin_sum()


class PlainSide:
    """Says what each act tells, as `EngineSide` does; `keys` of losses are chosen here."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self.world_size = max(setting.world_size for setting in settings)
        self.engines = [PlainEngine(setting, Net(setting, index)) for index, setting in enumerate(settings)]
        self.pending: dict[int, _Pending] = {}
        self.number = 0
        self._has_rounded = any(setting.precision == "bf16" for setting in settings)
        self.resolved: Act = ()
        self.drops: list[int] = []

    def do(self, number: int, act: Act) -> Told | Refused | Rank0:
        """Do an act. `resolved` is then what ranks are to do, and `drops` the losses that nobody needs any more."""
        self.number, self.resolved, self.drops = number, act, []
        if act[1] >= len(self.engines):
            return SKIPPED
        comes_after = act[0] in _AFTER_EDITS or (act[0] == "write" and act[2] == "load")
        if self.engines[act[1]].has_edited_shards and not comes_after:
            return SKIPPED
        told: Told | Refused | Rank0 = getattr(self, act[0])(*act[1:])
        for key in self.drops:
            self.pending.pop(key, None)
        return {} if told is None else told

    @property
    def is_rounded(self) -> bool:
        """Whether ranks have, or have had, numbers in 16 bits."""
        self._has_rounded |= any(engine.setting.precision == "bf16" for engine in self.engines)
        return self._has_rounded

    def common(self) -> Told:
        """Return what every act tells."""
        return {
            "steps": [engine.steps for engine in self.engines],
            "at boundary": [engine.at_boundary for engine in self.engines],
            "accumulation": [engine.accumulation for engine in self.engines],
        }

    def _inputs(self, index: int) -> list[Tensor]:
        """Return what the ranks are given, of the size that holds before the call."""
        engine = self.engines[index]
        return [inputs_of(engine.setting, engine.micro, self.number, rank) for rank in range(self.world_size)]

    def _forget_graphs(self, index: int) -> None:
        """Drop the losses of an engine that ends."""
        self.drops += [key for key, pending in self.pending.items() if index in pending.engines]

    def _mend(self, index: int) -> None:
        """A call of the engine comes, which cleans up after an exception."""
        self.engines[index].is_broken = False

    def forward(self, index: int, what: str, grad: bool, factor: float = 1.0) -> Told | Refused:
        engine, engines, inputs = self.engines[index], {index}, self._inputs(index)
        if what == "chain":
            if len(self.engines) < 2 or self.engines[0].setting.width != self.engines[1].setting.width:
                return SKIPPED
            engines = {0, 1}
        if what in ("whole", "chain"):
            for each in engines:
                self._mend(each)
        for each in engines if grad else ():
            self.engines[each].may_be_whole = True
        losses = []
        with torch.set_grad_enabled(grad):
            for x in inputs:
                if what == "whole":
                    out = engine.model(x)
                elif what == "chain":
                    out = self.engines[1 - index].model(engine.model(x))
                else:
                    out = engine.model.part(int(what))(x)
                losses.append(loss_of(out) * factor)
        if losses[0].requires_grad:
            self.pending[self.number] = _Pending(frozenset(engines), losses, what in ("whole", "chain"))
        is_open = any(self.engines[each].is_open for each in engines)
        return {"loss": OPEN if is_open else PerRank([loss.item() for loss in losses])}

    def saliency(self, index: int) -> Told:
        inputs = self._inputs(index)
        self._mend(index)
        self.engines[index].may_be_whole = True
        grads = []
        for x in inputs:
            x.requires_grad_()
            grads += torch.autograd.grad(loss_of(self.engines[index].model(x)), x)
        return {"input's gradient": PerRank([array(grad) for grad in grads])}

    def _mean(self, keys: Sequence[int]) -> Tensor:
        return sum(sum(self.pending[key].losses) for key in keys) / self.world_size  # type: ignore[return-value]

    def _grads(self, loss: Tensor) -> dict[nn.Parameter, Tensor | None] | None:
        """Return what a loss adds to each parameter; None where a graph reads weights that were written since.

        All of the graph goes back, as it does with an engine: `torch.autograd.grad` leaves out what it need not know.
        """
        before = {param: param.grad for engine in self.engines for param in engine.model.parameters()}
        for param in before:
            param.grad = None
        try:
            loss.backward(retain_graph=True)
            return {param: param.grad for param in before}
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            return None
        finally:
            for param, grad in before.items():
                param.grad = grad

    def _break(self, index: int) -> None:
        """An exception ends a backward: the accumulation begins anew."""
        self.engines[index].is_broken = True
        self.engines[index].drop()

    def backward(self, index: int, how: str, joint: bool, retain: bool) -> Refused | None:
        engine = self.engines[index]
        own = [key for key, pending in self.pending.items() if index in pending.engines]
        if not own or engine.has_set_grad:
            return SKIPPED
        keys = [own[-1]]
        if joint:  # the newest loss of the other engine, or an older one of this engine
            others = [key for key, pending in self.pending.items() if index not in pending.engines] or own[:-1]
            keys += others[-1:]
        self.resolved = ("backward", index, how, keys, retain)
        if how == "no_sync" and engine.setting.stage >= 2:
            return Refused("no_sync")
        loss = self._mean(keys)
        if how not in ("unscaled", "raw"):
            loss = loss / engine.accumulation
        grads = self._grads(loss)
        reached = frozenset[int]().union(*(self.pending[key].engines for key in keys))
        for each in reached:  # that of another engine ends no pass of theirs, nor does an error
            self.engines[each].may_be_whole = True
        if how == "raw":
            return self._raw_backward(keys, reached, grads, retain=retain)
        self._mend(index)
        if grads is None:
            self.drops += keys
            self._break(index)
            return Refused("weights written")
        engine.add_grads(grads)
        engine.shows_grads = engine.at_boundary and engine.setting.managed and how != "no_sync"
        if not retain:
            self.drops += keys
        return None

    def _raw_backward(
        self,
        keys: list[int],
        reached: frozenset[int],
        grads: dict[nn.Parameter, Tensor | None] | None,
        *,
        retain: bool,
    ) -> Refused | None:
        """A `backward()` of the script: every engine that it reaches takes its gradients."""
        engines = [self.engines[each] for each in reached]
        if not all(self.pending[key].is_of_engines for key in keys):
            is_shown = [each for each in reached if self.engines[each].shows_sums]
            if grads is None or len(keys) > 1 or (is_shown and len(reached) > 1):
                return SKIPPED  # which error comes first, and where, is open
            self.drops += keys
            for each in is_shown:
                self._break(each)
            return Refused("raw backward")
        if any(engine.has_set_grad for engine in engines) or (grads is None and len(reached) > 1):
            return SKIPPED
        if grads is None or not retain:
            self.drops += keys
        for each in reached:
            self._mend(each)
            if grads is None:
                self._break(each)
                return Refused("weights written")
        assert grads is not None
        for engine in engines:
            engine.add_grads(
                {param: None if grad is None else grad / engine.accumulation for param, grad in grads.items()}
            )
            engine.shows_grads = engine.at_boundary and engine.setting.managed
        return None

    def both(self, _index: int) -> Refused | None:
        if len(self.engines) < 2:
            return SKIPPED
        newest = []
        for index in (0, 1):
            own = [key for key, pending in self.pending.items() if pending.engines == {index}]
            if not own or self.engines[index].has_set_grad:
                return SKIPPED
            newest.append(own[-1])
        self.resolved = ("both", newest)
        self.drops += newest
        losses = [self._mean([key]) / each.accumulation for each, key in zip(self.engines, newest, strict=True)]
        grads = self._grads(torch.stack(losses).sum())
        for index, engine in enumerate(self.engines):
            self._mend(index)
            if grads is None:
                self._break(index)
                continue
            engine.add_grads(grads)
            engine.shows_grads = engine.at_boundary and engine.setting.managed
        return None if grads is not None else Refused("weights written")

    def step(self, index: int, how: str = "engine") -> Told | Refused:
        engine = self.engines[index]
        if how == "both":
            told = self.step(index)
            return told if isinstance(told, Refused) else self.step(index, "optimizer")
        if how == "engine" or engine.backward_done or engine.ended_by != "engine":
            self._mend(index)
        if not engine.backward_done:
            if engine.ended_by in (None, how):
                return Refused("no backward")
            engine.ended_by = None
            return {"norm": engine.norm}
        is_boundary = engine.at_boundary
        engine.backward_done = False
        engine.num_summed += 1
        if is_boundary:
            if engine.has_edited_shards:
                return Refused("shards written", ends=True)
            grads = [param.grad for param in engine.params if param.grad is not None]
            engine.norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
            if math.isfinite(engine.norm):
                if engine.setting.clipping:
                    for grad in grads:
                        grad.mul_(min(1.0, engine.setting.clipping / (engine.norm + 1e-6)))
                engine.optimizer.step()
                engine.may_be_whole = False
            engine.drop()
            engine.num_drops = 0
            engine.steps += 1
        engine.ended_by = how
        return {"norm": engine.norm}

    def zero_grad(self, index: int, how: str = "engine") -> Refused | None:
        engine = self.engines[index]
        if how == "optimizer" and not engine.backward_done:
            return None
        self._mend(index)
        is_between = engine.num_summed > 0 and not engine.backward_done
        if is_between and engine.num_drops:
            return Refused("zero_grad again")
        engine.num_drops += is_between
        engine.drop()
        return None

    def mode(self, index: int, training: bool) -> None:
        self.engines[index].model.train(training)

    def boundary(self, index: int, is_boundary: bool) -> Refused | None:
        if not self.engines[index].setting.managed:
            return Refused("boundary")
        self.engines[index].override = is_boundary
        return None

    def _resize(self, index: int, sizes: tuple[int, int]) -> None:
        engine = self.engines[index]
        engine.next_sizes = sizes
        if not engine.has_divided:
            engine.begin_sum()

    def batch(self, index: int, accumulation: int) -> Refused | None:
        if self.engines[index].next_sizes[1] != self.engines[index].micro:
            return SKIPPED  # how many samples that is depends on a size to come
        self._resize(index, (accumulation, self.engines[index].micro))
        return None

    def micro(self, index: int, samples: int) -> Refused | None:
        self._resize(index, (self.engines[index].next_sizes[0], samples))
        return None

    def rate(self, index: int, rate: float) -> None:
        self.engines[index].optimizer.param_groups[0]["lr"] = rate

    def freeze(self, index: int, part: int, frozen: bool) -> Refused | None:
        engine = self.engines[index]
        if engine.setting.model != "plain":
            return SKIPPED
        engine.model.part(part).requires_grad_(not frozen)
        return None

    def sync(self, index: int) -> None:
        pass

    def fail(self, index: int, where: str) -> Refused | None:
        engine = self.engines[index]
        if (
            where == "backward"
            and not engine.model.blocks[0].linear.weight.requires_grad
            and not (engine.model.blocks[1].linear.weight.requires_grad)
        ):
            return SKIPPED  # no gradient reaches the block
        if engine.has_set_grad:
            return SKIPPED
        if where != "gathered":
            self._mend(index)
            engine.may_be_whole = True
        if where in ("backward", "own"):
            self._break(index)
        return None

    def fail_alone(self, index: int) -> Refused | None:
        if self.engines[index].setting.is_sharded:
            return SKIPPED  # an error after a minute: tests/engine/test_exceptions.py
        self._mend(index)
        return None

    # ---- weights, gradients, states ----

    def _weights(self, index: int) -> Told:
        return {name: array(value) for name, value in self.engines[index].model.state_dict().items()}

    def read(self, index: int, how: str) -> Told | Refused | Rank0:
        engine = self.engines[index]
        if how == "momentum":
            if engine.setting.optimizer != "SGD":
                return SKIPPED
            states = {
                name: engine.optimizer.state[param].get("momentum_buffer")
                for name, param in named_grads_wanted(engine.model)
            }
            return {name: None if state is None else array(state) for name, state in states.items()}
        if how in ("parameters", "deepcopy", "rank_0", "thread") and engine.setting.is_sharded:
            return SKIPPED
        if how == "rank_0":
            return Rank0(self._weights(index))
        if engine.is_open and how != "fp32":
            return dict.fromkeys(
                engine.model.state_dict() if how == "state_dict" else dict(engine.model.named_parameters()), OPEN
            )
        if how in ("state_dict", "thread"):
            return self._weights(index)
        named = dict(engine.model.named_parameters())
        if how == "fp32":
            named = dict(named_grads_wanted(engine.model))
        return {name: array(param) for name, param in named.items()}

    def reader(self, index: int, on: bool) -> Refused | None:
        engine = self.engines[index]
        if on and (engine.setting.is_sharded or engine.is_read):
            return SKIPPED
        engine.is_read = on
        return None

    def evaluate_alone(self, index: int) -> Refused | Rank0:
        engine = self.engines[index]
        if engine.setting.is_sharded or engine.is_broken:
            return SKIPPED
        with torch.no_grad():
            return Rank0({"loss": loss_of(engine.model(self._inputs(index)[0])).item()})

    def part(self, _index: int) -> Refused:
        return Refused("parted in evaluation", ends=True)

    def write(self, index: int, how: str, part: int) -> Refused | None:
        engine = self.engines[index]
        if how == "data" and engine.setting.is_sharded:
            return SKIPPED
        if how == "load" and engine.is_open:
            return SKIPPED  # the ranks load what they read
        if how == "forgotten" and engine.setting.is_sharded and engine.may_be_whole:
            return SKIPPED  # what a pass has unsharded shows the write until it is released: an error in the next step
        params = list(engine.model.parameters())
        if how == "fp32":
            params = [weight_of(engine.model, part)]
            if not params[0].requires_grad:
                return SKIPPED
        engine.has_edited_shards &= how != "load"
        if engine.setting.is_sharded and how in ("edit", "earlier", "forgotten"):
            if how != "forgotten":
                engine.has_edited_shards = True
                engine.is_open |= engine.may_be_whole
            torch.autograd.graph.increment_version(params)  # autograd has counted the write
            return None
        with torch.no_grad():
            for param in params:
                (param.data if how == "data" else param).mul_(0.5 if how == "fp32" else 0.9)
        return None

    def write_alone(self, index: int) -> Refused:
        engine = self.engines[index]
        if engine.is_broken or engine.has_set_grad:  # the backward refuses that first
            return SKIPPED
        if not any(True for _ in named_grads_wanted(engine.model)):
            return SKIPPED
        return Refused("shards written" if engine.setting.is_sharded else "parted", ends=True)

    def _has_grads(self, index: int) -> bool:
        engine = self.engines[index]
        return engine.backward_done and engine.at_boundary and not engine.is_broken and not engine.has_set_grad

    def read_grad(self, index: int, part: int) -> Told | Refused:
        param = weight_of(self.engines[index].model, part)
        if not self._has_grads(index) or not param.requires_grad:
            return SKIPPED
        return {"gradient": None if param.grad is None else array(param.grad)}

    def write_grad(self, index: int, part: int) -> Refused | None:
        engine = self.engines[index]
        param = weight_of(engine.model, part)
        if not self._has_grads(index) or param.grad is None:
            return SKIPPED
        param.grad = grad_of_script(engine.setting.width)
        return None

    def own_grad(self, index: int, how: str, part: int) -> Told | Refused | None:
        engine = self.engines[index]
        param = weight_of(engine.model, part)
        if not self._has_grads(index) or param.grad is None or engine.has_set_grad:
            return SKIPPED
        if how == "set" and engine.setting.is_sharded:
            return Refused("gradient of another shape")
        if how in ("set", "none"):
            engine.has_set_grad = True
            param.grad = grad_of_script(engine.setting.width) if how == "set" else None
            return None
        if engine.setting.stage or not engine.shows_grads or engine.setting.precision == "bf16":
            return Refused("gradients elsewhere")
        if how == "clip":
            return {"norm of all": float(torch.nn.utils.clip_grad_norm_(engine.model.parameters(), 0.05))}
        param.grad.mul_(0.5)
        return None

    # ---- checkpoints ----

    def save(self, index: int) -> Refused | None:
        engine = self.engines[index]
        engine.saved = _Saved(
            copy.deepcopy(engine.model.state_dict()),
            [copy.deepcopy(engine.optimizer.state[param]) for param in engine.params],
            [group["lr"] for group in engine.optimizer.param_groups],
            engine.steps,
        )
        return None

    def load(self, index: int) -> Refused | None:
        engine = self.engines[index]
        if engine.saved is None:
            return SKIPPED
        engine.model.load_state_dict(engine.saved.weights)
        for param, state in zip(engine.params, engine.saved.states, strict=True):
            engine.optimizer.state[param] = copy.deepcopy(state)
        for group, rate in zip(engine.optimizer.param_groups, engine.saved.rates, strict=True):
            group["lr"] = rate
        engine.steps, engine.is_broken, engine.norm = engine.saved.steps, False, None
        engine.drop()
        return None

    def reload(self, index: int, setting: Setting) -> Refused | None:
        old = self.engines[index]
        kept = (
            ("optimizer", "model", "width") if len(self.engines) == 1 else ("optimizer", "model", "width", "precision")
        )
        setting = replace(setting, **{name: getattr(old.setting, name) for name in kept})
        if old.saved is None or setting.world_size > self.world_size:
            return SKIPPED
        self.resolved = ("reload", index, setting)
        self._forget_graphs(index)
        new = PlainEngine(setting, Net(setting, index))
        new.saved = old.saved
        self.engines[index] = new
        return self.load(index)

    def move(self, _index: int, num_ranks: int, settings: Sequence[Setting]) -> Refused | None:
        """Save all, and continue on another number of ranks. `resolved` has the settings there."""
        if num_ranks == self.world_size or any(setting.world_size > num_ranks for setting in settings):
            return SKIPPED
        if any(engine.has_edited_shards or engine.is_read for engine in self.engines):
            return SKIPPED
        for index in range(len(self.engines)):
            self.save(index)
        self.world_size = num_ranks
        for index, setting in zip(range(len(self.engines)), settings, strict=False):
            self.reload(index, setting)
        self.resolved = ("move", [engine.setting for engine in self.engines])
        return None

    def again(self, index: int) -> Refused | None:
        old = self.engines[index]
        if old.is_read:
            return SKIPPED
        self._forget_graphs(index)
        old.model.zero_grad()
        self.engines[index] = PlainEngine(old.setting, old.model, saved=old.saved)
        return None
