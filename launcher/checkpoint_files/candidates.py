"""What a run may continue from."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.base.errors import CheckpointError
from launcher.checkpoint_files.manifest import MANIFEST, Manifest, read_json, read_manifest
from launcher.checkpoint_files.place import Place, children, size_of
from launcher.checkpoint_files.retention import by_age


def candidates(root: Place) -> Iterator[Place | CheckpointError]:
    """Yield the checkpoints of a folder, the one saved last at first, and in place of a damaged one what is wrong.

    Those without a readable manifest come first: when they were saved is not known. Nothing of tensors is read: they
    are verified as they are loaded. Each checkpoint is looked at when it is its turn, for it may have many files.
    """
    committed = {each.path: each.manifest for each in reversed(by_age(root))}
    for path in children(root):
        if path not in committed and not path.name.startswith(".") and (path / MANIFEST).exists():
            try:
                read_manifest(path)
            except CheckpointError as error:
                yield error
    for path, manifest in committed.items():
        try:
            _look_at(path, manifest)
        except CheckpointError as error:
            yield error
        else:
            yield path


def _look_at(folder: Place, manifest: Manifest) -> None:
    """Raises: CheckpointError for a file that is missing or has another size, and a damaged state."""
    read_json(folder, manifest.state, manifest)
    for name, record in manifest.files.items():
        path = folder / name
        try:
            num_bytes = size_of(path)
        except FileNotFoundError:
            if manifest.is_node_local:  # another host has it
                continue
            raise CheckpointError("it is missing", where=str(path)) from None
        except OSError as error:
            raise CheckpointError(f"it cannot be read: {error.strerror}", where=str(path)) from None
        if num_bytes != record.num_bytes:
            message = f"it has {num_bytes} bytes, the manifest says {record.num_bytes}"
            raise CheckpointError(message, where=str(path))
