"""The panel on a terminal: what it shows, that it breaks no output, and that it leaves nothing behind."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import DEADLINE_S, ROOT, run_launch, wait_until_gone
from harness.launch.sshd import LoopbackSshd
from harness.launch.terminal import TerminalLaunch

from launcher.base import progress
from launcher.base.processes import members_of_job
from launcher.base.progress import RankProgress
from launcher.cli.console.facts import RunFacts
from launcher.cli.console.panel import draw
from launcher.cli.console.terminal import Screen
from launcher.cluster.cluster import Host, NodePlacement, Placement
from launcher.plan.plan import Command, JobPlan

# Counts until the file "go" is there, then ends as its argument says.
TRAINING = """
    import os, sys, time
    import launcher
    for step in range(1, 1000):
        launcher.heartbeat(loss=0.125)
        print(f"line {step}", flush=True)
        time.sleep(0.1)
        if os.path.exists("go"):
            break
    if sys.argv[1:] == ["fail"] and os.environ["RANK"] == "1":
        raise ValueError("the data is bad")
"""
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def steps_of(rows: list[str], rank: int) -> list[int]:
    return [int(row.rpartition(" ")[2]) for row in rows if row.startswith(f"[{rank}] line")]


def is_whole(job: TerminalLaunch) -> bool:
    """Whether the panel stands at the end of the screen, once: what is read may end within a drawing."""
    return len(job.panel) == 2 and job.visible[-2:] == job.panel


def _fits(job: TerminalLaunch, columns: int) -> bool:
    return is_whole(job) and max(map(len, job.panel)) < columns


def test_the_panel_shows_the_run_and_leaves_a_clean_screen(tmp_path: Path) -> None:
    job = TerminalLaunch(tmp_path, "--num_gpus", "2", scripts.write(tmp_path, TRAINING))
    job.read_until(lambda: is_whole(job) and "steps/s" in job.panel[0], "the rate")
    headline, host = job.panel
    assert re.search(r"\w+-\w+-\w{4} · 1 host × 2 ranks · 0:00:\d\d · step \d+ · \d.* steps/s · loss 0\.125$", headline)
    assert re.fullmatch(r"│ localhost +2 running", host)
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert not [row for row in job.everything if "│" in row]
    for rank in range(2):
        steps = steps_of(job.everything, rank)
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) > 5
    assert job.everything[-1].startswith("[")


PHASES = """
    import os, time
    import launcher
    def wait_for(name):
        while not os.path.exists(name):
            time.sleep(0.02)
    wait_for("import")
    import torch
    with launcher.phase("writing a sample"):
        wait_for("sample")
    wait_for("end")
    import atexit
    atexit.register(wait_for, "exit")
"""
TORCH = """
    import os, time
    while not os.path.exists("imported"):
        time.sleep(0.02)
