"""`%launch SCRIPT` and `%%launch`: the command line in a cell, with live output and a working interrupt."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

from launcher.api.output import write
from launcher.base.errors import JobError, UsageError
from launcher.transport.command import own_argv

_COMMAND_MODULE = "launcher.notebook.command"
_READ_BYTES = 1 << 16


def launch(line: str, cell: str | None = None) -> None:
    """Start ranks from a notebook.

        %launch [OPTIONS] SCRIPT [ARGS]...      a script
        %%launch [OPTIONS] [-- ARGS...]         the cell as a script

    OPTIONS are those of `launch` (`%launch --help`). The cell runs in fresh processes, which do not see the
    notebook's variables, with the working directory as its folder. The interrupt button ends all ranks.

    Raises: JobError when `launch` ends with another code than 0; KeyboardInterrupt after an interrupt.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"the line cannot be split into words: {error}", where=line, hint="close the quotes") from None
    if cell is None:
        _run(words)
        return
    end = words.index("--") if "--" in words else len(words)
    with _cell_as_file(cell) as path:
        _run([*words[:end], path, *words[end + 1 :]])


@contextlib.contextmanager
def _cell_as_file(cell: str) -> Iterator[str]:
    """Write the cell beside the notebook for as long as it runs: what lies there is what it imports."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix=".launch_cell_", suffix=".py", dir=os.getcwd(), delete=False
        ) as file:
            file.write("\n" + cell)  # the line of `%%launch` itself, so that line numbers are those of the cell
    except OSError as error:
        raise UsageError(
            f"the cell cannot be written to a file: {error.strerror}",
            where=os.getcwd(),
            hint="change to a folder you may write to (%cd)",
        ) from None
    try:
        yield os.path.relpath(file.name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.name)


def _run(arguments: Sequence[str]) -> None:
    process = _Process([*own_argv(_COMMAND_MODULE), str(os.getpid()), *arguments])
    code = process.run()
    if process.was_interrupted:
        raise KeyboardInterrupt
    if code != 0:
        raise JobError(
            f"launch ended with exit code {code}",
            exit_code=code,
            hint="its own message is in the output above",
        )


class _Process:
    """A child whose output appears in the cell as it comes, and which gets this process's interrupts."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._process: subprocess.Popen[bytes] | None = None
        self.was_interrupted = False

    def run(self) -> int:
        """Run to the end and return the exit code, 128 + signal when killed."""
        with self._interrupts_forwarded():
            pipe = subprocess.PIPE
            with subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
            ) as self._process:
                if self.was_interrupted:  # while it was being started
                    self._process.send_signal(signal.SIGINT)
                try:
                    _stream(self._process)
                except BaseException:
                    self._process.kill()  # its agents end the ranks
                    raise
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    @contextlib.contextmanager
    def _interrupts_forwarded(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # interrupts do not come here
            return
        previous = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _on_interrupt(self, number: int, _frame: FrameType | None) -> None:
        self.was_interrupted = True
        if self._process is not None:
            self._process.send_signal(number)


def _stream(process: subprocess.Popen[bytes]) -> None:
    """Copy both pipes into the cell until both have ended."""
    streams: dict[str, IO[bytes] | None] = {"stdout": process.stdout, "stderr": process.stderr}
    decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in streams}
    with selectors.DefaultSelector() as selector:
        for name, pipe in streams.items():
            if pipe is None:
                raise RuntimeError("Popen made no pipe")
            selector.register(pipe, selectors.EVENT_READ, name)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, _READ_BYTES)
                text = decoders[key.data].decode(data, final=not data)
                if text:
                    write(key.data, text)
                if not data:
                    selector.unregister(key.fileobj)
