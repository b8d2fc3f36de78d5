"""What the optimizers with one-bit communication share: state by parameter, the exchange, what is said of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.comm import observe
from launcher.comm.compressed import CompressedMean
from launcher.comm.groups import DataParallelGroup
from launcher.optim.api import Around, FlatShard, StateRun, Unused, all_at_once
from launcher.optim.lion import BATCH_NUMEL, DEFAULT_BATCH_NUMEL
from launcher.optim.runs import saved_runs


@dataclass(eq=False)
class ParamState:
    """One whole parameter, its gradient and its state."""

    shard: FlatShard
    run: int  # of the momentum buffer
    options: dict[str, Any]  # live: its group's
    state: dict[str, Any]  # `exp_avg` is a view of the momentum buffer; counters are plain numbers

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


class OneBitFlat(ABC):
    """A `FlatOptimizer` over whole parameters (stage 0), all of whose momenta stand in one flat buffer.

    In a step with summed gradients it is what its name says without the bit. In a compressed step each rank adds its
    own gradient to the momentum that all have in common, and the mean of these momenta, one bit an element on the wire,
    is the next one that all have in common. The variance is not touched then.

    Unlike in the papers an element whose variance is zero does not move in a compressed step: it has had no gradient
    so far, nothing says how large its step should be, and the signs of its block would move it by lr / eps.
    """

    name: ClassVar[str]
    writes_params = False

    def __init__(
        self,
        shards: list[FlatShard],
        param_groups: list[dict[str, Any]],
        group: DataParallelGroup,
        options: Mapping[str, Any],
    ) -> None:
        """shards: whole parameters, masters fp32. options: the complete params of the config's section."""
        self._options = options
        self._groups = param_groups
        self._speaks = group.rank == 0
        self._mean = CompressedMean(group, [shard.master.numel() for shard in shards])
        self._momenta = torch.zeros(self._mean.numel, device=group.device)
        self._params = []
        for run, (shard, place) in enumerate(zip(shards, self._mean.places, strict=True)):
            momentum = self._momenta[place].view(shard.master.shape)
            variance = torch.zeros_like(shard.master)
            state = {"step": 0, "variance_step": 0, "exp_avg": momentum, "exp_avg_sq": variance}
            self._params.append(ParamState(shard, run, param_groups[shard.group], state))
        self._num_steps = 0
        self._sent_bytes = observe.sent_bytes()  # up to the last step
        self._summed_bytes: int | None = None  # of one step with summed gradients
        self._has_told = False

    @property
    @abstractmethod
    def wants_local_gradients(self) -> bool:
        """Say whether the next step is to get this rank's own gradients, not their sum over the ranks."""

    @abstractmethod
    def _advance(self, active: list[ParamState]) -> None:
        """Update the parameters that have a gradient."""

    @property
    def label(self) -> str:
        return f"{self.name}[torch, 1-bit]"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._groups

    # ---- the step ----

    @torch.no_grad()
    def step(self, unused: Unused | None = None, grad_scale: float = 1.0, around: Around | None = None) -> None:
        """Update every parameter from its gradient times `grad_scale`, except the `unused` ones."""
        with all_at_once([param.shard for param in self._params], around):
            self._step(unused, grad_scale)

    def _step(self, unused: Unused | None, grad_scale: float) -> None:
        is_compressed = self.wants_local_gradients
        if grad_scale != 1.0:
            torch._foreach_mul_([param.shard.grad for param in self._params], grad_scale)
        self._advance([param for param in self._params if not _rests(param.shard, unused or {})])
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
        resting = {param.run for param in self._params} - {param.run for param in params}
        self._mean.average(self._momenta, sorted(resting))

    def _count_bytes(self, *, is_compressed: bool) -> None:
        """Count what was sent since the last step, and say once what compression saves."""
        sent, self._sent_bytes = observe.sent_bytes() - self._sent_bytes, observe.sent_bytes()
        if not is_compressed:  # the least: a skipped step leaves its bytes to the one after it
            self._summed_bytes = min(sent, sent if self._summed_bytes is None else self._summed_bytes)
        elif sent and not self._has_told:
            self._has_told = True
            if self._speaks:
                get_logger().info("%s", self._savings(sent))

    def _savings(self, sent: int) -> str:
        text = f"{self.name} compresses in step {self._num_steps}: each rank sends {sent:,} bytes"
        if self._summed_bytes is None:  # continued from a state: no other step was seen
            return text
        return f"{text} instead of {self._summed_bytes:,}, {self._summed_bytes / sent:.1f} times less"

    # ---- states ----

    def state_numel(self) -> int:
        """Return how many elements of optimizer state this rank holds, errors included."""
        tensors = [value for param in self._params for value in param.state.values() if isinstance(value, Tensor)]
        num_errors = self._mean.worker_error.numel() + self._mean.server_error.numel()
        return num_errors + sum(tensor.numel() for tensor in tensors if tensor.dim() > 0)

    def sizes_of_states(self, shard: int) -> dict[str, int]:
        """Return nothing: the states stand in buffers of all parameters."""
        return {}

    def states(self, shard: int) -> list[StateRun]:
        """Return the live states of one parameter; none before its first step."""
        param = self._params[shard]
        return [StateRun(0, param.master.numel(), dict(param.state))] if param.state["step"] else []

    def state_dict(self, around: Around | None = None) -> dict[str, Any]:
        """Return what a continued run needs; `errors`, and between exchanges momenta, are this rank's own."""
        return {
            "name": self.name,
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in self._groups],
            "shards": saved_runs([param.shard for param in self._params], self.states, around),
            "num_steps": self._num_steps,
            "errors": {"worker": self._mean.worker_error, "server": self._mean.server_error},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], around: Around | None = None) -> None:
        """Continue from a state of `state_dict()`. Tensors are copied. Errors of another world size are forgotten.

        Raises: EngineError for the state of another optimizer, or of other groups or parameters.
        """
        numels = [shard[0]["stop"] if shard else None for shard in state["shards"]]
        fits = len(numels) == len(self._params) and all(
            numel in (None, param.master.numel()) for numel, param in zip(numels, self._params, strict=True)
        )
        if state["name"] != self.name or len(state["groups"]) != len(self._groups) or not fits:
            found = f"{state['name']} with {len(state['groups'])} groups over {len(numels)} parameters"
            mine = f"{self.name} with {len(self._groups)} over {len(self._params)}"
            raise EngineError(f"the optimizer state is of {found}, this run has {mine}, or of other sizes")
        for mine_group, given in zip(self._groups, state["groups"], strict=True):
            mine_group.update(given)
        with all_at_once([param.shard for param in self._params], around):
            for param, runs in zip(self._params, state["shards"], strict=True):
                _load(param.state, runs[0]["state"] if runs else {})
        self._num_steps = state["num_steps"]
        for mine_error, error in (
            (self._mean.worker_error, state["errors"]["worker"]),
            (self._mean.server_error, state["errors"]["server"]),
        ):
            if mine_error.shape == error.shape:
                mine_error.copy_(error)
            else:
                mine_error.zero_()


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


def _rests(shard: FlatShard, unused: Unused) -> bool:
    return any(shard.start in absolute for absolute in unused.get(shard.unit, ()))


def _load(mine: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Overwrite the state of a parameter, in place where it has a place. Empty: as before the first step."""
    zeros = {name: torch.zeros_like(mine[name]) for name in ("exp_avg", "exp_avg_sq")}
    given = given or {"step": 0, "variance_step": 0, **zeros}
    for name in mine.keys() - given.keys():
        del mine[name]
    for name, value in given.items():
        if isinstance(mine.get(name), Tensor):
            mine[name].copy_(value.reshape(mine[name].shape))
        else:
            mine[name] = value.to(mine["exp_avg"].device, copy=True) if isinstance(value, Tensor) else value
