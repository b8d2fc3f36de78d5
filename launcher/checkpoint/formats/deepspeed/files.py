"""The files of a checkpoint of DeepSpeed: which are there, and what is in them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats.source import StoredParam
from launcher.checkpoint.formats.torch_file import open_torch_file, plain
from launcher.checkpoint.values.tree import dtype_name

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?P<kind>bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
# What a folder may hold that is not read -> what it is.
_NOT_READ = (
    (re.compile(r"layer_\d+-model_.*"), "pipeline parallelism"),
    (re.compile(r"(layer_\d+_)?expert_\d+_.*|expp_rank_.*"), "experts (MoE)"),
    (re.compile(r"offloaded_tensors"), "optimizer states offloaded to NVMe"),
)
_AGAIN = "save it again, or use another checkpoint"
_WITH_DEEPSPEED = (
    "load it with DeepSpeed and the parallelism it was saved with, save the weights as one state dict, and load that"
    " into the model before initialize()"
)
_LEFT = "an older checkpoint was left in the folder: move its files away, or use another checkpoint"


def holds_deepspeed(folder: Path) -> bool:
    """Whether a folder is a tag's of a checkpoint that DeepSpeed wrote."""
    return folder.is_dir() and any(_MODEL.fullmatch(entry.name) for entry in folder.iterdir())


def tag_folder(directory: Path, tag: str | None) -> Path:
    """Return the folder of a tag, by default of the one in `latest`. directory: it may be the tag's folder itself.

    Raises: CheckpointError where there is none.
    """
    if tag is None and holds_deepspeed(directory):
        return directory
    if tag is None:
        latest = directory / "latest"
        if not latest.is_file():
            tags = sorted(entry.name for entry in directory.glob("*") if holds_deepspeed(entry))
            hint = f"name one of {', '.join(tags)}" if tags else "give the folder that save_checkpoint got"
            raise CheckpointError("there is no file `latest` that names a tag", where=str(directory), hint=hint)
        tag = latest.read_text(errors="replace").strip()
    folder = directory / tag
    if Path(tag).name != tag or not folder.is_dir():
        raise CheckpointError(f"there is no tag {tag!r}", where=str(directory), hint="give one that is a folder there")
    return folder


