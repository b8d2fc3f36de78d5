"""What is on the disk before a checkpoint is there, so that a power loss takes none that was announced."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from harness.checkpoints import write_checkpoint

from launcher.checkpoint_files.folder import latest_tag, set_latest


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """What was synchronized, and what was renamed, in order."""
    found: list[tuple[str, Path]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def note_fsync(file: int) -> None:
        fsync(file)
        found.append(("fsync", Path(os.readlink(f"/proc/self/fd/{file}"))))

    def note_rename(source: Path, target: Path) -> None:
        found.append(("rename", Path(source)))
        rename(source, target)

    def note_replace(source: Path, target: Path) -> None:
        found.append(("replace", Path(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    monkeypatch.setattr(os, "replace", note_replace)
    return found


def test_every_name_on_the_way_to_a_checkpoint_is_on_the_disk_before_it(
    tmp_path: Path, calls: list[tuple[str, Path]]
) -> None:
    root = tmp_path / "runs" / "first"
    write_checkpoint(root, 1)
    draft = root / ".global_step1.tmp"
    manifest, commit = calls.index(("replace", draft / "manifest.json")), calls.index(("rename", draft))
    for folder in (tmp_path, tmp_path / "runs"):
        assert ("fsync", folder) in calls[:commit], f"the name of a new folder in {folder}"
    assert ("fsync", draft) in calls[:manifest]
    assert ("fsync", draft) in calls[manifest:commit]
    assert ("fsync", root) in calls[commit : calls.index(("replace", root / "latest"))]
    assert calls[-1] == ("fsync", root)


def test_threads_that_replace_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    failures: list[Exception] = []

    def name(tag: str) -> None:
        try:
            for _ in range(200):
                set_latest(tmp_path, tag)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=name, args=(f"step{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert latest_tag(tmp_path) in (None, "step0", "step1", "step2")
    for thread in threads:
        thread.join()
    assert failures == []
