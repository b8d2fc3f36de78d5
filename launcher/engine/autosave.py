"""Saves that the engine makes by itself: every so many steps, and before the job is taken off its nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

from launcher.base.errors import CheckpointError
from launcher.base.log import get_logger
from launcher.base.preemption import EXIT_REQUEUE, preempted
from launcher.checkpoint_files.place import Place, place_of
from launcher.checkpoint_files.retention import Retention, prune
from launcher.comm.hosts import AsyncFlag
from launcher.config.schema_other import Checkpoint


class SavingEngine(Protocol):
    """What an engine must offer to be saved."""

    global_steps: int
    global_rank: int
    client_state: dict[str, Any]

    def save_checkpoint(self, save_dir: str, tag: None = None, client_state: Mapping[str, Any] | None = None) -> bool:
        """See `Engine.save_checkpoint`."""
        ...

    def wait_for_checkpoint(self) -> None:
        """See `Engine.wait_for_checkpoint`."""
        ...


class Autosave:
    """Saves an engine into `checkpoint.folder`. Every rank must have one, and tell it of every step."""

    def __init__(self, section: Checkpoint) -> None:
        self._folder = section.folder
        self._every = section.save_every
        self._retention = None if section.keep_last is None else Retention(section.keep_last, section.keep_every)
        self._notice = None if section.folder is None else AsyncFlag()

    def begin_step(self) -> None:
        """Ask all ranks whether one has been given notice, before an optimizer step that hides the answer's way."""
        if self._notice is not None:
            self._notice.begin(is_set=preempted())

    def after_step(self, engine: SavingEngine) -> None:
        """Save where that is due. Raises: SystemExit(75) on all ranks, after a notice; CheckpointError."""
        if self._folder is None or self._notice is None:
            return
        is_notice = self._notice.result()
        is_due = self._every is not None and engine.global_steps % self._every == 0
        if is_notice:
            self._leave(engine, self._folder)
        elif is_due:
            engine.save_checkpoint(self._folder, client_state=engine.client_state)

    def after_commit(self, path: Place) -> None:
        """Remove old checkpoints, once a further one is there; maybe from the thread of an asynchronous save.

        Of all ranks of a host only one calls it. path: of the further one.
        """
        if self._retention is None or self._folder is None or path.parent != place_of(self._folder):
            return
        try:
            prune(path.parent, self._retention)
        except OSError as error:
            get_logger().warning("old checkpoints of %s could not be removed: %s", self._folder, error)

    def _leave(self, engine: SavingEngine, folder: str) -> None:
        with contextlib.suppress(CheckpointError):  # an asynchronous save has failed before, and rank 0 has said so
            engine.wait_for_checkpoint()
        try:
            engine.save_checkpoint(folder, client_state=engine.client_state)
            engine.wait_for_checkpoint()
            outcome = f"step {engine.global_steps} is saved in {folder}"
        except CheckpointError as error:  # on all ranks: what starts the job again must do so all the same
            outcome = f"the save of step {engine.global_steps} has failed ({error})"
        if engine.global_rank == 0:
            get_logger().warning(
                "the job is about to be preempted: %s; the ranks end with %d to be started again", outcome, EXIT_REQUEUE
            )
        raise SystemExit(EXIT_REQUEUE)
