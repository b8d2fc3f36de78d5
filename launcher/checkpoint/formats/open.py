"""Opens a checkpoint, whoever wrote it."""

from __future__ import annotations

from pathlib import Path

from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats.dcp.files import METADATA as DCP_METADATA
from launcher.checkpoint.formats.dcp.source import DcpSource
from launcher.checkpoint.formats.deepspeed import DeepSpeedCheckpoint, holds_deepspeed
from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint.formats.source import CheckpointSource
from launcher.checkpoint_files.manifest import MANIFEST
from launcher.checkpoint_files.place import Place


def is_checkpoint(folder: Place) -> bool:
    """Tell whether a folder is itself a checkpoint, rather than one that contains some."""
    is_ours_or_dcp = any((folder / name).is_file() for name in (MANIFEST, DCP_METADATA))
    return is_ours_or_dcp or (isinstance(folder, Path) and holds_deepspeed(folder))


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
