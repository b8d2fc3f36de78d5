"""`launcher.checkpointing` on one process: the same results, less kept, and what each setting does."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from harness.logs import logged
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from launcher import checkpointing
from launcher.activation import checkpointing as module
from launcher.activation import settings
from launcher.activation.rng import CudaRNGStatesTracker
from launcher.activation.saved import _Kept
from launcher.base.errors import EngineError

WIDTH, LAYERS, SAMPLES = 32, 4, 16
INPUT_BYTES = SAMPLES * WIDTH * 4


class Model(nn.Module):
    """Layers with dropout; `recompute` is what calls them."""

    def __init__(self, recompute: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.recompute = recompute
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.3), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.recompute(layer, x)
        return x.square().mean()


def run(recompute: Any, x: Tensor | None = None) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Return the loss, the gradients of the parameters, and that of the input."""
    model = Model(recompute)
    torch.manual_seed(2)
    x = torch.randn(SAMPLES, WIDTH, requires_grad=True) if x is None else x
    loss = model(x)
    loss.backward()
    return loss, [param.grad for param in model.parameters() if param.grad is not None], x.grad


def plainly(function: Any, *args: Any) -> Any:
    return function(*args)


def assert_equal_to_plain(x: Tensor | None = None) -> None:
    loss, grads, x_grad = run(plainly, x)
    if x is not None and x.grad is not None:
        x_grad, x.grad = x.grad.clone(), None
    again = run(checkpointing.checkpoint, x)
    assert torch.equal(again[0], loss)
    assert len(again[1]) == len(grads)
    assert all(torch.equal(one, other) for one, other in zip(again[1], grads, strict=True))
    assert x_grad is None or torch.equal(again[2], x_grad)


def kept_elements() -> list[Tensor]:
    """Return what is kept of all inputs that are kept in another form than their own."""
    return [item.elements for item in gc.get_objects() if type(item) is _Kept]


def kept_bytes() -> int:
    return sum(elements.nbytes for elements in kept_elements())


CONTIGUOUS = {"contiguous_checkpointing": True, "num_checkpoints": LAYERS}


@pytest.mark.parametrize("said", [{}, CONTIGUOUS, {"synchronize": True, "profile": True}, {"checkpoint_in_cpu": True}])
def test_loss_and_gradients_are_those_without(said: dict[str, Any]) -> None:
    checkpointing.configure(None, **said)
    for _ in range(2):  # buffers are used again
        assert_equal_to_plain()


def test_inputs_that_require_no_gradient_and_other_layouts() -> None:
    checkpointing.configure(**CONTIGUOUS)
    assert_equal_to_plain(torch.randn(SAMPLES, WIDTH))
    assert_equal_to_plain(torch.randn(WIDTH, SAMPLES).t().requires_grad_())
    assert_equal_to_plain(torch.randn(SAMPLES, 2 * WIDTH)[:, ::2].requires_grad_())


def test_only_the_inputs_are_kept() -> None:
    def saved_bytes(recompute: Any) -> int:
        model, saved = Model(recompute), 0
        own = {param.data_ptr() for param in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            nonlocal saved
            saved += 0 if tensor.data_ptr() in own else tensor.nbytes
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(SAMPLES, WIDTH, requires_grad=True))
        return saved

    square = INPUT_BYTES  # the mean of squares saves its input
    assert saved_bytes(checkpointing.checkpoint) == LAYERS * INPUT_BYTES + square
    assert saved_bytes(plainly) > 8 * LAYERS * INPUT_BYTES


def test_other_arguments_several_outputs_and_no_grad() -> None:
    def function(x: Tensor, scale: float, index: Tensor, nothing: None) -> tuple[Tensor, Tensor, str]:
        return torch.tanh(x * scale), x[index], "text"

    checkpointing.configure(contiguous_checkpointing=True, num_checkpoints=1)
    x = torch.randn(5, 3, requires_grad=True)
    first, second, text = checkpointing.checkpoint(function, x, 2.0, torch.tensor([0, 2]), None)
    (first.sum() + second.sum()).backward()
    grad, x.grad = x.grad, None
    (torch.tanh(x * 2.0).sum() + x[[0, 2]].sum()).backward()
    assert text == "text"
    assert torch.equal(grad, x.grad)
    with torch.no_grad():
        assert not checkpointing.checkpoint(torch.tanh, x).requires_grad
        assert kept_bytes() == 0


def test_parameters_among_the_inputs_are_not_copied() -> None:
    checkpointing.configure(contiguous_checkpointing=True, num_checkpoints=1)
    weight, x = nn.Parameter(torch.randn(3, 3)), torch.randn(2, 3)
    loss = checkpointing.checkpoint(lambda x, weight: torch.tanh(x @ weight), x, weight).sum()
    assert kept_bytes() == x.nbytes
    loss.backward()
    assert weight.grad is not None


def test_contiguous_buffers_are_used_again_and_given_back() -> None:
    checkpointing.configure(**CONTIGUOUS)
    model = Model(checkpointing.checkpoint)
    loss = model(torch.randn(SAMPLES, WIDTH))
    rows = kept_elements()
    assert kept_bytes() == LAYERS * INPUT_BYTES
    assert len({row.untyped_storage().data_ptr() for row in rows}) == 1
    assert len({row.data_ptr() for row in rows}) == LAYERS
    storage = rows[0].untyped_storage().data_ptr()
    del rows
    with pytest.raises(EngineError, match=f"number_checkpoints is {LAYERS}, and one more input of 512 elements"):
        model(torch.randn(SAMPLES, WIDTH))
    loss.backward()
    assert kept_bytes() == 0
    loss = model(torch.randn(SAMPLES, WIDTH))
    assert kept_elements()[0].untyped_storage().data_ptr() == storage
    checkpointing.reset()  # a forward without a backward
    model(torch.randn(SAMPLES, WIDTH)).backward()
    loss.backward()


