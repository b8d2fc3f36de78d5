"""Files that are whole, private, and never where somebody else wants them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import scripts
from harness.disks import small_disk
from harness.launch.command import run_launch

from launcher.base.private_files import create_private, make_private_folder, write_private

SOMEBODY = 12_345


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("open_umask")
def test_a_run_can_be_read_by_its_user_alone(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "--save_pid", scripts.write(tmp_path, "print('secret')"))
    assert result.code == 0, result.err
    folder = tmp_path / "runs" / result.job_id
    assert mode(folder) == 0o700
    found = {path.name: mode(path) for path in folder.iterdir()}
    assert {"rank_0.log", "report.json", "launch.pid"} <= found.keys()
    assert set(found.values()) == {0o600}
    (entry,) = (tmp_path / "state/launch/jobs").iterdir()
    assert mode(entry) == 0o600


def test_a_link_in_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    precious = scripts.write(tmp_path, "precious", "precious")
    folder = tmp_path / "folder"
    make_private_folder(folder)
    (folder / "report.json").symlink_to(precious)
    write_private(folder / "report.json", b"{}", is_durable=True)
    assert precious.read_text() == "precious"
    assert (folder / "report.json").read_bytes() == b"{}"
    assert [path.name for path in folder.iterdir()] == ["report.json"]
    (folder / "log").symlink_to(precious)
    with pytest.raises(FileExistsError):
        create_private(folder / "log")


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("mine")
    with pytest.raises(OSError, match="link") as caught:
        write_private(tmp_path / "link" / "report.json", b"{}")
    assert caught.value.filename == str(tmp_path / "link" / "report.json")
    with pytest.raises(OSError, match="link"):
        make_private_folder(tmp_path / "link")
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of somebody else's")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, SOMEBODY, SOMEBODY)
    with pytest.raises(PermissionError, match="belongs to another user"):
        write_private(folder / "report.json", b"{}")
    with pytest.raises(PermissionError, match="belongs to another user"):
        make_private_folder(folder)
    assert list(folder.iterdir()) == []


def test_nothing_stays_behind_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        make_private_folder(disk / "jobs")
        path = disk / "jobs" / "entry.json"
        write_private(path, b"old")
        with pytest.raises(OSError, match="No space left") as caught:
            write_private(path, bytes(1 << 20))
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
        assert path.read_bytes() == b"old"
        assert [entry.name for entry in path.parent.iterdir()] == ["entry.json"]


def test_a_registry_on_a_full_disk_is_told_in_a_line(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "")
    with small_disk(tmp_path / "disk", "16k") as disk:
        (disk / "launch" / "jobs").mkdir(parents=True)
        with (disk / "filler").open("wb", buffering=0) as file:
            assert file.write(bytes(1 << 20)) < 1 << 20, "the disk is full"
        result = run_launch(tmp_path, script, env={"XDG_STATE_HOME": str(disk)})
        assert result.code == 0
        (line,) = [line for line in result.err.splitlines() if "No space left" in line]
        assert line.startswith(f"! {disk}/launch/jobs/{result.job_id}.json: ")
        assert list((disk / "launch" / "jobs").iterdir()) == []
