"""What `launch probe` runs on every rank: measure this rank, then the ranks together. Rank 0 prints it as JSON.

    python -m launcher.probes.speed SECONDS [FOLDER]

All ranks compute, copy and communicate at the same time, as they do in training; collectives are those of the engine.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone

import torch

from launcher.base import env
from launcher.comm.communicator import Communicator, Transfer
from launcher.comm.device import device_module
from launcher.comm.groups import RankGroup, init_distributed, world_group
from launcher.comm.hosts import node_sizes
from launcher.comm.mesh import leave_in_order, subgroup
from launcher.planner.speed import CollectiveSpeed, LinkSpeed, RankSpeed, Speed, named_apart
from launcher.storage.measure import GRID, DiskMeter

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WIDTHS = {True: (256, 512, 1024, 2048), False: (1024, 2048, 4096, 8192)}  # of matrices, on a CPU or not
_COPY_BYTES = {True: 2**26, False: 2**29}
_SIZES = tuple(2**power for power in (12, 15, 18, 21, 24, 26))  # bytes of a collective
_LINK_BYTES = 2**24
_LEAST_CALLS, _MOST_CALLS = 3, 50
_DISK_BYTES = 2**28
_SMALL_LAYERS, _SMALL_KERNELS = 32, 5  # a layer has a product, and two products and two sums in backward


def main() -> None:
    """Measure for about the seconds that `sys.argv` says; print the JSON on rank 0. Every rank must call it."""
    seconds = float(sys.argv[1])
    folder = sys.argv[2] if len(sys.argv) > 2 else None
    leave_in_order()
    init_distributed()
    world = world_group()
    measured = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    own = _rank_speed(world, seconds / 3, folder)
    found = Speed(measured, _backend(), named_apart(world.communicator.gather_objects(own)))
    if world.world_size > 1:
        found.collectives = _collectives(world, seconds / 3)
        found.links = _links(world, found.ranks)
    if world.rank == 0:
        sys.stdout.write(json.dumps(found.as_json()) + "\n")
        sys.stdout.flush()


def _backend() -> str:
    return str(torch.distributed.get_backend()) if torch.distributed.is_initialized() else "none"


# ---- one rank ----


def _rank_speed(world: RankGroup, seconds: float, folder: str | None) -> RankSpeed:
    device = world.device
    is_cpu = device.type == "cpu"
    name = "cpu" if is_cpu else str(device_module(device).get_device_name(device))
    each_s = seconds / (len(_DTYPES) + 3)
    matmul = {kind: _matmul_flops(dtype, device, each_s) for kind, dtype in _DTYPES.items()}
    size = _COPY_BYTES[is_cpu]
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    copied = 2 * size / _median_s(lambda: target.copy_(source), device, each_s)
    kernel_s = _kernel_s(device, each_s)
    to_device = None
    if not is_cpu:
        host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        to_device = size / _median_s(lambda: target.copy_(host, non_blocking=True), device, each_s)
    read = write = None
    if folder is not None and os.environ.get(env.LOCAL_RANK.name, "0") == "0":
        read, write = _disk_rates(folder, seconds)
    node = int(os.environ.get(env.NODE_RANK.name, "0"))
    return RankSpeed(world.rank, node, socket.gethostname(), name, matmul, copied, to_device, read, write, kernel_s)


def _matmul_flops(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Return the operations per second of products of the largest matrices that a few of fit into the time."""
    best = 0.0
    for width in _WIDTHS[device.type == "cpu"]:
        a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        took_s = _median_s(functools.partial(torch.matmul, a, b), device, seconds / 4)
        best = max(best, 2 * width**3 / took_s)
        if took_s * 8 > seconds / _LEAST_CALLS:  # the next one takes eight times as long
            break
    return best


