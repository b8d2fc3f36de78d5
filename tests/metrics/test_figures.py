"""The figures of a job follow its events: what is shown, what is dropped, and that no script breaks them."""

from __future__ import annotations

import json
import math
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from harness.launch.command import ROOT

from launcher.base.progress import RankProgress
from launcher.cluster.cluster import Host, NodePlacement, Placement
from launcher.job.events import Failure, FailureKind, RunReport
from launcher.journal.rank import encoded
from launcher.journal.records import RANK_RECORDS
from launcher.journal.verdicts import Verdict
from launcher.metrics import figures as figures_module
from launcher.metrics.figures import JOB_FIGURES, MAX_RANKS, RANK_FIGURES, RunFigures, ranks_shown
from launcher.plan.plan import Command, JobPlan

STEP: dict[str, Any] = {
    "step": 7, "num_steps": 2, "duration_s": 0.5, "slowest_s": 0.3, "phases": {"forward": 0.25, "backward": 0.125},
    "loss": 3.5, "norm": 1.5, "loss_scale": None, "lr": 0.01, "samples": 8, "tokens": 1024, "sent_bytes": 100,
    "memory_bytes": 1000, "peak_bytes": 2000, "skipped": 1,
}  # fmt: skip


def plan_of(num_hosts: int = 1, num_ranks: int = 2, **more: Any) -> JobPlan:
    slots = tuple(range(num_ranks))
    nodes = tuple(NodePlacement(i, Host(f"node-{i}", slots), i * num_ranks) for i in range(num_hosts))
    command, folder = Command("script", "t.py", ()), Path("runs")
    return JobPlan(
        job_id="job", placement=Placement(nodes), command=command, cwd="/", run_folder=folder, master_addr="node-0",
        master_port=1, transports={}, forwarded_env={}, **more,
    )  # fmt: skip


def line(kind: str, **fields: Any) -> bytes:
    return encoded({"kind": kind, "time_s": 1000.0, **fields})


def values_of(figures: RunFigures, *, with_ended: bool = False) -> dict[str, float]:
    """Name and labels of each point -> its value; of a rank's figures only the number of the rank."""
    found: dict[str, float] = {}
    for family in figures.collect(with_ended=with_ended):
        for labels, value, _ in family.points:
            own = dict(zip(family.labels, labels, strict=True))
            assert own.pop("job") == "job"
            own = {name: text for name, text in own.items() if name not in ("host", "local_rank")}
            found[" ".join([family.figure.name, *(f"{name}={text}" for name, text in own.items())])] = value
    return found


def report_of(kind: FailureKind | None, restart: int = 0) -> RunReport:
    failure = None if kind is None else Failure("node-0", rank=1, kind=kind)
    return RunReport("job", 1, 2, 1.0, None, failure, 0, 0.0, (), restart=restart)


def test_names_follow_the_conventions() -> None:
    every = (*JOB_FIGURES, *RANK_FIGURES)
    assert len({figure.name for figure in every}) == len(every)
    for figure in every:
        assert re.fullmatch(r"launch_[a-z_]+", figure.name)
        stem = figure.name.removesuffix("_total")
        assert figure.doc
        for unit in ("seconds", "bytes", "joules"):
            assert unit not in stem or stem.endswith(f"_{unit}"), figure.name
            assert not stem.endswith(f"_{unit}") or figure.unit != "1", figure.name


def test_the_page_of_the_documentation_has_every_figure() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    for figure in (*JOB_FIGURES, *RANK_FIGURES):
        assert f"| `{figure.name}` | {', '.join(f'`{label}`' for label in figure.labels)} | {figure.doc} |" in page


def test_fields_of_records_that_become_figures_are_fields_of_records() -> None:
    for table in (figures_module._SET, figures_module._ADD):
        names = {figure.name for figure in RANK_FIGURES}
        for kind, fields in table.items():
            assert fields.keys() <= RANK_RECORDS[kind].keys()
            assert set(fields.values()) <= names


