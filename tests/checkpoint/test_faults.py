"""What goes wrong while a checkpoint is saved: it is said on every rank, and what was saved before stays loadable."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harness import scripts
from harness.disks import small_disk
from harness.launch.command import with_limits
from harness.logs import logged
from harness.train.checkpoint_runs import differences, full_state, is_consistent, left_over, loads, make_engine, train
from harness.train.forked import run_ranks
from harness.train.ranks import RankPool, run_on_ranks

from launcher.base.errors import CheckpointError
from launcher.base.timeouts import timeouts
from launcher.checkpoint_files.folder import latest_tag

ASYNC = {"checkpoint": {"async": True}}
# What a save asks of the operating system, in the modules it asks it through.
CALLS = ("os.pwrite", "os.fsync", "os.open", "os.rename", "os.replace", "os.unlink", "os.mkdir")


class Failing:
    """Makes the n-th call of any of `CALLS` below a folder do something else. Counts calls."""

    def __init__(self, folder: Path, at: int, does: Callable[[], Any], calls: tuple[str, ...] = CALLS) -> None:
        self.folder, self.at, self.does, self.calls = str(folder), at, does, calls
        self.num_calls = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Be in the way within this block."""
        with contextlib.ExitStack() as stack:
            for name in self.calls:
                stack.enter_context(mock.patch(name, self._instead_of(getattr(os, name.partition(".")[2]))))
            yield

    def _instead_of(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_ours(first):
                self.num_calls += 1
                if self.num_calls - 1 == self.at:
                    self.does()
            return real(first, *args, **kwargs)

        return call

    def _is_ours(self, first: Any) -> bool:
        if isinstance(first, int):
            first = os.readlink(f"/proc/self/fd/{first}")
        return isinstance(first, str | os.PathLike) and str(first).startswith(self.folder)


def _raise(number: int) -> None:
    raise OSError(number, os.strerror(number))


# ---- one rank cannot write ----


def _save_and_say(engine: Any, folder: str, tag: str) -> str:
    try:
        engine.save_checkpoint(folder, tag)
        engine.wait_for_checkpoint()
    except CheckpointError as error:
        return str(error)
    return ""


def _one_rank_fails(
    rank: int, world_size: int, folder: str, fault: tuple[str, int, int], more: dict[str, Any]
) -> list[Any]:
    call, number, bad_rank = fault
    engine = make_engine(world_size, 2, **more)
    train(engine, 1)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    before = full_state(engine)
    train(engine, 1)
    at = 0 if rank == bad_rank else -1
    with Failing(Path(folder), at, lambda: _raise(number), (call,)).installed():
        said = _save_and_say(engine, folder, "second")
    facts = [said, latest_tag(Path(folder)), left_over(Path(folder)), loads(engine, Path(folder), before)]
    losses = train(engine, 1)
    facts.append(_save_and_say(engine, folder, "third"))
    facts += [latest_tag(Path(folder)), len(losses), loads(engine, Path(folder), full_state(engine))]
    engine.destroy()
    return facts


@pytest.mark.parametrize("more", [{}, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize(
    "fault",
    [
        ("os.pwrite", errno.ENOSPC, 1),
        ("os.pwrite", errno.EIO, 0),
        ("os.fsync", errno.EIO, 1),
        ("os.open", errno.EROFS, 1),
    ],
    ids=lambda fault: f"{fault[0]}-{errno.errorcode[fault[1]]}-rank{fault[2]}",
)
def test_a_rank_that_cannot_write_is_named_and_the_checkpoint_before_stays(
    tmp_path: Path, fault: tuple[str, int, int], more: dict[str, Any]
) -> None:
    for facts in run_on_ranks(2, _one_rank_fails, str(tmp_path), fault, more):
        said, latest, left, differs, said_later, latest_later, num_losses, differs_later = facts
        assert f"rank {fault[2]}: {os.strerror(fault[1])}" in said
        assert "second was not saved" in said
        assert latest == "global_step1"
        assert (left, differs) == ([], [])
        assert (said_later, latest_later, num_losses, differs_later) == ("", "third", 1, [])


def _fills_the_disk(rank: int, world_size: int, folder: str, ballast_bytes: int) -> list[Any]:
    engine = make_engine(world_size, 2)
    train(engine, 1)
    engine.save_checkpoint(folder)
    before = full_state(engine)
    ballast = Path(folder, "..", "ballast")
    if rank == 0:
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            file.write(b"x" * ballast_bytes)
    train(engine, 1)
    said = _save_and_say(engine, folder, "second")
    facts = [said, latest_tag(Path(folder)), loads(engine, Path(folder), before)]
    if rank == 0:
        ballast.unlink()
    facts.append(_save_and_say(engine, folder, "second"))
    engine.destroy()
    return facts


def test_a_disk_that_is_full_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "512k") as disk:
        for said, latest, differs, later in run_on_ranks(2, _fills_the_disk, str(disk / "saved"), 2**20):
            assert os.strerror(errno.ENOSPC) in said
            assert (latest, differs, later) == ("global_step1", [], "")


# ---- the same at every call of the operating system ----


def _fails_everywhere(rank: int, world_size: int, folder: str, is_new: bool) -> tuple[int, list[str]]:
    """Save with a failure at the first call, the second ... Returns how many there are, and what went wrong."""
    root, problems = Path(folder), []
    engine = make_engine(world_size, 1, num_blocks=0)  # one write after the other is the same again
    train(engine, 1)
    engine.save_checkpoint(root, "kept")
    saved = {"kept": full_state(engine)}
    for number in range(200):
        train(engine, 1)
        now, tag = full_state(engine), f"new{number}" if is_new else "kept"
        failing = Failing(root, number, lambda: _raise(errno.EIO))
        with failing.installed():
            said = _save_and_say(engine, folder, tag)
        named = latest_tag(root)
        if not said:
            saved[tag] = now
        if not is_consistent(root) or (not said and named != tag):
            problems.append(f"call {number} left latest at {named} ({said})")
        path, _ = engine.load_checkpoint(root, named)
        choices = [saved[named]] if named in saved else []
        choices += [now] if named == tag else []  # it was committed before something failed
        found = [each for each in choices if not differences(engine, each)]
        if not path or not found:
            problems.append(f"call {number} left another state behind {named} ({said})")
        else:
            saved[str(named)] = found[0]
        if failing.num_calls <= number:
            return number, problems
    return 200, [*problems, "there was no end"]


@pytest.mark.parametrize("is_new", [True, False], ids=["new tag", "same tag"])
def test_whichever_call_fails_latest_can_be_loaded(tmp_path: Path, is_new: bool) -> None:
    for num_calls, problems in run_on_ranks(1, _fails_everywhere, str(tmp_path), is_new):
        assert problems == []
        assert num_calls > 12


def _killed_everywhere(rank: int, world_size: int, folder: str, is_new: bool) -> tuple[int, list[str]]:
    """Do the same with a process that is killed at that call."""
    root, problems = Path(folder), []
    engine = make_engine(world_size, 1, num_blocks=0)  # one write after the other is the same again
    train(engine, 1)
    engine.save_checkpoint(root, "kept")
    before = full_state(engine)
    for number in range(200):
        train(engine, 1)
        now, tag = full_state(engine), f"new{number}" if is_new else "kept"
        child = os.fork()
        if child == 0:
            with Failing(root, number, lambda: os.kill(os.getpid(), signal.SIGKILL)).installed():
                engine.save_checkpoint(root, tag)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        named = str(latest_tag(root))
        engine.load_checkpoint(root, named)
        found = [each for each in (before, now) if not differences(engine, each)]
        if not found:
            problems.append(f"killed at call {number}: another state behind {named}")
            break
        before = found[0]
        if status == 0:
            engine.save_checkpoint(root, tag)
            if left := [name for name in left_over(root) if not name.startswith(".new")]:
                problems.append(f"left over: {left}")
            return number, problems
    return 200, [*problems, "there was no end"]


@pytest.mark.parametrize("is_new", [True, False], ids=["new tag", "same tag"])
def test_wherever_it_is_killed_latest_can_be_loaded(tmp_path: Path, is_new: bool) -> None:
    for num_calls, problems in run_on_ranks(1, _killed_everywhere, str(tmp_path), is_new):
        assert problems == []
        assert num_calls > 12


# ---- ranks that do not agree ----


def _only_one_saves(rank: int, world_size: int, folder: str, caller: int) -> list[Any]:
    engine = make_engine(world_size, 1)
    train(engine, 1)
    said = ""
    scaled, of_group = timeouts().scaled(0.01), datetime.timedelta(seconds=1)
    if rank == caller:
        with (
            mock.patch("launcher.checkpoint.exchange.timeouts", return_value=scaled),  # what rank 0 waits
            mock.patch("launcher.checkpoint.exchange.timeout_of", return_value=of_group),  # the others, for rank 0
        ):
            said = _save_and_say(engine, folder, "alone")
    before = full_state(engine)  # of all ranks together
    engine.save_checkpoint(folder, "together")
    facts = [said, latest_tag(Path(folder)), loads(engine, Path(folder), before)]
    engine.destroy()
    return facts


@pytest.mark.parametrize("caller", [0, 1])
def test_a_save_on_one_rank_only_is_noticed_and_the_next_one_of_all_ranks_works(tmp_path: Path, caller: int) -> None:
    facts = run_on_ranks(2, _only_one_saves, str(tmp_path), caller)
    words = rf"save_checkpoint was called on rank {caller}, and for \d+ s not on rank {1 - caller}"
    assert re.search(words, facts[caller][0])
    assert [each[1:] for each in facts] == [["together", []]] * 2
    assert not (tmp_path / "alone").exists()


def _different_tags(rank: int, world_size: int, folder: str, validation: str) -> list[Any]:
    engine = make_engine(world_size, 1, checkpoint={"tag_validation": validation})
    train(engine, 1)
    with logged() as log:
        said = _save_and_say(engine, folder, f"tag{rank}")
    engine.destroy()
    return [said, latest_tag(Path(folder)), " ".join(log)]


@pytest.mark.parametrize("validation", ["Ignore", "Warn", "Fail"])
def test_differing_tags_are_treated_as_the_config_says(tmp_path: Path, validation: str) -> None:
    results = run_on_ranks(2, _different_tags, str(tmp_path), validation)
    text = "ranks save to different tags: tag0 on rank 0; tag1 on rank 1"
    for said, latest, _ in results:
        assert (text in said) == (validation == "Fail")
        assert latest == (None if validation == "Fail" else "tag0")
    assert (text in results[0][2]) == (validation == "Warn")


def _different_folders(rank: int, world_size: int, folder: str, validation: str) -> list[Any]:
    engine = make_engine(world_size, 1, checkpoint={"tag_validation": validation})
    train(engine, 1)
    with logged() as log:
        said = _save_and_say(engine, f"{folder}/at_{rank}", "tag")
    found = [] if said else [loads(engine, Path(folder, "at_0"), full_state(engine))]
    engine.destroy()
    return [said, found, " ".join(log)]


@pytest.mark.parametrize("validation", ["Ignore", "Warn", "Fail"])
def test_differing_folders_are_treated_like_tags(tmp_path: Path, validation: str) -> None:
    """A script that names its folder by the time, on each rank, has one checkpoint all the same."""
    results = run_on_ranks(2, _different_folders, str(tmp_path), validation)
    for said, found, _ in results:
        assert ("ranks save to different folders: " in said) == (validation == "Fail")
        assert found == ([] if validation == "Fail" else [[]])
    assert ("the folder of rank 0 is used" in results[0][2]) == (validation == "Warn")
    assert not (tmp_path / "at_1").exists()


class Unknown:
    pass


def _unencodable(rank: int, world_size: int, folder: str) -> list[Any]:
    engine = make_engine(world_size, 1)
    state = {"deep": [1, Unknown()]} if rank == 1 else {}
    try:
        engine.save_checkpoint(folder, client_state=state)
    except CheckpointError as error:
        said = str(error)
    facts = [said, list(Path(folder).iterdir()), _save_and_say(engine, folder, "good")]
    engine.destroy()
    return facts


def test_a_client_state_that_cannot_be_saved_is_named_on_every_rank(tmp_path: Path) -> None:
    for said, found, later in run_on_ranks(2, _unencodable, str(tmp_path)):
        assert "rank 1: " in said
        assert "Unknown cannot be saved" in said
        assert '["deep"][1]' in said
        assert (found, later) == ([], "")


def _pickled(rank: int, world_size: int, folder: str) -> list[Any]:
    engine = make_engine(world_size, 1, checkpoint={"pickle_client_state": True})
    engine.save_checkpoint(folder, client_state={"deep": [1, Unknown()]})
    again = engine.load_checkpoint(folder)[1]
    engine.destroy()
    engine = make_engine(world_size, 1)
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        said = str(error)
    engine.destroy()
    return [type(again["deep"][1]).__name__, said]


def test_a_client_state_is_unpickled_where_the_config_says_so_alone(tmp_path: Path) -> None:
    for kind, said in run_on_ranks(2, _pickled, str(tmp_path)):
        assert kind == "Unknown"
        assert "to read these runs code" in said
        assert "pickle_client_state" in said


TAGS = ["a/b", "../up", ".hidden", "", "..", "latest", "zero_to_fp32.py", "end\n", " spaces ", "\udcff", "x" * 300]


def _bad_tags(rank: int, world_size: int, folder: str) -> list[str]:
    engine = make_engine(world_size, 1)
    engine.save_checkpoint(folder, "good")
    said = [_save_and_say(engine, folder, tag) for tag in TAGS]
    engine.destroy()
    return [*said, str(latest_tag(Path(folder)))]


def test_tags_that_cannot_name_a_folder_are_refused(tmp_path: Path) -> None:
    for *said, latest in run_on_ranks(2, _bad_tags, str(tmp_path / "saved")):
        assert ["the tag" in text and "cannot name a folder" in text for text in said] == [True] * len(TAGS)
        assert latest == "good"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def _no_room(rank: int, world_size: int, folder: str) -> str:
    engine = make_engine(world_size, 1)
    said = _save_and_say(engine, folder, "good")
    engine.destroy()
    return said


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for said in run_on_ranks(2, _no_room, str(tmp_path / "file" / "saved")):
        assert str(tmp_path / "file" / "saved") in said
        assert os.strerror(errno.ENOTDIR) in said


def _cannot_copy(rank: int, world_size: int, folder: str) -> list[str]:
    engine = make_engine(world_size, 1, **ASYNC)

    def failing(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    with mock.patch("launcher.checkpoint.saving.save.bytes_of", failing) if rank == 1 else contextlib.nullcontext():
        said = _save_and_say(engine, folder, "first")
    facts = [said, _save_and_say(engine, folder, "second")]
    engine.destroy()
    return facts


def test_a_rank_that_fails_in_any_way_leaves_no_other_rank_waiting(tmp_path: Path) -> None:
    for said, later in run_on_ranks(2, _cannot_copy, str(tmp_path)):
        assert "rank 1: RuntimeError: no such kernel" in said
        assert later == ""


# ---- the end of a process ----

ENDS = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from harness.train.checkpoint_runs import make_engine, train
import launcher
launcher.init_distributed()
how = sys.argv[2]
engine = make_engine(2, 2, **({{"checkpoint": {{"async": True}}}} if how == "async" else {{}}))
if how == "alone" and os.environ["RANK"] == "0":
    engine.save_checkpoint(sys.argv[1])
train(engine, 1)
if how == "async":
    engine.save_checkpoint(sys.argv[1], "last")
"""


def test_an_asynchronous_save_at_the_end_of_a_script_is_committed(tmp_path: Path) -> None:
    result = run_ranks(tmp_path, 2, scripts.write(tmp_path, ENDS), tmp_path / "saved", "async")
    assert result.code == 0, result.err
    assert latest_tag(tmp_path / "saved") == "last"
    assert left_over(tmp_path / "saved") == []


def _ends_at_once(rank: int, world_size: int, folder: str) -> None:
    engine = make_engine(world_size, 2)
    train(engine, 1)
    engine.save_checkpoint(folder, "last")
    os._exit(0)


def test_a_save_before_the_process_ends_at_once_is_committed(tmp_path: Path) -> None:
    assert RankPool(2).run_to_the_end(_ends_at_once, str(tmp_path / "saved")) == [0, 0]
    assert latest_tag(tmp_path / "saved") == "last"
    assert left_over(tmp_path / "saved") == []


def test_a_save_on_rank_0_only_ends_the_job(tmp_path: Path) -> None:
    arguments = (scripts.write(tmp_path, ENDS), tmp_path / "saved", "alone")
    result = run_ranks(tmp_path, 2, *arguments, env=with_limits(0.05))
    assert result.code != 0
    assert re.search(r"save_checkpoint was called on rank 0, and for \d+ s not on rank 1", result.err + result.out)
