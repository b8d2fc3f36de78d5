"""A folder of checkpoints: what is in it, and how one is added."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import CheckpointError
from launcher.checkpoint_files.manifest import MANIFEST, Manifest, check_tag, read_manifest
from launcher.checkpoint_files.place import Place, RemotePath, children

LATEST = "latest"
_replacing = threading.Lock()  # saves of several engines may end in several threads, and share a file such as `latest`
_OF_A_SAVE = re.compile(r"(rank-\d{5,}|state)(-[0-9a-f]{8})?\.(safetensors|json)")
# DeepSpeed's files of models, of optimizers and of experts.
_DEEPSPEEDS = re.compile(
    r"(?P<stem>(zero_pp_rank_\d+_|layer_\d+_expert_\d+_)?mp_rank_00_model_states"
    r"|((bf16_)?zero_pp|expp)_rank_\d+_mp_rank_00_optim_states)(?P<save>-[0-9a-f]{8})?\.pt"
)


@dataclass(frozen=True)
class Committed:
    """A checkpoint that was saved completely."""

    path: Place
    manifest: Manifest


def committed_in(root: Place) -> list[Committed]:
    """Return the checkpoints of a folder, the newest last: by step, then by time. Damaged manifests are left out."""
    found = []
    for path in children(root):
        if path.name.startswith(".") or not (path / MANIFEST).is_file():
            continue
        try:
            found.append(Committed(path, read_manifest(path)))
        except CheckpointError:
            continue
    return sorted(found, key=lambda each: (each.manifest.step, each.manifest.created))


def latest_tag(root: Place) -> str | None:
    """Return the tag that `latest` names; None where there is no such file. Raises: CheckpointError for nonsense."""
    path = root / LATEST
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"it cannot be read: {error}", where=str(path)) from None
    try:
        return check_tag(text.strip())
    except CheckpointError as error:
        raise CheckpointError(f"it names no checkpoint: {text[:80]!r}", where=str(path)) from error


def set_latest(root: Place, tag: str) -> None:
    """Have `latest` name a checkpoint. Raises: OSError."""
    replace_file(root / LATEST, tag.encode())


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being saved. In a store it is written where it will be, under names of its own."""

    root: Place
    tag: str
    path: Place  # where its files are written
    save_id: str

    @property
    def is_new(self) -> bool:
        """Whether the tag is new: then the folder appears with the commit."""
        return self.path.name != self.tag

    @property
    def suffix(self) -> str:
        """Of the names of its files."""
        return "" if self.is_new else f"-{self.save_id}"

    @property
    def marker(self) -> str:
        """The name of an empty file in a new folder: it is the folder of this save until the commit."""
        return f".save-{self.save_id}.tmp"

    def file(self, stem: str, extension: str) -> str:
        """Return the name of a file."""
        return f"{stem}{self.suffix}{extension}"


def begin(root: Place, tag: str, save_id: str) -> Draft:
    """Make room for a checkpoint; one of the same tag stays. Raises: OSError, CheckpointError for the tag."""
    if isinstance(root, RemotePath):
        root.exists()  # what is wrong with the store is said before anything is computed or written
        return draft_of(root, check_tag(tag), save_id, is_new=False)
    make_folder(root)
    draft = draft_of(root, check_tag(tag), save_id, is_new=not (root / tag).exists())
    make_room(draft)
    return draft


def make_room(draft: Draft) -> None:
    """Make the local folder that a draft is written to. Raises: OSError."""
    assert isinstance(draft.path, Path)
    if draft.is_new and draft.path.exists():
        shutil.rmtree(draft.path)  # of a save that was killed
    make_folder(draft.path)
    if draft.is_new:
        (draft.path / draft.marker).touch()


def draft_of(root: Place, tag: str, save_id: str, *, is_new: bool) -> Draft:
    """Return the draft that another process has begun."""
    return Draft(root, tag, root / (f".{tag}.tmp" if is_new else tag), save_id)


def commit(draft: Draft, manifest: Manifest) -> Place:
    """Make a draft the checkpoint of its tag, with one rename or put; the content of its files is on the disk.

    Raises: OSError, CheckpointError.
    """
    final = draft.root / draft.tag
    _check_own(draft, manifest)
    sync_folder(draft.path)  # the names of its files are there before the manifest that tells of them
    replace_file(draft.path / MANIFEST, manifest.text())
    if draft.is_new and isinstance(draft.path, Path):
        (draft.path / draft.marker).unlink()
        try:
            draft.path.rename(str(final))
        except OSError:
            shutil.rmtree(draft.path, ignore_errors=True)
            raise
        sync_folder(draft.root)
    else:
        _remove_others(final, manifest)
        _give_deepspeeds_names(final, manifest)
    return final


