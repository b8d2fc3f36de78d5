"""Saves that the engine makes by itself: every so many steps, and before the job is taken off its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from launcher.base.errors import CheckpointError
from launcher.base.log import get_logger
from launcher.base.preemption import EXIT_REQUEUE, preempted
from launcher.checkpoint_files.retention import Retention, prune
from launcher.comm.agreement import Agreement
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
    """Saves an engine into `checkpoint.folder`. Every rank must have one, and call both methods at every step."""

    def __init__(self, section: Checkpoint) -> None:
        self._folder = section.folder
        self._every = section.save_every
        self._retention = None if section.keep_last is None else Retention(section.keep_last, section.keep_every)
        self._notice = None if section.folder is None else Agreement()
        self._saved_step: int | None = None  # of the last save into the folder

    def begin_step(self) -> None:
        """Ask all ranks whether one has been given notice, before an optimizer step that hides the answer's way."""
        if self._notice is not None:
            self._notice.begin(holds=preempted())

    def after_step(self, engine: SavingEngine) -> None:
        """Save where that is due. Raises: SystemExit(75) on all ranks, after a notice; CheckpointError."""
        if self._folder is None or self._notice is None:
            return
        is_notice = self._notice.result()
        is_due = self._every is not None and engine.global_steps % self._every == 0
        if is_notice:
            self._leave(engine, self._folder)
        elif is_due:
            self._save(engine, self._folder)

    def _save(self, engine: SavingEngine, folder: str) -> None:
        if self._saved_step == engine.global_steps:
            return
        engine.save_checkpoint(folder, client_state=engine.client_state)
        self._saved_step = engine.global_steps
        self._prune(engine, folder)

    def _prune(self, engine: SavingEngine, folder: str) -> None:
        if self._retention is None or engine.global_rank != 0:
            return
        try:
            prune(Path(folder), self._retention)
        except OSError as error:
            get_logger().warning("old checkpoints of %s could not be removed: %s", folder, error)

    def _leave(self, engine: SavingEngine, folder: str) -> None:
        try:
            engine.wait_for_checkpoint()
        except CheckpointError:  # of an asynchronous save before this one; rank 0 has said so
            self._saved_step = None
        self._save(engine, folder)
        engine.wait_for_checkpoint()
        self._prune(engine, folder)
        if engine.global_rank == 0:
            get_logger().warning(
                "the job is about to be preempted: step %d is saved in %s, the ranks end with %d to be started again",
                engine.global_steps,
                folder,
                EXIT_REQUEUE,
            )
        raise SystemExit(EXIT_REQUEUE)
