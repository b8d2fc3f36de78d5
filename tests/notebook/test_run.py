"""`run()`: results by rank, errors that come back, output as it comes, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from harness.launch.command import DEADLINE_S, ROOT, slowness, wait_until, wait_until_gone

import launcher
from launcher.api import pickling
from launcher.base.errors import JobError, LauncherError, UsageError
from launcher.base.processes import members_of_job


class Unfit(Exception):
    """Pickles, and cannot be built again: its __init__ wants two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job_in(text: str) -> str:
    match = re.search(r"job (\w+-\w+-[0-9a-f]{4})", text)
    assert match is not None, text
    return match.group(1)


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_results_come_back_by_rank_with_the_environment_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    def identify(greeting: str, *, sign: str) -> dict[str, Any]:
        print(greeting, sign)
        return {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")}

    results = launcher.notebook.run(identify, ("hello",), {"sign": "!"}, num_gpus=3)
    assert [result["RANK"] for result in results] == ["0", "1", "2"]
    assert {result["WORLD_SIZE"] for result in results} == {"3"}
    out = capsys.readouterr().out
    for rank in range(3):
        assert f"[{rank}] hello !\n" in out
    assert (Path("runs") / job_in(out) / "rank_2.log").read_text() == "hello !\n"


def test_ranks_are_those_of_their_job_inside_an_emulation_too() -> None:
    with launcher.notebook.emulate():
        assert launcher.notebook.run(os.getenv, ("RANK",)) == ["0", "1"]
        assert launcher.notebook.run(os.getenv, ("WORLD_SIZE",)) == ["2", "2"]


@pytest.mark.soak  # as those of the example are, see test_example.py
def test_ranks_are_a_process_group() -> None:
    def total() -> float:
        import torch

        launcher.init_distributed(dist_backend="gloo")
        value = torch.tensor(float(os.environ["RANK"]) + 1)
        torch.distributed.all_reduce(value)
        torch.distributed.destroy_process_group()
        return value.item()

    assert launcher.notebook.run(total, num_gpus=2) == [3.0, 3.0]


def test_the_first_failure_stops_all_and_comes_back_with_its_traceback_and_type(folder: Path) -> None:
    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("the data is bad")
        time.sleep(600)

    start_s = time.monotonic()
    with pytest.raises(JobError, match=r"rank 1: failed .* after start: exit code 1") as caught:
        launcher.notebook.run(fail, log_dir=folder / "logs")
    assert time.monotonic() - start_s < 30 * slowness()
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.exit_code == 1
    text = str(caught.value)
    assert text.count("Traceback (most recent call last)") == 1
    assert "KeyError: 'the data is bad'" in text
    assert "rank.py" not in text, "the traceback shows the user's frames only"
    (log,) = folder.glob("logs/*/rank_1.log")
    assert str(log) in text
    assert not members_of_job(log.parent.name)


def test_an_error_that_cannot_be_rebuilt_still_comes_back_as_text() -> None:
    def fail() -> None:
        raise Unfit("in ", "two parts")

    with pytest.raises(JobError, match="Unfit: in two parts") as caught:
        launcher.notebook.run(fail, num_gpus=1)
    assert caught.value.__cause__ is None


def test_a_killed_rank_is_named() -> None:
    def die() -> None:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(JobError, match="killed by SIGKILL") as caught:
        launcher.notebook.run(die, num_gpus=1)
    assert caught.value.exit_code == 137
    assert "last words" in caught.value.details


def test_leaving_the_process_instead_of_returning_is_an_error() -> None:
    with pytest.raises(JobError, match=r"rank 0: ended with exit code 0 before the function returned"):
        launcher.notebook.run(sys.exit, num_gpus=1)
    with pytest.raises(JobError, match="exit code 3"):
        launcher.notebook.run(sys.exit, (3,), num_gpus=1)


def test_a_result_that_cannot_be_sent_says_so() -> None:
    with pytest.raises(JobError, match="the result, a lock, cannot be pickled"):
        launcher.notebook.run(threading.Lock, num_gpus=1)


def test_arguments_that_cannot_be_sent_say_so_before_anything_starts(folder: Path) -> None:
    with pytest.raises(UsageError, match="the function or its arguments cannot be pickled"):
        launcher.notebook.run(print, (threading.Lock(),))
    assert not (folder / "runs").exists()


class Stubborn:
    def __reduce__(self) -> tuple[object, ...]:
        raise RuntimeError("not me")


def test_a_failing_pickle_shows_the_frames_of_the_user_alone() -> None:
    with pytest.raises(UsageError, match="cannot be pickled: not me") as caught:
        launcher.notebook.run(print, (Stubborn(),))
    assert [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)] == ["__reduce__"]
    with pytest.raises(UsageError, match="cannot be pickled") as caught:
        launcher.notebook.run(print, (threading.Lock(),))
    assert caught.value.__cause__ is None, "nothing of the library's own"


