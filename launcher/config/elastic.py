"""Elasticity: one train batch size for many world sizes. Arithmetic alone, but for `rules_of` and `elastic_batch_of`.

A batch fits a world when some micro-batch of the list times the world's ranks divides it. A number with many divisors
fits many worlds, so the candidates are multiples of the micro-batches, and of their least common multiple, by highly
composite numbers. The candidate that fits the most worlds wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from launcher.base.errors import ConfigError
from launcher.config.equations import BatchPlan, divisors
from launcher.config.fields import Auto
from launcher.config.schema import Config
from launcher.config.schema_other import Elasticity

VERSIONS = (0.1, 0.2)  # 0.1 counts ranks; 0.2 counts whole nodes, and knows models of several ranks
MAX_RANKS = 100_000  # bounds the search; no job is larger
_MAX_SCALE = 720_720  # has 240 divisors: beyond it a batch is larger than anyone trains with
_PRIMES = (2, 3, 5, 7, 11, 13, 17)  # their product is the last that fits below _MAX_SCALE


@dataclass(frozen=True)
class ElasticRules:
    """What the batch and the worlds must keep to."""

    max_train_batch_size: int  # samples of one optimizer step over all ranks
    micro_batch_sizes: tuple[int, ...]  # samples of one forward of one rank
    min_gpus: int = 1
    max_gpus: int = 10_000
    prefer_larger_batch: bool = True  # among batches that fit equally many worlds
    version: float = 0.2
    num_gpus_per_node: int = 1
    model_parallel_size: int = 1  # ranks that hold one copy of the model together


@dataclass(frozen=True)
class ElasticBatch:
    """The batch, and the world sizes it fits; every one of them divides it without a remainder."""

    train_batch_size: int
    world_sizes: tuple[int, ...]  # ranks, ascending, at least one
    rules: ElasticRules

    @property
    def range_text(self) -> str:
        """The worlds in a few words."""
        if len(self.world_sizes) == 1:
            return f"{self.world_sizes[0]} ranks only"
        return f"{len(self.world_sizes)} world sizes from {self.world_sizes[0]} to {self.world_sizes[-1]}"

    def plan_for(self, world_size: int) -> BatchPlan:
        """Return the sizes for `world_size` ranks, with the largest micro-batch that fits.

        Raises: ConfigError when the batch does not fit, with the nearest world sizes that it does fit.
        """
        if world_size not in self.world_sizes:
            below = [size for size in self.world_sizes if size < world_size][-1:]
            above = [size for size in self.world_sizes if size > world_size][:1]
            near = " and ".join(str(size) for size in below + above)
            raise ConfigError(
                f"world size {world_size} does not fit the elastic batch {self.train_batch_size}",
                where="elasticity",
                hint=f"the nearest that fit: {near}",
            )
        share = self.train_batch_size * self.rules.model_parallel_size // world_size
        micro = max(size for size in self.rules.micro_batch_sizes if share % size == 0)
        return BatchPlan(self.train_batch_size, micro, share // micro, world_size // self.rules.model_parallel_size)


def elastic_batch(rules: ElasticRules) -> ElasticBatch:
    """Choose the batch that fits the most world sizes. Raises: ConfigError when the rules cannot be kept."""
    _check_rules(rules)
    # Version 0.2 solves the same problem with whole nodes in the place of ranks.
    ranks_of_node = rules.num_gpus_per_node if rules.version == 0.2 else 1
    copies_of_node = ranks_of_node // rules.model_parallel_size
    cap = rules.max_train_batch_size // copies_of_node
    lowest, highest = -(-rules.min_gpus // ranks_of_node), rules.max_gpus // ranks_of_node
    largest_micro = max(rules.micro_batch_sizes)
    if largest_micro > cap:
        of_node = f" × {copies_of_node} (a node)" if copies_of_node > 1 else ""
        raise _broken(
            "micro_batch_sizes",
            f"micro-batch {largest_micro}{of_node} is over max_train_batch_size {rules.max_train_batch_size}",
            "remove it, or raise max_train_batch_size",
        )
    sizes = tuple(sorted(set(rules.micro_batch_sizes)))
    fits = {batch: _worlds(batch, sizes, lowest, highest) for batch in _candidates(sizes, cap)}
    sign = 1 if rules.prefer_larger_batch else -1
    best = max(fits, key=lambda batch: (len(fits[batch]), sign * batch))
    if not fits[best]:
        nodes = f" in whole nodes of {ranks_of_node}" if ranks_of_node > 1 else ""
        raise _broken(
            "min_gpus",
            f"no world of {rules.min_gpus} to {rules.max_gpus} ranks{nodes} fits a batch of at most "
            f"{rules.max_train_batch_size}",
            "raise max_train_batch_size or max_gpus, or lower min_gpus",
        )
    return ElasticBatch(best * copies_of_node, tuple(world * ranks_of_node for world in fits[best]), rules)


def _check_rules(rules: ElasticRules) -> None:
    """Check what holds between the rules, before any search."""
    if rules.version not in VERSIONS:
        raise _broken("version", f"{rules.version:g} is not a known version", "use 0.2, or 0.1")
    if not rules.micro_batch_sizes:
        raise _broken("micro_batch_sizes", "no micro-batch to choose from", "such as [2, 4, 6]")
    if rules.min_gpus > rules.max_gpus:
        raise _broken("min_gpus", f"{rules.min_gpus} is over max_gpus {rules.max_gpus}", "lower it or raise max_gpus")
    if rules.max_gpus > MAX_RANKS:
        raise _broken("max_gpus", f"more than {MAX_RANKS} ranks", f"use {MAX_RANKS} or fewer")
    if rules.model_parallel_size > 1 and rules.version != 0.2:
        raise _broken("model_parallel_size", "more than 1 needs version 0.2", 'set "version" to 0.2')
    if rules.num_gpus_per_node % rules.model_parallel_size:
        raise _broken(
            "num_gpus_per_node",
            f"{rules.num_gpus_per_node} is not a multiple of model_parallel_size {rules.model_parallel_size}",
            "a copy of the model lives inside one node",
        )


def _broken(key: str, message: str, hint: str) -> ConfigError:
    return ConfigError(message, where=f"elasticity.{key}", hint=hint)


def _candidates(sizes: tuple[int, ...], cap: int) -> set[int]:
    """Return the batches to compare: each base times the largest highly composite number that keeps it below `cap`."""
    common = math.lcm(*sizes)
    bases = {*sizes, common} if common <= cap else set(sizes)
    return {base * max(scale for scale in highly_composite() if scale <= cap // base) for base in bases}


def _worlds(batch: int, sizes: tuple[int, ...], lowest: int, highest: int) -> tuple[int, ...]:
    """Return every world from `lowest` to `highest` that some micro-batch fits, ascending."""
    shares = {batch // size for size in sizes if batch % size == 0}
    return tuple(sorted({world for share in shares for world in divisors(share, highest) if world >= lowest}))


@lru_cache(maxsize=1)
def highly_composite() -> tuple[int, ...]:
    """Return every number up to 720720 that has more divisors than all smaller ones, ascending.

    Such a number is a product of the first primes with exponents that never grow, so only those are looked at.
    """
    longest = [(1, 1, _MAX_SCALE.bit_length())]  # products that end with the last prime: number, divisors, exponent
    products = list(longest)
    for prime in _PRIMES:
        longest = [
            (number * prime**exponent, num_divisors * (exponent + 1), exponent)
            for number, num_divisors, last in longest
            for exponent in range(1, last + 1)
            if number * prime**exponent <= _MAX_SCALE
        ]
        products += longest
    records, most = [], 0
    for number, num_divisors, _ in sorted(products):
        if num_divisors > most:
            records.append(number)
            most = num_divisors
    return tuple(records)


# ---- from a config ----


def rules_of(section: Elasticity) -> ElasticRules:
    """Return the rules an enabled section states. `"auto"` is the key's default.

    Raises: ConfigError when the largest batch or the micro-batches are not given.
    """
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        if name not in section.model_fields_set:
            raise ConfigError(f'"{name}" is missing', where="elasticity", hint=f'add "{name}" to the section')
    names = ElasticRules.__dataclass_fields__
    values: dict[str, Any] = {name: getattr(section, name) for name in names}
    for name, value in values.items():
        if isinstance(value, Auto):
            values[name] = Elasticity.model_fields[name].get_default(call_default_factory=True)
    values["micro_batch_sizes"] = tuple(values["micro_batch_sizes"])
    return ElasticRules(**values)


def elastic_batch_of(config: Config) -> ElasticBatch | None:
    """Return the batch that `elasticity` chooses, None when it is off. Raises: ConfigError."""
    return elastic_batch(rules_of(config.elasticity)) if config.elasticity.enabled is True else None
