"""The page of `launch report JOB`: one file, no network, and nothing in a journal that can become code."""

from __future__ import annotations

import gzip
import importlib.util
import json
import pkgutil
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harness.launch.command import run_here
from harness.launch.journals import BEGAN_S, Record, Try, write_job
from harness.needs import need_module

from launcher.cli.views import charts
from launcher.journal.trace_merge import read_steps

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = '</script><script>window.hurt=1</script><img src="http://evil.example/x" onerror="window.hurt=1">\u2028&amp;'
API_KEY = "s3cret"


def engine_record(**config: Any) -> Record:
    return {
        "kind": "engine",
        "time_s": BEGAN_S,
        "config": {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "zero_optimization.stage": 2,
            "wandb.api_key": API_KEY,
            "wandb.team": EVIL,
            **config,
        },
        "auto": [["zero_optimization.reduce_bucket_size", 1_048_576, f"hidden² {EVIL}"]],
        "units": [[f"block {place} {EVIL}", 10, 4_000_000] for place in range(3)],
        "device": "NVIDIA H200",
        "torch": "2.13.0",
        "peak_flops": 9.9e14,
    }


def evil_try(**attributes: Any) -> Try:
    """A start in whose journal every text is hostile."""
    at = {"time_s": BEGAN_S + 2}
    own = [
        {"kind": "environment", **at, "packages": {EVIL: EVIL}, "python": EVIL, "code": {"commit": EVIL}},
        {"kind": "notice", **at, "text": EVIL},
        {"kind": "host_lost", **at, "host": EVIL, "reason": EVIL},
        {"kind": "raised", **at, "rank": 1, "type": EVIL, "message": EVIL},
        {"kind": "verdict", **at, "name": EVIL, "severity": EVIL, "text": EVIL, "next": EVIL},
        {"kind": "exit", **at, "rank": 1, "status": -9, "max_rss_bytes": 1},
    ]
    values = {"step": 3, "accuracy": 0.5, EVIL: 0.25, "text": EVIL, "key": [EVIL, {EVIL: EVIL}]}
    rank0 = [
        engine_record(),
        {"kind": "log", **at, "values": values},
        {"kind": "save", **at, "path": EVIL, "duration_s": 0.5},
        {"kind": "nonfinite", **at, "module": EVIL, "what": "output"},
        {"kind": "flops", **at, "flops": 1e12, "micro_batches": 1},
    ]
    job = {"job_id": "evil-otter", "command": ["t.py", EVIL], "cwd": EVIL, "variables": [EVIL], "launch": EVIL}
    return Try(own=own, own_of_ranks={0: rank0}, job=job, **attributes)