def _kernel_s(device: torch.device, seconds: float) -> float:
    """Return the seconds of one small operation: of modules, of autograd, and of what it leads to in backward."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, device=device) for _ in range(_SMALL_LAYERS)))
    x = torch.ones(8, 8, device=device)

    def train() -> None:
        model(x).sum().backward()

    return _median_s(train, device, seconds) / (_SMALL_KERNELS * _SMALL_LAYERS)


def _disk_rates(folder: str, seconds: float) -> tuple[float, float]:
    """Return the bytes per second that are read from, and written to, a folder's disk."""
    meter = DiskMeter(folder, _DISK_BYTES)
    try:
        meter.fill(seconds)
        settings = GRID[len(GRID) // 2]
        return meter.read_rate(settings, seconds), meter.write_rate(settings, seconds)
    finally:
        meter.close()


def _median_s(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median seconds of a call, the first one left out."""
    call()
    times: list[float] = []
    while len(times) < _LEAST_CALLS or (sum(times) < seconds and len(times) < _MOST_CALLS):
        times.append(_timed_s(call, device))
    return statistics.median(times)


def _timed_s(call: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    begun_s = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - begun_s


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        device_module(device).synchronize(device)


# ---- ranks together ----


def _collectives(world: RankGroup, seconds: float) -> list[CollectiveSpeed]:
    """Measure each collective by size: over all ranks, and where there are several nodes within and between them."""
    groups = {"all ranks": world}
    sizes = node_sizes(world)
    if len(sizes) > 1 and len(set(sizes)) == 1:
        per_node = sizes[0]
        rows = [list(range(first, first + per_node)) for first in range(0, world.world_size, per_node)]
        if per_node > 1:
            groups["within a node"] = world.subset(subgroup(rows, "nodes of a probe"))
            columns = [list(range(place, world.world_size, per_node)) for place in range(per_node)]
            groups["between nodes"] = world.subset(subgroup(columns, "columns of a probe"))
    each_s = seconds / (4 * len(groups) * len(_SIZES))
    found = []
    for name, group in groups.items():
        for num_bytes in _SIZES:
            numel = max(1, num_bytes // 4 // group.world_size) * group.world_size
            flat, other = (torch.ones(numel, device=world.device) for _ in range(2))
            for kind, call in _calls(group.communicator, flat, other).items():
                took_s = _collective_s(world, call, each_s)
                found.append(CollectiveSpeed(kind, name, group.world_size, 4 * numel, took_s))
    return found


def _calls(of: Communicator, flat: torch.Tensor, other: torch.Tensor) -> dict[str, Callable[[], object]]:
    own = other[: flat.numel() // of.world_size]
    return {
        "all_gather": lambda: of.all_gather(flat, own).wait(),
        "reduce_scatter": lambda: of.reduce_scatter(flat, own).wait(),
        "all_reduce": lambda: of.all_reduce(flat, 1.0 / of.world_size).wait(),
        "all_to_all": lambda: of.all_to_all(flat, other).wait(),
    }


def _collective_s(world: RankGroup, call: Callable[[], object], seconds: float) -> float:
    """Return the seconds that the slowest rank takes. All ranks make as many calls."""
    call()
    first_s = max(world.communicator.gather_scalars(_timed_s(call, world.device)))
    count = min(_MOST_CALLS, max(_LEAST_CALLS, int(seconds / max(first_s, 1e-6))))
    times = [_timed_s(call, world.device) for _ in range(count)]
    return max(world.communicator.gather_scalars(statistics.median(times)))


def _links(world: RankGroup, ranks: list[RankSpeed]) -> list[LinkSpeed]:
    """Measure each pair of nodes, as many pairs at once as have no node in common."""
    firsts: dict[int, RankSpeed] = {}
    for each in ranks:
        firsts.setdefault(each.node, each)
    nodes = sorted(firsts)
    found: dict[tuple[int, int], float] = {}
    sent, received = (torch.ones(_LINK_BYTES, dtype=torch.uint8, device=world.device) for _ in range(2))
    for pairs in _rounds(nodes):
        peers = {firsts[a].rank: firsts[b].rank for pair in pairs for a, b in (pair, pair[::-1])}
        peer = peers.get(world.rank)
        best_s = float("inf")
        for _ in range(_LEAST_CALLS + 1):
            world.communicator.gather_scalars(0.0)  # all begin together
            if peer is not None:
                transfers = [Transfer(sent, peer, is_sent=True), Transfer(received, peer, is_sent=False)]
                best_s = min(best_s, _timed_s(functools.partial(_transfer, world, transfers), world.device))
        times = world.communicator.gather_scalars(best_s)
        for a, b in pairs:
            found[a, b] = _LINK_BYTES / max(times[firsts[a].rank], times[firsts[b].rank])
    return [LinkSpeed(pair, (firsts[pair[0]].host, firsts[pair[1]].host), rate) for pair, rate in sorted(found.items())]


def _transfer(world: RankGroup, transfers: list[Transfer]) -> None:
    world.communicator.transfer(transfers).wait()


def _rounds(nodes: list[int]) -> list[list[tuple[int, int]]]:
    """Return all pairs of nodes in rounds, a node in one pair of each at most: a tournament by the circle method."""
    places: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


if __name__ == "__main__":
    main()
