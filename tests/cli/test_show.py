"""`launch show` and `launch report JOB`, of a job that really ran: two ranks of the engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import Result, run_here, run_launch
from harness.launch.journals import BEGAN_S, Try, write_job

from launcher.journal.history import read_history

NUM_STEPS = 12  # of which the last is that of an engine that has loaded a checkpoint
SCRIPT = f"""
    import time
    import torch
    import launcher
    torch.manual_seed(0)
    config = {{
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {{"stage": 1}},
        "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-2}}}},
    }}
    x = torch.randn(4, 8)

    def train(engine, steps):
        for step in steps:
            time.sleep(0.11)  # a record of each step
            loss = engine(x).pow(2).mean()
            engine.backward(loss)
            engine.step()
            launcher.log(step=step, accuracy=step / {NUM_STEPS})

    engine, *_ = launcher.initialize(model=torch.nn.Linear(8, 8), config=config)
    train(engine, range({NUM_STEPS - 1}))
    engine.save_checkpoint("saved")
    resumed, *_ = launcher.initialize(model=torch.nn.Linear(8, 8), config=config)
    resumed.load_checkpoint("saved")
    train(resumed, [{NUM_STEPS - 1}])
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("shown")
    result = run_launch(folder, "--num_gpus", "2", scripts.write(folder, SCRIPT, "train.py"))
    assert result.code == 0, result.err
    return folder, result


def test_show_says_what_a_job_did(job: tuple[Path, Result]) -> None:
    folder, result = job
    shown = run_here(folder, "show", result.job_id[:-3])
    assert shown.code == 0, shown.err
    facts = dict(re.findall(r"^(\w+) {2,}(.+)$", shown.out, flags=re.MULTILINE))
    assert facts["job"] == f"{result.job_id} · ended well (exit code 0)"
    assert facts["ran"].startswith("2 ranks on localhost · ")
    assert facts["steps"] == f"1 to {NUM_STEPS}"
    first, last = map(float, facts["loss"].split(" → "))
    assert last < first
    assert "samples/s (median)" in facts["rate"]
    assert {"goodput", "memory", "sent", "slowest", "logged"} <= set(facts)
    assert re.search(r"^ script +\d+\.\d s +\d+\.\d% +\d+ ms$", shown.out, flags=re.MULTILINE)
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "✗" not in shown.out


def test_its_json_has_the_figures(job: tuple[Path, Result]) -> None:
    folder, result = job
    found = json.loads(run_here(folder, "show", f"runs/{result.job_id}", "--json").out)
    assert (found["job_id"], found["exit_code"], found["last_step"]) == (result.job_id, 0, NUM_STEPS)
    assert found["phases_s"]["script"] > 0.1 * NUM_STEPS
    assert found["rate"]["median"] == pytest.approx(8 / 0.12, rel=0.5)
    assert 0 < found["goodput"] < 1
    assert found["logged"] == {"step": NUM_STEPS - 1, "accuracy": (NUM_STEPS - 1) / NUM_STEPS}


def test_samples_of_a_checkpoint_are_not_counted_as_those_of_a_step(job: tuple[Path, Result]) -> None:
    folder, result = job
    history = read_history(folder / "runs" / result.job_id)
    for rank in history.ranks():
        assert list(rank.columns["samples"]) == [4.0] * NUM_STEPS


def test_the_page_of_a_job_is_written(job: tuple[Path, Result]) -> None:
    folder, result = job
    written = run_here(folder, "report", f"runs/{result.job_id}")
    assert (written.code, written.out) == (0, f"{result.job_id}.html\n"), written.err
    assert f"<title>{result.job_id}</title>" in (folder / f"{result.job_id}.html").read_text()


def test_a_failure_and_verdicts_come_first_with_what_to_do(tmp_path: Path) -> None:
    verdict = {"kind": "verdict", "time_s": BEGAN_S + 3, "name": "straggler", "rank": 1, "host": "node-a"}
    own = [
        verdict | {"severity": "warning", "text": "rank 1 is a bit slow", "next": "look"},
        verdict | {"severity": "warning", "text": "rank 1 is slow", "next": "look at \x1b[31mnode-a"},
        verdict | {"name": "slowdown", "severity": "critical", "text": "it got slower", "next": None},
    ]
    write_job(tmp_path / "run", Try(exit_code=1, own=own))
    failure = {"kind": "rank failed", "host": "node-a", "rank": 1, "reason": "exit code 1", "after_s": 2.0}
    failure |= {"traceback": "Traceback\nValueError: api_key: s3cret", "hint": "mend it", "log": "runs/x/rank_1.log"}
    (tmp_path / "run" / "report.json").write_text(json.dumps({"exit_code": 1, "failure": failure}))
    lines = run_here(tmp_path, "show", "run").out.splitlines()
    assert lines[:6] == [
        '✗ rank 1 (node-a) failed 2.0 s after start: exit code 1 · ValueError: api_key: "•••"',
        "  log   runs/x/rank_1.log",
        "  next  mend it",
        "✗ it got slower",
        "! rank 1 is slow",
        "  next  look at \\x1b[31mnode-a",
    ]


def test_a_restart_is_told(tmp_path: Path) -> None:
    raised = {"kind": "raised", "time_s": BEGAN_S + 5, "rank": 1, "type": "ValueError", "message": "bad data"}
    again = Try(first_step=16, num_steps=10, began_s=BEGAN_S + 30, exit_code=None)
    write_job(tmp_path / "run", Try(exit_code=1, own=[raised]), again)
    shown = run_here(tmp_path, "show", "run").out
    assert shown.startswith("! it was started again after 6.0 s: exit code 1 · ValueError: bad data\n")
    assert "1 to 25 · 5 done again after a restart" in shown
    assert "it has not ended, or its launcher was killed" in shown


def test_what_is_no_job_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for words, message in (
        (("show", "nowhere"), 'no job "nowhere"'),
        (("show",), "no JOB is named"),
        (("show", "./empty"), "empty: there is no journal"),
        (("report", "nowhere"), 'no job "nowhere"'),
        (("report", "-o", "x.html"), "--output: no JOB is named"),
        (("report", "nowhere", "--json"), "--json: it says what is installed here, without a page of jobs"),
    ):
        result = run_here(tmp_path, *words)
        assert (result.code, message in result.err) == (2, True), result.err


def test_a_run_folder_that_is_not_here_is_named(tmp_path: Path) -> None:
    entry = {"job_id": "calm-otter-0001", "machine": "far-away", "pid": 1, "process": "", "started_s": 1.0}
    entry |= {"hosts": ["far-away"], "num_ranks": 1, "command": ["t.py"], "cwd": "/", "run_folder": "/no/such/run"}
    jobs = tmp_path / "state" / "launch" / "jobs"
    jobs.mkdir(parents=True)
    (jobs / "calm-otter-0001.json").write_text(json.dumps(entry | {"grace_s": 1.0}))
    result = run_here(tmp_path, "show", "calm-otter-0001")
    assert result.code == 2
    assert "/no/such/run: the run folder of calm-otter-0001 is not here" in result.err
    assert "it is on far-away" in result.err
