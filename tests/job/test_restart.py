"""Restarts: the same hosts, spare hosts, fewer hosts; real processes, and the decision alone."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from harness import scripts
from harness.launch.command import Launch, run_launch, wait_until
from harness.launch.forked_ranks import in_forks
from harness.launch.sshd import LoopbackSshd
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import ConfigError, TransportError, UsageError
from launcher.base.processes import members_of_job
from launcher.base.timeouts import Timeouts
from launcher.cluster.cluster import Cluster, Host, Placement, place
from launcher.fleet.signals import SignalQueue
from launcher.job import logs
from launcher.job.controller import master_findings
from launcher.job.events import Failure, FailureKind, RunReport
from launcher.job.restart import RestartPolicy, WorldSizes, largest_fit, run_with_restarts
from launcher.plan.engine_config import EngineConfig
from launcher.plan.plan import Command, JobPlan
from launcher.plan.planning import Here, Job
from launcher.plan.request import Request
from launcher.plan.variables import ladder_variables
from launcher.planner.ladder import EngineFacts, advice_for
from launcher.transport.ssh.options import SshOptions

PATCH = "LAUNCH_CONFIG_PATCH"
FAILS_TWICE = """
    import os, sys, time
    count = os.environ["LAUNCH_RESTART_COUNT"]
    print("TRY", count, os.environ["TORCHELASTIC_MAX_RESTARTS"], os.environ["MASTER_PORT"], flush=True)
    if os.environ["RANK"] == "0":
        open(f"tried.{count}", "w").close()
    elif int(count) < 2:
        while not os.path.exists(f"tried.{count}"):
            time.sleep(0.02)
        sys.exit(5)
