"""Layers as they are described before any of them is built: a rank builds its own ones alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from launcher.base.errors import EngineRuntimeError
from launcher.comm.device import random_numbers_kept

SeedFunction = Callable[[int], Any]


class LayerSpec:
    """A class of layers and its arguments: `LayerSpec(nn.Linear, 4, 8, bias=False)`."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        """Raises: EngineError for something else than a class of modules."""
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise EngineRuntimeError(
                f"{type(self).__name__} describes a subclass of torch.nn.Module, not {typename!r}",
                hint="give the class and its arguments, or put a module or a function into the list of layers itself",
            )
        self.typename = typename
        self.module_args, self.module_kwargs = module_args, module_kwargs

    def build(self) -> nn.Module:
        """Return the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        parts = [repr(arg) for arg in self.module_args] + [f"{k}={v!r}" for k, v in self.module_kwargs.items()]
        return f"{self.typename.__name__}({', '.join(parts)})"


class TiedLayerSpec(LayerSpec):
    """A layer that several places of the model share: all specs with one key are one module.

    Every parameter of the module is the same at all of its places, as if one process had the whole model: gradients of
    copies on different stages are summed.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        """forward_fn: called with the module and its input, instead of the module's forward.

        tied_weight_attr: names of shared parameters, dots included; DeepSpeed shares these alone. They must exist.
        """
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


def on_meta(spec: LayerSpec) -> nn.Module:
    """Return a layer without values, for its names and sizes.

    A class that needs values while it is built is built, and its values dropped. Raises: what the class raises.
    """
    with _kept_random_numbers():
        try:
            with torch.device("meta"):
                return spec.build()
        except Exception:  # noqa: BLE001  # of a user's class, which may need values; other errors come again
            return spec.build().to("meta")


@contextlib.contextmanager
def seeded(seed: int, seed_fn: SeedFunction | None = None) -> Iterator[None]:
    """Within the block random numbers follow from `seed`; behind it from what they followed from before."""
    with _kept_random_numbers():
        (seed_fn or seed_all)(seed)
        yield


def seed_all(seed: int) -> None:
    """Seed the generators of Python and of torch, on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def _kept_random_numbers() -> Iterator[None]:
    state = random.getstate()
    try:
        with random_numbers_kept():
            yield
    finally:
        random.setstate(state)
