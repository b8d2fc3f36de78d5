"""A command named `deepspeed` in this Python environment, and `import deepspeed` in all that runs there.

Two files: the command itself, which is `launch` by another name, and a .pth file, which python reads at each start.
`accelerate launch` needs both: it runs `deepspeed` for several nodes, and on one it starts ranks as torchrun does, in
which nothing of `launch` runs first. An environment with DeepSpeed has its own command, and needs none of ours.
"""

from __future__ import annotations

import os
import shlex
import site
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from launcher.base.errors import UsageError

_NAME = "deepspeed"
_MARK = "launch deepspeed-command"  # in a line of each file: what lacks it is not ours
_SCRIPT = f"""\
#!/bin/sh
'''exec' {{python}} "$0" "$@"
' '''
# Written by `{_MARK} install`; `{_MARK} remove` takes it away. The first line of a script holds no path with spaces.
import sys

from launcher.__main__ import main

sys.exit(main())
"""
# Python reads a user's .pth files before it knows the folders of the system. What is found by the package's name may be
# a script's own launcher.py, which must not run here; and where the package has gone, python starts all the same.
_AT_START = """
import os, site, sys
path = list(sys.path)
sys.path += site.getsitepackages()
try:
    specs = (finder.find_spec("launcher", None) for finder in sys.meta_path)
    spec = next(filter(None, specs), None)
    folders = spec and spec.submodule_search_locations or ()
    if any(os.path.isfile(os.path.join(folder, "compat", "at_start.py")) for folder in folders):
        from launcher.compat.at_start import install
        install()
except ImportError:
    pass
finally:
    sys.path[:] = path
"""
# A line that begins with "import" is executed.
_PTH = f"""\
# Written by `{_MARK} install`; `{_MARK} remove` takes it away.
import sys; exec({_AT_START!a}, {{}})
"""


class Files(NamedTuple):
    """Where the two files are."""

    command: Path
    pth: Path

    @property
    def are_there(self) -> bool:
        """Whether both are, and are ours."""
        return all(_is_ours(path) for path in self)


def find() -> Files:
    """Return where the files are in this environment, or would be.

    In the folders of `pip install`: the environment's own, or the user's where those cannot be written.
    """
    found, *users = _places()
    is_writable = all(os.access(path.parent, os.W_OK) for path in found)
    return found if is_writable or found.are_there or not users else users[0]


def install_command() -> Files:
    """Write both files, over those of an earlier call.

    Raises: UsageError where DeepSpeed is installed, or a command of that name is there that is not ours; OSError.
    """
    files = find()
    spec = PathFinder.find_spec(_NAME)
    if spec is not None and spec.loader is not None and spec.has_location:
        raise UsageError(
            "DeepSpeed is installed, with a command of its own", where=spec.origin, hint="uninstall it first"
        )
    for path in files:
        if path.exists() and not _is_ours(path):
            raise UsageError("this file is another program's", where=str(path), hint="remove it first")
    for path, text in zip(files, (_SCRIPT.format(python=shlex.quote(sys.executable)), _PTH), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    files.command.chmod(0o755)
    return files


def remove_command() -> list[Path]:
    """Remove the files that `install_command` wrote; return those that were there. Raises: OSError."""
    there = [path for files in _places() for path in files if _is_ours(path)]
    for path in there:
        path.unlink()
    return there


def _places() -> list[Files]:
    """Return where the files may be: in the environment's own folders, and in the user's where python reads those."""
    schemes = [sysconfig.get_default_scheme()]
    if site.ENABLE_USER_SITE:
        schemes.append(sysconfig.get_preferred_scheme("user"))
    return [_files_in(scheme) for scheme in schemes]


def _files_in(scheme: str) -> Files:
    paths = sysconfig.get_paths(scheme)
    return Files(Path(paths["scripts"], _NAME), Path(paths["purelib"], "launch_deepspeed.pth"))


def _is_ours(path: Path) -> bool:
    return path.is_file() and _MARK.encode() in path.read_bytes()
