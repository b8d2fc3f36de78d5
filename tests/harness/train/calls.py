"""What users call on an engine, as acts of a program: on the ranks. `harness.train.plain_calls` has the same acts in
plain torch, and `harness.train.programs` runs both."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.launch.command import with_limits
from torch import Tensor, nn

import launcher
from launcher.zero import GatheredParameters

MICRO, LR, MOMENTUM, DECAY = 2, 0.2, 0.9, 0.01
NUM_BLOCKS = 3
Act = tuple[Any, ...]  # the name of a method of both sides, the number of an engine, and arguments
Told = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One engine."""

    stage: int = 2
    offload: str = "none"  # "cpu", "nvme": the optimizer's states, at stage 3 parameters too; "speculative": on host
    accumulation: int = 1
    optimizer: str = "SGD"
    clipping: float = 0.0
    managed: bool = True
    small_is_whole: bool = False  # at stage 3 nothing reaches the size from which parameters are sharded
    keeps: bool = True  # at stage 3 what is used again soon stays unsharded
    mics: bool = False  # shards over 2 of 4 ranks
    model: str = "plain"  # "tied", "frozen"
    precision: str = "fp32"  # "bf16"
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
        place: dict[str, Any] = {"device": "cpu" if self.offload == "speculative" else self.offload}
        if self.offload == "nvme":
            place["nvme_path"] = str(folder)
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": self.width**2 + self.width}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 10**6 if self.small_is_whole else 0
            zero["stage3_max_reuse_distance"] = 10**9 if self.keeps else 0
        if self.mics:
            zero["mics_shard_size"] = 2
        if self.offload != "none":
            zero["offload_optimizer"] = {**place, "super_offload": self.offload == "speculative"}
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
            "bf16": {"enabled": self.precision == "bf16"},
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
    return (out.float() - 0.5).pow(2).mean()


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


def grad_of_script(width: int) -> Tensor:
    """Return a gradient of a weight that no loss has made."""
    return torch.linspace(-0.1, 0.1, width * width).view(width, width)


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
        self.earlier: dict[Any, list[nn.Parameter]] = {}  # of an engine: parameters that the script has had ever since
        self.engines = [self._engine(setting, Net(setting, index)) for index, setting in enumerate(settings)]

    def _engine(self, setting: Setting, model: nn.Module) -> Any:
        engine = launcher.initialize(model=model, config=setting.config(self.folder))[0]
        self.earlier[engine] = list(model.parameters())
        return engine

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
        dtype = torch.bfloat16 if self.settings[index].precision == "bf16" else torch.float32
        return inputs_of(self.settings[index], samples, self.number, self.rank).to(dtype)

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

    def step(self, index: int, how: str = "engine") -> Told:
        if how in ("engine", "both"):
            self.engines[index].step()
        if how in ("optimizer", "both"):
            self.engines[index].optimizer.step()
        return {"norm": self.engines[index].get_global_grad_norm()}

    def zero_grad(self, index: int, how: str = "engine") -> None:
        engine = self.engines[index]
        (engine if how == "engine" else engine.optimizer).zero_grad()

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

    def fail_alone(self, index: int) -> None:
        """Have a forward fail on one rank, which catches it; the others drop their loss."""
        if self.rank == 0:
            self.fail(index, "forward")
        else:
            self.engines[index](self._inputs(index))

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
        if how == "rank_0":
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

    def part(self, index: int) -> None:
        """Evaluate on one rank where every forward needs all of them, and go on."""
        self.evaluate_alone(index)
        self.engines[index].backward(loss_of(self.engines[index](self._inputs(index))))
        self.engines[index].step()

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
            with (
                GatheredParameters(model.parameters(), modifier_rank=0 if how == "gathered" else None),
                torch.no_grad(),
            ):
                for param in model.parameters():
                    if self.rank == 0 or how == "forgotten":
                        param.mul_(0.9)
        elif how == "data":
            for param in model.parameters():
                param.data.mul_(0.9)
        else:
            assert how in ("edit", "earlier")
            if how == "earlier":  # of what is on its way nothing waits where the script has had the parameters before
                engine.synchronize_parameters()
            with torch.no_grad():
                for param in model.parameters() if how == "edit" else self.earlier[engine]:
                    param.mul_(0.9)

    def write_alone(self, index: int) -> None:
        """Write weights on one rank, and take a step."""
        engine = self.engines[index]
        with torch.no_grad():
            for _, param in named_grads_wanted(engine.module) if self.rank == 0 else ():
                param.mul_(0.9)
        if self.settings[index].managed:
            engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss_of(engine(self._inputs(index))))
        engine.step()

    def read_grad(self, index: int, part: int) -> Told:
        grad = launcher.zero.safe_get_full_grad(weight_of(self.engines[index].module, part))
        return {"gradient": None if grad is None else array(grad)}

    def write_grad(self, index: int, part: int) -> None:
        param = weight_of(self.engines[index].module, part)
        launcher.zero.safe_set_full_grad(param, grad_of_script(self.settings[index].width))

    def own_grad(self, index: int, how: str, part: int) -> Told | None:
        """Do to `param.grad` what scripts do."""
        model = self.engines[index].module
        param = weight_of(model, part)
        if how == "clip":
            return {"norm of all": float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))}
        if how == "set":
            param.grad = grad_of_script(self.settings[index].width).to(param.dtype)
        elif how == "none":
            param.grad = None
        elif param.grad is not None:
            param.grad.mul_(0.5)
        return None

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
        self.earlier.clear()


_side: EngineSide | None = None


def start_acts(rank: int, world_size: int, settings: Sequence[Setting], folder: Path, errors: Path) -> Told:
    """Make the engines of a program. errors: where the process writes what it has to say from now on."""
    global _side
    from launcher.base.timeouts import timeouts

    os.environ.update(with_limits(0.5))
    timeouts.cache_clear()
    said = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(said, stream)
    os.close(said)
    _side = None
    _side = EngineSide(rank, world_size, settings, folder)
    return {}


def do_act(rank: int, world_size: int, number: int, act: Act, drops: Sequence[int]) -> Told:
    assert _side is not None
    return _side.do(number, act, drops)
