"""`checkpoint.folder` of the config: which checkpoint a start continues from, and what the engine saves by itself."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

from launcher.base.errors import CheckpointError, EngineError
from launcher.base.log import get_logger
from launcher.base.preemption import EXIT_REQUEUE, preempted
from launcher.base.resume import AUTO, StartKind, start_kind
from launcher.checkpoint.exchange import Exchange, error_text
from launcher.checkpoint.load import READ_TIMEOUT_S
from launcher.checkpoint.saving.save import wait_for_saves
from launcher.checkpoint_files.place import Place, place_of
from launcher.checkpoint_files.retention import Retention, add_owner, by_age, candidates, owners_of, prune
from launcher.checkpoint_files.verify import Finding, verify
from launcher.comm.groups import RankGroup
from launcher.comm.hosts import AsyncFlag
from launcher.engine.parts import EngineParts
from launcher.engine.sharded import ShardedModel

_in_use: WeakValueDictionary[str, ShardedModel] = WeakValueDictionary()  # folder -> of the engine that saves there


class ResumableEngine(Protocol):
    """What an engine must offer to be saved and to continue; see `Engine`."""

    global_steps: int
    global_rank: int
    client_state: dict[str, Any]

    def save_checkpoint(
        self, save_dir: str, tag: None = None, client_state: Mapping[str, Any] | None = None
    ) -> bool: ...

    def wait_for_checkpoint(self) -> None: ...

    def load_checkpoint(self, load_dir: str, tag: str) -> tuple[str | None, dict[str, Any] | None]: ...


class CheckpointFolder:
    """Continues an engine from its folder, and saves it there. Every rank must have one, and tell it of every step."""

    def __init__(self, parts: EngineParts) -> None:
        section = parts.settings.checkpoint
        self._sharded = parts.sharded
        self._group = parts.mesh.world
        self._folder = section.folder
        self._every = section.save_every
        self._retention = None if section.keep_last is None else Retention(section.keep_last, section.keep_every)
        self._notice = None if section.folder is None else AsyncFlag()
        self._resumed: dict[str, Any] | None = None  # the client state that this start has continued from

    # ---- the start ----

    def begin(self, engine: ResumableEngine) -> None:
        """Load what this start continues from, at the end of `initialize`. Collective.

        Raises: EngineError for a new run in the folder of another one, and for two engines with one folder;
        CheckpointError where there must be a checkpoint and is none.
        """
        kind, folder, is_rank0 = start_kind(os.environ), self._folder, self._group.rank == 0
        if folder is None and kind.resume == AUTO and is_rank0:
            get_logger().warning(
                "--resume auto: the config has no checkpoint.folder, so only engine.resume(DIR) continues"
            )
        if folder is None and kind.named_folder is None:
            return
        if folder is not None and self._sharded.optimizer is not None:  # one for inference saves nothing by itself
            _check_folder(kind, folder, self._group)
            _in_use[_absolute(folder)] = self._sharded
        self._resumed = _resume_from(engine, folder, self._group)
        if self._resumed is None and kind.resumes and is_rank0:
            get_logger().info("there is no checkpoint in %s yet: the run begins anew", folder)

    def resume(self, engine: ResumableEngine, folder: str | None) -> dict[str, Any] | None:
        """Do what `Engine.resume` says."""
        if folder is not None:
            self._resumed = _resume_from(engine, folder, self._group)
        elif self._folder is None:
            raise EngineError("engine.resume() names no folder", hint="give one, or set checkpoint.folder")
        return self._resumed

    # ---- every step ----

    def begin_step(self) -> None:
        """Ask all ranks whether one has been given notice, before an optimizer step that hides the answer's way."""
        if self._notice is not None:
            self._notice.begin(is_set=preempted())

    def after_step(self, engine: ResumableEngine) -> None:
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

    def _leave(self, engine: ResumableEngine, folder: str) -> None:
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


def _check_folder(kind: StartKind, folder: str, group: RankGroup) -> None:
    """Make sure that this run alone saves into a folder. Raises: EngineError, on every rank."""
    said = _take_folder(kind, folder) if group.rank == 0 else None
    problem, hint = Exchange(group, "initialize").broadcast(said, timeout_s=READ_TIMEOUT_S)
    if problem is not None:
        raise EngineError(problem, where=folder, hint=hint)


