"""Pipelines in the engine: every schedule and mesh trains as one process does, and saves what any other mesh loads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.logs import logged
from harness.needs import need
from harness.train import decoder, split_models
from harness.train.collective import communicators
from harness.train.decoder import LENGTH, PARITY_STEPS, VOCABULARY, WIDTH, Block, Decoder
from harness.train.parity import weight_distance
from harness.train.ranks import run_on_ranks
from harness.train.streams import ModelStreams, modelled_streams, reference_kernels
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import launcher
from launcher.base.errors import CheckpointError, EngineError
from launcher.base.timeouts import Timeouts
from launcher.checkpoint import exchange
from launcher.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from launcher.comm.streams import Side
from launcher.engine.backward import BackwardPass
from launcher.engine.last_step import LastStep
from launcher.parallel.pipeline.links import Receiving
from launcher.parallel.pipeline.runtime import PipelineRuntime

MICRO, BATCH = 4, 8  # micro-batches of one pipeline, samples of all
SAVED, CONTINUED = 2, 2  # steps before and after a checkpoint; a state that is not the saved one shows in the second
NUM_BLOCKS = 4


def make_decoder(*, is_tied: bool = False) -> Decoder:
    torch.manual_seed(7)
    model = Decoder(NUM_BLOCKS)
    if is_tied:
        model.lm_head.weight = model.embed_tokens.weight
    return model


def batch_of(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


@functools.cache
def reference(num_steps: int, is_tied: bool = False) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train with torch alone; losses, norms and weights."""
    return decoder.reference(num_steps, functools.partial(make_decoder, is_tied=is_tied), batch_of)


