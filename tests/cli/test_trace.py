"""`launch trace` on real jobs: one file of all ranks on one clock, and jobs that continue as if nothing had been."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import scripts
from harness.launch.command import ROOT, Launch, Result, run_launch, wait_until
from harness.launch.sshd import LoopbackSshd

from launcher.journal.read import JournalFile, last_record
from launcher.journal.trace_merge import read_steps
from launcher.journal.trace_request import REQUEST_FILE

# The ranks train until there is a file "stop", for at least that many steps. The same weights come out of a plain loop.
ENGINE = """
    import os, time
    import torch, torch.distributed as dist, launcher
    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    def rows(step):
        return torch.full((2, 32), float(step % 5))
    config = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 0, "zero_optimization": {"stage": 3},
              "gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    engine, *_ = launcher.initialize(model=model(), config=config)
    profiler = None
    while True:
        engine.backward(engine(rows(engine.global_steps)).square().mean())
        engine.step()
        time.sleep(0.05)
        if profiler is None and os.path.exists("profile"):
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            profiler.start()
            print("PROFILES", flush=True)
        is_over = torch.tensor(float(os.path.exists("stop")))
        dist.all_reduce(is_over)
        if is_over > 0:
            break
    if profiler is not None:
        profiler.stop()
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for step in range(engine.global_steps):
        optimizer.zero_grad()
        plain(rows(step)).square().mean().backward()
        optimizer.step()
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    print("EQUAL", flush=True)
"""
PLAIN = """
    import time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in torch.utils.data.DataLoader(torch.ones(10**6, 16), batch_size=4):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        time.sleep(0.05)
