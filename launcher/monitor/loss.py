"""The loss for the panel of `launch`, without a wait for the device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from launcher.base import env
from launcher.base.progress import tell
from launcher.comm.accelerator import device_module

INTERVAL_S = 1.0  # agents ask as often


class LossReporter:
    """Reports a rank's loss about once a second. On a GPU it is reported when its asynchronous copy is there."""

    def __init__(self, *, is_wanted: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """is_wanted: whether this rank's loss is the one that is shown."""
        self._is_wanted = is_wanted and env.PROGRESS_FILE.name in os.environ
        self._clock = clock
        self._next_s = clock()
        self._copy: tuple[Tensor, torch.Event] | None = None  # being copied to the host

    def step(self, losses: Sequence[Tensor]) -> None:
        """Note the losses of the micro-batches of one step: detached scalars."""
        if not self._is_wanted:
            return
        if self._copy is not None and self._copy[1].query():
            tell(loss=self._copy[0].item())
            self._copy = None
        if not losses or self._copy is not None or self._clock() < self._next_s:
            return
        self._next_s = self._clock() + INTERVAL_S
        mean = torch.stack([loss.float() for loss in losses]).mean()
        if mean.device.type == "cpu":
            tell(loss=mean.item())
        elif mean.device.type != "meta":
            host = torch.empty((), pin_memory=True)
            host.copy_(mean, non_blocking=True)
            module = device_module(mean.device)
            arrival = module.Event()
            arrival.record(module.current_stream(mean.device))
            self._copy = (host, arrival)
