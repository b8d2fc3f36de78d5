"""Checkpoints of torch.distributed.checkpoint: FSDP2's are loaded here, and ours by FSDP2."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn

import launcher
from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats.dcp.source import DcpSource, boxes
from launcher.checkpoint.formats.open import open_source
from launcher.checkpoint.formats.source import WEIGHT
from launcher.zero.gathered import GatheredParameters

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected pickle protocol"),
]
NUM_STEPS, LR = 3, 1e-2
BATCH, WIDTH = 4, 37  # of each rank


class Model(nn.Module):
    """Shapes that two ranks divide unevenly; a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.head = nn.Linear(WIDTH, 3, bias=False)
            self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.offset
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    weights = [param for name, param in model.named_parameters() if name.endswith("weight")]
    biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
    return [{"params": weights, "weight_decay": 0.1, "lr": LR / 2}, {"params": biases, "weight_decay": 0.0}]


def fsdp(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard  # torch's own takes seconds to import, in every worker of the tests

    model = Model(seed)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(grouped(model), lr=LR)


def fsdp_loss(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> Tensor:
    loss = model(batch(step, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def whole(values: dict[str, Any]) -> dict[str, Any]:
    """Return plain copies of sharded tensors."""
    return {
        key: each.full_tensor().clone() if hasattr(each, "full_tensor") else each.clone()
        for key, each in values.items()
        if isinstance(each, Tensor)
    }


def facts_of_fsdp(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, optimizer)
    return whole(weights), {name: whole(states) for name, states in state["state"].items()}


def engine_of(stage: int, seed: int, **more: Any) -> Any:
    model = Model(seed)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
    }
    return launcher.initialize(model=model, model_parameters=grouped(model), config={**config, **more})[0]


def engine_loss(engine: Any, step: int, rank: int) -> Tensor:
    loss = engine(batch(step, rank))
    engine.backward(loss)
    engine.step()
    return loss.detach()


def facts_of_engine(engine: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return weights, and for each parameter the pieces of states this rank has."""
    with GatheredParameters(list(engine.module.parameters())):
        weights = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    states = copy.deepcopy(engine.optimizer.flat.state_dict()["states"])
    return weights, states


def assert_same_states(pieces: dict[str, Any], expected: dict[str, Any]) -> None:
    assert pieces
    for name, found in pieces.items():
        for piece in found:
            for state in ("exp_avg", "exp_avg_sq"):
                values = expected[name][state].reshape(-1)[piece["start"] : piece["stop"]]
                assert torch.equal(piece["state"][state].reshape(-1), values), f"{state} of {name}"
            assert int(piece["state"]["step"]) == int(expected[name]["step"])


def save_with_fsdp(rank: int, _: int, folder: str, form: str) -> list[Tensor]:
    """Train and save, in the form of scripts or of torchtitan; then load that into the engine, and train both."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model, optimizer = fsdp(seed=1)
    for step in range(NUM_STEPS):
        fsdp_loss(model, optimizer, step, rank)
    flat = StateDictOptions(flatten_optimizer_state_dict=form == "torchtitan")
    weights, state = get_state_dict(model, optimizer, options=flat)
    saved = {**weights} if form == "torchtitan" else {"model": weights}
    saved |= {"optimizer": state, "train_state": {"step": torch.tensor(NUM_STEPS), "text": "words"}}
    dcp.save({"app": saved} if form == "app" else saved, checkpoint_id=folder)
    expected = facts_of_fsdp(model, optimizer)
    engines = []
    for stage in (3, 0):
        engine = engine_of(stage, seed=2 + stage)
        path, client_state = engine.load_checkpoint(folder)
        assert Path(path) == Path(folder)
        train_state = client_state["app"]["train_state"] if form == "app" else client_state["train_state"]
        assert train_state["text"] == "words"
        assert engine.global_steps == NUM_STEPS
        weights, states = facts_of_engine(engine)
        assert weights.keys() == expected[0].keys()
        assert all(torch.equal(value, expected[0][name]) for name, value in weights.items())
        assert_same_states(states, expected[1])
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
        engines.append(engine)
    for step in range(NUM_STEPS, 2 * NUM_STEPS):
        loss = fsdp_loss(model, optimizer, step, rank)
        for engine in engines:
            torch.testing.assert_close(engine_loss(engine, step, rank), loss, rtol=1e-6, atol=1e-6)
    return [loss]


@pytest.mark.parametrize("form", ["script", "app", "torchtitan"])
def test_what_fsdp2_saved_is_loaded_at_any_stage(tmp_path: Path, form: str) -> None:
    run_on_ranks(2, save_with_fsdp, str(tmp_path / "dcp"), form)


def save_with_engine(rank: int, _: int, folder: str) -> tuple[dict[str, Any], dict[str, Any], list[Tensor]]:
    engine = engine_of(3, seed=5)
    for step in range(NUM_STEPS):
        engine_loss(engine, step, rank)
    engine.save_checkpoint(folder)
    weights, states = facts_of_engine(engine)
    return weights, states, [engine_loss(engine, step, rank) for step in range(NUM_STEPS, 2 * NUM_STEPS)]


def load_with_fsdp(rank: int, _: int, folder: str, is_flat: bool) -> tuple[Any, Any, list[Any], list[Tensor]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    model, optimizer = fsdp(seed=6)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    saved = {"model": weights, "optimizer": state}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=options,
    )
    weights, states = facts_of_fsdp(model, optimizer)
    groups = [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups]
    return (
        weights,
        states,
        groups,
        [fsdp_loss(model, optimizer, step, rank) for step in range(NUM_STEPS, 2 * NUM_STEPS)],
    )


@pytest.mark.parametrize("is_flat", [False, True])
def test_what_is_exported_is_loaded_by_fsdp2(tmp_path: Path, is_flat: bool) -> None:
    from launcher.checkpoint.convert.to_dcp import export_checkpoint

    found = run_on_ranks(2, save_with_engine, str(tmp_path / "ours"))
    export_checkpoint(tmp_path / "ours", tmp_path / "dcp")
    loaded = run_on_ranks(2, load_with_fsdp, str(tmp_path / "dcp"), is_flat)
    for (weights, pieces, losses), (theirs, states, groups, their_losses) in zip(found, loaded, strict=True):
        assert weights.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in weights.items())
        assert_same_states(pieces, states)
        assert groups == [(0.1, LR / 2), (0.0, LR)]
        torch.testing.assert_close(torch.stack(their_losses), torch.stack(losses), rtol=1e-6, atol=1e-6)


def test_an_export_replaces_nothing(saved: Path, tmp_path: Path) -> None:
    from launcher.checkpoint.convert.to_dcp import export_checkpoint

    with pytest.raises(CheckpointError, match="there is a checkpoint already"):
        export_checkpoint(saved, saved)
    export_checkpoint(saved, tmp_path / "copy", model_name="")
    ours, copied = open_source(saved), open_source(tmp_path / "copy")
    assert copied.params == ours.params
    assert copied.state.groups[0]["lr"] == ours.state.groups[0]["lr"]


def test_any_range_of_a_tensor_in_boxes_is_read(tmp_path: Path) -> None:
    """Against torch's own slices, of shapes of any number of dimensions."""
    draw = random.Random(3)
    for shape in ((), (9,), (4, 5), (3, 1, 4), (2, 3, 4, 5)):
        values = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
        for _ in range(60):
            stop = draw.randint(0, values.numel())
            start = draw.randint(0, stop)
            parts = [
                values[tuple(slice(low, low + size) for low, size in zip(lows, sizes, strict=True))].reshape(-1)
                for lows, sizes in boxes(shape, start, stop)
            ]
            found = torch.cat([torch.empty(0, dtype=values.dtype), *parts])
            assert torch.equal(found, values.reshape(-1)[start:stop])


# ---- what is not whole, or hostile ----


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of one process."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    folder = tmp_path / "dcp"
    model = Model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(0, 0)).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=True)
    return folder


class Hostile:
    """Its pickle calls a function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_hostile_metadata_file_runs_nothing(saved: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.planner_data = Hostile(tmp_path / "made")
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata.*posix\.mkdir"):
        open_source(saved)
    assert not (tmp_path / "made").exists()


def test_a_hostile_value_runs_nothing(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    saved = {"model": {"weight": torch.ones(3)}, "other": Hostile(tmp_path / "made"), "text": "words"}
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = open_source(tmp_path / "dcp")
    assert source.state.client_state == {"text": "words"}
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", ".metadata"])
def test_a_path_out_of_the_folder_is_refused(saved: Path, name: str) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = name
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is not the name of a file"):
        open_source(saved)


def read_all(folder: Path) -> None:
    source = DcpSource(folder)
    for name, param in source.params.items():
        for key in (WEIGHT, *param.states):
            source.read(key, name, 0, torch.empty(param.numel))


def test_a_missing_or_short_file_is_named(saved: Path) -> None:
    read_all(saved)
    path = saved / "__0_0.distcp"
    content = path.read_bytes()
    path.write_bytes(content[:-1000])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*cut off"):
        read_all(saved)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*missing"):
        read_all(saved)
    (saved / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"neither manifest\.json nor \.metadata"):
        open_source(saved)


def test_damaged_files_are_errors_and_nothing_else(saved: Path) -> None:
    """Bytes are changed at random: each time the checkpoint is read, or refused with an error of ours."""
    draw, num_refused = random.Random(1), 0
    for name in (".metadata", "__0_0.distcp"):
        path = saved / name
        content = path.read_bytes()
        for _ in range(60):
            damaged = bytearray(content)
            for _ in range(draw.choice((1, 4))):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            path.write_bytes(damaged[: draw.choice((len(damaged), draw.randrange(len(damaged))))])
            with contextlib.suppress(CheckpointError):
                read_all(saved)
                continue
            num_refused += 1
        path.write_bytes(content)
    assert num_refused > 40
