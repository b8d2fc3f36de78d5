"""What an agent makes of what py-spy prints, and which ranks have a thread that answers their agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import run_launch

from launcher.agent import stacks
from launcher.agent.spawn import without_own_frames
from launcher.base.processes import allow_tracing
from launcher.transport.command import package_root

DUMP = """\
Process 15762: python -u /x/launcher/start.py /x launcher.worker script train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 15762 (idle): "MainThread"
    read (libc.so.6)
    hold_the_lock (train.py:7)
    <module> (train.py:8)
    _run_script (launcher/worker.py:179)
    main (launcher/worker.py:71)
    <module> (launcher/start.py:16)
Thread 15770 (idle): "launch-collectives"
    open64 (libc.so.6)
    _answer_requests (launcher/compat/collectives.py:64)
    run (threading.py:982)
"""


def test_frames_by_py_spy_end_with_the_users_code() -> None:
    assert stacks._native_text(DUMP).splitlines() == [
        "  by py-spy:",
        '  Thread 15762 (idle): "MainThread"',
        "      read (libc.so.6)",
        "      hold_the_lock (train.py:7)",
        "      <module> (train.py:8)",
    ]


def test_names_of_templates_are_cut() -> None:
    long = DUMP.replace("read (libc", f"std::{'x' * 5000} (libc")
    assert max(map(len, stacks._native_text(long).splitlines())) <= 2 + stacks._MAX_FRAME_CHARS


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "Permission Denied: Try running again with elevated permissions by going 'sudo env'",
            "kernel.yama.ptrace_scope",
        ),
        (
            "Error: Failed to get stack traces\n\nCaused by:\n    0: gone",
            "py-spy says Error: Failed to get stack traces",
        ),
        ("", ""),
    ],
)
def test_a_native_stack_that_is_refused_is_one_line(output: str, said: str) -> None:
    text = stacks._native_text(output)
    assert said in text
    assert text.count("\n") == bool(said)


def test_py_spy_is_found_beside_the_interpreter_and_in_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert stacks.find_py_spy() is None
    for folder in ("path", "bin"):
        program = tmp_path / folder / "py-spy"
        program.parent.mkdir()
        program.touch(0o700)
        assert stacks.find_py_spy() == str(program)


@pytest.mark.parametrize("file", ["compat/collectives.py", "journal/rank.py"])
def test_threads_of_our_own_are_left_out_of_stacks(file: str) -> None:
    own = f'  File "{package_root()}/launcher/{file}", line 60 in _answer_requests'
    threads = [f"Thread 0x01 (most recent call first):\n{own}", 'Current thread 0x02:\n  File "t.py", line 3 in f']
    assert without_own_frames("\n\n".join(threads)) == threads[1]


def test_a_process_may_be_traced_by_another_one_where_the_kernel_is_strict() -> None:
    code = f"from launcher.base.processes import allow_tracing; allow_tracing({os.getpid()})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=package_root())  # a kernel without Yama refuses it
    allow_tracing(os.getpid())


def test_only_a_rank_of_several_with_torch_has_a_thread_that_answers(tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, threading
        from launcher.compat.collectives import listen
        def num_listeners():
            return [thread.name for thread in threading.enumerate()].count("launch-collectives")
        listen()
        assert num_listeners() == 0  # torch is not imported
        import torch
        assert num_listeners() == 1
        if os.fork() == 0:  # its agent does not ask for it
            listen()
            os._exit(num_listeners())
        assert os.wait()[1] == 0
        os.environ["WORLD_SIZE"] = "1"  # a rank alone waits for nobody
        listen()
        assert num_listeners() == 1
        print(os.environ["TORCH_FR_BUFFER_SIZE"])
        """,
    )
    result = run_launch(tmp_path, "--num_gpus", "2", "--no-prefix", script, env={"TORCH_FR_BUFFER_SIZE": "7"})
    assert (result.code, result.out) == (0, "7\n" * 2), result.err