def test_records_become_figures() -> None:
    figures = RunFigures(plan_of())
    data = line("step", **STEP) + line("step", **STEP | {"step": 9, "loss": None, "norm": math.nan})
    data += line("log", values={"accuracy": 0.5, "name": "end", "bad": math.inf}) + line("save", path="p")
    figures.journal(1, data[:100])  # cut anywhere
    figures.journal(1, data[100:])
    found = values_of(figures)
    assert found["launch_step rank=1"] == 9
    assert found["launch_loss rank=1"] == 3.5, "null is not known, and no news"
    assert math.isnan(found["launch_gradient_norm rank=1"])
    assert found["launch_steps_total rank=1"] == 4
    assert found["launch_tokens_total rank=1"] == found["launch_job_tokens_total"] == 2048
    assert found["launch_skipped_steps_total rank=1"] == 2
    assert found["launch_phase_seconds_total rank=1 phase=forward"] == 0.5
    assert found["launch_job_phase_seconds_total phase=backward"] == 0.25
    assert found["launch_sent_bytes_total rank=1"] == 200
    assert (found["launch_memory_bytes rank=1"], found["launch_peak_memory_bytes rank=1"]) == (1000, 2000)
    assert found["launch_last_step_timestamp_seconds rank=1"] == 1000.0
    assert found["launch_log rank=1 name=accuracy"] == 0.5
    assert found["launch_log rank=1 name=bad"] == math.inf
    assert found["launch_saves_total rank=1"] == 1
    assert "launch_log rank=1 name=name" not in found
    assert "launch_loss_scale rank=1" not in found, "not known is no 0"
    assert not any("rank=0" in name for name in found)


def test_flops_of_a_step_are_counted_from_when_they_are_known() -> None:
    figures = RunFigures(plan_of())
    figures.journal(0, line("engine", peak_flops=1e12) + line("step", **STEP))
    figures.journal(0, line("flops", flops=1e9, micro_batches=4) + line("step", **STEP))
    found = values_of(figures)
    assert found["launch_model_flops_total rank=0"] == 2 * 4e9
    assert found["launch_device_peak_flops rank=0"] == 1e12


def test_steps_that_a_script_tells_count_where_its_journal_has_none() -> None:
    figures = RunFigures(plan_of(), clock=lambda: 50.0)
    figures.progress(0, RankProgress(heartbeats=3, loss=0.25))
    figures.journal(1, line("step", **STEP))
    figures.progress(1, RankProgress(heartbeats=3, step=3))
    found = values_of(figures)
    assert (found["launch_step rank=0"], found["launch_loss rank=0"]) == (3, 0.25)
    assert found["launch_last_step_timestamp_seconds rank=0"] == 50.0
    assert found["launch_step rank=1"] == 7


def test_the_state_of_a_job_and_its_ends() -> None:
    figures = RunFigures(plan_of())

    def state() -> str:
        found = values_of(figures)
        return " ".join(name for name in figures_module.STATES if found[f"launch_job_state state={name}"])

    assert state() == "starting"
    figures.started(0)
    assert (state(), values_of(figures)["launch_ranks state=starting"]) == ("starting", 1)
    figures.started(1)
    assert (state(), values_of(figures)["launch_ranks state=running"]) == ("running", 2)
    for rank in (0, 1):
        figures.journal(rank, line("step", **STEP | {"step": 10 - rank}))
    assert values_of(figures)["launch_slowest_rank_step"] == 9
    figures.ended(1, 3)
    figures.stopping("rank 1 failed")
    assert state() == "stopping"
    figures.ended(0, -9)
    again = plan_of(restart=1)
    figures.restarting(again, report_of(FailureKind.RANK_FAILED))
    assert state() == "restarting"
    assert not any("rank=" in name for name in values_of(figures)), "no stale series"
    figures.planned(again)
    assert state() == "starting"
    figures.started(1)
    figures.journal(1, line("step", **STEP))
    found = values_of(figures)
    assert found["launch_restarts_total"] == 1
    assert (found["launch_rank_exits_total status=3"], found["launch_rank_exits_total status=SIGKILL"]) == (1, 1)
    assert found["launch_failures_total kind=rank_failed"] == 1
    assert found["launch_tokens_total rank=1"] == 1024, "of this start"
    assert found["launch_job_tokens_total"] == 3 * 1024, "of all starts"
    figures.finish(report_of(FailureKind.RANK_HANGS, restart=1))
    assert values_of(figures)["launch_failures_total kind=rank_hangs"] == 1
    assert state() == "ended"


def test_verdicts_that_hold_are_counted() -> None:
    figures = RunFigures(plan_of())
    for rank, severity in ((0, "warning"), (1, "warning"), (1, "critical")):
        figures.verdict(Verdict("slow_rank", severity, "text", "next", rank=rank))
    found = values_of(figures)
    assert found["launch_verdicts verdict=slow_rank severity=warning"] == 1
    assert found["launch_verdicts verdict=slow_rank severity=critical"] == 1, "it has become worse"
    figures.verdict(Verdict("slow_rank", "critical", "text", "next", rank=1, until_step=9))
    assert "launch_verdicts verdict=slow_rank severity=critical" not in values_of(figures)
    figures.planned(plan_of(restart=1))
    assert not any("verdict" in name for name in values_of(figures))