def test_a_log_folder_that_cannot_be_used_names_the_parameter(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(LauncherError, match="log_dir="):
        launcher.notebook.run(print, num_gpus=1, log_dir=folder / "file")


def test_the_error_of_a_job_can_be_named() -> None:
    assert launcher.JobError is launcher.notebook.JobError is JobError


def test_classes_and_functions_of_main_travel_and_come_back_as_themselves(folder: Path) -> None:
    (folder / "lib").mkdir()
    script(folder / "lib", "def double(x): return 2 * x", "neighbour.py")
    code = """
        import launcher, sys
        sys.path.append("lib")
        import neighbour
        FACTOR = 10
        class Thing:
            def __init__(self, value): self.value = value
        def helper(thing): return Thing(neighbour.double(thing.value) * FACTOR)
        def work(thing): return helper(thing)
        results = launcher.notebook.run(work, (Thing(2),))
        print("RESULT", [type(r) is Thing and r.value for r in results])
    """
    done = subprocess.run([sys.executable, script(folder, code)], capture_output=True, text=True, env=environment())
    assert "RESULT [40, 40]" in done.stdout, done.stderr


def test_without_cloudpickle_importable_functions_work_and_others_name_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert launcher.notebook.run(os.path.basename, ("/a/b",)) == ["b", "b"]

    def of_the_notebook() -> None: ...

    of_the_notebook.__module__ = "__main__"
    of_the_notebook.__qualname__ = "of_the_notebook"
    monkeypatch.setattr(sys.modules["__main__"], "of_the_notebook", of_the_notebook, raising=False)
    with pytest.raises(
        UsageError, match=r"of_the_notebook is defined in the notebook or the program.*install cloudpickle"
    ):
        pickling.dumps((of_the_notebook, ()), "the function or its arguments")
    with pytest.raises(UsageError, match="install cloudpickle"):
        launcher.notebook.run(lambda: 1)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match=r"num_gpus=: expected a whole number from 1 to 1024.*, got 0"):
        launcher.notebook.run(print, num_gpus=0)
    with pytest.raises(UsageError, match=r"args is 3, no tuple.*\(x,\)"):
        launcher.notebook.run(print, 3)  # type: ignore[arg-type]


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(UsageError, match="slot 1 has no GPU: this process may use 1"):
        launcher.notebook.run(print, num_gpus=2)


def test_the_notebook_side_loads_neither_torch_nor_ipython() -> None:
    code = (
        "import launcher, sys; launcher.notebook.load_ipython_extension, launcher.notebook.run; "
        "launcher.notebook.emulate().restore(); import launcher.notebook.cells; "
        "print([name for name in ('torch', 'IPython', 'paramiko', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.stdout.strip() == "[]", done.stderr


INTERRUPTED = """
    import launcher, signal, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background of a script
    def wait():
        print("READY", flush=True)
        time.sleep(600)
    try:
        launcher.notebook.run(wait)
    except KeyboardInterrupt:
        print("INTERRUPTED", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_all_ranks(folder: Path, number: signal.Signals) -> None:
    out = folder / "out"
    with out.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, script(folder, INTERRUPTED)], stdout=file, stderr=file, env=environment()
        )
    wait_until(lambda: out.read_text().count("READY") == 2, "the ranks")
    job_id = job_in(out.read_text())
    assert len(members_of_job(job_id)) == 2
    process.send_signal(number)
    code = process.wait(DEADLINE_S)
    if number == signal.SIGINT:
        assert code == 0
        assert "INTERRUPTED True" in out.read_text()
    else:
        assert code == -number
    wait_until_gone(job_id)