"""
Events = list[dict[str, Any]]


def trace(folder: Path, name: str, *args: str | Path) -> Launch:
    """Begin to trace a job of `folder`."""
    own = folder / name
    own.mkdir()
    return Launch(own, "trace", *args, env={"XDG_STATE_HOME": str(folder / "state")})


def wait_for_steps(run: Path) -> None:
    wait_until(
        lambda: all(last_record(run / f"rank_{rank}.jsonl", "step") is not None for rank in (0, 1)), "the first steps"
    )


def events_of(path: Path) -> Events:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: Events = json.loads(data, parse_constant=lambda name: pytest.fail(name))["traceEvents"]
    return found


def processes(events: Events) -> dict[str, int]:
    return {each["args"]["name"]: each["pid"] for each in events if each["name"] == "process_name"}


def steps_of(events: Events, pid: int) -> dict[str, tuple[float, float]]:
    steps = [each for each in events if each["pid"] == pid and each["name"].startswith("step ")]
    return {step["name"]: (step["ts"], step["ts"] + step["dur"]) for step in steps}


def check_ranks(result: Result, path: Path, names: tuple[str, str], *, least_share: float) -> Events:
    """Both ranks are there, and the steps that both have overlap: their collectives bring them together."""
    assert result.code == 0, result.err
    assert result.out.startswith(f"{path} (")
    assert "https://ui.perfetto.dev" in result.out
    events = events_of(path)
    pids = processes(events)
    assert list(pids) == [*names, "launch"]
    first, second = (steps_of(events, pids[name]) for name in names)
    assert len(first) == len(second) == 3
    common = first.keys() & second.keys()
    assert common, (first, second)
    for step in common:
        (begin, end), (other_begin, other_end) = first[step], second[step]
        assert min(end, other_end) - max(begin, other_begin) > least_share * (end - begin), step
    for each in events:
        assert each["ph"] in "XMsfi"
        assert each["ph"] != "X" or each["dur"] >= 0
    return events


def inside(events: Events, pid: int, name: str) -> bool:
    """Whether spans of that name lie within the steps of the rank."""
    steps = list(steps_of(events, pid).values())
    begin, end = min(each[0] for each in steps) - 1, max(each[1] for each in steps) + 1
    spans = [each for each in events if each["pid"] == pid and each["name"].startswith(name)]
    # One of the last may end behind: the weights of the next step are gathered then.
    return bool(spans) and all(begin <= each["ts"] <= end for each in spans)


def test_an_engines_job_is_traced_again_and_again_and_trains_on(tmp_path: Path) -> None:
    job = Launch(tmp_path, "--num_gpus", "2", scripts.write(tmp_path, ENGINE))
    run = tmp_path / "runs" / job.job_id
    wait_for_steps(run)
    result = trace(tmp_path, "all", job.job_id).wait()
    events = check_ranks(result, run / "trace_1.json.gz", ("rank 0 (localhost)", "rank 1 (localhost)"), least_share=0.5)
    for pid in (1000, 2000):
        for name in (
            "forward",
            "backward",
            "update",
            "script",
            "launch: gather of ",
            "launch: reduction of ",
            "aten::",
        ):
            assert inside(events, pid, name), name
    traced = read_steps(run / "trace_1.json.gz")
    assert traced.is_whole
    assert len(traced.steps) == 3
    assert {span.rank for span in traced.spans} == {0, 1}
    assert {"forward", "backward", "gather", "reduction"} <= {span.kind for span in traced.spans}
    wait_until(lambda: last_record(run / "rank_1.jsonl", "trace") is not None, "what the journal has of the trace")
    one = tmp_path / "one.json"
    result = trace(tmp_path, "one", job.job_id[:-1], "--ranks", "1", "--steps", "1", "-o", one).wait()
    assert result.code == 0, result.err
    assert list(processes(events_of(one))) == ["rank 1 (localhost)", "launch"]
    left = trace(tmp_path, "left", job.job_id, "--steps", "1000")
    wait_until((run / REQUEST_FILE).exists, "the request")
    again = trace(tmp_path, "again", job.job_id).wait()
    assert again.code == 2
    assert "another launch trace of this job has not ended" in again.err
    wait_until(lambda: "waiting for ranks 0, 1" in left.err, "what is said after 2 s")
    left.signal(signal.SIGINT)
    assert left.wait().code == 130
    (tmp_path / "profile").touch()
    wait_until(lambda: job.out.count("PROFILES") == 2, "the script's own profiler")
    taken = trace(tmp_path, "taken", job.job_id, "--ranks", "0").wait()
    assert taken.code == 1
    assert "there is no trace: another profiler of the script is open" in taken.err
    over = trace(tmp_path, "over", job.job_id, "--steps", "1000")
    wait_until((run / REQUEST_FILE).exists, "the request")
    (tmp_path / "stop").touch()
    assert job.wait().code == 0, job.err
    assert job.out.count("EQUAL") == 2
    result = over.wait()
    assert result.code == 1
    assert "there is no trace: " in result.err
    assert [path.name for path in run.iterdir() if "trace" in path.name] == ["trace_1.json.gz"]


@pytest.mark.cluster
def test_plain_torch_on_two_hosts_until_a_rank_is_killed(sshd: LoopbackSshd, tmp_path: Path) -> None:
    options = ["--hostfile", str(ROOT / "hostfiles" / "loopback"), "--ssh_config", str(sshd.ssh_config)]
    job = Launch(tmp_path, *options, scripts.write(tmp_path, PLAIN))
    run = tmp_path / "runs" / job.job_id
    wait_for_steps(run)
    target = tmp_path / "trace.json.gz"
    result = trace(tmp_path, "both", job.job_id, "-o", target).wait()
    events = check_ranks(result, target, ("rank 0 (127.0.0.1)", "rank 1 (127.0.0.2)"), least_share=0.25)
    assert "all_reduce" in {span.kind for span in read_steps(target).spans}
    for pid in (1000, 2000):
        for name in ("data", "backward", "update", "Optimizer.step", "aten::"):
            assert inside(events, pid, name), name
    waits = trace(tmp_path, "waits", job.job_id, "--steps", "1000", "--ranks", "1", "-o", target)
    wait_until((run / REQUEST_FILE).exists, "the request")
    started = JournalFile(run / "launcher.jsonl").poll(frozenset({"start"}))
    os.kill(next(record["pid"] for record in started if record["rank"] == 1), signal.SIGKILL)
    result = waits.wait()
    assert result.code == 1
    assert "there is no trace: it has ended before its trace was complete" in result.err
    assert job.wait().code == 137


def test_without_torch_a_journal_or_the_rank_there_is_an_answer_at_once(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import time; print('READY', flush=True); time.sleep(600)")
    job = Launch(tmp_path, script)
    wait_until(lambda: "READY" in job.out, "the rank")
    result = trace(tmp_path, "one", job.job_id).wait()
    assert result.code == 2
    assert "rank 0 has not imported torch" in result.err
    result = trace(tmp_path, "other", job.job_id, "--ranks", "0-3").wait()
    assert (result.code, "has no rank 1" in result.err) == (2, True), result.err
    job.signal(signal.SIGTERM)
    job.wait()
    result = trace(tmp_path, "over", job.job_id).wait()
    assert (result.code, "has ended" in result.err) == (2, True), result.err
    job = Launch(tmp_path, "--no-journal", script)
    wait_until(lambda: "READY" in job.out, "the rank")
    result = trace(tmp_path, "none", job.job_id).wait()
    assert (result.code, "--no-journal" in result.err) == (2, True), result.err
    job.signal(signal.SIGTERM)
    job.wait()


@pytest.mark.parametrize(
    ("args", "message"), [(("--steps", "0"), "from 1 to 1000"), (("--ranks", "a"), "no list of ranks")]
)
def test_what_no_trace_can_be_is_refused(tmp_path: Path, args: tuple[str, str], message: str) -> None:
    result = run_launch(tmp_path, "trace", "x", *args)
    assert (result.code, message in result.err) == (2, True), result.err
