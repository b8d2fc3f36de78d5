"""A log of collectives that a script keeps, and the one of the process: `utils.comms_logging`, `comm.configure`."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from launcher.comm import observe
from launcher.comm import observe as comms_log
from launcher.comm.observe import CommsLog, LogRules, bandwidths_gbps, start_log, stop_log
from launcher.compat.logs import log_dist, logger
from launcher.compat.ranks import get_world_size
from launcher.compat.timers import trim_mean

# For each size of messages: number, and of each call milliseconds, the algorithm's and the bus bandwidth in 10⁹ bit/s.
Record = list[Any]
_OF_SHARDS = ("all_gather", "reduce_scatter")
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB")


def get_caller_func(frame: int = 3) -> str:
    """Return the name of the function that many calls above."""
    return sys._getframe(frame).f_code.co_name


def convert_size(size_bytes: int) -> str:
    """Return bytes as text, such as "1.5 KB"."""
    unit = min(int(math.log(size_bytes, 1024)), len(_UNITS) - 1) if size_bytes > 0 else 0
    return f"{round(size_bytes / 1024**unit, 2)} {_UNITS[unit]}"


def calc_bw_log(comm_op: str, size: int, duration: float) -> tuple[float, float]:
    """Return both bandwidths in 10⁹ bit/s of a call that sent `size` bytes in `duration` milliseconds."""
    kind = comm_op.removesuffix("_single").removesuffix("_into_tensor").removesuffix("_tensor")
    kind = kind.removesuffix("_coalesced").removeprefix("inference_")
    world_size = get_world_size()
    num_bytes = size * world_size if kind in _OF_SHARDS else size
    return bandwidths_gbps(kind, num_bytes, world_size, duration / 1e3)


def _message_bytes(kind: str, num_bytes: int) -> int:
    """Return what DeepSpeed calls the size of a message: of a gather and a reduce-scatter one rank's part."""
    return num_bytes // get_world_size() if kind in _OF_SHARDS else num_bytes


