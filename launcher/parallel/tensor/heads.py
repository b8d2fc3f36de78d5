"""Attention heads: how many there are, and who counts them."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.comm.groups import RankGroup
from launcher.config.equations import divisors
from launcher.parallel.tensor import names

QUERY_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
# Parameters of an attention with one value for each head of queries: gpt-oss' logits of attending to nothing.
PARAMETERS = frozenset({"sinks"})
# Arguments of an attention's forward that it has for each head.
_BIASES, _MASK = ("alibi", "position_bias"), "attention_mask"
# Numbers of features of all heads together, which reshapes count with.
_WIDTHS = ("split_size", "all_head_size", "embed_dim", "hidden_size", "inner_dim", "dim")


def head_counts(attention: nn.Module, model: nn.Module) -> dict[str, int]:
    """Return how many heads of queries and of keys an attention has, by the name of where it says so."""
    sources = (attention, getattr(attention, "config", None), _text_config(model))
    found: dict[str, int] = {}
    for keys in (QUERY_HEADS, KEY_HEADS):
        for source in sources:
            given = {key: getattr(source, key, None) for key in keys}
            counts = {key: value for key, value in given.items() if type(value) is int and value > 0}
            if counts:
                key = next(iter(counts))
                found[key] = counts[key]
                break
    return found


def num_heads(counts: Mapping[str, int]) -> tuple[int | None, int | None]:
    """Return the heads of queries and of keys; None where nothing says."""
    queries = next((counts[key] for key in QUERY_HEADS if key in counts), None)
    keys = next((counts[key] for key in KEY_HEADS if key in counts), queries)
    return queries, keys


def check_heads(name: str, counts: Mapping[str, int], num_ranks: int) -> None:
    """Raise EngineError where the ranks do not divide the heads of an attention."""
    uneven = {key: count for key, count in counts.items() if count % num_ranks}
    if uneven:
        shown = ", ".join(f"{key} {count}" for key, count in uneven.items())
        raise EngineError(
            f"{num_ranks} ranks of one layer do not divide {shown}: each rank computes whole heads",
            where=name,
            hint="use a tensor-parallel size that divides all of them"
            f" ({', '.join(map(str, divisors(math.gcd(*counts.values()))))})",
        )


def divide_heads(attention: nn.Module, group: RankGroup, widths: frozenset[int]) -> None:
    """Have an attention count this rank's heads alone. widths: features of all heads of queries, or of keys.

    What counts heads or those features in its reshapes is divided: its attributes, and where its forward reads the
    model's config, that config, as a copy. Biases of all heads that its forward gets are cut to this rank's.
    """
    for name in (*QUERY_HEADS, *KEY_HEADS):
        if type(getattr(attention, name, None)) is int:
            setattr(attention, name, getattr(attention, name) // group.world_size)
    for name in _WIDTHS:
        if getattr(attention, name, None) in widths:
            setattr(attention, name, getattr(attention, name) // group.world_size)
    forward = inspect.unwrap(type(attention).forward)
    read = getattr(getattr(forward, "__code__", None), "co_names", ())
    config: Any = getattr(attention, "config", None)
    counted = [name for name in (*QUERY_HEADS, *KEY_HEADS) if name in read and type(getattr(config, name, None)) is int]
    if counted:
        attention.config = config = copy.copy(config)
        for name in counted:
            setattr(config, name, getattr(config, name) // group.world_size)
    num_own = next((count for name in QUERY_HEADS if type(count := getattr(attention, name, None)) is int), None)
    parameters = list(inspect.signature(forward).parameters)[1:]  # without self
    if num_own is not None and any(name in parameters for name in _BIASES):
        positions = {name: parameters.index(name) for name in (*_BIASES, _MASK) if name in parameters}
        attention.register_forward_pre_hook(_BiasParts(group, num_own, positions), with_kwargs=True)


class _BiasParts:
    """Cuts what an attention gets for all heads to this rank's heads: its biases, and a mask that has them inside."""

    def __init__(self, group: RankGroup, num_own: int, positions: Mapping[str, int]) -> None:
        """num_own: heads of this rank. positions: of the arguments, by their names."""
        self._group = group
        self._num_own = num_own
        self._positions = positions

    def __deepcopy__(self, _: Any) -> _BiasParts:
        return self

    def __call__(self, attention: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        args, kwargs = list(given), dict(named)
        for name, position in self._positions.items():
            if name in kwargs:
                kwargs[name] = self._cut(name, kwargs[name])
            elif position < len(args):
                args[position] = self._cut(name, args[position])
        return tuple(args), kwargs

    def _cut(self, name: str, bias: Any) -> Any:
        """bias: [batch * heads or heads, queries, keys], or [batch, heads or 1, queries, keys]."""
        if isinstance(bias, Tensor) and bias.dim() == 4 and bias.shape[1] == self._num_own * self._group.world_size:
            return bias.chunk(self._group.world_size, dim=1)[self._group.rank]
        if name == _MASK or not isinstance(bias, Tensor) or bias.dim() != 3:
            return bias
        return bias.unflatten(0, (-1, self._group.world_size, self._num_own))[:, self._group.rank].flatten(0, 1)


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    get = getattr(config, "get_text_config", None)
    return get() if callable(get) else config


def is_attention_input(name: str) -> bool:
    """Whether a layer computes queries, keys or values."""
    return names.is_named(name, names.ATTENTION)