class Files:
    """A checkpoint's files. Each is opened once, when something of it is first needed."""

    def __init__(self, folder: Path) -> None:
        """Look which files there are. Raises: CheckpointError for a set that is incomplete or is not read."""
        self.folder = folder
        names = sorted(entry.name for entry in folder.iterdir())
        models = [found for found in map(_MODEL.fullmatch, names) if found]
        optims = [found for found in map(_OPTIM.fullmatch, names) if found]
        self._refuse(names, [int(found["mp"]) for found in (*models, *optims)])
        self.is_stage3 = any(found["rank"] is not None for found in models)
        self._models = {int(found["rank"] or 0): folder / found.string for found in models}
        if self.is_stage3 and any(found["rank"] is None for found in models):
            raise self.error("it has files of stage 3 and of a lower stage", _LEFT)
        if 0 not in self._models:
            raise self._missing("zero_pp_rank_0_" * self.is_stage3 + "mp_rank_00_model_states.pt")
        if len({found["kind"] for found in optims}) > 1:
            raise self.error("it has optimizer states of two precisions", _LEFT)
        self._optims = {int(found["rank"]): folder / found.string for found in optims}
        prefix = optims[0]["kind"] or "" if optims else ""
        self._optim_name = prefix + "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
        self.num_ranks = len(self._optims)

    def error(self, message: str, hint: str = _AGAIN) -> CheckpointError:
        """Return an error about the checkpoint as a whole."""
        return CheckpointError(message, where=str(self.folder), hint=hint)

    def expect_ranks(self, num_ranks: int) -> None:
        """Raises: CheckpointError unless there are optimizer states of exactly so many ranks."""
        for rank in range(num_ranks):
            if rank not in self._optims:
                raise self._missing(self._optim_name.format(rank), f": {num_ranks} ranks saved")
        if self.num_ranks != num_ranks:
            extra = self._optims[max(self._optims)]
            message = f"the file is of another save: this one was of {num_ranks} ranks"
            raise CheckpointError(message, where=str(extra), hint=_LEFT)

    def expect_models(self) -> None:
        """Raises: CheckpointError unless every rank saved what it had of the model, as at stage 3."""
        for rank in range(self.num_ranks):
            if rank not in self._models:
                raise self._missing(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")

    @functools.cache  # noqa: B019  # as long as the checkpoint
    def model(self, rank: int = 0) -> dict[str, Any]:
        """Return the model's states as a rank saved them: below stage 3 rank 0 alone did."""
        return _opened(self._models[rank], ("module", "ds_version", "global_steps"))

    @functools.cache  # noqa: B019
    def zero(self, rank: int) -> dict[str, Any]:
        """Return the optimizer states that a rank saved."""
        if rank not in self._optims:
            raise self._missing(self._optim_name.format(rank))
        state = _opened(self._optims[rank], ("optimizer_state_dict",))["optimizer_state_dict"]
        if not isinstance(state, dict):
            raise CheckpointError("it holds no optimizer states", where=str(self._optims[rank]), hint=_AGAIN)
        return state

    @property
    def paths(self) -> list[Path]:
        """All files."""
        return [*self._models.values(), *self._optims.values()]

    def zero_path(self, rank: int) -> str:
        """Return the name of the file with a rank's optimizer states."""
        return str(self._optims[rank])

    def _missing(self, name: str, more: str = "") -> CheckpointError:
        return CheckpointError(f"the file is missing{more}", where=str(self.folder / name), hint=_AGAIN)

    def _refuse(self, names: list[str], mp_ranks: list[int]) -> None:
        for pattern, what in _NOT_READ:
            found = next((name for name in names if pattern.fullmatch(name)), None)
            if found is not None:
                raise self.error(f"DeepSpeed's checkpoints of {what} (here {found}) are not read", _WITH_DEEPSPEED)
        if any(mp_ranks):
            files = f"files mp_rank_00 to mp_rank_{max(mp_ranks):02}"
            raise self.error(f"DeepSpeed's checkpoints of tensor parallelism ({files}) are not read", _WITH_DEEPSPEED)
        if not mp_ranks and "zero" in names:
            raise self.error("universal checkpoints are not read", "give the folder it was converted from")
        if not mp_ranks:
            raise self.error("there is no file of DeepSpeed's", "give a tag's folder, with files *_model_states.pt")


def _opened(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    content = open_torch_file(path)
    missing = [key for key in keys if not isinstance(content, dict) or key not in content]
    if missing:
        raise CheckpointError(
            f"the file is none of DeepSpeed's checkpoints: it has no {missing[0]}",
            where=str(path),
            hint="give the folder that DeepSpeed's save_checkpoint wrote",
        )
    return dict(content)


# ---- Where the elements of a parameter are ----


@dataclass(frozen=True)
class Place:
    """How ranks' tensors hold a parameter: each has `part` elements of a sequence in which the parameter begins at
    `first`, from its element `base` on.
    """

    tensor: Callable[[str, int], Tensor]  # of a key ("weight" or a state's name) and a rank
    part: int
    first: int = 0
    base: int = 0

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield what elements [start, stop) of the parameter consist of: rank, first element there, start and stop."""
        while start < stop:
            rank, within = divmod(self.first + start, self.part)
            end = min(stop, start + self.part - within)
            yield rank, self.base + within, start, end
            start = end


@dataclass(frozen=True)
class Found:
    """A parameter of a checkpoint, and where it is."""

    stored: StoredParam
    place: Place


@dataclass(frozen=True)
class Contents:
    """What a stage's files hold, whatever the stage."""

    params: dict[str, Found]
    groups: list[Mapping[str, Any]]  # of the optimizer
    tied: dict[str, str]  # other names of parameters -> the first
    scaler: Any = None


@dataclass(frozen=True)
class States:
    """The states of a parameter's optimizer: by element and in common."""

    by_element: dict[str, str] = field(default_factory=dict)  # name -> dtype
    scalars: dict[str, Any] = field(default_factory=dict)


def in_one(weight: Tensor, *, is_trainable: bool) -> Found:
    """Return a parameter that one tensor holds, and of which the optimizer has nothing."""
    stored = StoredParam(tuple(weight.shape), dtype_name(weight.dtype), is_trainable, None)
    return Found(stored, Place(lambda _key, _rank: weight, max(1, weight.numel())))


def states_of(state: Mapping[str, Any], numel: int, group: Mapping[str, Any]) -> States:
    """Tell apart what an optimizer keeps for each of at least `numel` elements and what for all of them together."""
    by_element = {
        name: dtype_name(value.dtype)
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape and value.numel() >= numel
    }
    scalars = {name: plain(value) for name, value in state.items() if name not in by_element}
    if by_element and "step" not in scalars and "step" in group:  # older fused optimizers count for a group
        scalars["step"] = plain(group["step"])
    if "step" in scalars:
        scalars["step"] = torch.tensor(float(scalars["step"]))  # as torch's optimizers have it
    return States(by_element, scalars)
