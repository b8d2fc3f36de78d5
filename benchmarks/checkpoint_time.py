"""How long a checkpoint takes to save and to load: ours, DeepSpeed's, torch.distributed.checkpoint's, beside `dd`.

    launch --num_gpus 2 benchmarks/checkpoint_time.py [--rounds 3] [--sizes 100,500] [--stages 2,3] [--folder DIR]
        [--without DeepSpeed] [--output FILE]

All write the same model with AdamW's states in fp32 to the same disk, in one job, in turns, in another order each
round. `dd` writes as many bytes, with one process a rank, and waits for the disk as we do. Before each save and load
the disk has nothing left to write. Loads are timed with the files in the page cache, and again after the cache was told
to drop them. Rank 0 writes a section of docs/benchmarks.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import Section, argument_parser, is_installed, median, rounds_text, table
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import launcher

WIDTH = 2048
BYTES_A_PARAMETER = 12  # fp32 weight, and the two states of AdamW


class Layers(nn.Module):
    """Square layers, for many parameters and little to compute."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, width] -> scalar."""
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x.square().mean()


def build_model(millions: int) -> Layers:
    """Return a model of about so many million parameters; 0: one that only shows that this script works."""
    torch.manual_seed(0)
    return Layers(max(1, round(millions * 1e6 / WIDTH**2)), WIDTH) if millions else Layers(2, 64)


@dataclass
class Times:
    """Seconds of one turn, the slowest rank's."""

    save: float
    pause: float | None = None  # of the training, where the save runs beside it
    copy: float | None = None  # the part of the pause that copies to host memory
    load: float = 0.0
    cold: float = 0.0
    grown_bytes: int = 0  # of the host memory of a rank, at most, while it saves


# ---- what is measured ----


class Ours:
    """Our engine."""

    def __init__(self, millions: int, stage: int, *, is_async: bool) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 0,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "checkpoint": {"async": is_async},
        }
        model = build_model(millions)
        self.engine = launcher.initialize(model=model, config=config)[0]
        self.width = model.layers[0].in_features
        self.step()
        self.engine.synchronize_parameters()  # that gather is of the step, and no part of a save

    def step(self) -> float:
        loss = self.engine(torch.ones(1, self.width))
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(folder)

    def wait(self) -> None:
        self.engine.wait_for_checkpoint()

    def load(self, folder: Path) -> None:
        assert self.engine.load_checkpoint(folder)[0] is not None

    def end(self) -> None:
        self.engine.destroy()


class DeepSpeeds(Ours):
    """DeepSpeed's engine, with torch's AdamW. Its methods have the names of ours."""

    def __init__(self, millions: int, stage: int) -> None:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        model = build_model(millions)
        self.width = model.layers[0].in_features
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.step()

    def wait(self) -> None:
        """Nothing is left when `save_checkpoint` returns."""


