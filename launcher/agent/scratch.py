"""The agent's folder for what ranks leave: error records, stacks, progress. It goes with the agent.

An agent that is killed cannot remove it; the job id in its name lets the agent that sweeps the job do so. (`tempfile`
would find a place too, for 4 ms of imports.)
"""

from __future__ import annotations

import contextlib
import os

_PREFIX = "launch-agent-"


def make(job_id: str) -> str:
    """Create the folder, mode 0700: error records hold user data. Raises: OSError where no place can be written."""
    error = None
    for place in _places():
        path = os.path.join(place, f"{_PREFIX}{job_id}-{os.urandom(4).hex()}")
        try:
            os.mkdir(path, 0o700)
            return path
        except OSError as failure:
            error = error or failure
    raise OSError(error.errno if error else 0, "no folder for temporary files can be written: set TMPDIR")


def remove(path: str) -> None:
    """Remove the folder with its files."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)


def remove_left(job_id: str) -> None:
    """Remove what agents of a job have left that were killed."""
    for place in _places():
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                # What others have put there under such a name, a link above all, is not ours to look into.
                is_folder = entry.name.startswith(f"{_PREFIX}{job_id}-") and entry.is_dir(follow_symlinks=False)
                if is_folder and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    remove(entry.path)


def _places() -> list[str]:
    """Return where temporary files may go, the best place first."""
    return [*filter(os.path.isabs, [os.environ.get("TMPDIR", "")]), "/tmp", "/var/tmp"]
