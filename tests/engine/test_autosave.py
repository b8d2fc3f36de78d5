"""The engine saves by itself, prunes, leaves after a notice, and continues from the newest checkpoint that is good."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import nn
from torch.utils.data import TensorDataset

import launcher
from launcher.base.errors import EngineError
from launcher.checkpoint_files.folder import committed_in, latest_tag
from launcher.comm.hosts import AsyncFlag

Steps = dict[int, str]  # step -> loss, to the last bit


def train(folder: str | None, num_steps: int, *, resume: str = "", **keys: Any) -> tuple[Steps, int, dict[str, Any]]:
    """Train up to a step; returns the losses, the step it began behind and the client state that was loaded."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    data = TensorDataset(torch.randn(20, 6), torch.randn(20, 1))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
        "checkpoint": {"folder": folder, **keys} if folder is not None else {},
    }
    losses: Steps = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCH_RESUME", resume)
        engine, _, loader, _ = launcher.initialize(model=model, config=config, training_data=data)
    begun = engine.global_steps
    client_state = dict(engine.client_state)
    assert loader is not None
    while engine.global_steps < num_steps:
        for x, y in loader:
            loss = (engine(x) - y).square().mean()
            losses[engine.global_steps + 1] = loss.item().hex()
            engine.client_state["step"] = engine.global_steps + 1
            engine.backward(loss)
            engine.step()
            if engine.global_steps == num_steps:
                break
    engine.wait_for_checkpoint()
    engine.destroy()
    return losses, begun, client_state


def saved(folder: str | Path) -> list[int]:
    return [each.manifest.step for each in committed_in(Path(folder))]


def continued(rank: int, world_size: int, folder: str, is_async: bool) -> Any:
    expected = train(None, 9)[0]
    first, begun, _ = train(folder, 5, save_every=2, **{"async": is_async})
    assert begun == 0
    assert saved(folder) == [2, 4]
    second, begun, client_state = train(folder, 9, resume="auto", save_every=2, **{"async": is_async})
    return expected, first, second, begun, client_state


@pytest.mark.parametrize("is_async", [False, True])
def test_losses_continue_bit_for_bit(tmp_path: Path, is_async: bool) -> None:
    for expected, first, second, begun, client_state in run_on_ranks(2, continued, str(tmp_path / "run"), is_async):
        assert begun == 4
        assert client_state == {"step": 4}
        assert first == {step: expected[step] for step in range(1, 6)}
        assert second == {step: expected[step] for step in range(5, 10)}
    assert saved(tmp_path / "run") == [2, 4, 6, 8]


def pruned(rank: int, world_size: int, folder: str, is_async: bool) -> None:
    train(folder, 7, save_every=1, keep_last=2, keep_every=3, **{"async": is_async})


@pytest.mark.parametrize("is_async", [False, True])
def test_old_checkpoints_go(tmp_path: Path, is_async: bool) -> None:
    run_on_ranks(2, pruned, str(tmp_path), is_async)
    assert saved(tmp_path) == [3, 6, 7]
    assert latest_tag(tmp_path) == "global_step7"


def noticed(rank: int, world_size: int, folder: str, at_step: int, is_async: bool) -> Any:
    """Give one rank notice at a step; returns where each rank left."""
    with pytest.MonkeyPatch.context() as patch:
        calls = iter(range(1, 100))
        patch.setattr("launcher.engine.checkpoint_folder.preempted", lambda: next(calls) >= at_step and rank == 1)
        with pytest.raises(SystemExit) as end:
            train(folder, 9, save_every=2, **{"async": is_async})
    return end.value.code


@pytest.mark.parametrize(("at_step", "is_async"), [(3, False), (4, False), (3, True)])
def test_all_ranks_save_and_leave_when_one_was_given_notice(tmp_path: Path, at_step: int, is_async: bool) -> None:
    assert run_on_ranks(2, noticed, str(tmp_path), at_step, is_async) == [75, 75]
    assert saved(tmp_path) == ([2, 3] if at_step == 3 else [2, 4])