def write_trace(folder: Path, *, is_cut: bool = False) -> None:
    """Write what `launch trace` would: two ranks, two steps, hostile names, and a span of another kind."""
    events: list[Record] = []
    for rank, pid in ((0, 1000), (3, 2000)):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"rank {rank} (a)"}})
        own = [("launch", f"step {step}", 1 << 30, 1000.0 * (step - 7)) for step in (7, 8)]
        own += [("launch", "forward", (1 << 30) + 1, 0.0), ("launch", "communication", (1 << 30) + 1, 1000.0)]
        own += [("user_annotation", f"launch: gather of {EVIL}", 5, 10.0), ("cpu_op", "aten::mm", 5, 20.0)]
        own += [("kernel", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)", 7, 30.0)]
        for category, name, tid, begin_us in own:
            events.append(
                {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": begin_us, "dur": 1000.0}
            )
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    data = gzip.compress(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'.encode())
    (folder / "trace_1.json.gz").write_bytes(data[:-20] if is_cut else data)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three pages: of a hostile journal, of a job that was restarted, and of two jobs."""
    folder = tmp_path_factory.mktemp("pages")
    failure = {"kind": "rank failed", "host": EVIL, "rank": 1, "reason": EVIL, "traceback": EVIL, "hint": EVIL}
    write_job(folder / "evil", evil_try(exit_code=1, host_clocks={EVIL: 0.0}))
    (folder / "evil" / "report.json").write_text(json.dumps({"exit_code": 1, "failure": failure}))
    write_trace(folder / "evil")
    raised = {"kind": "raised", "time_s": BEGAN_S + 5, "rank": 1, "type": "ValueError", "message": "bad data"}
    first = Try(exit_code=1, own=[raised], job={"job_id": "brave-lynx"})
    again = Try(first_step=16, num_steps=10, began_s=BEGAN_S + 30, job={"job_id": "brave-lynx"})
    again.own_of_ranks[0] = [engine_record(gradient_clipping=0.5)]
    write_job(folder / "restarted", first, again)
    write_trace(folder / "restarted", is_cut=True)
    for name, jobs in (("evil", ["evil"]), ("restarted", ["restarted"]), ("two", ["evil", "restarted"])):
        result = run_here(folder, "report", *[f"./{job}" for job in jobs], "-o", f"{name}.html")
        assert (result.code, result.out) == (0, f"{name}.html\n"), result.err
    return folder


class Page(HTMLParser):
    """What a browser finds in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.words.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.mark.parametrize("name", ["evil", "restarted", "two"])
def test_a_page_is_one_file_that_loads_nothing(pages: Path, name: str) -> None:
    page = Page((pages / f"{name}.html").read_text())
    assert len(page.scripts) == 3  # the data, plotly.js once, the page's own
    loaded = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert loaded == []
    assert {tag for tag, _ in page.tags} & {"img", "link", "iframe", "object", "embed", "base", "form"} == set()
    handlers = [key for _, attributes in page.tags for key in attributes if key.startswith("on")]
    assert handlers == []
    policy = next(attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes) or ""
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    assert {chart["key"] for chart in json.loads(page.scripts[0])} == {
        attributes["data-chart"] for _, attributes in page.tags if "data-chart" in attributes
    }


def test_what_a_journal_says_is_shown_as_text_and_without_secrets(pages: Path) -> None:
    text = (pages / "evil.html").read_text()
    page = Page(text)
    assert "window.hurt=1" in page.text  # it is there, as text
    assert all("<script>window" not in script for script in page.scripts)
    traces = json.loads(page.scripts[0])
    assert "<" not in json.dumps([chart["traces"] for chart in traces]).replace("<extra>", "").replace("</extra>", "")
    assert API_KEY not in text
    assert "MFU" in page.text  # FLOPs, batch sizes and the peak are known


def test_the_page_of_a_job_has_every_part(pages: Path) -> None:
    page = Page((pages / "evil.html").read_text())
    charts = {chart["key"]: chart for chart in json.loads(page.scripts[0])}
    assert {"loss", "norm", "lr", "rate", "memory", "phases", "waiting", "timeline", "units", "logged-0"} <= set(charts)
    assert [len(row) for row in charts["waiting"]["traces"][0]["z"]] == [20, 20]
    assert {trace["y"][0] for trace in charts["timeline"]["traces"]} >= {"save", "host lost", "rank failed", "notice"}
    assert "zero_optimization.reduce_bucket_size 1048576" in page.text
    assert "zero_optimization.stage 2" in page.text


def test_collectives_of_traced_steps_are_on_one_clock(pages: Path) -> None:
    page = Page((pages / "evil.html").read_text())
    charts = {chart["key"]: chart for chart in json.loads(page.scripts[0])}
    found = {trace["name"]: trace for trace in charts["collectives"]["traces"]}
    assert list(found) == ["forward", "communication", "gather", "reduce_scatter"]
    assert found["gather"]["y"] == ["rank 0 · collectives", "rank 3 · collectives"]
    assert (found["reduce_scatter"]["base"], found["reduce_scatter"]["x"]) == ([0.03] * 2, [1.0] * 2)
    assert [shape["x0"] for shape in charts["collectives"]["layout"]["shapes"]] == [1.0, 2.0]
    assert "Collectives of step 7 to 8" in page.text
    cut = Page((pages / "restarted.html").read_text())
    assert "collectives" not in {chart["key"] for chart in json.loads(cut.scripts[0])}
    assert "The recorded steps are not shown: " in cut.text
    assert "trace_1.json.gz is not a trace of launch, or is damaged" in cut.text


@pytest.mark.parametrize(
    ("num_kept", "left_out"), [(8, []), (6, ["2 collectives"]), (3, ["1 phase and 4 collectives"])]
)
def test_spans_that_are_left_out_are_named(num_kept: int, left_out: list[str], tmp_path: Path) -> None:
    write_trace(tmp_path)
    with mock.patch.object(charts, "_MAX_SPANS", num_kept):
        chart = charts.collectives_chart(mock.Mock(folder=tmp_path), "")
    assert chart is not None
    assert re.findall(r" The shortest are left out: (.+?)\.", chart.note) == left_out


def test_a_damaged_trace_is_an_error_of_its_own(tmp_path: Path) -> None:
    write_trace(tmp_path)
    path = tmp_path / "trace_1.json.gz"
    data = bytearray(path.read_bytes())
    for place in (0, 20, len(data) // 2, len(data) - 4):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        with pytest.raises((OSError, ValueError)):
            read_steps(path)


def test_steps_done_again_are_apart(pages: Path) -> None:
    charts = {chart["key"]: chart for chart in json.loads(Page((pages / "restarted.html").read_text()).scripts[0])}
    *_, line, redone = charts["loss"]["traces"]
    assert (line["x"][-1], redone["x"], redone["line"]["dash"]) == (25.0, [16.0, 17.0, 18.0, 19.0, 20.0], "dot")
    assert len(charts["timeline"]["layout"]["shapes"]) == 1  # the band of the restart


def test_only_what_differs_is_in_the_table(pages: Path) -> None:
    page = Page((pages / "two.html").read_text())
    table = page.text.partition("What differs")[2].partition("Curves")[0]
    assert "gradient_clipping — 0.5" in table
    assert "zero_optimization.stage" not in table  # alike in both
    assert "restarts 0 1" in table
    assert "exit code 1 0" in table
    charts = {chart["key"] for chart in json.loads(page.scripts[0])}
    assert {"loss", "0-phases", "1-phases", "0-waiting", "1-timeline"} <= charts


def test_without_plotly_the_extra_is_named(pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str, resource: str) -> bytes:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(pkgutil, "get_data", missing)
    result = run_here(pages, "report", "./restarted", "-o", "none.html")
    assert (result.code, "pip install 'launch-zero[report]'" in result.err) == (2, True)
    assert not (pages / "none.html").exists()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium to open the page with (apt-get install chromium)")
    need_module("playwright")
    api = importlib.import_module("playwright.sync_api")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
@pytest.mark.parametrize("name", ["evil", "two"])
def test_a_browser_draws_every_chart_from_the_disk(
    pages: Path, browser: Any, name: str, width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
    page.goto((pages / f"{name}.html").as_uri())
    page.evaluate("document.querySelectorAll('details.whole').forEach((part) => { part.open = true; })")
    for chart in page.query_selector_all("[data-chart]"):
        chart.scroll_into_view_if_needed()
        key = chart.get_attribute("data-chart")
        page.wait_for_selector(f"[data-chart='{key}'][data-drawn] svg.main-svg", state="attached")
    assert said == []
    assert page.evaluate("window.hurt") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(246, 247, 249)", "dark": "rgb(17, 21, 28)"}[scheme]
    context.close()