def _check_own(draft: Draft, manifest: Manifest) -> None:
    """Raises: CheckpointError where another job has removed what this save wrote, or has put its own in this place."""
    names = {each.name for each in children(draft.path)}
    expected = set() if manifest.is_node_local else {*manifest.files}  # of other hosts, some are there
    if draft.is_new:
        expected.add(draft.marker)
    if not expected <= names:
        raise CheckpointError(
            f"{min(expected - names)} of this save is gone: it was removed, or another job saves here",
            where=str(draft.path),
            hint="give every job a folder of its own",
        )


def _remove_others(path: Place, manifest: Manifest) -> None:
    """Remove what earlier saves of a tag have left, also those that were killed. What cannot be removed stays."""
    with contextlib.suppress(CheckpointError):  # of a store
        for found in path.iterdir():
            if is_of_a_save(found.name) and found.name not in manifest.files:
                with contextlib.suppress(OSError):
                    found.unlink()


def is_of_a_save(name: str) -> bool:
    """Tell whether a file's name is one that saves give, to what ranks write and to what they share."""
    return _OF_A_SAVE.fullmatch(name) is not None or is_deepspeeds(name)


def is_deepspeeds(name: str) -> bool:
    """Tell whether a file is one that is written for DeepSpeed, beside ours."""
    return _DEEPSPEEDS.fullmatch(name) is not None


def names_in(manifest: Manifest) -> set[str]:
    """Return the names of all files of a checkpoint, further names of those that DeepSpeed knows by another one too."""
    return {MANIFEST, *manifest.files, *_deepspeeds_names(manifest)}


def _deepspeeds_names(manifest: Manifest) -> dict[str, str]:
    """Return the names that DeepSpeed looks for -> those of the save, where these are others."""
    found = filter(None, map(_DEEPSPEEDS.fullmatch, manifest.files))
    return {f"{each['stem']}.pt": each.string for each in found if each["save"]}


def _give_deepspeeds_names(path: Place, manifest: Manifest) -> None:
    """Link DeepSpeed's names to the files of a save of a tag that was there: the ones of before are gone by now.

    So DeepSpeed finds files of one save or misses some, and never those of two. Raises: OSError.
    """
    if isinstance(path, Path):  # stores are refused
        for name, own in _deepspeeds_names(manifest).items():
            os.link(path / own, path / name)


def is_temporary(name: str) -> bool:
    """Tell whether a name is one of `temporary_name`, of a folder that a first save writes to, or of its marker."""
    return name.startswith(".") and name.endswith(".tmp")


def abandon(draft: Draft) -> None:
    """Remove what a save that failed has written, as far as that is possible, unless it has been committed."""
    if draft.is_new and isinstance(draft.path, Path):
        if (draft.path / draft.marker).exists():  # else another job's save has taken its place
            shutil.rmtree(draft.path, ignore_errors=True)
        return
    with contextlib.suppress(OSError, CheckpointError):  # of a manifest that cannot be read nothing is removed
        manifest = draft.path / MANIFEST
        named = read_manifest(draft.path).files if manifest.exists() else {}
        for path in draft.path.glob(f"*{draft.suffix}.*"):
            if path.name not in named:
                path.unlink(missing_ok=True)


def write_file(path: Place, content: bytes) -> None:
    """Write a new file and wait until it is on the disk. Raises: OSError, also where a local one exists."""
    if isinstance(path, RemotePath):
        path.write_bytes(content)
        return
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def temporary_name(path: Path) -> Path:
    """Return where the content of a file is written before it takes the file's name."""
    return path.with_name(f".{path.name}.tmp")


def replace_file(path: Place, content: bytes) -> None:
    """Write a file such that either the old content or the new one is there, whatever happens. Raises: OSError."""
    if isinstance(path, RemotePath):
        path.write_bytes(content)
        return
    beside = temporary_name(path)
    with _replacing:
        beside.unlink(missing_ok=True)
        write_file(beside, content)
        beside.replace(path)
    sync_folder(path.parent)


def make_folder(path: Place) -> None:
    """Make a folder, and those above it that are missing; then their names are on the disk. Raises: OSError."""
    if isinstance(path, RemotePath):
        return  # stores have no folders
    path = path.absolute()
    missing = [each for each in (path, *path.parents) if not each.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "it is a file, or a link that leads nowhere", str(path)) from None
    for each in missing:
        with contextlib.suppress(PermissionError):  # of a folder that one may add to and not read
            sync_folder(each.parent)


def make_executable(path: Place) -> None:
    """Have a local file run as a program. Raises: OSError."""
    if isinstance(path, Path):
        path.chmod(0o755)


def sync_folder(path: Place) -> None:
    """Wait until the names in a folder are on the disk. Raises: OSError."""
    if isinstance(path, RemotePath):
        return  # what was put is there
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
