"""How fast a step is, what it waits for and what it keeps; each command is a step of part 2 or 3.

python -m gpu.speed ceilings
python -m gpu.speed steps   --engine ours|plain|DDP|FSDP2|DeepSpeed --size 1.3b [--samples 8] [--estimate]
python -m gpu.speed profile --engine ours|plain --size 1.3b [--trace FILE]
python -m gpu.speed offload --size 6.7b --zero JSON [--settings JSON] [--estimate]
python -m gpu.speed saves   --size 1.3b --folder DIR
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import is_installed, median
from gpu.kernels import KINDS, adamw_step, copy_rate, median_s
from gpu.model import SIZES, Size, alone_in_a_group, build
from gpu.steps import commands, row
from gpu.tracing import summary
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.monitor.flops import peak_flops

MAX_NORM = 1.0
BF16 = {"bf16": {"enabled": True}}
MAX_TRACE_BYTES = 15 * 2**20
Batch = tuple[Tensor, Tensor]


# ---- Loops ----


class PlainLoop:
    """The arithmetic of the engine in a plain training loop: a bf16 model, fp32 masters, sums and states."""

    def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
        self.model, self.params = model, list(model.parameters())
        self.masters = [param.detach().float() for param in self.params]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, weight_decay=weight_decay, fused=True)

    def step(self, batch: Batch) -> Tensor:
        """Take one optimizer step."""
        loss: Tensor = self.model(*batch)
        loss.backward()
        for master, param in zip(self.masters, self.params, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, MAX_NORM, foreach=True)
        self.optimizer.step()
        torch._foreach_copy_([param.data for param in self.params], self.masters)
        for master in self.masters:
            master.grad = None
        return loss.detach()


class Autocast(nn.Module):
    """Computes in bf16 with the fp32 weights of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: int64 [batch, time] -> mean loss."""
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            loss: Tensor = self.model(tokens, targets)
        return loss


def _deepspeed() -> Callable[..., Any]:
    import deepspeed

    initialize: Callable[..., Any] = deepspeed.initialize
    return initialize


def loop_of(options: argparse.Namespace, settings: dict[str, Any] | None = None) -> Any:
    """Return the loop of an engine, alone in a process group, around a model of the size."""
    alone_in_a_group()  # before step_time, which starts one where there is none
    from step_time import LR, WEIGHT_DECAY, EngineLoop, ddp, fsdp2

    import launcher

    recompute = partial(checkpoint, use_reentrant=False) if options.recompute else None
    size, zero = SIZES[options.size], json.loads(options.zero)
    new: Callable[[torch.dtype], nn.Module] = lambda dtype: build(size, options.device, dtype, recompute)  # noqa: E731
    keys = {"gradient_clipping": MAX_NORM, **BF16, **(settings or {})}
    if options.engine == "plain":
        return PlainLoop(new(torch.bfloat16), LR, WEIGHT_DECAY)
    if options.engine == "DDP":
        return ddp(Autocast(new(torch.float32)), MAX_NORM)
    if options.engine == "FSDP2":
        return fsdp2(new(torch.float32), dtype=torch.bfloat16, max_norm=MAX_NORM)
    initialize = launcher.initialize if options.engine == "ours" else _deepspeed()
    return EngineLoop(initialize, new(torch.bfloat16), options.samples, zero, keys)


def batches_of(size: Size, samples: int, device: str) -> list[Batch]:
    """Return four batches that differ."""
    generator = torch.Generator().manual_seed(5)
    shape = (4, samples, size.config.context)
    tokens = torch.randint(0, size.vocabulary, shape, generator=generator).to(device)
    return [(each, each.roll(-1, 1)) for each in tokens]


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


# ---- Steps ----


def measure(loop: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a step after some that are not measured."""
    size, device = SIZES[options.size], options.device
    batches = batches_of(size, options.samples, device)
    for number in range(options.warmup):
        loop.step(batches[number % 4])
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start_s, queued_s = time.perf_counter(), []
    for number in range(options.steps):
        begun_s = time.perf_counter()
        loss = loop.step(batches[number % 4])
        queued_s.append(time.perf_counter() - begun_s)
    synchronize(device)
    step_s = (time.perf_counter() - start_s) / options.steps
    tokens = options.samples * size.config.context
    rate = tokens * size.flops_a_token() / step_s
    peak = peak_flops(torch.device(device), torch.bfloat16)
    found = {"ms": step_s * 1e3, "tokens_s": tokens / step_s, "TFLOPs": rate / 1e12, "MFU": peak and rate / peak}
    found |= {"host_ms": median(queued_s) * 1e3, "loss": loss.item()}
    if device == "cuda":
        found |= {
            "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_GiB": torch.cuda.max_memory_reserved() / 2**30,
            "retries": torch.cuda.memory_stats().get("num_alloc_retries"),
        }
    return found


