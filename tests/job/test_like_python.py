"""A script runs under `launch` as it runs under `python`: names, paths, imports, pickling, spawned children."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT, run_launch

# Leaves all that a script can see of how it was started.
PROBE = """
'''The probe.'''
import json, multiprocessing, os, pickle, sys
at_start = dict(globals())
from helper import NEIGHBOUR
import launcher

class Point:
    x: int = 1

def add(point: Point, y: int) -> int:
    return point.x + y

def send(pipe, point):
    pipe.send(add(point, 41))

if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    answer = None
    if os.environ["SPAWNS"]:
        child = multiprocessing.get_context("spawn").Process(target=send, args=(there, Point()))
        child.start()
        there.close()
        answer = here.recv()
        child.join()
    seen = {
        "names": {name: str(value) for name, value in at_start.items() if name.startswith("__")},
        "others": sorted(name for name in at_start if not name.startswith("__")),
        "is_main": sys.modules["__main__"].__dict__ is globals(),
        "loader": type(__loader__).__name__,
        "annotations": [str(Point.__annotations__), str(add.__annotations__)],
        "argv": sys.argv,
        "path": sys.path,
        "flags": list(sys.flags),
        "neighbours": [NEIGHBOUR, launcher.__file__, hasattr(launcher, "heartbeat")],
        "pickled": type(pickle.loads(pickle.dumps(Point()))) is Point,
        "spawned": answer,
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
    }
    for name in ("__builtins__", "__loader__", "__spec__"):  # addresses
        seen["names"][name] = str(at_start[name]).partition(" at 0x")[0]
    with open(os.environ["SEEN"], "w") as file:
        json.dump(seen, file)
"""


def source(folder: Path) -> list[str]:
    scripts.write(folder, PROBE, "probe.py")
    return ["./probe.py"]


def from_above(folder: Path) -> list[str]:
    source(folder)
    return [f"../{folder.name}/probe.py"]


def link(folder: Path) -> list[str]:
    """The neighbours are those of the file, not those of the link."""
    source(folder)
    (folder / "links").mkdir()
    (folder / "links" / "linked.py").symlink_to("../probe.py")
    return ["links/linked.py"]


def compiled(folder: Path) -> list[str]:
    py_compile.compile(str(scripts.write(folder, PROBE, "probe.py")), str(folder / "probe.pyc"), doraise=True)
    return ["probe.pyc"]


def module(folder: Path) -> list[str]:
    source(folder)
    return ["-m", "probe"]


def package(folder: Path) -> list[str]:
    (folder / "app").mkdir()
    for name in ("helper.py", "launcher.py"):
        (folder / name).rename(folder / "app" / name)
    scripts.write(folder / "app", PROBE, "__main__.py")
    return ["app"]


def archive(folder: Path) -> list[str]:
    with zipfile.ZipFile(folder / "app.pyz", "w") as file:
        file.writestr("__main__.py", PROBE)
        file.write(folder / "helper.py", "helper.py")
    (folder / "launcher.py").unlink()  # the real one then, found again after the worker's own has gone
    return ["app.pyz"]


CASES = (source, from_above, link, compiled, module, package, archive)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_script_sees_what_it_sees_under_python(case: Callable[[Path], list[str]], tmp_path: Path) -> None:
    scripts.write(tmp_path, "NEIGHBOUR = 'mine'\n", "helper.py")
    scripts.write(tmp_path, "'''Not the package that starts this.'''\n", "launcher.py")
    words = case(tmp_path)
    env = {"PYTHONPATH": str(ROOT), "SPAWNS": "" if case in (package, archive) else "1"}  # python cannot spawn these
    command = [sys.executable, *words, "one", "-2"]
    plain = {**os.environ, **env, "SEEN": str(tmp_path / "python.json")}
    subprocess.run(command, cwd=tmp_path, env=plain, stdin=subprocess.DEVNULL, check=True)
    result = run_launch(tmp_path, *words, "one", "-2", env={**env, "SEEN": str(tmp_path / "launch.json")})
    assert result.code == 0, result.err
    expected = json.loads((tmp_path / "python.json").read_text())
    assert expected["pickled"] is True
    assert expected["spawned"] == (42 if env["SPAWNS"] else None)
    assert json.loads((tmp_path / "launch.json").read_text()) == expected


def test_a_folder_without_a_main_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    result = run_launch(tmp_path, "app")
    assert result.code == 2
    assert "app has no __main__.py" in result.err
    assert not (tmp_path / "runs").exists()


BROKEN = {
    "syntax.py": ("x = (\n", "SyntaxError"),
    "raises.py": ("def f():\n    raise KeyError('gone')\n\nf()\n", "KeyError"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_traceback_is_that_of_python(name: str, tmp_path: Path) -> None:
    text, expected = BROKEN[name]
    script = scripts.write(tmp_path, text, name)
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    result = run_launch(tmp_path, script)
    assert (result.code, plain.returncode) == (1, 1)
    assert expected in plain.stderr
    log = (tmp_path / "runs" / result.job_id / "rank_0.log").read_text()
    assert log == plain.stderr


@pytest.mark.parametrize("error", ["ValueError", "ImportError"])
def test_the_traceback_of_an_import_of_torch_is_that_of_python(error: str, tmp_path: Path) -> None:
    """Its import is shown on the panel, which must not show in a traceback."""
    (tmp_path / "torch").mkdir()
    scripts.write(tmp_path / "torch", f"def find_libraries():\n    raise {error}\nfind_libraries()", "__init__.py")
    script = scripts.write(tmp_path, "def load():\n    import torch\nload()")
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    result = run_launch(tmp_path, script)
    assert "find_libraries" in plain.stderr
    assert (tmp_path / "runs" / result.job_id / "rank_0.log").read_text() == plain.stderr


def test_heartbeats_and_notices_reach_a_script_whose_import_of_the_package_comes_late(tmp_path: Path) -> None:
    """The worker listens before the script starts, with a copy of the module that the script does not have."""
    text = """
        import os, signal, sys
        assert not [name for name in sys.modules if name.startswith("launcher")]
        os.kill(os.getpid(), signal.SIGUSR1)
        import launcher
        assert launcher.preempted()
        launcher.heartbeat(0.5)
        with open(os.environ["LAUNCH_PROGRESS_FILE"], "rb") as file:
            assert file.read(8) == (1).to_bytes(8, sys.byteorder), "one heartbeat"
    """
    result = run_launch(tmp_path, scripts.write(tmp_path, text))
    assert result.code == 0, result.err
