"""Restarts: the same hosts, spare hosts, fewer hosts; real processes, and the decision alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import pytest
from harness import scripts
from harness.launching import run_launch

from launcher.base.errors import TransportError
from launcher.cluster.cluster import Cluster, Host, place
from launcher.job.plan import Command, JobPlan
from launcher.job.report import Failure, RunReport
from launcher.job.restart import RestartPolicy, run_with_restarts

FAILS_TWICE = """
    import os, sys, time
    print("TRY", os.environ["LAUNCH_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"], os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "1" and int(os.environ["LAUNCH_RESTART_COUNT"]) < 2:
        time.sleep(0.3)  # the other has printed by then
        sys.exit(5)
"""


def test_a_job_that_recovers_ends_well(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, FAILS_TWICE)
    result = run_launch(tmp_path, "--num_gpus", "2", "--max-restarts", "3", script)
    assert result.code == 0
    assert [f"[0] TRY {count} 3" in result.out for count in range(4)] == [True, True, True, False]
    assert "restart 2 of 3" in result.out
    assert result.err.count("✗ rank 1") == 2
    run = next((tmp_path / "runs").iterdir())
    codes = [
        json.loads((run / name / "report.json").read_text())["exit_code"] for name in ("", "restart_1", "restart_2")
    ]
    assert codes == [5, 5, 0]
    assert "TRY 1" in (run / "restart_1/rank_0.log").read_text()


def test_the_last_failure_s_code_is_the_command_s(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, FAILS_TWICE)
    result = run_launch(tmp_path, "--num_gpus", "2", "--max_restarts", "1", script)
    assert result.code == 5
    assert result.out.count("[0] TRY") == 2


# ---- the decision ----


class Quiet:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def restarting(self, plan: JobPlan, report: RunReport) -> None: ...

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def plan_for(cluster: Cluster) -> JobPlan:
    placement = place(cluster)
    kinds = {node.node_rank: "ssh" for node in placement.nodes}
    return JobPlan("job", placement, Command("script", "t.py", ()), "/", Path("runs/job"), "a", None, kinds, kinds, {})


def report(exit_code: int = 0, lost_host: str | None = None, rank: int | None = None) -> RunReport:
    failure = None
    if exit_code:
        failure = Failure(lost_host or "a", rank, None, exit_code, None, 0.0, "", "", (), None)
    return RunReport("job", exit_code, 1, 0.0, None, failure, 0, 0.0, ())


def hosts_of_runs(
    policy: RestartPolicy, outcomes: list[RunReport | TransportError]
) -> tuple[list[list[str]], RunReport]:
    runs: list[list[str]] = []

    def run(plan: JobPlan) -> RunReport:
        runs.append([node.host.name for node in plan.placement.nodes])
        outcome = outcomes[len(runs) - 1]
        if isinstance(outcome, TransportError):
            raise outcome
        return outcome

    first = plan_for(Cluster((Host("a", (0, 1)), Host("b", (0, 1)))))
    return runs, run_with_restarts(first, policy, run, plan_for, cast(Any, Quiet()))


def test_a_failing_rank_restarts_on_the_same_hosts() -> None:
    runs, last = hosts_of_runs(RestartPolicy(max_restarts=2), [report(1, rank=0), report(0)])
    assert runs == [["a", "b"], ["a", "b"]]
    assert last.exit_code == 0


def test_a_spare_takes_the_place_and_rank_of_a_lost_host() -> None:
    policy = RestartPolicy(max_restarts=2, spares=(Host("c", (0, 1, 2)),))
    runs, _ = hosts_of_runs(policy, [report(69, "a"), report(0)])
    assert runs == [["a", "b"], ["c", "b"]]


def test_fewer_hosts_go_on_when_they_are_enough() -> None:
    runs, last = hosts_of_runs(RestartPolicy(max_restarts=1, min_nodes=1), [report(69, "a"), report(0)])
    assert runs == [["a", "b"], ["b"]]
    assert last.exit_code == 0


def test_too_few_hosts_end_the_job() -> None:
    runs, last = hosts_of_runs(RestartPolicy(max_restarts=3), [report(69, "a")])
    assert runs == [["a", "b"]]
    assert last.exit_code == 69


def test_a_host_that_cannot_be_reached_at_a_restart_is_lost_too() -> None:
    gone = TransportError("no route", where="b")
    policy = RestartPolicy(max_restarts=1, spares=(Host("c", (0, 1)),))
    runs, _ = hosts_of_runs(policy, [report(1, rank=0), gone, report(0)])
    assert runs == [["a", "b"], ["a", "b"], ["a", "c"]]


def test_an_interrupt_is_no_reason_to_start_again() -> None:
    interrupted = dataclasses.replace(report(130, rank=0), interrupted_by="SIGINT")
    runs, _ = hosts_of_runs(RestartPolicy(max_restarts=3), [interrupted])
    assert len(runs) == 1


def test_the_first_start_must_succeed() -> None:
    with pytest.raises(TransportError, match="no route"):
        hosts_of_runs(RestartPolicy(max_restarts=3), [TransportError("no route", where="b")])
