"""`python -m launcher.checkpoint import`: checkpoints of others, written again in our format.

One parameter, or one state of it, is in memory at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import CheckpointError
from launcher.base.log import get_logger
from launcher.checkpoint.exchange import Exchange
from launcher.checkpoint.formats.deepspeed import open_deepspeed
from launcher.checkpoint.formats.source import WEIGHT, CheckpointSource, StoredParam, most_used_dtype
from launcher.checkpoint.saving.contents import Item, UnitContents
from launcher.checkpoint.saving.save import Encoded, RankData, Save, SaveRequest, SharedData
from launcher.checkpoint_files.manifest import MANIFEST
from launcher.checkpoint_files.place import Place, place_of
from launcher.comm.device import HostDeviceCopier
from launcher.sharding.layout import ParamInfo, layout_unit


def import_deepspeed(source_dir: str | Path, target_dir: str | Path, tag: str | None = None) -> Place:
    """Write a checkpoint of DeepSpeed into a folder of checkpoints of ours; return the folder of the new one.

    tag: which one, and the name it has then; None: that in the source's `latest`. It becomes the target's `latest`.
    Raises: CheckpointError for one that is damaged or is not read, or whose tag is taken.
    """
    source = open_deepspeed(source_dir, tag)
    root, tag = place_of(target_dir), Path(source.where).name
    if (root / tag).exists():
        what = "a checkpoint of ours" if (root / tag / MANIFEST).exists() else "something else"
        raise CheckpointError(f"{tag} is there already: {what}", where=str(root), hint="choose an empty folder")
    source.verify()
    stage = source.state.config.get("zero_optimization", {}).get("stage", 0)
    return write_checkpoint(source, root, tag, {"stage": stage, "tied": source.tied})


def write_checkpoint(source: CheckpointSource, root: Place, tag: str, facts: Mapping[str, Any]) -> Place:
    """Write what a source has as a checkpoint of one rank; return its folder.

    facts: for readers. Raises: CheckpointError for what cannot be read or written; then nothing of it is left.
    """
    scratch = _Scratch()
    contents = [_of_param(source, name, stored, scratch) for name, stored in source.params.items()]
    shared = {"precision": most_used_dtype(source), "buffers": sorted(source.state.buffers), "excluded": [], **facts}
    in_host_memory = HostDeviceCopier(torch.device("cpu"))
    saving = Save(SaveRequest(root, tag, source.state.global_steps), Exchange(None, "import"), in_host_memory)
    run = Encoded.of(vars(source.state), "the run's state", copies=False)
    saving.agree()
    private = Encoded.of({}, "rank 0", copies=False)
    return saving.write(RankData(0, contents, private), SharedData(run, shared))


class _Scratch:
    """Memory that all parameters are read into, one after another. Of their own, the C library would keep much more."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._num_bytes = 0  # of the largest

    def plan(self, num_bytes: int) -> None:
        """Note that so much will be asked for."""
        self._num_bytes = max(self._num_bytes, num_bytes)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory that is valid until the next call."""
        if self._memory.numel() < self._num_bytes:
            self._memory = torch.empty(self._num_bytes, dtype=torch.uint8)
        return self._memory[: numel * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class _SourceItem(Item):
    """A whole parameter, or a state of it, that is read when it is written."""

    source: CheckpointSource = field(kw_only=True)
    scratch: _Scratch = field(kw_only=True)

    @property
    def values(self) -> Tensor:
        kind, _, rest = self.key.partition("/")
        key, name = (WEIGHT, rest) if kind == WEIGHT else rest.split("/", 1)
        out = self.scratch.take(len(self.elements), self.dtype)
        self.source.read(key, name, 0, out)
        return out


def _of_param(source: CheckpointSource, name: str, stored: StoredParam, scratch: _Scratch) -> UnitContents:
    info = ParamInfo(name, stored.shape, stored.dtype, stored.is_trainable, stored.group or 0)
    contents = UnitContents(layout_unit([info], 1))
    keys = {f"{WEIGHT}/{name}": stored.master_dtype}
    keys |= {f"state/{state}/{name}": dtype for state, dtype in stored.states.items()}
    for key, dtype in keys.items() if info.numel else ():
        held = torch.empty(info.numel, dtype=getattr(torch, dtype), device="meta")
        scratch.plan(held.nbytes)
        contents.items.append(_SourceItem(key, held, None, range(info.numel), source=source, scratch=scratch))
    if info.numel and stored.scalars:
        contents.scalars[name] = dict(stored.scalars)
    return contents


def run(arguments: Sequence[str]) -> None:
    """Do what the command line asks for. Raises: CheckpointError."""
    parser = argparse.ArgumentParser(prog="launch checkpoint import", description="Import a checkpoint of DeepSpeed.")
    parser.add_argument("source", help="the folder that DeepSpeed's save_checkpoint was given, or a tag's in it")
    parser.add_argument("target", help="the folder for checkpoints of launch; it may be new")
    parser.add_argument("--tag", help="which checkpoint (default: the one that the source's file latest names)")
    options = parser.parse_args(arguments)
    path = import_deepspeed(options.source, options.target, options.tag)
    get_logger().info("%s: imported", path)
