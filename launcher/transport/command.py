"""The one command that starts an agent, or a plain shell. It is a constant: no user text, no environment, no secrets.

An installed package is started with `python -m launcher.agent`. From a source checkout (the package's folder
is no site-packages) the checkout's path is appended to the module search path by a fixed `-c` program, so
that the same path on the other machine (a shared file system) works and PYTHONPATH is never needed.
An installed package on the other machine still wins, because the path is appended.
"""

from __future__ import annotations

import functools
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    Root = str | os.PathLike[str]

AGENT_MODULE = "launcher.agent"
SHELL_ARGV = ("/bin/sh",)  # reads what it is to do from its stdin
SHELL_COMMAND = "exec /bin/sh"
_SITE_FOLDERS = ("site-packages", "dist-packages")
# The current folder ("") leaves the path: a folder there named like a module must not shadow it.
_BOOTSTRAP = (
    "import sys,runpy;"
    "sys.path=[p for p in sys.path if p]+[sys.argv.pop(1)];"
    'runpy.run_module(sys.argv.pop(1),run_name="__main__",alter_sys=True)'
)


@functools.lru_cache(maxsize=1)
def package_root() -> str:
    """Return the folder that holds the `launcher` package on this machine."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def agent_argv(python: str | None = None, module: str = AGENT_MODULE, root: Root | None = None) -> list[str]:
    """Return the argument list that starts `module` with `python` (this interpreter when None)."""
    interpreter = python or sys.executable
    folder = os.fspath(root or package_root())
    if os.path.basename(folder) in _SITE_FOLDERS:
        return [interpreter, "-u", "-m", module]
    return [interpreter, "-u", "-c", _BOOTSTRAP, folder, module]


def agent_shell_command(python: str | None = None, module: str = AGENT_MODULE, root: Root | None = None) -> str:
    """Return `agent_argv` for a remote POSIX shell. `exec` leaves no shell between sshd and the agent."""
    import shlex

    return "exec " + shlex.join(agent_argv(python, module, root))
