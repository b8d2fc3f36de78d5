"""Times of single layers, for a partition into stages that take equally long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

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
