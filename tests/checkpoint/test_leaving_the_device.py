"""What a save takes from a GPU: the same files, in few waits, and nothing that the training writes meanwhile."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.train.behind import runs_behind_host
from harness.train.checkpoint_runs import config, make_net, train
from harness.train.collective import communicators
from harness.train.ranks import run_on_ranks
from harness.train.streams import (
    COMPUTING,
    HOST,
    ModelEvent,
    ModelStreams,
    StreamModel,
    modelled_streams,
    reference_kernels,
)
from torch import Tensor

import launcher
from launcher.checkpoint.saving import contents, save
from launcher.checkpoint.saving.save import BackgroundSaver
from launcher.checkpoint.values.tree import bytes_of
from launcher.checkpoint_files import blocks
from launcher.comm.device import HostDeviceCopier
from launcher.comm.streams import Side

pytestmark = pytest.mark.usefixtures("one_thread")
ASYNC = {"checkpoint": {"async": True}}
BF16 = {"bf16": {"enabled": True}}
Script = Callable[[Any], object]


@contextlib.contextmanager
def _small_pieces() -> Iterator[None]:
    """Cut tensors into blocks and pieces of a few elements."""
    with mock.patch.object(blocks, "BLOCK_BYTES", 64), mock.patch.object(contents, "_PIECE_BYTES", 256):
        yield


@contextlib.contextmanager
def _seen_by(model: StreamModel) -> Iterator[None]:
    """Have a model know what a save reads of host memory, which the model does not see."""

    def read(tensor: Tensor) -> memoryview:
        with model.paused():
            model.access(HOST, "a write to a file", [tensor], [])
        return bytes_of(tensor)

    with mock.patch.object(contents, "bytes_of", read), mock.patch.object(save, "bytes_of", read):
        yield


class _Late:
    """Threads of `BackgroundSaver` that run when they are waited for, in the thread that waits."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []

    def start(self, saver: BackgroundSaver, work: Callable[[], object]) -> None:
        self._work.append(work)

    def wait(self, saver: BackgroundSaver) -> None:
        while self._work:
            self._work.pop()()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        with (
            mock.patch.object(BackgroundSaver, "start", lambda *given: self.start(*given)),
            mock.patch.object(BackgroundSaver, "wait", lambda *given: self.wait(*given)),
        ):
            yield


def _run(world_size: int, folder: Path, given: dict[str, Any], script: Script, model: StreamModel | None) -> None:
    """Train, save, go on as `script` says and train, and wait for the save. In a model, if there is one, but `Late`."""
    engine = launcher.initialize(model=make_net(), config=config(world_size, **given))[0]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_small_pieces())
        if model is not None:
            stack.enter_context(_Late().used())
            stack.enter_context(_seen_by(model))
            stack.enter_context(model)
        _steps(engine, 1)
        with torch.no_grad():
            engine.save_checkpoint(str(folder), "saved")
            script(engine)
        _steps(engine, 1)
        engine.wait_for_checkpoint()
    engine.destroy()


def _steps(engine: Any, num_steps: int) -> None:
    with mock.patch.object(Tensor, "item", return_value=0.0):  # of losses: the host would wait
        train(engine, num_steps)


def _nothing(*_: Any) -> None:
    pass


def _files_of(rank: int, world_size: int, folder: str, given: dict[str, Any], script: Script) -> list[Any]:
    """Return this rank's files of tensors: as a CPU's engine writes them, and as one with streams does."""
    with communicators("nccl"), reference_kernels():
        _run(world_size, Path(folder) / "cpu", {**given, "checkpoint": {}}, _nothing, None)
    with modelled_streams() as model, runs_behind_host():
        _run(world_size, Path(folder) / "gpu", given, script, model)
    assert model.num_accesses[Side.TO_HOST.name] > 20, "pieces were copied"
    pattern = f"saved/rank-{rank:05}*.safetensors"
    return [path.read_bytes() for name in ("cpu", "gpu") for path in (Path(folder) / name).glob(pattern)]


@pytest.mark.parametrize("more", [{}, ASYNC], ids=["plain", "async"])
@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_files_are_those_of_a_cpu_and_nothing_races(
    stage: int, precision: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    for on_cpu, on_gpu in run_on_ranks(2, _files_of, str(tmp_path), {"stage": stage, **precision, **more}, _nothing):
        assert on_cpu == on_gpu


# ---- what a script writes before the copies of an asynchronous save have been taken ----


def _writes_parameters(engine: Any) -> None:
    for param in engine.module.parameters():
        param.mul_(1.5)


def _writes_gathered_parameters(engine: Any) -> None:
    params = list(engine.module.parameters())
    with launcher.zero.GatheredParameters(params, modifier_rank=0):
        for param in params:
            param.mul_(1.5)


def _loads_states(engine: Any) -> None:
    engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stage", "script"), [(0, _writes_parameters), (1, _loads_states), (3, _writes_gathered_parameters)]
)
def test_what_a_script_writes_next_is_not_saved(
    stage: int, script: Script, precision: dict[str, Any], tmp_path: Path
) -> None:
    for on_cpu, on_gpu in run_on_ranks(2, _files_of, str(tmp_path), {"stage": stage, **precision, **ASYNC}, script):
        assert on_cpu == on_gpu


