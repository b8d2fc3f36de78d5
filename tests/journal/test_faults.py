"""`launch --fault`: what it does to a rank, and whether the run names it, with the engine and with plain DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.launch.command import ROOT, run_launch

from launcher.journal.checks import RULES
from launcher.journal.faults import parse_fault

BEATS = "import launcher, time\nfor _ in range(30):\n    launcher.heartbeat()\n    time.sleep(0.01)\nprint('done')\n"
STEPS = """
import sys, torch
import torch.distributed as dist
import launcher
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
if sys.argv[1] == "engine":
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    engine, optimizer, *_ = launcher.initialize(model=model, config=config)
else:
    dist.init_process_group("gloo")
    engine = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = engine(torch.randn(4, 64)).square().mean()
    if sys.argv[1] == "engine":
        engine.backward(loss)
        engine.step()
    else:
        loss.backward()
        optimizer.step()
    if len(sys.argv) > 2 and step == 30:
        torch.save(torch.zeros(100_000), sys.argv[2] + str(dist.get_rank()))
    notices = torch.tensor([float(launcher.preempted())])
    dist.all_reduce(notices)
    if notices.item():
        sys.exit(launcher.EXIT_REQUEUE)
dist.barrier()
"""


def _report(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("runs/*/report.json")
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def _run(folder: Path, *arguments: str, ranks: int = 2, script: str = STEPS) -> tuple[Any, dict[str, Any]]:
    (folder / "script.py").write_text(script)
    result = run_launch(folder, "--num_gpus", str(ranks), *arguments)
    return result, _report(folder)


@pytest.mark.parametrize("kind", ["engine", "plain"])
def test_a_killed_rank_is_named_and_the_restart_is_whole(tmp_path: Path, kind: str) -> None:
    options = ("--fault", "kill@10:1", "--max-restarts", "1", "script.py", kind)
    result, report = _run(tmp_path, *options)
    assert result.code == 0, result.err
    assert "a fault is rehearsed (--fault kill@10:1): after step 10 on rank 1 the rank is killed" in result.err
    assert report["tries"][0]["reason"] == "killed by SIGKILL"
    assert report["tries"][0]["rank"] == 1
    (first,) = tmp_path.glob("runs/*/rank_1.jsonl")
    assert '"kind":"fault"' in first.read_text()
    assert "steps · " in result.err.splitlines()[-1]
    assert 36 <= report["training"]["num_steps"] <= 40  # not those that were done again


@pytest.mark.parametrize("kind", ["engine", "plain"])
def test_the_rank_whose_loss_is_nan_first_is_named(tmp_path: Path, kind: str) -> None:
    result, report = _run(tmp_path, "--fault", "nan@10:1", "script.py", kind)
    assert [(each["name"], each["rank"]) for each in report["verdicts"]] == [("bad_data", 1)]
    assert "! the loss of rank 1 is not finite where that of the others is" in result.err
    (journal,) = tmp_path.glob("runs/*/launcher.jsonl")
    assert '"kind":"verdict"' in journal.read_text()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    _, report = _run(tmp_path, "--fault", "diskfull@5:1", "script.py", "plain", "saved")
    (verdict,) = report["verdicts"]
    assert (verdict["name"], verdict["rank"]) == ("failure", 1)
    assert report["failure"]["rank"] == 1


def test_a_notice_is_passed_on(tmp_path: Path) -> None:
    result, report = _run(tmp_path, "--fault", "preempt@5", "script.py", "plain", script=STEPS.replace("40", "100000"))
    assert result.code == 75
    assert "the job is about to be preempted" in result.err
    assert report["failure"] is None


def test_heartbeats_count_as_steps(tmp_path: Path) -> None:
    result, report = _run(tmp_path, "--fault", "kill@20", "script.py", ranks=1, script=BEATS)
    assert result.code == 137
    assert report["failure"]["rank"] == 0
    assert "steps" not in result.err.splitlines()[-1]  # a run without steps has no such line


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("melt@3", "there is no fault 'melt'"),
        ("kill", "expected kill@STEP"),
        ("kill@0", "expected kill@STEP"),
        ("kill@three", "expected kill@STEP"),
        ("kill@3:x", "expected kill@STEP"),
        ("kill@3:9", "there is no rank 9 in a world of 1"),
    ],
)
def test_a_wrong_form_is_an_error(tmp_path: Path, fault: str, words: str) -> None:
    (tmp_path / "script.py").write_text("")
    result = run_launch(tmp_path, "--num_gpus", "1", "--fault", fault, "script.py")
    assert result.code == 2
    assert words in result.err
    assert "--fault" in result.err


def test_steps_are_counted_in_the_journal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    result = run_launch(tmp_path, "--no-journal", "--fault", "kill@3", "script.py")
    assert result.code == 2
    assert "--fault needs the journal" in result.err


def test_a_fault_is_written_as_it_is_read() -> None:
    for text in ("kill@20", "slow@1:3"):
        assert str(parse_fault(text)) == text


def test_the_page_has_every_rule() -> None:
    page = (ROOT / "docs" / "verdicts.md").read_text()
    assert [name for name in RULES if f"`{name}`" not in page] == []