def steps(options: argparse.Namespace) -> None:
    """Measure steps of one engine."""
    if options.engine == "DeepSpeed" and not is_installed("deepspeed"):
        row("DeepSpeed", detail="not installed")
        return
    start_s = time.perf_counter()
    loop = loop_of(options)
    started_s = time.perf_counter() - start_s
    found = measure(loop, options) | {"start_s": started_s}
    row(options.case or f"{options.engine}, {options.size}", **found, **estimate(options))


def estimate(options: argparse.Namespace) -> dict[str, Any]:
    """Return the peak of `launch estimate`, less CUDA's own share, where it is wanted. Raises: RuntimeError."""
    if not options.estimate:
        return {}
    size, zero = SIZES[options.size], json.loads(options.zero)
    shape = {"--layers": size.config.num_layers, "--hidden": size.config.hidden_size, "--heads": size.config.num_heads}
    run = {"--vocab": size.vocabulary, "--batch": options.samples, "--seq": size.config.context, "--num-gpus": 1}
    words = [str(word) for pair in (shape | run | {"--stage": zero.get("stage", 0)}).items() for word in pair]
    for key, option in (("offload_optimizer", "--offload-optimizer"), ("offload_param", "--offload-param")):
        words += [option, zero[key]["device"]] if key in zero else []
    words += ["--checkpointing"] * options.recompute
    command = [sys.executable, "-m", "launcher", "estimate", str(size.numel), "--precision", "bf16", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"launch estimate failed: {done.stderr[-400:]}")
    of_row = json.loads(done.stdout)["rows"][0]
    expected = of_row["gpu_bytes"] - of_row["parts"]["context"]
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else None
    parts = {name: num_bytes / 2**30 for name, num_bytes in of_row["parts"].items()}
    return {
        "estimate_GiB": expected / 2**30,
        "peak_over_estimate": peak and peak / expected,
        "estimate_of_host_GiB": of_row["host_bytes_per_node"] / 2**30,
        "parts_GiB": parts,
    }


# ---- Profiles ----


