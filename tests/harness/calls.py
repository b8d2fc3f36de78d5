"""Programs of calls on engines, and what plain torch says that each call does.

A program is a list of settings, one for each engine, and a list of acts. The parent sends one act after another to a
pool of ranks, where an `EngineSide` does it, and lets a `PlainSide` do it in one process that knows the data of all
ranks: autograd over the same micro-batches, one optimizer, no shards. After every act both must tell the same, or every
rank must raise the error that the documentation names, and none may hang. An act that means nothing in the state that a
program has reached (a backward without a forward) is left out on both sides, so every list of acts is a program.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.ranks import RankPool
from torch import Tensor, nn

import launcher
from launcher.zero import GatheredParameters

MICRO, LR, MOMENTUM, DECAY = 2, 0.2, 0.9, 0.01
NUM_BLOCKS = 3
HANG_S = 40.0  # of one act, where the engine itself gives up after half of its usual times
RELATIVE, ABSOLUTE = 5e-5, 2e-6
Act = tuple[Any, ...]  # the name of a method of both sides, the number of an engine, and arguments
Told = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One engine."""

    stage: int = 2
    offload: str = "none"  # "cpu", "nvme": the optimizer's states, at stage 3 parameters too
    accumulation: int = 1
    optimizer: str = "SGD"
    clipping: float = 0.0
    managed: bool = True
    small_is_whole: bool = False  # at stage 3 nothing reaches the size from which parameters are sharded
    keeps: bool = True  # at stage 3 what is used again soon stays unsharded
    mics: bool = False  # shards over 2 of 4 ranks
    model: str = "plain"  # "tied", "frozen"
    width: int = 8

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are shards between their uses."""
        return self.stage == 3 and not self.small_is_whole

    @property
    def world_size(self) -> int:
        """The ranks that the setting needs."""
        return 4 if self.mics else 2

    def config(self, folder: Path) -> dict[str, Any]:
        """Return the engine's config. folder: for what is on disk."""
        place: dict[str, Any] = {"device": self.offload}
        if self.offload == "nvme":
            place["nvme_path"] = str(folder)
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": self.width**2 + self.width}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 10**6 if self.small_is_whole else 0
            zero["stage3_max_reuse_distance"] = 10**9 if self.keeps else 0
        if self.mics:
            zero["mics_shard_size"] = 2
        if self.offload != "none":
            zero["offload_optimizer"] = place
            if self.stage == 3:
                zero["offload_param"] = place
        params: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
        if self.optimizer == "AdamW":  # a large eps: else a step has the size of the rate however small a gradient is
            params = {"lr": LR, "eps": 0.1, "weight_decay": DECAY}
        return {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "managed_gradient_accumulation": self.managed,
            "steps_per_print": 0,
            "zero_optimization": zero,
            "optimizer": {"type": self.optimizer, "params": params},
        }

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name, value in vars(self).items() if value != getattr(Setting, name)]
        return f"Setting({', '.join(given)})"


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(x))
        return out


