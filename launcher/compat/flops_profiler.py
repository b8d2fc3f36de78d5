"""`deepspeed.profiling.flops_profiler.profiler`: counts are those of matrix products and attention."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.compat.accelerator import get_accelerator
from launcher.monitor.flops import FlopCount, FlopCounter, ProfileForm, ProfileTimes, profile_text
from launcher.sharding.layout import unsharded_numel


class FlopsProfiler:
    """Counts what runs between `start_profile()` and `stop_profile()`; numbers stay until `end_profile()`."""

    def __init__(self, model: nn.Module, ds_engine: Any = None) -> None:
        """ds_engine: what the profile says of ranks and batch is read of it."""
        self.model = model
        self.ds_engine = ds_engine
        self.started = False
        self._count, self._duration_s = FlopCount({}, 0), 0.0

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Count from here on. Raises: EngineError for `ignore_list`."""
        if ignore_list:
            raise EngineError("start_profile(ignore_list=...) is not supported", hint="read the modules' own lines")
        self._counter = FlopCounter(self.model)
        self._counter.start()
        self._started_s, self.started = time.perf_counter(), True

    def stop_profile(self) -> None:
        """Count no more. A second call does nothing."""
        if not self.started:
            return
        get_accelerator().synchronize()
        self._duration_s = time.perf_counter() - self._started_s
        self._counter.mark_forward()
        self._counter.stop()
        self._count, self.started = self._counter.count or self._count, False

    def end_profile(self) -> None:
        """Forget the numbers."""
        if self.started:
            self.stop_profile()
        self._count, self._duration_s = FlopCount({}, 0), 0.0

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the floating-point operations of all that ran."""
        total = self._count.forward_total
        return flops_to_string(total) if as_string else total

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiplications with an addition: half of the operations."""
        total = self._count.forward_total // 2
        return macs_to_string(total) if as_string else total

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the model's parameters, also where they are sharded."""
        total = sum(map(unsharded_numel, self.model.parameters()))
        return params_to_string(total) if as_string else total

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds; counting is part of them."""
        return duration_to_string(self._duration_s) if as_string else self._duration_s

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Log the profile, or write it to a file."""
        form = ProfileForm(module_depth, top_modules, detailed)
        times = ProfileTimes(self._duration_s, 0.0, 0.0)
        rows = "".join(f"{name + ':':<30}{value}\n" for name, value in self._of_engine())
        text = f"FLOPs of step {profile_step}:\n{rows}{profile_text(self.model, self._count, times, form, None)}"
        if output_file is None:
            get_logger().info("%s", text)
        else:
            Path(output_file).write_text(text + "\n")

    def _of_engine(self) -> list[tuple[str, Any]]:
        engine = self.ds_engine
        if engine is None:
            return []
        num_data = engine.seq_dp_world_size if engine.dp_world_size is None else engine.dp_world_size
        return [
            ("world size", engine.world_size),
            ("data parallel size", num_data),
            ("model parallel size", engine.mp_world_size),
            ("batch size per GPU", engine._batch.micro_batch_size),
        ]


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Run `model` in evaluation mode, in which it stays; return its operations, multiply-adds and parameters.

    input_shape: of a tensor of ones as the only argument; else `args` and `kwargs` are the arguments. mode: "forward",
    or "generate" to call `model.generate`. warm_up: calls before the one that counts. print_profile: also log the
    profile, with `detailed`, `module_depth`, `top_modules` and `output_file` of `print_model_profile`.
    Raises: EngineError for another mode, for a model without arguments and for `ignore_modules`.
    """
    if mode not in ("forward", "generate"):
        raise EngineError(f'get_model_profile(mode="{mode}") is unknown', hint='use "forward" or "generate"')
    if ignore_modules:
        raise EngineError("get_model_profile(ignore_modules=...) is not supported", hint="read the modules' own lines")
    if input_shape is not None:
        first = next(model.parameters(), torch.empty(0))
        args = [torch.ones(tuple(input_shape), dtype=first.dtype, device=first.device)]
    elif not args and not kwargs:
        raise EngineError("get_model_profile() has no arguments for the model", hint="give input_shape, args or kwargs")
    model.eval()
    call: Any = model if mode == "forward" else model.generate
    for _ in range(warm_up):
        call(*args, **(kwargs or {}))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    try:
        call(*args, **(kwargs or {}))
    finally:
        profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    found = (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params)
    flops, macs, params = (read(as_string) for read in found)
    return flops, macs, params


# ---- numbers as text ----

_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number in units such as "G"; None: the largest ones that leave at least 1."""
    if units is None:
        units = next((unit for unit, factor in _UNITS.items() if abs(num) >= factor), "u") if num else ""
    return f"{round(num / _UNITS.get(units, 1.0), precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Return floating-point operations as text."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Return multiply-adds as text."""
    return f"{number_to_string(macs, units, precision)}MACs"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Return bytes as text."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of parameters as text; "B" are billions."""
    return number_to_string(params_num, "G" if units == "B" else units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Return seconds as text."""
    return f"{number_to_string(duration, units, precision)}s"