def traced(loop: Any, options: argparse.Namespace, num_steps: int, keep: str | None = None) -> dict[str, Any]:
    """Return what a profile of some steps says. keep: where the trace goes, compressed, unless it is too large."""
    from torch.profiler import ProfilerActivity, profile

    batches = batches_of(SIZES[options.size], options.samples, options.device)
    kinds = [ProfilerActivity.CPU] if options.device == "cpu" or keep else []
    kinds += [ProfilerActivity.CUDA] if options.device == "cuda" else []
    with profile(activities=kinds) as profiled:
        for number in range(num_steps):
            loop.step(batches[number % 4])
        synchronize(options.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        if keep:
            with path.open("rb") as source, gzip.open(keep, "wb", 6) as target:
                shutil.copyfileobj(source, target)
            if Path(keep).stat().st_size > MAX_TRACE_BYTES:
                Path(keep).unlink()
        return summary(path, num_steps)


def profile(options: argparse.Namespace) -> None:
    """Say how busy the device is in a step, with what, and what the host waits for."""
    loop = loop_of(options)
    measure(loop, options)
    row(
        f"{options.engine}, {options.size}",
        engine=options.engine,
        **traced(loop, options, options.steps, options.trace),
    )


# ---- Ceilings ----


def ceilings(options: argparse.Namespace) -> None:
    """Measure what nothing can be faster than: copies, products, the bus each way and both, and the CPU's AdamW."""
    from launcher.kernels.select import kernel_for

    is_gpu = options.device == "cuda"
    if is_gpu:
        _ceilings_of_gpu()
    kernel, numel = kernel_for("cpu"), 2**27 if is_gpu else 2**18
    for name in ("bf16, fp32 sums", "bf16, bf16 sums"):
        if kernel is None:
            row("the CPU's AdamW", detail="it was built without a C++ compiler")
            break
        seconds = median_s(adamw_step(kernel, KINDS[name], numel, "cpu"), "cpu", 5)
        rate = numel * KINDS[name].num_bytes / seconds / 1e9
        row(f"{kernel.name}, AdamW, {name}", GBps=rate, elements_s=numel / seconds, threads=torch.get_num_threads())


def _ceilings_of_gpu() -> None:
    from launcher.comm.device import PinnedMemory

    num_bytes = 2**30
    source, target = (torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    row("a copy in the GPU's memory", GBps=copy_rate(num_bytes, "cuda", 20) / 1e9)
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    row("a bf16 product of 8192³", TFLOPs=2 * 8192**3 / median_s(lambda: x @ y, "cuda", 20) / 1e12)
    start_s = time.perf_counter()
    own = torch.empty(0, dtype=torch.uint8).set_(PinnedMemory().empty(num_bytes), 0, (num_bytes,), (1,))
    own_s = time.perf_counter() - start_s
    torchs = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    row(
        "page-locking 1 GiB",
        GBps=num_bytes / own_s / 1e9,
        torch_GBps=num_bytes / (time.perf_counter() - start_s - own_s) / 1e9,
    )
    pageable = torch.ones(num_bytes, dtype=torch.uint8)
    for name, host in (("registered", own), ("torch's page-locked", torchs), ("pageable", pageable)):
        down_s = median_s(partial(target.copy_, host, non_blocking=True), "cuda", 5)
        up_s = median_s(partial(host.copy_, source, non_blocking=True), "cuda", 5)
        row(f"bus, {name} memory", H2D_GBps=num_bytes / down_s / 1e9, D2H_GBps=num_bytes / up_s / 1e9)
    side = torch.cuda.Stream()

    def both_ways() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torchs.copy_(source, non_blocking=True)
        target.copy_(own, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    both_GBps = num_bytes / median_s(both_ways, "cuda", 5) / 1e9
    row("bus, both ways at once", H2D_GBps=both_GBps, D2H_GBps=both_GBps)


# ---- What does not fit ----


def _host_bytes() -> int:
    found = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(found["MemAvailable"].split()[0]) * 1024


def _needed_bytes(size: Size, settings: dict[str, Any]) -> int:
    """Return what an offloaded optimizer, its gradients and parameters take in host memory."""
    if settings.get("bf16", {}).get("bf16_optimizer_states"):
        return size.numel * (2 + 2 + 2 * 2)  # masters, which are the parameters, gradients, states
    sums = 2 if settings.get("data_types", {}).get("grad_accum_dtype") == "bf16" else 4
    return size.numel * (4 + 2 * 4 + sums + 2)


def offload(options: argparse.Namespace) -> None:
    """Measure steps with the optimizer in host memory or on disk, and what of bus and CPU the computing hides."""
    from launcher.kernels.cpu import CpuKernel

    size, settings = SIZES[options.size], json.loads(options.settings)
    needed, available = _needed_bytes(size, settings), _host_bytes()
    case = options.case or f"{options.size}, {options.zero}"
    if "nvme" not in options.zero and needed > 0.9 * available:
        row(case, detail=f"not run: it needs {needed / 1e9:.0f} GB of host memory, {available / 1e9:.0f} are there")
        return
    update, adam_s = CpuKernel.update, [0.0]

    def timed_update(*arguments: Any, **keywords: Any) -> None:
        start_s = time.perf_counter()
        update(*arguments, **keywords)
        adam_s[0] += time.perf_counter() - start_s

    start_s = time.perf_counter()
    loop = loop_of(options, settings)
    started_s = time.perf_counter() - start_s
    with mock.patch.object(CpuKernel, "update", timed_update):
        found = measure(loop, options) | {"start_s": started_s}
    found["adam_ms"] = 1e3 * adam_s[0] / (options.warmup + options.steps)
    if options.device == "cuda":
        of_trace = traced(loop, options, 2)
        keys = ("compute_ms", "bus_ms", "bus_hidden", "H2D_GB", "D2H_GB", "idle_of_compute")
        found |= {key: of_trace.get(key) for key in keys}
        if found["compute_ms"] is not None:  # the profiler has seen the device
            beside = found["bus_ms"] + found["adam_ms"]
            found["overlapped_of_bus_and_adam"] = (found["compute_ms"] + beside - found["ms"]) / max(beside, 1e-9)
    row(case, numel=size.numel, **found, **estimate(options))


def saves(options: argparse.Namespace) -> None:
    """Measure how long a checkpoint keeps the training waiting, and how long it takes."""
    for is_async in (False, True):
        loop = loop_of(options, {"checkpoint": {"async": True}} if is_async else {})
        measure(loop, options)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for number in (1, 2):
                synchronize(options.device)
                start_s = time.perf_counter()
                loop.engine.save_checkpoint(folder, tag=f"save{number}")
                pause_s = time.perf_counter() - start_s
                loop.engine.wait_for_checkpoint()
                whole_s = time.perf_counter() - start_s
                num_bytes = sum(
                    each.stat().st_size for each in Path(folder, f"save{number}").rglob("*") if each.is_file()
                )
                case = f"{options.size}, {'asynchronous' if is_async else 'plain'} save {number}"
                row(case, pause_s=pause_s, whole_s=whole_s, GB=num_bytes / 1e9, GBps=num_bytes / 1e9 / whole_s)
        loop.engine.destroy()


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found, of = commands(__doc__, (ceilings, steps, profile, offload, saves))
    for call, command in of.items():
        command.set_defaults(engine="ours", zero='{"stage": 0}', recompute=False)
        if call is ceilings:
            continue
        command.add_argument("--size", choices=list(SIZES), default="1.3b")
        command.add_argument("--samples", type=int, default=8, help="of a batch; default: %(default)s")
        command.add_argument("--steps", type=int, default=10, help="that are measured; default: %(default)s")
        command.add_argument("--warmup", type=int, default=3, help="steps before these; default: %(default)s")
        command.add_argument("--recompute", action="store_true", help="the blocks' activations")
        if call in (steps, profile):
            command.add_argument("--engine", choices=["ours", "plain", "DDP", "FSDP2", "DeepSpeed"], default="ours")
        if call in (steps, offload):
            command.add_argument("--case", help="the name of the row; default: of engine and size")
            command.add_argument("--zero", default='{"stage": 0}', help="zero_optimization; default: %(default)s")
            command.add_argument("--estimate", action="store_true", help="put the peak beside that of launch estimate")
        if call is profile:
            command.add_argument("--trace", help="file for the trace, .json.gz")
        if call is offload:
            command.add_argument("--settings", default="{}", help="further keys of the config; default: none")
        if call is saves:
            command.add_argument("--folder", help="for the checkpoints; default: one for temporary files")
    return found


if __name__ == "__main__":
    options = parser().parse_args()
    options.call(options)
