"""Which checkpoint a start continues from, and how all ranks come to load the same one."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

from launcher.base.errors import CheckpointError, EngineError
from launcher.base.log import get_logger
from launcher.base.resume import AUTO, StartKind, start_kind
from launcher.checkpoint.exchange import Exchange, error_text
from launcher.checkpoint.load import READ_TIMEOUT_S
from launcher.checkpoint_files.place import Place, place_of
from launcher.checkpoint_files.retention import add_owner, by_age, candidates, owners_of
from launcher.checkpoint_files.verify import Finding, verify
from launcher.comm.groups import RankGroup
from launcher.engine.sharded import ShardedModel

_in_use: WeakValueDictionary[str, ShardedModel] = WeakValueDictionary()  # folder -> of the engine that saves there


class LoadingEngine(Protocol):
    """What an engine must offer to continue."""

    global_steps: int
    client_state: dict[str, Any]

    def load_checkpoint(self, load_dir: str, tag: str) -> tuple[str | None, dict[str, Any] | None]:
        """See `Engine.load_checkpoint`."""
        ...


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that this start has continued from."""

    path: str
    client_state: dict[str, Any]


def begin_in_folder(
    engine: LoadingEngine, sharded: ShardedModel, folder: str | None, group: RankGroup
) -> Resumed | None:
    """Load what this start continues from, at the end of `initialize`; None where it begins anew. Collective.

    folder: `checkpoint.folder`. Raises: EngineError for a new run in the folder of another one, and for two engines
    with one folder; CheckpointError where there must be a checkpoint and is none.
    """
    kind = start_kind(os.environ)
    if folder is None and kind.resume == AUTO and group.rank == 0:
        get_logger().warning("--resume auto: the config has no checkpoint.folder, so only engine.resume(DIR) continues")
    if folder is None and kind.named_folder is None:
        return None
    if folder is not None and sharded.optimizer is not None:  # an engine for inference saves nothing by itself
        _check_folder(kind, folder, group)
        _in_use[_absolute(folder)] = sharded
    resumed = resume_from(engine, folder, group)
    if resumed is None and kind.resumes and group.rank == 0:
        get_logger().info("there is no checkpoint in %s yet: the run begins anew", folder)
    return resumed


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


def resume_from(engine: LoadingEngine, folder: str | None, group: RankGroup) -> Resumed | None:
    """Load the newest checkpoint that is good, if this start is to continue; else return None. Collective.

    folder: where the job saves. Raises: CheckpointError where the checkpoint does not fit the model, where all are
    damaged, or where `--resume` names a folder without any.
    """
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
        return Resumed(str(path), engine.client_state)


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