def config_of(pipeline: dict[str, Any], world_size: int, stage: int = 0, **more: Any) -> dict[str, Any]:
    tensor = more.get("tensor_parallel", {}).get("autotp_size", 1)
    data = world_size // pipeline.get("stages", 1) // tensor
    config = decoder.config(stage, data, pipeline=pipeline, **more)
    return {**config, "train_micro_batch_size_per_gpu": BATCH // MICRO // data, "gradient_accumulation_steps": MICRO}


def own_micro_batches(engine: Any, step: int) -> Iterator[Tensor]:
    """Yield this rank's micro-batches of a step."""
    share = BATCH // engine.dp_world_size
    rank = engine.get_data_parallel_rank()
    return iter(batch_of(step)[rank * share : (rank + 1) * share].split(share // MICRO))


def train(engine: Any, num_steps: int) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for _ in range(num_steps):
        if hasattr(engine, "train_batch"):
            losses.append(engine.train_batch(own_micro_batches(engine, engine.global_steps)).item())
        else:
            losses.append(_step_without_pipeline(engine))
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def _step_without_pipeline(engine: Any) -> float:
    total = torch.zeros((), dtype=torch.float64)
    for micro_batch in own_micro_batches(engine, engine.global_steps):
        loss = engine(micro_batch)
        engine.backward(loss)
        engine.step()
        total += loss.detach().double() / MICRO
    torch.distributed.all_reduce(total)
    return total.item() / engine.world_size


def _trained(rank: int, world_size: int, config: dict[str, Any], num_steps: int, is_tied: bool) -> Any:
    engine = launcher.initialize(model=make_decoder(is_tied=is_tied), config=config)[0]
    losses, norms = train(engine, num_steps)
    weights = engine.state_dict()
    engine.destroy()
    return losses, norms, weights


def check_parity(world_size: int, config: dict[str, Any], num_steps: int, is_tied: bool = True) -> None:
    losses, norms, weights = reference(num_steps, is_tied)
    found = run_on_ranks(world_size, _trained, config, num_steps, is_tied)
    for found_losses, found_norms, found_weights in found:
        assert found_losses == pytest.approx(losses, rel=1e-6)
        assert found_norms == pytest.approx(norms, rel=1e-4)
        assert found_norms == found[0][1], "ranks clip alike, to the bit"
        assert weight_distance(found_weights, weights) <= 1e-4


SCHEDULES = {
    "gpipe": {"stages": 2, "schedule": "gpipe"},
    "1f1b": {"stages": 2, "schedule": "1f1b"},
    "interleaved": {"stages": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    "zero bubble": {"stages": 2, "schedule": "zero_bubble"},
    "zero bubble, interleaved": {"stages": 2, "schedule": "zero_bubble", "virtual_stages": 2},
    "zero bubble, V": {"stages": 2, "schedule": "zero_bubble_v", "virtual_stages": 2},
}


@pytest.mark.parametrize("num_steps", PARITY_STEPS)
@pytest.mark.parametrize(("name", "is_tied"), [("1f1b", False), *((name, True) for name in SCHEDULES)])
def test_every_schedule_trains_as_one_process_does(name: str, is_tied: bool, num_steps: int) -> None:
    check_parity(2, config_of(SCHEDULES[name], 2), num_steps, is_tied)


OFFLOADED = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
TENSOR = {"tensor_parallel": {"autotp_size": 2}}


@pytest.mark.parametrize("num_steps", PARITY_STEPS)
@pytest.mark.parametrize(
    ("world_size", "pipeline", "stage", "more"),
    [
        (4, {"stages": 4}, 0, {}),
        (4, {"stages": 2}, 1, {}),
        (4, SCHEDULES["interleaved"], 1, {"zero_optimization": OFFLOADED}),
        (4, {"stages": 2}, 0, TENSOR),
        (8, {"stages": 2}, 1, TENSOR),
    ],
    ids=["pipeline 4", "data 2", "data 2, offloaded", "tensor 2", "data 2 x tensor 2"],
)
def test_every_mesh_trains_as_one_process_does(
    world_size: int, pipeline: dict[str, Any], stage: int, more: dict[str, Any], num_steps: int
) -> None:
    check_parity(world_size, config_of(pipeline, world_size, stage, **more), num_steps)


# ---- models of transformers whose stages are split ----


def _split_stages(rank: int, world_size: int, name: str, tensor_parallel: dict[str, Any]) -> Any:
    sizes = {"train_micro_batch_size_per_gpu": split_models.SAMPLES, "gradient_clipping": 0.0}
    optimizer = {"type": "SGD", "params": {"lr": split_models.LR}}
    parallel = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2, **tensor_parallel}}
    try:
        engine = launcher.initialize(
            model=split_models.build(name), config={**sizes, **parallel, "optimizer": optimizer}
        )[0]
    except EngineError as error:
        return str(error)
    batches = [split_models.tokens(step) for step in range(3)]
    losses = [engine.train_batch(iter([{"input_ids": batch, "labels": batch}])).item() for batch in batches]
    return losses, engine.state_dict()


@pytest.mark.parametrize("name", ["gemma3", "bert"])
def test_an_embedding_is_split_alike_on_the_stages_that_share_it(name: str) -> None:
    """Its class, or the name of the head, tells nothing: the model itself does."""
    if not split_models.has(name):
        need("transformers is not installed")
    model = split_models.build(name)
    wanted = [loss for loss, _ in split_models.train(model)]
    weights = {own: param.detach() for own, param in model.named_parameters()}
    for losses, found in run_on_ranks(4, _split_stages, name, {}):
        assert losses == pytest.approx(wanted, rel=1e-6)
        assert weight_distance({own: found[own] for own in weights}, weights) <= 1e-4


def test_stages_that_split_a_shared_parameter_differently_are_told() -> None:
    if not split_models.has("gpt2"):
        need("transformers is not installed")
    specs = [{"patterns": [".*lm_head"], "partition_type": "skip"}]
    for error in run_on_ranks(4, _split_stages, "gpt2", {"partition_config": {"layer_specs": specs}}):
        assert "transformer.wte.weight" in error, error
        assert "stages share this parameter and have different parts of it" in error


# ---- checkpoints ----

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline 2, interleaved": (2, config_of(SCHEDULES["interleaved"], 2)),
    "pipeline 2 x tensor 2": (4, config_of({"stages": 2}, 4, **TENSOR)),
    "pipeline 2 x data 2": (4, config_of(SCHEDULES["zero bubble, V"], 4, 1)),
    "data 2": (2, config_of({}, 2, 2)),
}


def _saved(rank: int, world_size: int, config: dict[str, Any], folder: str) -> None:
    engine = launcher.initialize(model=make_decoder(is_tied=True), config=config)[0]
    train(engine, SAVED)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "weights.bin")
    engine.destroy()


def _continued(rank: int, world_size: int, config: dict[str, Any], folders: list[str]) -> list[list[float]]:
    model = make_decoder(is_tied=True)
    for param in model.parameters():
        param.data.fill_(0.3)
    engine = launcher.initialize(model=model, config=config)[0]
    found = []
    for folder in folders:
        engine.load_checkpoint(folder)
        found.append(train(engine, CONTINUED)[0])
    engine.destroy()
    return found


