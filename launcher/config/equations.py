"""The mesh equation: ranks = pipeline × data × sequence × tensor; experts subdivide the data axis. The batch equation:
train_batch_size = micro-batch × accumulation steps × ranks with other data. Exact, or an error that prints them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from launcher.base.errors import ConfigAssertionError, ConfigError
from launcher.config.schema import Config
from launcher.sharding.mesh import MeshSizes, product_text

ACROSS_NODES_KEY = "tensor_parallel.across_nodes"
EXPERT_KEY = "expert_parallel.autoep_size"


def mesh_sizes(config: Config, world_size: int) -> MeshSizes:
    """Return the mesh that a config asks for; the data axis takes the ranks that the others leave.

    Raises: ConfigError with the equation.
    """
    sizes = _asked_for(config)
    if sizes.pipeline > 1 and sizes.sequence > 1:
        raise ConfigError(
            "pipeline and sequence parallelism exclude each other: stages would send parts of sequences",
            where="sequence_parallel_size",
            hint="use one of the two, with tensor or data parallelism",
        )
    given = _decided(config.data_parallel_size)
    if world_size % sizes.world_size or (given is not None and given * sizes.world_size != world_size):
        wanted = sizes.shape if given is None else replace(sizes, data=given).shape
        product = math.prod(wanted)
        rule = "does not divide" if given is None else "is not"
        raise ConfigError(
            f"{product_text(wanted)} = {product} {rule} the {world_size} ranks of this job",
            where=", ".join(_keys_of(sizes, has_data=given is not None)),
            hint=f"start {_near(product, world_size, is_exact=given is not None)} ranks, or change a size",
        )
    return with_experts(replace(sizes, data=world_size // sizes.world_size), _expert_size(config), EXPERT_KEY)


def with_experts(sizes: MeshSizes, expert: int, where: str) -> MeshSizes:
    """Return a mesh on whose data axis so many neighbours have one set of experts together.

    where: who asks for it. Raises: ConfigError with the equation, and for axes that have no experts yet.
    """
    if expert == 1:
        return sizes
    others = [axis for axis in ("pipeline", "sequence", "tensor") if getattr(sizes, axis) > 1]
    if others:
        raise ConfigError(
            f"experts are sharded over ranks of the data axis alone, and this run has {sizes.equation} ranks",
            where=where,
            hint=f"leave the {others[0]} axis out, or the experts whole on every rank",
        )
    if sizes.data % expert:
        raise ConfigError(
            f"{expert} ranks of one set of experts do not divide the data axis: {sizes.equation} ranks",
            where=where,
            hint=f"use {_listed(divisors(sizes.data))}, or start a multiple of {expert} ranks",
        )
    return replace(sizes, expert=expert)


@lru_cache(maxsize=1024)
def divisors(number: int, highest: int | None = None) -> tuple[int, ...]:
    """Return the divisors of a number, up to `highest`, ascending."""
    last = number if highest is None else highest
    found: set[int] = set()
    for low in range(1, min(math.isqrt(number), last) + 1):
        if number % low == 0:
            found.update(divisor for divisor in (low, number // low) if divisor <= last)
    return tuple(sorted(found))


def check_nodes(config: Config, sizes: MeshSizes, ranks_by_node: Sequence[int]) -> None:
    """Raise ConfigError where ranks of one layer would be on two nodes, unless the config allows it.

    ranks_by_node: how many ranks each node has, in the order of ranks.
    """
    if sizes.tensor == 1 or config.tensor_parallel.across_nodes:
        return
    uneven = [node for node, num_ranks in enumerate(ranks_by_node) if num_ranks % sizes.tensor]
    if uneven:
        raise ConfigError(
            f"{sizes.tensor} (tensor) does not divide the {ranks_by_node[uneven[0]]} ranks of node {uneven[0]}: the"
            " ranks of one layer would be on two nodes, and every layer would wait for the network",
            where="tensor_parallel.autotp_size",
            hint=f'use a size that divides the ranks of every node, or force it: "{ACROSS_NODES_KEY}": true',
        )


def _expert_size(config: Config) -> int:
    section = config.expert_parallel
    return (_decided(section.autoep_size) or 1) if section.enabled is True else 1


def _asked_for(config: Config) -> MeshSizes:
    tensor = config.tensor_parallel
    tensor_size, again = _decided(tensor.autotp_size) or 1, _decided(tensor.tp.tp_size)
    if again not in (None, 1, tensor_size):
        raise ConfigError(
            f"tensor_parallel.tp.tp_size {again} is not tensor_parallel.autotp_size {tensor.autotp_size}",
            where="tensor_parallel.tp.tp_size",
            hint="give autotp_size alone",
        )
    return MeshSizes(
        data=1,
        pipeline=_decided(config.pipeline.stages) or 1,
        sequence=_decided(config.sequence_parallel_size) or 1,
        tensor=tensor_size,
    )


def _decided(size: Any) -> int | None:
    """Return a size that is given; None for one that is left to others, or that is wrong and was reported."""
    return size if type(size) is int and size > 0 else None


def _keys_of(sizes: MeshSizes, *, has_data: bool) -> list[str]:
    keys = {
        "pipeline.stages": sizes.pipeline > 1,
        "data_parallel_size": has_data,
        "sequence_parallel_size": sizes.sequence > 1,
        "tensor_parallel.autotp_size": sizes.tensor > 1,
    }
    return [key for key, is_given in keys.items() if is_given]


def _near(product: int, world_size: int, *, is_exact: bool) -> str:
    if is_exact or world_size < product:
        return str(product)
    below = world_size // product * product
    return f"{below} or {below + product}"


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


# ---- The batch equation ----


BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class BatchPlan:
    """The three sizes, solved; their product with `world_size` is exact."""

    train_batch_size: int  # samples of one optimizer step over all ranks
    micro_batch_size: int  # samples of one forward of one rank
    accumulation_steps: int  # micro-batches of one optimizer step
    world_size: int  # data-parallel ranks

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes in the order of BATCH_KEYS."""
        return self.train_batch_size, self.micro_batch_size, self.accumulation_steps


