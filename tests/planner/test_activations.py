"""Bytes of activations: the published formula, and what autograd really keeps of a GPT."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.launch.command import ROOT
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.planner.memory import Workload, activation_bytes, layer_bytes
from launcher.planner.model import TransformerShape

sys.path.append(str(ROOT / "examples"))
from train_gpt import GPT, VOCABULARY_SIZE, GPTConfig

GPT3 = TransformerShape(num_layers=96, hidden_size=12288, num_heads=96)


@pytest.mark.parametrize(("batch", "length"), [(1, 2048), (4, 512)])
def test_the_published_formula(batch: int, length: int) -> None:
    """Korthikanti et al. 2022, equation 1: s·b·h·(34 + 5·a·s/h) bytes of a 16-bit block."""
    h, a = GPT3.hidden_size, GPT3.num_heads
    expected = length * batch * (34 * h + 5 * a * length)
    assert layer_bytes(GPT3, Workload(batch, length, is_eager=True, has_dropout=True), 2) == expected


def test_checkpointing_keeps_the_inputs_of_blocks_and_one_block() -> None:
    work = Workload(1, 2048, is_checkpointed=True)
    inputs = 96 * 2048 * 12288 * 2
    assert activation_bytes(GPT3, work, 2) == inputs + layer_bytes(GPT3, work, 2)


def test_ranks_of_one_sequence_divide_all_of_it() -> None:
    whole = Workload(2, 2048, is_eager=True, has_dropout=True)
    part = replace(whole, num_sequence_ranks=4)
    assert activation_bytes(GPT3, part, 2) * 4 == activation_bytes(GPT3, whole, 2)


def test_fewer_key_heads_and_a_gate_change_a_block() -> None:
    plain = TransformerShape(1, 1024, 8, ffn_size=4096)
    work = Workload(1, 1, is_eager=True)
    grouped = TransformerShape(1, 1024, 8, ffn_size=4096, num_kv_heads=2)
    assert layer_bytes(plain, work, 2) - layer_bytes(grouped, work, 2) == 2 * 2 * (1024 - 256)
    gated = TransformerShape(1, 1024, 8, ffn_size=4096, is_gated=True)
    assert layer_bytes(gated, work, 2) - layer_bytes(plain, work, 2) == 2 * 2 * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layers", "hidden", "heads", "length"), [(2, 128, 4, 256), (6, 256, 8, 128)])
def test_it_is_what_autograd_keeps(layers: int, hidden: int, heads: int, length: int, dtype: torch.dtype) -> None:
    model = GPT(GPTConfig(layers, hidden, heads, length)).to(dtype)
    kept = _saved_bytes(model, torch.zeros(3, length, dtype=torch.int64))
    shape = TransformerShape(layers, hidden, heads, vocab_size=VOCABULARY_SIZE)
    block = layer_bytes(shape, Workload(3, length), dtype.itemsize)
    # Beside the blocks: the last norm's input and output, and the log-softmax.
    beside = 3 * length * (2 * hidden * dtype.itemsize + VOCABULARY_SIZE * 4)
    assert layers * block + beside == pytest.approx(kept, rel=0.01)


def _saved_bytes(model: nn.Module, tokens: torch.Tensor) -> int:
    """Return the bytes that backward of one forward needs, parameters left out."""
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, torch.Tensor] = {}  # they are held: storage that is freed would be counted again elsewhere

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own:
            kept[pointer] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, tokens)
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss.detach_()
    return found


class _LiveBytes(TorchDispatchMode):
    """The bytes of tensors that are alive, and the most there were at once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._own = {param.untyped_storage().data_ptr() for param in model.parameters()}  # which are left out
        self.now, self.peak = 0, 0
        self._num_tensors: Counter[int] = Counter()  # of each storage

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            storage = tensor.untyped_storage()
            pointer, num_bytes = storage.data_ptr(), storage.nbytes()
            if pointer in self._own:
                continue
            self.now += 0 if self._num_tensors[pointer] else num_bytes
            self._num_tensors[pointer] += 1
            weakref.finalize(tensor, self._free, pointer, num_bytes)
        self.peak = max(self.peak, self.now)
        return found

    def _free(self, pointer: int, num_bytes: int) -> None:
        self._num_tensors[pointer] -= 1
        self.now -= 0 if self._num_tensors[pointer] else num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layers", "hidden", "heads"), [(2, 128, 4), (6, 256, 8), (2, 16, 2)])
def test_it_is_what_a_forward_without_gradients_needs(layers: int, hidden: int, heads: int, dtype: torch.dtype) -> None:
    model, length = GPT(GPTConfig(layers, hidden, heads, 256)).to(dtype), 256
    with torch.no_grad(), _LiveBytes(model) as live:
        model(torch.zeros(3, length, dtype=torch.int64))
    shape = TransformerShape(layers, hidden, heads, vocab_size=VOCABULARY_SIZE)
    keys_and_values = 3 * length * layers * 2 * hidden * dtype.itemsize  # of which this model keeps none
    planned = activation_bytes(shape, Workload(3, length, is_inference=True), dtype.itemsize) - keys_and_values
    assert live.peak <= planned + 4 * 8 * 3 * length  # tokens and positions
    assert planned <= 1.15 * live.peak
