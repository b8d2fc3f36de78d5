"""What each layer counts when layers are divided into stages."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import ConfigError
from launcher.comm.torch_internals import tree_leaves, tree_map

WHERE = "pipeline.partition"
PROFILE = "profile"


@dataclass(frozen=True)
class LayerFacts:
    """What a partition goes by."""

    class_names: tuple[str, ...]  # of the module, or modules, of the layer
    num_params: int  # elements of its parameters
    num_trained: int  # of these, trained ones


def layer_weights(method: str, layers: Sequence[LayerFacts]) -> list[float]:
    """Return what each layer counts by "uniform", "parameters", "best" or "type:REGEX", with DeepSpeed's meanings.

    "parameters", and "best", count trained elements, or all where none is trained; "type:REGEX" layers whose class name
    has a match, in any case. Raises: ConfigError for a method that there is not, or a pattern that fits no layer.
    """
    kind, _, pattern = method.partition(":")
    if kind.lower() == "uniform":
        return [1.0] * len(layers)
    if kind.lower() in ("parameters", "best"):
        has_trained = any(layer.num_trained for layer in layers)
        return [float(layer.num_trained if has_trained else layer.num_params) for layer in layers]
    if kind.lower() != "type":
        raise ConfigError(
            f'there is no partition by "{method}"',
            where=WHERE,
            hint='use "parameters", "uniform", "profile", or "type:" and a pattern for names of classes',
        )
    try:
        found = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f'"{pattern}" is not a regular expression: {error}', where=WHERE) from None
    weights = [float(any(found.search(name) for name in layer.class_names)) for layer in layers]
    if not any(weights):
        names = ", ".join(dict.fromkeys(name for layer in layers for name in layer.class_names))
        raise ConfigError(f'no layer has a class name with "{pattern}" in it', where=WHERE, hint=f"there are {names}")
    return weights


# ---- Times of layers ----


_NUM_RUNS = 3  # of which the quickest counts; the first ones load kernels and allocate


def time_layers(layers: Iterable[Callable[[Any], Any]], inputs: Any, device: torch.device) -> list[float]:
    """Return the seconds of a forward and a backward of each layer on `device`, one layer after the other.

    layers: functions of what the one before returns; each is freed before the next is asked for. inputs: of the first.
    """
    x, seconds = _moved(inputs, device), []
    for layer in layers:
        best_s = float("inf")
        for _ in range(_NUM_RUNS):
            start_s = _now(device)
            outputs = layer(x)
            _backward(outputs)
            best_s = min(best_s, _now(device) - start_s)
        seconds.append(best_s)
        x = _moved(outputs, device)
        del layer, outputs
    return seconds


def _backward(outputs: Any) -> None:
    trained = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if trained:
        torch.autograd.backward(trained, [torch.ones_like(tensor) for tensor in trained])


def _moved(values: Any, device: torch.device) -> Any:
    """Return leaves of a graph of their own, as a stage receives them."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        moved = value.detach().to(device)
        return moved.requires_grad_() if moved.is_floating_point() else moved

    return tree_map(leaf, values)


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
