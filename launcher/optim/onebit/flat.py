"""What the optimizers with one-bit communication share: state by parameter, the exchange, what is said of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from launcher.base.log import get_logger
from launcher.comm import observe
from launcher.comm.compressed import CompressedMean
from launcher.comm.groups import RankGroup
from launcher.optim.api import FlatOptimizer, ParamShard
from launcher.optim.classes import BATCH_NUMEL, DEFAULT_BATCH_NUMEL

_NUM_STEPS = "num_steps"


@dataclass(eq=False)
class ParamState:
    """One whole parameter, its gradient and its state."""

    shard: ParamShard
    place: int  # of its momentum among those of all parameters
    options: dict[str, Any]  # live: its group's

    @property
    def state(self) -> dict[str, Any]:
        """`exp_avg` is a view of the momentum buffer; counters are plain numbers."""
        return self.shard.state

    @property
    def master(self) -> Tensor:
        return self.shard.master

    @property
    def momentum(self) -> Tensor:
        momentum: Tensor = self.state["exp_avg"]
        return momentum

    @property
    def correction(self) -> float:
        """What the momentum is multiplied by, because it began at zero."""
        return 1 / (1 - self.options["betas"][0] ** self.state["step"]) if self.options["bias_correction"] else 1.0

    @property
    def rate(self) -> float:
        """The learning rate times the correction of the momentum."""
        return float(self.options["lr"]) * self.correction


class OneBitFlat(FlatOptimizer):
    """An optimizer over whole parameters (stage 0), all of whose momenta stand in one flat buffer.

    In a step with summed gradients it is what its name says without the bit. In a compressed step each rank adds its
    own gradient to the momentum that all have in common, and the mean of these momenta, one bit an element on the wire,
    is the next one that all have in common. The variance is not touched then.

    Unlike in the papers an element whose variance is zero does not move in a compressed step: it has had no gradient
    so far, nothing says how large its step should be, and the signs of its block would move it by lr / eps.
    """

    title: ClassVar[str]  # as the config names it

    def __init__(
        self,
        shards: Sequence[ParamShard],
        param_groups: list[dict[str, Any]],
        group: RankGroup,
        options: Mapping[str, Any],
    ) -> None:
        """shards: whole parameters, masters fp32. options: the complete params of the config's section."""
        super().__init__(self.title, shards, param_groups)
        self._options = options
        self._is_rank0 = group.rank == 0
        self._mean = CompressedMean(group, [shard.master.numel() for shard in shards])
        self._momenta = torch.zeros(self._mean.numel, device=group.device)
        self._params = []
        for place, (shard, run) in enumerate(zip(shards, self._mean.places, strict=True)):
            variance = torch.zeros_like(shard.master)
            shard.state.update(step=0, variance_step=0, exp_avg=self._momenta[run], exp_avg_sq=variance)
            self._params.append(ParamState(shard, place, param_groups[shard.group]))
        self._num_steps = 0
        self._sent_bytes = observe.sent_bytes()  # up to the last step
        self._summed_bytes: int | None = None  # of one step with summed gradients
        self._has_warned = False

    @property
    @abstractmethod
    def skips_reduction(self) -> bool:
        """Whether the next step is to get this rank's own gradients, not their sum over the ranks."""

    @property
    def is_apart(self) -> bool:
        """Whether parameters and momenta differ from rank to rank now."""
        return False

    @abstractmethod
    def _advance(self, active: list[ParamState]) -> None:
        """Update the parameters that have a gradient."""

    @property
    def label(self) -> str:
        return f"{self.name}[torch, 1-bit]"

    # ---- the step ----

    @torch.no_grad()
    def step(self, grad_scale: float = 1.0, unused: Collection[str] = ()) -> None:
        """Update every parameter from its gradient times `grad_scale`, except the `unused` ones."""
        is_compressed = self.skips_reduction
        if grad_scale != 1.0:
            torch._foreach_mul_([param.shard.grad for param in self._params], grad_scale)
        self._advance([param for param in self._params if param.shard.name not in unused])
        self._num_steps += 1
        self._count_bytes(is_compressed=is_compressed)

    def _add_to_momentum(self, params: Sequence[ParamState]) -> None:
        for param in params:
            param.momentum.lerp_(param.shard.grad, 1 - param.options["betas"][0])
            param.state["step"] += 1

    def _add_to_variance(self, params: Sequence[ParamState]) -> None:
        for param in params:
            add_square(param.state["exp_avg_sq"], param.shard.grad, param.options["betas"][1])
            param.state["variance_step"] += 1

    def _average_momenta(self, params: Sequence[ParamState]) -> None:
        """Replace the momenta of `params` by their compressed means. Collective: the same parameters on every rank."""
        inactive = {param.place for param in self._params} - {param.place for param in params}
        self._mean.average(self._momenta, sorted(inactive))

    def _count_bytes(self, *, is_compressed: bool) -> None:
        """Count what was sent since the last step, and say once what compression saves."""
        sent, self._sent_bytes = observe.sent_bytes() - self._sent_bytes, observe.sent_bytes()
        if not is_compressed:  # the least: a skipped step leaves its bytes to the one after it
            self._summed_bytes = min(sent, sent if self._summed_bytes is None else self._summed_bytes)
        elif sent and not self._has_warned:
            self._has_warned = True
            if self._is_rank0:
                get_logger().info("%s", self._savings(sent))

    def _savings(self, sent: int) -> str:
        text = f"{self.name} compresses in step {self._num_steps}: each rank sends {sent:,} bytes"
        if self._summed_bytes is None:  # continued from a state: no other step was seen
            return text
        return f"{text} instead of {self._summed_bytes:,}, {self._summed_bytes / sent:.1f} times less"

    # ---- states ----

    def state_numel(self) -> int:
        """Return how many elements of optimizer state this rank holds, errors included."""
        num_errors = self._mean.worker_error.numel() + self._mean.server_error.numel()
        return num_errors + super().state_numel()

    def state_dict(self) -> dict[str, Any]:
        """Return what a continued run needs; `errors`, and between exchanges momenta, are this rank's own."""
        return {**super().state_dict(), _NUM_STEPS: self._num_steps, "errors": self._errors()}

    def accept(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Take over all but the states of parameters; return these. Errors of another world size are forgotten."""
        found = super().accept(state)
        self._num_steps = state[_NUM_STEPS]
        self._take_errors(state["errors"])
        return found

    def saved_groups(self) -> list[dict[str, Any]]:
        """Return copies of the groups' hyper-parameters, and with each how many steps were taken."""
        return [{**group, _NUM_STEPS: self._num_steps} for group in super().saved_groups()]

    def load_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take hyper-parameters over and, where it is there, the number of steps: it decides about the phase."""
        super().load_groups([{key: group[key] for key in group if key != _NUM_STEPS} for group in groups])
        for group in groups:
            self._num_steps = int(group.get(_NUM_STEPS, self._num_steps))

    def rank_state(self) -> dict[str, Any]:
        """Return this rank's errors and, while ranks are apart, its parameters and their states. Tensors are live."""
        state: dict[str, Any] = {"errors": self._errors()}
        if self.is_apart:
            state["own"] = {shard.name: {"master": shard.master, "state": dict(shard.state)} for shard in self.shards}
        return state

    @torch.no_grad()
    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `rank_state()` returned; empty: errors are forgotten."""
        self._take_errors(state.get("errors", {}))
        for shard in self.shards:
            own = state.get("own", {}).get(shard.name)
            if own is not None:
                shard.master.copy_(own["master"])
                self.load_state(shard, own["state"])
                if shard.param is not None:
                    shard.param.copy_(shard.master)

    def _errors(self) -> dict[str, Tensor]:
        return {"worker": self._mean.worker_error, "server": self._mean.server_error}

    @torch.no_grad()
    def _take_errors(self, errors: Mapping[str, Tensor]) -> None:
        for name, mine in self._errors().items():
            given = errors.get(name)
            if given is not None and given.shape == mine.shape:
                mine.copy_(given)
            else:
                mine.zero_()

    def load_state(self, shard: ParamShard, state: Mapping[str, Any]) -> None:
        """Overwrite the state of a parameter, in place where it has a place."""
        mine = shard.state
        for name in mine.keys() - state.keys():
            del mine[name]
        for name, value in state.items():
            if isinstance(mine.get(name), Tensor):
                mine[name].copy_(value.reshape(mine[name].shape))
            else:
                mine[name] = value.to(shard.master.device, copy=True) if isinstance(value, Tensor) else value


def add_square(variance: Tensor, grad: Tensor, beta2: float) -> None:
    """Move a running mean of squares towards the square of `grad`."""
    variance.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)


def root_of(variance: Tensor, num_updates: int, options: Mapping[str, Any]) -> Tensor:
    """Return the denominator of Adam's update: the root of the corrected variance, plus eps. A new tensor."""
    correction = 1 - options["betas"][1] ** max(1, num_updates) if options["bias_correction"] else 1.0
    if options.get("eps_inside_sqrt"):
        return (variance / correction).add_(options["eps"]).sqrt_()
    return variance.sqrt().div_(correction**0.5).add_(options["eps"])


def denominator(variance: Tensor, param: ParamState) -> Tensor:
    """Return the denominator of a parameter's update; infinite where the variance is zero. A new tensor.

    variance: of all its elements or some of them.
    """
    root = root_of(variance, param.state["variance_step"], param.options)
    return root.masked_fill_(variance == 0, torch.inf)


def move_against(param: ParamState, rate: float) -> None:
    """Step by `rate` times the momentum, over the root of the variance."""
    piece_numel = BATCH_NUMEL.get(param.master.device.type, DEFAULT_BATCH_NUMEL)
    flats = (param.master, param.momentum, param.state["exp_avg_sq"])
    for master, momentum, variance in zip(*(flat.view(-1).split(piece_numel) for flat in flats), strict=True):
        master.addcdiv_(momentum, denominator(variance, param), value=-rate)


def descend(param: ParamState) -> None:
    """Take AdamW's step from the momentum and variance as they stand."""
    param.master.mul_(1 - param.options["lr"] * param.options["weight_decay"])
    move_against(param, param.rate)
