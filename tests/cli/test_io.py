"""`launch io`: a table, an `aio` section that a config takes, nothing left behind; clear words for a wrong folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import disks
from harness.launch.command import run_here, run_launch

from launcher.config.check import check
from launcher.storage.measure import GRID

QUICK = ("--size", "64MiB", "--seconds", "1")


def test_the_table_and_a_section_that_a_config_takes(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    result = run_launch(tmp_path, "io", str(disk), *QUICK)
    assert result.code == 0, result.err
    headline, *lines = result.out.splitlines()
    assert headline.startswith(f"{disk} · ")
    assert "read GB/s" in result.out
    measured = [line.split()[:2] for line in lines if line.lstrip()[:1].isdigit()]
    assert measured == [[f"{s.block_size_bytes:,}", f"{s.queue_depth}"] for s in GRID]
    section = json.loads("{" + lines[-1] + "}")
    assert check(section, None).errors == []
    assert [s.block_size_bytes for s in GRID].count(section["aio"]["block_size"])
    assert list(disk.iterdir()) == []


def test_json_holds_every_measurement_and_the_choice(tmp_path: Path) -> None:
    found = json.loads(run_launch(tmp_path, "io", ".", *QUICK, "--json").out)
    assert found["folder"] == "."
    assert 0 < found["size_bytes"] <= 64 << 20
    assert len(found["measured"]) == len(GRID)
    names = ("block_size", "queue_depth", "intra_op_parallelism")
    assert found["aio"] in [{name: row[name] for name in names} for row in found["measured"]]
    assert all(row["read_bytes_per_s"] > 0 < row["write_bytes_per_s"] for row in found["measured"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nowhere",), "'nowhere' does not exist"),
        (("file",), "'file' is a file"),
        ((".", "--size", "1MB"), "'1MB' is not a size of at least 64.0 MiB"),
        ((".", "--size", "much"), "'much' is not a size"),
        ((".", "--seconds", "0"), "--seconds"),
        ((), "DIR is missing"),
    ],
)
def test_wrong_usage_is_one_clear_message(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    (tmp_path / "file").write_text("")
    result = run_here(tmp_path, "io", *args)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with disks.small_disk(tmp_path / "small", "1m") as folder:
        yield folder


def test_a_disk_that_is_too_full_is_named_with_what_is_free(tmp_path: Path, small_disk: Path) -> None:
    result = run_launch(tmp_path, "io", str(small_disk), *QUICK)
    assert result.code == 1
    assert str(small_disk) in result.err
    assert "64.0 MiB cannot be reserved: No space left on device" in result.err
    assert "1020.0 KiB are free there" in result.err
    assert "Traceback" not in result.err


def test_help_has_examples(tmp_path: Path) -> None:
    assert "launch io /local_nvme --size" in run_here(tmp_path, "io", "--help").out
