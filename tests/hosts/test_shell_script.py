"""The script of a bare command under every POSIX shell there is here: nothing of a user's words reaches a shell."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from harness.launch.command import DEADLINE_S
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.hosts.shell_session import MarkedStream, quote, script_for

SHELLS = [
    [path, *words]
    for name, *words in (
        ("dash",),
        ("bash",),
        ("bash", "--posix"),
        ("busybox", "sh"),
        ("mksh",),
        ("ksh",),
        ("ksh93",),
        ("zsh",),
    )
    if (path := shutil.which(name)) is not None
]
ALL_BYTES = os.fsdecode(bytes(range(1, 256)))
HOSTILE = [
    "",
    " ",
    "-n",
    "--",
    "'",
    "'; touch PWNED; '",
    "$(touch PWNED)",
    "`touch PWNED`",
    "\n touch PWNED \n",
    "\\",
    "\\'; touch PWNED #",
    "${IFS}$HOME~ *?[a]{1,2}!!",
    '"; touch PWNED; "',
    "a\r\nb\tc",
    "täst 日本 \u2028",
    "\udcff\udc80\udc81",
    "}\n{",
    "EOF\n)",
    ALL_BYTES,
    "x" * 100_000,
]
MARK = "0123456789abcdef0f1e2d3c4b5a6978"


def run(shell: list[str], script: bytes, cwd: Path, locale: str = "C.UTF-8") -> tuple[MarkedStream, bytes, bytes]:
    """Feed a shell its script; return stdout, taken apart, and what the command wrote on both streams."""
    env = {"PATH": os.environ["PATH"], "LC_ALL": locale, "HOME": str(cwd)}
    process = subprocess.Popen(
        shell, stdin=-1, stdout=-1, stderr=-1, cwd=cwd, env=env, start_new_session=True, bufsize=0
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    written = process.stdin
    written.write(script)  # stdin stays open, as from a launcher that lives
    out, err = bytearray(), bytearray()
    streams = MarkedStream(MARK, out.extend), MarkedStream(MARK, err.extend)
    for stream, source in zip(streams, (process.stdout, process.stderr), strict=True):
        while data := source.read(7):
            stream.feed(data)
        stream.finish()
        source.close()
    process.wait(DEADLINE_S)
    written.close()
    assert streams[0].has_begun, (bytes(out), bytes(err))
    return streams[0], bytes(out), bytes(err)


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_every_byte_arrives_and_nothing_is_executed(shell: list[str], locale: str, tmp_path: Path) -> None:
    folder = tmp_path / "it's a $(touch PWNED) folder\n\udcff"
    folder.mkdir()
    variables = {"ODD_VALUE": ALL_BYTES, "QUOTED": "'$(touch PWNED)'", "NO-SHELL-NAME;touch PWNED": "x"}
    show = 'import os,sys; sys.stdout.buffer.write(b"\\0".join([os.environb[b"ODD_VALUE"],os.environb[b"QUOTED"],'
    show += "os.getcwdb(), *map(os.fsencode, sys.argv[1:])]))"
    words = ["/usr/bin/env", "python3", "-c", show, *HOSTILE]
    stream, out, err = run(shell, script_for(MARK, words, str(folder), variables, 5), tmp_path, locale)
    expected = [ALL_BYTES, "'$(touch PWNED)'", str(folder), *HOSTILE]
    assert out.split(b"\0") == [os.fsencode(word) for word in expected]
    assert (stream.end, err) == ("0", b"")
    assert not list(tmp_path.rglob("PWNED"))


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_codes_streams_and_names_that_look_like_something_else(shell: list[str], tmp_path: Path) -> None:
    def code_of(*words: str) -> tuple[str | None, bytes, bytes]:
        stream, out, err = run(shell, script_for(MARK, words, str(tmp_path), {}, 5), tmp_path)
        return stream.end, out, err

    assert code_of("sh", "-c", "printf out; printf err >&2; exit 7") == ("7", b"out", b"err")
    assert code_of("sh", "-c", "kill -9 $$") == ("137", b"", b""), "no shell may tell what it ran"
    assert code_of("cat") == ("0", b"", b""), "a command has no input"
    end, out, err = code_of("no-such-program")
    assert (end, out) == ("127", b"")
    assert b"no-such-program" in err
    # Words of the shell's own language are programs here, found in PATH.
    (tmp_path / "while").write_text('#!/bin/sh\necho "$0 $*"\n')
    (tmp_path / "while").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    _, out, err = run(shell, script_for(MARK, ["while", "true"], str(tmp_path), variables, 5), tmp_path)
    assert (out, err) == (f"{tmp_path}/while true\n".encode(), b"")


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_a_folder_that_is_missing_is_told(shell: list[str], tmp_path: Path) -> None:
    stream, out, err = run(shell, script_for(MARK, ["touch", "RAN"], "/no/such", {}, 5), tmp_path)
    assert (stream.end, out) == ("folder", b"")
    assert b"/no/such" in err
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_a_shell_without_a_group_of_its_own_runs_nothing(shell: list[str], tmp_path: Path) -> None:
    script = script_for(MARK, ["touch", "RAN"], str(tmp_path), {}, 5)
    done = subprocess.run(shell, input=script, stdout=subprocess.PIPE, cwd=tmp_path, check=False)
    assert done.stdout == f"{MARK}\n{MARK} group\n".encode()
    assert not (tmp_path / "RAN").exists()


def test_words_that_cannot_be_passed_on_are_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        quote("a\0b")
    with pytest.raises(ValueError, match="option of exec"):
        script_for(MARK, ["-c", "x"], "/", {}, 5)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40)), st.binary(max_size=30), st.integers(1, 9))
def test_streams_are_taken_apart_wherever_they_are_cut(parts: list[bytes], noise: bytes, size: int) -> None:
    mark = MARK.encode()
    # Beginnings of marks are what makes it hard.
    printed = b"".join(part + mark[: len(part) % len(mark)] for part in parts) + mark[:-1]
    whole = noise + mark + b"\n" + printed + b"\n" + mark + b" 12\nrest"
    taken = bytearray()
    stream = MarkedStream(MARK, taken.extend)
    for place in range(0, len(whole), size):
        stream.feed(whole[place : place + size])
    stream.finish()
    assert (bytes(taken), stream.end) == (printed + b"\n", "12")
    cut = bytearray()
    stream = MarkedStream(MARK, cut.extend)
    stream.feed(noise + mark + b"\n" + printed)
    stream.finish()
    assert (bytes(cut), stream.end) == (printed, None)
