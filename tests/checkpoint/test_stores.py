"""Checkpoints in stores: a store in memory, and a server that answers as S3 does."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner
from harness.launch.command import run_here
from harness.s3 import s3_environment, s3_server, services_folder
from harness.scripts import write
from harness.train.checkpoint_runs import make_engine, train
from harness.train.forked import run_ranks
from harness.train.ranks import run_on_ranks

from launcher.base.errors import CheckpointError, EngineError
from launcher.checkpoint.formats.dcp.source import DcpSource
from launcher.checkpoint_files.folder import committed_in, latest_tag
from launcher.checkpoint_files.manifest import MANIFEST
from launcher.checkpoint_files.place import RemotePath, place_of
from launcher.checkpoint_files.retention import Retention, candidates, leftovers, prune, remove_leftover
from launcher.checkpoint_files.verify import verify
from launcher.cli.commands.checkpoint import checkpoint_group
from launcher.cli.commands.checkpoint_tools import export

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def memory() -> str:
    """The URL of an empty folder in a store in memory."""
    return f"memory://test-{uuid4().hex}/run"


def save_some(_: int, world_size: int, url: str, num_saves: int = 3) -> None:
    engine = make_engine(world_size, 0)
    for _ in range(num_saves):
        train(engine, 1)
        engine.save_checkpoint(url)


def alone(body: Any, *args: Any) -> Any:
    """Run a body on one rank, in this process's store."""
    return body(0, 1, *args)


def saved_and_loaded(rank: int, world_size: int, url: str) -> None:
    """Save, save the same tag again, load; what is trained from there on has the same losses."""
    engine = make_engine(world_size, 3)
    train(engine, 2)
    assert engine.load_checkpoint(url) == (None, None)
    engine.save_checkpoint(url, tag="same", client_state={"is": "first"})
    train(engine, 1)
    engine.save_checkpoint(url, tag="same", client_state={"is": "second"})
    losses = train(engine, 3)
    other = make_engine(world_size, 1)
    path, client_state = other.load_checkpoint(url)
    assert (path, client_state) == (f"{url}/same", {"is": "second"})
    assert train(other, 3) == losses
    folder = place_of(url) / "same"
    assert verify(folder) == []
    names = {each.name for each in folder.iterdir()} - {MANIFEST}
    assert names == set(committed_in(place_of(url))[0].manifest.files)


def test_save_load_and_save_again_in_a_store(memory: str) -> None:
    alone(saved_and_loaded, memory)


def test_what_is_kept_and_removed_in_a_store(memory: str) -> None:
    root = place_of(memory)
    assert (committed_in(root), list(candidates(root)), prune(root, Retention(1))) == ([], [], [])
    assert latest_tag(root) is None
    alone(save_some, memory)
    assert [each.path.name for each in committed_in(root)] == [f"global_step{step}" for step in (1, 2, 3)]
    assert [path.name for path in candidates(root) if isinstance(path, RemotePath)] == [
        f"global_step{step}" for step in (3, 2, 1)
    ]
    assert [str(each.path) for each in prune(root, Retention(1))] == [f"{memory}/global_step{step}" for step in (1, 2)]
    assert list((root / "global_step1").iterdir()) == []
    assert latest_tag(root) == "global_step3"
    (root / "global_step4" / "rank-00000-0123abcd.safetensors").write_bytes(b"of a save that was killed")
    (left,) = leftovers(root)
    assert (left.num_bytes, left.may_be_in_use) == (25, True)
    remove_leftover(left)
    assert leftovers(root) == []


def test_damage_in_a_store_is_found(memory: str) -> None:
    alone(save_some, memory, 1)
    folder = place_of(memory) / "global_step1"
    (tensors,) = folder.glob("rank-*.safetensors")
    content = bytearray(tensors.read_bytes())
    content[-5] ^= 1
    tensors.write_bytes(bytes(content))
    (finding,) = verify(folder)
    assert finding.file == str(tensors)
    with pytest.raises(CheckpointError, match=r"memory://.*rank-.*damaged"):
        make_engine(1, 0).load_checkpoint(memory)
    tensors.unlink()
    assert "missing" in str(next(candidates(place_of(memory))))


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_put_that_fails_leaves_what_was_there(memory: str, monkeypatch: pytest.MonkeyPatch, is_taken: bool) -> None:
    """Also where the store has taken the manifest, and the answer was lost."""
    alone(save_some, memory, 1)
    engine = make_engine(1, 0)
    train(engine, 2)
    put = RemotePath.write_bytes

    def fail(self: RemotePath, content: bytes) -> None:
        if self.name != MANIFEST or is_taken:
            put(self, content)
        if self.name == MANIFEST:
            raise CheckpointError("the store answers: no", where=str(self))

    monkeypatch.setattr(RemotePath, "write_bytes", fail)
    with pytest.raises(CheckpointError, match=rf"{memory}.*the store answers: no"):
        engine.save_checkpoint(memory, tag="global_step1")
    monkeypatch.undo()
    assert verify(place_of(memory) / "global_step1") == []
    assert committed_in(place_of(memory))[0].manifest.step == (2 if is_taken else 1)


def test_the_command_exports(tmp_path: Path) -> None:
    alone(save_some, str(tmp_path / "ours"), 1)
    done = run_here(tmp_path, "checkpoint", "export", tmp_path / "ours", tmp_path / "dcp", "--format", "dcp")
    assert done.code == 0, done.err
    assert DcpSource(tmp_path / "dcp").state.global_steps == 1
    refused = CliRunner().invoke(export, ["a", "b", "--format", "dcp", "--dtype", "fp32"])
    assert "--dtype goes with --format hf" in str(refused.exception)