"""


def test_a_job_that_recovers_ends_well(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, FAILS_TWICE)
    result = run_launch(tmp_path, "--num_gpus", "2", "--max-restarts", "3", script)
    assert result.code == 0
    assert [f"[0] TRY {count} 3" in result.out for count in range(4)] == [True, True, True, False]
    assert "restart 2 of 3" in result.err
    assert result.err.count("✗ rank 1") == 2
    run = next((tmp_path / "runs").iterdir())
    codes = [
        json.loads((run / name / "report.json").read_text())["exit_code"] for name in ("", "restart_1", "restart_2")
    ]
    assert codes == [0, 5, 0]
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

    def waiting(self, what: str) -> None: ...

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def plan_for(cluster: Cluster) -> JobPlan:
    placement = place(cluster)
    kinds = {node.node_rank: "ssh" for node in placement.nodes}
    address = placement.nodes[0].host.name
    return JobPlan("job", placement, Command("script", "t.py", ()), "/", Path("runs/job"), address, None, kinds, {})


def report(exit_code: int = 0, lost_host: str | None = None, rank: int | None = None) -> RunReport:
    failure = None
    if exit_code:
        failure = Failure(lost_host or "a", rank, None, exit_code, None, 0.0, "", "", (), None)
    return RunReport("job", exit_code, 1, 0.0, None, failure, 0, 0.0, ())


def hosts_of_runs(
    policy: RestartPolicy,
    outcomes: list[RunReport | TransportError],
    names: str = "ab",
    quiet: Quiet | None = None,
    signals: SignalQueue | None = None,
    replan: Callable[[Cluster], JobPlan] = plan_for,
) -> tuple[list[list[str]], RunReport]:
    runs: list[list[str]] = []
    signals = signals or SignalQueue(())

    def run(plan: JobPlan) -> RunReport:
        runs.append([node.host.name for node in plan.placement.nodes])
        outcome = outcomes[len(runs) - 1]
        if isinstance(outcome, TransportError):
            raise outcome
        return outcome

    first = plan_for(Cluster(tuple(Host(name, (0, 1)) for name in names)))
    policy = dataclasses.replace(policy, first_delay_s=0.0)
    with tempfile.TemporaryDirectory() as folder:
        first = dataclasses.replace(first, run_folder=Path(folder))
        return runs, run_with_restarts(first, policy, run, replan, cast(Any, quiet or Quiet()), signals)


def test_a_failing_rank_restarts_on_the_same_hosts() -> None:
    runs, last = hosts_of_runs(RestartPolicy(max_restarts=2), [report(1, rank=0), report(0)])
    assert runs == [["a", "b"], ["a", "b"]]
    assert last.exit_code == 0


def test_a_spare_takes_the_place_and_rank_of_a_lost_host() -> None:
    policy = RestartPolicy(max_restarts=2, spares=(Host("c", (0, 1, 2)),))
    quiet = Quiet()
    runs, _ = hosts_of_runs(policy, [report(69, "a"), report(0)], quiet=quiet)
    assert runs == [["a", "b"], ["c", "b"]]
    assert quiet.warnings == ["a was lost: replaced by c"]


def test_a_spare_gives_as_many_ranks_as_the_host_that_it_replaces() -> None:
    plans: list[JobPlan] = []

    def run(plan: JobPlan) -> RunReport:
        plans.append(plan)
        return report(69, "a") if len(plans) == 1 else report(0)

    with tempfile.TemporaryDirectory() as folder:
        hosts = Cluster((Host("a", (0, 1)), Host("b", (0, 1))))
        first = dataclasses.replace(plan_for(hosts), run_folder=Path(folder))
        policy = RestartPolicy(max_restarts=1, spares=(Host("c", (0, 1, 2, 3)),), first_delay_s=0.0)
        run_with_restarts(first, policy, run, plan_for, cast(Any, Quiet()), SignalQueue(()))
    assert [plan.placement.world_size for plan in plans] == [4, 4]
    assert [node.host.slots for node in plans[1].placement.nodes] == [(0, 1), (0, 1)]


def test_a_host_that_ended_its_ranks_while_launch_was_away_is_used_again() -> None:
    away = report(69, "a")
    assert away.failure is not None
    away = dataclasses.replace(away, failure=dataclasses.replace(away.failure, away_s=41.0))
    policy = RestartPolicy(max_restarts=1, spares=(Host("c", (0, 1)),))
    runs, _ = hosts_of_runs(policy, [away, report(0)])
    assert runs == [["a", "b"], ["a", "b"]]


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


@pytest.mark.parametrize(
    ("cut_off", "names", "hosts", "said"),
    [
        ("bcd", "abcd", "ebcd", "a: a, where ranks are to meet, gives no answer at port 1 on b,c,d"),
        ("abcd", "abcd", "ebcd", "a: a, where ranks are to meet, gives no answer at port 1 on a,b,c,d"),
        ("c", "abcd", "abed", "c: a, where ranks are to meet, gives no answer at port 1 there"),
        ("b", "ab", "ae", "b: a, where ranks are to meet, gives no answer at port 1 there"),
    ],
)
def test_a_restart_does_without_node_0_where_no_other_host_reaches_it(
    cut_off: str, names: str, hosts: str, said: str
) -> None:
    plan = plan_for(Cluster(tuple(Host(name, (0, 1)) for name in names)))
    found = master_findings(plan, dict.fromkeys(cut_off, "gives no answer at port 1"))
    policy, quiet = RestartPolicy(max_restarts=1, spares=(Host("e", (0, 1)),)), Quiet()
    outcomes = [report(1, rank=0), TransportError.from_diagnostics(found), report(0)]
    runs, _ = hosts_of_runs(policy, outcomes, names, quiet)
    assert runs == [list(names), list(names), list(hosts)]
    assert quiet.warnings[0].startswith(f"{said}; give --master-addr an address of a")


def test_an_address_that_was_given_for_node_0_is_of_no_use_without_it() -> None:
    """It would name each host that follows as the one that is not reached."""
    policy, quiet = RestartPolicy(max_restarts=5, spares=(Host("e", (0, 1)),)), Quiet()
    outcomes: list[RunReport | TransportError] = [report(69, lost_host="a")]
    runs, last = hosts_of_runs(
        policy, outcomes, "abc", quiet, replan=lambda cluster: dataclasses.replace(plan_for(cluster), master_addr="a")
    )
    assert runs == [["a", "b", "c"]]
    assert last.exit_code == 69
    assert quiet.warnings[-1].startswith("no restart: --master-addr a was an address of a, and node 0 would be e now")


def test_an_interrupt_is_no_reason_to_start_again() -> None:
    interrupted = dataclasses.replace(report(130, rank=0), interrupted_by="SIGINT")
    runs, _ = hosts_of_runs(RestartPolicy(max_restarts=3), [interrupted])
    assert len(runs) == 1


def test_wrong_options_are_no_reason_to_start_again_and_a_full_disk_is_one_for_another_host() -> None:
    wrong, full = report(2, "a"), report(1, "a")
    assert wrong.failure is not None
    assert full.failure is not None
    wrong = dataclasses.replace(wrong, failure=dataclasses.replace(wrong.failure, kind=FailureKind.NOT_STARTED))
    full = dataclasses.replace(full, failure=dataclasses.replace(full.failure, kind=FailureKind.NOT_STARTED))
    policy = RestartPolicy(max_restarts=1, spares=(Host("c", (0, 1)),))
    assert hosts_of_runs(policy, [wrong])[0] == [["a", "b"]]
    assert hosts_of_runs(policy, [full, report(0)])[0] == [["a", "b"], ["c", "b"]]


def test_the_delay_grows_with_failures_in_a_row_up_to_a_limit() -> None:
    assert [RestartPolicy().delay_s(number) for number in (1, 2, 3, 7, 1000)] == [0.5, 1.0, 2.0, 30.0, 30.0]


def test_the_report_of_the_job_is_the_last_tries_and_lists_them_all(tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path, "import os, sys; sys.exit({'0': 5, '1': 6}.get(os.environ['LAUNCH_RESTART_COUNT'], 0))"
    )
    start_s = time.monotonic()
    result = run_launch(tmp_path, "--max-restarts", "3", script)
    assert result.code == 0
    assert time.monotonic() - start_s > 1.5  # 0.5 s and 1 s between the tries
    (folder,) = tmp_path.glob("runs/*-*")
    last = json.loads((folder / "report.json").read_text())
    assert (last["exit_code"], last["failure"], last["restart"]) == (0, None, 2)
    assert [(entry["restart"], entry["exit_code"], entry["reason"]) for entry in last["tries"]] == [
        (0, 5, "exit code 5"),
        (1, 6, "exit code 6"),
        (2, 0, None),
    ]
    assert json.loads((folder / "restart_1" / "report.json").read_text())["exit_code"] == 6


def test_a_disk_that_stalls_between_two_runs_does_not_keep_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, quiet = threading.Event(), Quiet()
    monkeypatch.setattr(RunReport, "save", lambda *_: answers.wait())
    monkeypatch.setattr(logs, "timeouts", lambda: Timeouts(disk_stall_s=0.2))
    runs, last = hosts_of_runs(RestartPolicy(max_restarts=2), [report(1, rank=0), report(0)], quiet=quiet)
    answers.set()
    assert (len(runs), last.exit_code) == (2, 0)
    (warning,) = quiet.warnings
    assert warning.endswith("/report.json could not be written: the disk does not answer")


def test_the_first_start_must_succeed() -> None:
    with pytest.raises(TransportError, match="no route"):
        hosts_of_runs(RestartPolicy(max_restarts=3), [TransportError("no route", where="b")])


# ---- after a notice ----


def test_ranks_that_saved_because_of_a_notice_start_again_and_that_is_not_counted() -> None:
    policy = RestartPolicy(max_restarts=1, after_notice=True)
    saved, failed = report(), report(1, rank=0)
    saved = dataclasses.replace(saved, exit_code=75)
    runs, last = hosts_of_runs(policy, [saved, failed, saved, saved, report(0)])
    assert len(runs) == 5
    assert last.exit_code == 0
    runs, last = hosts_of_runs(policy, [saved, failed, saved, failed])
    assert len(runs) == 4
    assert last.exit_code == 1


FACTS = EngineFacts(device="cuda", stage=1, num_shards=4, micro_batch=1, accumulation=1, trains=True, recomputes=True)


def out_of_memory(facts: EngineFacts | None, tried: tuple[dict[str, Any], ...] = ()) -> RunReport:
    ended = report(1, rank=0)
    assert ended.failure is not None
    failure = dataclasses.replace(ended.failure, memory="device", engine=facts)
    return dataclasses.replace(ended, failure=failure, advice=advice_for("device", facts, tried))


def plans_of_runs(policy: RestartPolicy, outcomes: list[RunReport], quiet: Quiet | None = None) -> list[JobPlan]:
    plans: list[JobPlan] = []

    def run(plan: JobPlan) -> RunReport:
        plans.append(plan)
        return outcomes[len(plans) - 1]

    with tempfile.TemporaryDirectory() as folder:
        first = dataclasses.replace(plan_for(Cluster((Host("a", (0, 1)),))), run_folder=Path(folder))
        policy = dataclasses.replace(policy, first_delay_s=0.0)
        run_with_restarts(first, policy, run, plan_for, cast(Any, quiet or Quiet()), SignalQueue(()))
    return plans


def test_rungs_of_the_ladder_add_up_and_are_not_counted_as_failures() -> None:
    at_2 = dataclasses.replace(FACTS, stage=2)
    outcomes = [out_of_memory(FACTS), report(1, rank=0), out_of_memory(at_2), report(0)]
    plans = plans_of_runs(RestartPolicy(max_restarts=1, climbs_down=True), outcomes)
    assert [plan.num_failures for plan in plans] == [0, 0, 1, 1]
    assert [plan.resume for plan in plans] == ["", "auto", "auto", "auto"]
    assert [ladder_variables(plan, {}) for plan in plans[:2]] == [
        {}, {"LAUNCH_CONFIG_PATCH": '{"zero_optimization": {"stage": 2}}'},
    ]  # fmt: skip
    last = json.loads(ladder_variables(plans[3], {"LAUNCH_CONFIG_PATCH": '{"bf16": {"enabled": true}}'})[PATCH])
    assert last == {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }


def test_the_ladder_is_for_those_who_ask_for_it_and_ends() -> None:
    lowest = dataclasses.replace(FACTS, stage=3, optimizer="cpu", param="cpu")
    assert len(plans_of_runs(RestartPolicy(), [out_of_memory(FACTS)])) == 1
    assert len(plans_of_runs(RestartPolicy(max_restarts=5, climbs_down=True), [out_of_memory(lowest)])) == 1
    again = [out_of_memory(FACTS), out_of_memory(FACTS, ({"zero_optimization": {"stage": 2}},))]
    assert len(plans_of_runs(RestartPolicy(climbs_down=True), again)) == 2


def test_without_an_engine_restarts_are_as_ever() -> None:
    quiet = Quiet()
    policy = RestartPolicy(max_restarts=1, climbs_down=True)
    plans = plans_of_runs(policy, [out_of_memory(None), report(0)], quiet)
    assert (len(plans), plans[1].num_failures, plans[1].rungs) == (2, 1, ())
    assert quiet.warnings == [
        "no ladder: the rank had built no engine of this package, so there is no config to change"
    ]


def test_where_nodes_are_taken_away_after_a_notice_the_job_ends_with_its_code() -> None:
    saved = dataclasses.replace(report(), exit_code=75)
    runs, last = hosts_of_runs(RestartPolicy(max_restarts=3), [saved])
    assert len(runs) == 1
    assert last.exit_code == 75


@pytest.mark.parametrize("are_taken_away", [True, False])
def test_a_rank_that_fails_after_a_notice_starts_again_only_where_the_nodes_stay(are_taken_away: bool) -> None:
    signals, quiet = SignalQueue(()), Quiet()
    signals.ask(signal.SIGUSR1)
    policy = RestartPolicy(max_restarts=3, ends_with_notice=are_taken_away)
    runs, last = hosts_of_runs(policy, [report(1, rank=0), report(0)], quiet=quiet, signals=signals)
    assert (len(runs), last.exit_code) == ((1, 1) if are_taken_away else (2, 0))
    assert ("no restart: the job is about to be preempted" in quiet.warnings) == are_taken_away


def test_a_rank_that_ends_with_75_without_a_notice_has_failed() -> None:
    policy = RestartPolicy(max_restarts=1, after_notice=True)
    runs, last = hosts_of_runs(policy, [report(75, rank=0), report(75, rank=0)])
    assert len(runs) == 2
    assert last.exit_code == 75


def test_the_number_of_the_restart_after_a_notice_is_its_own(tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, sys, time
        import launcher
        count = os.environ["LAUNCH_RESTART_COUNT"]
        print("TRY", count, flush=True)
        while count == "0" and not launcher.preempted():
            time.sleep(0.01)
        sys.exit({"0": launcher.EXIT_REQUEUE, "1": 5}.get(count, 0))
        """,
    )
    job = Launch(tmp_path, "--max-restarts", "1", script)
    wait_until(lambda: "TRY 0" in job.out, "the rank")
    job.signal(signal.SIGUSR1)
    result = job.wait()
    assert result.code == 0, result.err
    assert [line.split()[-1] for line in result.out.splitlines() if "TRY" in line] == ["0", "1", "2"]
    assert "the ranks have saved, and start again" in result.err
    assert "restart 1 of 1" in result.err
    (folder,) = tmp_path.glob("runs/*-*")
    tries = json.loads((folder / "report.json").read_text())["tries"]
    assert [entry["exit_code"] for entry in tries] == [75, 5, 0]


