"""The journal of real runs: what is documented is there, and it is readable after a kill at any moment."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import scripts
from harness.launch.command import Launch, run_launch, wait_until

from launcher.base.env import JOURNAL_FD
from launcher.journal.read import JobJournal, TryJournal
from launcher.journal.records import LAUNCHER_RECORDS, PHASES, RANK_RECORDS

ENGINE = """
    import os, sys, time
    import torch, launcher
    model = torch.nn.Linear(16, 16)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "steps_per_print": 0,
              "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 2}}
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            time.sleep(0.01)
            return torch.full((16,), float(index))
    engine, *_ = launcher.initialize(model=model, config=config)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
    for rows in loader:
        engine.backward(engine(rows).square().mean())
        engine.step()
    engine.save_checkpoint("checkpoint")
    launcher.log(accuracy=0.5, name="end")
    engine.any_rank(False)  # all have saved
    if os.environ["LAUNCH_RESTART_COUNT"] == "0" and engine.global_rank == 1:
        time.sleep(2)  # the other rank, which is ended then, writes what it has to say twice a second
        sys.exit(3)
"""
PLAIN = """
    import os, time
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for rows in torch.utils.data.DataLoader(torch.ones(24, 16), batch_size=4):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        time.sleep(0.06)
        optimizer.step()
        other.step()
    torch.save(torch.ones(1 << 20), f"saved_{os.environ['RANK']}.pt")
"""
WAITS = """
    import time, launcher
    for step in range(10**9):
        launcher.log(step=step, text="x" * 200)
        launcher.heartbeat()
        time.sleep(0.001)
"""


def records_of(start: TryJournal, rank: int | None) -> list[dict[str, Any]]:
    file = start.launcher if rank is None else start.ranks[rank]
    records = list(file.poll())
    assert file.num_damaged == 0
    return records


def check_fields(records: list[dict[str, Any]], kinds: dict[str, dict[str, str]]) -> None:
    for record in records:
        assert record.keys() - {"kind"} <= kinds[record["kind"]].keys(), record


def of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


def test_an_engines_run_with_a_restart(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, ENGINE)
    result = run_launch(tmp_path, "--num_gpus", "2", "--max-restarts", "1", script)
    assert result.code == 0, result.err
    journal = JobJournal(next((tmp_path / "runs").iterdir()))
    first, second = journal.tries
    for start in (first, second):
        own = records_of(start, None)
        check_fields(own, LAUNCHER_RECORDS)
        assert own[0]["kind"] == "job"
        assert own[-1]["kind"] == "end"
        for rank in (0, 1):
            records = records_of(start, rank)
            check_fields(records, RANK_RECORDS)
            steps = of_kind(records, "step")
            assert sum(step["num_steps"] for step in steps) == steps[-1]["step"]
            for step in steps:
                assert step["phases"].keys() <= set(PHASES)
                assert sum(step["phases"].values()) == pytest.approx(step["duration_s"], rel=1e-3, abs=1e-4)
                assert step["phases"]["data"] >= 0.08 * step["num_steps"], "8 rows of 10 ms"
            assert steps[0].keys() == RANK_RECORDS["step"].keys() | {"kind"}
            assert of_kind(records, "save")[0]["path"].endswith("checkpoint/global_step8")
            assert of_kind(records, "log")[0]["values"] == {"accuracy": 0.5, "name": "end"}
    again = JobJournal(journal.run_folder).tries[0]
    (engine,) = of_kind(records_of(again, 0), "engine")
    assert engine["config"]["zero_optimization.stage"] == 2
    assert engine["units"][0][1] >= 16 * 17
    failure = records_of(again, None)[-1]["failure"]
    assert (failure["rank"], failure["reason"]) == (1, "exit code 3")


def test_a_run_of_plain_torch(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, PLAIN)
    assert run_launch(tmp_path, "--num_gpus", "2", script).code == 0
    (start,) = JobJournal(next((tmp_path / "runs").iterdir())).tries
    for rank in (0, 1):
        records = records_of(start, rank)
        check_fields(records, RANK_RECORDS)
        steps = of_kind(records, "step")
        assert sum(step["num_steps"] for step in steps) + 1 == steps[-1]["step"], "the first begins the clock"
        for step in steps:
            assert {"data", "backward", "update", "script"} <= step["phases"].keys()
            assert sum(step["phases"].values()) == pytest.approx(step["duration_s"], rel=1e-3, abs=1e-4)
            assert step["phases"]["script"] >= 0.055 * step["num_steps"]
        assert of_kind(records, "save")[0]["path"] == f"saved_{rank}.pt"


def test_no_journal_is_none(tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path, f"import os, launcher; launcher.log(x=1); print({JOURNAL_FD.name!r} in os.environ)"
    )
    result = run_launch(tmp_path, "--num_gpus", "1", "--no-journal", script)
    assert result.out == "[0] False\n"
    assert list((tmp_path / "runs").rglob("*.jsonl")) == []


@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_after_a_kill_the_journal_is_readable_to_its_last_whole_line(tmp_path: Path, victim: str) -> None:
    script = scripts.write(tmp_path, WAITS)
    launch = Launch(tmp_path, "--num_gpus", "2", script)
    folder = tmp_path / "runs"

    def has_grown() -> bool:
        return any(path.stat().st_size > 1 << 16 for path in folder.glob("*/rank_1.jsonl"))

    wait_until(has_grown, "a journal that grows")
    (start,) = JobJournal(next(folder.iterdir())).tries
    started = of_kind(records_of(start, None), "start")
    pid = next(record["pid"] for record in started if record["rank"] == 1)
    os.kill(launch.process.pid if victim == "launcher" else pid, signal.SIGKILL)
    launch.wait()
    (start,) = JobJournal(next(folder.iterdir())).tries
    for rank in start.ranks:  # the other one may have written nothing yet
        steps = [record["values"]["step"] for record in of_kind(records_of(start, rank), "log")]
        assert steps == list(range(len(steps)))
        assert len(steps) > (100 if rank == 1 else 0)
        data = start.ranks[rank].path.read_bytes()
        assert all(json.loads(line) for line in data.split(b"\n")[:-1])


def test_a_git_that_still_looks_at_the_folder_ends_with_the_job(tmp_path: Path) -> None:
    git = scripts.write(
        tmp_path, f"#!/bin/sh\necho $$ > {tmp_path}/new\nmv {tmp_path}/new {tmp_path}/pid\nexec sleep 60\n", "git"
    )
    git.chmod(0o755)
    script = scripts.write(tmp_path, "import os, time\nwhile not os.path.exists('pid'): time.sleep(0.02)\n")
    result = run_launch(tmp_path, script, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert result.code == 0, result.err
    wait_until(lambda: not Path("/proc", (tmp_path / "pid").read_text().strip()).exists(), "the end of git")