def noticed_with_a_full_disk(rank: int, world_size: int, folder: str, is_async: bool) -> Any:
    """Give notice at step 3, of which rank 1 can write nothing; returns where each rank left, and what it said."""
    real = os.pwrite

    def write(file: int, data: Any, offset: int) -> int:
        if rank == 1 and "global_step3" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    with pytest.MonkeyPatch.context() as patch, mock.patch("launcher.engine.checkpoint_folder.get_logger") as logger:
        patch.setattr("os.pwrite", write)
        code = noticed(rank, world_size, folder, 3, is_async)
    return code, [call.args[1] for call in logger().warning.call_args_list]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_that_fails_after_a_notice_does_not_keep_the_job_from_the_queue(tmp_path: Path, is_async: bool) -> None:
    (code, [outcome]), other = run_on_ranks(2, noticed_with_a_full_disk, str(tmp_path), is_async)
    assert (code, other) == (75, (75, []))
    assert outcome.startswith("the save of step 3 has failed (")
    assert "No space left on device" in outcome
    assert saved(tmp_path) == [2]


def refused(rank: int, world_size: int, folder: str) -> str:
    train(folder, 2, save_every=2)
    with pytest.raises(EngineError) as caught:
        train(folder, 2, save_every=2)
    assert train(folder, 4, resume="never", save_every=4)[1] == 0
    return str(caught.value)


def test_a_new_run_does_not_begin_in_the_folder_of_another(tmp_path: Path) -> None:
    for message in run_on_ranks(2, refused, str(tmp_path)):
        assert "checkpoints of another run already, such as global_step2" in message
        assert "--resume auto" in message


def two_engines(rank: int, world_size: int, folder: str) -> str:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "checkpoint": {"folder": folder}}
    first, *_ = launcher.initialize(model=nn.Linear(4, 1), config=config)
    with pytest.raises(EngineError) as caught:
        launcher.initialize(model=nn.Linear(4, 1), config=config)
    first.destroy()
    launcher.initialize(model=nn.Linear(4, 1), config=config)[0].destroy()
    return str(caught.value)


def test_two_engines_do_not_share_a_folder(tmp_path: Path) -> None:
    for message in run_on_ranks(2, two_engines, str(tmp_path)):
        assert "two engines would save into one checkpoint.folder" in message


def from_elsewhere(rank: int, world_size: int, old: str, new: str) -> Any:
    train(old, 2, save_every=2)
    return [train(new, 4, resume=old, save_every=2)[1], train(new, 4, resume="auto", save_every=2)[1]]


def test_a_run_continues_from_a_named_folder_and_saves_into_its_own(tmp_path: Path) -> None:
    assert run_on_ranks(2, from_elsewhere, str(tmp_path / "old"), str(tmp_path / "new")) == [[2, 4], [2, 4]]
    assert saved(tmp_path / "old") == [2]


def damaged(rank: int, world_size: int, folder: str) -> Any:
    train(folder, 8, save_every=2)
    if rank == 0:
        Path(folder, "global_step8", "rank-00000.json").unlink()
        path = Path(folder, "global_step6", "rank-00001.safetensors")  # at its end is what is this rank's own
        path.write_bytes(path.read_bytes()[:-8] + b"!" * 8)
        path = Path(folder, "global_step4", "rank-00001.safetensors")
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        path.write_bytes(content[:begin] + b"!" * 8 + content[begin + 8 :])
    torch.distributed.barrier()
    return train(folder, 3, resume="auto", save_every=2)[1]


def test_a_damaged_checkpoint_is_left_for_the_one_before_it(tmp_path: Path) -> None:
    assert run_on_ranks(2, damaged, str(tmp_path)) == [2, 2]


def asked(rank: int, world_size: int, folder: str) -> Any:
    """Continue by `engine.resume`, in a script that saves by itself."""
    model = nn.Linear(4, 1)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    engine, *_ = launcher.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    engine.save_checkpoint(folder, client_state={"note": "mine"})
    found = [engine.resume(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAUNCH_RESTART_COUNT", "1")
        found += [engine.resume(folder), engine.resume(folder + "/nothing")]
    with pytest.raises(EngineError, match="names no folder"):
        engine.resume()
    engine.destroy()
    return found


def test_a_script_that_saves_by_itself_asks_for_its_checkpoint(tmp_path: Path) -> None:
    assert run_on_ranks(2, asked, str(tmp_path)) == [[None, {"note": "mine"}, None]] * 2


def agreed(rank: int, world_size: int) -> list[bool]:
    flag, found = AsyncFlag(), []
    for round_number in range(4):
        flag.begin(is_set=rank == 1 and round_number == 2)
        found.append(flag.result())
    flag.begin(is_set=False)  # left open, as by an exception
    flag.begin(is_set=False)
    return [*found, flag.result()]


def test_ranks_learn_in_the_same_round_what_one_of_them_knows() -> None:
    assert run_on_ranks(2, agreed) == [[False, False, True, True, True]] * 2
