"""The collectives of a rehearsed rank: recorded, and answered as if every peer held what this rank holds.

Those of the engine are recorded by the verb that it calls, as they are in a real run on any backend; those of the
script, of DTensor and of other libraries by the operation of torch.distributed. What has values gets those that ranks
with equal values would get: a gather repeats them, a sum multiplies them. Buffers without values are left alone.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from launcher.comm import pending
from launcher.comm.torch_internals import tree_leaves
from launcher.planner.rehearsal import Call, Group
from launcher.rehearse.ledger import Ledger
from launcher.rehearse.torch_tools import finished_work, group_of, reduction_of_caller
from launcher.rehearse.virtual import VirtualTensors, place_in_script, shapes_of

# Operations of torch.distributed -> what they are called here.
_KINDS = {
    "broadcast_": "broadcast", "allreduce_": "all_reduce", "reduce_": "reduce", "allgather_": "all_gather",
    "_allgather_base_": "all_gather", "reduce_scatter_": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "gather_": "gather", "scatter_": "scatter", "alltoall_": "all_to_all", "alltoall_base_": "all_to_all",
    "barrier": "barrier", "send": "send", "recv_": "receive", "recv_any_source_": "receive",
    "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}  # fmt: skip


class CollectiveRecorder:
    """Takes down what one rank begins. A listener of `launcher.comm.observe`, and the mode's part for collectives."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.groups: list[Group] = []
        self.calls: list[Call] = []
        self.step = 0
        self._indices: dict[str, int] = {}  # name of a process group -> its place in `groups`
        self._is_of_engine = False
        self._sent: dict[tuple[Any, ...], Tensor] = {}  # the last tensor to a peer, by its size and type

    # ---- what the engine calls ----

    def begins(self) -> None:
        """Take note that a verb of a Communicator is about to begin."""
        self._is_of_engine = True

    def has_begun(self, kind: str, process_group: dist.ProcessGroup, tensors: list[Tensor], what: str) -> None:
        """Record a collective of the engine."""
        self._is_of_engine = False
        self._add(kind, process_group, sum(tensor.nbytes for tensor in tensors), what, is_of_engine=True)

    def broadcast_objects(self, _: list[Any], *args: Any, group: dist.ProcessGroup | None = None, **__: Any) -> None:
        """Stand for `broadcast_object_list`: what rank 0 would send is what this rank has."""
        found = group or dist.group.WORLD
        if found is not None:
            self._add("broadcast", found, 0, place_in_script()[0])

    # ---- what reaches torch.distributed ----

    def carry_out(self, mode: VirtualTensors, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an operation of torch.distributed, unless a verb of the engine has begun it, and answer it."""
        name = func.overloadpacket.__name__
        if name == "wait_tensor":
            return args[0]
        boxed = _group_argument(func, args, kwargs)
        group = None if boxed is None else group_of(boxed)
        kind = _KINDS.get(name, name.rstrip("_"))
        if group is not None and not self._is_of_engine:
            self._record_operation(kind, group, func, args)
        if func.namespace == "_c10d_functional":
            return self._functional(mode, func, kind, group, args, kwargs)
        if group is not None:
            self._answer(mode, name, kind, group, args)
        work = finished_work()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _record_operation(self, kind: str, group: dist.ProcessGroup, func: Any, args: Any) -> None:
        if kind == "barrier":
            num_bytes = 0
        elif func.namespace == "_c10d_functional":
            num_bytes = args[0].nbytes * (group.size() if kind == "all_gather" else 1)
        else:  # the larger side of the two: all of a gather, or what is scattered
            sides = [[leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)] for side in args[:2]]
            num_bytes = max(sum(tensor.nbytes for tensor in side) for side in sides)
        peer = dist.get_global_rank(group, int(args[2])) if kind in ("send", "receive") else None
        call = pending.current_call()
        self._add(kind, group, num_bytes, call.what if call is not None else place_in_script()[0], peer)

    def _add(
        self,
        kind: str,
        group: dist.ProcessGroup,
        num_bytes: int,
        what: str,
        peer: int | None = None,
        *,
        is_of_engine: bool = False,
    ) -> None:
        index = self._indices.get(group.group_name)
        if index is None:
            index = self._indices[group.group_name] = len(self.groups)
            purpose = "all ranks" if group is dist.group.WORLD else str(group.group_desc)
            self.groups.append(Group(purpose, tuple(dist.get_process_group_ranks(group))))
        self.calls.append(Call(kind, index, num_bytes, what, self._ledger.phase, self.step, peer, is_of_engine))

    # ---- answers ----

    def _answer(self, mode: VirtualTensors, name: str, kind: str, group: dist.ProcessGroup, args: Any) -> None:
        """Write what peers with the values of this rank would send into outputs that have values."""
        output, source, size, rank = args[0], args[1], group.size(), group.rank()
        if kind in ("send", "receive"):
            for tensor in output:  # a peer sends what this rank has sent to it
                key = (group.group_name, args[2], tensor.shape, tensor.dtype)
                if kind == "receive":
                    mode.fill(tensor, self._sent.get(key))
                elif mode.has_values(tensor):
                    self._sent[key] = tensor.clone()
        elif name == "allreduce_":
            for tensor in output:
                if not mode.is_guessed(tensor) and _is_sum():
                    tensor.mul_(size)
        elif name == "_allgather_base_":
            mode.fill(output, source, lambda own: own.reshape(1, -1).expand(size, -1))
        elif name == "allgather_":
            for outputs, own in zip(output, source, strict=True):
                for each in outputs:
                    mode.fill(each, own)
        elif name == "_reduce_scatter_base_":
            factor = size if _is_sum() else 1
            mode.fill(output, source, lambda own: own.view(size, -1)[rank] * factor)
        elif name == "alltoall_base_":
            mode.fill(output, source if output.numel() == source.numel() else None)
        elif name == "alltoall_":
            for each, own in zip(output, source, strict=True):
                mode.fill(each, own if each.numel() == own.numel() else None)

    def _functional(
        self, mode: VirtualTensors, func: Any, kind: str, group: dist.ProcessGroup | None, args: Any, kwargs: Any
    ) -> Any:
        """Return what an operation of torch's functional collectives returns: a tensor of its own."""
        source: Tensor = args[0]
        if func._schema.arguments[0].alias_info is not None:  # in place
            if kind == "all_reduce" and group is not None and not mode.is_guessed(source) and args[1] == "sum":
                source.mul_(group.size())
            return source
        made: Tensor = mode.make_like(shapes_of(func, args, kwargs))
        mode.note([made], are_guessed=False)
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        factor = size if len(args) > 1 and args[1] == "sum" else 1
        if kind == "reduce_scatter":
            mode.fill(made, source, lambda own: own.reshape(size, -1)[rank] * factor)
        else:
            parts = max(1, made.numel() // max(1, source.numel()))
            mode.fill(made, source, lambda own: own.reshape(1, -1).expand(parts, -1) * factor)
        return made


def _group_argument(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the process group that an operation was given, boxed, or its name; None for one that waits alone."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("process_group", "group_name"):
            return args[index] if index < len(args) else kwargs.get(argument.name)
    return None


def _is_sum() -> bool:
    return bool(reduction_of_caller() == dist.ReduceOp.SUM)
