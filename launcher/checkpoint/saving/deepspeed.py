"""`checkpoint.format: "deepspeed"`: DeepSpeed's files beside ours, each rank's by that rank.

DeepSpeed divides parameters otherwise than units are divided: a rank reads its part from the files that all ranks have
written, before these are committed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from launcher.checkpoint.deepspeed_files.files import DeepSpeedFiles
from launcher.checkpoint.deepspeed_files.pickled import write_torch_file
from launcher.checkpoint.deepspeed_files.plan import Plan
from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint_files.folder import Draft
from launcher.checkpoint_files.manifest import FileRecord, Manifest


def write_beside(draft: Draft, manifest: Manifest, rank: int) -> dict[str, FileRecord]:
    """Write a rank's files of DeepSpeed into a draft; return them by name. manifest: of all else that is in the draft.

    One file's tensors are in memory at a time. Raises: OSError, CheckpointError for what DeepSpeed's files cannot hold.
    """
    assert isinstance(draft.path, Path), "stores are refused before anything is written"
    found = {}
    with contextlib.closing(NativeSource(draft.path, manifest)) as source:
        files = DeepSpeedFiles(Plan(source, int(source.facts["stage"]), manifest.world_size))
        for name, content in files.of_rank(rank):
            own = draft.file(Path(name).stem, Path(name).suffix)
            found[own] = FileRecord(*write_torch_file(draft.path / own, content()))
    return found