"""


def test_the_panel_shows_what_a_script_without_steps_does(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    scripts.write(tmp_path / "torch", TORCH, "__init__.py")
    job = TerminalLaunch(tmp_path, "--num_gpus", "2", scripts.write(tmp_path, PHASES))

    def shows(phase: str) -> None:
        job.read_until(lambda: is_whole(job) and job.panel[1] == f"│ localhost  2 {phase}", phase)

    shows("running")
    for go, phase in (
        ("import", "importing torch"),
        ("imported", "writing a sample"),
        ("sample", "running"),
        ("end", "exiting"),
    ):
        (tmp_path / go).touch()
        shows(phase)
    assert "step" not in job.panel[0]
    (tmp_path / "exit").touch()
    assert job.wait() == 0


@pytest.mark.cluster
def test_the_panel_has_a_row_for_each_host(sshd: LoopbackSshd, tmp_path: Path) -> None:
    """Three hosts over SSH: what their ranks tell arrives, and the loss of one of them is a failed row and a report."""
    (tmp_path / "hosts").write_text("".join(f"127.0.0.{number} slots=2\n" for number in (1, 2, 3)))
    options = ("--hostfile", "hosts", "--ssh_config", str(sshd.ssh_config), "--force_multi", "--grace", "1")
    job = TerminalLaunch(tmp_path, *options, scripts.write(tmp_path, TRAINING))
    rows = [r".*3 hosts × 2 ranks · 0:\d\d:\d\d · step \d+ · \d.* steps/s · loss 0\.125"]
    rows += [rf"│ 127\.0\.0\.{number} +2 running +step \d+" for number in (1, 2, 3)]
    job.read_until(lambda: len(job.panel) == 4 and all(map(re.fullmatch, rows, job.panel)), "the rows")
    assert any(row.startswith("[5 127.0.0.3] line") for row in job.everything)
    (job_id,) = (path.name for path in tmp_path.glob("runs/*"))
    rank = min(members_of_job(job_id), key=lambda pid: "127.0.0.3" not in environment_of(pid, "SSH_CONNECTION"))
    os.kill(rank, signal.SIGSTOP)  # it makes no more steps: its host's row stands still, and the headline with it
    stuck = [""]
    while len(stuck) < 20 and (len(stuck) < 3 or stuck[-1] != stuck[-2]):
        job.read_for(1.2)
        # Not while it is drawn.
        job.read_until(lambda: len(job.panel) == 4 and all(map(re.fullmatch, rows[1:], job.panel[1:])), "the panel")
        stuck.append(job.panel[3].rpartition(" ")[2])
    assert stuck[-1] == stuck[-2] != job.panel[1].rpartition(" ")[2]
    job.read_until(
        lambda: f"step {stuck[-1]} " in job.panel[0] + " ", "the headline at the step of the rank that stands"
    )
    os.kill(rank, signal.SIGKILL)
    assert job.wait() == 137
    assert job.panel == []
    assert re.search(r"^✗ rank \d \(127\.0\.0\.3, pid", "\n".join(job.everything), re.MULTILINE)
    wait_until_gone(job_id)


def environment_of(pid: int, name: str) -> str:
    variables = dict(
        part.partition("=")[::2] for part in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    )
    return variables.get(name, "")


def test_a_failure_is_reported_on_a_clean_screen_with_the_ranks_code(tmp_path: Path) -> None:
    job = TerminalLaunch(tmp_path, "--num_gpus", "2", scripts.write(tmp_path, TRAINING), "fail")
    job.read_until(lambda: bool(job.panel), "the panel")
    (tmp_path / "go").touch()
    assert job.wait() == 1
    assert job.panel == []
    text = "\n".join(job.everything)
    assert text.index("✗ rank 1") > text.rindex("[0] line")
    assert "ValueError: the data is bad" in text
    assert job.visible[-1].startswith("  log   runs/")


def test_ctrl_c_stops_in_order_and_leaves_a_clean_screen(tmp_path: Path) -> None:
    job = TerminalLaunch(tmp_path, "--num_gpus", "2", scripts.write(tmp_path, TRAINING))
    job.read_until(lambda: "step 1" in "".join(job.panel), "a step")
    job.type(b"\x03")
    assert job.wait() == 130
    assert job.panel == []
    assert "SIGINT: stopping all ranks" in job.everything
    assert "^C" not in "".join(job.visible)


def test_a_window_that_changes_its_size_loses_no_line(tmp_path: Path) -> None:
    job = TerminalLaunch(tmp_path, "--num_gpus", "2", scripts.write(tmp_path, TRAINING), size=(100, 60))
    job.read_until(lambda: is_whole(job), "the panel")
    for columns in (30, 12, 100):
        job.resize(columns, 60)
        job.read_for(0.5)
        job.read_until(
            functools.partial(_fits, job, columns),
            f"a panel for {columns} columns",  # the rest of a wider one may be there for a moment
        )
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert job.panel == []
    steps = steps_of(job.everything, 0)
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("options", [[], ["--plain"]])
def test_a_terminal_that_is_closed_ends_the_job_in_order(tmp_path: Path, options: list[str]) -> None:
    job = TerminalLaunch(tmp_path, *options, "--num_gpus", "2", scripts.write(tmp_path, TRAINING))
    job.read_until(lambda: any(row.startswith("[1] line 3") for row in job.visible), "output")
    (folder,) = tmp_path.glob("runs/*")
    job_id = folder.name
    job.hang_up()
    assert job.exit_code() == 129
    wait_until_gone(job_id)
    assert (tmp_path / "runs" / job_id / "report.json").exists()


def test_progress_bars_stay_on_their_line_above_the_panel(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        for i in range(1, 11):
            sys.stdout.write(f"\\r{i * 10}% " + "#" * i)
            sys.stdout.flush()
            time.sleep(0.1)
            while i == 5 and not os.path.exists("go"):
                time.sleep(0.02)
        print("\\ndone")
    """
    job = TerminalLaunch(tmp_path, scripts.write(tmp_path, script))
    job.read_until(lambda: is_whole(job) and job.visible[-3].startswith("[0] 50%"), "half of it")
    assert sum("%" in row for row in job.visible) == 1
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert [row for row in job.everything if row.startswith("[0]")] == ["[0] 100% ##########", "[0] done"]


