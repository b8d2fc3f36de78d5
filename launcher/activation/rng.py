"""Random states that ranks of a model-parallel group have in common, and those they have not.

Names as in Megatron-LM and DeepSpeed: models with dropout inside of tensor-parallel layers call them. Without a GPU
they are about the CPU's generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from launcher.activation.settings import settings_in_force
from launcher.base.errors import EngineError
from launcher.comm.device import accelerator_type, device_module

MODEL_PARALLEL_STATE = "model-parallel-rng"
_SEED_DISTANCE = 2718  # between the seeds of the two states; Megatron-LM's, so that its runs can be repeated


def _module() -> Any:
    """Return what has the functions of the generator: torch's module of the accelerator, or torch for the CPU."""
    kind = accelerator_type()
    return torch if kind is None else device_module(kind)


def _state() -> Tensor:
    state: Tensor = _module().get_rng_state()
    return state


class CudaRNGStatesTracker:
    """Random states by name, each of which continues where its last use left it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        """Return the states by name, uint8 1-D."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state. Raises: EngineError for a name or a seed that is there already."""
        if name in self._states or seed in self._seeds:
            what = f"state {name}" if name in self._states else f"seed {seed}"
            raise EngineError(f"the random {what} exists already", hint="take another, or reset() the tracker")
        before = _state()
        _seed(seed)
        self._seeds.add(seed)
        self._states[name] = _state()
        _module().set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STATE) -> Iterator[None]:
        """Draw random numbers from a state within a `with` block. Raises: EngineError for an unknown name."""
        if name not in self._states:
            raise EngineError(
                f"there is no random state {name}", hint="call model_parallel_cuda_manual_seed(seed), or add() it"
            )
        before = _state()
        _module().set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _state()
            _module().set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker whose states checkpointed functions find again when they are recomputed."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default state alike on all ranks of the model-parallel group, and `fork()`'s differently on each.

    The group is that of `configure(mpu_)`; without one, this rank is alone. It takes the place of torch's seeding.
    """
    group = settings_in_force().group
    _tracker.reset()
    _seed(seed)
    _tracker.add(MODEL_PARALLEL_STATE, seed + _SEED_DISTANCE + (0 if group is None else group.rank))


def _seed(seed: int) -> None:
    _module().manual_seed(seed)
