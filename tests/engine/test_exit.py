"""The end of a training script: no race between ranks that leave and the last step's exchange."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import run_launch, slowness
from harness.train.forked import run_ranks

TRAIN = """
    import atexit, os, pathlib, sys, time, torch, launcher
    config = {{"train_micro_batch_size_per_gpu": 4, "steps_per_print": 0, "zero_optimization": {{"stage": 2}},
               "optimizer": {{"type": "AdamW", "params": {{"lr": 0.05}}}}}}
    model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(4)))
    engine, *_ = launcher.initialize(model=model, config=config)
    engine.backward(engine(torch.randn(4, 600)).mean())
    {before}
    engine.step()
    {after}
"""
# Rank 1 sends its part of the last step when rank 0 has come to its end, and would have gone if it did not wait.
LATE = """
    from launcher.zero.unit import FlatUnit
    leaving, publish = pathlib.Path("leaving"), FlatUnit.write_back
    def publish_late(unit, **how):
        while not leaving.exists():
            time.sleep(0.01)
        time.sleep(1.5)
        publish(unit, **how)
    if os.environ["RANK"] == "1":
        FlatUnit.write_back = publish_late
    else:
        atexit.register(leaving.touch)
"""


# Run after everything that `initialize` has registered.
LEFT = """
    import atexit, pathlib
    tasks = lambda: [(task / "comm").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
    atexit.register(lambda: print("THREADS", sum("gloo" in name for name in tasks())))
"""


@pytest.mark.parametrize(("before", "after"), [(LATE.strip(), ""), ("", "torch.distributed.destroy_process_group()")])
def test_a_rank_leaves_when_the_last_steps_exchange_and_gloos_threads_have_ended(
    tmp_path: Path, before: str, after: str
) -> None:
    result = run_ranks(tmp_path, 2, scripts.write(tmp_path, LEFT + TRAIN.format(before=before, after=after)))
    assert result.code == 0, result.err
    assert result.out.count("THREADS 0") == 2, result.out


def test_an_exception_waits_for_nobody(tmp_path: Path) -> None:
    after = "if os.environ['RANK'] == '1': raise ValueError('bad'); time.sleep(600)".replace("; time", "\n    time")
    start_s = time.monotonic()
    result = run_ranks(tmp_path, 2, scripts.write(tmp_path, TRAIN.format(before="", after=after)))
    assert result.code == 1
    assert "ValueError: bad" in result.err
    assert time.monotonic() - start_s < 120 * slowness()  # the process group would wait for 30 min


# Threads of gloo that get a processor only when nobody else wants one: they release a collective long after it is done.
SLOW_THREADS = """
    from pathlib import Path
    for task in Path("/proc/self/task").iterdir():
        if "gloo" in (task / "comm").read_text():
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
"""


@pytest.mark.soak
def test_python_ends_after_the_threads_of_gloo_have_released_everything(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, TRAIN.format(before=SLOW_THREADS.strip(), after=""))
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        for _ in range(15):
            result = run_launch(tmp_path, "--num_gpus", "2", script, env={"OMP_NUM_THREADS": "1"})
            assert result.code == 0, result.err
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
