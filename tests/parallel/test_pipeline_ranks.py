"""Stages under torch's schedules on two ranks: every schedule computes what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import split_models
from harness.ranks import run_on_ranks
from harness.split_models import EXAMPLE
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from launcher.config.schema_parallel import Pipeline
from launcher.parallel.pipeline.divide import stage_model
from launcher.parallel.pipeline.schedules import build_schedule
from launcher.parallel.pipeline.stages import StagedModel
from launcher.sharding.pipeline import PipelinePlan

NUM_MICRO_BATCHES = 4
PLANS = [
    PipelinePlan(2, v, schedule, NUM_MICRO_BATCHES)
    for schedule, v in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("zero_bubble", 1),
        ("zero_bubble", 2),
        ("zero_bubble_v", 2),
    )
]


class OneStage(nn.Module):
    """A stage as torch's `PipelineStage` calls it; the last one returns the loss."""

    def __init__(self, staged: StagedModel, stage: int) -> None:
        super().__init__()
        self.staged, self.stage = staged, stage

    def forward(self, *received: Tensor, **batch: Tensor) -> Any:
        outputs = self.staged(self.stage, received, batch)
        is_last = self.stage == self.staged.num_stages - 1
        return self.staged.loss(outputs, batch).reshape(1) if is_last else outputs


def _trained(rank: int, world_size: int) -> list[tuple[float, dict[str, Tensor]]]:
    """Run one step of each plan; return the loss of all micro-batches and this rank's gradients, copies summed."""
    found = []
    for plan in PLANS:
        own = plan.stages_of(rank)
        staged = stage_model(split_models.build(f"{EXAMPLE} of 4"), own, plan.num_stages, Pipeline(partition="uniform"))
        stages = [PipelineStage(OneStage(staged, stage), stage, plan.num_stages, torch.device("cpu")) for stage in own]
        schedule = build_schedule(plan, stages, loss_fn=lambda output, _: output.sum(), scale_grads=False)
        tokens, losses = split_models.tokens(0, 2 * NUM_MICRO_BATCHES), []  # type: ignore[var-annotated]
        is_last = plan.num_stages - 1 in own
        target = {"target": torch.zeros(NUM_MICRO_BATCHES), "losses": losses} if is_last else {}
        schedule.step(tokens=tokens[:, :-1], targets=tokens[:, 1:], **target)
        grads = {name: param.grad for name, param in staged.named_parameters() if param.grad is not None}
        for name, holders in staged.tied.items():
            if len({plan.rank_of(stage) for stage in holders}) > 1:
                dist.all_reduce(grads[name])
        found.append((sum(loss.item() for loss in losses), grads))
    return found


def test_every_schedule_of_torch_computes_what_one_process_does() -> None:
    whole = split_models.build(f"{EXAMPLE} of 4")
    total = 0.0
    for tokens in split_models.tokens(0, 2 * NUM_MICRO_BATCHES).chunk(NUM_MICRO_BATCHES):
        loss = whole(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        total += loss.item()
    wanted = {name: param.grad for name, param in whole.named_parameters()}
    ranks = run_on_ranks(2, _trained)
    for number, plan in enumerate(PLANS):
        results = [found[number] for found in ranks]
        assert sum(loss for loss, _ in results) == pytest.approx(total, rel=1e-6), plan
        assert set().union(*(grads for _, grads in results)) == set(wanted)
        for _, grads in results:
            for name, grad in grads.items():
                torch.testing.assert_close(grad, wanted[name], rtol=1e-5, atol=1e-6, msg=f"{name}, {plan}")
