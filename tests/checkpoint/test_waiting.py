"""A rank that fails on its own, in whatever way, leaves no other one waiting; and a thread's failure is not lost."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harness.launch.command import slowness
from harness.logs import logged
from harness.train.checkpoint_runs import make_engine, saves_held, train
from harness.train.ranks import run_on_ranks

from launcher.base.errors import CheckpointError
from launcher.base.timeouts import Timeouts
from launcher.checkpoint import exchange
from launcher.checkpoint_files.folder import committed_in, latest_tag

ASYNC = {"checkpoint": {"async": True}}


def _said(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return ""


def _saved(engine: Any, folder: str, tag: str) -> str:
    return _said(engine.save_checkpoint, folder, tag) or _said(engine.wait_for_checkpoint)


def _no_memory(*_: Any, **__: Any) -> None:
    raise MemoryError("no memory is left")


# What a save does on each rank by itself, before and after ranks agree, and in the thread.
STEPS = (
    "launcher.engine.checkpoints.rng_state",
    "launcher.engine.checkpoints.contents_of",
    "launcher.checkpoint.saving.contents.live_tensors",
)


def _failing_saves(rank: int, world_size: int, folder: str) -> list[str]:
    engine = make_engine(world_size, 1, **ASYNC)
    train(engine, 1)
    said = []
    for step in STEPS:
        with mock.patch(step, _no_memory) if rank == 1 else contextlib.nullcontext():
            said.append(_saved(engine, folder, "bad"))
    said.append(_saved(engine, folder, "good"))
    engine.destroy()
    return said


def test_what_fails_on_one_rank_before_it_writes_is_said_by_all(tmp_path: Path) -> None:
    for *said, good in run_on_ranks(2, _failing_saves, str(tmp_path)):
        assert ["rank 1: MemoryError: no memory is left" in text for text in said] == [True] * len(STEPS)
        assert good == ""
    assert [each.path.name for each in committed_in(tmp_path)] == ["good"]


def _failing_loads(rank: int, world_size: int, folder: str) -> list[Any]:
    engine = make_engine(world_size, 3)
    engine.save_checkpoint(folder)
    with mock.patch("launcher.engine.checkpoints.open_source", _no_memory) if rank == 1 else contextlib.nullcontext():
        num_open = len(os.listdir("/proc/self/fd"))
        said = [_said(engine.load_checkpoint, folder)]
        leaked = len(os.listdir("/proc/self/fd")) - num_open
    with mock.patch("launcher.checkpoint.load._load_weights", _no_memory) if rank == 1 else contextlib.nullcontext():
        said.append(_said(engine.load_checkpoint, folder))
    custom = _no_memory if rank == 1 else mock.MagicMock()
    said.append(_said(engine.load_checkpoint, folder, custom_load_fn=custom))
    facts = [*said, leaked, len(train(engine, 1))]
    engine.destroy()
    return facts


def test_what_fails_on_one_rank_while_it_loads_is_said_by_all(tmp_path: Path) -> None:
    for *said, leaked, num_losses in run_on_ranks(2, _failing_loads, str(tmp_path)):
        assert ["rank 1: MemoryError: no memory is left" in text for text in said] == [True] * 3
        assert (leaked, num_losses) == (0, 1)


def _arriving_late(rank: int, world_size: int, folder: str) -> list[str]:
    engine = make_engine(world_size, 1)
    warned = Path(folder) / "warned"
    with pytest.MonkeyPatch.context() as patch, logged() as lines:
        patch.setattr(exchange, "timeouts", lambda: Timeouts(other_ranks_s=0.05))
        warn = exchange.Exchange._warn
        patch.setattr(exchange.Exchange, "_warn", lambda *args: (warn(*args), warned.touch()))
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            while rank == 0 and not warned.exists():  # as one that writes a large file of its own
                time.sleep(0.01)
            call(folder)
            engine.any_rank(False)
            warned.unlink(missing_ok=True)
            engine.any_rank(False)
    engine.destroy()
    return [line for line in lines if "waited for" in line]


def test_a_rank_that_comes_late_is_waited_for_and_said_once(tmp_path: Path) -> None:
    said = [line for of_rank in run_on_ranks(3, _arriving_late, str(tmp_path)) for line in of_rank]
    assert sorted(line.partition(" was")[0] for line in said) == ["load_checkpoint", "save_checkpoint"]
    assert all("not on rank 0" in line for line in said)


def _last_rank_is_missing(rank: int, world_size: int, folder: str) -> str:
    engine = make_engine(world_size, 1)
    said = ""
    engine.any_rank(False)  # those that save come together
    with mock.patch.object(exchange, "timeouts", return_value=Timeouts(other_ranks_s=2.0 * slowness())):
        if rank < world_size - 1:
            said = _said(engine.save_checkpoint, folder)
    engine.any_rank(False)
    said += _said(engine.save_checkpoint, folder)  # of all ranks
    engine.destroy()
    return said


def test_a_rank_that_is_missing_is_named_by_all_that_wait_once_rank_0_has_called(tmp_path: Path) -> None:
    first, second, last = run_on_ranks(3, _last_rank_is_missing, str(tmp_path))
    assert "save_checkpoint was called on rank 0" in first
    assert "save_checkpoint was called on rank 1" in second
    assert all("not on rank 2" in each for each in (first, second))
    assert last == ""


def _failing_thread(rank: int, world_size: int, folder: str) -> list[str]:
    engine = make_engine(world_size, 1, **ASYNC)
    with mock.patch.object(engine._checkpoints, "_after_commit", _no_memory):
        said = [_saved(engine, folder, "first")]
    said.append(_saved(engine, folder, "second"))
    engine.destroy()
    return said


def test_a_thread_that_fails_in_any_way_is_not_taken_for_a_save(tmp_path: Path) -> None:
    ((first, second),) = run_on_ranks(1, _failing_thread, str(tmp_path))
    assert "MemoryError: no memory is left" in first
    assert second == ""


def _dropped(rank: int, world_size: int, folder: str) -> list[Any]:
    engine = make_engine(world_size, 1, **ASYNC)
    pruned: list[Path] = []
    engine._checkpoints._after_commit = pruned.append
    engine.save_checkpoint(folder, "last")
    saver = engine._checkpoints._saver
    del engine
    gc.collect()
    saver.wait()
    return [str(saver.take_error()), [path.name for path in pruned], latest_tag(Path(folder))]


def test_a_save_goes_to_its_end_without_its_engine(tmp_path: Path) -> None:
    assert run_on_ranks(1, _dropped, str(tmp_path)) == [["None", ["last"], "last"]]


def _loaded_while_saved(rank: int, world_size: int, folder: str) -> list[int]:
    """Return at which step engines are that load what another one, and they themselves, are still saving."""
    first, second = (make_engine(world_size, 1, **ASYNC) for _ in range(2))
    steps = []
    with saves_held(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCH_RESUME", "auto")
        for num_steps, load in ((1, second.load_checkpoint), (2, first.resume), (3, second.resume)):
            train(first, num_steps - first.global_steps)
            first.save_checkpoint(folder)
            load(folder)
            steps.append((first if load == first.resume else second).global_steps)
    first.destroy()
    second.destroy()
    return steps


def test_who_loads_waits_for_a_save_of_this_process(tmp_path: Path) -> None:
    assert run_on_ranks(2, _loaded_while_saved, str(tmp_path)) == [[1, 2, 3]] * 2


def _unreadable_folder(rank: int, world_size: int, folder: str) -> str:
    engine = make_engine(world_size, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCH_RESUME", "auto")
        said = _said(engine.resume, folder)
    engine.destroy()
    return said


def test_a_folder_that_only_rank_0_looks_into_is_named_by_all(tmp_path: Path) -> None:
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "global_step1" / "manifest.json").symlink_to("x" * 300)  # its name is too long for any call
    for said in run_on_ranks(2, _unreadable_folder, str(tmp_path)):
        assert "File name too long" in said