# ---- only some world sizes fit the config ----


def fits(*world_sizes: int) -> WorldSizes:
    return lambda: world_sizes


def test_a_world_that_fits_keeps_all_hosts_that_are_left() -> None:
    policy = RestartPolicy(max_restarts=1, min_nodes=1, world_sizes=fits(2, 4, 6))
    runs, _ = hosts_of_runs(policy, [report(69, "b"), report(0)], "abc")
    assert runs == [["a", "b", "c"], ["a", "c"]]


def test_hosts_are_left_out_until_the_world_fits_and_are_spare_from_then_on() -> None:
    quiet = Quiet()
    policy = RestartPolicy(max_restarts=2, min_nodes=1, world_sizes=fits(2, 4, 8))
    runs, last = hosts_of_runs(policy, [report(69, "a"), report(69, "b"), report(0)], "abcd", quiet)
    assert runs == [["a", "b", "c", "d"], ["b", "c"], ["d", "c"]]
    assert quiet.warnings == ["excluded to reach a valid world size: d", "b was lost: replaced by d"]
    assert last.exit_code == 0


@pytest.mark.parametrize(("min_nodes", "world_sizes"), [(2, (2, 6)), (1, (3, 5, 6)), (1, (8,))])
def test_no_world_that_fits_ends_the_job_with_the_reason(min_nodes: int, world_sizes: tuple[int, ...]) -> None:
    quiet = Quiet()
    policy = RestartPolicy(max_restarts=2, min_nodes=min_nodes, world_sizes=fits(*world_sizes))
    runs, last = hosts_of_runs(policy, [report(69, "a")], "abc", quiet)
    assert len(runs) == 1
    assert last.exit_code == 69
    assert quiet.warnings == [
        f"no restart: no valid world size on {min_nodes} or more of the remaining hosts (4 ranks in all); "
        f"elasticity allows {', '.join(map(str, world_sizes))} ranks"
    ]


