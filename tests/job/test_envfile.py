"""Environment files and --env."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from launcher.job.envfile import job_environment, parse_env_file


def test_every_form_of_a_line() -> None:
    text = """
    # a comment
    PLAIN=a b
    export EXPORTED=1
    SPACED = x   # a remark
    HASH=a#b
    DOUBLE="a # b"   # a remark
    SINGLE='$HOME "x"'
    ESCAPED="a \\" b"
    EMPTY=
    EQUALS=a=b
    """
    assert parse_env_file(text, "f") == {
        "PLAIN": "a b",
        "EXPORTED": "1",
        "SPACED": "x",
        "HASH": "a#b",
        "DOUBLE": "a # b",
        "SINGLE": '$HOME "x"',
        "ESCAPED": 'a " b',
        "EMPTY": "",
        "EQUALS": "a=b",
    }


def test_only_line_feeds_end_a_line() -> None:
    text = "A=a\u2028b\x0cc\x85d\r\nB=2\n"
    assert parse_env_file(text, "file") == {"A": "a\u2028b\x0cc\x85d", "B": "2"}


def test_all_bad_lines_are_named() -> None:
    with pytest.raises(UsageError) as caught:
        parse_env_file("A=1\nno equals\n1X=2\nB='open\n", "f")
    assert [str(d.where) for d in caught.value.diagnostics] == ["f:2", "f:3", "f:4"]


@given(st.text())
def test_any_text_gives_variables_or_an_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        values = parse_env_file(text, "f")
        assert all("\0" not in value and "=" not in name for name, value in values.items())


def test_later_sources_win(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    (home / ".deepspeed_env").write_text("A=home\nB=home\nC=home\nD=home\n")
    (here / ".launch_env").write_text("B=here\nC=here\nD=here\n")
    (tmp_path / "file").write_text("C=file\nD=file\n")
    found = job_environment(["D=option", "E"], [tmp_path / "file"], {"E": "own"}, [home, here])
    assert found == {"A": "home", "B": "here", "C": "file", "D": "option", "E": "own"}


@pytest.mark.parametrize(
    ("options", "files", "message"),
    [(["=x"], [], "names no variable"), (["A"], [], "not set here"), ([], [Path("/no/such")], "cannot be read")],
)
def test_mistakes(options: list[str], files: list[Path], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        job_environment(options, files, {}, [])
