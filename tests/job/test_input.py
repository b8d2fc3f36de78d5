"""What ranks read: the standard input of `launch` when there is one rank here, else nothing, and a word about it."""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import DEADLINE_S, ROOT, run_launch
from harness.launch.terminal import TerminalLaunch

LAUNCH = (sys.executable, str(ROOT / "launcher" / "__main__.py"))
ASKS = "name = input('name? ')\nprint(f'<{name}>', flush=True)\n"
HINT = "ranks have no standard input"


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state")}


def test_a_single_rank_reads_the_terminal(tmp_path: Path) -> None:
    text = ASKS + "import os\nprint('terminal', os.isatty(0), flush=True)\nsecret = 41\nbreakpoint()\nprint('end')\n"
    typed = TerminalLaunch(tmp_path, "--plain", scripts.write(tmp_path, text))
    typed.read_until(lambda: "[0] name?" in typed.everything, "the question")
    typed.type(b"Ada\n")
    typed.read_until(lambda: "[0] (Pdb)" in typed.everything, "the debugger")
    typed.type(b"p secret + 1\n")
    typed.read_until(lambda: typed.everything[-2:] == ["42", "[0] (Pdb)"], "the value")
    typed.type(b"c\n")
    assert typed.wait() == 0
    assert {"[0] name? Ada", "<Ada>", "[0] terminal True", "[0] (Pdb) p secret + 1"} <= set(typed.everything)


def test_a_single_rank_reads_a_pipe_and_its_end(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, ASKS + "import sys\nprint(sys.stdin.read())\n")
    done = subprocess.run(
        [*LAUNCH, script], cwd=tmp_path, env=environment(tmp_path), input=b"Ada\nrest\n", capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert b"<Ada>\n[0] rest\n" in done.stdout


def test_a_job_in_the_background_leaves_the_terminal_to_the_shell(tmp_path: Path) -> None:
    command = shlex.join([*LAUNCH, str(scripts.write(tmp_path, ASKS))])
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        ["bash", "-mc", f"{command} >out 2>&1 & wait $!"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.write(terminal, b"not for the job\n")
    try:
        assert process.wait(DEADLINE_S) == 1
    finally:
        process.kill()
        os.close(terminal)
        os.close(other_end)
    assert HINT in (tmp_path / "out").read_text()


@pytest.mark.parametrize("code", ["input()", "breakpoint()", "import pdb; pdb.set_trace()\npass"])
def test_several_ranks_say_why_there_is_nothing_to_read(code: str, tmp_path: Path) -> None:
    result = run_launch(tmp_path, "--num_gpus", "2", scripts.write(tmp_path, code))
    assert result.code == 1
    (line,) = [line for line in result.err.splitlines() if HINT in line]
    assert "--num-gpus 1" in line
    assert "worker.py" not in result.err


def test_a_debugger_of_the_users_choice_is_left_alone(tmp_path: Path) -> None:
    result = run_launch(
        tmp_path, "--num_gpus", "2", scripts.write(tmp_path, "breakpoint()"), env={"PYTHONBREAKPOINT": "0"}
    )
    assert result.code == 0, result.err
