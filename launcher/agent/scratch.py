"""The agent's folder for what ranks leave: error records, stacks, progress. It goes with the agent.

An agent that is killed cannot remove it: its guard does. Where that was killed, too, a lock that the kernel releases
with the agent shows which folders are unused, also between containers that share a folder: every agent
removes such ones at its end, and the agent that sweeps a job at once. The lock file names agent and guard: an agent
that is stopped is found so. (`tempfile` would find a place too, for 4 ms of imports.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time

from launcher.base.preemption import stop_file
from launcher.base.processes import identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFIX = "launch-agent-"  # how names of folders begin
_LOCK_FILE = "lock"
_ROOM_BYTES = 64 << 10  # for what ranks leave; a full disk is found out before any rank is started
_MAX_OWNERS_CHARS = 200
_MIN_AGE_S = 60.0  # a younger folder may be one whose agent has not locked it yet


class Scratch:
    """A folder, mode 0700: error records hold user data."""

    def __init__(self, job_id: str) -> None:
        """Raises: OSError where no place can be written."""
        owners = f"{identity(os.getpid())} {identity(os.getppid())}\n"
        failure = None
        for place in _places():
            self.path = os.path.join(place, f"{_PREFIX}{job_id}-{os.urandom(4).hex()}")
            try:
                os.mkdir(self.path, 0o700)
            except OSError as error:
                failure = failure or OSError(error.errno, error.strerror, place)
                continue
            try:
                self._lock_fd = _make_lock(self.path)
                with contextlib.suppress(OSError):
                    os.write(self._lock_fd, owners.encode())
                return
            except OSError as error:
                failure = failure or OSError(error.errno, error.strerror, place)
                _remove(self.path)
        raise failure or OSError(errno.ENOENT, "there is no folder for temporary files")

    def say_stopping(self) -> None:
        """Let ranks know that the SIGTERM which follows is to end them. What keeps it from that, SIGKILL repairs."""
        with contextlib.suppress(OSError):
            os.close(os.open(stop_file(self.path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def remove(self) -> None:
        """Remove the folder with its files, and those that killed agents have left."""
        _remove(self.path)
        os.close(self._lock_fd)
        for entry in _entries(_PREFIX):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _MIN_AGE_S and _is_unused(entry.path):
                    _remove(entry.path)


def remove_left(job_id: str) -> None:
    """Remove what agents of a job have left that were killed."""
    for entry in _entries(f"{_PREFIX}{job_id}-"):
        _remove(entry.path)


def remove_of(agent_pid: int) -> None:
    """Remove the folder of an agent that was killed."""
    for entry in _entries(_PREFIX):
        owners = _owners(entry.path)
        if owners is not None and owners[0].startswith(f"{agent_pid}:"):
            _remove(entry.path)


def agents_of(job_id: str) -> list[tuple[str, str]]:
    """Return the identities of a job's agents that have not removed their folder, each with its guard's."""
    found = [_owners(entry.path) for entry in _entries(f"{_PREFIX}{job_id}-")]
    return [owners for owners in found if owners is not None]


def _owners(folder: str) -> tuple[str, str] | None:
    """Return the identities of an agent and its guard, as its lock file names them; none on a full disk."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(os.path.join(folder, _LOCK_FILE), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, encoding="ascii") as file:
            agent, guard = file.read(_MAX_OWNERS_CHARS).split()
            return agent, guard
    return None


def _make_lock(folder: str) -> int:
    """Lock the folder as long as the returned descriptor is open. Raises: OSError when the disk is full."""
    descriptor = os.open(os.path.join(folder, _LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: no other agent takes the folder for unused
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        room = memoryview(bytes(_ROOM_BYTES))
        while room:  # a short write does not say why: the next one does
            room = room[os.write(descriptor, room) :]
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_unused(folder: str) -> bool:
    """Return whether the agent that made the folder has ended."""
    try:
        descriptor = os.open(os.path.join(folder, _LOCK_FILE), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _entries(prefix: str) -> Iterator[os.DirEntry[str]]:
    """Yield this user's folders with such a name in all places."""
    for place in _places():
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                # What others have put there under such a name, a link above all, is not ours to look into.
                is_folder = entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False)
                if is_folder and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    yield entry


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)


def _places() -> list[str]:
    """Return where temporary files may go, the best place first."""
    return [*filter(os.path.isabs, [os.environ.get("TMPDIR", "")]), "/tmp", "/var/tmp"]
