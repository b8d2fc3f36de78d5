"""Opens a checkpoint, whoever wrote it."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats.dcp.files import METADATA as DCP_METADATA
from launcher.checkpoint.formats.dcp.source import DcpSource
from launcher.checkpoint.formats.deepspeed import DeepSpeedCheckpoint, holds_deepspeed
from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint.formats.source import CheckpointSource
from launcher.checkpoint_files.folder import latest_tag
from launcher.checkpoint_files.manifest import MANIFEST, check_tag
from launcher.checkpoint_files.place import Place, place_of


def is_checkpoint(folder: Place) -> bool:
    """Tell whether a folder is itself a checkpoint, rather than one that contains some."""
    is_ours_or_dcp = any((folder / name).is_file() for name in (MANIFEST, DCP_METADATA))
    return is_ours_or_dcp or (isinstance(folder, Path) and holds_deepspeed(folder))


def folder_of(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> Place:
    """Return the folder of a checkpoint.

    checkpoint_dir: itself, or the one of all tags, where `tag` or `latest` names one. Raises: CheckpointError for a
    tag that cannot be one.
    """
    folder = place_of(checkpoint_dir)
    if is_checkpoint(folder):
        return folder
    tag = tag or latest_tag(folder)
    return folder if tag is None else folder / check_tag(tag)


def open_source(folder: Place) -> CheckpointSource:
    """Open a checkpoint of ours, of torch.distributed.checkpoint or of DeepSpeed.

    Raises: CheckpointError for anything else, and for one that is damaged.
    """
    if (folder / MANIFEST).is_file():
        return NativeSource(folder)
    if (folder / DCP_METADATA).is_file():
        return DcpSource(folder)
    if isinstance(folder, Path) and holds_deepspeed(folder):
        return DeepSpeedCheckpoint(folder)
    if not folder.is_dir():
        raise CheckpointError("there is no checkpoint", where=str(folder), hint="is the folder's name right?")
    raise CheckpointError(
        "this folder is not a checkpoint: it has neither manifest.json nor .metadata, nor files of DeepSpeed",
        where=str(folder),
        hint="a save that did not end leaves none",
    )
