"""Real jobs whose figures others read while they run: Prometheus' page and OTLP, with a restart, without an engine."""

from __future__ import annotations

import http.server
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import scripts
from harness.launch.command import ROOT, Launch, run_launch, slowness, wait_until
from harness.needs import need_module
from metrics.test_figures import STEP, line, plan_of

import launcher
from launcher.base.errors import UsageError
from launcher.base.fields import address_of
from launcher.journal.verdicts import Verdict
from launcher.metrics.figures import JOB_FIGURES, RANK_FIGURES, RunFigures
from launcher.plan.request import LIMITS

# Trains until the file "go_RESTART" is there; at the first start rank 1 fails then.
ENGINE = """
    import os, time
    import torch, launcher
    config = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": 0,
              "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 1}}
    engine, *_ = launcher.initialize(model=torch.nn.Linear(16, 16), config=config)
    restart = os.environ["LAUNCH_RESTART_COUNT"]
    is_over = False
    while not is_over:
        engine.backward(engine(torch.ones(4, 16)).square().mean())
        engine.step()
        launcher.log(accuracy=0.5)
        time.sleep(0.1)
        over = torch.tensor(float(os.path.exists(f"go_{restart}")))
        torch.distributed.all_reduce(over)
        is_over = over.item() == 2
    if restart == "0" and engine.global_rank == 1:
        os._exit(3)  # an interpreter with torch may need longer than the grace to end, beside much other work
"""
PLAIN = """
    import os, time
    import torch, launcher
    import torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    over = torch.zeros(1)
    while over.item() < 2:
        optimizer.zero_grad()
        model(torch.ones(4, 16)).square().mean().backward()
        time.sleep(0.1)
        optimizer.step()
        launcher.log(loss=0.5)
        over.fill_(float(os.path.exists("go")))
        dist.all_reduce(over)
"""


