"""A checkpoint that DeepSpeed wrote, at any stage and by any number of ranks, as a source that loading reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats.deepspeed.files import Files, tag_folder
from launcher.checkpoint.formats.deepspeed.partitioned import read_partitioned
from launcher.checkpoint.formats.deepspeed.places import Found
from launcher.checkpoint.formats.deepspeed.state import run_state
from launcher.checkpoint.formats.deepspeed.whole import read_whole
from launcher.checkpoint.formats.source import WEIGHT, CheckpointSource, RunState, StoredParam
from launcher.checkpoint.formats.torch_file import verify_torch_file

# Class -> our name of a state and the one that DeepSpeed's CPU kernel has.
_OTHER_NAMES = {"Adagrad": ("sum", "exp_avg_sq")}


def open_deepspeed(directory: str | Path, tag: str | None = None) -> DeepSpeedCheckpoint:
    """Open the checkpoint that DeepSpeed's `save_checkpoint(directory, tag)` wrote.

    directory: it may also be a tag's folder. tag: None: the one in `latest`. Raises: CheckpointError for one that is
    not there, is incomplete or is of a kind that is not read.
    """
    return DeepSpeedCheckpoint(tag_folder(Path(directory), tag))


class DeepSpeedCheckpoint(CheckpointSource):
    """Opened, its files' tensors are still on disk; `read` takes the bytes it needs, of the files that have them."""

    def __init__(self, folder: Path) -> None:
        """folder: of the tag. Raises: as `open_deepspeed`."""
        files = Files(folder)
        try:
            mp_size = int(files.model().get("mp_world_size") or 1)
            has_zero = files.is_stage3 or files.num_ranks or files.model().get("param_shapes") is not None
            contents = read_partitioned(files) if has_zero else read_whole(files)
            self._state = run_state(files, contents)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise files.error(
                f"it is not as DeepSpeed 0.19 writes it: {type(error).__name__}: {error}",
                "load and save it again with DeepSpeed 0.19",
            ) from error
        if mp_size > 1:
            raise files.error("DeepSpeed's checkpoints of tensor parallelism are not read", "merge its parts first")
        self._files = files
        self.tied = contents.tied  # other names of parameters -> the first
        self.num_ranks = max(1, files.num_ranks)  # that saved; at stage 0 the files do not say
        self._found = contents.params
        self._theirs = self._other_names()
        self._params = {name: self._renamed(each) for name, each in self._found.items()}

    @property
    def where(self) -> str:
        """The folder, for messages."""
        return str(self._files.folder)

    @property
    def state(self) -> RunState:
        """All but parameters and their states."""
        return self._state

    @property
    def params(self) -> Mapping[str, StoredParam]:
        """Parameters by fully qualified name; tied ones are there under the first of their names."""
        return self._params

    def read(self, key: str, name: str, start: int, out: Tensor) -> None:
        """Fill 1-D `out` with elements [start, start + len(out)) of a parameter, converted to out's dtype.

        key: "weight" (the fp32 master where the run has one), or a state's name such as "exp_avg". Raises:
        CheckpointError for files that do not have what they should.
        """
        found = self._found[name]
        if key != WEIGHT and key not in self.params[name].states:
            raise CheckpointError(f"{name} has no state {key}")
        key = self._theirs.get(key, key)
        for rank, at, begin, end in found.place.pieces(start, start + out.numel()):
            found.place.tensor(key, rank).read(at, out[begin - start : end - start])

    def private(self, rank: int, world_size: int) -> dict[str, Any]:
        """Return nothing: DeepSpeed saves neither random numbers nor the position in the data."""
        return {}

    def close(self) -> None:
        """Do nothing: files are open only while something of them is read."""

    def verify(self) -> None:
        """Read all files. Raises: CheckpointError for one that is damaged: `read` does not notice a flipped bit."""
        for path in self._files.paths:
            verify_torch_file(path)

    def _other_names(self) -> dict[str, str]:
        ours, theirs = _OTHER_NAMES.get(self.state.optimizer or "", ("", ""))
        is_theirs = any(theirs in found.stored.states for found in self._found.values())
        return {ours: theirs} if is_theirs else {}

    def _renamed(self, found: Found) -> StoredParam:
        ours = {theirs: ours for ours, theirs in self._theirs.items()}
        states = {ours.get(key, key): dtype for key, dtype in found.stored.states.items()}
        return replace(found.stored, states=states)
