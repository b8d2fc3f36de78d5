"""`python -m launcher.checkpoint export-deepspeed`: a checkpoint as DeepSpeed 0.19 loads it, for so many ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from launcher.base.errors import CheckpointError
from launcher.base.log import get_logger
from launcher.checkpoint.deepspeed_files.files import Content, DeepSpeedFiles, universal_files
from launcher.checkpoint.deepspeed_files.pickled import write_torch_file
from launcher.checkpoint.deepspeed_files.plan import Plan
from launcher.checkpoint.formats.deepspeed import DeepSpeedCheckpoint
from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint.formats.open import folder_of, open_source
from launcher.checkpoint.formats.source import CheckpointSource
from launcher.checkpoint_files.folder import LATEST, make_folder, replace_file, sync_folder
from launcher.checkpoint_files.manifest import check_tag

LATEST_UNIVERSAL = "latest_universal"
STAGES = range(4)


def export_deepspeed(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | Path,
    *,
    tag: str | None = None,
    stage: int | None = None,
    num_ranks: int | None = None,
    is_universal: bool = False,
) -> Path:
    """Write a checkpoint into a folder of DeepSpeed's checkpoints, under its tag; return the folder of the new one.

    stage, num_ranks: of the run that loads it; None: those of the run that saved. is_universal: for any of both. One
    file's tensors are in memory at a time. Raises: CheckpointError for one that is damaged, that DeepSpeed could not
    load, or whose tag is taken; OSError.
    """
    folder, root = folder_of(checkpoint_dir, tag), Path(output_dir)
    with contextlib.closing(open_source(folder)) as source:
        target = root / check_tag(folder.name)
        if target.exists():
            raise CheckpointError(f"{target.name} is there already", where=str(root), hint="choose another folder")
        if is_universal:
            files = list(universal_files(DeepSpeedFiles(Plan(source, 3, 1))))
        else:
            stage = _stage_of(source) if stage is None else stage
            num_ranks = _num_ranks_of(source) if num_ranks is None else num_ranks
            written = DeepSpeedFiles(Plan(source, stage, num_ranks))
            files = [file for rank in range(num_ranks) for file in written.of_rank(rank)]
        _write(target, files)
    replace_file(root / (LATEST_UNIVERSAL if is_universal else LATEST), target.name.encode())
    return target


def _write(target: Path, files: Iterable[tuple[str, Content]]) -> None:
    """Write files into a folder that appears when all of them are there."""
    draft = target.with_name(f".{target.name}.tmp")
    if draft.exists():
        shutil.rmtree(draft)  # of an export that was killed
    make_folder(draft)
    try:
        for name, content in files:
            path = draft / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_torch_file(path, content())
        for folder in {(draft / name).parent for name, _ in files} | {draft}:
            sync_folder(folder)
        draft.rename(target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _stage_of(source: CheckpointSource) -> int:
    if isinstance(source, NativeSource):
        return int(source.facts.get("stage", 0))
    section = source.state.config.get("zero_optimization")
    return int(section.get("stage", 0)) if isinstance(section, dict) else 0


def _num_ranks_of(source: CheckpointSource) -> int:
    if isinstance(source, NativeSource):
        return source.manifest.world_size
    return source.num_ranks if isinstance(source, DeepSpeedCheckpoint) else 1


def run(arguments: Sequence[str]) -> None:
    """Run the command line. Raises: what `export_deepspeed` does."""
    parser = argparse.ArgumentParser(prog="launch checkpoint export", description=export_deepspeed.__doc__)
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_dir")
    parser.add_argument("--format", choices=("deepspeed", "universal"), default="deepspeed")
    parser.add_argument("--tag")
    parser.add_argument("--stage", type=int, choices=STAGES)
    parser.add_argument("--ranks", type=int)
    given = parser.parse_args(arguments)
    path = export_deepspeed(
        given.checkpoint_dir,
        given.output_dir,
        tag=given.tag,
        stage=given.stage,
        num_ranks=given.ranks,
        is_universal=given.format == "universal",
    )
    get_logger().info("%s: written for DeepSpeed", path)
