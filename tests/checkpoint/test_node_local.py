"""Every host has the files of its own ranks: here each rank is a host of its own."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harness.train.checkpoint_runs import differences, full_state, left_over, make_engine, train
from harness.train.ranks import run_on_ranks

from launcher.base.errors import CheckpointError
from launcher.checkpoint_files.folder import committed_in, latest_tag
from launcher.checkpoint_files.verify import verify


def _run(rank: int, world_size: int, root: str) -> list[Any]:
    folder = Path(root, f"host{rank}", "saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        engine = make_engine(world_size, 3, checkpoint={"use_node_local_storage": True})
        engine.save_checkpoint(folder, "tag")
        (folder / "tag" / "notes").mkdir()  # whatever else is there
        train(engine, 2)
        engine.save_checkpoint(folder, "tag")
        before = full_state(engine)
        said = ""
        with (
            mock.patch("os.pwrite", side_effect=OSError(errno.EIO, "no disk"))
            if rank == 1
            else contextlib.nullcontext()
        ):
            try:
                engine.save_checkpoint(folder, "second")
            except CheckpointError as error:
                said = str(error)
        train(engine, 1)
        path, _ = engine.load_checkpoint(folder)
        facts = [said, path, engine.global_steps, differences(engine, before), verify(folder / "tag")]
        engine.destroy()
        engine = make_engine(world_size, 0)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(folder)
        facts.append(str(caught.value))
        engine.destroy()
    names = sorted(found.name.partition("-")[0] for found in (folder / "tag").iterdir() if found.is_file())
    ranks = {found.name[:10] for found in (folder / "tag").glob("rank-*")}
    return [
        *facts,
        names,
        ranks,
        latest_tag(folder),
        len(committed_in(folder)),
        [name for name in left_over(folder) if "notes" not in name],
    ]


def test_every_host_has_the_files_of_its_ranks_and_all_load(tmp_path: Path) -> None:
    for rank, facts in enumerate(run_on_ranks(2, _run, str(tmp_path))):
        said, path, steps, differs, findings, other, names, ranks, latest, num_committed, left = facts
        assert "rank 1: no disk" in said
        assert (path, steps, differs, findings) == (str(tmp_path / f"host{rank}" / "saved" / "tag"), 2, [], [])
        assert "another host has it" in other
        assert "copy the files of all hosts into one folder" in other
        assert (ranks, latest, num_committed, left) == ({f"rank-{rank:05}"}, "tag", 1, [])
        assert {"manifest.json", "state", "zero_to_fp32.py"} < set(names)
    assert os.listdir(tmp_path / "host0" / "saved" / "tag" / "notes") == []
