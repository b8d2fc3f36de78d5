"""Layers of which each rank has a part. A module becomes one in place: its parameters stay the same objects."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.base.errors import EngineError
from launcher.comm.groups import RankGroup
from launcher.comm.torch_internals import outside_graphs
from launcher.parallel.tensor import functions
from launcher.sharding.layout import TensorSplit
from launcher.zero.marks import Mark


class SharedInput:
    """The copied input of the last column-split layer of one module: layers with the same input share one sum.

    It is kept within a forward of that module only.
    """

    def __init__(self, parent: nn.Module) -> None:
        self._is_open = False
        self._given: Tensor | None = None
        self._version = 0
        self._copied: Tensor | None = None
        parent.register_forward_pre_hook(outside_graphs(self._open))
        parent.register_forward_hook(outside_graphs(self._close), always_call=True)

    def __deepcopy__(self, _: Any) -> SharedInput:
        return self  # as the group is: modules and their copies do not run at the same time

    def find(self, x: Tensor) -> Tensor | None:
        """Return the copy of this very tensor; None where there is none."""
        return self._copied if self._given is x and self._version == x._version else None

    def keep(self, x: Tensor, copied: Tensor) -> None:
        """Keep the copy of a tensor until another one comes, or the forward ends."""
        if self._is_open:
            self._given, self._version, self._copied = x, x._version, copied

    def _open(self, *_: Any) -> None:
        self._is_open = True

    def _close(self, *_: Any) -> None:
        self._is_open = False
        self._given = self._copied = None


@dataclass(frozen=True, eq=False)
class TensorShard:
    """What a layer knows of the other ranks."""

    name: str  # of the layer, fully qualified
    group: RankGroup
    split: TensorSplit  # of the weight
    shared: SharedInput | None = None  # of a column-split layer
    takes_whole_input: bool = False  # of a row-split layer: each rank takes its part of it
    gathers_output: bool = False  # of a column-split layer

    def __deepcopy__(self, _: Any) -> TensorShard:
        return self  # a process group has no copy


_SHARE: Mark[TensorShard] = Mark("tensor_share")


def share_of(module: nn.Module) -> TensorShard | None:
    """Return how a module is split; None for one that is whole."""
    return _SHARE.of(module)


def _share_of_split(module: nn.Module) -> TensorShard:
    share = _SHARE.of(module)
    assert share is not None
    return share


def become(module: nn.Module, kind: type[nn.Module], share: TensorShard) -> None:
    """Turn a module into one of which each rank has a part. Its parameters must be this rank's parts already."""
    _SHARE.put(module, share)
    module.__class__ = kind
    setattr(module, _sizes_of(module)[share.split.dim], share.split.local_shape[share.split.dim])


def _sizes_of(module: nn.Module) -> tuple[str, str]:
    """Return the attributes with the sizes of the weight's dimensions."""
    if isinstance(module, nn.Embedding):
        return "num_embeddings", "embedding_dim"
    return ("out_features", "in_features") if isinstance(module, nn.Linear) else ("nx", "nf")


def _column_forward(module: Any, x: Tensor, *, is_transposed: bool) -> Tensor:
    share = _share_of_split(module)
    weight, bias = module.weight, module.bias
    if torch.is_grad_enabled() and x.requires_grad:
        copied = None if share.shared is None else share.shared.find(x)
        if copied is not None:
            y = functions.linear(copied, weight, bias, is_transposed=is_transposed)
        else:
            cast = functools.partial(_as_autocast, x.device.type)
            y, copied = functions.column_linear(
                cast(x), cast(weight), None if bias is None else cast(bias), share.group, is_transposed=is_transposed
            )
            if share.shared is not None:
                share.shared.keep(x, copied)
    else:
        y = functions.linear(x, weight, bias, is_transposed=is_transposed)
    return functions.gather_last_dim(y, share.group, share.split.blocks) if share.gathers_output else y


def _as_autocast(device_type: str, tensor: Tensor) -> Tensor:
    """Return what torch.autocast would make of a linear layer's operand, which it does not see in our functions."""
    if torch.is_autocast_enabled(device_type) and tensor.is_floating_point():
        return tensor.to(torch.get_autocast_dtype(device_type))
    return tensor


