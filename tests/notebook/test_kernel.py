"""The notebook side in a real Jupyter kernel: magics, functions on ranks, live output, interrupts."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from harness.launch.command import slowness, wait_until_gone
from harness.launch.kernel import Kernel, text_of, until

from launcher.base.processes import members_of_job

LOAD = "import launcher\n%load_ext launcher.notebook"
Body = Callable[[Kernel], Coroutine[Any, Any, None]]


def in_kernel(folder: Path, body: Body) -> None:
    async def session() -> None:
        async with Kernel(folder) as kernel:
            await body(kernel)

    asyncio.run(session())


def job_in(text: str) -> str:
    match = re.search(r"job (\w+-\w+-[0-9a-f]{4})", text)
    assert match is not None, text
    return match.group(1)


def test_run_with_what_the_notebook_defines(tmp_path: Path) -> None:
    async def body(kernel: Kernel) -> None:
        await kernel.run_well(LOAD)
        await kernel.run_well("class Answer:\n    def __init__(self, value): self.value = value\nFACTOR = 7")
        out = await kernel.run_well(
            "import os\n"
            "def work(x):\n"
            "    print('on', os.environ['RANK'])\n"
            "    return Answer(x * FACTOR + int(os.environ['RANK']))\n"
            "print([isinstance(r, Answer) and r.value for r in launcher.notebook.run(work, (6,), num_gpus=2)])"
        )
        assert "[0] on 0\n" in out
        assert "[1] on 1\n" in out
        assert "[42, 43]" in out
        cell = await kernel.run(
            "def fail():\n    raise LookupError('no such answer')  # this line\nlauncher.notebook.run(fail)"
        )
        (error,) = [output for output in cell.outputs if output.output_type == "error"]
        assert error.ename == "RankFailed"
        shown = "\n".join(error.traceback)
        assert "LookupError: no such answer" in shown
        assert "# this line" in shown, "the rank knows the cell's source"
        assert shown.count("Traceback") == 1
        assert "call.py" not in shown

    in_kernel(tmp_path, body)


def test_the_cell_magic_runs_the_cell_on_ranks(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 42")

    async def body(kernel: Kernel) -> None:
        await kernel.run_well(LOAD)
        out = await kernel.run_well(
            "%%launch --num_gpus 2 -- --flag 'a b'\n"
            "import neighbour, os, sys\n"
            "print('RANK', os.environ['RANK'], neighbour.VALUE, sys.argv[1:])\n"
            "print('warned', file=sys.stderr)\n"
        )
        for rank in range(2):
            assert f"[{rank}] RANK {rank} 42 ['--flag', 'a b']\n" in out
            assert f"[{rank}] warned\n" in out
        cell = await kernel.run("%%launch --num_gpus 2\n\nraise ValueError('line three')")
        shown = text_of(cell)
        assert "JobError: launch ended with exit code 1" in text_of(cell, ("error",))
        assert "line 3, in <module>" in shown
        assert "ValueError: line three" in shown
        assert [path.name for path in tmp_path.glob(".launch_cell_*")] == []

    in_kernel(tmp_path, body)


def test_the_line_magic_runs_a_script_and_shows_mistakes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys; print('HERE', os.environ['RANK'], sys.argv[1:])")

    async def body(kernel: Kernel) -> None:
        await kernel.run_well(LOAD)
        out = await kernel.run_well("lr = 0.5\n%launch --num_gpus 2 script.py --lr {lr}")
        assert "[1] HERE 1 ['--lr', '0.5']\n" in out
        cell = await kernel.run("%launch no_such_script.py")
        assert "script no_such_script.py does not exist" in text_of(cell, ("stderr",))
        assert "JobError: launch ended with exit code 2" in text_of(cell, ("error",))
        assert "close the quotes" in text_of(await kernel.run("%launch 'script.py"))

    in_kernel(tmp_path, body)


LIVE = {
    "magic": "%%launch --num_gpus 2\nimport time\nprint('READY', flush=True)\ntime.sleep(600)",
    "run": "import time\ndef wait():\n    print('READY')\n    time.sleep(600)\nlauncher.notebook.run(wait)",
}


@pytest.mark.parametrize("way", LIVE)
def test_output_is_live_and_the_interrupt_ends_all_ranks(tmp_path: Path, way: str) -> None:
    async def body(kernel: Kernel) -> None:
        await kernel.run_well(LOAD)
        cell, task = kernel.start(LIVE[way])
        await until(lambda: text_of(cell).count("READY") == 2, "output of a cell that still runs")
        assert not task.done()
        job_id = job_in(text_of(cell))
        assert len(members_of_job(job_id)) == 2
        start_s = time.monotonic()
        await kernel.interrupt()
        await task
        assert time.monotonic() - start_s < 200 * slowness(), "the ranks sleep for 600 s"
        assert cell.outputs[-1].ename == "KeyboardInterrupt"
        assert "SIGINT: stopping all ranks" in text_of(cell)
        assert not members_of_job(job_id)
        assert "still alive" in await kernel.run_well("print('still alive')")

    in_kernel(tmp_path, body)


STUBBORN = """%%launch --num_gpus 2 --grace 300
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('READY', flush=True)
time.sleep(600)"""


def test_a_second_interrupt_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    async def body(kernel: Kernel) -> None:
        await kernel.run_well(LOAD)
        cell, task = kernel.start(STUBBORN)
        await until(lambda: text_of(cell).count("READY") == 2, "the ranks")
        await kernel.interrupt()
        await until(lambda: "SIGINT: stopping" in text_of(cell), "the first interrupt's effect")
        start_s = time.monotonic()
        await kernel.interrupt()
        await task
        assert time.monotonic() - start_s < 200 * slowness(), "the grace is 300 s"
        assert not members_of_job(job_in(text_of(cell)))

    in_kernel(tmp_path, body)


MANY = {
    "magic": "%%launch --num_gpus 2\nfor i in range(20000): print('é', i)",
    "run": "def many():\n    for i in range(20000): print('é', i)\nlauncher.notebook.run(many)",
}


@pytest.mark.parametrize("way", MANY)
def test_no_line_is_lost_or_torn(tmp_path: Path, way: str) -> None:
    async def body(kernel: Kernel) -> None:
        await kernel.run_well(LOAD)
        lines = (await kernel.run_well(MANY[way])).splitlines()
        for rank in range(2):
            assert [line for line in lines if line.startswith(f"[{rank}]")] == [f"[{rank}] é {i}" for i in range(20000)]

    in_kernel(tmp_path, body)


@pytest.mark.parametrize("way", LIVE)
def test_a_killed_kernel_leaves_no_rank(tmp_path: Path, way: str) -> None:
    jobs = []

    async def body(kernel: Kernel) -> None:
        await kernel.run_well(LOAD)
        cell, task = kernel.start(LIVE[way])
        await until(lambda: text_of(cell).count("READY") == 2, "the ranks")
        jobs.append(job_in(text_of(cell)))
        assert len(members_of_job(jobs[0])) == 2
        task.cancel()
        await kernel.client.km.shutdown_kernel(now=True)

    in_kernel(tmp_path, body)
    wait_until_gone(jobs[0], 20)