@pytest.mark.parametrize(("options", "term"), [(["--plain"], "xterm"), (["-q"], "xterm"), ([], "dumb")])
def test_no_panel_where_none_is_wanted(tmp_path: Path, options: list[str], term: str) -> None:
    script = scripts.write(tmp_path, "print('\\x1b[31mred\\x1b[0m')")
    job = TerminalLaunch(tmp_path, *options, script, term=term)
    assert job.wait() == 0
    assert b"[0] \x1b[31mred\x1b[0m\r\n" in job.raw
    assert job.raw.count(b"\x1b") == 2


def test_without_a_terminal_the_bytes_are_the_plain_ones(tmp_path: Path) -> None:
    script = "import sys; print('\\x1b[31mred'); print('5%', end='\\r'); print('last', end=''); sys.exit(3)"
    result = run_launch(tmp_path, "--num_gpus", "1", scripts.write(tmp_path, script))
    assert result.code == 3
    out, err = (tmp_path / "launch.out").read_bytes(), (tmp_path / "launch.err").read_bytes()
    assert out == b"[0] \x1b[31mred\n[0] 5%\r[0] last\n"
    assert b"\nlaunch " in err
    assert "✗ rank 0 (localhost, pid ".encode() in err
    assert b"\x1b" not in err


def test_rich_is_imported_only_for_the_panel(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "print('here')")
    code = (
        "import sys; from launcher.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: print(any(name.split('.')[0] == 'rich' for name in sys.modules))"
    )
    for command in (["--help"], ["--log-dir", str(tmp_path), str(script)]):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, env=environment)
        assert done.stdout.splitlines()[-1] == "False", done.stdout + done.stderr


# ---- the screen by itself ----


class Window:
    """A pseudo-terminal in this process."""

    def __init__(self) -> None:
        self.inside, self.outside = os.openpty()

    def screen(self, lines: list[str]) -> Screen:
        return Screen(self.outside, lambda _columns, _rows: lines)

    def read(self, num_bytes: int = 1 << 16) -> bytes:
        return os.read(self.inside, num_bytes)

    def close(self) -> None:
        os.close(self.inside)
        os.close(self.outside)


def read_until(window: Window, what: bytes) -> bytes:
    found, deadline_s = b"", time.monotonic() + 120
    while what not in found:
        assert time.monotonic() < deadline_s, found
        found += window.read()
    return found