# ---- each wait is needed, and the model finds that it is missing ----

_join, _live_tensors = ModelStreams.join, contents.live_tensors


def _joins_no_copies(streams: ModelStreams, side: Side) -> None:
    if side is not Side.TO_HOST:
        _join(streams, side)


def _exposes_nothing(contents: Any, *, is_exposed: bool) -> Iterator[tuple[str, Tensor]]:
    return iter(()) if is_exposed else _live_tensors(contents)


BROKEN: dict[str, tuple[Any, str, Any, dict[str, Any], Script]] = {
    "for a piece": (HostDeviceCopier, "synchronize", _nothing, {}, _nothing),
    "for the other piece": (contents, "_NUM_PIECES", 1, {}, _nothing),
    "in the thread": (ModelEvent, "synchronize", _nothing, ASYNC, _nothing),
    "of the update": (ModelStreams, "join", _joins_no_copies, ASYNC, _nothing),
    "of a load": (ModelStreams, "join", _joins_no_copies, ASYNC, _loads_states),
    "of a block": (ModelStreams, "join", _joins_no_copies, {**ASYNC, **BF16}, _writes_gathered_parameters),
    "of a script": (contents, "live_tensors", _exposes_nothing, ASYNC, _writes_parameters),
}


def _broken(rank: int, world_size: int, name: str, folder: str) -> str:
    owner, attribute, replacement, given, script = BROKEN[name]
    with modelled_streams() as model, runs_behind_host(), mock.patch.object(owner, attribute, replacement):
        try:
            _run(world_size, Path(folder), {"stage": 0, **given}, script, model)
        except Exception as error:  # noqa: BLE001  # a save makes one of its own of the model's
            return str(error)
    return "nothing was found"


@pytest.mark.parametrize("name", BROKEN)
def test_the_model_finds_a_wait_that_is_missing(name: str, tmp_path: Path) -> None:
    for found in run_on_ranks(1, _broken, name, str(tmp_path)):
        assert "is not ordered after" in found
        assert "copy_ (TO_HOST" in found


# ---- and none is there without need ----


def _waits(rank: int, world_size: int, folder: str) -> tuple[list[int], list[int], int]:
    """Return how much of the copies the host and the computing wait for: at the return of the call, and of a step.

    And how much there is to wait for.
    """
    with modelled_streams() as model, runs_behind_host(), _Late().used(), _seen_by(model):
        engine = launcher.initialize(model=make_net(), config=config(world_size, 1, **BF16, **ASYNC))[0]
        lane, awaited = Side.TO_HOST.name, []
        with model:
            _steps(engine, 1)
            engine.save_checkpoint(folder, "saved")
            num_copies = model.time(lane)
            for _ in range(2):
                awaited.append([model.awaited(HOST, lane), model.awaited(COMPUTING, lane)])
                _steps(engine, 1)
            engine.wait_for_checkpoint()
        engine.destroy()
    return awaited[0], awaited[1], num_copies


def test_an_asynchronous_save_has_the_next_update_wait_and_no_host(tmp_path: Path) -> None:
    for at_return, after_step, num_copies in run_on_ranks(2, _waits, str(tmp_path)):
        assert at_return[0] == 0
        assert at_return[1] <= 1, "a frozen parameter, which a script may write to"
        assert after_step == [0, num_copies]
        assert num_copies > 20


def _memory(rank: int, world_size: int, folder: str, more: dict[str, Any], has_streams: bool) -> list[int]:
    """Return the bytes that two saves ask of host memory, piece by piece."""
    sizes: list[int] = []
    empty = HostDeviceCopier.empty

    def counted(copier: HostDeviceCopier, numel: int, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
        sizes.append(numel * dtype.itemsize)
        assert is_pinned
        return empty(copier, numel, dtype, is_pinned=is_pinned)

    with (
        modelled_streams() if has_streams else contextlib.nullcontext(),
        mock.patch.object(HostDeviceCopier, "empty", counted),
        _small_pieces(),
    ):
        engine = launcher.initialize(model=make_net(), config=config(world_size, 1, **more))[0]
        _steps(engine, 1)
        for tag in "ab":
            engine.save_checkpoint(folder, tag)
            engine.wait_for_checkpoint()
        engine.destroy()
    return sizes


@pytest.mark.parametrize("has_streams", [False, True])
def test_host_memory_is_two_pieces_or_one_for_all_copies(has_streams: bool, tmp_path: Path) -> None:
    [sizes] = run_on_ranks(1, _memory, str(tmp_path / "plain"), {}, has_streams)
    assert sizes == (2 * [256, 256] if has_streams else []), "a CPU writes from the memory of the tensors"
    [sizes] = run_on_ranks(1, _memory, str(tmp_path / "async"), ASYNC, has_streams)
    [path] = (tmp_path / "async" / "a").glob("rank-*.safetensors")
    with blocks.TensorFile(path, None) as file:
        entries = [entry for key, entry in file.entries.items() if not key.startswith("private/")]
    num_bytes = sum(entry.num_bytes for entry in entries)
    assert len(sizes) == 1
    assert num_bytes <= sizes[0] < num_bytes + 64 * len(entries)
