"""The commands that start this package's own processes. They hold no environment and no secrets, and no text of a user
but that of --setup and --venv-script.

In none of them is the working folder, or the home folder of another machine, on the module search path. On this
machine `launcher/start.py` sees to that. Where the package lies on another machine is not known, so a fixed `-c`
program does it there, behind a `cd /`: Python 3.13 imports a module before it runs the first statement of `-c`.

From a source checkout (the package's folder is not site-packages) the checkout's path is appended to the search path:
the same path on the other machine (a shared file system) works and PYTHONPATH is never needed. An installed
package on the other machine still wins, because the path is appended.
"""

from __future__ import annotations

import functools
import os
import sys

from launcher.base.env import SETUP_CHANGED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    Root = str | os.PathLike[str]

AGENT_MODULE = "launcher.agent.main"
SHELL_ARGV = ("/bin/sh",)  # reads what it is to do from its stdin
SHELL_COMMAND = "exec /bin/sh"
NEUTRAL_FOLDER = "/"
SETUP_FAILED = "launch: the setup failed"  # the last words of a host whose setup did
_POSIX_SHELLS = ("sh", "bash", "dash", "ash", "ksh", "mksh", "zsh")
_SPECIAL = frozenset("\\'!")
# While the setup runs, no agent sees that the launcher, or the connection, has gone: a process beside it does, which is
# no job of this shell, as a setup may `wait` for all of those. A setup that ends the shell (`exit`) has failed, too.
_SETUP = (
    "_launch_setup=$1 _launch_command=$2; set --; "
    "_launch_watch=$( (kill -0 $PPID && { while kill -0 $PPID; do sleep 1; done; kill -9 -$$ || kill -9 $$; }) "
    "< /dev/null > /dev/null 2>&1 & echo $!); "
    f"trap 'kill -9 $_launch_watch 2> /dev/null; echo \"{SETUP_FAILED}\" >&2' 0; "
    "_launch_env=$(env 2> /dev/null || :); "
    # Not `eval ... || exit`: there a `set -e` of the setup would have no effect.
    # Its stdout is the agent's, where nothing else may stand: what it leaves in the background may print at any time.
    '{ eval "$_launch_setup"; } >&2; _launch_code=$?; test $_launch_code = 0 || exit $_launch_code; '
    # What it has changed, lines that are not in both environments, counts more than what the launcher sends.
    f'export {SETUP_CHANGED.name}="$({{ {{ printf "%s\\n" "$_launch_env"; env; }} | LC_ALL=C sort | LC_ALL=C uniq -u | '
    'LC_ALL=C sed -n "s/^\\([A-Za-z_][A-Za-z0-9_]*\\)=.*/\\1/p" | tr "\\n" " "; } 2> /dev/null || :)"; '
    'trap - 0; kill -9 $_launch_watch 2> /dev/null || :; eval "$_launch_command"'
)
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


def last_json(output: str) -> dict[str, Any] | None:
    """Return the last whole line of a program's output as a JSON object, None where it is none.

    Own programs answer so: what libraries and login scripts print before it does not matter.
    """
    import json

    whole, end, _ = output.rpartition("\n")
    try:
        found = json.loads(whole.rpartition("\n")[2]) if end else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def agent_argv(python: str | None = None, module: str = AGENT_MODULE, root: Root | None = None) -> list[str]:
    """Return the argument list that runs `main()` of `module` on another machine; to be started in NEUTRAL_FOLDER.

    python: an interpreter there, the path of this one when None.
    """
    folder = os.fspath(root or package_root())
    is_installed = os.path.basename(folder) in _SITE_FOLDERS
    return [python or sys.executable, "-u", "-c", _BOOTSTRAP, "" if is_installed else folder, module]


def agent_shell_command(
    python: str | None = None, module: str = AGENT_MODULE, root: Root | None = None, setup: str = ""
) -> str:
    """Return `agent_argv` for the login shell of another machine, whichever that is.

    setup: shell text that runs first, see `with_setup`. `exec` leaves no shell between sshd and the agent.
    """
    argv = agent_argv(python, module, root)
    folder = "" if is_relative(python) else f"cd {NEUTRAL_FOLDER} && "
    if setup:
        return with_setup(setup, argv, folder)
    return " ".join(("exec /bin/sh -c", quote(f'{folder}exec "$0" "$@"'), *map(quote, argv)))


def local_setup_argv(setup: str, argv: Sequence[str]) -> list[str]:
    """Return the argument list that runs `setup` on this machine, and then `argv` unless that failed.

    The user's own shell runs it, as `with_setup` has it elsewhere, where that is a POSIX shell; else /bin/sh.
    """
    import shlex

    own = os.environ.get("SHELL", "")
    shell = own if os.path.basename(own) in _POSIX_SHELLS and os.access(own, os.X_OK) else SHELL_ARGV[0]
    return [shell, "-c", _SETUP, shell, setup, f"exec {shlex.join(argv)}"]


def is_relative(python: str | None) -> bool:
    """Whether an interpreter is looked for in the folder that the command is started in."""
    return python is not None and "/" in python and not python.startswith(("/", "~"))


def with_setup(setup: str, argv: list[str], before: str = "") -> str:
    """Return a command for any login shell that runs `setup`, and then `before` and `argv` unless that failed.

    `setup` is text for a POSIX shell: the login shell itself runs it, as functions such as `module` may be that one's
    own, and /bin/sh where it is csh, tcsh or fish. It sees no arguments: a sourced file would take them for its own.
    """
    import shlex

    words = f"{quote(setup)} {quote(f'{before}exec {shlex.join(argv)}')}"
    is_foreign = "expr \"$SHELL\" : '.*csh$' '|' \"$SHELL\" : '.*/fish$' > /dev/null"
    return f"{is_foreign} && exec /bin/sh -c {quote(_SETUP)} sh {words} || set -- {words} && eval {quote(_SETUP)}"


def quote(text: str) -> str:
    """Return `text` as one word of any shell; with a line break in it, not of csh."""
    import re

    if re.fullmatch(r"[\w@%+:,./-]+", text, re.ASCII):
        return text
    # Inside of single quotes fish knows backslashes, and csh has a history: these characters stand outside.
    pieces = (piece if piece in _SPECIAL else f"'{piece}'" for piece in re.split(r"([\\'!])", text) if piece)
    return "".join(f"\\{piece}" if piece in _SPECIAL else piece for piece in pieces) or "''"
