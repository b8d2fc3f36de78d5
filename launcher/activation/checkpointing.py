"""`checkpoint`: run a function now, and again in backward instead of keeping what it computes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.utils.checkpoint
from torch import Tensor

from launcher.activation.rng import get_cuda_rng_tracker
from launcher.activation.saved import SavedInputs
from launcher.activation.settings import ActivationSettings, settings_in_force
from launcher.base.log import get_logger
from launcher.comm.device import local_device
from launcher.comm.groups import is_first_rank
from launcher.monitor.meters import PhaseTimer

# ---- Times of checkpointed functions ----


WINDOW = 10  # rounds of forward and backward between two lines


class CheckpointProfile:
    """Adds up the times of checkpointed forwards and recomputations; rank 0 logs their means over a window."""

    def __init__(self, device: torch.device) -> None:
        self._timer = PhaseTimer(device)
        self._num_calls: Counter[str] = Counter()
        self._num_rounds = 0
        self._last = "forward"

    @contextlib.contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Time what runs inside: "forward" or "recompute". A forward after a recomputation begins a new round."""
        if phase == "forward" and self._last == "recompute":
            self._num_rounds += 1
            if self._num_rounds == WINDOW:
                self._report()
        self._last = phase
        self._num_calls[phase] += 1
        with self._timer.span(phase):
            yield

    def _report(self) -> None:
        seconds = self._timer.take().items()
        parts = [
            f"{self._num_calls[name] // WINDOW} × {name} {total_s * 1e3 / WINDOW:.2f} ms" for name, total_s in seconds
        ]
        if is_first_rank():
            get_logger().info("activation checkpoints: %s (means of %d)", " · ".join(parts), WINDOW)
        self._num_calls.clear()
        self._num_rounds = 0


# ---- `checkpoint` and what it keeps ----


class _Keeper:
    """What outlasts a call: made anew when the settings have changed."""

    def __init__(self, settings: ActivationSettings) -> None:
        self.settings = settings
        self.inputs = SavedInputs(settings)
        self.profile = CheckpointProfile(local_device()) if settings.profile else None
        if is_first_rank():
            for note in self._notes():
                get_logger().info("note: activation_checkpointing: %s", note)

    def _notes(self) -> list[str]:
        """Return which settings have no effect here."""
        settings, notes = self.settings, []
        if settings.partition_activations and not self.inputs.is_partitioned:
            notes.append("partition_activations has no effect: no mpu with several ranks was given to configure()")
        if settings.num_checkpoints is not None and not settings.contiguous_checkpointing:
            notes.append("number_checkpoints has no effect without contiguous_memory_optimization")
        if local_device().type == "cpu":
            if settings.checkpoint_in_cpu:
                notes.append("cpu_checkpointing has no effect: activations are in host memory already")
            if settings.synchronize:
                notes.append("synchronize_checkpoint_boundary has no effect: there is no GPU")
        return notes


_keeper: _Keeper | None = None


def _current() -> _Keeper:
    global _keeper
    settings = settings_in_force()
    if _keeper is None or _keeper.settings != settings:
        reset()
        _keeper = _Keeper(settings)
    return _keeper


def reset() -> None:
    """Give the contiguous buffers back, after forwards without a backward. Inputs that are still kept stay valid."""
    global _keeper
    if _keeper is not None:
        _keeper.inputs.end()
    _keeper = None


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`; of all it computes, only the inputs `args` are kept for backward.

    Backward runs `function` again, with the random states it had. Outputs and gradients are those of
    `function(*args)`; inputs need not require gradients. Ranks that share inputs (`partition_activations`) must call
    it in the same order. Raises: EngineError where the configuration does not allow it.
    """
    keeper = _current()
    if not torch.is_grad_enabled():
        return function(*args)
    # Within another checkpointed function the inputs are that one's to recompute: torch's own hooks drop them.
    with keeper.inputs.kept() if _Call.num_running == 0 else contextlib.nullcontext():
        return torch.utils.checkpoint.checkpoint(_Call(function, keeper), *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


class _Call:
    """One call of a checkpointed function: it runs for the first time forward, and from then on to recompute."""

    num_running: ClassVar[int] = 0  # that run now, one within the other

    def __init__(self, function: Callable[..., Any], keeper: _Keeper) -> None:
        self._function = function
        self._keeper = keeper
        self._states: dict[str, Tensor] | None = None  # of the tracker; None: it has not run

    def __call__(self, *args: Any) -> Any:
        _Call.num_running += 1
        try:
            return self._run(self._keeper, args)
        finally:
            _Call.num_running -= 1

    def _run(self, keeper: _Keeper, args: tuple[Any, ...]) -> Any:
        with contextlib.ExitStack() as stack:
            if keeper.profile is not None:
                stack.enter_context(keeper.profile.span("forward" if self._states is None else "recompute"))
            if keeper.settings.synchronize:
                stack.callback(_synchronize)
                _synchronize()
            tracker = get_cuda_rng_tracker()
            states = tracker.get_states()
            if self._states is None:
                self._states = states
            else:
                stack.callback(tracker.set_states, states)
                tracker.set_states(self._states)
            return self._function(*args)


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
