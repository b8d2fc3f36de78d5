"""The manifest of a checkpoint: every file that belongs to it. Its presence is the commit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launcher.base.errors import CheckpointError
from launcher.checkpoint_files.blocks import digest_of
from launcher.checkpoint_files.place import Place, size_of

MANIFEST = "manifest.json"
FORMAT, VERSION = "launch checkpoint", 1
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_MAX_TAG_BYTES = 200
_RESERVED = ("latest", "zero_to_fp32.py")  # files beside the checkpoints


@dataclass(frozen=True)
class FileRecord:
    """One file, by the name it has in the folder of its checkpoint."""

    num_bytes: int
    checksum: str | None  # None: of a file of tensors, whose checksums are in the JSON file beside it


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is made of."""

    tag: str
    step: int  # optimizer steps taken
    save_id: str  # of this save: another one of the same tag has another
    world_size: int
    created: str  # UTC, ISO 8601
    state: str  # file with what all ranks share
    ranks: tuple[tuple[str, str], ...]  # by writer: file of tensors, JSON file
    files: dict[str, FileRecord]  # all of them
    is_node_local: bool = False  # every host has the files of its own ranks only

    def text(self) -> bytes:
        """Return the file's content."""
        plain = asdict(self)
        plain["ranks"] = [list(pair) for pair in self.ranks]
        plain = {"format": FORMAT, "version": VERSION, **plain}
        return _rendered({"checksum": digest_of(_canonical(plain)), "manifest": plain})

    @classmethod
    def of_text(cls, text: bytes, where: str) -> Manifest:
        """Return what `text` returned. Raises: CheckpointError for anything else, down to the last bit."""
        try:
            outer = json.loads(text)
            plain = outer["manifest"]
            if plain["format"] != FORMAT:
                raise ValueError("another format")
            if plain["version"] != VERSION:
                raise CheckpointError(
                    f"this is version {plain['version']} of the format, this release reads version {VERSION}",
                    where=where,
                    hint="use the release of launch that saved it, or a newer one",
                )
            is_same = outer["checksum"] == digest_of(_canonical(plain)) and _rendered(outer) == text
            if not is_same:
                raise CheckpointError("it is damaged: its checksum does not fit its content", where=where)
            return cls._of_plain(plain, where)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CheckpointError("this is not the manifest of a checkpoint, or a damaged one", where=where) from None

    @classmethod
    def _of_plain(cls, plain: Mapping[str, Any], where: str) -> Manifest:
        files = {name: FileRecord(**record) for name, record in plain["files"].items()}
        ranks = tuple((str(tensors), str(facts)) for tensors, facts in plain["ranks"])
        for name in [*files, plain["state"], *(name for pair in ranks for name in pair)]:
            if not FILE_NAME.fullmatch(name):
                raise CheckpointError(f"{name!r} is not the name of a file of a checkpoint", where=where)
            if name not in files:
                raise CheckpointError(f"nothing is known of {name}", where=where)
        numbers = [plain["step"], plain["world_size"], *(record.num_bytes for record in files.values())]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a size or a step that is not a number")
        texts = {key: str(plain[key]) for key in ("tag", "save_id", "created", "state")}
        return cls(
            **texts,
            step=plain["step"],
            world_size=plain["world_size"],
            ranks=ranks,
            files=files,
            is_node_local=bool(plain["is_node_local"]),
        )


def _canonical(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def _rendered(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, indent=1).encode() + b"\n"


def check_tag(tag: str) -> str:
    """Return a tag that can name a folder. Raises: CheckpointError for one that cannot."""
    is_word = tag.isprintable() and tag == tag.strip() and len(tag.encode()) <= _MAX_TAG_BYTES
    if not is_word or not tag or "/" in tag or tag.startswith(".") or tag in _RESERVED:
        raise CheckpointError(
            f"the tag {tag[:80]!r} cannot name a folder of its own",
            hint="use one without slashes that does not begin with a dot, such as global_step100;"
            f" it may have {_MAX_TAG_BYTES} bytes",
        )
    return tag


def read_manifest(folder: Place) -> Manifest:
    """Return the manifest of a checkpoint. Raises: CheckpointError where there is none, or a damaged one."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            "this folder is not a checkpoint of launch: it has no manifest.json"
            if folder.is_dir()
            else "there is no checkpoint",
            where=str(folder),
            hint="a save that did not end leaves none; what DeepSpeed saved is read by `launch checkpoint import`",
        ) from None
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error.strerror}", where=str(path)) from None
    manifest = Manifest.of_text(text, str(path))
    if manifest.tag != folder.name and not folder.name.startswith("."):
        raise CheckpointError(f"it is the manifest of {manifest.tag}", where=str(path))
    return manifest


def read_small_file(folder: Place, name: str, manifest: Manifest) -> bytes:
    """Return the content of a file that has a checksum. Raises: CheckpointError for one that is damaged or missing."""
    path, record = folder / name, manifest.files[name]
    try:
        is_as_long = size_of(path) == record.num_bytes  # else it may be of any length
        text = path.read_bytes() if is_as_long else b""
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error.strerror}", where=str(path)) from None
    if not is_as_long or digest_of(text) != record.checksum:
        raise CheckpointError("it is damaged: it is not what the manifest says was saved", where=str(path))
    return text


def read_json(folder: Place, name: str, manifest: Manifest) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint. Raises: as `read_small_file`."""
    text = read_small_file(folder, name, manifest)
    try:
        plain = json.loads(text)
        if isinstance(plain, dict):
            return plain
    except (ValueError, RecursionError):
        pass
    raise CheckpointError("this is not a file of a checkpoint", where=str(folder / name))
