"""Stages of one model, run one after the other in this process, and compared with the model in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from launcher.parallel.pipeline.stages import StagedModel


def chain(parts: Sequence[StagedModel], batch: Any) -> Tensor:
    """Run a forward and a backward of all stages as ranks do: what is handed over begins a graph of its own.

    parts: those of all ranks. Returns the loss.
    """
    by_stage = {stage: part for part in parts for stage in part.own_stages}
    sent: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    received: tuple[Tensor, ...] = ()
    outputs: Any = None
    for stage in range(parts[0].num_stages):
        part = by_stage[stage]
        outputs = part(stage, received, batch if part.needs_batch(stage) else None)
        if stage < part.num_stages - 1:
            received = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in outputs)
            sent.append((outputs, received))
    loss = by_stage[parts[0].num_stages - 1].loss(outputs, batch)
    loss.backward()
    for outputs, received in reversed(sent):
        pairs = [(out, got.grad) for out, got in zip(outputs, received, strict=True) if out.requires_grad]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    return loss.detach()


def gradients(parts: Sequence[StagedModel]) -> dict[str, Tensor]:
    """Return the gradients of all parameters by name; those of copies are summed."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, param in part.named_parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            found[name] = found[name] + grad if name in found else grad
    return found


def assert_whole(parts: Sequence[StagedModel], whole: nn.Module) -> None:
    """Check that the gradients of stages are those of the undivided model, which has its own, within 1e-6."""
    found, wanted = gradients(parts), {name: param.grad for name, param in whole.named_parameters()}
    assert found.keys() == wanted.keys() == parts[0].whole_names
    for name, grad in wanted.items():
        torch.testing.assert_close(
            found[name], torch.zeros_like(found[name]) if grad is None else grad, rtol=1e-6, atol=1e-7
        )
    holders = {name: [i for i, part in enumerate(parts) if name in dict(part.named_parameters())] for name in wanted}
    for name, stages in parts[0].tied.items():
        assert holders.pop(name) == [i for i, part in enumerate(parts) if set(stages) & set(part.own_stages)]
    assert all(len(own) == 1 for own in holders.values()), holders