def _row_forward(module: Any, x: Tensor, *, is_transposed: bool) -> Tensor:
    share = _share_of_split(module)
    if share.takes_whole_input:
        x = functions.split_last_dim(x, share.group, share.split.blocks)
    num_local = share.split.local_shape[share.split.dim]
    if x.shape[-1] != num_local:
        raise EngineError(
            f"the input has {x.shape[-1]} features and not this rank's {num_local} of"
            f" {share.split.shape[share.split.dim]}: the layer before it is not split over the ranks, or a reshape"
            " between them counts with a full size",
            where=share.name,
            hint="split the layer before it by columns, use -1 in the reshape, or leave this layer whole",
        )
    rows = x.reshape(-1, num_local)
    part = functions.linear(rows, module.weight, None, is_transposed=is_transposed)
    total = functions.sum_over_ranks(part, share.group)
    if module.bias is not None:
        total = total + module.bias.to(total.dtype)
    return total.view(*x.shape[:-1], total.shape[-1])


def _text(module: Any) -> str:
    """Return what a printed model shows of a split linear layer."""
    share = _share_of_split(module)
    sizes = list(share.split.shape)
    if isinstance(module, nn.Linear):
        sizes.reverse()  # inputs first
    position = share.split.dim if not isinstance(module, nn.Linear) else 1 - share.split.dim
    local = share.split.local_shape[share.split.dim]
    shown = [f"{local} of {size}" if index == position else str(size) for index, size in enumerate(sizes)]
    return f"in_features={shown[0]}, out_features={shown[1]}, bias={module.bias is not None}"


class ColumnParallelLinear(nn.Linear):
    """A linear layer of which each rank computes a part of the outputs."""

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in], alike on every rank -> [..., out / ranks], or [..., out] where it is gathered."""
        return _column_forward(self, x, is_transposed=False)

    def extra_repr(self) -> str:
        """Return what the printed model shows of this layer."""
        return _text(self)


class RowParallelLinear(nn.Linear):
    """A linear layer of which each rank has a part of the inputs."""

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in / ranks], or [..., in] where each rank takes its part -> [..., out], alike on every rank."""
        return _row_forward(self, x, is_transposed=False)

    def extra_repr(self) -> str:
        """Return what the printed model shows of this layer."""
        return _text(self)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of which each rank has a part of the rows."""

    @outside_graphs
    def forward(self, input: Tensor) -> Tensor:
        """input: tokens, any shape -> [..., embedding_dim], alike on every rank. Raises: IndexError as torch does."""
        share = _share_of_split(self)
        start, stop = share.split.pieces()[0]
        # A token that no rank has stays one: torch says so.
        is_before, is_behind = input < start, input >= stop
        is_foreign = (is_before & (input >= 0)) | (is_behind & (input < share.split.shape[0]))
        padding = None if self.padding_idx is None else self.padding_idx - start
        if padding is not None and not 0 <= padding < stop - start:
            padding = None
        found = F.embedding((input - start).masked_fill(is_foreign, 0), self.weight, padding)
        return functions.sum_over_ranks(found.masked_fill_(is_foreign.unsqueeze(-1), 0.0), share.group)

    def extra_repr(self) -> str:
        """Return what the printed model shows of this layer."""
        share = _share_of_split(self)
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{share.split.local_shape[0]} of {share.split.shape[0]}, {self.embedding_dim}{padding}"


@functools.cache
def vocabulary_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a vocabulary-split embedding. One that scales what its base class finds still does."""
    if kind is nn.Embedding:
        return VocabParallelEmbedding
    return type(f"VocabParallel{kind.__name__}", (kind, VocabParallelEmbedding), {"__module__": __name__})


@functools.cache
def conv1d_class(conv1d: type[nn.Module], style: str) -> type[nn.Module]:
    """Return the class of Hugging Face's Conv1D, whose weight is [in, out], split by columns or rows.

    style: "Column" or "Row".
    """
    compute = _column_forward if style == "Column" else _row_forward
    forward = functools.partialmethod(outside_graphs(compute), is_transposed=True)
    names = {"forward": forward, "__repr__": lambda self: f"{type(self).__name__}({_text(self)})"}
    return type(f"{style}ParallelConv1D", (conv1d,), {**names, "__module__": __name__})
