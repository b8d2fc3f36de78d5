"""Whether the engine on one device is the plain loop; each command is a step of part 1.

python -m gpu.correct engine --precision bf16 [--places none,cpu,nvme] [--group]
python -m gpu.correct waits|pinned|checkpoints|compiled|stream
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from common import ROOT
from gpu.model import (
    Recompute,
    Run,
    alone_in_a_group,
    case_of,
    distance,
    same_bits,
    start,
    train_engine,
    train_plain,
    trained,
)
from gpu.steps import PACKAGE, attempt, commands, row
from harness.train.parity import Case, micro_batches, worst_relative
from torch.utils.checkpoint import checkpoint

LIMITS = {"fp32": (2e-4, 1e-3), "bf16": (5e-3, 1e-2), "fp16": (3e-3, 1e-2)}  # of losses, of weights
HOST = {"device": "cpu"}
OPTIMIZER = {"offload_optimizer": HOST}
BOTH = {**OPTIMIZER, "offload_param": HOST}
SPECULATIVE = {"offload_optimizer": {**HOST, "super_offload": True}}
RATES = {"Adam": 1e-3, "Adagrad": 1e-2, "Lion": 1e-3, "SGD": 0.3, "Lamb": 2e-2, "Muon": 2e-2, "RMSprop": 1e-3}
OF_HOSTS = ("Adagrad", "Lion", "SGD", "Lamb")  # that are compared with themselves in host memory
Place = tuple[str, int, dict[str, Any]]  # its name, the stage, keys of `zero_optimization`


def places(names: list[str], folder: str) -> list[Place]:
    """Return the settings of these places. folder: for what is on disk."""
    disk = {"device": "nvme", "nvme_path": folder}
    pipelined, none_in_memory = {"pipeline_read": True, "pipeline_write": True}, {"max_in_cpu": 0}
    of_place: dict[str, list[Place]] = {
        "none": [*((f"stage {stage}", stage, {}) for stage in range(4))],
        "cpu": [
            *((f"stage {stage}, optimizer in host memory", stage, OPTIMIZER) for stage in (1, 2, 3)),
            ("stage 2, updates beside backward", 2, SPECULATIVE),
            ("stage 3, optimizer and parameters in host memory", 3, BOTH),
            ("stage 3, parameters in host memory", 3, {"offload_param": HOST}),
            ("stage 2, 0.4 of the optimizer in host memory", 2, {"offload_optimizer": {**HOST, "ratio": 0.4}}),
            ("stage 2, pageable host memory", 2, {"offload_optimizer": {**HOST, "pin_memory": False}}),
        ],
        "nvme": [
            ("stage 2, optimizer on disk", 2, {"offload_optimizer": disk}),
            (
                "stage 3, both on disk",
                3,
                {"offload_optimizer": disk | pipelined, "offload_param": disk | none_in_memory},
            ),
            ("stage 3, parameters on disk", 3, {"offload_param": disk | none_in_memory}),
        ],
    }
    return [place for name in names for place in of_place[name]]


def compare(case: str, found: Run | None, truth: Run, precision: str, **facts: Any) -> None:
    """Write how far a run is from the plain loop; None has been written as an error."""
    if found is None:
        return
    loss, weight = worst_relative(found.losses, truth.losses), distance(found, truth)
    limits = LIMITS[precision]
    is_right = loss <= limits[0] and weight <= limits[1] and found.losses[-1] < found.losses[0]
    row(case, ok=is_right, loss=loss, weights=weight, first=found.losses[0], last=found.losses[-1], **facts)


def engine(options: argparse.Namespace) -> None:
    """Compare stages, places, recomputation and optimizers with a plain loop."""
    if options.group:
        alone_in_a_group()
    precision, device = options.precision, options.device
    is_short = options.group or device == "cpu"
    with same_bits(device), tempfile.TemporaryDirectory(dir=options.disk) as folder:
        for accumulation in (1, 3):
            base = case_of(precision, accumulation=accumulation)
            truth = train_plain(base, device)
            at_stage_0 = attempt("stage 0", partial(trained, base))
            for name, stage, zero in places(options.places.split(","), folder):
                case = case_of(precision, stage, zero, accumulation=accumulation)
                start_s = time.perf_counter()
                found = attempt(name, partial(trained, case))
                beside = None if found is None or at_stage_0 is None else distance(found, at_stage_0)
                seconds = time.perf_counter() - start_s
                compare(f"{name}, accumulation {accumulation}", found, truth, precision, to_stage_0=beside, s=seconds)
        if options.places.startswith("none"):
            _recomputed(precision, device)
            _optimizers(("SGD", "Lamb") if is_short else tuple(RATES), precision)


def _recomputed(precision: str, device: str) -> None:
    from launcher.activation import checkpoint as own

    torchs = partial(checkpoint, use_reentrant=False)
    reentrant = partial(checkpoint, use_reentrant=True)
    inputs = {"activation_checkpointing": {"cpu_checkpointing": True}}
    contiguous = {"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": 4}}
    blocks = {"activation_checkpointing": {"blocks": True}}
    cases: dict[str, tuple[Case, Recompute | None]] = {
        "torch's checkpoint": (case_of(precision), torchs),
        "torch's checkpoint, stage 3 in host memory": (case_of(precision, 3, BOTH), torchs),
        "torch's reentrant checkpoint, stage 2 offloaded": (case_of(precision, 2, OPTIMIZER), reentrant),
        "own checkpoint, inputs in host memory": (case_of(precision, settings=inputs), own),
        "own checkpoint, contiguous": (case_of(precision, settings=contiguous), own),
        "blocks by the config, stage 3": (case_of(precision, 3, settings=blocks), None),
        "no clipping": (case_of(precision, clipping=0.0), None),
    }
    for name, (case, recompute) in cases.items():
        compare(name, attempt(name, partial(trained, case, 1, recompute)), train_plain(case, device), precision)


def _optimizers(names: tuple[str, ...], precision: str) -> None:
    """Compare optimizers with themselves in host memory, whose kernels the CPU's tests compare with torch."""
    for name in names:
        parameters = {"type": name, "params": {"lr": RATES[name]}}
        case = case_of(precision, settings={"optimizer": parameters})
        found = attempt(f"optimizer {name}", partial(trained, case))
        apart = None
        if found is not None and name in OF_HOSTS:
            on_host = attempt(
                f"optimizer {name} in host memory",
                partial(trained, case_of(precision, 2, OPTIMIZER, {"optimizer": parameters})),
            )
            apart = None if on_host is None else distance(found, on_host)
        if found is not None:
            is_right = found.losses[-1] < found.losses[0] and (apart or 0.0) <= LIMITS[precision][1]
            row(f"optimizer {name}", ok=is_right, to_host=apart, first=found.losses[0], last=found.losses[-1])