def test_a_checkpoint_within_a_checkpoint_keeps_nothing_of_its_own() -> None:
    def outer(function: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpointing.checkpoint(function, x)
        return x

    checkpointing.configure(**CONTIGUOUS)
    loss, grads, _ = run(lambda function, x: checkpointing.checkpoint(outer, function, x))
    expected, expected_grads, _ = run(lambda function, x: function(function(function(x))))
    assert torch.equal(loss, expected)
    assert all(torch.equal(one, other) for one, other in zip(grads, expected_grads, strict=True))


def test_contiguous_buffers_need_their_number() -> None:
    checkpointing.configure(contiguous_checkpointing=True)
    with pytest.raises(EngineError, match="needs number_checkpoints; give"):
        checkpointing.checkpoint(torch.tanh, torch.ones(1, requires_grad=True))


# ---- where settings come from ----


def test_what_a_call_says_counts_more_than_what_a_config_says() -> None:
    assert not checkpointing.is_configured()
    section = {"cpu_checkpointing": True, "number_checkpoints": 7, "profile": True}
    checkpointing.configure(None, {"activation_checkpointing": section}, num_checkpoints=3)
    assert checkpointing.is_configured()
    checkpointing.configure(profile=False)
    found = settings.settings_in_force()
    assert (found.checkpoint_in_cpu, found.num_checkpoints, found.profile) == (True, 3, False)


def test_an_engine_applies_its_section() -> None:
    import launcher

    config = {"train_batch_size": 1, "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 5}}
    checkpointing.configure(num_checkpoints=2)
    launcher.initialize(model=nn.Linear(1, 1), config=config)
    found = settings.settings_in_force()
    assert (found.checkpoint_in_cpu, found.num_checkpoints) == (True, 2)
    launcher.initialize(model=nn.Linear(1, 1), config={"train_batch_size": 1})
    assert settings.settings_in_force() == found


def test_settings_without_effect_are_named() -> None:
    said: dict[str, Any] = {"partition_activations": True, "num_checkpoints": 2}
    if not torch.cuda.is_available():
        said |= {"checkpoint_in_cpu": True, "synchronize": True}
    checkpointing.configure(**said)
    with logged() as lines:
        run(checkpointing.checkpoint)
    assert sum("has no effect" in line for line in lines) == len(said)


def test_an_mpu_without_a_group_is_refused() -> None:
    with pytest.raises(EngineError, match="the mpu, a object, does not name its model-parallel group"):
        checkpointing.configure(object())


def test_times_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 2)
    checkpointing.configure(profile=True)
    with logged() as lines:
        for _ in range(5):
            run(checkpointing.checkpoint)
    assert len(lines) == 2
    assert re.fullmatch(r"activation checkpoints: 4 × forward .* ms · 4 × recompute .* ms \(means of 2\)", lines[0])


# ---- random states ----


def test_named_random_states_go_on_and_are_found_again() -> None:
    checkpointing.model_parallel_cuda_manual_seed(11)
    tracker = checkpointing.get_cuda_rng_tracker()

    def draw(x: Tensor) -> Tensor:
        with tracker.fork():
            mask = torch.rand(x.shape, device=x.device)
        seen.append(mask)
        return torch.sin(x * mask)

    seen: list[Tensor] = []
    x = torch.ones(4, requires_grad=True)
    out = checkpointing.checkpoint(draw, checkpointing.checkpoint(draw, x))
    after = tracker.get_states()
    out.sum().backward()
    first, second, *again = seen
    assert not torch.equal(first, second)
    assert torch.equal(again[0], second)
    assert torch.equal(again[1], first)
    assert torch.equal(tracker.get_states()["model-parallel-rng"], after["model-parallel-rng"])
    before = torch.random.get_rng_state()
    with tracker.fork():
        torch.rand(3)
    if not torch.cuda.is_available():
        assert torch.equal(torch.random.get_rng_state(), before)


def test_random_states_are_named_once() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("own", 1)
    with pytest.raises(EngineError, match="the random state own exists already"):
        tracker.add("own", 2)
    with pytest.raises(EngineError, match="the random seed 1 exists already"):
        tracker.add("other", 1)
    with pytest.raises(EngineError, match="there is no random state none"), tracker.fork("none"):
        pass
    states = tracker.get_states()
    tracker.reset()
    tracker.set_states(states)
    with tracker.fork("own"):
        pass


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("said", [{}, CONTIGUOUS])
def test_inputs_go_to_page_locked_host_memory(said: dict[str, Any]) -> None:
    checkpointing.configure(checkpoint_in_cpu=True, **said)
    model = Model(checkpointing.checkpoint).cuda()
    torch.manual_seed(3)
    loss = model(torch.randn(SAMPLES, WIDTH, device="cuda"))
    kept = kept_elements()
    assert len(kept) == LAYERS
    assert all(elements.is_pinned() for elements in kept)
    loss.backward()
    plain = Model(plainly).cuda()
    torch.manual_seed(3)
    plain(torch.randn(SAMPLES, WIDTH, device="cuda")).backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad)