def test_a_plan_that_is_refused_ends_the_job_with_the_report_of_its_last_run() -> None:
    def refuse(cluster: Cluster) -> JobPlan:
        raise UsageError(f"{len(cluster.hosts)} host cannot be")

    quiet = Quiet()
    policy = RestartPolicy(max_restarts=1, min_nodes=1, first_delay_s=0.0)
    first = plan_for(Cluster((Host("a", (0,)), Host("b", (0,)))))
    last = run_with_restarts(first, policy, lambda _: report(69, "b"), refuse, cast(Any, quiet), SignalQueue(()))
    assert last.exit_code == 69
    assert quiet.warnings == ["no restart: 1 host cannot be"]


def test_faults_are_not_of_a_restart(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    request = Request(
        command=Command("script", "t.py", ()),
        hostfile=str(tmp_path / "hosts"),
        max_restarts=1,
        min_nodes=1,
        faults=("slow@1000:1",),
        master_addr="a",
    )
    job = Job(request, Here({}, str(tmp_path), (), 1), SshOptions())
    try:
        assert job.plan().faults == ("slow@1000:1",)
        assert job.plan(Cluster((Host("a", (0,)),))).faults == ()
    finally:
        job.close()


def test_a_config_that_was_broken_meanwhile_ends_the_job_with_its_own_error() -> None:
    def broken() -> tuple[int, ...]:
        raise ConfigError("the config is empty", where="ds.json")

    quiet = Quiet()
    policy = RestartPolicy(max_restarts=1, min_nodes=1, world_sizes=broken)
    _, last = hosts_of_runs(policy, [report(69, "a")], quiet=quiet)
    assert quiet.warnings == ["no restart: ds.json: the config is empty"]
    assert last.exit_code == 69


def test_a_failing_rank_does_not_ask_for_world_sizes() -> None:
    policy = RestartPolicy(max_restarts=1, min_nodes=1, world_sizes=fits(2))
    runs, _ = hosts_of_runs(policy, [report(1, rank=0), report(0)])
    assert runs == [["a", "b"], ["a", "b"]]


def hosts_with(*num_slots: int) -> tuple[Host, ...]:
    return tuple(Host(f"h{number}", tuple(range(count))) for number, count in enumerate(num_slots))


@pytest.mark.parametrize(
    ("num_slots", "world_sizes", "min_hosts", "expected"),
    [
        ((1, 1, 1), (1, 2, 3), 1, "h0 h1 h2"),
        ((1, 1, 1), (1, 2, 4), 1, "h0 h1"),
        ((2, 1, 2), (4,), 1, "h0 h2"),
        ((4, 2, 2), (4,), 1, "h1 h2"),  # as many hosts as possible
        ((4, 2, 2), (4,), 3, None),
        ((8, 8), (1, 2, 4), 1, None),
        ((), (1,), 1, None),
    ],
)
def test_the_largest_fit(
    num_slots: tuple[int, ...], world_sizes: tuple[int, ...], min_hosts: int, expected: str | None
) -> None:
    chosen = largest_fit(hosts_with(*num_slots), world_sizes, min_hosts)
    assert expected == (None if chosen is None else " ".join(host.name for host in chosen))


@given(st.lists(st.integers(1, 5), max_size=7), st.sets(st.integers(1, 20), max_size=5), st.integers(1, 4))
def test_the_largest_fit_is_what_trying_every_choice_finds(
    num_slots: list[int], world_sizes: set[int], min_hosts: int
) -> None:
    hosts = hosts_with(*num_slots)
    choices = [
        choice
        for count in range(max(1, min_hosts), len(hosts) + 1)
        for choice in itertools.combinations(hosts, count)
        if sum(len(host.slots) for host in choice) in world_sizes
    ]
    chosen = largest_fit(hosts, world_sizes, min_hosts)
    assert (chosen is None) == (not choices)
    if chosen is not None:
        num_ranks = sum(len(host.slots) for host in chosen)
        assert num_ranks == max(sum(len(host.slots) for host in choice) for choice in choices)
        assert chosen in choices


def placed(num_ranks: int) -> Placement:
    """Return so many ranks on one host."""
    return place(Cluster((Host("localhost", tuple(range(num_ranks))),)))


@pytest.mark.parametrize("kind", ["file", "base64", "text"])
def test_a_run_asks_the_config_among_the_script_s_arguments(tmp_path: Path, kind: str) -> None:
    source = json.dumps(ELASTIC)
    if kind == "file":
        (tmp_path / "ds.json").write_text(source)
        source = str(tmp_path / "ds.json")
    elif kind == "base64":  # how a job file passes a config on
        source = base64.b64encode(source.encode()).decode()
        assert len(source) > 255  # longer than a file name may be
    arguments = ["--lr", "1", "--deepspeed", source]
    assert EngineConfig(arguments).world_sizes() == (1, 2, 3, 4, 6)
    EngineConfig(arguments).check(placed(6))
    with pytest.raises(ConfigError, match="world size 5 does not fit"):
        EngineConfig(arguments).check(placed(5))


def test_a_run_without_an_elastic_config_goes_on_with_any_world(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 7}')
    for arguments in (
        ["--lr", "1"],
        ["--deepspeed", str(tmp_path / "ds.json")],
        ["--deepspeed", "on/other/hosts.json"],
    ):
        assert EngineConfig(arguments).world_sizes() is None
        EngineConfig(arguments).check(placed(5))


def test_a_world_that_does_not_fit_ends_before_any_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ELASTIC, indent=1))
    script = scripts.write(tmp_path, "open('ran', 'w')")
    result = run_launch(tmp_path, "--num_gpus", "5", script, "--deepspeed", "ds.json")
    assert result.code == 2
    assert (
        "ds.json:2:16: world size 5 does not fit the elastic batch 12\n  → the nearest that fit: 4 and 6" in result.err
    )
    assert not (tmp_path / "ran").exists()


