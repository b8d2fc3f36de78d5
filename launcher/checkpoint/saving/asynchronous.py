"""A save that runs beside the training: the training waits for copies in host memory only.

At most one save is in flight. The copies take as many bytes as this rank's files, and are kept for the next save.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from launcher.base.errors import CheckpointError
from launcher.base.log import get_logger
from launcher.checkpoint.saving.contents import UnitContents
from launcher.checkpoint.saving.save import live_tensors


class BackgroundSaver:
    """Writes copies in a thread."""

    def __init__(self, *, is_rank0: bool) -> None:
        self._is_rank0 = is_rank0
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def copy(self, contents: list[UnitContents]) -> dict[str, Tensor]:
        """Return copies of what is written, in host memory; their values are there when this returns."""
        copies: dict[str, Tensor] = {}
        devices = set()
        for key, tensor in live_tensors(contents):
            kept = self._copies.get(key)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            copies[key] = kept.copy_(tensor, non_blocking=True)
            if tensor.device.type != "cpu":
                devices.add(tensor.device)
        for device in devices:
            torch.accelerator.synchronize(device)
        self._copies = copies
        return copies

    def start(self, write: Callable[[], object]) -> None:
        """Run `write` in a thread; the process does not end before it has. The save before must have ended."""

        def run() -> None:
            try:
                write()
            except Exception as error:  # noqa: BLE001  # whatever it is: `wait_for_checkpoint` must not say all is well
                said = f"the save has failed: {type(error).__name__}: {error}"
                self._error = error if isinstance(error, CheckpointError) else CheckpointError(said)
                if self._is_rank0:
                    get_logger().error("%s; the training continues without this checkpoint", self._error)

        self._thread = threading.Thread(target=run, name="launch-checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save in flight has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_error(self) -> CheckpointError | None:
        """Return why the last save failed, once; None where it did not."""
        error, self._error = self._error, None
        return error
