"""Every damaged byte is found, and the file that has it is named."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from harness.checkpoints import write_checkpoint

from launcher.checkpoint_files.retention import candidates
from launcher.checkpoint_files.verify import verify


def test_a_checkpoint_as_it_was_saved_is_sound(tmp_path: Path) -> None:
    assert verify(write_checkpoint(tmp_path, 2, world_size=3)) == []


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_is_found_in_any_file(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    folder = write_checkpoint(tmp_path, 2)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        place = chance.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :])
        (finding, *_) = verify(folder)
        assert finding.file == str(path)
        path.write_bytes(content)
    assert verify(folder) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [(b'"F32"', b'"I32"'), (b'"shape":[14]', b'"shape":[13]'), (b'"data_offsets":[0', b'"data_offsets":[4')],
)
def test_a_header_of_another_meaning_is_found(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = write_checkpoint(tmp_path, 2) / "rank-00000.safetensors"
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after, 1))
    (finding, *_) = verify(path.parent)
    assert (finding.file, "its header" in finding.message) == (str(path), True)


def test_files_that_are_missing_or_cut_off_are_all_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 2)
    (folder / "rank-00000.safetensors").unlink()
    (folder / "rank-00001.safetensors").write_bytes((folder / "rank-00001.safetensors").read_bytes()[:-1])
    (folder / "state.json").unlink()
    assert {Path(each.file).name for each in verify(folder)} == {
        "rank-00000.safetensors",
        "rank-00001.safetensors",
        "state.json",
    }


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ((14, 27), "elements of weight/embed.weight are missing: it has 28, and the files have 0 to 14, 14 to 27"),
        ((15, 28), "elements of weight/embed.weight are missing: it has 28, and the files have 0 to 14, 15 to 28"),
        ((13, 28), "elements of weight/embed.weight are there twice: it has 28, and the files have 0 to 14, 13 to 28"),
    ],
)
def test_every_element_is_there_once(tmp_path: Path, part: tuple[int, int], said: str) -> None:
    folder = write_checkpoint(tmp_path, 2, ranges={1: {"weight/embed.weight": part}})
    (finding,) = verify(folder)
    assert finding.message == said
    assert finding.file == str(folder / "state.json")


def test_candidates_are_sound_as_far_as_can_be_seen_without_reading_tensors(tmp_path: Path) -> None:
    paths = [write_checkpoint(tmp_path, step) for step in (2, 4, 6, 8)]
    (paths[3] / "manifest.json").write_text("{")
    (paths[2] / "rank-00001.safetensors").write_bytes(b"")
    assert [str(found).partition(":")[0] for found in candidates(tmp_path)] == [
        str(paths[3] / "manifest.json"),
        str(paths[2] / "rank-00001.safetensors"),
        str(paths[1]),
        str(paths[0]),
    ]
    assert list(candidates(tmp_path / "nowhere")) == []