def _take_folder(kind: StartKind, folder: str) -> tuple[str | None, str | None]:
    """Note that this job saves into a folder; or return why it must not, and what to do."""
    if _is_in_use(folder):
        problem = "two engines would save into one checkpoint.folder, and replace each other's checkpoints"
        return problem, "give each of them a folder of its own, or call destroy() on the first one"
    try:
        root = place_of(folder)
        if not kind.may_begin_in(_absolute(folder), owners_of(root)) and (found := by_age(root)):
            newest = found[-1].path.name
            return (
                f"checkpoint.folder has checkpoints of another run already, such as {newest}, and this one begins anew",
                "continue with `launch --resume auto`, begin anew with --resume never, or name another folder",
            )
        add_owner(root, kind.jobs)
    except (OSError, CheckpointError) as error:  # all ranks raise it: they wait for what is found here
        return f"checkpoint.folder cannot be used: {error_text(error)}", None
    return None, None


def _is_in_use(folder: str) -> bool:
    other = _in_use.get(_absolute(folder))
    if other is not None and not other.has_ended:
        del other
        gc.collect()  # it may have been dropped
        other = _in_use.get(_absolute(folder))
    return other is not None and not other.has_ended


def _resume_from(engine: ResumableEngine, folder: str | None, group: RankGroup) -> dict[str, Any] | None:
    """Load the newest checkpoint that is good, if this start is to continue, and return its client state. Collective.

    None: it begins anew. folder: where the job saves. Raises: CheckpointError where the checkpoint does not fit the
    model, where all are damaged, or where `--resume` names a folder without any.
    """
    wait_for_saves()  # the newest may be one of this process
    exchange = Exchange(group, "resume")
    choice: _Choice | None = None  # rank 0's: the environment of another host may say something else
    if group.rank == 0:
        kind = start_kind(os.environ)
        folders = kind.folders(None if folder is None else _absolute(folder))
        choice = _Choice(folders, must_find=kind.named_folder is not None)
    while True:
        chosen = exchange.broadcast(None if choice is None else choice.next(), timeout_s=READ_TIMEOUT_S)
        if "error" in chosen:
            raise CheckpointError(chosen["error"], where=chosen["where"], hint=chosen["hint"])
        if not chosen:
            return None
        root, tag = chosen["root"], chosen["tag"]
        try:
            path, client_state = engine.load_checkpoint(root, tag)
        except CheckpointError:
            is_damaged = exchange.broadcast(choice is not None and choice.is_damaged(), timeout_s=READ_TIMEOUT_S)
            if not is_damaged:  # it does not fit this run: nor will an older one
                raise
            continue
        engine.client_state = client_state or {}
        if group.rank == 0:
            get_logger().info("continuing from %s, behind step %d", path, engine.global_steps)
        return engine.client_state


def _absolute(folder: str) -> str:
    return folder if "://" in folder else os.path.abspath(folder)


class _Choice:
    """Goes through the checkpoints of some folders, on rank 0: the folders in turn, in each the newest first."""

    def __init__(self, folders: Sequence[str], *, must_find: bool) -> None:
        self._folders = folders
        self._must_find = must_find
        self._damaged: list[str] = []
        self._left = itertools.chain.from_iterable(candidates(place_of(folder)) for folder in folders)
        self._path: Place | None = None

    def next(self) -> dict[str, str | None]:
        """Return root and tag of the next checkpoint, an error, or nothing where the run is to begin anew."""
        try:
            return self._next()
        except (OSError, CheckpointError) as error:  # all ranks raise it: they wait for what is chosen here
            return {"error": f"it cannot be read: {error_text(error)}", "where": self._folders[-1], "hint": None}

    def _next(self) -> dict[str, str | None]:
        for found in self._left:
            if not isinstance(found, CheckpointError):
                self._path = found
                return {"root": str(found.parent), "tag": found.name}
            self._set_aside(str(found))
        if not self._folders:
            return {}
        where = self._folders[-1]
        if self._damaged:
            hint = "restore a copy, or begin anew with `launch --resume never`"
            return {"error": "none of its checkpoints can be read", "where": where, "hint": hint}
        if self._must_find:
            return {"error": "there is no checkpoint to continue from", "where": where, "hint": None}
        return {}

    def is_damaged(self) -> bool:
        """Tell whether the checkpoint that could not be loaded is damaged, and warn of it then."""
        findings: list[Finding] = []
        with contextlib.suppress(OSError, CheckpointError):  # why it could not be loaded is known already
            findings = [] if self._path is None else verify(self._path)
        for finding in findings:
            self._set_aside(str(finding))
        return bool(findings)

    def _set_aside(self, problem: str) -> None:
        get_logger().warning("%s: this checkpoint is not used, but the one before it", problem)
        self._damaged.append(problem)
