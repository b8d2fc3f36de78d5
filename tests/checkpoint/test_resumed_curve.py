"""A run that was saved, ended and resumed in new processes has the losses of one that was never interrupted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train.ranks import RankPool, run_on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import launcher

WORLD_SIZE, WIDTH, SAMPLES = 2, 16, 40
MICRO_BATCH, PARTS = 2, 2  # 8 samples a step, 5 steps an epoch
SAVED_AT, STEPS = 4, 9


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
    """Return the losses of this rank's micro-batches and the weights at the end. kind: of torch's optimizers."""
    torch.manual_seed(100 * resumes + rank)  # a resumed run may be seeded otherwise: its states are the saved ones
    random.seed(resumes)
    net = Net()
    client = getattr(torch.optim, kind)(net.parameters(), lr=1e-2) if kind else None
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
# The scale doubles every other step; from 2**17 steps before the save are skipped, from 2**14 one after it.
FP16 = {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 2, "hysteresis": 1}
# Ranks have stepped by themselves since step 3 when the run is saved, and exchange at its end.
APART = {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 4}
ALL_BF16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
CONFIGS = {
    **{f"stage {stage}": config_of({"stage": stage}) for stage in range(4)},
    **{f"stage {stage} bf16": config_of({"stage": stage}, bf16={"enabled": True}) for stage in (0, 2, 3)},
    **{f"stage {stage} fp16": config_of({"stage": stage}, fp16=FP16) for stage in (1, 3)},
    "fp16 after skipped steps": config_of({"stage": 2}, fp16={**FP16, "initial_scale_power": 17}),
    "cpu offload": config_of({"stage": 2, "offload_optimizer": CPU}, bf16={"enabled": True}),
    "cpu offload of all": config_of({"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}),
    "part of the states offloaded": config_of(
        {"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.5}}, bf16={"enabled": True}
    ),
    "autocast": config_of({"stage": 2}, torch_autocast={"enabled": True, "dtype": "float16"}),
    "all in bf16": config_of({"stage": 2}, bf16=ALL_BF16),
    "LAMB": with_optimizer("Lamb"),
    "Muon": with_optimizer("Muon"),
    "Muon stage 3": with_optimizer("Muon", 3),
    "Lion": with_optimizer("Lion", 1),
    "SGD": with_optimizer("SGD", 3, momentum=0.9),
    "Adagrad": with_optimizer("Adagrad", 2),
    "OneBitAdam in its warm-up": one_bit("OneBitAdam", freeze_step=6),
    "OneBitAdam": one_bit("OneBitAdam", freeze_step=2),
    "OneBitLamb": one_bit("OneBitLamb", freeze_step=2),
    "ZeroOneAdam": one_bit("ZeroOneAdam", var_freeze_step=6, var_update_scaler=1),
    "ZeroOneAdam apart": one_bit("ZeroOneAdam", **APART),
    "ZeroOneAdam apart in bf16": {**one_bit("ZeroOneAdam", **APART), "bf16": {"enabled": True}},
}

SAVED_AND_UNSAVED = ("stage 0", "stage 1 fp16", "stage 2 bf16", "stage 3", "cpu offload", "Muon", "ZeroOneAdam apart")


def take_another_number_of_ranks(rank: int, world_size: int, config: dict[str, Any], folder: str) -> tuple[int, Any]:
    """Return the number of the step that decides the phase, and the weights after the run."""
    torch.manual_seed(0)
    engine, optimizer, loader, _ = launcher.initialize(model=Net(), config=config, training_data=Noisy())
    engine.load_checkpoint(folder)
    assert optimizer is not None
    step = optimizer.flat._num_steps
    for x, y in itertools.islice(batches_of(loader), PARTS * (STEPS - SAVED_AT)):
        engine.backward(engine(x, y))
        engine.step()
    weights = [param.detach().clone() for param in engine.module.parameters()]
    engine.destroy()
    return step, weights


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam", "ZeroOneAdam apart"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_one_bit_optimizers_continue_in_their_phase_on_other_ranks(name: str, world_size: int, tmp_path: Path) -> None:
    run_on_ranks(WORLD_SIZE, train_once, CONFIGS[name], str(tmp_path), False, "")
    # Batch normalisation wants two samples; the last micro-batch of an epoch on three ranks has fewer.
    config = {**CONFIGS[name], "dataloader_drop_last": True}
    results = run_on_ranks(world_size, take_another_number_of_ranks, config, str(tmp_path))
    assert {step for step, _ in results} == {SAVED_AT}
    for _, weights in results:
        assert all(map(torch.equal, weights, results[0][1]))
        assert all(weight.isfinite().all() for weight in weights)


def check(
    config: dict[str, Any], folder: Path, new_processes: RankPool, kind: str = "", *, with_unsaved: bool = False
) -> None:
    """Compare a resumed run with the one that was saved. with_unsaved: and that with one that never was."""
    saved = run_on_ranks(WORLD_SIZE, train_once, config, str(folder), False, kind)
    resumed = new_processes.run(train_once, config, str(folder), True, kind)
    for rank in range(WORLD_SIZE):
        assert len(resumed[rank][0]) == PARTS * (STEPS - SAVED_AT)
        assert resumed[rank][0] == saved[rank][0][PARTS * SAVED_AT :]
        assert all(map(torch.equal, resumed[rank][1], saved[rank][1]))
    if with_unsaved:
        unsaved = run_on_ranks(WORLD_SIZE, train_once, config, None, False, kind)
        assert [losses for losses, _ in unsaved] == [losses for losses, _ in saved]


def train_once(rank: int, world_size: int, config: dict[str, Any], folder: str | None, resumes: bool, kind: str) -> Any:
    return train(rank, world_size, config, folder, resumes=resumes, kind=kind)


# Of stages and precisions each is among the others; all pairs of them in the soak.
IN_SOAK = ("stage 1", "stage 2", "stage 0 bf16", "stage 3 bf16")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name in IN_SOAK else []) for name in CONFIGS]
)
def test_losses_are_those_of_an_uninterrupted_run(name: str, tmp_path: Path, new_processes: RankPool) -> None:
    check(CONFIGS[name], tmp_path / "saved", new_processes, with_unsaved=name in SAVED_AND_UNSAVED)


@pytest.mark.parametrize(
    ("keys", "is_bf16"),
    [
        (("offload_optimizer",), False),
        (("offload_optimizer", "offload_param"), True),
        pytest.param(("offload_optimizer",), True, marks=pytest.mark.soak),
        pytest.param(("offload_optimizer", "offload_param"), False, marks=pytest.mark.soak),
    ],
)
def test_with_states_and_parameters_on_disk(
    keys: tuple[str, ...], is_bf16: bool, tmp_path: Path, new_processes: RankPool
) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path / "swap")}
    (tmp_path / "swap").mkdir()
    config = config_of({"stage": 3, **dict.fromkeys(keys, disk)}, bf16={"enabled": is_bf16})
    check(config, tmp_path / "saved", new_processes, with_unsaved=is_bf16)


@pytest.mark.parametrize(("kind", "stage"), [("RMSprop", 1), ("NAdam", 3), ("Adafactor", 0)])
def test_with_an_optimizer_of_the_script(kind: str, stage: int, tmp_path: Path, new_processes: RankPool) -> None:
    config = config_of({"stage": stage})
    del config["optimizer"]
    check(config, tmp_path / "saved", new_processes, kind)


def test_saved_asynchronously(tmp_path: Path, new_processes: RankPool) -> None:
    check(config_of({"stage": 2}, checkpoint={"async": True}), tmp_path / "saved", new_processes, with_unsaved=True)


@pytest.mark.parametrize("warmup_steps", [0, 2, 6])
def test_with_a_delayed_update(warmup_steps: int, tmp_path: Path, new_processes: RankPool) -> None:
    offload = {**CPU, "delayed_update": True, "delayed_update_warmup_steps": warmup_steps}
    config = config_of({"stage": 2, "offload_optimizer": offload}, bf16={"enabled": True})
    # A save writes the last update back, as a step without delay would: a run that is not saved has other losses.
    check(config, tmp_path / "saved", new_processes)
