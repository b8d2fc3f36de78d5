"""Hidden states that checkpointed layers get are kept on the host: which ones, and that backward finds them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.compat.offload_activations import CheckpointHiddenStatesOffload, _Kept


@pytest.fixture(scope="module")
def layer() -> Any:
    """A layer that transformers checkpoints. It is imported here: every worker imports this file."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.gradient_checkpointing = True
            self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

        def forward(self, hidden_states: Tensor) -> Tensor:
            return self.linear(hidden_states).sin()

    return Layer()


def test_layers_mark_what_they_checkpoint_within_the_block_alone(layer: Any) -> None:
    kind, x = type(layer).__base__, torch.randn(4, 8, requires_grad=True)
    before = kind.__call__
    layer(x).sum().backward()
    expected, x.grad = x.grad, None
    with CheckpointHiddenStatesOffload(min_offload_bytes=0) as outer:
        with CheckpointHiddenStatesOffload() as inner:
            layer(x)
        layer(x).sum().backward()
    assert kind.__call__ is before
    assert (inner.stats.marked_tensors, outer.stats.marked_tensors) == (1, 1)
    assert outer.stats.skipped_marked_tensors == 1  # it is in host memory already
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


def test_what_left_comes_back() -> None:
    offload, x = CheckpointHiddenStatesOffload(), torch.randn(4, 8).t()
    first, last = (_Kept(tensor, tensor.device) for tensor in (x, x + 1))
    offload._send_out(first)
    assert first.on_device is None
    torch.testing.assert_close(offload._unpack(first), x)
    torch.testing.assert_close(offload._unpack(last), x + 1)
    assert offload.stats.offloaded_bytes == offload.stats.restored_bytes == x.nbytes
    assert offload.stats.kept_last_tensors == 1


def test_a_wrong_use_is_named() -> None:
    with pytest.raises(ValueError, match="keep_last_count is -1"):
        CheckpointHiddenStatesOffload(keep_last_count=-1)
    with CheckpointHiddenStatesOffload() as block, pytest.raises(RuntimeError, match="not re-entrant"), block:
        pass
