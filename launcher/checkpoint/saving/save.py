"""Saving: what each rank does, from the agreement to write until the checkpoint is there.

[Note: who waits for whom] Ranks exchange three messages: what each is about to save, where rank 0 has made room, and
how it went. Rank 0 commits when all have written. In an asynchronous save the first two are exchanged by the call, the
third by a thread, which writes copies; the training never waits for it, except in the next save.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import itertools
import json
import operator
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import CheckpointAssertionError, CheckpointError
from launcher.base.log import get_logger
from launcher.checkpoint.deepspeed_files.files import DeepSpeedFiles
from launcher.checkpoint.deepspeed_files.pickled import write_torch_file
from launcher.checkpoint.deepspeed_files.plan import Plan
from launcher.checkpoint.exchange import Exchange, error_text
from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint.saving.contents import Copies, CopyRoom, UnitContents, live_tensors, staged
from launcher.checkpoint.values import tree
from launcher.checkpoint.values.layout_json import layouts_to_json
from launcher.checkpoint.values.tree import bytes_of, dtype_name
from launcher.checkpoint.zero_to_fp32 import FILE_DTYPES
from launcher.checkpoint_files.blocks import TensorFileWriter, digest_of
from launcher.checkpoint_files.folder import (
    Draft,
    abandon,
    begin,
    commit,
    draft_of,
    make_executable,
    make_room,
    replace_file,
    set_latest,
    temporary_name,
    write_file,
)
from launcher.checkpoint_files.manifest import MANIFEST, FileRecord, Manifest, read_manifest
from launcher.checkpoint_files.place import Place, place_of
from launcher.comm.device import HostDeviceCopier

# ---- DeepSpeed's files beside ours ----
# DeepSpeed divides parameters otherwise than units are divided: a rank reads its part from the files that all ranks
# have written, before these are committed.


def write_beside(draft: Draft, manifest: Manifest, rank: int) -> dict[str, FileRecord]:
    """Write a rank's files of DeepSpeed into a draft; return them by name. manifest: of all else that is in the draft.

    One file's tensors are in memory at a time. Raises: OSError, CheckpointError for what DeepSpeed's files cannot hold.
    """
    assert isinstance(draft.path, Path), "stores are refused before anything is written"
    found = {}
    with contextlib.closing(NativeSource(draft.path, manifest)) as source:
        files = DeepSpeedFiles(Plan(source, int(source.facts["stage"]), manifest.world_size))
        for name, content in files.of_rank(rank):
            own = draft.file(Path(name).stem, Path(name).suffix)
            found[own] = FileRecord(*write_torch_file(draft.path / own, content()))
    return found


# ---- Saving ----


SCRIPT = Path(__file__).parents[1] / "zero_to_fp32.py"
# Ranks wait so long for each other to have written: longer than any disk takes for what one rank holds.
WRITE_TIMEOUT_S = 6 * 3600.0


@dataclass(frozen=True)
class SaveRequest:
    """What a script has asked for."""

    root: Place
    tag: str
    step: int
    saves_latest: bool = True
    tag_validation: str = "Warn"
    is_node_local: bool = False  # every host writes to a disk of its own
    is_node_leader: bool = True  # this rank makes folders on its host, where `is_node_local`
    has_deepspeed: bool = False  # DeepSpeed's files are written, too


@dataclass(frozen=True)
class Encoded:
    """A value as plain data and the tensors this refers to."""

    plain: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, value: Any, where: str, *, copies: bool, pickles: bool = False) -> Encoded:
        """Encode a value. copies: of its tensors too. pickles: what is not plain data; else it is a CheckpointError."""
        plain, tensors = tree.encode(value, where, pickles=pickles)
        return cls(plain, {key: each.clone() for key, each in tensors.items()} if copies else tensors)


@dataclass(frozen=True)
class RankData:
    """What one rank adds to a checkpoint."""

    writer: int  # which of the parts of every unit it writes
    contents: list[UnitContents]
    private: Encoded  # what only this rank has: random numbers, the position in the data


@dataclass(frozen=True)
class SharedData:
    """What rank 0 adds to a checkpoint, the same on every rank."""

    run: Encoded  # the fields of `RunState`
    facts: dict[str, Any] = field(default_factory=dict)  # plain data, for readers: stage, precision, tied names


@dataclass
class _Written:
    """What a rank says of its files."""

    tensors: str
    facts: str
    records: dict[str, FileRecord]
    params: dict[str, dict[str, Any]]
    units: list[dict[str, Any]]  # those of which this rank writes the first part


class Save:
    """One save on this rank. `agree`, then `write`; both are called by every rank, the second maybe in a thread."""

    def __init__(self, request: SaveRequest, exchange: Exchange, copier: HostDeviceCopier) -> None:
        """copier: of the device that the tensors are on."""
        self._request = request
        self._copier = copier
        self._exchange = exchange
        self._draft: Draft | None = None
        self._save_id = ""

    @property
    def draft(self) -> Draft:
        assert self._draft is not None, "agree() comes first"
        return self._draft

    def agree(self, error: str | None = None) -> None:
        """Agree on tag and folder; rank 0 makes room. error: why this rank cannot save.

        Raises: CheckpointError on every rank where one cannot, where ranks differ, or where there is no room.
        """
        request = self._request
        said = self._exchange.gather([error, request.tag, str(request.root.absolute()), request.step])
        plan: dict[str, Any] = {}
        if said is not None:
            failed = "; ".join(f"rank {rank}: {each[0]}" for rank, each in enumerate(said) if each[0])
            plan = {"error": failed, "tags_differ": False} if failed else self._plan([each[1:] for each in said])
        plan = self._exchange.broadcast(plan)
        if plan["error"]:
            self._exchange.finish()
            kind = CheckpointAssertionError if plan["tags_differ"] else CheckpointError
            raise kind(plan["error"], where=str(request.root))
        if not request.is_node_local and str(request.root.absolute()) != plan["root"]:
            self._request = request = replace(request, root=place_of(plan["root"]))
        self._save_id = plan["save_id"]
        self._draft = draft_of(request.root, plan["tag"], self._save_id, is_new=plan["is_new"])
        if request.is_node_local:
            self._make_room_on_every_host()

    def _plan(self, said: list[list[Any]]) -> dict[str, Any]:
        request, save_id = self._request, uuid.uuid4().hex[:8]
        plan: dict[str, Any] = {
            "save_id": save_id,
            "tag": request.tag,
            "root": str(request.root.absolute()),
            "is_new": True,
            "error": None,
            "tags_differ": False,
        }
        tags, roots, steps = ([str(value) for value in column] for column in zip(*said, strict=True))
        for what, values in (("folders", roots), ("steps", steps), ("tags", tags)):
            if len(set(values)) == 1 or (what == "folders" and request.is_node_local):
                continue
            text = f"ranks save to different {what}: {_listed(values)}"
            if what == "steps" or request.tag_validation == "Fail":
                return {**plan, "error": text, "tags_differ": what == "tags"}
            if request.tag_validation == "Warn":
                get_logger().warning("%s; the %s of rank 0 is used", text, what[:-1])
        if request.has_deepspeed and not isinstance(request.root, Path):
            return {**plan, "error": "checkpoint.format deepspeed and a folder in a store exclude each other"}
        try:
            plan["is_new"] = begin(request.root, request.tag, save_id).is_new
        except OSError as error:
            plan["error"] = f"no room can be made: {error.strerror}"
        except CheckpointError as error:
            plan["error"] = str(error)
        return plan

    def _make_room_on_every_host(self) -> None:
        request, error = self._request, None
        if not isinstance(self.draft.path, Path):
            raise CheckpointError(
                "use_node_local_storage and a folder in a store exclude each other", where=str(request.root)
            )
        if request.is_node_leader and self._exchange.rank != 0:
            try:
                make_room(self.draft)
            except OSError as raised:
                error = f"no room can be made: {raised.strerror}"
        failed = self._exchange.all_succeeded(error)
        if failed:
            raise CheckpointError(failed, where=str(request.root))

    def write(
        self,
        data: RankData,
        shared: SharedData,
        copies: Copies | None = None,
        failure: str | None = None,
    ) -> Place:
        """Write this rank's files, and on rank 0 commit when all have. Returns the folder of the checkpoint.

        copies: written in place of the live tensors. failure: why this rank has nothing to write. Raises:
        CheckpointError on every rank where any rank could not write; what was saved before is as it was then.
        """
        written, error = None, failure
        try:
            written = None if failure else self._write_rank(data, copies)
        except Exception as raised:  # noqa: BLE001  # whatever it is: the other ranks wait for this one's report
            error = error_text(raised)
        report = None if written is None else _plain(written)
        reports = self._exchange.gather([error, data.writer, report], timeout_s=WRITE_TIMEOUT_S)
        manifest, failed = (None, []) if reports is None else self._described(reports, shared)
        if self._request.has_deepspeed:
            manifest, failed = self._with_deepspeed(manifest, failed)
        outcome = None if reports is None else self._finish(manifest, failed)
        outcome = self._exchange.broadcast(outcome, timeout_s=WRITE_TIMEOUT_S)
        if self._request.is_node_local:
            missing = self._commit_on_every_host(outcome)
            outcome = f"was not saved on every host: {missing}" if missing else None
        self._exchange.finish()
        if outcome is not None:
            raise CheckpointError(f"{self._request.tag} {outcome}", where=str(self._request.root))
        return self.draft.root / self.draft.tag

    def _write_rank(self, data: RankData, copies: Copies | None) -> _Written:
        stem = f"rank-{self._exchange.rank:05}"
        tensors_name, facts_name = self.draft.file(stem, ".safetensors"), self.draft.file(stem, ".json")
        plain, private = data.private.plain, data.private.tensors
        items = [item for contents in data.contents for item in contents.items]
        tensors = {item.key: _described(item.dtype, item.shape) for item in items}
        tensors |= {f"private/{key}": _described(each.dtype, each.shape) for key, each in private.items()}
        ranges = {item.key: [item.elements.start, item.elements.stop] for item in items}
        path = self.draft.path / tensors_name
        writer = TensorFileWriter(path, tensors, {"ranges": json.dumps(ranges), "rank": str(self._exchange.rank)})
        with contextlib.closing(writer):
            if copies is None:
                arriving = staged(live_tensors(data.contents), self._copier)
                for key, pieces in itertools.groupby(arriving, key=operator.itemgetter(0)):
                    writer.write_pieces(key, (piece for _, piece in pieces))
            else:
                copies.arrival.synchronize()
                for key, tensor in copies.tensors.items():
                    writer.write(key, bytes_of(tensor))
            for key, tensor in private.items():
                writer.write(f"private/{key}", bytes_of(tensor))
            sums = writer.finish()
        facts = json.dumps({"rank": self._exchange.rank, "sums": sums.plain(), "private": plain}).encode()
        write_file(self.draft.path / facts_name, facts)
        records = {
            tensors_name: FileRecord(writer.num_bytes, None),
            facts_name: FileRecord(len(facts), digest_of(facts)),
        }
        layouts = [each.layout for each in data.contents]
        units = layouts_to_json([layout for layout in layouts if layout.first_rank == data.writer])
        return _Written(tensors_name, facts_name, records, _params_of(data.contents), units)

    def _described(self, reports: list[list[Any]], shared: SharedData) -> tuple[Manifest | None, list[str]]:
        """Write what all ranks share; return the manifest, or what went wrong, by rank."""
        failed = [f"rank {rank}: {error}" for rank, (error, _, _) in enumerate(reports) if error]
        try:
            if not failed:
                self._add_script()
                return self._describe(reports, shared), []
        except Exception as error:  # noqa: BLE001  # as above
            failed = [f"rank 0: {error_text(error)}"]
        return None, failed

    def _with_deepspeed(self, manifest: Manifest | None, failed: list[str]) -> tuple[Manifest | None, list[str]]:
        """Write DeepSpeed's files of this rank; return the manifest with those of all. Collective.

        manifest: on rank 0; None: nothing is to be committed, and `failed` says why.
        """
        text = None if manifest is None else manifest.text().decode()
        text = self._exchange.broadcast(text, timeout_s=WRITE_TIMEOUT_S)
        if text is None:
            return None, failed
        error, records = None, {}
        try:
            written = Manifest.of_text(text.encode(), str(self.draft.path))
            records = {key: vars(each) for key, each in write_beside(self.draft, written, self._exchange.rank).items()}
        except Exception as raised:  # noqa: BLE001  # as above
            error = error_text(raised)
        reports = self._exchange.gather([error, records], timeout_s=WRITE_TIMEOUT_S)
        if reports is None or manifest is None:
            return None, []
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(reports) if error]
        found = {name: FileRecord(**record) for _, of_rank in reports for name, record in of_rank.items()}
        files = dict(sorted({**manifest.files, **found}.items()))
        return (None, failed) if failed else (replace(manifest, files=files), [])

    def _finish(self, manifest: Manifest | None, failed: list[str]) -> str | None:
        """Commit, unless something has failed. Returns what became of the save where something went wrong."""
        try:
            if manifest is not None:
                path = commit(self.draft, manifest)
                return self._name_latest(path) if self._request.saves_latest else None
        except Exception as error:  # noqa: BLE001  # as above
            failed = [f"rank 0: {error_text(error)}"]
        abandon(self.draft)
        return f"was not saved: {'; '.join(failed)}"

    @staticmethod
    def _name_latest(path: Place) -> str | None:
        """Have `latest` name a checkpoint that has been committed; return what went wrong, or None."""
        try:
            set_latest(path.parent, path.name)
        except (OSError, CheckpointError) as error:
            return f"was saved, but `latest` does not name it: rank 0: {error_text(error)}"
        return None

    def _describe(self, reports: list[list[Any]], shared: SharedData) -> Manifest:
        """Write the files of what all ranks share; return the manifest of the whole."""
        records: dict[str, FileRecord] = {}
        by_writer: dict[int, tuple[int, dict[str, Any]]] = {}
        params: dict[str, dict[str, Any]] = {}
        for rank, (_, writer, report) in enumerate(reports):
            by_writer[writer] = rank, report
            records |= {name: FileRecord(**record) for name, record in report["records"].items()}
            for name, facts in report["params"].items():
                params.setdefault(name, {}).update(facts)
        writers = [by_writer[writer] for writer in range(len(by_writer))]
        plain, tensors = shared.run.plain, shared.run.tensors
        state: dict[str, Any] = {
            "run": plain,
            "units": [unit for _, report in writers for unit in report["units"]],
            "params": params,
            "writers": [rank for rank, _ in writers],
            **shared.facts,
        }
        if tensors:
            name = self.draft.file("state", ".safetensors")
            state["tensors"] = name
            described = {key: _described(each.dtype, each.shape) for key, each in tensors.items()}
            with contextlib.closing(TensorFileWriter(self.draft.path / name, described, {})) as writer:
                for key, tensor in tensors.items():
                    writer.write(key, bytes_of(tensor))
                state["sums"] = writer.finish().plain()
            records[name] = FileRecord(writer.num_bytes, None)
        name, text = self.draft.file("state", ".json"), json.dumps(state).encode()
        write_file(self.draft.path / name, text)
        records[name] = FileRecord(len(text), digest_of(text))
        script = (self.draft.path / SCRIPT.name).read_bytes()
        records[SCRIPT.name] = FileRecord(len(script), digest_of(script))
        request = self._request
        return Manifest(
            tag=self.draft.tag,
            step=request.step,
            save_id=self._save_id,
            world_size=self._exchange.world_size,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
            state=name,
            ranks=tuple((report["tensors"], report["facts"]) for _, report in writers),
            files=dict(sorted(records.items())),
            is_node_local=request.is_node_local,
        )

    def _add_script(self) -> None:
        """Put the script that needs no package into the checkpoint, and beside it. Raises: OSError."""
        content, path, beside = SCRIPT.read_bytes(), self.draft.path / SCRIPT.name, self.draft.root / SCRIPT.name
        if not path.exists():
            replace_file(path, content)  # never a part of it: a later save of this tag takes over what is there
            make_executable(path)
        if not beside.exists() or beside.read_bytes() != content:
            replace_file(beside, content)
            make_executable(beside)
        elif isinstance(beside, Path):
            temporary_name(beside).unlink(missing_ok=True)  # of a save that was killed

    def _commit_on_every_host(self, outcome: str | None) -> str | None:
        """Have the other hosts commit too: they get what rank 0 has written of all ranks."""
        request, final, error = self._request, self.draft.root / self.draft.tag, None
        texts: dict[str, str] | None = None
        if self._exchange.rank == 0 and outcome is None:
            try:
                names = [name for name in read_manifest(final).files if not name.startswith("rank-")]
                texts = {name: base64.b64encode((final / name).read_bytes()).decode() for name in (MANIFEST, *names)}
            except (OSError, CheckpointError) as raised:
                outcome = error_text(raised)
        texts = self._exchange.broadcast(texts, timeout_s=WRITE_TIMEOUT_S)
        if request.is_node_leader and self._exchange.rank != 0:
            try:
                if texts is None:
                    abandon(self.draft)
                else:
                    manifest = Manifest.of_text(base64.b64decode(texts.pop(MANIFEST)), str(final))
                    for name, text in texts.items():
                        if not (self.draft.path / name).exists():
                            write_file(self.draft.path / name, base64.b64decode(text))
                    commit(self.draft, manifest)
                    if request.saves_latest:
                        set_latest(request.root, self.draft.tag)
            except (OSError, CheckpointError) as raised:
                error = error_text(raised)
        error = outcome if self._exchange.rank == 0 else error
        return self._exchange.all_succeeded(error, timeout_s=WRITE_TIMEOUT_S)


def _described(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    if dtype not in FILE_DTYPES:
        raise CheckpointError(f"tensors of type {dtype} cannot be saved")
    return FILE_DTYPES[dtype], tuple(shape)


def _params_of(contents: list[UnitContents]) -> dict[str, dict[str, Any]]:
    """Return what the rank that writes a parameter's first element says of its states."""
    found: dict[str, dict[str, Any]] = {}
    for unit in contents:
        for item in unit.items:
            kind, _, rest = item.key.partition("/")
            if kind == "weight" or item.elements.start != 0:
                continue
            state, _, name = rest.partition("/")
            facts = found.setdefault(name, {})
            facts.setdefault("states" if kind == "state" else "whole", {})[state] = dtype_name(item.dtype)
        for name, scalars in unit.scalars.items():
            plain = {state: _scalar(value) for state, value in scalars.items()}
            found.setdefault(name, {})["scalars"] = plain
    return found


