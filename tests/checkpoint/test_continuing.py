"""Jobs that are preempted, killed or lose a host continue from their last checkpoint."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import Launch, Result, run_launch, wait_until
from harness.launch.forked_ranks import in_forks
from harness.launch.sshd import LoopbackSshd
from harness.train.forked import run_ranks

from launcher.base.processes import members_of_job
from launcher.checkpoint_files.folder import committed_in

# Arguments: the last step, and at which step of the first start rank 1 does what.
TRAINS = """
    import os, signal, sys, time
    import torch, launcher
    num_steps, trouble, trouble_step = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    )
    data = torch.utils.data.TensorDataset(torch.randn(20, 6), torch.randn(20, 1))
    engine, _, loader, _ = launcher.initialize(model=model, config="ds.json", training_data=data)
    is_troubled = os.environ["LAUNCH_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1"
    while engine.global_steps < num_steps:
        for x, y in loader:
            loss = (engine(x) - y).square().mean()
            step = engine.global_steps + 1
            print("LOSS", os.environ["WORLD_SIZE"], os.environ["RANK"], step, loss.item().hex(), flush=True)
            if is_troubled and step == trouble_step:
                if trouble == "notice":
                    print("READY", flush=True)
                    while not launcher.preempted():
                        time.sleep(0.01)
                elif trouble == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif trouble == "host":
                    os.kill(int(os.environ["TEST_AGENT_PID"]), signal.SIGKILL)  # to the launcher, its host is gone
                    time.sleep(600)
            engine.backward(loss)
            engine.step()
            if engine.global_steps == num_steps:
                break
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 2},
}
SAVING = {**CONFIG, "checkpoint": {"folder": "saved", "save_every": 2, "keep_last": 2}}
QUICK = {"OMP_NUM_THREADS": "1"}


def losses(*results: Result, world_size: int = 2) -> list[tuple[int, int, str]]:
    """Return rank, step and loss of everything that was printed, in the order of steps; equal lines count once."""
    text = "".join(result.out for result in results)
    found = re.findall(rf"LOSS {world_size} (\d+) (\d+) (\S+)", text)
    return sorted({(int(rank), int(step), loss) for rank, step, loss in found})


def job(folder: Path, config: dict[str, object], *options: str, trouble: str = "none", at_step: int = 0) -> Launch:
    (folder / "ds.json").write_text(json.dumps(config))
    script = scripts.write(folder, TRAINS)
    return Launch(folder, *options, *in_forks(script, "8", trouble, str(at_step)), env=QUICK)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, int, str]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    result = run_ranks(folder, 2, scripts.write(folder, TRAINS), "8", "none", "0", env={"LAUNCH_RESTART_COUNT": "0"})
    assert result.code == 0, result.err
    found = losses(result)
    assert len(found) == 16
    return found


def steps_of(folder: Path) -> list[int]:
    return [each.manifest.step for each in committed_in(folder / "saved")]


def test_a_preempted_job_ends_with_75_and_the_next_one_continues(
    tmp_path: Path, uninterrupted: list[tuple[int, int, str]]
) -> None:
    first = job(tmp_path, SAVING, "--num_gpus", "2", trouble="notice", at_step=5)
    wait_until(lambda: "READY" in first.out, "step 5", 120)
    first.signal(signal.SIGUSR1)
    ended = first.wait()
    assert ended.code == 75, ended.err
    assert "step 5 is saved in saved" in ended.out + ended.err
    assert steps_of(tmp_path) == [4, 5]
    refused = job(tmp_path, SAVING, "--num_gpus", "1", "--max-restarts", "1").wait()
    assert refused.code != 0
    assert "restart 1 of 1" in refused.err
    assert "LOSS" not in refused.out  # nor does its restart continue what is not its own
    assert "continue with `launch --resume auto`" in refused.out + refused.err
    second = job(tmp_path, SAVING, "--num_gpus", "2", "--resume", "auto").wait()
    assert second.code == 0, second.err
    assert "continuing from" in second.out + second.err
    assert min(step for _, step, _ in losses(second)) == 6
    assert losses(ended, second) == uninterrupted
    assert steps_of(tmp_path) == [6, 8]


def test_a_preempted_job_starts_again_by_itself(tmp_path: Path, uninterrupted: list[tuple[int, int, str]]) -> None:
    first = job(tmp_path, SAVING, "--num_gpus", "2", "--max-restarts", "1", trouble="notice", at_step=3)
    wait_until(lambda: "READY" in first.out, "step 3", 120)
    first.signal(signal.SIGUSR1)
    result = first.wait()
    assert result.code == 0, result.err
    assert "the ranks have saved, and start again" in result.err
    assert losses(result) == uninterrupted
    assert result.out.count("LOSS") == 16  # no step was taken twice


@pytest.mark.soak  # `make soak-short` kills ranks at random moments of a save, too
def test_a_job_whose_rank_was_killed_continues_from_the_last_committed_step(
    tmp_path: Path, uninterrupted: list[tuple[int, int, str]]
) -> None:
    result = job(tmp_path, SAVING, "--num_gpus", "2", "--max-restarts", "1", trouble="kill", at_step=6).wait()
    assert result.code == 0, result.err
    assert "global_step4, behind step 4" in result.out + result.err
    assert losses(result) == uninterrupted
    assert steps_of(tmp_path) == [6, 8]


@pytest.mark.long  # without checkpoints: tests/job/test_restart.py
@pytest.mark.cluster
def test_a_job_that_loses_a_host_continues_on_those_that_are_left(sshd: LoopbackSshd, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("".join(f"127.0.0.{number} slots=1\n" for number in (1, 2, 3)))
    options = ("--hostfile", "hosts", "--ssh_config", str(sshd.ssh_config), "--grace", "1")
    restarts = ("--max-restarts", "1", "--min-nodes", "2")
    result = job(tmp_path, SAVING, *options, *restarts, trouble="host", at_step=6).wait()
    assert result.code == 0, result.err
    assert "127.0.0.2 was lost" in result.err
    assert "global_step4, behind step 4" in result.out + result.err
    assert {step for _, step, _ in losses(result, world_size=3)} >= {1, 2, 3, 4, 5}
    assert {(rank, step) for rank, step, _ in losses(result, world_size=2)} == {
        (rank, step) for rank in (0, 1) for step in (5, 6, 7, 8)
    }
    assert not members_of_job(result.job_id)


def test_the_job_s_choice_reaches_every_rank(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import os; print('RESUME', os.environ['LAUNCH_RESUME'])")
    assert run_launch(tmp_path, "--num_gpus", "2", script).out.count("RESUME \n") == 2
    result = run_launch(tmp_path, "--num_gpus", "2", "--resume", "old/run", script)
    assert result.out.count(f"RESUME {tmp_path / 'old/run'}") == 2