def solve_batch(
    train_batch_size: int | None,
    micro_batch_size: int | None,
    accumulation_steps: int | None,
    world_size: int,
    model_size: int = 1,
) -> BatchPlan:
    """Fill in what is missing of the batch equation. world_size: ranks with different samples.

    model_size: ranks that work on the same samples. DeepSpeed and transformers count these in `train_batch_size`, too:
    where all three sizes are given and fit all ranks, that is taken over, and the batch is the number of samples.
    Two given: the third follows. Only one of the batch sizes given: one accumulation step. A division that
    leaves a remainder is an error: a smaller batch than asked for would change the training silently.
    Raises: ConfigAssertionError with the equation.
    """
    train, micro, steps = train_batch_size, micro_batch_size, accumulation_steps
    if train and micro and steps and train == micro * steps * world_size * model_size:
        train //= model_size
    if train is None and micro is None:
        raise ConfigAssertionError(
            "neither train_batch_size nor train_micro_batch_size_per_gpu is given",
            hint='give one, such as "train_micro_batch_size_per_gpu": 8',
        )
    if train is None and micro is not None:
        steps = steps or 1
        train = micro * steps * world_size
    elif train is not None and micro is None:
        steps = steps or 1
        micro = _divide(train, steps * world_size, f"{steps} (accumulation) × {world_size} (ranks)")
    elif train is not None and micro is not None and steps is None:
        steps = _divide(train, micro * world_size, f"{micro} (micro) × {world_size} (ranks)")
    if train is None or micro is None or steps is None:
        raise RuntimeError("every case above fills all three sizes")
    if train != micro * steps * world_size:
        raise ConfigAssertionError(
            f"train_batch_size {train} ≠ {micro} (micro) × {steps} (accumulation) × {world_size} (ranks)"
            f" = {micro * steps * world_size}",
            hint="give two of the three, and the third follows",
        )
    return BatchPlan(train, micro, steps, world_size)


def _divide(train: int, divisor: int, what: str) -> int:
    quotient, remainder = divmod(train, divisor)
    if remainder or quotient == 0:
        near = max(1, round(train / divisor)) * divisor
        raise ConfigAssertionError(
            f"train_batch_size {train} is not divisible by {what} = {divisor}", hint=f"the nearest is {near}"
        )
    return quotient