class TorchsDcp:
    """FSDP2 and torch.distributed.checkpoint."""

    def __init__(self, millions: int, stage: int, *, is_async: bool) -> None:
        model = build_model(millions)
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=stage == 3)
        fully_shard(model, reshard_after_forward=stage == 3)
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.width = model.layers[0].in_features
        self.step()
        self.is_async, self._future = is_async, None
        self._group = dist.new_group(backend="gloo") if is_async else None

    def step(self) -> float:
        loss = self.model(torch.ones(1, self.width))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def _state(self) -> dict[str, Any]:
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": states}

    def save(self, folder: Path) -> None:
        if self.is_async:
            self._future = dcp.async_save(self._state(), checkpoint_id=folder, process_group=self._group)
        else:
            dcp.save(self._state(), checkpoint_id=folder)

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None

    def load(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def end(self) -> None:
        del self.model, self.optimizer


CANDIDATES: dict[str, Callable[[int, int], Any]] = {
    "ours": lambda millions, stage: Ours(millions, stage, is_async=False),
    "ours, async": lambda millions, stage: Ours(millions, stage, is_async=True),
    "DCP": lambda millions, stage: TorchsDcp(millions, stage, is_async=False),
    "DCP, async": lambda millions, stage: TorchsDcp(millions, stage, is_async=True),
}
if is_installed("deepspeed"):
    CANDIDATES["DeepSpeed"] = DeepSpeeds


# ---- measuring ----


def slowest(seconds: float) -> float:
    """Return the largest value of any rank. Collective."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


def timed(call: Callable[[], None]) -> float:
    """Return the seconds a call takes on the slowest rank. Collective."""
    dist.barrier()
    start_s = time.perf_counter()
    call()
    return slowest(time.perf_counter() - start_s)


class Growth:
    """Notes by how much the host memory of this process grows within a block, at most."""

    def __enter__(self) -> Growth:
        self._before = _status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        return self

    def __exit__(self, *_: object) -> None:
        self.grown_bytes = _status_bytes("VmHWM") - self._before


def _status_bytes(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


@contextlib.contextmanager
def copies_timed(engine: Any) -> Iterator[list[float]]:
    """Note how long our copies to host memory take within this block."""
    saver, found = engine._checkpoints._saver.room, []
    real = saver.copy

    def copy(*arguments: Any) -> Any:
        start_s = time.perf_counter()
        copies = real(*arguments)
        found.append(time.perf_counter() - start_s)
        return copies

    saver.copy = copy
    try:
        yield found
    finally:
        del saver.copy


def drop_from_cache(folder: Path) -> None:
    """Have the page cache drop the files below a folder, all of which are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def settle(folder: Path) -> None:
    """Have the disk write what it has not yet, before something is timed."""
    dist.barrier()
    if dist.get_rank() == 0:
        subprocess.run(["sync", "-f", str(folder)], check=True)
    dist.barrier()


def one_turn(candidate: Any, folder: Path, *, is_async: bool) -> Times:
    """Save and load once. An asynchronous save is the second: the first makes the memory of its copies."""
    times = Times(0.0)
    if is_async:
        candidate.save(folder / "first")
        candidate.wait()
    settle(folder)
    own = getattr(candidate, "engine", None) if isinstance(candidate, Ours) and is_async else None
    with Growth() as growth, copies_timed(own) if own is not None else contextlib.nullcontext([]) as copies:
        start_s = time.perf_counter()
        pause_s = timed(lambda: candidate.save(folder / "saved"))
        candidate.wait()
        times.save = slowest(time.perf_counter() - start_s)
    times.grown_bytes = int(slowest(float(growth.grown_bytes)))
    if is_async:
        times.pause = pause_s
        times.copy = slowest(copies[0]) if copies else None
    settle(folder)
    times.load = timed(lambda: candidate.load(folder / "saved"))
    drop_from_cache(folder)
    times.cold = timed(lambda: candidate.load(folder / "saved"))
    return times


def dd(folder: Path, num_bytes: int) -> Times:
    """Write as many bytes, one process a rank."""
    settle(folder)
    blocks = max(1, num_bytes // dist.get_world_size() // 2**20)
    path = folder / f"dd-{dist.get_rank()}"
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={blocks}", "conv=fsync", "status=none"]
    return Times(timed(lambda: subprocess.run(command, check=True) and None))


@dataclass
class Table:
    """The samples of one model at one stage."""

    num_bytes: int
    samples: dict[str, list[Times]] = field(default_factory=lambda: defaultdict(list))

    def text(self) -> str:
        """Return it as Markdown."""
        rows = [self._row(name) for name in ("dd", *CANDIDATES) if name in self.samples]
        columns = ["", "save", "GB/s", "of `dd`", "pause", "of it copies", "load", "load, cold", "memory grows by"]
        return table(columns, rows)

    def _row(self, name: str) -> list[str]:
        def middle(key: str) -> float | None:
            values = [getattr(times, key) for times in self.samples[name]]
            return None if None in values else median(values)

        save_s, base_s = middle("save"), median([times.save for times in self.samples["dd"]])
        assert save_s is not None
        row = [name, f"{save_s:.2f} s", f"{self.num_bytes / save_s / 1e9:.2f}", f"{base_s / save_s:.2f}"]
        if name == "dd":
            return row
        for key in ("pause", "copy", "load", "cold"):
            value = middle(key)
            row.append("" if value is None else f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.0f} ms")
        return [*row, f"{(middle('grown_bytes') or 0) / 2**20:.0f} MiB"]


def measure(millions: int, stage: int, rounds: int, folder: Path) -> Table:
    """Measure one model at one stage."""
    num_params = sum(param.numel() for param in build_model(millions).parameters())
    found = Table(num_params * BYTES_A_PARAMETER)
    for number in range(rounds):
        names = ["dd", *CANDIDATES]
        for name in names if number % 2 == 0 else reversed(names):
            place = folder / name.replace(", ", "-")
            if dist.get_rank() == 0:
                place.mkdir(parents=True)
            dist.barrier()
            if name == "dd":
                found.samples[name].append(dd(place, found.num_bytes))
            else:
                candidate = CANDIDATES[name](millions, stage)
                found.samples[name].append(one_turn(candidate, place, is_async="async" in name))
                candidate.end()
                del candidate
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)  # the next one needs the memory
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(place)
    return found


def main() -> None:
    """Measure, and write the section on rank 0."""
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--sizes", default="100,500", help="millions of parameters; 0: only to try this script")
    parser.add_argument("--stages", default="2,3")
    parser.add_argument("--without", help="leave a candidate out, by name")
    parser.add_argument("--folder", type=Path, help="on the disk to write to; default: a temporary folder")
    options = parser.parse_args()
    CANDIDATES.pop(options.without, None)
    launcher.init_distributed()
    torch.set_num_threads(1)
    page = Section(f"Time of checkpoints: {options.sizes} M parameters", "torch", "deepspeed")
    places: list[Any] = [tempfile.mkdtemp(dir=options.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(places)
    parts = []
    try:
        for millions in map(int, options.sizes.split(",")):
            for stage in map(int, options.stages.split(",")):
                found = measure(millions, stage, options.rounds, Path(places[0]))
                title = f"### {millions} M parameters, stage {stage}: {found.num_bytes / 1e9:.2f} GB"
                parts.append(f"{title}\n\n{found.text()}")
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(places[0], ignore_errors=True)
    if dist.get_rank() == 0:
        intro = (
            f"{dist.get_world_size()} ranks; fp32 weights and AdamW's two states. `dd` writes the same bytes with"
            " `conv=fsync`, one process\na rank. Of an asynchronous save: the pause of the training, what of it copies"
            " to host memory, and the time until the\ncheckpoint is there; it is the second save of a run, whose copies"
            " have their memory. DeepSpeed does not wait for the disk.\nLoads read from the page cache, and cold from"
            " the disk."
        )
        if options.without:
            intro += f"\nWithout {options.without}: two ranks that load it need more than the 24 GiB of this machine."
        page.write(rounds_text(options.rounds), "\n\n".join([intro, *parts]), options.output)
    dist.barrier()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