class CommsLogger:
    """Sums up collectives by name and size. `configure` with an enabled config has it see those of the engine."""

    def __init__(self) -> None:
        self.comms_dict: dict[str, dict[int, Record]] = {}
        self.enabled = self.verbose = self.debug = False
        self.prof_all = True
        self.prof_ops: list[str] = []

    def configure(self, comms_config: Any) -> None:
        """comms_config: says `comms_logger_enabled`, and the keys of the config's section in `comms_logger`."""
        observe.remove_meter(self)
        self.enabled = bool(comms_config.comms_logger_enabled)
        if self.enabled:
            given = comms_config.comms_logger
            self.verbose, self.debug, self.prof_all = given.verbose, given.debug, given.prof_all
            self.prof_ops = list(given.prof_ops)
            observe.add_meter(self)

    def record(self, call: observe.Call) -> None:
        """Take note of a collective of the engine."""
        if self.prof_all or call.kind in self.prof_ops:
            self.append(call.kind, call.kind, call.duration_s * 1e3, _message_bytes(call.kind, call.num_bytes))

    def start_profiling_comms(self) -> None:
        """Take note of all kinds."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Take note of the kinds in `prof_ops` only."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: list[str]) -> None:
        """Take note of these kinds, too."""
        self.prof_ops = sorted({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: list[str]) -> None:
        """Take no more note of these kinds."""
        self.prof_ops = [op for op in self.prof_ops if op not in op_name_list]

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Add a call: its kind, the name to count it under, milliseconds, and bytes."""
        algorithm, bus = calc_bw_log(raw_name, msg_size, latency)
        record = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        record[0] += 1
        for values, value in zip(record[1:], (latency, algorithm, bus), strict=True):
            values.append(value)
        if self.verbose:
            text = f"{record_name}: {convert_size(msg_size)} in {latency:.2f} ms, {algorithm:.2f} Gbit/s"
            log_dist(f"{text}, bus {bus:.2f} Gbit/s", [0])

    def get_raw_data(self) -> dict[str, dict[int, Record]]:
        """Return name -> bytes -> number, milliseconds, and both bandwidths of each call."""
        return dict(self.comms_dict)

    def has_data(self) -> bool:
        """Whether there is a call."""
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        """Forget all calls."""
        self.comms_dict.clear()

    def get_operation_names(self) -> list[str]:
        """Return the names that calls are counted under."""
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        """Return the number of calls."""
        return sum(record[0] for sizes in self.comms_dict.values() for record in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Return the means of a name by size, without the tenths that took least and longest; None: no call."""
        if operation_name not in self.comms_dict:
            return None
        return {size: _summary(size, record) for size, record in sorted(self.comms_dict[operation_name].items())}

    def log_all(self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False) -> Any:
        """Log the means on rank 0, and return them by name and size with `return_dict`.

        show_straggler: also the milliseconds above those of the rank that took least; then every rank must call it.
        """
        found = {name: self.get_operation_summary(name) or {} for name in self.comms_dict}
        late = _late_ms(self.comms_dict) if show_straggler else None
        if print_log:
            for name, sizes in found.items():
                for size, values in sizes.items():
                    text = f"{name}: {values['count']} of {values['msg_size_str']}, {values['avg_latency_ms']:.3f} ms"
                    text += f", bus {values['busbw_avg_gbps']:.2f} Gbit/s"
                    log_dist(text if late is None else f"{text}, late {late[name, size]:.2f} ms", [0])
        if not return_dict:
            return None
        analysis = (
            None
            if late is None
            else {name: {size: late[name, size] for size in sizes} for name, sizes in found.items()}
        )
        return {"summary": found, "straggler_analysis": analysis, "metadata": {"world_size": get_world_size()}}


def _summary(size: int, record: Record) -> dict[str, Any]:
    count, latencies, algorithm, bus = record
    return {
        "count": count,
        "total_latency_ms": sum(latencies),
        "avg_latency_ms": trim_mean(latencies, 0.1),
        "tput_avg_gbps": trim_mean(algorithm, 0.1),
        "busbw_avg_gbps": trim_mean(bus, 0.1),
        "msg_size_bytes": size,
        "msg_size_str": convert_size(size),
    }


def _late_ms(records: dict[str, dict[int, Record]]) -> dict[tuple[str, int], float]:
    own: dict[tuple[str, int], float] = {
        (name, size): sum(record[1]) for name, sizes in records.items() for size, record in sizes.items()
    }
    everywhere = [own] * get_world_size()
    if get_world_size() > 1:
        dist.all_gather_object(everywhere, own)
    return {key: value - min(totals.get(key, value) for totals in everywhere) for key, value in own.items()}


_configured: list[CommsLog] = []  # the log that `configure` has started


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Log the engine's collectives of this process from now on, or no more; `log_summary` shows them.

    deepspeed_config: its `comms_logger` says what to log; the other arguments win.
    """
    section = getattr(deepspeed_config, "comms_logger", None)
    given = {"prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    rules: dict[str, Any] = {
        name: getattr(section, name) if value is None else value
        for name, value in given.items()
        if value is not None or section is not None
    }
    is_enabled = getattr(section, "enabled", bool(_configured)) if enabled is None else enabled
    for log in _configured:
        stop_log(log)
    _configured[:] = [start_log(LogRules(**rules))] if is_enabled else []


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Log what `CommsLogger.log_all` does of the engine's collectives on rank 0, and return it with `return_dict`.

    show_straggler: also the time above that of the quickest rank; then every rank must call it. Without a log, which
    the config's `comms_logger` and `configure` start, a warning says so.
    """
    log = comms_log.current_log()
    if log is None:
        logger.warning('no collectives are logged: set "comms_logger": {"enabled": true} in the config')
    calls = CommsLogger()
    for (name, num_bytes), durations_s in ({} if log is None else log.durations_s()).items():
        kind = name.split(" ")[0]
        for duration_s in durations_s:
            calls.append(kind, name, duration_s * 1e3, _message_bytes(kind, num_bytes))
    summary: dict[str, Any] | None = calls.log_all(show_straggler=show_straggler, return_dict=return_dict)
    return summary


def reset_log() -> None:
    """Forget the collectives logged so far."""
    log = comms_log.current_log()
    if log is not None:
        log.reset()


def has_comm_data() -> bool:
    """Whether collectives are logged."""
    log = comms_log.current_log()
    return log is not None and bool(log.totals())


def inference_all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None) -> Any:
    """Do what `all_reduce` does."""
    return dist.all_reduce(tensor, op=op, group=group)