def test_colours_of_the_output_go_on_behind_the_panel() -> None:
    window = Window()
    screen = window.screen(["PANEL"])
    screen.write(b"\x1b[31mred\n")
    read_until(window, b"red\r\n\r\x1b[0m\x1b[?7lPANEL")
    screen.write(b"still red\n")
    assert b"\x1b[J\x1b[31mstill red" in read_until(window, b"still red")
    screen.close()
    window.close()


def test_a_script_that_moves_the_cursor_has_the_screen_for_itself() -> None:
    window = Window()
    screen = window.screen(["PANEL"])
    read_until(window, b"PANEL")
    screen.write(b"two\nbars\x1b[A\r")
    read_until(window, b"bars")
    time.sleep(0.5)
    screen.write(b"end\n")
    screen.close()
    assert b"PANEL" not in read_until(window, b"end\r\n")
    window.close()


def test_a_terminal_that_takes_nothing_stops_only_output() -> None:
    window = Window()
    screen = Screen(window.outside, lambda _columns, _rows: [f"{time.monotonic()}" * 20])
    time.sleep(1.5)  # nobody reads: a few drawings fit into the terminal's buffer at most
    writer = threading.Thread(target=screen.write, args=(b"x\n",), daemon=True)
    writer.start()
    writer.join(DEADLINE_S)
    assert not writer.is_alive(), "it waits for a reader, who comes later only"
    reader = threading.Thread(target=read_until, args=(window, b"x\r\n"))
    reader.start()
    screen.close()
    reader.join(DEADLINE_S)
    assert not reader.is_alive()
    window.close()


def test_a_terminal_that_has_gone_swallows_everything() -> None:
    window = Window()
    screen = window.screen(["PANEL"])
    read_until(window, b"PANEL")
    os.close(window.inside)
    for _ in range(10):
        screen.write(b"x" * 20_000 + b"\n")
    screen.close()
    assert screen.is_broken
    os.close(window.outside)


def test_a_lot_of_output_is_complete_and_in_order() -> None:
    window = Window()
    screen = window.screen(["PANEL"])
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(read_until(window, b"line 49999\r\n")))
    reader.start()
    for number in range(50_000):
        screen.write(b"line %d\n" % number)
    screen.close()
    reader.join(DEADLINE_S)
    lines = re.findall(rb"line (\d+)\r\n", found[0])
    assert lines == [b"%d" % number for number in range(50_000)]
    window.close()


# ---- the facts and their picture ----


def plan_of(num_hosts: int, num_ranks: int) -> JobPlan:
    slots = tuple(range(num_ranks))
    nodes = tuple(NodePlacement(i, Host(f"node-{i}", slots), i * num_ranks) for i in range(num_hosts))
    return JobPlan(
        job_id="calm-otter-4f2a",
        placement=Placement(nodes),
        command=Command("script", "t.py", ()),
        cwd="/",
        run_folder=Path("runs"),
        master_addr="node-0",
        master_port=1,
        transports={},
        forwarded_env={},
    )


def picture(facts: RunFacts, now_s: float, columns: int = 90, rows: int = 30) -> list[str]:
    return [ESCAPE.sub("", line).rstrip() for line in draw(facts.view(now_s), columns, rows)]


def test_the_slowest_rank_counts_and_a_stall_is_told() -> None:
    facts = RunFacts(plan_of(2, 2), now_s=0.0)
    assert picture(facts, 1.0) == [
        "│ calm-otter-4f2a · 2 hosts × 2 ranks · 0:00:01",
        "│ node-0  2 starting",
        "│ node-1  2 starting",
    ]
    for rank in range(4):
        facts.started(rank)
    for second in range(5):
        facts.progress(0, RankProgress(10 * second, loss=2.5), float(second))
        facts.progress(3, RankProgress(step=4 * second), float(second))
    facts.progress(1, RankProgress(), 4.0)
    facts.ended(2, -9)
    facts.warning("the log is\nincomplete")
    assert picture(facts, 4.0) == [
        "│ calm-otter-4f2a · 2 hosts × 2 ranks · 0:00:04 · step 16 · 4 steps/s · loss 2.5",
        "│ node-0  2 running            step 40",
        "│ node-1  1 running, 1 failed  step 16",
        "│ ! the log is incomplete",
    ]
    assert "step 16 · last step 6.0 s ago" in picture(facts, 10.0)[0]
    facts.planned(plan_of(1, 1))
    facts.ended(0, 0)
    assert picture(facts, 3700.0)[:2] == ["│ calm-otter-4f2a · 1 host × 1 rank · 1:01:40", "│ node-0  1 ended"]


