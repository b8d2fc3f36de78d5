"""The model's weights as one plain file: `engine.save_16bit_model`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError, EngineValueError
from launcher.base.log import get_logger
from launcher.base.progress import phase
from launcher.checkpoint.zero_to_fp32 import write_safetensors
from launcher.comm.groups import RankGroup
from launcher.engine.parts import EngineParts
from launcher.engine.sharded import ShardedModel
from launcher.engine.state import collect_state

_CHUNK_NUMEL = 1 << 20  # elements that are copied at a time


class WeightExport:
    """The engine's methods that hand out the whole model."""

    module: nn.Module
    _parts: EngineParts
    _sharded: ShardedModel

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return the configured `stage3_gather_16bit_weights_on_model_save`."""
        return bool(self._parts.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return on rank 0 what `save_16bit_model` writes, on others None. Every rank must call it, at stage 3."""
        if self._parts.settings.zero_optimization.stage != 3:
            raise EngineValueError(
                "_zero3_consolidated_16bit_state_dict() is for ZeRO stage 3", hint="call state_dict()"
            )
        return self._whole_weights(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return on rank 0 what `save_16bit_model` writes, on others None, at any stage. Every rank must call it."""
        return self._whole_weights(exclude_frozen_parameters)

    def _whole_weights(self, exclude_frozen: bool) -> dict[str, Any] | None:
        for unit in self._sharded.units:
            unit.params.wait()
        left_out = {param for param in self.module.parameters() if exclude_frozen and not param.requires_grad}
        is_wanted = self._parts.mesh.world.rank == 0
        state = self._whole_state((), {}, is_wanted=is_wanted, left_out=left_out)
        return state if is_wanted else None

    def _whole_state(
        self,
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
        *,
        is_wanted: bool,
        left_out: Collection[nn.Parameter] = (),
    ) -> dict[str, Any]:
        """See `collect_state`. Collective."""
        mesh = self._parts.mesh
        return collect_state(self.module, arguments, options, is_wanted=is_wanted, left_out=left_out, mesh=mesh)

    @phase("saving the weights")
    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights that the forward reads to one file; return whether it was written.

        Every rank must call it; rank 0 holds the whole model in host memory meanwhile. A name that ends in
        `.safetensors` stands for that format, any other for `torch.save`'s. At stage 3 nothing is written, with a
        warning, unless `stage3_gather_16bit_weights_on_model_save` is set. exclude_frozen_parameters: those that are
        not trained are neither gathered nor written. Raises: EngineError, on every rank, where the file cannot be
        written.
        """
        group, is_stage_3 = self._parts.mesh.world, self._parts.settings.zero_optimization.stage == 3
        if is_stage_3 and not self.zero_gather_16bit_weights_on_model_save():
            if group.rank == 0:
                key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
                get_logger().warning("save_16bit_model() wrote nothing: at ZeRO stage 3 it needs %s", key)
            return False
        save_weights(self._whole_weights(exclude_frozen_parameters), save_dir, save_filename, group)
        return True


def save_weights(weights: Mapping[str, Any] | None, folder: str, name: str, group: RankGroup) -> None:
    """Write rank 0's `weights` to one file, which appears when it is complete. Collective.

    Raises: EngineError, on every rank, where it cannot be written.
    """
    path, failure = Path(folder, name), None
    if weights is not None:
        try:
            _write(weights, path)
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: torch.save's own, of a full disk too
            failure = error
    has_failed = any(group.communicator.gather_scalars(float(failure is not None)))
    if failure is not None:
        raise EngineError(f"the weights were not written: {failure}", where=str(path)) from failure
    if has_failed:
        raise EngineError("the weights were not written", where=str(path), hint="see the error of rank 0")


def _write(weights: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            if path.suffix == ".safetensors":
                write_safetensors(file, {key: _in_memory(key, value) for key, value in weights.items()})
            else:
                torch.save(weights, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _in_memory(key: str, value: Any) -> _InMemory:
    if not isinstance(value, Tensor):
        raise ValueError(f"{key} is a {type(value).__name__}, and safetensors holds tensors only; name the file *.bin")
    return _InMemory(value.contiguous())


@dataclass(frozen=True)
class _InMemory:
    """A tensor in host memory, to be written piece by piece."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def chunks(self) -> Iterator[memoryview]:
        """Yield the tensor's bytes in order. Each chunk is overwritten by the next one."""
        flat = self.tensor.view(-1)
        buffer = bytearray(min(flat.numel(), _CHUNK_NUMEL) * self.dtype.itemsize)
        for start in range(0, flat.numel(), _CHUNK_NUMEL):
            part = flat[start : start + _CHUNK_NUMEL]
            torch.frombuffer(buffer, dtype=self.dtype, count=part.numel()).copy_(part)
            yield memoryview(buffer)[: part.nbytes]
