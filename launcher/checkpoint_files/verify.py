"""Read all of a checkpoint: is every byte as it was saved, and every element there exactly once?"""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.base.errors import CheckpointError
from launcher.checkpoint_files.blocks import TensorFile, TensorSums, digest_of_file
from launcher.checkpoint_files.folder import is_deepspeeds
from launcher.checkpoint_files.manifest import Manifest, read_json, read_manifest
from launcher.checkpoint_files.place import Place, reader_of

Ranges = dict[str, list[tuple[int, int]]]  # by key of a tensor: which elements the files have
_MAX_SAID = 8  # of gaps and overlaps: one damaged list of ranges makes one for every parameter


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    file: str  # its whole path
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.message}"


def verify(folder: Place) -> list[Finding]:
    """Return everything that is wrong with a checkpoint; nothing when it is as it was saved. folder: of one tag.

    Where every host has the files of its own ranks, those of others are not looked for.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return _findings(error)
    found: list[Finding] = []
    state: Mapping[str, Any] | None = None
    try:
        state = read_json(folder, manifest.state, manifest)
        if state.get("tensors") is not None:
            _verify_tensors(folder, str(state["tensors"]), manifest.state, state, manifest)
    except CheckpointError as error:
        found += _findings(error)
    ranges: Ranges = defaultdict(list)
    is_whole = True
    for tensors, facts in manifest.ranks:
        if manifest.is_node_local and not (folder / facts).exists():
            is_whole = False
            continue
        try:
            _verify_rank(folder, tensors, facts, manifest, ranges)
        except CheckpointError as error:
            found += _findings(error)
    found += [
        finding for name in filter(is_deepspeeds, manifest.files) for finding in _verify_file(folder, name, manifest)
    ]
    if not found and is_whole and state is not None:
        where = str(folder / manifest.state)
        found = [Finding(where, message) for message in _coverage(state, ranges)][:_MAX_SAID]
    return found


def _findings(error: CheckpointError) -> list[Finding]:
    return [Finding(each.where or "", each.message) for each in error.diagnostics]


def _verify_rank(folder: Place, tensors: str, facts_name: str, manifest: Manifest, ranges: Ranges) -> None:
    """Verify the files of one rank, and add to `ranges` what they have. Raises: CheckpointError."""
    facts = read_json(folder, facts_name, manifest)
    file = _verify_tensors(folder, tensors, facts_name, facts, manifest)
    try:
        for key, (start, stop) in json.loads(file.metadata["ranges"]).items():
            shape = file.entry(str(key)).shape
            if not str(key).startswith("whole/") and math.prod(shape) != stop - start:
                raise ValueError("a range that its tensor does not have")
            ranges[str(key)].append((int(start), int(stop)))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise CheckpointError("which elements it has cannot be read", where=str(folder / tensors)) from None


def _verify_file(folder: Place, name: str, manifest: Manifest) -> list[Finding]:
    """Verify a file that is only compared with its checksum."""
    try:
        reader = reader_of(folder / name)
        with contextlib.closing(reader):
            is_same = reader.num_bytes == manifest.files[name].num_bytes
            is_same = is_same and digest_of_file(reader) == manifest.files[name].checksum
    except OSError as error:
        return [Finding(str(folder / name), f"it cannot be read: {error.strerror}")]
    return [] if is_same else [Finding(str(folder / name), "it is damaged: it is not what the manifest says was saved")]


def _verify_tensors(
    folder: Place, tensors: str, facts_name: str, facts: Mapping[str, Any], manifest: Manifest
) -> TensorFile:
    """Read a file of tensors; return it, closed. facts: of the file that has its checksums."""
    plain = facts.get("sums")
    sums = TensorSums.of_plain(plain if isinstance(plain, Mapping) else {}, str(folder / facts_name))
    record = manifest.files.get(tensors)
    if record is None:
        raise CheckpointError(f"the manifest does not name {tensors}", where=str(folder / facts_name))
    with TensorFile(folder / tensors, sums, record.num_bytes) as file:
        for key in file.entries:
            file.verify(key)
        return file


def _coverage(state: Mapping[str, Any], ranges: Ranges) -> Iterator[str]:
    """Yield every tensor whose elements are not there exactly once."""
    try:
        expected = _expected(state)
    except (KeyError, TypeError, ValueError, AttributeError):
        yield "the layout of its units cannot be read"
        return
    for key, numel in expected.items():
        end = 0
        for start, stop in sorted(ranges.get(key, ())):
            if start != end:
                break
            end = stop
        if end != numel or sum(stop - start for start, stop in ranges.get(key, ())) != numel:
            kind = "are there twice" if sum(b - a for a, b in ranges.get(key, ())) > numel else "are missing"
            yield f"elements of {key} {kind}: it has {numel}, and the files have {_listed(ranges.get(key, []))}"
    for key in ranges.keys() - expected.keys():
        if not key.startswith("whole/"):
            yield f"{key} is in a file, and not in the list of parameters"


def _expected(state: Mapping[str, Any]) -> dict[str, int]:
    """Return how many elements each tensor must have, by key."""
    excluded, found = set(state.get("excluded", ())), {}
    for unit in state["units"]:
        for param in unit["params"]:
            # Of one that several ranks have in parts all of them are listed, with the shape of the whole.
            name, numel = param["name"], math.prod((param.get("split") or param)["shape"])
            if name in excluded:
                continue
            found[f"weight/{name}"] = numel
            for states in state["params"].get(name, {}).get("states", {}):
                found[f"state/{states}/{name}"] = numel
    return found


def _listed(ranges: list[tuple[int, int]]) -> str:
    text = ", ".join(f"{start} to {stop}" for start, stop in sorted(ranges)[:_MAX_SAID])
    return (text or "none") + (", ..." if len(ranges) > _MAX_SAID else "")
