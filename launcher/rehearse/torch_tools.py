"""What a rehearsal needs of torch's private tools, each in one place: look here first when a new torch breaks it.

`tests/rehearse/test_torch_tools.py` has a test of each, which fails alone.
"""

from __future__ import annotations

import importlib
import sys
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "CpuForCuda",
    "DispatchMode",
    "StorageMap",
    "cuda_functions",
    "fake_groups",
    "finished_work",
    "group_of",
    "load_compiler",
    "reduction_of_caller",
    "start_fake_group",
]

_T = TypeVar("_T")


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Sees every operation that torch carries out on the thread that has entered it, below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]


class StorageMap(Generic[_T]):
    """Values of storages, by identity, each as long as its storage lives: that keeps its Python object so long."""

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage in self._values

    def __setitem__(self, storage: torch.UntypedStorage, value: _T) -> None:
        self._values[storage] = value

    def get(self, storage: torch.UntypedStorage) -> _T | None:
        """Return the value of a storage, None for one that has none."""
        found: _T | None = self._values.get(storage)
        return found


def load_compiler() -> None:
    """Import what a mode imports at its first function: it must see torch as it is, without replacements."""
    importlib.import_module("torch._dynamo")


def start_fake_group(rank: int, world_size: int) -> None:
    """Make the default process group one whose peers do not exist: its collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def fake_groups() -> dict[tuple[Any, str], Any]:
    """Return what makes process groups, with what makes them of the fake backend, whatever backend is asked for.

    (module, name) -> replacement.
    """
    new_group = distributed_c10d.new_group

    def new_fake_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        if len(args) > 2:  # ranks, timeout, backend
            args = (*args[:2], "fake", *args[3:])
        else:
            kwargs["backend"] = "fake"
        return new_group(*args, **kwargs)

    return {(distributed_c10d, "new_group"): new_fake_group, (dist, "new_group"): new_fake_group}


def group_of(boxed: Any) -> dist.ProcessGroup:
    """Return the process group that an operation of torch.distributed was given; by its name where it has only that."""
    if isinstance(boxed, str):
        found: dist.ProcessGroup = vars(distributed_c10d)["_resolve_process_group"](boxed)
        return found
    return dist.ProcessGroup.unbox(boxed)


def finished_work() -> Any:
    """Return the handle of a collective that has ended, as an operation of torch.distributed returns it."""
    return torch._C._distributed_c10d.FakeWork().boxed()


def reduction_of_caller() -> Any:
    """Return the kind of reduction that the function of torch.distributed was asked for that has led here.

    Its operation gets it in a box that Python cannot open. None: no such function has.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == distributed_c10d.__file__ and "op" in frame.f_locals:
            return frame.f_locals["op"]
        frame = frame.f_back
    return None


# ---- GPUs that a script names ----


class CpuForCuda(TorchFunctionMode):
    """Puts on the CPU what a script puts on a GPU by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is Tensor.to:
            args = tuple(map(_on_cpu, args))
        if func is Tensor.pin_memory:
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    is_named = isinstance(value, str) and value.partition(":")[0] == "cuda"
    is_device = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_named or is_device else value


def cuda_functions(num_devices: int) -> dict[tuple[Any, str], Any]:
    """Return what functions of `torch.cuda` do that scripts call for a GPU they take for theirs: nothing."""
    return {
        (torch.cuda, "set_device"): lambda *_: None,
        (torch.cuda, "synchronize"): lambda *_: None,
        (torch.cuda, "device_count"): lambda: num_devices,
    }
