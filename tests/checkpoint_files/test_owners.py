"""The ids of jobs that save into a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.checkpoint_files.folder import committed_in
from launcher.checkpoint_files.retention import OWNERS, add_owner, owners_of


def test_jobs_are_added_once_and_the_last_one_stands_last(tmp_path: Path) -> None:
    root = tmp_path / "new" / "run"
    add_owner(root, ["a", "77"])
    add_owner(root, ["b"])
    add_owner(root, ["a", "77"])
    assert owners_of(root) == ["b", "a", "77"]
    for number in range(200):
        add_owner(root, [str(number)])
    assert owners_of(root) == [str(number) for number in range(100, 200)]
    assert committed_in(root) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"jobs": 3}', b'{"jobs": null}', b"\xff", b"[" * 5000])
def test_a_damaged_list_names_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / OWNERS).write_bytes(content)
    assert owners_of(tmp_path) == []
    add_owner(tmp_path, ["a"])
    assert owners_of(tmp_path) == ["a"]
