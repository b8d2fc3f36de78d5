"""Tensors without values: operations on them cost their shapes alone, so that a model of any size fits in here.

A dispatch mode takes every operation of torch on this thread, the backward pass of a CPU included:

* Views and changes of shape run as they are. So does what reads small tensors alone and gives small ones: lengths,
  masks, token ids, counts have their values, and a script that looks at them does what it does in a real run.
* Of anything else only the shapes are computed, by torch's own kernels for the meta device. The result is memory that
  the system has promised and that is never touched: it costs address space. A small result, such as a loss, is made of
  ones.

Which values are guessed is known as long as the tensor lives. A number that a script prints may be guessed; a branch
that it takes may not: it is a `SteeringError`, which names the line.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import LauncherError
from launcher.comm.torch_internals import flops_of, tree_leaves, tree_map_only
from launcher.planner.rehearsal import DeviceWork
from launcher.rehearse.ledger import Ledger
from launcher.rehearse.torch_tools import DispatchMode, StorageMap

# What is larger has no values. Whole numbers and flags carry the structure of a batch, and cost little to compute.
_MAX_FLOAT_BYTES, _MAX_WHOLE_BYTES = 2**18, 2**26
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_BELOW = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep, "<")  # no places of a script
_MADE_OF_NOTHING = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
# They change or share memory without computing, though their schemas do not say so.
_AS_THEY_ARE = ("set_", "resize_", "_unsafe_view", "lift", "lift_fresh", "_reshape_alias", "record_stream")
# Whether a value is finite is not guessed: a rehearsal assumes that it is.
_ASSUMED = ("isnan", "isinf", "isfinite", "isposinf", "isneginf")
_HOLD = ("eq", "ge", "le", "isfinite")  # of values that are all alike and finite; other comparisons do not
_CHOICES = ("topk", "argmax", "argmin", "sort", "argsort", "multinomial")  # of which values a model takes


class SteeringError(LauncherError):
    """A branch or a shape that depends on values which a rehearsal does not have."""


def place_in_script(frame: FrameType | None = None) -> tuple[str, bool]:
    """Return file:line of the innermost frame outside of torch, and whether it is this package's own.

    frame: from which on; None: the caller's caller.
    """
    frame = frame or sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_BELOW):
            return f"{path}:{frame.f_lineno}", path.startswith(_PACKAGE)
        frame = frame.f_back
    return "", False


class VirtualTensors(DispatchMode):
    """Runs what the thread that has entered it asks of torch. Forked children compute for real."""

    def __init__(
        self, ledger: Ledger, carry_out: Callable[..., Any], work: dict[str, DeviceWork], reads: Counter[str]
    ) -> None:
        """ledger: takes the bytes of every tensor. carry_out: an operation of torch.distributed.

        work, reads: filled with what a device would do, by phase, and with what the host reads of it, by file:line.
        """
        super().__init__()
        self._ledger = ledger
        self._carry_out = carry_out
        self._pid = os.getpid()
        # Storages whose content is not computed while they have more bytes than this.
        self._limits: StorageMap[int] = StorageMap()
        self._guessed: StorageMap[None] = StorageMap()  # small ones that hold ones in place of what a model computes
        self._work, self._reads = work, reads
        self._last_read = ("", 0)  # where, and of which storage
        self.computed: Counter[str] = Counter()  # operations without a kernel for shapes, which have run for real

    def has_values(self, tensor: Tensor) -> bool:
        """Whether the content of a tensor is there, guessed or not."""
        storage = tensor.untyped_storage()
        limit = self._limits.get(storage)
        return limit is None or storage.nbytes() <= limit

    def _limit_of(self, tensor: Tensor) -> int:
        limit = self._limits.get(tensor.untyped_storage())
        return _limit(tensor.dtype) if limit is None else limit

    def is_guessed(self, tensor: Tensor) -> bool:
        """Whether a tensor holds what a real run would compute otherwise."""
        return not self.has_values(tensor) or tensor.untyped_storage() in self._guessed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if os.getpid() != self._pid:
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a DTensor, say: its own operations come back here
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._carry_out(self, func, args, kwargs)
        name = func.overloadpacket.__name__
        if _shares_memory(func) or name in _AS_THEY_ARE or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in ("_local_scalar_dense", "equal"):
            return self._read(func, name, inputs, args, kwargs)
        if torch.Tag.dynamic_output_shape in func.tags and any(map(self.is_guessed, _deciding(name, inputs))):
            raise self._steered(f"the shape of what {name}() returns")
        written = [leaf for leaf in tree_leaves(list(_written(func, args, kwargs))) if isinstance(leaf, Tensor)]
        if written:
            result = self._write(func, written, inputs, args, kwargs)
        else:
            result = self._compute(func, name, inputs, args, kwargs)
        self._count(func, args, kwargs, inputs, written, result)
        return result

    def _count(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], written: list[Tensor], result: Any
    ) -> None:
        """Count what a device would do for an operation."""
        flops = flops_of(func, args, kwargs, result)
        made = written or [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        moved = sum(each.numel() * each.element_size() for each in (*inputs, *made))
        if func.overloadpacket.__name__ in _MADE_OF_NOTHING:
            moved = 0
        before = self._work.get(self._ledger.phase, DeviceWork())
        self._work[self._ledger.phase] = before.plus(DeviceWork(flops, moved if flops else 0, 0 if flops else moved, 1))

    # ---- operations by what they do ----

    def _write(self, func: Any, written: list[Tensor], inputs: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Carry out an operation in place where all of it is small; else leave the memory alone."""
        large = [each for each in written if each.untyped_storage().nbytes() > self._limit_of(each)]
        is_guessed = any(self.is_guessed(each) for each in inputs if all(each is not one for one in written))
        if not large and all(map(self.has_values, inputs)):
            result = func(*args, **kwargs)
            if is_guessed:
                self._guess(written)
            return result
        for each in large:
            self._limits[each.untyped_storage()] = self._limit_of(each)
        self._guess([each for each in written if self.has_values(each)])
        if not func._schema.returns:
            return None
        return written[0] if len(func._schema.returns) == 1 else tuple(written)

    def _compute(self, func: Any, name: str, inputs: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Return new tensors: with values where all that is read has them, and the result is small."""
        shapes = shapes_of(func, args, kwargs)
        if shapes is None:
            if any(not self.has_values(each) for each in inputs):
                self.computed[name] += 1
            return self._noted(func(*args, **kwargs), is_guessed=any(map(self.is_guessed, inputs)))
        is_small = all(_nbytes(each) <= _limit(each.dtype) for each in tree_leaves(shapes) if isinstance(each, Tensor))
        is_guessed = any(map(self.is_guessed, inputs)) and name not in _ASSUMED
        if is_small and name not in _MADE_OF_NOTHING and all(map(self.has_values, inputs)):
            return self._noted(func(*args, **kwargs), is_guessed=is_guessed)
        is_chosen = name in _CHOICES
        num_choices = _width(inputs) if is_chosen else None
        made = tree_map_only(Tensor, lambda shape: self._make(shape, num_choices, is_true=name in _HOLD), shapes)
        return self._noted(made, is_guessed=is_guessed and not is_chosen)

    def _make(self, shape: Tensor, num_choices: int | None, *, is_true: bool = False) -> Tensor:
        """Return memory in the shape of a tensor of the meta device, filled where it is small.

        num_choices: among how many a model chooses: whole numbers are spread evenly over so many, as a balanced router
        would. is_true: what flags say.
        """
        made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device="cpu")
        self._limits[made.untyped_storage()] = _limit(shape.dtype)  # also of a small one: the engine may enlarge it
        if _nbytes(shape) <= _limit(shape.dtype):
            made.fill_(is_true if shape.dtype == torch.bool else 1)
            if num_choices is not None and not shape.dtype.is_floating_point:
                made.copy_(torch.arange(made.numel()).remainder_(max(1, num_choices)).view(made.shape))
        return made

    def _noted(self, result: Any, *, is_guessed: bool) -> Any:
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for each in made:
            self._ledger.note(each.untyped_storage())
        if is_guessed:
            self._guess(made)
        return result

    def note(self, tensors: list[Tensor], *, are_guessed: bool) -> None:
        """Take note of tensors that something else has made."""
        self._noted(tensors, is_guessed=are_guessed)

    def fill(self, output: Tensor, source: Tensor | None, change: Callable[[Tensor], Tensor] = lambda own: own) -> None:
        """Write what a peer has sent, made of `source`, into a tensor that has values; None: it is not known what."""
        if not self.has_values(output):
            return
        if source is not None and self.has_values(source):
            output.copy_(change(source).reshape(output.shape))
        else:
            output.fill_(1)
        if source is None or self.is_guessed(source):
            self._guess([output])

    def make_like(self, shape: Tensor) -> Tensor:
        """Return memory in the shape of a tensor of the meta device."""
        return self._make(shape, None)

    def _guess(self, tensors: list[Tensor]) -> None:
        for each in tensors:
            self._guessed[each.untyped_storage()] = None
            # What a model makes of guesses may be infinite, and an optimizer would leave its step out.
            if each.dtype.is_floating_point and self.has_values(each) and not each.isfinite().all():
                each.fill_(1)

    # ---- what the host reads ----

    def _read(self, func: Any, name: str, inputs: list[Tensor], args: Any, kwargs: Any) -> Any:
        place, is_own = place_in_script(sys._getframe(2))
        last, self._last_read = self._last_read, (place, inputs[0].untyped_storage()._cdata)
        if not is_own and self._last_read != last:  # `tolist` reads one number after another
            self._reads[place] += 1
        is_guessed = any(map(self.is_guessed, inputs))
        if is_guessed and not is_own and (name == "equal" or inputs[0].dtype == torch.bool):
            raise self._steered("a condition")
        if all(map(self.has_values, inputs)):
            return func(*args, **kwargs)
        if name == "equal":
            return True
        dtype = inputs[0].dtype
        return 1.0 if dtype.is_floating_point else dtype != torch.bool and 1

    def _steered(self, what: str) -> SteeringError:
        place, _ = place_in_script(sys._getframe(2))
        return SteeringError(
            f"{what} depends on values that the model computes, which a rehearsal does not have",
            where=place,
            hint="leave it out of the rehearsal: LAUNCH_REHEARSAL is set in the environment of a rehearsed script",
        )


def _limit(dtype: torch.dtype) -> int:
    """Return the bytes up to which a storage has values."""
    return _MAX_FLOAT_BYTES if dtype.is_floating_point or dtype.is_complex else _MAX_WHOLE_BYTES


def _deciding(name: str, inputs: list[Tensor]) -> list[Tensor]:
    """Return the inputs whose values decide about the shape of the result: of indexing, the masks."""
    if not name.startswith("index"):
        return inputs
    return [each for each in inputs[1:] if each.dtype in (torch.bool, torch.uint8)]


def _nbytes(shape: Tensor) -> int:
    return shape.untyped_storage().nbytes()


def _width(inputs: list[Tensor]) -> int:
    return inputs[0].shape[-1] if inputs and inputs[0].dim() else 1


def _shares_memory(func: Any) -> bool:
    """Whether an operation returns a view of what it is given."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield the arguments that an operation writes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if index < len(args):
                yield args[index]
            elif argument.name in kwargs:
                yield kwargs[argument.name]


def shapes_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operation returns on the meta device; None where torch has no kernel for shapes."""
    meta = torch.device("meta")

    def shape_of(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=meta)

    args, kwargs = tree_map_only(Tensor, shape_of, (args, kwargs))
    args = tree_map_only(torch.device, lambda _: meta, args)
    kwargs = {name: value for name, value in kwargs.items() if name not in ("pin_memory", "generator")}
    names = {argument.name for argument in func._schema.arguments}
    if "device" in names and ("device" in kwargs or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(args))):
        kwargs["device"] = meta
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None  # an error of the caller, such as shapes that do not fit, comes again where it runs for real
