"""The estimators that DeepSpeed's guides use, with DeepSpeed's names, formulas and tables.

They describe DeepSpeed's own layout (16-bit gradients beside fp32 ones, a factor for buffers in host memory) and
count model states only. `planner.memory` describes this engine; docs/memory.md says what differs.
GB is 2**30 bytes here, as in the guides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from launcher.sharding.layout import unsharded_numel

_GB = 2**30
_BUFFER_FACTOR = 1.5  # host memory for buffers, as a multiple of what is kept there
_PARAM_16 = 2  # bytes of a parameter in half precision
_PARAM_32 = 4
_STATES = 16  # fp32 parameter, two Adam states, fp32 gradient
_ALL = 18  # the same and the 16-bit parameter

_Row = tuple[int, int, str]  # host bytes of a node, device bytes of a rank, options


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> tuple[int, int, int]:
    """Return host bytes of a node, device bytes of a rank, and bytes of the largest layer at stage 3.

    largest_layer_params: most parameters that one module holds itself. zero_init: the model is built sharded;
    without it every rank builds all of it in host memory first.
    """
    largest_layer = 2 * _PARAM_16 * largest_layer_params  # its parameters and its gradients
    world_size = num_nodes * num_gpus_per_node
    if cpu_offload:
        on_host = _ALL if cpu_offload_params else _STATES
        device = 0 if cpu_offload_params else _PARAM_16 * total_params / world_size
        per_param = on_host / num_nodes
        host = total_params * (per_param if zero_init else max(_PARAM_32 * num_gpus_per_node, per_param))
    else:
        device = _ALL * total_params / world_size
        host = _PARAM_32 * num_gpus_per_node * (largest_layer_params if zero_init else total_params)
    return int(host * additional_buffer_factor), largest_layer + int(device), largest_layer


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> None:
    """Print DeepSpeed's stage 3 table for a model of this size."""
    _write(zero3_table(total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor))


def estimate_zero3_model_states_mem_needs_all_live(
    model: Any,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> None:
    """Print DeepSpeed's stage 3 table for a torch module, which may stand on the meta device."""
    total, largest = _count(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> tuple[int, int]:
    """Return host bytes of a node and device bytes of a rank at stage 2."""
    world_size = num_nodes * num_gpus_per_node
    if cpu_offload:
        device: float = _PARAM_16 * total_params
        host = total_params * max(_PARAM_32 * world_size, _STATES)
    else:
        device = _PARAM_16 * total_params + int(_ALL * total_params / world_size)
        host = total_params * _PARAM_32 * num_gpus_per_node
    return int(host * additional_buffer_factor), int(device)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> None:
    """Print DeepSpeed's stage 2 table for a model of this size."""
    _write(zero2_table(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor))


def estimate_zero2_model_states_mem_needs_all_live(
    model: Any,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = _BUFFER_FACTOR,
) -> None:
    """Print DeepSpeed's stage 2 table for a torch module, which may stand on the meta device."""
    total, _ = _count(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def zero3_table(
    total_params: int, largest_layer_params: int, num_gpus_per_node: int, num_nodes: int, factor: float = _BUFFER_FACTOR
) -> str:
    """Return the text that the stage 3 estimator prints."""
    rows: list[_Row] = []
    for offload, offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes,
                offload, offload_params, zero_init, factor,
            )  # fmt: skip
            names = f"offload_param={_device(offload_params)}, offload_optimizer={_device(offload)}"
            rows.append((host, device, f"{names}, zero_init={int(zero_init)}"))
    model = f"{_millions(total_params)} total params, {_millions(largest_layer_params)} largest layer params."
    return _table(model, rows, num_gpus_per_node, num_nodes)


def zero2_table(total_params: int, num_gpus_per_node: int, num_nodes: int, factor: float = _BUFFER_FACTOR) -> str:
    """Return the text that the stage 2 estimator prints."""
    rows: list[_Row] = []
    for offload in (True, False):
        needs = estimate_zero2_model_states_mem_needs(total_params, num_gpus_per_node, num_nodes, offload, factor)
        rows.append((*needs, f"offload_optimizer={_device(offload)}"))
    return _table(f"{_millions(total_params)} total params.", rows, num_gpus_per_node, num_nodes)


def _table(model: str, rows: Iterable[_Row], num_gpus_per_node: int, num_nodes: int) -> str:
    hardware = f"{_counted(num_nodes, 'node')}, {_counted(num_gpus_per_node, 'GPU')} per node."
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {hardware}",
        f"SW: Model with {model}",
        "  per CPU  |  per GPU |   Options",
    ]
    lines += [f" {host / _GB:7.2f}GB | {device / _GB:6.2f}GB | {options}" for host, device, options in rows]
    return "\n".join(lines) + "\n"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def _millions(count: int) -> str:
    return f"{int(count / 1e6)}M"


def _device(is_offloaded: bool) -> str:
    return "cpu " if is_offloaded else "none"


def _count(model: Any) -> tuple[int, int]:
    """Return all parameters, tied ones once, and the most that one module holds itself."""

    def numel(params: Iterable[Any]) -> int:
        return sum(map(unsharded_numel, params))

    modules: Callable[[], Iterable[Any]] = model.modules
    return numel(model.parameters()), max((numel(m.parameters(recurse=False)) for m in modules()), default=0)


def _write(text: str) -> None:
    sys.stdout.write(text)  # these functions print: that is what the guides call them for