def test_a_checkpoint_continues_on_every_other_mesh(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in MESHES]
    for (world_size, config), folder in zip(MESHES.values(), folders, strict=True):
        run_on_ranks(world_size, _saved, config, folder)
    expected, weights = reference(SAVED + CONTINUED, True)[0][SAVED:], reference(SAVED, True)[2]
    for world_size, config in MESHES.values():
        for found in run_on_ranks(world_size, _continued, config, folders):
            for losses in found:
                assert losses == pytest.approx(expected, rel=1e-6)
    for folder in folders:
        for written in (get_fp32_state_dict_from_zero_checkpoint(folder), torch.load(f"{folder}/weights.bin")):
            assert weight_distance(written, weights) <= 1e-4


# ---- what a script does ----


class Scale(nn.Module):
    """A layer with a buffer of its own, which counts its forwards in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """x: any tensor -> the same."""
        self.count += int(self.training)
        return x


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make_layers() -> launcher.PipelineModule:
    torch.manual_seed(7)
    layers = [launcher.LayerSpec(nn.Embedding, VOCABULARY, WIDTH), launcher.LayerSpec(Block), Scale(), Scale()]
    layers += [launcher.LayerSpec(Block), launcher.LayerSpec(nn.Linear, WIDTH, VOCABULARY)]
    return launcher.PipelineModule(layers, num_stages=2, loss_fn=_loss, partition_method="uniform")


def _pairs(lengths: list[int], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for length in lengths:
        tokens = torch.randint(0, VOCABULARY, (2, length), generator=generator)
        yield tokens, tokens


def _used(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    model, found = make_layers(), {}
    config = {**config_of({}, 2), "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    del config["pipeline"]
    engine = launcher.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    found["losses"] = [
        engine.train_batch(_pairs([5, 7, 5, 4], 1)).item(),
        engine.train_batch(_pairs([4] * 4, 2)).item(),
    ]
    found["idle"] = engine.idle_fraction
    found["evaluated"] = engine.eval_batch(_pairs([5, 7, 5, 4], 1)).item()
    found["logits"] = engine.eval_batch(_pairs([5, 6], 1), compute_loss=False, num_micro_batches=2)
    engine.save_checkpoint(folder)
    state = engine.state_dict()
    found["counts"] = [int(state["2.count"]), int(state["3.count"])]
    state["2.count"].fill_(50)
    engine.load_state_dict(state)
    engine.load_checkpoint(folder)
    found["loaded"] = [int(engine.state_dict()[name]) for name in ("2.count", "3.count")]
    found["mode"] = engine.module.training
    errors = []
    attempts = [
        lambda: engine.train_batch(_pairs([5] * 3, 1)),
        lambda: engine.train_batch(_pairs([5] * 4 if rank else [6] * 4, 1)),
        lambda: engine(torch.zeros(1)),
        lambda: engine.step(),
    ]
    for attempt in attempts:
        try:
            attempt()
        except (EngineError, StopIteration) as error:
            errors.append(str(error))
    found["errors"] = errors
    found["after"] = engine.train_batch(_pairs([5] * 4, 3)).item()
    engine.destroy()
    return found


def test_a_module_of_layers_trains_evaluates_and_refuses(tmp_path: Path) -> None:
    first, last = run_on_ranks(2, _used, str(tmp_path))
    for name in ("losses", "evaluated", "counts", "loaded", "errors", "after"):
        assert first[name] == last[name], name
    assert first["losses"][1] < first["losses"][0]
    assert first["evaluated"] < first["losses"][0], "the same samples after two steps"
    assert first["counts"] == first["loaded"] == [8, 8]
    assert first["mode"]
    assert first["logits"] is None
    assert [tuple(each.shape) for each in last["logits"]] == [(2, 5, VOCABULARY), (2, 6, VOCABULARY)]
    assert 0 < first["idle"] < 1
    ended, differing, forward, step = first["errors"]
    assert "the data ended before" in ended
    assert "stages of a pipeline got different micro-batches" in differing
    assert "engine(...) cannot be used with pipeline parallelism" in forward
    assert "engine.step() cannot be used" in step


class Stateful:
    """A loader of the micro-batches of all steps, as torchdata has them: it says how far it is, and continues there."""

    def __init__(self, steps: Any = range(SAVED + CONTINUED)) -> None:
        self.micro_batches = [each for step in steps for each in batch_of(step).split(BATCH // MICRO)]
        self.position: Any = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < len(self.micro_batches):
            self.position += 1
            yield self.micro_batches[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Foreign(Stateful):
    """Its state is nothing that a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": object()}


