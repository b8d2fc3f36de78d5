"""Small checkpoints, written without torch and without an engine."""

from __future__ import annotations

import contextlib
import datetime
import json
from pathlib import Path

from launcher.checkpoint_files.blocks import TensorFileWriter, digest_of
from launcher.checkpoint_files.folder import begin, commit, set_latest, write_file
from launcher.checkpoint_files.manifest import FileRecord, Manifest

SHAPES = {"embed.weight": (7, 4), "head.bias": (5,)}
_EPOCH = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)


def write_checkpoint(
    root: Path,
    step: int,
    *,
    world_size: int = 2,
    after_s: float | None = None,
    is_latest: bool = True,
    ranges: dict[int, dict[str, tuple[int, int]]] | None = None,
) -> Path:
    """Save a checkpoint of two parameters, each divided among all ranks.

    after_s: when, in seconds since a fixed moment; default: by step. ranges: rank -> key -> what it has in place of its
    part.
    """
    draft = begin(root, f"global_step{step}", f"{step:08x}")
    records: dict[str, FileRecord] = {}

    def add(name: str, plain: object) -> None:
        text = json.dumps(plain).encode()
        write_file(draft.path / name, text)
        records[name] = FileRecord(len(text), digest_of(text))

    ranks = []
    for rank in range(world_size):
        parts = {
            f"{kind}/{name}": _part(shape, rank, world_size)
            for name, shape in SHAPES.items()
            for kind in ("weight", "state/exp_avg")
        } | (ranges or {}).get(rank, {})
        tensors_name, facts_name = draft.file(f"rank-{rank:05}", ".safetensors"), draft.file(f"rank-{rank:05}", ".json")
        writer = TensorFileWriter(
            draft.path / tensors_name,
            {key: ("F32", (stop - start,)) for key, (start, stop) in parts.items()},
            {"ranges": json.dumps(parts)},
        )
        with contextlib.closing(writer):
            for key, (start, stop) in parts.items():
                writer.write(key, memoryview(bytes([rank + 1]) * 4 * (stop - start)))
            sums = writer.finish()
        records[tensors_name] = FileRecord(writer.num_bytes, None)
        add(facts_name, {"rank": rank, "sums": sums.plain(), "private": {}})
        ranks.append((tensors_name, facts_name))
    state = draft.file("state", ".json")
    add(state, _state(step, world_size))
    created = _EPOCH + datetime.timedelta(seconds=step if after_s is None else after_s)
    manifest = Manifest(draft.tag, step, f"{step:08x}", world_size, created.isoformat(), state, tuple(ranks), records)
    path = commit(draft, manifest)
    if is_latest:
        set_latest(root, path.name)
    return path


def _part(shape: tuple[int, ...], rank: int, world_size: int) -> tuple[int, int]:
    numel = 1
    for size in shape:
        numel *= size
    return rank * numel // world_size, (rank + 1) * numel // world_size


def _state(step: int, world_size: int) -> dict[str, object]:
    params = [
        {"name": name, "shape": list(shape), "dtype": "bfloat16", "is_trainable": True, "group": 0}
        for name, shape in SHAPES.items()
    ]
    run = {
        "global_steps": step,
        "global_samples": 8 * step,
        "optimizer": "AdamW",
        "config": {"zero_optimization": {"stage": 2}},
        "versions": {"launcher": "0.1.0"},
    }
    return {
        "run": run,
        "units": [{"world_size": world_size, "padded_numel": 64 * world_size, "params": params}],
        "params": {name: {"states": {"exp_avg": "float32"}, "scalars": {"step": step}} for name in SHAPES},
        "writers": list(range(world_size)),
    }
