"""What is said of processes that outlive their rank, of programs that cannot be run, of stacks that were asked for."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import Launch, run_launch, wait_until, wait_until_gone
from harness.launch.forked_ranks import in_forks


def test_what_ranks_leave_running_is_named_and_ended(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "trap '' HUP; setsid sleep 600 &\nexit 0\n", "leave.sh")
    result = run_launch(tmp_path, "--no_python", "sh", script)
    assert result.code == 0
    (line,) = [line for line in result.err.splitlines() if "left processes running" in line]
    assert re.search(r"sleep \(pid \d+\)", line)
    assert "wait for them" in line
    wait_until_gone(result.job_id)


def test_a_child_that_ends_with_its_rank_is_not_worth_a_word(tmp_path: Path) -> None:
    text = "import os, subprocess\nread, write = os.pipe()\nsubprocess.Popen(['cat'], stdin=read)\n"
    result = run_launch(tmp_path, scripts.write(tmp_path, text))
    assert result.code == 0
    assert "left processes running" not in result.err


@pytest.mark.parametrize(("name", "code"), [("./nosuch", 127), ("nosuch-at-all", 127), ("./plain.txt", 126)])
def test_a_program_that_cannot_be_run_has_the_exit_code_of_a_shell(name: str, code: int, tmp_path: Path) -> None:
    scripts.write(tmp_path, "text", "plain.txt")
    result = run_launch(tmp_path, "--no_python", name)
    assert result.code == code
    assert f"{name}: " in result.err


@pytest.mark.parametrize("kind", ["script", "module"])
def test_stacks_begin_with_the_users_code(kind: str, tmp_path: Path) -> None:
    text = "import time\ndef here():\n    print('READY', flush=True)\n    time.sleep(600)\nhere()\n"
    scripts.write(tmp_path, text, "stands.py")
    job = Launch(tmp_path, *(["stands.py"] if kind == "script" else ["-m", "stands"]))
    wait_until(lambda: "READY" in job.out, "the script")
    job.signal(signal.SIGQUIT)
    wait_until(lambda: "stacks of all ranks" in job.err, "the stacks")
    job.signal(signal.SIGTERM)
    job.wait()
    frames = re.findall(
        r'  File "(.*)", line \d+ in (\S+)', (tmp_path / "runs" / job.job_id / "stacks.txt").read_text()
    )
    assert [(Path(path).name, name) for path, name in frames] == [("stands.py", "here"), ("stands.py", "<module>")]


RECORDED = """
    import os, sys
    if os.environ["RANK"] == "0" and sys.argv[1:]:
        sys.exit()
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        if os.environ["RANK"] == "1":
            raise ValueError("the data is bad")

    main()
"""


@pytest.mark.parametrize("kind", ["script", "program"])
def test_what_record_of_torch_leaves_is_kept_and_told(kind: str, tmp_path: Path) -> None:
    script = scripts.write(tmp_path, RECORDED)
    # A program imports torch itself: one rank does.
    command = in_forks(script) if kind == "script" else ["--no_python", sys.executable, script, "rank 0 ends at once"]
    result = run_launch(tmp_path, "--num_gpus", "2", *command)
    assert result.code == 1
    (folder,) = (tmp_path / "runs").iterdir()
    assert [path.name for path in folder.glob("*.error.json")] == ["rank_1.error.json"]
    message = json.loads((folder / "rank_1.error.json").read_text())["message"]
    assert message["message"] == "ValueError: the data is bad"
    assert int(message["extraInfo"]["timestamp"]) > 0
    failure = json.loads((folder / "report.json").read_text())["failure"]
    assert failure["rank"] == 1
    assert failure["traceback"].endswith("ValueError: the data is bad\n")
    assert (folder / "rank_1.log").read_text().count("Traceback (most recent call last)") == 1
