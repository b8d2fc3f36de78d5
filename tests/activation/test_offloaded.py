"""Inputs that go to host memory beside the computing, in the model of streams: same bits, and no race."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from harness.train.streams import COMPUTING, HOST, ModelEvent, StreamModel, modelled_streams
from torch import Tensor, nn

from launcher import checkpointing
from launcher.activation import offloaded, saved
from launcher.activation.offloaded import OffloadedInput, OffloadedInputs
from launcher.comm.device import HostDeviceCopier
from launcher.comm.streams import PASSED, Side

WIDTH, LAYERS, SAMPLES = 24, 7, 6
ON_DEVICE = 2  # the last calls, whose inputs do not travel back
IN_CPU = {"checkpoint_in_cpu": True}
CONTIGUOUS = {**IN_CPU, "contiguous_checkpointing": True, "num_checkpoints": 2 * LAYERS}


class Layer(nn.Module):
    """Two inputs; the first one is written in place."""

    def __init__(self, on_call: Callable[[], None]) -> None:
        super().__init__()
        self.linear, self.on_call = nn.Linear(WIDTH, WIDTH), on_call

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self.on_call()
        hidden = self.linear(nn.functional.relu_(x) * scale)
        return nn.functional.dropout(hidden, 0.2) + 0.1


class Net:
    """Layers in a row; `calls` has what the model of streams knew as each of them was computed, or recomputed."""

    def __init__(self, model: StreamModel | None) -> None:
        torch.manual_seed(3)
        self.calls: list[tuple[int, int]] = []
        self._model = model
        self.layers = [Layer(self._note) for _ in range(LAYERS)]
        self.scales = [torch.rand(WIDTH, requires_grad=True) for _ in range(LAYERS)]

    def _note(self) -> None:
        if self._model is not None:
            back = Side.TO_DEVICE.name
            self.calls.append((self._model.time(back), self._model.awaited(COMPUTING, back)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 2
        for layer, scale in zip(self.layers, self.scales, strict=True):
            used = scale * 1  # an input that is no leaf
            hidden = layer(hidden, used) if self._model is None else checkpointing.checkpoint(layer, hidden, used)
        return hidden.square().sum()

    def grads(self) -> list[Tensor]:
        params = [param for layer in self.layers for param in layer.parameters()]
        return [each.grad for each in (*params, *self.scales) if each.grad is not None]


def _batches(num: int) -> list[Tensor]:
    torch.manual_seed(5)
    return [torch.randn(SAMPLES + number, WIDTH) for number in range(num)]


def _train(net: Net, num_steps: int = 2) -> list[Tensor]:
    """Return the gradients of two forwards that go back after the other one, `num_steps` times."""
    torch.manual_seed(7)
    for _ in range(num_steps):
        losses = [net.forward(batch) for batch in _batches(2)]
        for loss in losses:
            loss.backward()
    return net.grads()


@contextlib.contextmanager
def _modelled(said: dict[str, Any]) -> Iterator[StreamModel]:
    with modelled_streams() as model:
        checkpointing.configure(**said)
        with model:
            yield model
        checkpointing.reset()


@pytest.mark.parametrize("said", [IN_CPU, CONTIGUOUS], ids=["", "contiguous"])
def test_gradients_are_those_without_and_nothing_races(said: dict[str, Any]) -> None:
    expected = _train(Net(None))
    with _modelled(said) as model:
        found = _train(Net(model))
    assert model.num_accesses[Side.TO_HOST.name] == 2 * 2 * 2 * LAYERS, "two inputs of each call travel"
    assert len(found) == len(expected) == 3 * LAYERS
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert model.awaited(HOST, Side.TO_HOST.name) == model.awaited(HOST, Side.TO_DEVICE.name) == 0, "the host waits"


def test_inputs_come_back_one_call_ahead() -> None:
    with _modelled(IN_CPU) as model:
        net = Net(model)
        loss = net.forward(_batches(1)[0])
        net.calls.clear()
        loss.backward()
    fetched, awaited = zip(*net.calls, strict=True)
    num_fetched = [max(0, min(number + 2, LAYERS) - ON_DEVICE) for number in range(LAYERS)]
    assert list(fetched) == [2 * number for number in num_fetched]
    assert list(awaited) == [max(0, number - 2) for number in fetched[:-1]] + [2 * (LAYERS - ON_DEVICE)]


def test_host_memory_is_taken_once_and_to_the_page() -> None:
    sizes: list[int] = []
    empty = HostDeviceCopier.empty

    def counted(copier: HostDeviceCopier, numel: int, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
        assert is_pinned
        sizes.append(numel * dtype.itemsize)
        return empty(copier, numel, dtype, is_pinned=is_pinned)

    with mock.patch.object(HostDeviceCopier, "empty", counted), _modelled(IN_CPU) as model:
        _train(Net(model), 3)
        assert sizes == [4096] * 2 * 2 * LAYERS
        rows = saved_rows()
        assert rows._free_bytes == rows._peak_bytes == sum(sizes)
        Net(model).forward(torch.randn(100, WIDTH)).backward()
        assert rows._free_bytes + rows._taken_bytes <= rows._peak_bytes == sum(sizes[: 4 * LAYERS])
        assert sizes[4 * LAYERS :] == [12288] * LAYERS


def saved_rows() -> offloaded.HostRows:
    keeper = checkpointing_module()._keeper
    assert keeper is not None
    return keeper.inputs._host_rows


def checkpointing_module() -> Any:
    from launcher.activation import checkpointing as module

    return module


def test_a_backward_that_ends_halfway_leaves_nothing_that_later_work_meets() -> None:
    with _modelled(IN_CPU) as model:
        _backward_halfway(model)


def _backward_halfway(model: StreamModel) -> None:
    net = Net(model)
    for _ in range(2):
        loss = net.forward(_batches(1)[0])
        with mock.patch.object(net.layers[3], "on_call", side_effect=InterruptedError), pytest.raises(InterruptedError):
            loss.backward()
        del loss
        net.forward(_batches(1)[0]).backward()


def _drops_at_once(inputs: OffloadedInputs) -> None:
    inputs._fetched.clear()


def test_the_model_finds_a_fetch_without_a_wait() -> None:
    with _modelled(IN_CPU) as model, mock.patch.object(OffloadedInputs, "settle", _drops_at_once):
        with pytest.raises(AssertionError) as error:
            _backward_halfway(model)
        assert "TO_DEVICE" in str(error.value)


# ---- each wait is needed, and the model finds that it is missing ----


def _frees_at_once(_: OffloadedInputs, one: OffloadedInput) -> None:
    one.event, one.on_device = PASSED, None


BROKEN: dict[str, tuple[Any, str, Any]] = {
    "events": (ModelEvent, "wait", lambda _: None),
    "before memory is freed or used": (OffloadedInputs, "_free", _frees_at_once),
    "for what is written in place": (saved, "_own_copy", lambda elements: elements),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_model_finds_what_is_missing(name: str) -> None:
    with _modelled(IN_CPU) as model, mock.patch.object(*BROKEN[name]), pytest.raises(AssertionError) as error:
        _train(Net(model))
    assert "TO_HOST" in str(error.value) or "TO_DEVICE" in str(error.value)