def _scalar(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": dtype_name(value.dtype), "value": value.item()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"an optimizer state of type {type(value).__name__} cannot be saved")


def _plain(written: _Written) -> dict[str, Any]:
    records = {name: vars(record) for name, record in written.records.items()}
    return {**vars(written), "records": records}


def _listed(values: list[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on rank {', '.join(map(str, found[:8]))}" for value, found in ranks.items())


# ---- Beside the training ----
# At most one save is in flight. Its copies take as many bytes as this rank's files, and are kept for the next save.

_THREAD = "launch-checkpoint"


def wait_for_saves() -> None:
    """Wait until no engine of this process saves any more, also one that is gone. What has failed was logged."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join()


class BackgroundSaver:
    """Writes copies in a thread."""

    def __init__(self, room: CopyRoom, *, is_rank0: bool) -> None:
        self.room = room
        self._is_rank0 = is_rank0
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Run `write` in a thread; the process does not end before it has. The save before must have ended."""

        def run() -> None:
            try:
                write()
            except Exception as error:  # noqa: BLE001  # whatever it is: `wait_for_checkpoint` must not say all is well
                said = f"the save has failed: {type(error).__name__}: {error}"
                self._error = error if isinstance(error, CheckpointError) else CheckpointError(said)
                if self._is_rank0:
                    get_logger().error("%s; the training continues without this checkpoint", self._error)

        self._thread = threading.Thread(target=run, name=_THREAD, daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save in flight has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_error(self) -> CheckpointError | None:
        """Return why the last save failed, once; None where it did not."""
        error, self._error = self._error, None
        return error