def test_a_checkpoint_in_a_store_is_exported(memory: str, tmp_path: Path) -> None:
    from launcher.checkpoint.convert.to_dcp import export_checkpoint  # torch's own format takes seconds to import

    alone(save_some, memory, 1)
    export_checkpoint(memory, tmp_path / "dcp")
    engine = make_engine(1, 0)
    engine.load_checkpoint(tmp_path / "dcp")
    assert engine.global_steps == 1


def test_file_urls_are_local_folders(tmp_path: Path) -> None:
    assert place_of(f"file://{tmp_path}/run") == tmp_path / "run"
    alone(save_some, f"file://{tmp_path}/run", 1)
    assert (tmp_path / "run" / "global_step1" / MANIFEST).is_file()


def test_a_store_that_nothing_knows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"nonsense://x.*nonsense:// cannot be used"):
        place_of("nonsense://x/run")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(CheckpointError, match=r"launch-zero\[remote\]"):
        place_of("s3://bucket/run")


# ---- S3 ----


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """The environment in which `s3://` means a server of this module, with a bucket."""
    services = services_folder()
    if services is None:
        pytest.skip("moto and s3fs are not installed: `make test` does it")
    with s3_server(services) as url:
        environment = s3_environment(url, services)
        with pytest.MonkeyPatch.context() as patch:
            for key, value in environment.items():
                patch.setenv(key, value)
            patch.syspath_prepend(str(services))
            sys.path.remove(str(services))
            sys.path.append(str(services))
            place_of("s3://bucket/x")._store.mkdir("bucket")
            yield environment


def on_s3(rank: int, world_size: int, environment: dict[str, str], body: Any, *args: Any) -> Any:
    """Run a body where `s3://` means the server."""
    services = environment["TEST_SERVICES"]
    if services not in sys.path:
        sys.path.append(services)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        return body(rank, world_size, *args)


def test_two_ranks_save_and_load_on_s3(s3: dict[str, str]) -> None:
    run_on_ranks(2, on_s3, s3, saved_and_loaded, "s3://bucket/two")


def losses_from(_: int, world_size: int, url: str) -> list[float]:
    engine = make_engine(world_size, 2)
    engine.load_checkpoint(url)
    return train(engine, 3)


KILLED = """
import os, signal, sys
sys.path += [{tests!r}, {services!r}]
from harness.train.checkpoint_runs import make_engine, train
from launcher.checkpoint_files.place import RemotePath
import launcher
put = RemotePath.write_bytes
def put_or_die(self, content):
    if self.name == "manifest.json":
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, content)
engine = make_engine(1, 2)
engine.load_checkpoint({url!r})
train(engine, 1)
RemotePath.write_bytes = put_or_die
engine.save_checkpoint({url!r}, tag="global_step3")
"""


def test_a_save_that_is_killed_leaves_the_one_before_on_s3(s3: dict[str, str], tmp_path: Path) -> None:
    url = "s3://bucket/killed"
    run_on_ranks(2, on_s3, s3, save_some, url)
    before = run_on_ranks(2, on_s3, s3, losses_from, url)
    text = KILLED.format(tests=str(Path(__file__).parent.parent), services=s3["TEST_SERVICES"], url=url)
    done = run_ranks(tmp_path, 0, write(tmp_path, text), env=s3)
    assert done.code == 128 + signal.SIGKILL, done.err
    assert len(leftovers(place_of(url))) >= 2
    assert run_on_ranks(2, on_s3, s3, losses_from, url) == before
    run_on_ranks(2, on_s3, s3, save_some, url)
    assert leftovers(place_of(url)) == []


def test_what_s3_refuses_is_an_error_with_the_url(s3: dict[str, str]) -> None:
    engine = make_engine(1, 0)
    with pytest.raises(CheckpointError, match=r"s3://no-such-bucket/run.*bucket does not exist"):
        engine.save_checkpoint("s3://no-such-bucket/run")


def test_the_commands_take_urls(s3: dict[str, str]) -> None:
    url = "s3://bucket/commands"
    alone(save_some, url)
    listed = CliRunner().invoke(checkpoint_group, ["inspect", url])
    assert "global_step3" in listed.output
    assert "3 checkpoints" in listed.output
    verified = CliRunner().invoke(checkpoint_group, ["verify", f"{url}/global_step2"])
    assert (verified.exit_code, verified.output.split()) == (0, ["global_step2", "ok"])
    pruned = CliRunner().invoke(checkpoint_group, ["prune", url, "--keep-last", "1"])
    assert f"removed {url}/global_step1" in pruned.output
    assert [each.path.name for each in committed_in(place_of(url))] == ["global_step3"]
    missing = CliRunner().invoke(checkpoint_group, ["inspect", "s3://bucket/nothing"])
    assert "there is no such folder" in str(missing.exception)


def test_a_run_saves_by_itself_and_continues_in_a_store(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"folder": memory, "save_every": 1, "keep_last": 2}
    engine = make_engine(1, 0, checkpoint=section)
    train(engine, 3)
    assert [each.path.name for each in committed_in(place_of(memory))] == ["global_step2", "global_step3"]
    engine.destroy()
    with pytest.raises(EngineError, match=rf"{memory}.*has checkpoints of another run"):
        make_engine(1, 0, checkpoint=section)
    monkeypatch.setenv("LAUNCH_RESUME", "auto")
    assert make_engine(1, 0, checkpoint=section).global_steps == 3
