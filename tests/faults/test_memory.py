"""A rank that runs into a real memory limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT
from harness.launch.control_groups import memory_groups
from harness.needs import need

_LIMIT_BYTES = 200 << 20


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A cgroup with a limit."""
    with memory_groups(1, _LIMIT_BYTES) as groups:
        if not groups:
            need("no cgroup with a memory limit can be made here")
        yield groups[0]


def test_the_limit_and_what_was_held_are_told(memory_group: Path, tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, time
        if os.environ["RANK"] == "1":
            held = []
            while True:
                held.append(bytearray(b"x" * (10 << 20)))
        time.sleep(600)
        """,
    )
    enter = f'echo $$ > {memory_group}/cgroup.procs; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", enter, "sh", sys.executable, "-m", "launcher", "--num_gpus", "2", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 137, done.stderr
    assert "✗ rank 1" in done.stderr
    assert "killed by SIGKILL, out of memory" in done.stderr
    assert "the memory limit of the cgroup was reached, limit 200.0 MiB" in done.stderr
    assert "this rank held up to" in done.stderr
    page = (ROOT / "docs" / "guides.md").read_text()
    shown = done.stderr[done.stderr.index("  next  ") :].rstrip()
    assert 'offload_optimizer and offload_param with "device": "nvme" in place of "cpu"' in shown
    assert shown in page
