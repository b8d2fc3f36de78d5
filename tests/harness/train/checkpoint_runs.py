"""Small trainings that are saved and loaded, and what of their state must be equal afterwards."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import launcher
from launcher.checkpoint.saving.save import Save
from launcher.checkpoint_files.folder import committed_in, latest_tag
from launcher.zero.parameters import unit_params_of

WIDTH, BATCH = 16, 8
FullState = dict[str, dict[str, Any]]  # parameter -> "weight" or state -> flat tensor, or one value


class Net(nn.Module):
    """Blocks in a list, tied weights, a frozen parameter, a buffer, and sizes that no number of ranks divides."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Linear(7, WIDTH, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH + 3), nn.Tanh()) for _ in range(num_blocks))
        self.down = nn.ModuleList(nn.Linear(WIDTH + 3, WIDTH) for _ in range(num_blocks))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7), requires_grad=False)
        self.out = nn.Linear(7, WIDTH, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [batch, 7] -> mean loss, fp32."""
        self.seen += 1
        hidden = self.embed(x)
        for up, down in zip(self.blocks, self.down, strict=True):
            hidden = hidden + self.scale * down(up(hidden))
        return F.mse_loss(hidden @ self.out.weight, y)


def make_net(num_blocks: int = 3) -> Net:
    """Return the same model on every call."""
    torch.manual_seed(4)
    return Net(num_blocks)


def config(world_size: int, stage: int, **more: Any) -> dict[str, Any]:
    """Return an engine config for `BATCH` samples over all ranks. more: top-level keys; `zero`: of its section."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 700, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": BATCH // world_size,
        "steps_per_print": 0,
        "gradient_clipping": 0.5,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_type": "linear"}},
        **more,
    }


def make_engine(world_size: int, stage: int, *, num_blocks: int = 3, **more: Any) -> Any:
    """Return a new engine of `make_net()`."""
    return launcher.initialize(model=make_net(num_blocks), config=config(world_size, stage, **more))[0]


def train(engine: Any, num_steps: int) -> list[float]:
    """Take steps from where the engine is; return the mean losses over all ranks. The data depends on the step only."""
    rank, world_size = engine.global_rank, engine.world_size
    part = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    losses = []
    for _ in range(num_steps):
        generator = torch.Generator().manual_seed(engine.global_steps)
        x = torch.randn(BATCH, 7, generator=generator)
        x, y = x[part].to(dtype_of(engine)), x.roll(1, 1)[part].to(dtype_of(engine))
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        total = loss.detach().double().reshape(1)
        if world_size > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world_size)
    return losses


def dtype_of(engine: Any) -> torch.dtype:
    """Return the type of the model's weights."""
    dtype: torch.dtype = next(engine.module.parameters()).dtype
    return dtype


def own_state(engine: Any) -> Iterator[tuple[str, str, int, Any]]:
    """Yield name, "weight" or state, first element and value of everything that this rank holds."""
    optimizer = engine.optimizer.flat
    for unit in engine._parts.sharded.units:
        with unit.readable():
            for slot, shared in unit.layout.slots_in(unit.owned):
                place = slice(shared.start - unit.owned.start, shared.stop - unit.owned.start)
                yield slot.name, "weight", shared.start - slot.offset, unit.params.master[place].detach().clone()
            for name, pieces in optimizer.states_of_unit(unit.index).items():
                for piece in pieces:
                    for state, value in piece["state"].items():
                        copied = value.detach().cpu().clone() if isinstance(value, Tensor) else value
                        yield name, state, piece["start"], copied
    for name, param in engine.module.named_parameters():
        if unit_params_of(param) is None:
            yield name, "weight", 0, param.detach().clone().reshape(-1)


def full_state(engine: Any) -> FullState:
    """Return the state of all ranks, put together. Collective."""
    shapes = {name: getattr(param, "ds_shape", param.shape) for name, param in engine.module.named_parameters()}
    parts: list[Any] = [None] * engine.world_size
    mine = list(own_state(engine))
    if engine.world_size > 1:
        dist.all_gather_object(parts, mine)
    else:
        parts = [mine]
    full: FullState = {}
    for name, key, start, value in (each for part in parts for each in part):
        if isinstance(value, Tensor) and value.dim() == 1 and value.numel():
            whole = full.setdefault(name, {}).setdefault(key, value.new_zeros(shapes[name].numel()))
            whole[start : start + value.numel()] = value
        else:
            full.setdefault(name, {})[key] = value
    return full


def differences(engine: Any, full: FullState) -> list[str]:
    """Return what of this rank's state is not, bit by bit, what `full_state` returned."""
    found = []
    for name, key, start, value in own_state(engine):
        expected = full.get(name, {}).get(key)
        if isinstance(value, Tensor) and value.dim() == 1 and value.numel() and isinstance(expected, Tensor):
            expected = expected[start : start + value.numel()]
        is_equal = torch.equal(value, expected) if isinstance(value, Tensor) else value == expected
        if not is_equal:
            found.append(f"{key} of {name} from {start}")
    return found


def loads(engine: Any, folder: Path, full: FullState) -> list[str]:
    """Load what `latest` names; return what differs from `full`."""
    path, _ = engine.load_checkpoint(folder)
    return differences(engine, full) if path else ["nothing was loaded"]


def left_over(folder: Path) -> list[str]:
    """Return the names below a folder of checkpoints that belong to none of them."""
    allowed = {folder / "latest", folder / "zero_to_fp32.py"}
    for each in committed_in(folder):
        allowed |= {each.path, each.path / "manifest.json", each.path / "zero_to_fp32.py"}
        allowed |= {each.path / name for name in each.manifest.files}
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path not in allowed)


def is_consistent(folder: Path) -> bool:
    """Whether `latest` is absent or names a checkpoint that is there."""
    tag = latest_tag(folder)
    return tag is None or tag in {each.path.name for each in committed_in(folder)}


@contextlib.contextmanager
def saves_held() -> Iterator[None]:
    """Have an asynchronous save write only once it is waited for: the slowest disk there is."""
    awaited: dict[threading.Thread, threading.Event] = defaultdict(threading.Event)
    write, join = Save.write, threading.Thread.join

    def write_late(save: Save, *arguments: Any) -> Any:
        awaited[threading.current_thread()].wait()
        return write(save, *arguments)

    def release_and_join(thread: threading.Thread, timeout: float | None = None) -> None:
        awaited[thread].set()
        join(thread, timeout)

    with mock.patch.object(Save, "write", write_late), mock.patch.object(threading.Thread, "join", release_and_join):
        try:
            yield
        finally:
            for thread in threading.enumerate():
                awaited[thread].set()
