"""Two ranks on one GPU, and streams that are late at random; each command is a step of part 1.

    python -m gpu.ranks two  --transport nccl|staged|gloo --precision bf16
    python -m gpu.ranks late [--transport nccl|staged|gloo] [--seeds 3] [--sleep-ms 3]

NCCL refuses two ranks on one GPU of one host, so each rank names a host of its own ($NCCL_HOSTID) and they meet over
sockets of the loopback interface. `staged` carries what is on the GPU through host memory and gloo, each collective
waited for, where NCCL refuses that, too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpu.correct import BOTH, HOST, LIMITS, OPTIMIZER, SPECULATIVE, compare
from gpu.model import Run, case_of, distance, same_bits, train_plain, trained
from gpu.steps import ROWS, commands, row
from harness.ports import free_port
from harness.train.parity import Case
from torch import Tensor

from launcher.comm.communicator import Communicator, GlooCommunicator, SingleProcess
from launcher.comm.device import DeviceRuntime
from launcher.comm.pending import Pending
from launcher.comm.streams import DeviceStreams, Side
from launcher.zero.local_gradients import LocalGradients

NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",  # kernels of both ranks are on the GPU at once
    "NCCL_DEBUG": "WARN",
}
GRACE_S = 8.0  # for the other rank's own error, once one has failed
CYCLES_A_MS = 1_500_000


class Staged(GlooCommunicator):
    """Carries each collective through host memory and gloo, and waits for it."""

    def __init__(self, process_group: dist.ProcessGroup, runtime: DeviceRuntime) -> None:
        super().__init__(process_group, runtime)
        self._host = GlooCommunicator(process_group, DeviceRuntime(torch.device("cpu")))

    def _reduce_scatter(self, flat: Tensor, output: Tensor, scale: float) -> Pending:
        total = output.cpu()
        self._host._reduce_scatter(flat.cpu(), total, scale).wait()
        output.copy_(total)
        return Pending()

    def _all_gather(self, flat: Tensor, own: Tensor) -> Pending:
        whole = flat.cpu()
        self._host._all_gather(whole, own.cpu()).wait()
        flat.copy_(whole)
        return Pending()

    def _all_reduce(self, flat: Tensor, sent: Tensor, scale: float) -> Pending:
        total = flat.cpu()
        self._host._all_reduce(total, total if sent is flat else sent.cpu(), scale).wait()
        flat.copy_(total)
        return Pending()

    def _all_to_all(self, flat: Tensor, output: Tensor) -> Pending:
        received = output.cpu()
        self._host._all_to_all(flat.cpu(), received).wait()
        output.copy_(received)
        return Pending()

    def _gather_rows(self, values: Tensor) -> Tensor:
        return self._host._gather_rows(values.cpu()).to(values.device)

    def _broadcast(self, tensors: list[Tensor], source: int) -> None:
        received = [each.cpu() for each in tensors]
        self._host._broadcast(received, source)
        for each, value in zip(tensors, received, strict=True):
            each.copy_(value)


@contextlib.contextmanager
def joined(transport: str) -> Iterator[None]:
    """Be a rank of the world that the environment describes; without one, a single process."""
    import launcher

    def staged(process_group: dist.ProcessGroup | None, runtime: DeviceRuntime) -> Communicator:
        return SingleProcess(None, runtime) if process_group is None else Staged(process_group, runtime)

    with contextlib.ExitStack() as stack:
        if transport == "staged":  # the engine trains on the GPU although its group is gloo's
            stack.enter_context(mock.patch("launcher.comm.device._carries_gpu_memory", return_value=True))
            stack.enter_context(mock.patch("launcher.comm.groups.communicator_for", staged))
        launcher.init_distributed("nccl" if transport == "nccl" else "gloo")
        yield


def start_ranks(options: argparse.Namespace) -> None:
    """Run this command as two ranks, of which the first writes the rows. Exits with 1 where one fails."""
    port, processes = str(free_port()), []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        if options.transport == "nccl":
            env |= {**NCCL, "NCCL_HOSTID": f"rank-{rank}"}
        if rank:
            env.pop(ROWS, None)
        processes.append(subprocess.Popen([sys.executable, "-m", "gpu.ranks", *sys.argv[1:]], env=env))
    while all(process.poll() is None for process in processes):
        time.sleep(0.1)
    end_s = time.monotonic() + GRACE_S
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) and time.monotonic() > end_s:
            break
        time.sleep(0.1)
    codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
    if codes != [0, 0]:
        row(f"two ranks by {options.transport}", ok=False, detail=f"exit codes {codes}; None: it did not end")
        sys.exit(1)


def two(options: argparse.Namespace) -> None:
    """Compare two ranks at every stage with a plain loop. An error is not caught: the ranks would part."""
    settings: list[tuple[str, int, dict[str, Any]]] = [
        *((f"stage {stage}", stage, {}) for stage in range(4)),
        ("stage 3, nothing kept", 3, {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 60_000}),
        ("stage 2, optimizer in host memory", 2, OPTIMIZER),
        ("stage 3, both in host memory", 3, BOTH),
    ]
    is_first = dist.get_rank() == 0
    for accumulation in (1, 2):
        truth: Run | None = None
        for name, stage, zero in settings:
            case = case_of(options.precision, stage, zero, accumulation=accumulation)
            if is_first and truth is None:
                truth = train_plain(case, options.device, 2)
            start_s = time.perf_counter()
            found = trained(case, 2)
            if truth is not None:
                seconds = time.perf_counter() - start_s
                compare(f"{name}, accumulation {accumulation}", found, truth, options.precision, s=seconds)


@contextlib.contextmanager
def late_streams(seed: int, longest_ms: float) -> Iterator[None]:
    """Have work of side streams, and the computing before a reduction, begin late at random."""
    draw = random.Random(seed)
    on, completed = DeviceStreams.on, LocalGradients.completed

    def sleep() -> None:
        if draw.random() < 0.5:
            torch.cuda._sleep(int(draw.random() * longest_ms * CYCLES_A_MS))

    @contextlib.contextmanager
    def late_on(streams: DeviceStreams, side: Side) -> Iterator[None]:
        with on(streams, side):
            sleep()
            yield

    def late_completed(gradients: LocalGradients) -> Tensor:
        sleep()
        return completed(gradients)

    with (
        mock.patch.object(DeviceStreams, "on", late_on),
        mock.patch.object(LocalGradients, "completed", late_completed),
    ):
        yield


def late(options: argparse.Namespace) -> None:
    """Compare the bits of runs on late streams with those of a calm run."""
    settings: list[tuple[str, int, dict[str, Any]]] = [
        ("stage 1, optimizer in host memory", 1, OPTIMIZER),
        ("stage 2, optimizer in host memory", 2, {"offload_optimizer": HOST}),
        ("stage 2, updates beside backward", 2, SPECULATIVE),
        ("stage 3, both in host memory", 3, BOTH),
    ]
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size > 1:
        settings += [(f"stage {stage}", stage, {}) for stage in range(4)]
    for precision in ("bf16", "fp32") if world_size == 1 else ("bf16",):
        for name, stage, zero in settings:
            case = case_of(precision, stage, zero, accumulation=2)
            calm = trained(case, world_size)
            for seed in range(options.seeds):
                _compare_late(f"{name}, {precision}, seed {seed}", case, calm, seed, options)


def _compare_late(name: str, case: Case, calm: Run, seed: int, options: argparse.Namespace) -> None:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    is_gpu = options.device == "cuda" and options.sleep_ms > 0
    with late_streams(seed, options.sleep_ms) if is_gpu else contextlib.nullcontext():
        found = trained(case, world_size)
    apart = distance(found, calm)
    if not dist.is_initialized() or dist.get_rank() == 0:
        row(name, ok=apart == 0 and found.losses == calm.losses, weights=apart)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found, of = commands(__doc__, (two, late))
    for command in of.values():
        command.add_argument("--transport", choices=["nccl", "staged", "gloo"], help="default: a single process")
    of[two].add_argument("--precision", choices=list(LIMITS), default="bf16")
    of[late].add_argument("--seeds", type=int, default=3)
    of[late].add_argument("--sleep-ms", type=float, default=3.0, help="the longest sleep; 0: none")
    return found


def main() -> None:
    """Start the ranks, or be one of them."""
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    options = parser().parse_args()
    if options.call is two and options.transport is None:
        sys.exit("gpu.ranks two needs --transport nccl, staged or gloo")
    if options.transport is not None and "RANK" not in os.environ:
        start_ranks(options)
        return
    with joined(options.transport) if options.transport else contextlib.nullcontext(), same_bits(options.device):
        options.call(options)
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