# Loaders of whole steps, by name. Those that say no position begin anew when the run continues.
LOADERS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda steps: DataLoader(Stateful(steps).micro_batches, batch_size=None),  # type: ignore[arg-type]
    "list": lambda steps: Stateful(steps).micro_batches,
    "generator": lambda steps: (each for each in Stateful(steps).micro_batches),
    "foreign": Foreign,
    "stateful": Stateful,
    "stateful, set after the load": Stateful,
}


def _with_loader(rank: int, world_size: int, name: str, folder: str) -> tuple[list[float], list[str], list[str]]:
    make, is_late = LOADERS[name], "after" in name
    engine = launcher.initialize(model=make_decoder(), config=config_of({"stages": 2}, 2))[0]
    engine.set_dataloader(make(range(SAVED + CONTINUED)))
    losses = [engine.train_batch().item() for _ in range(SAVED)]
    with logged() as warnings:
        engine.save_checkpoint(folder, tag="first")
        engine.save_checkpoint(folder)
    engine.destroy()
    engine = launcher.initialize(model=make_decoder(), config=config_of({"stages": 2}, 2))[0]
    left = make(range(SAVED + CONTINUED) if "stateful" in name else range(SAVED, SAVED + CONTINUED))
    if not is_late:
        engine.set_dataloader(left)
    engine.load_checkpoint(folder)
    if name == "stateful":  # to load again ends the pass that was begun
        engine.train_batch()
        engine.load_checkpoint(folder)
    if is_late:
        engine.set_dataloader(left)
    losses += [engine.train_batch().item() for _ in range(CONTINUED)]
    errors = []
    if name == "generator":
        try:
            engine.train_batch()
        except StopIteration as error:
            errors.append(str(error))
    engine.destroy()
    return losses, [line for line in warnings if "position" in line], errors


@pytest.mark.parametrize("name", LOADERS)
def test_a_run_is_saved_and_continues_whatever_loader_it_reads(name: str, tmp_path: Path) -> None:
    expected = reference(SAVED + CONTINUED)[0]
    for rank, (losses, warnings, errors) in enumerate(run_on_ranks(2, _with_loader, name, str(tmp_path))):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert len(warnings) == (rank == 0 and "stateful" not in name)
        if warnings:
            kind = {"torch": "DataLoader", "foreign": "Foreign"}.get(name, name)
            assert f"engine.training_dataloader is a {kind}, and it" in warnings[0]
        assert ["the data ended before" in error for error in errors] == [True] * (name == "generator")


def _position_lost(rank: int, world_size: int, folder: str) -> list[str]:
    engine = launcher.initialize(model=make_decoder(), config=config_of({"stages": 2}, 2))[0]
    engine.set_dataloader(Stateful())
    engine.train_batch()
    engine.save_checkpoint(folder)
    with logged() as lines:
        engine.set_dataloader(Stateful().micro_batches)
        engine.load_checkpoint(folder)
    return [line for line in lines if "cannot take over" in line]


def test_a_loader_that_cannot_continue_is_named(tmp_path: Path) -> None:
    (line,), others = run_on_ranks(2, _position_lost, str(tmp_path))
    assert "which list cannot take over" in line
    assert others == []


def _places(rank: int, world_size: int, folder: str, num_stages: int, loads: bool) -> list[int]:
    """Train a step on what an iterator over the loader gives, and save; or load. Return what this rank has read."""
    data = [(torch.full((LENGTH,), place),) * 2 for place in range(12)]
    layers = [nn.Embedding(VOCABULARY, WIDTH), Block(), nn.Linear(WIDTH, VOCABULARY)]
    model = launcher.PipelineModule(layers, num_stages=num_stages, loss_fn=_loss)
    config = config_of({"stages": num_stages}, world_size)
    engine, _, loader, _ = launcher.initialize(model=model, config=config, training_data=data)
    places: list[int] = []

    def noted() -> Iterator[list[Tensor]]:
        for micro_batch in loader:
            places.extend(micro_batch[0][:, 0].tolist())
            yield micro_batch

    if loads:
        engine.load_checkpoint(folder)
        list(noted())
    else:
        engine.train_batch(noted())
        engine.save_checkpoint(folder)
    engine.destroy()
    return places


