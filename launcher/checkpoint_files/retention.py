"""Which checkpoints of a folder are kept, and what saves that were killed left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import CheckpointError
from launcher.checkpoint_files.folder import (
    Committed,
    committed_in,
    is_of_a_save,
    is_temporary,
    latest_tag,
    make_folder,
    names_in,
    replace_file,
    sync_folder,
)
from launcher.checkpoint_files.manifest import MANIFEST, Manifest, read_json, read_manifest
from launcher.checkpoint_files.place import Place, RemotePath, children, size_of

# A save that still runs has written something more recently than this.
MIN_AGE_S = 900.0


@dataclass(frozen=True)
class Retention:
    """What to keep."""

    keep_last: int  # as many of the newest
    keep_every: int | None = None  # and those whose step is a multiple of this


@dataclass(frozen=True)
class Leftover:
    """A file or folder of a save that did not end."""

    path: Place
    num_bytes: int
    age_s: float  # since something was last written to it

    @property
    def may_be_in_use(self) -> bool:
        """Whether it may belong to a save that still runs."""
        return self.age_s < MIN_AGE_S


def by_age(root: Place) -> list[Committed]:
    """Return the checkpoints of a folder, the one that was saved last at the end.

    Not by step: a run that went back to an earlier checkpoint counts on from there.
    """
    return sorted(committed_in(root), key=lambda each: (each.manifest.created, each.manifest.step))


def superseded(root: Place, retention: Retention) -> list[Committed]:
    """Return the checkpoints that are not to be kept, the oldest first; never the one that `latest` names."""
    committed = by_age(root)
    try:
        latest = latest_tag(root)
    except CheckpointError:  # what it was meant to name is not known: the newest is kept in any case
        latest = None
    return [
        each
        for each in committed[: max(0, len(committed) - retention.keep_last)]
        if each.path.name != latest and not _is_kept_for_ever(each, retention)
    ]


def _is_kept_for_ever(each: Committed, retention: Retention) -> bool:
    every = retention.keep_every
    return every is not None and each.manifest.step % every == 0


def remove(checkpoint: Committed) -> None:
    """Remove one checkpoint. It is gone with one rename: no part of one is left under its name. Raises: OSError."""
    path = checkpoint.path
    if isinstance(path, RemotePath):
        (path / MANIFEST).unlink(missing_ok=True)  # first: from here on this is no checkpoint
        for each in path.iterdir():
            each.unlink(missing_ok=True)
        return
    leftover = path.with_name(f".{path.name}.tmp")
    if leftover.exists():
        shutil.rmtree(leftover)
    path.rename(leftover)
    sync_folder(path.parent)
    shutil.rmtree(leftover)


def prune(root: Place, retention: Retention) -> list[Committed]:
    """Remove the checkpoints that are not to be kept; return them. One rank calls it. Raises: OSError."""
    found = superseded(root, retention)
    for each in found:
        remove(each)
    return found


def leftovers(root: Place) -> list[Leftover]:
    """Return what saves that did not end have left in a folder and in its checkpoints."""
    now_s = time.time()
    return [Leftover(path, num_bytes_of(path), now_s - _last_write_s(path)) for path in _paths_left(root)]


def remove_leftover(leftover: Leftover) -> None:
    """Remove it. Raises: OSError."""
    if isinstance(leftover.path, Path) and leftover.path.is_dir():
        shutil.rmtree(leftover.path)
    else:
        leftover.path.unlink(missing_ok=True)


def _paths_left(root: Place) -> Iterator[Place]:
    for path in children(root):
        if is_temporary(path.name) and not path.is_symlink():
            yield path
        elif isinstance(path, RemotePath) and not (path / MANIFEST).exists():  # a first save that did not end
            yield from (each for each in path.iterdir() if is_of_a_save(each.name))
    for each in committed_in(root):
        known = names_in(each.manifest)
        for path in children(each.path):
            if path.name not in known and (is_of_a_save(path.name) or is_temporary(path.name)) and path.is_file():
                yield path


def num_bytes_of(path: Place) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if isinstance(path, RemotePath):
        return path.size_below()
    return sum(found.st_size for found in _stats_in(path) if not stat.S_ISDIR(found.st_mode))


def _last_write_s(path: Place) -> float:
    if isinstance(path, RemotePath):
        return path.last_write_s() or time.time()
    return max((found.st_mtime for found in _stats_in(path)), default=time.time())


def _stats_in(path: Path) -> Iterator[os.stat_result]:
    """Yield what is known of a file, or of a folder and everything in it; a running save may be renaming it."""
    for each in (path, *(path.rglob("*") if path.is_dir() else ())):
        with contextlib.suppress(FileNotFoundError):
            yield each.lstat()


# ---- What a run may continue from ----


def candidates(root: Place) -> Iterator[Place | CheckpointError]:
    """Yield the checkpoints of a folder, the one saved last at first, and in place of a damaged one what is wrong.

    Those without a readable manifest come first: when they were saved is not known. Nothing of tensors is read: they
    are verified as they are loaded. Each checkpoint is looked at when it is its turn, for it may have many files.
    """
    committed = {each.path: each.manifest for each in reversed(by_age(root))}
    for path in children(root):
        if path not in committed and not path.name.startswith(".") and (path / MANIFEST).exists():
            try:
                read_manifest(path)
            except CheckpointError as error:
                yield error
    for path, manifest in committed.items():
        try:
            _look_at(path, manifest)
        except CheckpointError as error:
            yield error
        else:
            yield path


def _look_at(folder: Place, manifest: Manifest) -> None:
    """Raises: CheckpointError for a file that is missing or has another size, and a damaged state."""
    read_json(folder, manifest.state, manifest)
    for name, record in manifest.files.items():
        path = folder / name
        try:
            num_bytes = size_of(path)
        except FileNotFoundError:
            if manifest.is_node_local:  # another host has it
                continue
            raise CheckpointError("it is missing", where=str(path)) from None
        except OSError as error:
            raise CheckpointError(f"it cannot be read: {error.strerror}", where=str(path)) from None
        if num_bytes != record.num_bytes:
            message = f"it has {num_bytes} bytes, the manifest says {record.num_bytes}"
            raise CheckpointError(message, where=str(path))


# ---- Which jobs save into a folder ----


OWNERS = "run.json"
_MAX_JOBS = 100


def owners_of(root: Place) -> list[str]:
    """Return the ids of jobs that have saved into a folder, the last one at the end; none where it is not known."""
    try:
        plain = json.loads((root / OWNERS).read_bytes())
        return [str(job) for job in plain["jobs"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


def add_owner(root: Place, jobs: Collection[str]) -> None:
    """Note that a job saves into a folder, which is made. jobs: all ids it has. Raises: OSError, CheckpointError."""
    make_folder(root)
    before = owners_of(root)
    now = [*(job for job in before if job not in jobs), *jobs][-_MAX_JOBS:]
    if now != before:
        replace_file(root / OWNERS, json.dumps({"jobs": now}, indent=1).encode() + b"\n")
