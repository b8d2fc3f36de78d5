"""Training with Lightning's Trainer and with Fabric, on the ranks of a job: `main` runs cases one after the other.

Each returns what it has computed, for its test to compare with DDP's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

LEARNING_RATE, MAX_NORM, MICRO_BATCH, FIRST_STEPS = 1e-2, 1.0, 4, 4
NUM_RANKS = 2
Batch = list[Tensor]


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def make_loader() -> DataLoader[Any]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=MICRO_BATCH)


class Regression(lightning.LightningModule):
    """The module of a user's script: the Trainer steps its schedule, and has its layers made in the hook for it."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = make_net()

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = self._loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        self.log("loss", self._loss(batch), sync_dist=True)

    def predict_step(self, batch: Batch, index: int) -> Tensor:
        assert self.net is not None
        predicted: Tensor = self.net(batch[0])
        return predicted

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loss(self, batch: Batch) -> Tensor:
        assert self.net is not None
        return mse_loss(self.net(batch[0]), batch[1])


def _trainer(strategy: str, callbacks: list[Any], **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=MAX_NORM,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        **options,
    )


def with_trainer(folder: Path, strategy: str, accumulation: int = 1, **options: Any) -> dict[str, Any]:
    """Fit, validate, and continue from the checkpoint of a step in the middle; then predict."""
    keeper = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=FIRST_STEPS, save_top_k=-1)
    trainer = _trainer(strategy, [keeper], accumulate_grad_batches=accumulation, **options)
    module = Regression()
    trainer.fit(module, make_loader())
    (validated,) = trainer.validate(module, make_loader(), verbose=False)
    again, continued = _trainer(strategy, [keeper], accumulate_grad_batches=accumulation, **options), Regression()
    again.fit(continued, make_loader(), ckpt_path=folder / f"step={FIRST_STEPS}.ckpt")
    predicted = again.predict(continued, make_loader())
    assert predicted is not None
    return {
        "losses": module.losses,
        "validated": validated["loss"],
        "continued": continued.losses,
        "predicted": torch.cat(predicted).flatten().tolist(),
    }


def with_fabric(folder: Path, strategy: Any) -> dict[str, Any]:
    """Train, save in the middle, and continue with another model from what was saved."""
    fabric = Fabric(accelerator="cpu", devices=NUM_RANKS, strategy=strategy)
    fabric.launch()
    batches = list(fabric.setup_dataloaders(make_loader()))

    def make() -> tuple[Any, Any]:
        with fabric.init_module():
            net = make_net()
        return fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE))

    def train(model: Any, optimizer: Any, of: list[Batch]) -> list[float]:
        losses = []
        for x, y in of:
            loss = mse_loss(model(x), y)
            fabric.backward(loss, model=model)
            if strategy == "ddp":  # the engine clips by its config, whose default is the same norm
                fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = make()
    losses = train(model, optimizer, batches[:FIRST_STEPS])
    fabric.save(folder / "saved", {"model": model, "optimizer": optimizer, "step": FIRST_STEPS})
    losses += train(model, optimizer, batches[FIRST_STEPS:])
    model, optimizer = make()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(folder / "saved", state)
    return {"losses": losses, "step": state["step"], "continued": train(model, optimizer, batches[FIRST_STEPS:])}


CASES: dict[str, Any] = {
    "trainer ddp": lambda folder: with_trainer(folder, "ddp"),
    **{
        f"trainer {name}": lambda folder, name=name: with_trainer(folder, f"deepspeed_stage_{name}")
        for name in ("1", "2", "2_offload", "3", "3_offload")
    },
    "accumulation ddp": lambda folder: with_trainer(folder, "ddp", 2),
    "accumulation 3": lambda folder: with_trainer(folder, "deepspeed_stage_3", 2),
    "fabric ddp": lambda folder: with_fabric(folder, "ddp"),
    "fabric 1": lambda folder: with_fabric(folder, DeepSpeedStrategy(stage=1)),
    "fabric 2": lambda folder: with_fabric(folder, DeepSpeedStrategy(stage=2)),
    "fabric 3": lambda folder: with_fabric(folder, DeepSpeedStrategy(stage=3)),
    "fabric 3_offload": lambda folder: with_fabric(
        folder, DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True)
    ),
}


def main() -> None:
    """Run the cases, on a rank, each with a folder of its own; write what they return."""
    found = {}
    for name in sys.argv[1:]:
        folder = Path.cwd() / name.replace(" ", "_")
        folder.mkdir(exist_ok=True)
        found[name] = CASES[name](folder)
    Path(f"cases_of_rank_{os.environ['RANK']}.json").write_text(json.dumps(found))