def test_the_phase_of_each_rank_is_shown_and_between_steps_only_where_none_comes() -> None:
    facts = RunFacts(plan_of(1, 3), now_s=0.0)
    for rank in range(3):
        facts.started(rank)
    assert picture(facts, 1.0)[1] == "│ node-0  3 starting Python"
    facts.progress(0, RankProgress(phase="importing torch"), 1.0)
    facts.progress(1, RankProgress(phase="a\x1b[2Jb"), 1.0)
    facts.progress(2, RankProgress(), 1.0)
    assert picture(facts, 2.0)[1] == "│ node-0  1 importing torch, 1 a\\x1b[2Jb, 1 running"
    for second in range(5):
        for rank in range(3):
            phase = progress.BETWEEN_STEPS if rank else progress.TRAINING
            facts.progress(rank, RankProgress(second, 2 * second, 0.5, phase, 100), float(second))
    headline, host = picture(facts, 5.0, columns=120)
    assert headline.endswith("step 8 of 100 · 2 steps/s · loss 0.5 · 0:00:46 left")
    assert host == "│ node-0  3 training"
    facts.progress(2, RankProgress(5, 8, None, "writing a sample", 100), 5.0)
    headline, host = picture(facts, 14.0, columns=120)
    assert headline.endswith("step 8 of 100 · last step 10.0 s ago · loss 0.5")
    assert host == "│ node-0  1 training, 1 between steps, 1 writing a sample"
    for rank in range(3):
        facts.progress(rank, RankProgress(5, 101, None, "", 100), 15.0)
    assert " left" not in picture(facts, 15.0)[0]


def test_of_many_hosts_those_that_need_a_look_are_shown() -> None:
    facts = RunFacts(plan_of(100, 8), now_s=0.0)
    for rank in range(800):
        facts.started(rank)
        facts.progress(rank, RankProgress(phase="importing torch" if rank == 711 else "training"), 1.0)
    facts.ended(555, 1)
    rows = picture(facts, 1.0)
    assert rows[1] == "│ node-69  7 training, 1 failed"
    assert rows[2] == "│ node-88  7 training, 1 importing torch"
    assert rows[-1] == "│ 95 more  760 training"
    assert len(rows) == 7
    assert len(picture(facts, 1.0, rows=4)) <= 4
    assert max(map(len, picture(facts, 1.0, columns=20))) <= 20


def test_ctrl_z_takes_the_panel_away_and_fg_brings_it_back(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, TRAINING)
    job = TerminalLaunch(tmp_path, "--num_gpus", "2", script, shell="bash")
    job.read_until(lambda: is_whole(job) and "steps/s" in job.panel[0], "the rate")
    job.type(b"\x1a")
    job.read_until(lambda: any("Stopped" in row for row in job.visible), "the shell's word")
    job.read_for(0.5)
    assert job.panel == []
    assert "suspended: the ranks run on, their output waits; `fg` or `bg` continues" in job.everything
    job.type(b"fg\n")
    job.read_until(lambda: is_whole(job), "the panel")
    job.read_until(lambda: any(row.startswith("continued after ") for row in job.everything), "the line before it")
    (tmp_path / "go").touch()
    job.read_until(lambda: not job.panel, "the end")
    job.type(b"exit $?\n")
    assert job.wait() == 0
