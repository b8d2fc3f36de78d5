"""Files of checkpoints in DeepSpeed's format, and values that travel in them, by DeepSpeed's names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Folder = str | os.PathLike[str]


def get_model_ckpt_name_for_rank(base_folder: Folder, mp_rank_str: str) -> str:
    """Return the path of a rank's file of the model. mp_rank_str: such as "00"."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: Folder, dp_rank: int, mp_rank: int) -> str:
    """Return the path of a rank's file of sharded states."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_model_state_file(checkpoint_dir: Folder, zero_stage: int) -> str:
    """Return the file that says what the model is. Raises: FileNotFoundError."""
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if zero_stage == 3 else "mp_rank_00_model_states.pt"
    path = Path(checkpoint_dir, name)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: give the folder of a checkpoint of stage {zero_stage}")
    return str(path)


def get_checkpoint_files(checkpoint_dir: Folder, glob_pattern: str) -> list[str]:
    """Return the files of a folder, those of rank 2 before those of rank 10. Raises: FileNotFoundError for none."""
    found = sorted(map(str, Path(checkpoint_dir).glob(glob_pattern)), key=_numbers_apart)
    if not found:
        raise FileNotFoundError(f"there is no {glob_pattern} in {checkpoint_dir}: give the folder of a checkpoint")
    return found


def get_optim_files(checkpoint_dir: Folder) -> list[str]:
    """Return the files of all ranks' states, in rank order. Raises: FileNotFoundError for none."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: Folder) -> list[str]:
    """Return the files of the model of all ranks, in rank order. Raises: FileNotFoundError for none."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def _numbers_apart(name: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class TorchCheckpointEngine:
    """Writes and reads one file with `torch.save` and `torch.load`."""

    def __init__(self, config_params: Any = None) -> None:
        """config_params: part of the signature; files have torch's own format."""
        self.name = "TorchCheckpointEngine"

    def makedirs(self, path: Folder, exist_ok: bool = False) -> None:
        """Make a folder."""
        os.makedirs(path, exist_ok=exist_ok)

    def create(self, info: Any) -> None:
        """Do nothing: a checkpoint begins with its first file."""

    def save(self, state_dict: Any, path: Folder) -> None:
        """Write a file."""
        torch.save(state_dict, path)

    def load(self, path: Folder, map_location: Any = None) -> Any:
        """Read a file of tensors and plain values; no code in it is run. Raises: UnpicklingError for another one."""
        return torch.load(path, map_location=map_location, weights_only=True)

    def commit(self, info: Any) -> bool:
        """Return True: what `save` has returned from is on disk."""
        return True


class SparseTensor:
    """The rows of a matrix that are not zero: their numbers and values."""

    def __init__(self, dense_tensor: Tensor | None = None) -> None:
        """dense_tensor: [rows, columns], dense or sparse in its rows; None: nothing is set yet."""
        self.orig_dense_tensor = dense_tensor
        self.indices: Tensor | None = None  # int64 [n]
        self.values: Tensor | None = None  # [n, columns]
        self.dense_size: list[int] | None = None
        if dense_tensor is None:
            return
        self.dtype, self.is_sparse = dense_tensor.dtype, dense_tensor.is_sparse
        self.dense_size = list(dense_tensor.shape)
        if dense_tensor.is_sparse:
            rows = dense_tensor.coalesce()
            self.indices, self.values = rows.indices().flatten(), rows.values()
        else:
            self.indices = (dense_tensor != 0).any(dim=1).nonzero().flatten()
            self.values = dense_tensor[self.indices]

    def to_coo_tensor(self) -> Tensor:
        """Return torch's sparse tensor of it."""
        indices, values, size = self._parts()
        return torch.sparse_coo_tensor(indices[None], values, size, check_invariants=False)

    def to_dense(self) -> Tensor:
        """Return the matrix; a row that occurs twice is the sum of both."""
        indices, values, size = self._parts()
        return values.new_zeros(size).index_add_(0, indices, values)

    @staticmethod
    def type() -> str:
        """Return a word for it."""
        return "deepspeed.SparseTensor"

    def sparse_size(self) -> tuple[int, int]:
        """Return how many numbers it holds, and how many the matrix does."""
        indices, values, size = self._parts()
        return indices.numel() + values.numel(), size[0] * size[1]

    def add(self, b: SparseTensor) -> None:
        """Add another one of the same matrix. Raises: AssertionError for one of another size."""
        indices, values, size = self._parts()
        other_indices, other_values, other_size = b._parts()
        assert size == other_size, f"a SparseTensor of {other_size} cannot be added to one of {size}"
        self.indices, self.values = torch.cat([indices, other_indices]), torch.cat([values, other_values])

    def _parts(self) -> tuple[Tensor, Tensor, list[int]]:
        assert self.indices is not None, "SparseTensor: set indices, values and dense_size first"
        assert self.values is not None, "SparseTensor: set values and dense_size first"
        assert self.dense_size is not None, "SparseTensor: set dense_size first"
        return self.indices, self.values, self.dense_size

    def __repr__(self) -> str:
        held, whole = self.sparse_size()
        return f"SparseTensor(size={self.dense_size}, rows={len(self._parts()[0])}, reduction_factor={whole / held})"