def waits(options: argparse.Namespace) -> None:
    """Count what the host waits for in a step, by torch's own warnings, with the line of the package."""
    cases = {
        "bf16": case_of("bf16"),
        "bf16, no clipping": case_of("bf16", clipping=0.0),
        "fp32": case_of("fp32"),
        "bf16, accumulation 2": case_of("bf16", accumulation=2),
        "fp16": case_of("fp16"),
        "bf16, stage 2, optimizer in host memory": case_of("bf16", 2, OPTIMIZER),
        "bf16, Lamb": case_of("bf16", settings={"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}),
        "bf16, Muon": case_of("bf16", settings={"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}),
    }
    for name, case in cases.items():
        attempt(name, partial(_count_waits, name, case, options.device))


def _count_waits(name: str, case: Case, device: str) -> None:
    model = start(case)
    steps = [[(x.to(device), y.to(device)) for x, y in step] for step in micro_batches(case)]
    where: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            frames = traceback.extract_stack()[:-1]
            own = [frame for frame in frames if frame.filename.startswith(PACKAGE)] or frames
            where[f"{os.path.relpath(own[-1].filename, ROOT)}:{own[-1].lineno}"] += 1

    def train(numbers: range) -> None:
        for number in numbers:
            for x, y in steps[number]:
                model.backward(model(x, y))
                model.step()

    train(range(4))
    with warnings.catch_warnings(), mock.patch.object(warnings, "showwarning", note):
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            train(range(4, 10))
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    row(name, waits_a_step=sum(where.values()) / 6, where=dict(where.most_common(8)))
    model.destroy()


def pinned(options: argparse.Namespace) -> None:
    """Copy from page-locked memory, and go on after CUDA has refused to lock some."""
    from launcher.comm.device import PinnedMemory

    if options.device != "cuda":
        row("page-locked memory", detail="only a GPU has it")
        return
    torch.zeros(1, device="cuda")
    for mebibytes in (1, 64, 1024):
        num_bytes = mebibytes << 20
        start_s = time.perf_counter()
        storage = PinnedMemory().empty(num_bytes)
        locked_s = time.perf_counter() - start_s
        host = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (num_bytes,), (1,))
        target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        target.copy_(host, non_blocking=True)
        queued_s = time.perf_counter() - start_s
        torch.cuda.synchronize()
        whole_s = time.perf_counter() - start_s
        is_right = host.is_pinned() and (mebibytes < 64 or queued_s < whole_s / 3)
        rates = {"lock_GBps": num_bytes / locked_s / 1e9, "copy_GBps": num_bytes / whole_s / 1e9}
        row(f"{mebibytes} MiB", ok=is_right, queued_ms=queued_s * 1e3, **rates)
    refused = PinnedMemory()._register(host.data_ptr(), 4096)  # it is locked already
    row("CUDA refuses to lock memory twice", ok=refused is None)
    for number in (1, 2):
        attempt(f"kernel {number} after the refusal", partial(_kernel_after, number))


def _kernel_after(number: int) -> None:
    total = (torch.zeros(8, device="cuda") + 1).sum().item()
    row(f"kernel {number} after the refusal", ok=total == 8.0)


def checkpoints(options: argparse.Namespace) -> None:
    """Save in the middle and go on from there, with the bits of the run that went on by itself."""
    settings: list[Place] = [("stage 0", 0, {}), ("stage 2, optimizer in host memory", 2, OPTIMIZER)]
    settings += [("stage 3, both in host memory", 3, BOTH)]
    for name, stage, zero in settings:
        for is_async in (False, True):
            more = {"checkpoint": {"async": True}} if is_async else {}
            kind = f"{name}, {'asynchronous' if is_async else 'plain'} save"
            attempt(kind, partial(_resumed, kind, case_of("bf16", stage, zero, more), options.device))


def _resumed(name: str, case: Case, device: str) -> None:
    with same_bits(device), tempfile.TemporaryDirectory() as folder:
        model = start(case)
        train_engine(model, case, 0, 5)
        start_s = time.perf_counter()
        model.save_checkpoint(folder, tag="half")
        pause_s = time.perf_counter() - start_s
        expected = train_engine(model, case, 5)
        model.wait_for_checkpoint()
        again = start(case)
        again.load_checkpoint(folder, tag="half")
        found = train_engine(again, case, 5)
        for each in (model, again):
            each.destroy()
    apart = distance(found, expected)
    row(name, ok=apart == 0 and found.losses == expected.losses, weights=apart, pause_ms=pause_s * 1e3)


def compiled(options: argparse.Namespace) -> None:
    """Train with `engine.compile()`, and as without."""
    for precision in ("bf16", "fp32"):
        attempt(f"compiled, {precision}", partial(_compiled, precision))


def _compiled(precision: str) -> None:
    case = replace(case_of(precision), num_steps=6)
    eager, model = trained(case), start(case)
    model.compile()
    start_s = time.perf_counter()
    found = train_engine(model, case)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    seconds = time.perf_counter() - start_s
    compare(f"compiled, {precision}", found, eager, precision, graph_breaks=breaks, s=seconds)
    model.destroy()


def stream(options: argparse.Namespace) -> None:
    """Train on a stream that is not the default one: the same bits."""
    if options.device != "cuda":
        row("another stream", detail="only a GPU has streams")
        return
    for name, stage, zero in (("stage 0", 0, {}), ("stage 2, optimizer in host memory", 2, OPTIMIZER)):
        attempt(name, partial(_on_a_stream, name, case_of("bf16", stage, zero)))


def _on_a_stream(name: str, case: Case) -> None:
    with same_bits("cuda"):
        expected = trained(case)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = trained(case)
    apart = distance(found, expected)
    row(name, ok=apart == 0 and found.losses == expected.losses and math.isfinite(apart), weights=apart)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found, of = commands(__doc__, (engine, waits, pinned, checkpoints, compiled, stream))
    command = of[engine]
    command.add_argument("--precision", choices=list(LIMITS), default="bf16")
    command.add_argument("--places", default="none,cpu", help="of none, cpu, nvme; default: %(default)s")
    command.add_argument("--group", action="store_true", help="in a process group of one rank")
    command.add_argument("--disk", help="folder for what is on disk; default: one for temporary files")
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    options = parser().parse_args()
    options.call(options)