def test_a_rank_that_has_read_nothing_continues_behind_what_the_others_had(tmp_path: Path) -> None:
    """The middle one of a pipeline, which has data of its own on another mesh."""
    first, second, third = run_on_ranks(3, _places, str(tmp_path), 3, False)
    left = run_on_ranks(2, _places, str(tmp_path), 1, True)
    assert (first, second) == (third, [])
    assert sorted([*first, *left[0], *left[1]]) == list(range(12))


def _given_other_samples(rank: int, world_size: int) -> tuple[str, float]:
    """Ranks of a pipeline begin with micro-batches of the same shapes and other values."""
    model = make_layers()
    config = {**config_of({}, 2), "train_micro_batch_size_per_gpu": 2}
    del config["pipeline"]
    engine = launcher.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    with pytest.raises(EngineError) as error:
        engine.train_batch(_pairs([5] * 4, rank))
    loss = engine.train_batch(_pairs([5] * 4, 1)).item()
    engine.destroy()
    return str(error.value), loss


def test_other_samples_end_the_first_step() -> None:
    (said, loss), other = run_on_ranks(2, _given_other_samples)
    assert (said, loss) == other
    assert "stages of a pipeline got different micro-batches: its rank 1 others than rank 0" in said


def _events(rank: int, world_size: int, name: str) -> list[str]:
    """Return, of the second step, what this rank does first: forwards, backwards, and asking for the norm before."""
    events: list[str] = []

    def noted(owner: type, method: str) -> Any:
        original = getattr(owner, method)

        def note(*args: Any, **named: Any) -> Any:
            events.append(method)
            return original(*args, **named)

        return mock.patch.object(owner, method, note)

    with noted(LastStep, "report"), noted(PipelineRuntime, "_forward"), noted(BackwardPass, "_begin"):
        engine = launcher.initialize(model=make_decoder(), config=config_of(SCHEDULES[name], world_size))[0]
        train(engine, 1)
        events.clear()
        train(engine, 1)
    engine.destroy()
    return events


def _without_parameters(rank: int, world_size: int, gives: str, optimizer: str) -> list[float]:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Tanh(), nn.Tanh()]
    model: Any = launcher.PipelineModule(layers=layers, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    if world_size == 1:
        model = nn.Sequential(*layers)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 0,
        "optimizer": {"type": optimizer, "params": {"lr": 0.01}},
        **({"pipeline": {"stages": world_size}} if world_size > 1 else {}),
    }
    given = model.parameters() if gives == "parameters" else None
    engine = launcher.initialize(model=model, model_parameters=given, config=config)[0]
    data = [(torch.full((1, 8), 0.1 * index), torch.zeros(1, 8)) for index in range(6)]
    losses = []
    for step in range(3):
        batch = data[2 * step : 2 * step + 2]
        if world_size > 1:
            losses.append(engine.train_batch(iter(batch)).item())
        else:
            parts = [nn.functional.mse_loss(engine(x), y) for x, y in batch]
            for part in parts:
                engine.backward(part)
                engine.step()
            losses.append(sum(part.item() for part in parts) / 2)
    engine.destroy()
    return losses


@pytest.mark.parametrize(("gives", "optimizer"), [("parameters", "AdamW"), ("nothing", "AdamW"), ("nothing", "Muon")])
def test_a_stage_without_parameters_trains_with_the_others(gives: str, optimizer: str) -> None:
    [expected] = run_on_ranks(1, _without_parameters, gives, optimizer)
    for losses in run_on_ranks(2, _without_parameters, gives, optimizer):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["1f1b", "zero bubble, V"])
def test_the_norm_of_the_last_step_is_asked_for_behind_forwards(name: str) -> None:
    """On a GPU the host waits for it: the device has the update and these forwards to work on meanwhile."""
    for events in run_on_ranks(2, _events, name):
        first = events.index("report")
        assert "_forward" in events[:first]
        assert "_begin" not in events[:first]
        assert events[first + 1] == "_begin"


def _overflowed(rank: int, world_size: int) -> tuple[list[float], int, float]:
    config = {**config_of({"stages": 2}, 2), "fp16": {"enabled": True, "initial_scale_power": 21, "hysteresis": 1}}
    engine = launcher.initialize(model=make_decoder(), config=config)[0]
    losses = [engine.train_batch(own_micro_batches(engine, 0)).item() for _ in range(16)]
    found = losses, engine.skipped_steps, engine.optimizer.cur_scale
    engine.destroy()
    return found


def test_all_stages_skip_a_step_that_overflows_on_one() -> None:
    (losses, num_skipped, scale), other = run_on_ranks(2, _overflowed)
    assert (losses, num_skipped, scale) == other
    assert 0 < num_skipped < 16
    assert losses[0] == pytest.approx(losses[num_skipped], rel=1e-6)
    assert losses[-1] < losses[0]


