"""`launch probe` as users type it: hosts over SSH, what is kept, and what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner, Result
from harness.launch.command import run_launch
from harness.launch.sshd import LoopbackSshd

from launcher.base.errors import LauncherError, UsageError
from launcher.cli.commands import probe
from launcher.cli.main import cli
from launcher.planner.speed import CollectiveSpeed, LinkSpeed, RankSpeed, Speed


@pytest.mark.cluster
def test_two_hosts(sshd: LoopbackSshd, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    options = ("--hostfile", "hosts", "--ssh-config", sshd.ssh_config, "--force-multi", "--seconds", "1", "--json")
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = run_launch(tmp_path, "probe", *options, "--plot", "speed.svg", env=env)
    found = json.loads(result.out)
    assert result.code == bool(found["slow"]), result.err
    assert [(each["rank"], each["node"]) for each in found["ranks"]] == [(0, 0), (1, 1)]
    assert len({each["host"] for each in found["ranks"]}) == 2, "names tell nodes apart"
    assert {each["kind"] for each in found["fits"]} == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    assert [link["nodes"] for link in found["links"]] == [[0, 1]]
    (kept,) = (tmp_path / "cache/launch/speed").iterdir()
    assert json.loads(kept.read_text())["measured"] == found["measured"]
    assert "<svg" in (tmp_path / "speed.svg").read_text()
    assert not (tmp_path / "runs").exists()


# ---- without ranks ----

RANK = RankSpeed(0, 0, "node-a", "cpu", {"fp32": 1e12}, 1e10)


def run(folder: Path, *words: str, found: Speed | Exception) -> Result:
    with mock.patch.object(probe, "_measure", side_effect=[found]):
        env = {"XDG_CACHE_HOME": str(folder / "cache")}
        return CliRunner().invoke(cli, ["probe", *words], prog_name="launch", env=env)


def speed(**of_second: float) -> Speed:
    second = replace(RANK, rank=1, node=1, host="node-b", **of_second)
    collectives = [CollectiveSpeed("all_gather", "all ranks", 2, size, 1e-5 + size / 1e9) for size in (2**12, 2**20)]
    links = [LinkSpeed((0, 1), ("node-a", "node-b"), 1.25e9)]
    return Speed("2026-01-02 03:04:05", "gloo", [RANK, second], collectives, links)


def test_what_is_shown_and_kept(tmp_path: Path) -> None:
    result = run(tmp_path, found=speed())
    assert result.exit_code == 0, result.output
    assert "2 nodes · 2 ranks · gloo · 2026-01-02 03:04:05 UTC" in result.output
    assert "GB/s between two hosts, in each direction: node-a – node-b 1.25" in result.output
    assert "disk" not in result.output, "columns without a number are left out"
    path = tmp_path / "cache/launch/speed/node-a,node-b-2xcpu.json"
    assert f"kept in {path}" in result.output
    assert Speed.from_json(path.read_text()) == speed()


def test_a_slow_rank_is_named_and_an_exit_code(tmp_path: Path) -> None:
    result = run(tmp_path, found=speed(memory_bytes_per_s=1e9))
    assert result.exit_code == 1
    assert "✗ rank 1 (node-b): copies in its memory at 10 % of the others'" in result.output


def test_a_cache_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    result = run(tmp_path, found=speed())
    assert result.exit_code == 0
    assert "not kept" in result.output


def test_ranks_that_fail_are_an_error(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "probe", "--hostfile", "nowhere")
    assert result.code == 1
    assert "nowhere" in result.err
    assert "the ranks of the probe have ended with 2" in result.err
    failed = run(tmp_path, found=LauncherError("ended"))
    assert isinstance(failed.exception, LauncherError)


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with mock.patch.dict("sys.modules", {"matplotlib": None}):
        result = run(tmp_path, "--plot", "speed.png", found=AssertionError())
    assert isinstance(result.exception, UsageError)
    assert "pip install matplotlib" in str(result.exception)
    wrong = run(tmp_path, "--plot", str(tmp_path / "speed.doc"), found=speed())
    assert "the plot cannot be written" in str(wrong.exception)
