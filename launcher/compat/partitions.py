"""Even parts of lists and tensors: `deepspeed.runtime.utils`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from launcher.base.errors import EngineError
from launcher.compat.ranks import get_rank, get_world_size
from launcher.sharding.pipeline import partition


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Return the sums of the first, the first two, ... of the weights."""
    return list(itertools.accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return where each part begins, and where the last one ends; the first parts have one item more than others."""
    least, more = divmod(num_items, num_parts)
    return [part * least + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the same for parts whose heaviest is as light as can be, as stages of a pipeline are chosen."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return [0, *(part.stop for part in partition(weights, num_parts))]


class PartitionedTensor:
    """One rank's part of a tensor that all ranks of a group have."""

    def __init__(self, tensor: Tensor, group: ProcessGroup | None, partition_meta: Tensor | None = None) -> None:
        """tensor: the whole, the same on each rank. partition_meta: of `to_meta`; then `tensor` is the part."""
        self.group = group
        self.num_parts, self.rank = get_world_size(group), get_rank(group)
        self.orig_device = tensor.device
        if partition_meta is None:
            self.orig_size = list(tensor.shape)
            self.partition = partition_uniform(tensor.numel(), self.num_parts)
            start, end = self.partition[self.rank : self.rank + 2]
            self.local_data = tensor.detach().reshape(-1)[start:end].clone()
        else:
            num_dims, *values = partition_meta.tolist()
            self.orig_size, (num_parts, rank, *self.partition) = values[:num_dims], values[num_dims:]
            if (num_parts, rank) != (self.num_parts, self.rank):
                raise EngineError(
                    f"PartitionedTensor: the part is number {rank} of {num_parts}, and this rank number {self.rank} of"
                    f" {self.num_parts}",
                    hint="give the group that the tensor was divided for",
                )
            self.local_data = tensor.detach()

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: ProcessGroup | None, device: Any = None
    ) -> PartitionedTensor:
        """Return the tensor that `to_meta` and `data` describe. Raises: EngineError for another rank or group."""
        tensor = cls(local_part, group, meta)
        if device is not None:
            tensor.orig_device = torch.device(device)
        return tensor

    def to_meta(self) -> Tensor:
        """Return size, number of parts, own number and cuts as integers, to be sent beside `data`."""
        values = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(values, dtype=torch.long, device=self.orig_device)

    def full(self, device: Any = None) -> Tensor:
        """Return the whole. Every rank of the group must call it."""
        sizes = [end - start for start, end in itertools.pairwise(self.partition)]
        padded = self.local_data.new_zeros(max(sizes))
        padded[: sizes[self.rank]] = self.local_data
        parts = [torch.empty_like(padded) for _ in sizes] if self.num_parts > 1 else [padded]
        if self.num_parts > 1:
            dist.all_gather(parts, padded, group=self.group)
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return whole.view(self.orig_size).to(self.orig_device if device is None else device)

    def data(self) -> Tensor:
        """Return this rank's part."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Return the shape of this rank's part, which has one dimension."""
        return self.local_data.shape

    def full_size(self) -> list[int]:
        """Return the shape of the whole."""
        return self.orig_size


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as it is written: `base(1, name=2)`."""
    words = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{base}({', '.join(words)})"


def is_model_parallel_parameter(p: Any) -> bool:
    """Whether a parameter is marked as divided between ranks, by `model_parallel` or `tensor_model_parallel`."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def get_weight_norm(parameters: Tensor | Sequence[Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of tensors as of one vector; -1 where it is not finite. Raises: EngineError for `mpu`."""
    if mpu is not None:
        raise EngineError("get_weight_norm(mpu=...) is not supported", hint="use data parallelism alone")
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norms = [float(torch.linalg.vector_norm(tensor.detach().float(), norm_type)) for tensor in tensors]
    norm = float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), norm_type)) if norms else 0.0
    return norm if math.isfinite(norm) else -1.0


class CheckOverflow:
    """Says whether gradients of plain parameters overflowed on any rank."""

    def __init__(self, param_groups: Sequence[Sequence[Tensor]] | None = None, mpu: Any = None) -> None:
        """param_groups: lists of parameters. Raises: EngineError for `mpu`."""
        if mpu is not None:
            raise EngineError("CheckOverflow(mpu=...) is not supported", hint="use data parallelism alone")
        self.params = [param for group in param_groups or () for param in group]

    def check(self, param_groups: Sequence[Sequence[Tensor]] | None = None) -> bool:
        """Return it for the gradients of these parameters, or of those given before. Every rank must call it."""
        params = self.params if param_groups is None else [param for group in param_groups for param in group]
        return self.has_overflow(params)

    def has_overflow(self, params: Sequence[Tensor]) -> bool:
        """Do the same for a plain list."""
        return self._anywhere(self.has_overflow_serial(params))

    def has_overflow_serial(self, params: Sequence[Tensor]) -> bool:
        """Do the same for this rank alone."""
        return any(param.grad is not None and not bool(param.grad.isfinite().all()) for param in params)

    def check_using_norm(self, norm_group: Sequence[float], reduce_overflow: bool = True) -> bool:
        """Return it from norms, which are -1, infinite or NaN where gradients overflowed."""
        is_over = any(float(norm) < 0 or not math.isfinite(norm) for norm in norm_group)
        return self._anywhere(is_over) if reduce_overflow else is_over

    def _anywhere(self, is_over: bool) -> bool:
        if get_world_size() == 1:
            return is_over
        everywhere: list[bool] = [False] * get_world_size()
        dist.all_gather_object(everywhere, is_over)
        return any(everywhere)
