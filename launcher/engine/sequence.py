"""Sequence parallelism in the engine: whose groups these are, which attention exchanges heads, and whether it did."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.comm.groups import RankGroup
from launcher.comm.mesh import ParallelMesh
from launcher.engine.parallel import fingerprint
from launcher.engine.sharded import ShardedModel
from launcher.parallel.sequence.exchange import DistributedAttention, num_exchanges
from launcher.parallel.sequence.hugging_face import attach, check_model, hugging_face_models

_HINT = 'leave it out and give "sequence_parallel_size" in the config'
# Axis of the mesh -> what the getters of an mpu are called by: get_NAME_world_size(), get_NAME_group().
_GETTERS = {"sequence": ("sequence_parallel",), "tensor": ("tensor_model_parallel", "model_parallel")}


def _of_mpu(mpu: Any, axis: str) -> tuple[int, Callable[[], Any]] | None:
    """Return the size of an axis that an mpu names, and what returns its group; None where it does not."""
    for name in _GETTERS[axis]:
        size, group = (getattr(mpu, f"get_{name}_{what}", None) for what in ("world_size", "group"))
        if callable(size) and callable(group):
            return int(size()), group
    return None


def sequence_size(mpu: Any, mesh_param: Any, world_size: int) -> int | None:
    """Return the ranks of one sequence that DeepSpeed's arguments of `initialize()` name; None without them.

    mpu: an object with `get_sequence_parallel_world_size()` and `get_sequence_parallel_group()`, or the same of
    `model_parallel`. mesh_param: ranks with different samples, and ranks of one sequence. Raises: EngineError for
    others.
    """
    if mesh_param is not None:
        shape = tuple(mesh_param) if isinstance(mesh_param, Iterable) else ()
        is_shape = len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)
        if not is_shape or shape[0] * shape[1] != world_size:
            raise EngineError(
                f"initialize(mesh_param={mesh_param}): not the data and the sequence size of {world_size} ranks",
                hint=_HINT,
            )
    if mpu is None:
        return None if mesh_param is None else shape[1]
    if not any(_of_mpu(mpu, axis) for axis in _GETTERS):
        raise EngineError(
            "initialize(mpu=...) takes groups of sequence or model parallelism, by get_sequence_parallel_world_size()"
            " and get_sequence_parallel_group(), or the same of model_parallel",
            hint="leave it out: the sizes of all axes are keys of the config",
        )
    found = _of_mpu(mpu, "sequence")
    return None if found is None else found[0]


def check_groups(mpu: Any, mesh: ParallelMesh) -> None:
    """Raise EngineError where the groups of `initialize(mpu=...)` are not those of the mesh."""
    for axis, what in (("sequence", "one sequence"), ("tensor", "one layer's parts")):
        found = _of_mpu(mpu, axis)
        size = getattr(mesh.sizes, axis)
        if found is None or size == found[0] == 1:
            continue
        if axis == "tensor" and found[0] != size:
            raise EngineError(
                f"model parallelism of {found[0]} ranks in initialize(mpu=...), and of {size} in the config",
                hint='give "tensor_parallel": {"autotp_size": N}: the engine splits the layers itself',
            )
        given = dist.get_process_group_ranks(found[1]())
        own = next(ranks for ranks in mesh.sizes.ranks_along(axis) if mesh.world.rank in ranks)
        if list(given) != own:
            raise EngineError(
                f"the ranks of {what} are {given} in initialize(mpu=...), and {own} in the mesh {mesh.sizes.equation}",
                hint="leave it out: the sizes of all axes are keys of the config",
            )


def check_sequence(model: nn.Module, mesh: ParallelMesh) -> list[str]:
    """Return what to say about the attention of a model whose ranks have parts of sequences.

    Raises: EngineError for a model of transformers that cannot be computed so.
    """
    if mesh.sequence is None:
        return []
    models = hugging_face_models(model)
    for found in models:
        check_model(found, mesh.sequence.world_size, mesh.sizes.tensor)
    names = [type(found).__name__ for found in models]
    names += ["DistributedAttention" for module in model.modules() if isinstance(module, DistributedAttention)][:1]
    if not names:
        return []
    num_ranks = mesh.sequence.world_size
    return [f"sequence parallel: {num_ranks} ranks exchange heads in the attention of {', '.join(names)}"]


def attach_sequence(model: nn.Module, sharded: ShardedModel, mesh: ParallelMesh, mpu: Any) -> SequenceRanks:
    """Have the attention of a model exchange heads until its engine ends; return what checks that it does.

    After `check_sequence`.
    """
    for module in model.modules():
        if isinstance(module, DistributedAttention):
            module.bind(mesh.sequence)
    ranks = SequenceRanks(mesh.sequence)
    if mesh.sequence is not None:
        disable_in_eval = bool(getattr(mpu, "disable_in_eval", False))
        for found in hugging_face_models(model):
            sharded.remove_at_end(attach(found, mesh.sequence, lambda: disable_in_eval and not ranks.trains))
    return ranks


class SequenceRanks:
    """Looks at the first training forward: parts that do not fit, or that never meet, would train to no use."""

    def __init__(self, group: RankGroup | None) -> None:
        """group: None where each rank has whole sequences."""
        self._group = group
        self._is_checked = False
        self.trains = False  # a training forward of the engine runs

    @contextlib.contextmanager
    def checked(self, inputs: Any) -> Iterator[None]:
        """Run a forward. Raise EngineError where the first one exchanges nothing, or has parts of different sizes.

        inputs: of the forward. The first call is collective, and warns where all ranks have the same inputs.
        """
        if self._group is None:
            yield
            return
        if not self._is_checked:
            self._check_inputs(self._group, inputs)
        before = num_exchanges()
        self.trains = torch.is_grad_enabled()
        try:
            yield
        finally:
            self.trains = False
        if not self._is_checked and num_exchanges() == before:
            raise EngineError(
                "the ranks have parts of sequences, and no attention of the model exchanged heads between them",
                where="sequence_parallel_size",
                hint="put launcher.DistributedAttention around the attention; a model of transformers needs none where"
                " it computes attention by the library's functions",
            )
        self._is_checked = True

    def _check_inputs(self, group: RankGroup, inputs: Any) -> None:
        rows = group.communicator.gather_rows(fingerprint(inputs, group.device))
        if not bool((rows[:, 0] == rows[0, 0]).all()):
            raise EngineError(
                f"the {group.world_size} ranks of one sequence got parts of different sizes",
                hint="cut the batch with launcher.shard_sequence(batch)",
            )
        if bool((rows == rows[0]).all()) and group.rank == 0:
            get_logger().warning(
                "the ranks of one sequence got equal inputs, which they take for different parts of it: cut the batch"
                " with launcher.shard_sequence(batch)"
            )