def figures_at(url: str) -> dict[str, float]:
    """Scrape a page, and read it with the parser of Prometheus' client. Of labels those of the job are left out."""
    need_module("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("job", "host", "local_rank")}
            found[" ".join([sample.name, *(f"{name}={value}" for name, value in sorted(labels.items()))])] = (
                sample.value
            )
    return found


def url_of(job: Launch) -> str:
    def shown() -> str | None:
        words = job.err.split() + job.out.split()
        return next((word for word in words if word.startswith("http://")), None)

    wait_until(lambda: shown() is not None, "the address of the page")
    url = shown()
    assert url is not None
    return url


def wait_for(url: str, **least: float) -> dict[str, float]:
    """Wait until the page has figures with at least these values, on both ranks."""
    found: dict[str, float] = {}

    def is_there() -> bool:
        found.clear()
        found.update(figures_at(url))
        return all(
            found.get(f"{name} rank={rank}", found.get(name, -1)) >= least[name] for name in least for rank in (0, 1)
        )

    wait_until(is_there, f"figures {least}")
    return found


class Collector:
    """A collector of OpenTelemetry: decodes what is pushed to it."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        self.pushes: list[Any] = []
        self.paths: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                outer.paths.append(self.path)
                outer.pushes.append(ExportMetricsServiceRequest.FromString(data))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def metrics(self, push: int = -1) -> dict[str, Any]:
        (resource,) = self.pushes[push].resource_metrics
        (scope,) = resource.scope_metrics
        return {metric.name: metric for metric in scope.metrics}


@pytest.fixture
def collector() -> Iterator[Collector]:
    need_module("opentelemetry")
    made = Collector()
    yield made
    made.close()


def points_of(metric: Any, **labels: str) -> list[Any]:
    points = (metric.sum if metric.HasField("sum") else metric.gauge).data_points
    return [
        point
        for point in points
        if labels.items() <= {one.key: one.value.string_value for one in point.attributes}.items()
    ]


def test_an_engines_job_is_scraped_and_pushed_while_it_restarts(tmp_path: Path, collector: Collector) -> None:
    job = Launch(
        tmp_path, "--num_gpus", "2", "--max-restarts", "1", "--metrics-port", "0", "--otlp", "auto",
        scripts.write(tmp_path, ENGINE), env={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url},
    )  # fmt: skip
    url = url_of(job)
    found = wait_for(url, launch_steps_total=3)
    assert time.time() - 60 * slowness() < found["launch_last_step_timestamp_seconds rank=1"] <= time.time() + 1
    assert found["launch_learning_rate rank=0"] == 0.01
    assert found["launch_gradient_norm rank=1"] > 0
    assert found["launch_loss rank=1"] > 0
    assert found["launch_samples_total rank=0"] == 4 * found["launch_steps_total rank=0"]
    num_slept = found["launch_steps_total rank=0"] - 1  # nothing before the first step counts
    assert found["launch_phase_seconds_total phase=script rank=0"] >= 0.1 * num_slept
    assert found["launch_peak_memory_bytes rank=0"] >= found["launch_memory_bytes rank=0"] > 1 << 20
    assert found["launch_sent_bytes_total rank=1"] > 0
    assert found["launch_log name=accuracy rank=1"] == 0.5
    assert found["launch_job_state state=running"] == 1
    assert found["launch_world_size"] == 2
    before = found["launch_steps_total rank=0"]
    restarted_s = time.time()
    (tmp_path / "go_0").touch()
    found = wait_for(url, launch_restarts_total=1, launch_steps_total=1)
    assert found["launch_failures_total kind=rank_failed"] == 1
    assert found["launch_rank_exits_total status=3"] == 1
    assert found["launch_job_samples_total"] >= 4 * (before + 1), "of both starts"
    (tmp_path / "go_1").touch()
    result = job.wait()
    assert result.code == 0, result.err
    with pytest.raises(urllib.error.URLError):
        figures_at(url)
    metrics = collector.metrics()
    assert collector.paths[-1] == "/v1/metrics"
    (state,) = points_of(metrics["launch_job_state"], state="ended")
    assert state.as_double == 1
    (samples,) = points_of(metrics["launch_job_samples_total"])
    assert metrics["launch_job_samples_total"].sum.is_monotonic
    assert samples.as_double >= found["launch_job_samples_total"]
    pushes = [collector.metrics(number) for number in range(len(collector.pushes))]
    for rank in ("0", "1"):
        points = [points_of(push["launch_steps_total"], rank=rank) for push in pushes if "launch_steps_total" in push]
        assert max(map(len, points)) == 1, "a rank is one series, whenever it started"
        (last,) = [point for each in points for point in each][-1:]
        assert last.start_time_unix_nano / 1e9 > restarted_s, "the last figures are of the last start"
        assert last.as_double >= 1
    assert next(push["launch_memory_bytes"].unit for push in pushes if "launch_memory_bytes" in push) == "By"


def test_a_script_of_plain_torch_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_module("prometheus_client")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found: dict[str, float] = {}

    def scrape() -> None:
        try:
            wait_until(lambda: _answers(port), "the page")
            found.update(wait_for(f"http://127.0.0.1:{port}/metrics", launch_steps_total=2))
        finally:
            (tmp_path / "go").touch()

    thread = threading.Thread(target=scrape)
    thread.start()
    launcher.run(scripts.write(tmp_path, PLAIN), ranks=2, output="files", options=launcher.Options(metrics_port=port))
    thread.join()
    assert found["launch_learning_rate rank=1"] == 0.25
    assert found["launch_phase_seconds_total phase=backward rank=0"] > 0
    assert found["launch_log name=loss rank=0"] == 0.5
    assert "launch_tokens_total rank=0" not in found, "not known"


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_port_that_is_in_use_is_one_error_before_any_rank(tmp_path: Path) -> None:
    need_module("prometheus_client")
    script = scripts.write(tmp_path, "print('ran')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run_launch(tmp_path, "--num_gpus", "1", "--metrics-port", str(port), script)
    assert result.code == 2
    assert result.err.splitlines()[-2:] == [
        f"✗ --metrics-port: port {port} is in use",
        "  → give another port, or 0 for a free one",
    ]
    assert not (tmp_path / "runs").exists()
    result = run_launch(tmp_path, "--num_gpus", "1", "--metrics-port", "192.0.2.1:0", script)
    assert (result.code, "cannot listen on 192.0.2.1" in result.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "module", "extra"),
    [
        ({"metrics_port": 0}, "prometheus_client", "metrics"),
        ({"otlp": "http://127.0.0.1:1"}, "opentelemetry.exporter.otlp.proto.http.metric_exporter", "otlp"),
    ],
)
def test_a_missing_package_is_one_error_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], module: str, extra: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("launcher.metrics.prometheus", "launcher.metrics.otlp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    ((setting, _),) = options.items()
    with pytest.raises(UsageError, match=rf"Options\({setting}=\): the package for it is not installed") as caught:
        launcher.run(os.getpid, ranks=1, options=launcher.Options(**options))
    assert caught.value.diagnostics[0].hint == f"pip install 'launch-zero[{extra}]'"
    assert not (tmp_path / "runs").exists()


def test_nothing_is_imported_where_nobody_asks() -> None:
    """Of the launcher: `tests/cli/test_imports.py`. Here of Python, which may hold more than one job."""
    code = (
        "import sys, launcher, os\n"
        "launcher.run(os.getpid, ranks=1, output='files')\n"
        "names = {name.partition('.')[0] for name in sys.modules} | set(sys.modules)\n"
        "print(names & {'prometheus_client', 'opentelemetry', 'http.server', 'launcher.metrics.figures'})\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )  # fmt: skip
    assert found.stdout.splitlines()[-1:] == ["set()"], found.stderr


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (9400, ("127.0.0.1", 9400)), ("0", ("127.0.0.1", 0)), ("0.0.0.0:9400", ("0.0.0.0", 9400)),
        ("[::1]:80", ("::1", 80)), ("node-a:1", ("node-a", 1)), ("65536", None), ("-1", None), ("a", None),
        ("a:b", None), (":80", None), ("", None), (True, None), (1.0, None), ("1 2:3", None), (None, None),
    ],
)  # fmt: skip
def test_addresses(value: object, expected: tuple[str, int] | None) -> None:
    assert LIMITS["metrics_port"].allows(value) is (expected is not None)
    assert expected is None or address_of(value) == expected


@pytest.mark.parametrize(
    ("value", "is_allowed"),
    [
        ("http://127.0.0.1:4318", True), ("https://collector/v1/metrics", True), ("auto", True),
        ("127.0.0.1:4318", False), ("grpc://a", False), ("http://", False), ("http:///x", False),
        (3, False), ("http://a b", False),
    ],
)  # fmt: skip
def test_endpoints(value: object, is_allowed: bool) -> None:
    assert LIMITS["otlp"].allows(value) is is_allowed


def test_a_page_costs_at_most_a_tenth_of_a_processor() -> None:
    """Whoever asks in the meantime gets the page that is there; another format is another page."""
    need_module("prometheus_client")
    from launcher.metrics.prometheus import _REST, _Pages

    collected: list[float] = []

    class Slow(RunFigures):
        def collect(self, *, with_ended: bool = False) -> Any:
            collected.append(time.monotonic())
            time.sleep(0.02)
            return super().collect(with_ended=with_ended)

    pages = _Pages(Slow(plan_of()))
    threads = [threading.Thread(target=lambda: [pages.get("") for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: pages.get("") and len(collected) >= 3, "more pages")
    gaps_s = [after - before for before, after in itertools.pairwise(collected)]
    assert min(gaps_s) >= 0.02 * _REST
    num_collected = len(collected)
    assert pages.get("application/openmetrics-text; version=1.0.0")[1].startswith("application/openmetrics-text")
    assert len(collected) == num_collected + 1


def test_the_page_has_one_address_and_says_so() -> None:
    need_module("prometheus_client")
    from launcher.metrics.prometheus import MetricsServer

    server = MetricsServer(RunFigures(plan_of()), "127.0.0.1", 0)
    try:
        with pytest.raises(urllib.error.HTTPError, match="the figures are at /metrics"):
            urllib.request.urlopen(server.url.removesuffix("/metrics"), timeout=60)
        assert figures_at(server.url)["launch_world_size"] == 2
        assert figures_at(f"{server.url}?x=1")["launch_world_size"] == 2
    finally:
        server.close()


def test_every_figure_reaches_the_page_with_its_type() -> None:
    """And every name is one that Prometheus' own parser reads back."""
    need_module("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    from launcher.metrics.prometheus import _Pages

    figures = RunFigures(plan_of())
    figures.started(1)
    figures.ended(0, 0)
    figures.verdict(Verdict("slow_rank", "warning", "text", "next"))
    data = [
        line("engine", peak_flops=1e12), line("flops", flops=1.0, micro_batches=1), line("save"),
        line("step", **STEP | {"loss_scale": 2.0}), line("log", values={"a\n\"b\\": 1, "\ud800": 2}),
        line("sample", resident_bytes=1, cpu_s=1.5, energy_j=3), line("dropped", num_records=1),
    ]  # fmt: skip
    figures.journal(1, b"".join(data))
    families = {each.name: each for each in text_string_to_metric_families(_Pages(figures).get("")[0].decode())}
    for figure in (*JOB_FIGURES, *RANK_FIGURES):
        family = families[figure.name.removesuffix("_total")]
        assert family.type == ("counter" if figure.is_counter else "gauge")
        assert {sample.name for sample in family.samples} == {figure.name}
    assert {sample.labels["name"] for sample in families["launch_log"].samples} == {'a\n"b\\', "?"}


def test_pushes_come_at_intervals_and_count_from_the_start_of_a_rank(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launcher.metrics import otlp

    monkeypatch.setattr(otlp, "INTERVAL_S", 0.05)
    monkeypatch.setattr(otlp, "_REST", 0)
    clock = iter([100.0, 101.0, 200.0, 201.0])
    figures = RunFigures(plan_of(), keeps_ended=True, clock=lambda: next(clock))
    warnings: list[str] = []
    pusher = otlp.OtlpPusher(figures, f"{collector.url}/v1/metrics", warnings.append)
    figures.journal(0, line("step", **STEP))
    wait_until(lambda: collector.pushes and "launch_steps_total" in collector.metrics(), "a push with steps")
    (point,) = points_of(collector.metrics()["launch_steps_total"], rank="0", host="node-0", local_rank="0", job="job")
    assert point.start_time_unix_nano == 101 * 10**9
    figures.planned(plan_of(restart=1))
    figures.journal(0, line("step", **STEP))
    pusher.close()
    starts = {point.start_time_unix_nano // 10**9 for point in points_of(collector.metrics()["launch_steps_total"])}
    assert 200 in starts
    assert {one.key for one in collector.pushes[-1].resource_metrics[0].resource.attributes} >= {"service.name"}
    assert set(collector.paths) == {"/v1/metrics"}
    assert warnings == []


def test_a_collector_that_is_away_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    need_module("opentelemetry")
    from launcher.metrics import otlp

    monkeypatch.setattr(otlp, "INTERVAL_S", 0.01)
    monkeypatch.setattr(otlp, "_REST", 0)
    monkeypatch.setattr(otlp, "_TIMEOUT_S", 0.05)
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        warnings: list[str] = []
        pusher = otlp.OtlpPusher(RunFigures(plan_of()), f"http://127.0.0.1:{unheard.getsockname()[1]}", warnings.append)
        wait_until(lambda: warnings, "the warning")
        pusher.close()
    assert len(warnings) == 1
    assert "the job continues" in warnings[0]
    assert not caplog.records, "the exporter's own log is not the job's"