ELASTIC = {
    "elasticity": {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3], "max_gpus": 8},
    "steps_per_print": 0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}
TRAINS_UNTIL_A_HOST_IS_LOST = """
    import argparse, os, signal, time, torch, launcher
    parser = launcher.add_config_arguments(argparse.ArgumentParser())
    model = torch.nn.Linear(4, 1)
    engine, *_ = launcher.initialize(args=parser.parse_args(), model=model)
    micro = engine.train_micro_batch_size_per_gpu()
    while engine.global_steps < 2:
        engine.backward(engine(torch.ones(micro, 4)).square().mean())
        engine.step()
    print("TRAINED", os.environ["WORLD_SIZE"], "ranks", engine.global_samples // 2, "samples a step", flush=True)
    if os.environ["LAUNCH_RESTART_COUNT"] == "0":
        if os.environ["RANK"] == "1":
            time.sleep(1.0)  # the others have printed by then
            os.kill(int(os.environ["TEST_AGENT_PID"]), signal.SIGKILL)  # to the launcher, its host is gone
        time.sleep(600)
"""


@pytest.mark.cluster
def test_fewer_hosts_train_on_with_the_same_batch(sshd: LoopbackSshd, tmp_path: Path) -> None:
    """Three hosts, one is lost: the two that are left train with other micro-batches and the same batch."""
    (tmp_path / "hosts").write_text("".join(f"127.0.0.{number} slots=1\n" for number in (1, 2, 3)))
    (tmp_path / "ds.json").write_text(json.dumps(ELASTIC))
    script = scripts.write(tmp_path, TRAINS_UNTIL_A_HOST_IS_LOST)
    options = ("--hostfile", "hosts", "--ssh_config", str(sshd.ssh_config), "--grace", "1")
    restarts = ("--max-restarts", "1", "--min-nodes", "2")
    command = in_forks(script, "--deepspeed", "ds.json")
    result = run_launch(tmp_path, *options, *restarts, *command, env={"OMP_NUM_THREADS": "1"})
    assert result.code == 0, result.err
    assert "127.0.0.2 was lost" in result.err
    assert result.out.count("TRAINED 3 ranks 12 samples a step") == 3
    assert result.out.count("TRAINED 2 ranks 12 samples a step") == 2
    assert "train_batch_size = 12" in result.out + result.err
    assert not members_of_job(result.job_id)