class Net(nn.Module):
    """Blocks and a head, [batch, width] -> [batch, width], so that one may follow another."""

    def __init__(self, setting: Setting, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.blocks = nn.Sequential(*(Block(setting.width) for _ in range(NUM_BLOCKS)))
        self.head = nn.Linear(setting.width, setting.width)
        if setting.model == "tied":
            self.blocks[2].linear.weight = self.blocks[0].linear.weight
        if setting.model == "frozen":
            self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out

    def part(self, index: int) -> nn.Module:
        """Return one of the modules that can be called alone."""
        return self.head if index % (NUM_BLOCKS + 1) == NUM_BLOCKS else self.blocks[index % NUM_BLOCKS]


def inputs_of(setting: Setting, samples: int, number: int, rank: int) -> Tensor:
    """Return what a rank is given in one act."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(samples, setting.width, generator=generator)


def loss_of(out: Tensor) -> Tensor:
    """Return the loss of an output."""
    return (out - 0.5).pow(2).mean()


def named_grads_wanted(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the parameters that train, by name."""
    return ((name, param) for name, param in model.named_parameters() if param.requires_grad)


def array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a copy that costs no file descriptor on its way to another process."""
    return tensor.detach().float().cpu().numpy().copy()


def weight_of(model: Net, index: int) -> nn.Parameter:
    """Return the weight of one part."""
    part = model.part(index)
    return part.weight if isinstance(part, nn.Linear) else part.linear.weight  # type: ignore[return-value]


class OnPurpose(Exception):
    """What a program raises itself."""


def fail(*_: Any) -> None:
    """Raise."""
    raise OnPurpose("on purpose")


# ---- on a rank ----


class EngineSide:
    """Does acts on engines: each method is an act."""

    def __init__(self, rank: int, world_size: int, settings: Sequence[Setting], folder: Path) -> None:
        self.rank, self.world_size, self.settings, self.folder = rank, world_size, list(settings), folder
        self.pending: dict[int, Tensor] = {}
        self.number = 0  # of the act
        self.readers: dict[int, tuple[threading.Event, threading.Thread]] = {}
        self.engines = [self._engine(setting, Net(setting, index)) for index, setting in enumerate(settings)]

    def _engine(self, setting: Setting, model: nn.Module) -> Any:
        return launcher.initialize(model=model, config=setting.config(self.folder))[0]

    def do(self, number: int, act: Act, drops: Sequence[int]) -> Told:
        """Do an act; return what it has told, and what every act tells."""
        self.number = number
        told: Told = {}
        try:
            told = getattr(self, act[0])(*act[1:]) or {}
        except Exception as error:  # noqa: BLE001  # the parent judges it
            told["error"] = (type(error).__name__, str(error))
        for key in drops:
            self.pending.pop(key, None)
        told["steps"] = [engine.global_steps for engine in self.engines]
        told["at boundary"] = [engine.is_gradient_accumulation_boundary() for engine in self.engines]
        told["accumulation"] = [engine.gradient_accumulation_steps() for engine in self.engines]
        return told

    def _inputs(self, index: int) -> Tensor:
        samples = self.engines[index].train_micro_batch_size_per_gpu()
        return inputs_of(self.settings[index], samples, self.number, self.rank)

    def forward(self, index: int, what: str, grad: bool, factor: float = 1.0) -> Told:
        engine, x = self.engines[index], self._inputs(index)
        with torch.set_grad_enabled(grad):
            if what == "whole":
                out = engine(x)
            elif what == "chain":
                out = self.engines[1 - index](engine(x))
            else:
                out = engine.module.part(int(what))(x)
            loss = loss_of(out) * factor
        if loss.requires_grad:
            self.pending[self.number] = loss
        return {"loss": loss.item()}

    def saliency(self, index: int) -> Told:
        x = self._inputs(index).requires_grad_()
        (grad,) = torch.autograd.grad(loss_of(self.engines[index](x)), x)
        return {"input's gradient": array(grad)}

    def backward(self, index: int, how: str, keys: list[int], retain: bool) -> None:
        engine = self.engines[index]
        losses = [self.pending[key] for key in keys]
        loss = sum(losses[1:], losses[0])
        if how == "own":
            engine.scale(loss).backward(retain_graph=retain)
        elif how == "raw":
            loss.backward(retain_graph=retain)
        elif how == "no_sync":
            with engine.no_sync():
                engine.backward(loss, retain_graph=retain)
        else:
            engine.backward(loss, retain_graph=retain, scale_wrt_gas=how != "unscaled")

    def both(self, keys: list[int]) -> None:
        sum(engine.scale(self.pending[key]) for engine, key in zip(self.engines, keys, strict=True)).backward()

    def step(self, index: int) -> Told:
        self.engines[index].step()
        return {"norm": self.engines[index].get_global_grad_norm()}

    def zero_grad(self, index: int) -> None:
        self.engines[index].zero_grad()

    def mode(self, index: int, training: bool) -> None:
        self.engines[index].train(training)

    def boundary(self, index: int, is_boundary: bool) -> None:
        self.engines[index].set_gradient_accumulation_boundary(is_boundary)

    def batch(self, index: int, accumulation: int) -> None:
        engine = self.engines[index]
        engine.set_train_batch_size(accumulation * engine.train_micro_batch_size_per_gpu() * self.world_size)

    def micro(self, index: int, samples: int) -> None:
        self.engines[index].set_train_micro_batch_size(samples)

    def rate(self, index: int, rate: float) -> None:
        for group in self.engines[index].optimizer.param_groups:
            group["lr"] = rate

    def freeze(self, index: int, part: int, frozen: bool) -> None:
        self.engines[index].module.part(part).requires_grad_(not frozen)

    def sync(self, index: int) -> None:
        self.engines[index].synchronize_parameters()

    def fail(self, index: int, where: str) -> None:
        engine, x = self.engines[index], self._inputs(index)
        block = engine.module.blocks[1]
        handle = None
        if where == "forward":
            handle = block.register_forward_pre_hook(fail)
        elif where == "backward":
            handle = block.register_forward_hook(lambda *args: args[-1].register_hook(fail) and None)
        try:
            if where == "gathered":
                with GatheredParameters(engine.module.parameters(), modifier_rank=0):
                    fail()
            loss = loss_of(engine(x))
            if where == "own":
                loss.register_hook(fail)
                engine.scale(loss).backward()
            engine.backward(loss)
        except OnPurpose:
            return
        finally:
            if handle is not None:
                handle.remove()
        raise AssertionError("nothing was raised")

    # ---- weights, gradients, states ----

    def read(self, index: int, how: str) -> Told | None:
        engine = self.engines[index]
        model = engine.module
        if how == "state_dict":
            return {name: array(value) for name, value in engine.state_dict().items()}
        if how == "gathered":
            with GatheredParameters(model.parameters()):
                return {name: array(value) for name, value in model.named_parameters()}
        if how == "fp32":
            return {
                name: array(value)
                for name, param in named_grads_wanted(model)
                if (value := launcher.zero.safe_get_full_fp32_param(param)) is not None
            }
        if how == "parameters":
            return {name: array(value) for name, value in model.named_parameters()}
        if how == "deepcopy":
            return {name: array(value) for name, value in copy.deepcopy(model).named_parameters()}
        if how == "rank 0":
            return {name: array(value) for name, value in model.state_dict().items()} if self.rank == 0 else None
        if how == "thread":
            found: Told = {}
            thread = threading.Thread(
                target=lambda: found.update({name: array(value) for name, value in model.state_dict().items()})
            )
            thread.start()
            thread.join()
            return found
        assert how == "momentum"
        return {
            name: None if value is None else array(value)
            for name, param in named_grads_wanted(model)
            for value in [launcher.zero.safe_get_full_optimizer_state(param, "momentum_buffer")]
        }

    def reader(self, index: int, on: bool) -> None:
        """Have a thread read all weights again and again, as a monitor does."""
        if index in self.readers:
            over, thread = self.readers.pop(index)
            over.set()
            thread.join()
        if not on:
            return
        over, model = threading.Event(), self.engines[index].module

        def watch() -> None:
            while not over.wait(0.0005):
                model.state_dict()
                torch.stack([param.detach().sum() for param in model.parameters()])

        thread = threading.Thread(target=watch, daemon=True)
        self.readers[index] = over, thread
        thread.start()

    def evaluate_alone(self, index: int) -> Told | None:
        if self.rank != 0:
            return None
        with torch.no_grad():
            return {"loss": loss_of(self.engines[index](self._inputs(index))).item()}

    def write(self, index: int, how: str, part: int) -> None:
        engine, model = self.engines[index], self.engines[index].module
        if how == "fp32":
            param = weight_of(model, part)
            value = launcher.zero.safe_get_full_fp32_param(param)
            assert value is not None
            launcher.zero.safe_set_full_fp32_param(param, value * 0.5)
        elif how == "load":
            engine.load_state_dict({name: value * 0.9 for name, value in engine.state_dict().items()})
        elif how in ("gathered", "forgotten"):
            with GatheredParameters(model.parameters(), modifier_rank=0 if how == "gathered" else None), torch.no_grad():
                for param in model.parameters():
                    if self.rank == 0 or how == "forgotten":
                        param.mul_(0.9)
        elif how == "data":
            for param in model.parameters():
                param.data.mul_(0.9)
        elif how == "rank 0":
            with torch.no_grad():
                for param in model.parameters() if self.rank == 0 else ():
                    param.mul_(0.9)
        else:
            assert how == "edit"
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.9)

    def read_grad(self, index: int, part: int) -> Told:
        grad = launcher.zero.safe_get_full_grad(weight_of(self.engines[index].module, part))
        return {"gradient": None if grad is None else array(grad)}

    def write_grad(self, index: int, part: int) -> None:
        param = weight_of(self.engines[index].module, part)
        width = self.settings[index].width
        launcher.zero.safe_set_full_grad(param, torch.linspace(-0.1, 0.1, width * width).view(width, width))

    # ---- checkpoints ----

    def save(self, index: int) -> None:
        self.engines[index].save_checkpoint(self.folder / f"saved{index}", tag=f"at{self.number}")

    def load(self, index: int) -> None:
        self.engines[index].load_checkpoint(self.folder / f"saved{index}")

    def reload(self, index: int, setting: Setting) -> None:
        self.engines[index].destroy()
        self.settings[index] = setting
        self.engines[index] = self._engine(setting, Net(setting, 100))
        self.load(index)

    def again(self, index: int) -> None:
        model = self.engines[index].module
        self.engines[index].destroy()
        self.engines[index] = self._engine(self.settings[index], model)

    def finish(self, _index: int) -> None:
        for index in list(self.readers):
            self.reader(index, False)
        self.pending.clear()
        for engine in self.engines:
            engine.destroy()
        self.engines.clear()


_side: EngineSide | None = None


def _start(rank: int, world_size: int, settings: Sequence[Setting], folder: Path, errors: Path) -> Told:
    """Make the engines of a program. errors: where the process writes what it has to say from now on."""
    global _side
    from launcher.base.timeouts import timeouts

    os.environ["LAUNCH_TIMEOUT_SCALE"] = "0.5"
    timeouts.cache_clear()
    said = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(said, stream)
    os.close(said)
    _side = None
    _side = EngineSide(rank, world_size, settings, folder)
    return {}


def _do(rank: int, world_size: int, number: int, act: Act, drops: Sequence[int]) -> Told:
    assert _side is not None
    return _side.do(number, act, drops)


# ---- in one process ----


@dataclass(frozen=True)
class Refused:
    """What every rank must raise. ends: nothing is said of the engine after it."""

    kind: str
    ends: bool = False


SKIPPED = Refused("skipped")


@dataclass
class Rank0:
    """What rank 0 alone tells."""

    told: Told


@dataclass
class PerRank:
    """A value for each rank."""

    values: list[Any]


@dataclass
class _Pending:
    engines: frozenset[int]
    losses: list[Tensor]  # by rank


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
    override: bool | None = None
    num_drops: int = 0
    norm: float | None = None
    is_broken: bool = False  # an exception has ended a backward, and no call has come since
    has_edited_shards: bool = False
    has_parted: bool = False  # one rank has other weights than the others
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

    def add_grads(self, loss: Tensor) -> None:
        params = [param for param in self.params if param.requires_grad]
        grads = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
        for param, grad in zip(params, grads, strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad + grad

    def begin_sum(self) -> None:
        self.num_summed, self.has_divided, self.backward_done = 0, False, False
        self.accumulation, self.micro = self.next_sizes

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
        self.resolved: Act = ()
        self.drops: list[int] = []

    def do(self, number: int, act: Act) -> Told | Refused | Rank0:
        """Do an act. `resolved` is then what ranks are to do, and `drops` the losses that nobody needs any more."""
        self.number, self.resolved, self.drops = number, act, []
        index = act[1]
        if index >= len(self.engines):
            return SKIPPED
        told: Told | Refused | Rank0 = getattr(self, act[0])(*act[1:])
        for key in self.drops:
            self.pending.pop(key, None)
        return {} if told is None else told

    def common(self) -> Told:
        """Return what every act tells."""
        return {
            "steps": [engine.steps for engine in self.engines],
            "at boundary": [engine.at_boundary for engine in self.engines],
            "accumulation": [engine.accumulation for engine in self.engines],
        }

    def _inputs(self, index: int, rank: int) -> Tensor:
        engine = self.engines[index]
        return inputs_of(engine.setting, engine.micro, self.number, rank)

    def _forget_graphs(self, index: int) -> None:
        """Drop the losses whose graphs read weights that have changed."""
        self.drops += [key for key, pending in self.pending.items() if index in pending.engines]

    def _mend(self, index: int) -> None:
        """A call of the engine comes after an exception."""
        self.engines[index].is_broken = False

    def forward(self, index: int, what: str, grad: bool, factor: float = 1.0) -> Told | Refused:
        engine, engines = self.engines[index], {index}
        if what == "chain":
            if len(self.engines) < 2 or self.engines[0].setting.width != self.engines[1].setting.width:
                return SKIPPED
            engines = {0, 1}
        if what in ("whole", "chain"):
            for each in engines:
                self._mend(each)
        losses = []
        with torch.set_grad_enabled(grad):
            for rank in range(self.world_size):
                x = self._inputs(index, rank)
                if what == "whole":
                    out = engine.model(x)
                elif what == "chain":
                    out = self.engines[1 - index].model(engine.model(x))
                else:
                    out = engine.model.part(int(what))(x)
                losses.append(loss_of(out) * factor)
        if losses[0].requires_grad:
            self.pending[self.number] = _Pending(frozenset(engines), losses)
        return {"loss": PerRank([loss.item() for loss in losses])}

    def saliency(self, index: int) -> Told:
        self._mend(index)
        grads = []
        for rank in range(self.world_size):
            x = self._inputs(index, rank).requires_grad_()
            grads += torch.autograd.grad(loss_of(self.engines[index].model(x)), x)
        return {"input's gradient": PerRank([array(grad) for grad in grads])}

    def _mean(self, keys: Sequence[int]) -> Tensor:
        return sum(sum(self.pending[key].losses) for key in keys) / self.world_size  # type: ignore[return-value]

    def backward(self, index: int, how: str, joint: bool, retain: bool) -> Refused | None:
        engine = self.engines[index]
        own = [key for key, pending in self.pending.items() if index in pending.engines]
        if not own:
            return SKIPPED
        keys = [own[-1]]
        if joint:  # the newest loss of the other engine, or an older one of this engine
            others = [key for key, pending in self.pending.items() if index not in pending.engines] or own[:-1]
            keys += others[-1:]
        self.resolved = ("backward", index, how, keys, retain)
        if how == "no_sync" and engine.setting.stage >= 2:
            return Refused("no_sync")
        if how == "raw":
            self.drops += keys
            return Refused("raw backward")
        self._mend(index)
        loss = self._mean(keys)
        if how != "unscaled":
            loss = loss / engine.accumulation
        engine.add_grads(loss)
        engine.has_divided = engine.backward_done = True
        if not retain:
            self.drops += keys
        return None

    def both(self, _index: int) -> Refused | None:
        if len(self.engines) < 2:
            return SKIPPED
        newest = []
        for index in (0, 1):
            own = [key for key, pending in self.pending.items() if pending.engines == {index}]
            if not own:
                return SKIPPED
            newest.append(own[-1])
        self.resolved = ("both", newest)
        for index, (engine, key) in enumerate(zip(self.engines, newest, strict=True)):
            self._mend(index)
            engine.add_grads(self._mean([key]) / engine.accumulation)
            engine.has_divided = engine.backward_done = True
        self.drops += newest
        return None

    def step(self, index: int) -> Told | Refused:
        engine = self.engines[index]
        self._mend(index)
        if not engine.backward_done:
            return Refused("no backward")
        is_boundary = engine.at_boundary
        engine.backward_done = False
        engine.num_summed += 1
        if is_boundary:
            if engine.has_parted:
                return Refused("parted", ends=True)
            if engine.has_edited_shards:
                return Refused("shards written", ends=True)
            grads = [param.grad for param in engine.params if param.grad is not None]
            engine.norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
            if math.isfinite(engine.norm):
                if engine.setting.clipping:
                    for grad in grads:
                        grad.mul_(min(1.0, engine.setting.clipping / (engine.norm + 1e-6)))
                engine.optimizer.step()
            engine.drop()
            engine.num_drops = 0
            engine.steps += 1
            self._forget_graphs(index)
        return {"norm": engine.norm}

    def zero_grad(self, index: int) -> Refused | None:
        engine = self.engines[index]
        self._mend(index)
        is_between = engine.num_summed > 0 and not engine.backward_done
        if is_between and engine.num_drops:
            return Refused("zero_grad again")
        engine.num_drops += is_between
        engine.drop()
        return None

    def mode(self, index: int, training: bool) -> None:
        self.engines[index].model.train(training)

    def boundary(self, index: int, is_boundary: bool) -> None:
        self.engines[index].override = is_boundary

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

    def micro(self, index: int, samples: int) -> None:
        self._resize(index, (self.engines[index].next_sizes[0], samples))

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
        if where == "backward" and not engine.model.blocks[0].linear.weight.requires_grad and not (
            engine.model.blocks[1].linear.weight.requires_grad
        ):
            return SKIPPED  # no gradient reaches the block
        if where != "gathered":
            self._mend(index)
        if where in ("backward", "own"):
            engine.drop()
            engine.is_broken = True
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
        if how in ("parameters", "deepcopy", "rank 0", "thread") and engine.setting.is_sharded:
            return SKIPPED
        if how == "rank 0":
            return Rank0(self._weights(index))
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
        if engine.setting.is_sharded:
            return Refused("evaluation alone", ends=True)
        if engine.is_broken:
            return SKIPPED
        with torch.no_grad():
            return Rank0({"loss": loss_of(engine.model(self._inputs(index, 0))).item()})

    def write(self, index: int, how: str, part: int) -> Refused | None:
        engine = self.engines[index]
        if how == "data" and engine.setting.is_sharded:
            return SKIPPED
        params = list(engine.model.parameters())
        if how == "fp32":
            params = [weight_of(engine.model, part)]
            if not params[0].requires_grad:
                return SKIPPED
        self._forget_graphs(index)
        if how == "edit" and engine.setting.is_sharded:
            engine.has_edited_shards = True
            return None
        if how == "rank 0":
            if engine.setting.is_sharded:
                engine.has_edited_shards = True
            else:
                engine.has_parted = True
            return None
        if how == "forgotten" and engine.setting.is_sharded:
            return None
        with torch.no_grad():
            for param in params:
                param.mul_(0.5 if how == "fp32" else 0.9)
        return None

    def _has_grads(self, index: int) -> bool:
        engine = self.engines[index]
        return engine.backward_done and engine.at_boundary and not engine.is_broken

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
        param.grad = torch.linspace(-0.1, 0.1, param.numel()).view(param.shape)
        return None

    # ---- checkpoints ----

    def save(self, index: int) -> Refused | None:
        engine = self.engines[index]
        if engine.has_parted or engine.has_edited_shards:
            return SKIPPED
        engine.saved = _Saved(
            copy.deepcopy(engine.model.state_dict()),
            [copy.deepcopy(engine.optimizer.state[param]) for param in engine.params],
            [group["lr"] for group in engine.optimizer.param_groups],
            engine.steps,
        )
        return None

    def load(self, index: int) -> Refused | None:
        engine = self.engines[index]
        if engine.saved is None or engine.has_parted or engine.has_edited_shards:
            return SKIPPED
        engine.model.load_state_dict(engine.saved.weights)
        for param, state in zip(engine.params, engine.saved.states, strict=True):
            engine.optimizer.state[param] = copy.deepcopy(state)
        for group, rate in zip(engine.optimizer.param_groups, engine.saved.rates, strict=True):
            group["lr"] = rate
        engine.steps, engine.is_broken = engine.saved.steps, False
        engine.drop()
        self._forget_graphs(index)
        return None

    def reload(self, index: int, setting: Setting) -> Refused | None:
        old = self.engines[index]
        setting = replace(setting, optimizer=old.setting.optimizer, model=old.setting.model, width=old.setting.width)
        if old.saved is None or setting.world_size > self.world_size or old.has_parted or old.has_edited_shards:
            return SKIPPED
        self.resolved = ("reload", index, setting)
        self._forget_graphs(index)
        new = PlainEngine(setting, Net(setting, index))
        new.saved = old.saved
        self.engines[index] = new
        return self.load(index)

    def again(self, index: int) -> Refused | None:
        old = self.engines[index]
        if old.has_parted or old.has_edited_shards or old.is_read:
            return SKIPPED
        self._forget_graphs(index)
        old.model.zero_grad()
        self.engines[index] = PlainEngine(old.setting, old.model, saved=old.saved)
        return None


# ---- both ----


class Crew(RankPool):
    """Ranks that do acts; ended as soon as one of them tells something else than it should."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.folder = Path(tempfile.mkdtemp(prefix="sequences-"))
        self.is_open = True

    def close(self) -> None:
        """End the processes."""
        self.is_open = False
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def tell(self, body: Callable[..., Told], *args: Any) -> list[Told]:
        """Have every rank call `body`; return what each tells. Raises: AssertionError where one hangs."""
        for _, pipe in self._ranks:
            pipe.send((body, args))
        found: list[Told] = []
        end_s = time.monotonic() + HANG_S
        for rank, (_, pipe) in enumerate(self._ranks):
            try:
                if not pipe.poll(max(0.0, end_s - time.monotonic())):
                    raise AssertionError(f"rank {rank} hung:\n{self._dump_and_close()}")
                is_fine, value = pipe.recv()
                found.append(value if is_fine else {"error": ("in the harness", value)})
            except (EOFError, ConnectionError):
                found.append({"error": ("ended", self.said())})
        return found

    def said(self) -> str:
        """Return what the ranks have written of errors."""
        path = self.folder / "errors"
        return path.read_text(errors="replace") if path.exists() else ""


_crews: dict[int, Crew] = {}


def _crew_of(world_size: int) -> Crew:
    crew = _crews.get(world_size)
    if crew is None or not crew.is_open:
        crew = _crews[world_size] = Crew(world_size)
    return crew


def expanded(acts: Sequence[Act], num_engines: int) -> Iterator[Act]:
    """Return the acts one by one, and those that look at everything at the end."""
    ends: list[Act] = []
    for index in range(num_engines):
        ends += [("boundary", index, True), ("train", index), ("read", index, "state_dict"), ("read", index, "fp32")]
    for act in [*acts, *ends]:
        if act[0] == "train":
            yield from (("forward", act[1], "whole", True), ("backward", act[1], "engine", False, False), ("step", act[1]))
        else:
            yield act


def run_program(settings: Sequence[Setting], acts: Sequence[Act], errors: dict[str, tuple[str, str]]) -> None:
    """Run a program on ranks and in plain torch. errors: kind -> class and a part of the text.

    Raises: AssertionError with the program and the first act that told something else.
    """
    plain = PlainSide(settings)
    crew = _crew_of(plain.world_size)
    folder = Path(tempfile.mkdtemp(dir=crew.folder))
    done: list[Act] = []
    try:
        _compare(crew.tell(_start, list(settings), folder, crew.folder / "errors"), {}, {}, errors)
        for number, act in enumerate(expanded(acts, len(settings))):
            expected = plain.do(number, act)
            if expected is SKIPPED:
                continue
            done.append(act)
            found = crew.tell(_do, number, plain.resolved, plain.drops)
            _compare(found, expected, plain.common(), errors)
            if isinstance(expected, Refused) and expected.ends:
                crew.close()
                return
        _compare(crew.tell(_do, -1, ("finish", 0), ()), {}, {}, errors)
    except AssertionError as error:
        crew.close()
        lines = "\n".join(f"    {act!r}," for act in acts)
        text = f"run_program(\n  {list(settings)!r},\n  [\n{lines}\n  ],\n)"
        last = f"in act {len(done)}, {done[-1]!r}" if done else "at the start"
        raise AssertionError(f"{last}: {error}\n{text}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compare(
    found: list[Told], expected: Told | Refused | Rank0, common: Told, errors: dict[str, tuple[str, str]]
) -> None:
    """Raise AssertionError where a rank has told something else."""
    problems: list[str] = []
    for rank, told in enumerate(found):
        error = told.pop("error", None)
        if isinstance(expected, Refused):
            kind, text = errors[expected.kind]
            if error is None or error[0] != kind or text not in error[1]:
                problems.append(f"rank {rank} should raise {kind} with {text!r}, and got {error or told}")
            continue
        if error is not None:
            problems.append(f"rank {rank} raised {error[0]}: {error[1]}")
            continue
        wanted = {**common}
        if isinstance(expected, Rank0):
            wanted.update(expected.told if rank == 0 else {})
        else:
            wanted.update(expected)
        if common and wanted.keys() != told.keys():
            problems.append(f"rank {rank} told of {sorted(told)} in place of {sorted(wanted)}")
            continue
        for name, value in wanted.items():
            value = value.values[rank] if isinstance(value, PerRank) else value
            if not _is_close(told[name], value):
                problems.append(f"rank {rank}, {name}: {_shown(told[name], value)}")
    assert not problems, "\n".join(problems)


def _is_close(found: Any, expected: Any) -> bool:
    if expected is None or found is None:
        other = found if expected is None else expected  # what has not been used has none, or zeros
        return other is None or (isinstance(other, np.ndarray) and not other.any())
    if isinstance(expected, np.ndarray):
        if not np.isfinite(expected).all():
            return bool(not np.isfinite(found).all())
        return bool(np.abs(found - expected).max() <= RELATIVE * np.abs(expected).max() + ABSOLUTE)
    if isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE) or (
            not math.isfinite(expected) and not math.isfinite(found)
        )
    return bool(found == expected)


def _shown(found: Any, expected: Any) -> str:
    if isinstance(found, np.ndarray) and isinstance(expected, np.ndarray):
        off = np.abs(found - expected).max()
        return f"off by {off:.3g}, {found.ravel()[:3]} in place of {expected.ravel()[:3]}"
    return f"{found!r} in place of {expected!r}"
