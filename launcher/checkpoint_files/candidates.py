"""What a run may continue from."""

from __future__ import annotations

from pathlib import Path

from launcher.base.errors import CheckpointError
from launcher.checkpoint_files.manifest import MANIFEST, Manifest, read_json, read_manifest
from launcher.checkpoint_files.retention import by_age


def candidates(root: Path) -> tuple[list[Path], list[CheckpointError]]:
    """Return the checkpoints of a folder, the one saved last at first, and what is wrong with those set aside.

    Nothing of their tensors is read: those are verified as they are loaded.
    """
    good: list[Path] = []
    damaged: list[CheckpointError] = []
    committed = {each.path: each.manifest for each in reversed(by_age(root))}
    others = [path for path in (root.iterdir() if root.is_dir() else ()) if path not in committed]
    for path in others:
        if not path.name.startswith(".") and (path / MANIFEST).exists():
            try:
                read_manifest(path)
            except CheckpointError as error:
                damaged.append(error)
    for path, manifest in committed.items():
        try:
            _look_at(path, manifest)
            good.append(path)
        except CheckpointError as error:
            damaged.append(error)
    return good, damaged


def _look_at(folder: Path, manifest: Manifest) -> None:
    """Raises: CheckpointError for a file that is missing or has another size, and a damaged state."""
    read_json(folder, manifest.state, manifest)
    for name, record in manifest.files.items():
        path = folder / name
        try:
            num_bytes = path.stat().st_size
        except FileNotFoundError:
            if manifest.is_node_local:  # another host has it
                continue
            raise CheckpointError("it is missing", where=str(path)) from None
        except OSError as error:
            raise CheckpointError(f"it cannot be read: {error.strerror}", where=str(path)) from None
        if num_bytes != record.num_bytes:
            message = f"it has {num_bytes} bytes, the manifest says {record.num_bytes}"
            raise CheckpointError(message, where=str(path))