def _one_stage(rank: int, world_size: int, stage: int) -> tuple[list[float], int]:
    torch.manual_seed(7)
    layers = [launcher.LayerSpec(nn.Embedding, VOCABULARY, WIDTH), launcher.LayerSpec(Block)]
    layers.append(launcher.LayerSpec(nn.Linear, WIDTH, VOCABULARY))
    model = launcher.PipelineModule(layers, num_stages=1, loss_fn=_loss)
    engine = launcher.initialize(model=model, config=config_of({}, world_size, stage))[0]
    losses = []
    for step in range(3):
        pairs = [(tokens, tokens) for tokens in own_micro_batches(engine, step)]
        losses.append(engine.train_batch(iter(pairs)).item())
    num_keys = len(engine.state_dict())
    engine.destroy()
    return losses, num_keys


def test_a_module_of_layers_is_one_stage_without_a_pipeline() -> None:
    expected, num_keys = run_on_ranks(1, _one_stage, 0)[0]
    for found in run_on_ranks(2, _one_stage, 3):
        assert found[0] == pytest.approx(expected, rel=1e-6)
        assert found[1] == num_keys


def _saves_alone(rank: int, world_size: int, folder: str) -> str:
    engine = launcher.initialize(model=make_decoder(), config=config_of({"stages": 2}, world_size))[0]
    train(engine, 1)
    said = ""
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "timeouts", lambda: Timeouts(other_ranks_s=0.5))
            with pytest.raises(CheckpointError) as error:
                engine.save_checkpoint(folder)
        said = str(error.value)
    engine.any_rank(False)  # wait for rank 0
    train(engine, 1)
    engine.destroy()
    return said


def test_a_stage_that_saves_alone_gets_an_error_and_harms_nothing(tmp_path: Path) -> None:
    said, _ = run_on_ranks(2, _saves_alone, str(tmp_path))
    assert "save_checkpoint" in said
    assert "rank 1" in said


# ---- transfers beside the computing of a GPU, in the model of its streams ----

SCHEDULES_IN_MODEL = [{"stages": 2}, {"stages": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}]


def _in_model(rank: int, world_size: int, pipeline: dict[str, Any]) -> tuple[bool, list[tuple[int, int, int]]]:
    """Train with a GPU's ways and without; return whether the results are equal, and what receives wait for."""
    config = config_of(pipeline, world_size, stage=1)
    with communicators("nccl"), reference_kernels():
        expected = train(launcher.initialize(model=make_decoder(), config=config)[0], 2)
    with modelled_streams() as model:
        engine = launcher.initialize(model=make_decoder(), config=config)[0]
        with model:
            found = train(engine, 2)
        engine.destroy()
    return found == expected, model.receives


@pytest.mark.parametrize("pipeline", SCHEDULES_IN_MODEL)
def test_receives_race_with_nothing_and_wait_for_no_computing(pipeline: dict[str, Any]) -> None:
    for is_equal, receives in run_on_ranks(2, _in_model, pipeline):
        assert is_equal
        assert len(receives) >= 2 * MICRO
        # NCCL takes the transfers of a link in order: what a send has awaited, the next receive has, too.
        assert all(awaited <= known for _, awaited, known in receives)
        assert any(awaited < computed for computed, awaited, _ in receives)


def _wait_elsewhere(receiving: Receiving) -> tuple[Tensor, ...]:
    with receiving.streams.on(Side.REDUCE):
        receiving.pending.wait()
    return receiving.tensors


MISSING = {
    "the wait": (Receiving, "wait", _wait_elsewhere, "is not ordered after"),
    "the use": (ModelStreams, "record_stream", lambda *_: None, "RECEIVE gets memory back"),
}


def _missing(rank: int, world_size: int, name: str) -> str:
    owner, attribute, replacement, _ = MISSING[name]
    with modelled_streams() as model, mock.patch.object(owner, attribute, replacement):
        engine = launcher.initialize(model=make_decoder(), config=config_of({"stages": 2}, world_size, stage=1))[0]
        model.collects = True
        with model:
            train(engine, 2)
    return "; ".join(model.errors)


@pytest.mark.parametrize("name", MISSING)
def test_the_model_finds_what_a_receive_lacks(name: str) -> None:
    assert any(MISSING[name][-1] in errors for errors in run_on_ranks(2, _missing, name))
