"""Python environments of their own, for tests that write into one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from harness.launch.command import ROOT


def make_environment(folder: Path, *, with_user_site: bool = False) -> Path:
    """Make an environment that has this package and all packages of the one that runs the tests; return its python.

    with_user_site: it sees the packages of the user and of the system, too.
    """
    venv.EnvBuilder(symlinks=True, system_site_packages=with_user_site).create(folder)
    packages = [ROOT, *[path for path in sys.path if path.endswith("site-packages")]]
    (packages_of(folder) / "_shared.pth").write_text("".join(f"{path}\n" for path in packages))
    return folder / "bin" / "python"


def packages_of(folder: Path) -> Path:
    """Return the folder of an environment's own packages."""
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))


def run_in(folder: Path, *command: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder to its end, as from a shell without variables of Python or of `launch`."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LAUNCH_"))}
    ours |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=folder, env=ours | (env or {}), capture_output=True, text=True)
