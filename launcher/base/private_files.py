"""Private files and folders: other users can neither read nor redirect them.

A run folder may lie in a folder that others can write to: what they put in place of a file or folder of ours, a link
above all, must not decide what is written where. Standard library only: every rank imports this.
"""

from __future__ import annotations

import contextlib
import errno
import os

_NOT_OURS = "the folder belongs to another user"


def write_private(path: str | os.PathLike[str], data: bytes, *, is_durable: bool = False) -> None:
    """Write a file whole or not at all, mode 0600; whoever waits for it finds it complete.

    is_durable: wait until it is on the disk. Raises: OSError with `path` as the file name; nothing stays behind then.
    """
    folder, name = os.path.split(os.fspath(path))
    part = f".{name}.{os.urandom(4).hex()}.part"
    try:
        folder_fd = open_folder(folder or ".")
        try:
            with contextlib.ExitStack() as on_failure:
                file_fd = create_private(part, folder_fd)
                on_failure.callback(_remove, part, folder_fd)
                with open(file_fd, "wb", buffering=0) as file:
                    _check_owner(folder_fd, file_fd)
                    view = memoryview(data)
                    while view:
                        view = view[file.write(view) :]
                    if is_durable:
                        os.fsync(file_fd)
                os.replace(part, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
                on_failure.pop_all()
        finally:
            os.close(folder_fd)
    except OSError as error:
        error.filename, error.filename2 = os.fspath(path), None
        raise


def create_private(path: str | os.PathLike[str], folder_fd: int | None = None) -> int:
    """Create a file that does not exist yet, mode 0600, and return its descriptor to append to. Raises: OSError.

    Where others truncate it while it is written, no hole of zeros follows: that is how a log is emptied.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600, dir_fd=folder_fd)


def make_private_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder with mode 0700, and those above it that are missing; one that is there keeps its mode.

    Raises: OSError, also when what is there belongs to another user.
    """
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        folder_fd = open_folder(path)
        try:
            if os.fstat(folder_fd).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, _NOT_OURS, os.fspath(path)) from None
        finally:
            os.close(folder_fd)


def open_folder(path: str | os.PathLike[str]) -> int:
    """Return a descriptor of a folder that is no link. Raises: OSError."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def append_to(path: str | os.PathLike[str], folder: tuple[int, int]) -> int:
    """Open a file to append to it and return its descriptor. folder: device and inode of the one that it must be in.

    A path leads elsewhere once another user who owns a folder above has replaced ours. Raises: OSError.
    """
    where, name = os.path.split(os.fspath(path))
    folder_fd = open_folder(where or ".")
    try:
        found = os.fstat(folder_fd)
        if (found.st_dev, found.st_ino) != folder:
            raise PermissionError(errno.EPERM, "its folder has been replaced", os.fspath(path))
        file_fd = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
        try:
            _check_owner(folder_fd, file_fd)
        except OSError:
            os.close(file_fd)
            raise
        return file_fd
    finally:
        os.close(folder_fd)


def _check_owner(folder_fd: int, file_fd: int) -> None:
    """Raise PermissionError for a folder of another user, who could replace what we write.

    The new file says who we are on that disk: root may be another user there (NFS).
    """
    if os.fstat(folder_fd).st_uid != os.fstat(file_fd).st_uid:
        raise PermissionError(errno.EPERM, _NOT_OURS)


def _remove(name: str, folder_fd: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder_fd)