def test_a_restart_without_the_end_of_a_rank_leaves_nothing_stale() -> None:
    figures = RunFigures(plan_of(2, 1))
    figures.journal(1, line("step", **STEP))
    figures.planned(plan_of(1, 1, restart=1))  # node-1 was lost
    figures.journal(1, line("step", **STEP))
    assert not any("rank=1" in name for name in values_of(figures))
    assert values_of(figures)["launch_world_size"] == 1


def test_who_asks_for_it_gets_the_last_values_of_a_rank_once() -> None:
    figures = RunFigures(plan_of(), keeps_ended=True)
    figures.journal(0, line("step", **STEP))
    figures.ended(0, 0)
    assert "launch_step rank=0" not in values_of(figures)
    assert values_of(figures, with_ended=True)["launch_step rank=0"] == 7
    assert "launch_step rank=0" not in values_of(figures, with_ended=True)


def test_a_rank_that_ended_and_started_again_is_one_series() -> None:
    figures = RunFigures(plan_of(), keeps_ended=True)
    for restart in (0, 1, 2):
        figures.planned(plan_of(restart=restart))
        for rank in (0, 1) if restart < 2 else (0,):
            figures.journal(rank, line("step", **STEP | {"step": 10 * restart + rank}))
            if restart < 2:
                figures.ended(rank, 1)
    (steps,) = (family for family in figures.collect(with_ended=True) if family.figure.name == "launch_step")
    assert sorted((labels[1], value) for labels, value, _ in steps.points) == [("0", 20), ("1", 11)]


@pytest.mark.parametrize(
    "data",
    [
        b'{"kind":"step","step":"many","num_steps":-3,"phases":[1],"tokens":1e999,"loss":{"a":1}}\n',
        b'{"kind":"step","phases":{"forward":"x","sleep":1,"backward":null},"step":' + b"9" * 5000 + b"}\n",
        b'{"kind":"log","values":[1,2]}\n{"kind":"log"}\n{"kind":"flops","flops":"a"}\n',
        b'not json\n[1]\n{"kind":7}\n{}\n\xff\xfe\n',
        b'{"kind":"dropped","num_records":null}\n{"kind":"unheard of","step":1}\n',
        json.dumps({"kind": "step", "step": 10**400}).encode() + b"\n",
    ],
)
def test_what_is_no_number_counts_for_nothing(data: bytes) -> None:
    figures = RunFigures(plan_of())
    figures.journal(0, data)
    assert not any("rank=0" in name for name in values_of(figures))
    figures.journal(0, line("step", **STEP))
    assert values_of(figures)["launch_step rank=0"] == 7


def test_names_of_a_script_are_bounded_and_can_be_written() -> None:
    figures = RunFigures(plan_of())
    for number in range(1000):
        figures.journal(0, line("log", values={f"metric {number}": number, "\ud800" + "x" * 10_000: 1}))
    names = [name for name in values_of(figures) if name.startswith("launch_log")]
    assert len(names) == 100
    assert max(map(len, names)) < 300
    "".join(names).encode()


def test_a_large_job_has_series_of_few_ranks_and_sums_of_all() -> None:
    plan = plan_of(1_250, 8)
    shown = ranks_shown(plan.placement)
    assert len(ranks_shown(plan_of(128, 8).placement)) == MAX_RANKS
    assert 500 < len(shown) <= MAX_RANKS
    assert all(rank % 8 == 0 for rank in shown)
    figures = RunFigures(plan)
    data = line("step", **STEP)
    for rank in range(10_000):
        figures.started(rank)
        figures.journal(rank, data)
    found = values_of(figures)
    assert found["launch_job_tokens_total"] == 10_000 * 1024
    assert found["launch_ranks state=running"] == 10_000
    assert sum(name.startswith("launch_step rank=") for name in found) == len(shown)
    assert len(found) < 30 * MAX_RANKS


def test_figures_are_whole_while_they_change() -> None:
    """A record's values are seen together: another thread collects while records come in."""
    figures, is_over = RunFigures(plan_of()), threading.Event()
    data = [line("step", **STEP | {"step": number, "loss": float(number)}) for number in range(2000)]

    def feed() -> None:
        for one in data:
            figures.journal(0, one)
        is_over.set()

    thread = threading.Thread(target=feed)
    thread.start()
    while not is_over.is_set():
        found = values_of(figures)
        assert found.get("launch_step rank=0") == found.get("launch_loss rank=0")
    thread.join()
