"""The commands that start this package's own processes. They are constants: no user text, no environment, no secrets.

In none of them is the working folder, or the home folder of another machine, on the module search path. On this
machine `launcher/start.py` sees to that. Where the package lies on another machine is not known, so a fixed `-c`
program does it there, behind a `cd /`: Python 3.13 imports a module before it runs the first statement of `-c`.

From a source checkout (the package's folder is no site-packages) the checkout's path is appended to the search path, so
that the same path on the other machine (a shared file system) works and PYTHONPATH is never needed. An installed
package on the other machine still wins, because the path is appended.
"""

from __future__ import annotations

import functools
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    Root = str | os.PathLike[str]

AGENT_MODULE = "launcher.agent.main"
SHELL_ARGV = ("/bin/sh",)  # reads what it is to do from its stdin
SHELL_COMMAND = "exec /bin/sh"
NEUTRAL_FOLDER = "/"
_SITE_FOLDERS = ("site-packages", "dist-packages")
# What `launcher/start.py` does. The search path is put in order before anything is imported that is not built in.
_BOOTSTRAP = (
    "import sys;"
    "sys.path=[p for p in sys.path if p];"
    "folder,module=sys.argv[1:3];"
    "sys.path+=[folder]*(folder!=''and folder not in sys.path);"
    "del sys.argv[1:3];"
    "sys.exit(__import__(module,fromlist=['main']).main())"
)


@functools.lru_cache(maxsize=1)
def package_root() -> str:
    """Return the folder that holds the `launcher` package on this machine."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def own_argv(module: str, root: Root | None = None) -> list[str]:
    """Return the argument list that runs `main()` of `module` on this machine, with this interpreter."""
    start = os.path.join(package_root(), "launcher", "start.py")
    return [sys.executable, "-u", start, os.fspath(root or package_root()), module]


def agent_argv(python: str | None = None, module: str = AGENT_MODULE, root: Root | None = None) -> list[str]:
    """Return the argument list that runs `main()` of `module` on another machine; to be started in NEUTRAL_FOLDER.

    python: an interpreter there, the path of this one when None.
    """
    folder = os.fspath(root or package_root())
    is_installed = os.path.basename(folder) in _SITE_FOLDERS
    return [python or sys.executable, "-u", "-c", _BOOTSTRAP, "" if is_installed else folder, module]


def agent_shell_command(python: str | None = None, module: str = AGENT_MODULE, root: Root | None = None) -> str:
    """Return `agent_argv` for a remote POSIX shell. `exec` leaves no shell between sshd and the agent."""
    import shlex

    command = f"exec {shlex.join(agent_argv(python, module, root))}"
    return command if is_relative(python) else f"cd {NEUTRAL_FOLDER} && {command}"


def is_relative(python: str | None) -> bool:
    """Say whether an interpreter is looked for in the folder that the command is started in."""
    return python is not None and "/" in python and not python.startswith(("/", "~"))
