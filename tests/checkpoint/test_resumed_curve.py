"""A run that was saved, ended and resumed in new processes has the losses of one that was never interrupted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import RankPool, run_on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import launcher

WORLD_SIZE, WIDTH, SAMPLES = 2, 16, 40
MICRO_BATCH, PARTS = 2, 2  # 8 samples a step, 5 steps an epoch
SAVED_AT, STEPS = 3, 8


class Net(nn.Module):
    """With dropout, a buffer that each rank changes by itself, and a parameter that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.dropout(torch.tanh(block(x)), 0.3)
        return F.mse_loss(self.head(self.norm(x)).float().squeeze(-1), y)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from the generators of torch and of Python."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.x, self.y = torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(WIDTH), self.y[index] + 0.1 * random.random()


def config_of(zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": PARTS,
        "steps_per_print": 0,
        "gradient_clipping": 0.5,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 20}},
        **more,
    }


def batches_of(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def train(
    rank: int, world_size: int, config: dict[str, Any], folder: str | None, *, resumes: bool = False, kind: str = ""
) -> tuple[list[str], list[Tensor]]:
    """Return the losses of this rank's micro-batches and the weights at the end."""
    torch.manual_seed(100 * resumes + rank)  # a resumed run may be seeded otherwise: its states are the saved ones
    random.seed(resumes)
    net = Net()
    client = torch.optim.RMSprop(net.parameters(), lr=1e-2, momentum=0.9) if kind == "client" else None
    engine, _, loader, _ = launcher.initialize(model=net, config=config, training_data=Noisy(), optimizer=client)
    client_state: dict[str, Any] = {}
    if resumes:
        assert folder is not None
        path, client_state = engine.load_checkpoint(folder)
        assert path is not None
        assert client_state == {"seen": [SAVED_AT]}
    losses = []
    is_saved = resumes or folder is None
    for batch in itertools.islice(batches_of(loader), PARTS * (STEPS - engine.global_steps)):
        dtype = next(engine.module.parameters()).dtype
        loss = engine(batch[0].to(dtype), batch[1].float())
        losses.append(loss.item().hex())
        engine.backward(loss)
        engine.step()
        if engine.global_steps == SAVED_AT and not is_saved:
            is_saved = engine.save_checkpoint(folder, client_state={"seen": [SAVED_AT]})
    engine.synchronize_parameters()
    weights = [value.clone() for value in engine.state_dict().values()]
    engine.destroy()
    return losses, weights


@pytest.fixture(scope="module")
def new_processes() -> Iterator[RankPool]:
    pool = RankPool(WORLD_SIZE)
    yield pool
    pool.close()


def one_bit(name: str, **params: Any) -> dict[str, Any]:
    return config_of({"stage": 0}, gradient_clipping=0.0, optimizer={"type": name, "params": {"lr": 1e-3, **params}})


def with_optimizer(name: str, stage: int = 2, **params: Any) -> dict[str, Any]:
    return config_of({"stage": stage}, optimizer={"type": name, "params": {"lr": 1e-2, **params}})


CPU = {"device": "cpu"}
FP16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}
CONFIGS = {
    **{f"stage {stage}": config_of({"stage": stage}) for stage in range(4)},
    **{f"stage {stage} bf16": config_of({"stage": stage}, bf16={"enabled": True}) for stage in (0, 2, 3)},
    **{f"stage {stage} fp16": config_of({"stage": stage}, fp16=FP16) for stage in (1, 3)},
    "cpu offload": config_of({"stage": 2, "offload_optimizer": CPU}, bf16={"enabled": True}),
    "cpu offload of all": config_of({"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}),
    "LAMB": with_optimizer("Lamb"),
    "Muon": with_optimizer("Muon"),
    "Muon stage 3": with_optimizer("Muon", 3),
    "Lion": with_optimizer("Lion", 1),
    "SGD": with_optimizer("SGD", 3, momentum=0.9),
    "Adagrad": with_optimizer("Adagrad", 2),
    "OneBitAdam in its warm-up": one_bit("OneBitAdam", freeze_step=5),
    "OneBitAdam": one_bit("OneBitAdam", freeze_step=2),
    "OneBitLamb": one_bit("OneBitLamb", freeze_step=2),
    "ZeroOneAdam": one_bit("ZeroOneAdam", var_freeze_step=4, var_update_scaler=1),
    "ZeroOneAdam apart": one_bit("ZeroOneAdam", var_freeze_step=1, local_step_scaler=1, local_step_clipper=4),
}


def check(
    config: dict[str, Any], folder: Path, new_processes: RankPool, kind: str = "", *, saving_shows: bool = False
) -> None:
    plain = run_on_ranks(WORLD_SIZE, train_once, config, None, False, kind)
    saved = run_on_ranks(WORLD_SIZE, train_once, config, str(folder), False, kind)
    resumed = new_processes.run(train_once, config, str(folder), True, kind)
    for rank in range(WORLD_SIZE):
        assert len(resumed[rank][0]) == PARTS * (STEPS - SAVED_AT)
        assert resumed[rank][0] == saved[rank][0][PARTS * SAVED_AT :]
        assert all(map(torch.equal, resumed[rank][1], saved[rank][1]))
        assert saving_shows or plain[rank][0] == saved[rank][0]


def train_once(rank: int, world_size: int, config: dict[str, Any], folder: str | None, resumes: bool, kind: str) -> Any:
    return train(rank, world_size, config, folder, resumes=resumes, kind=kind)


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_are_those_of_an_uninterrupted_run(name: str, tmp_path: Path, new_processes: RankPool) -> None:
    check(CONFIGS[name], tmp_path / "saved", new_processes)


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("keys", [("offload_optimizer",), ("offload_optimizer", "offload_param")])
def test_with_states_and_parameters_on_disk(
    keys: tuple[str, ...], is_bf16: bool, tmp_path: Path, new_processes: RankPool
) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path / "swap")}
    (tmp_path / "swap").mkdir()
    config = config_of({"stage": 3, **dict.fromkeys(keys, disk)}, bf16={"enabled": is_bf16})
    check(config, tmp_path / "saved", new_processes)


def test_with_an_optimizer_of_the_script(tmp_path: Path, new_processes: RankPool) -> None:
    config = config_of({"stage": 1})
    del config["optimizer"]
    check(config, tmp_path / "saved", new_processes, "client")


def test_saved_asynchronously(tmp_path: Path, new_processes: RankPool) -> None:
    check(config_of({"stage": 2}, checkpoint={"async": True}), tmp_path / "saved", new_processes)


@pytest.mark.parametrize("warmup_steps", [0, 2, 5])
def test_with_a_delayed_update(warmup_steps: int, tmp_path: Path, new_processes: RankPool) -> None:
    offload = {**CPU, "delayed_update": True, "delayed_update_warmup_steps": warmup_steps}
    config = config_of({"stage": 2, "offload_optimizer": offload}, bf16={"enabled": True})
    # A save writes the last update back, as a step without delay would.
    check(config, tmp_path / "saved", new_processes, saving_shows=True)
