"""Writes a checkpoint in the form of `torch.distributed.checkpoint`: FSDP2's scripts load it as one of their own."""

from __future__ import annotations

import argparse
import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats.dcp.files import METADATA
from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint.formats.open import folder_of, open_source
from launcher.checkpoint.formats.source import WEIGHT, CheckpointSource
from launcher.optim.catalog import BY_NAME


def export_checkpoint(
    checkpoint_dir: str | os.PathLike[str], output: str | Path, *, tag: str | None = None, model_name: str = "model"
) -> None:
    """Write a checkpoint into a new folder, in the form of DCP.

    checkpoint_dir: a tag's folder, or the one of all tags, where `tag` or `latest` names one. Raises: as `export_dcp`.
    """
    with contextlib.closing(open_source(folder_of(checkpoint_dir, tag))) as source:
        tied = source.facts.get("tied", {}) if isinstance(source, NativeSource) else {}
        export_dcp(source, Path(output), model_name=model_name, tied=tied)


def export_dcp(
    source: CheckpointSource, output: Path, *, model_name: str = "model", tied: Mapping[str, str] | None = None
) -> None:
    """Write a checkpoint into a new folder; one tensor is in memory at a time.

    Keys are those of `{"model": ..., "optimizer": ...}` with what `get_state_dict` returns; param_groups also in the
    form of `flatten_optimizer_state_dict=True`. Weights are fp32 where they were trained in 16 bits.
    model_name: "" puts the weights beside "optimizer", as torchtitan has them. tied: further names of parameters ->
    the name that the source has. Raises: CheckpointError where there is a checkpoint, or where the source cannot be
    read; OSError.
    """
    if (output / METADATA).exists():
        raise CheckpointError("there is a checkpoint already", where=str(output), hint="name another folder")
    lazy = _LazyTensors(source)
    prefix = f"{model_name}." if model_name else ""
    model: dict[str, Any] = {}
    for name, first in {**{name: name for name in source.params}, **(tied or {})}.items():
        param = source.params[first]
        model[name] = lazy.add(f"{prefix}{name}", WEIGHT, first, getattr(torch, param.master_dtype))
    model |= source.state.buffers
    model |= source.state.extra_state
    nested: dict[str, Any] = {model_name: model} if model_name else model
    nested["train_state"] = {"step": torch.tensor(source.state.global_steps)}
    if source.state.optimizer is not None:
        nested["optimizer"] = _optimizer_state(lazy, source)
    writer = FileSystemWriter(output, overwrite=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is meant
        save(nested, storage_writer=writer, planner=_LazyPlanner(lazy), no_dist=True)


class _LazyTensors:
    """Tensors of a source as meta tensors, whose values are read when they are written."""

    def __init__(self, source: CheckpointSource) -> None:
        self._source = source
        self._places: dict[str, tuple[str, str, torch.dtype]] = {}

    def add(self, at: str, key: str, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor without values. at: its key in the new checkpoint; key, name: as `CheckpointSource.read`."""
        self._places[at] = key, name, dtype
        return torch.empty(self._source.params[name].shape, dtype=dtype, device="meta")

    def read(self, at: str) -> Tensor | None:
        """Return a tensor with values; None for one that was not added. A state that is not there yet is zeros."""
        if at not in self._places:
            return None
        key, name, dtype = self._places[at]
        param = self._source.params[name]
        values = torch.zeros(param.shape, dtype=dtype)
        if key == WEIGHT or key in param.states:
            self._source.read(key, name, 0, values.view(-1))
        return values


class _LazyPlanner(DefaultSavePlanner):
    """Plans with meta tensors; the writer asks it for one tensor after the other."""

    def __init__(self, lazy: _LazyTensors) -> None:
        super().__init__()
        self._lazy = lazy

    def lookup_object(self, index: MetadataIndex) -> Any:
        values = self._lazy.read(index.fqn)
        return super().lookup_object(index) if values is None else values


def _optimizer_state(lazy: _LazyTensors, source: CheckpointSource) -> dict[str, Any]:
    trained = {name: param for name, param in source.params.items() if param.group is not None}
    # A script that loads has made the states of every parameter: those that no step has made yet are zeros.
    dtypes = {state: dtype for param in trained.values() for state, dtype in param.states.items()}
    scalars = {state: value for param in trained.values() for state, value in param.scalars.items()}
    states: dict[str, dict[str, Any]] = {}
    for name, param in trained.items():
        states[name] = {
            state: _as_torch_has_it(param.scalars.get(state, 0 if state == "step" else value))
            for state, value in scalars.items()
        }
        for state, dtype in dtypes.items():
            stored = getattr(torch, param.states.get(state, dtype))
            states[name][state] = lazy.add(f"optimizer.state.{name}.{state}", state, name, stored)
    groups: list[dict[str, Any]] = []
    flat: dict[str, Any] = {}
    for index, group in enumerate(source.state.groups):
        names = [name for name, param in trained.items() if param.group == index]
        options = _options(source.state.optimizer, group)
        groups.append({**options, "params": names})
        flat |= {f"param_groups.{name}.{option}": value for name in names for option, value in options.items()}
    taken = {f"param_groups.{index}.{option}" for index, group in enumerate(groups) for option in group}
    both = {key: value for key, value in flat.items() if key not in taken}
    return {"state": states, "param_groups": groups, **both}


def _as_torch_has_it(value: Any) -> Any:
    """Return a counter as the tensor that torch's optimizers keep."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return torch.tensor(float(value)) if is_number else value


def _options(optimizer: str | None, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options that torch's class has, such as `foreach`: who loads looks for each of them."""
    kind: Any = BY_NAME.get(optimizer or "")
    defaults = {} if kind is None else kind([torch.empty(1)], lr=float(group["lr"])).defaults
    return {**defaults, "initial_lr": group.get("lr"), **group}


def run(arguments: Sequence[str]) -> None:
    """Run the command line. Raises: what `export_checkpoint` does."""
    parser = argparse.ArgumentParser(prog="launch checkpoint export", description=export_checkpoint.__doc__)
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_dir")
    parser.add_argument("--format", choices=("dcp", "torchtitan"), default="dcp")
    parser.add_argument("--tag")
    given = parser.parse_args(arguments)
    model_name = "" if given.format == "torchtitan" else "model"
    export_checkpoint(given.checkpoint_dir, given.output_dir, tag=given.tag, model_name=model_name)
