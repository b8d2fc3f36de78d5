"""Environment files and --env."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
from pathlib import Path

import pytest
from harness import scripts
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from launcher.cluster.cluster import Cluster, Host, place
from launcher.plan.variables import JobEnvironment, forwarded, job_environment, parse_env_file, rank_variables


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
    assert found.values == {"A": "home", "B": "here", "C": "file", "D": "option", "E": "own"}


@pytest.mark.parametrize(
    ("options", "files", "message"),
    [(["=x"], [], "names no variable"), (["A"], [], "not set here"), ([], [Path("/no/such")], "cannot be read")],
)
def test_mistakes(options: list[str], files: list[Path], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        job_environment(options, files, {}, [])


def given_by(folder: Path) -> JobEnvironment:
    return job_environment([], [], {}, [folder])


def test_files_that_nobody_has_named_are_named_on_the_screen(tmp_path: Path) -> None:
    (tmp_path / ".launch_env").write_text("A=secret\nB=2\n")
    (note,) = given_by(tmp_path).notes
    assert note == f"{tmp_path}/.launch_env gives variables to all ranks: A, B"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of somebody else's")
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_of_another_user_is_refused(tmp_path: Path, is_link: bool) -> None:
    path = tmp_path / ".launch_env"
    if is_link:
        scripts.write(tmp_path, "A=1", "mine")
        path.symlink_to("mine")
    else:
        path.write_text("PYTHONPATH=/evil\n")
    os.lchown(path, 12_345, 12_345)
    with pytest.raises(UsageError, match=r"\.launch_env: the file belongs to another user \(uid 12345\)"):
        given_by(tmp_path)


def user(name: str, uid: int, gid: int) -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", uid, gid, "", "/", "/bin/sh"))


def private_group(monkeypatch: pytest.MonkeyPatch, name: str, members: list[str], others: list[str]) -> None:
    """Let the group of our files be `name`, with these members, and the first group of these others."""
    ours = user("ada", os.geteuid(), os.getegid())
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: ours)
    monkeypatch.setattr(pwd, "getpwall", lambda: [ours, *(user(other, 77, os.getegid()) for other in others)])
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((name, "x", gid, members)))


@pytest.mark.parametrize("members", [[], ["ada"]])
def test_a_group_without_other_members_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: list[str]
) -> None:
    private_group(monkeypatch, "ada", members, [])
    (tmp_path / ".deepspeed_env").write_text("A=1\n")
    (tmp_path / ".deepspeed_env").chmod(0o664)
    assert given_by(tmp_path).values == {"A": "1"}


@pytest.mark.parametrize(
    ("mode", "name", "members", "others"),
    [
        (0o602, "ada", [], []),
        (0o620, "users", [], []),
        (0o620, "ada", ["ada", "bob"], []),
        (0o620, "ada", [], ["bob"]),
    ],
)
def test_a_file_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, name: str, members: list[str], others: list[str]
) -> None:
    private_group(monkeypatch, name, members, others)
    path = tmp_path / ".deepspeed_env"
    path.write_text("A=1\n")
    path.chmod(mode)
    who = "other users" if mode & 2 else f"users of the group {name}"
    with pytest.raises(UsageError, match=rf"{who} can write to the file.*chmod go-w"):
        given_by(tmp_path)
    assert job_environment([], [path], {}, []).values == {"A": "1"}, "one that the user names is the user's choice"


def test_a_home_folder_that_cannot_be_searched_ends_no_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "lstat", refuse)  # as root, every folder can be searched
    found = given_by(tmp_path)
    assert found.values == {}
    assert found.notes[0] == f"{tmp_path}/.deepspeed_env is left out: Permission denied"


@pytest.mark.parametrize("is_path", [False, True])
def test_the_file_of_deepspeed_may_have_another_name(tmp_path: Path, is_path: bool) -> None:
    (tmp_path / ".deepspeed_env").write_text("A=usual\nB=1\n")
    (tmp_path / "other").write_text("A=other\n")
    environ = {"DS_ENV_FILE": str(tmp_path / "other") if is_path else "other"}
    found = job_environment((), (), environ, (tmp_path / "no-home", tmp_path))
    assert found.values == {"A": "other"}
    assert found.notes == (f"{tmp_path / 'other'} gives variables to all ranks: A",)


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / ".launch_env").write_bytes(b"\xef\xbb\xbfA=1\nB=\xff\n")
    assert given_by(tmp_path).values == {"A": "1", "B": "\udcff"}


def test_a_nul_byte_is_called_by_its_name() -> None:
    with pytest.raises(UsageError, match=r"f:1: A holds a NUL byte"):
        parse_env_file("A='x\0'\n", "f")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("MASTER_PORT", "--master-port"), ("CUDA_VISIBLE_DEVICES", "--include"), ("RANK", "leave it out")],
)
def test_what_would_have_no_effect_is_refused(name: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=rf"--env {name} would have no effect.*{remedy}"):
        job_environment([f"{name}=1"], [], {}, [])
    with pytest.raises(UsageError, match=rf"f:1: {name} would have no effect.*{remedy}"):
        parse_env_file(f"{name}=1", "f")
    assert job_environment(["OMP_NUM_THREADS=3"], [], {}, []).values == {"OMP_NUM_THREADS": "3"}


def test_what_ranks_on_other_hosts_need_is_passed_on() -> None:
    wanted = {
        "AWS_PROFILE": "a",
        "HUGGING_FACE_HUB_TOKEN": "t",
        "NVSHMEM_DEBUG": "1",
        "HSA_X": "1",
        "CCL_LOG_LEVEL": "1",
    }
    assert forwarded({**wanted, "HOME": "/root", "RANK": "3", "CUDA_VISIBLE_DEVICES": "0"}) == wanted


def test_torchruns_names_are_there() -> None:
    placement = place(Cluster((Host("a", (0, 1)), Host("b", (0, 1)))))
    (_, last) = rank_variables(placement, placement.nodes[1], ("a", 1), ())
    own = ("RANK", "WORLD_SIZE", "GROUP_RANK", "CROSS_SIZE")
    assert [last[name] for name in own] == ["3", "4", "1", "2"]
    assert (last["ROLE_RANK"], last["ROLE_WORLD_SIZE"], last["ROLE_NAME"]) == ("3", "4", "default")
    assert last["GROUP_WORLD_SIZE"] == "2"
