"""What a cell starts on ranks: a function by `run`, a script by `%launch`, itself by `%%launch`.

Output appears in the cell as it comes, and the interrupt button ends all ranks.
"""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any, TypeVar

from launcher.agent.wire import STDERR, STDOUT
from launcher.api.output import ConsoleOutput, write
from launcher.api.parameters import Options, Parameters, StrPath, command_for, in_python_words
from launcher.api.run import execute
from launcher.base.errors import JobError, UsageError
from launcher.plan.plan import DEFAULT_GRACE_S
from launcher.transport.command import own_argv

_T = TypeVar("_T")

_COMMAND_MODULE = "launcher.notebook.command"
_READ_BYTES = 1 << 16


class CellOutput(ConsoleOutput):
    """Shows a run in a cell as `launch` shows it on a console."""

    def say(self, text: str) -> None:
        write(STDOUT, f"{text}\n")

    def warning(self, text: str) -> None:
        write(STDERR, f"! {text}\n")


def run(
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_gpus: int = 2,
    *,
    log_dir: StrPath | None = None,
    grace_s: float = DEFAULT_GRACE_S,
) -> list[_T]:
    """Run `fn(*args, **kwargs)` on `num_gpus` ranks of this machine and return what each returned, by rank.

    The same as `launcher.run(fn, *args, ranks=num_gpus)`, which stays on this machine inside a Slurm job too, and says
    in the cell what happens. log_dir, grace_s: as there; and so is what is raised.
    """
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise UsageError(f"args is {args!r}, no tuple of arguments", hint="one argument x is given as (x,)")
    with in_python_words(lambda name: f"{name}="):
        parameters = Parameters(
            command=command_for(fn, args, kwargs),
            hosts=["localhost"],  # this machine, inside a Slurm job too
            num_gpus=num_gpus,
            log_dir=log_dir,
            options=Options(grace_s=grace_s),
        )
        ended = execute(parameters, CellOutput())
    results: list[_T] = ended.results()
    return results


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
