"""What is on the disk before a checkpoint is there, so that a power loss takes none that was announced."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from uuid import uuid4

import pytest
from harness.checkpoints import write_checkpoint

from launcher.base.errors import CheckpointError
from launcher.checkpoint_files.blocks import digest_of
from launcher.checkpoint_files.folder import Draft, abandon, begin, commit, latest_tag, set_latest, write_file
from launcher.checkpoint_files.manifest import FileRecord, Manifest, read_manifest
from launcher.checkpoint_files.place import Place, place_of


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
    tensors = [tensors for tensors, _ in read_manifest(root / "global_step1").ranks]
    assert len(tensors) == 2
    for name in tensors:
        assert ("fsync", draft / name) in calls[:manifest], "a power loss would leave a manifest without its tensors"
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


def test_a_path_that_is_no_folder_is_refused_by_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(OSError, match="it is a file, or a link that leads nowhere"):
            begin(tmp_path / name, "tag", "0" * 8)


def _begun(root: Place, save_id: str) -> tuple[Draft, Manifest]:
    """Write all files of a save of one rank, which is not committed."""
    draft = begin(root, "tag", save_id)
    names = [
        draft.file(*each) for each in (("state", ".json"), ("rank-00000", ".safetensors"), ("rank-00000", ".json"))
    ]
    for name in names:
        write_file(draft.path / name, save_id.encode())
    files = {name: FileRecord(8, digest_of(save_id.encode())) for name in names}
    return draft, Manifest("tag", 1, save_id, 1, "2026-01-02T00:00:00", names[0], ((names[1], names[2]),), files)


@pytest.mark.parametrize(("is_again", "in_store"), [(False, False), (True, False), (False, True), (True, True)])
def test_of_two_jobs_that_save_one_tag_at_once_one_is_there_whole(
    tmp_path: Path, is_again: bool, in_store: bool
) -> None:
    root = place_of(f"memory://test-{uuid4().hex}/run") if in_store else tmp_path
    if is_again:
        commit(*_begun(root, "0" * 8))
    first, second = _begun(root, "1" * 8), _begun(root, "2" * 8)
    is_in_place = is_again or in_store  # both write to the folder of the tag
    if is_in_place:
        commit(*second)
    with pytest.raises(CheckpointError, match=r"of this save is gone: .*; give every job a folder of its own"):
        commit(*first)
    abandon(first[0])
    if not is_in_place:
        commit(*second)
    manifest = read_manifest(root / "tag")
    assert manifest.save_id == "2" * 8
    assert {(root / "tag" / name).read_text() for name in manifest.files} == {"2" * 8}
    assert not list(tmp_path.rglob(".*"))
