"""Which jobs save into a folder: a job that was started again must not continue what another one has left there."""

from __future__ import annotations

import json
from collections.abc import Collection

from launcher.checkpoint_files.folder import make_folder, replace_file
from launcher.checkpoint_files.place import Place

OWNERS = "run.json"
_MAX_JOBS = 100


def owners_of(root: Place) -> list[str]:
    """Return the ids of jobs that have saved into a folder, the last one at the end; none where it is not known."""
    try:
        plain = json.loads((root / OWNERS).read_bytes())
        return [str(job) for job in plain["jobs"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


def add_owner(root: Place, jobs: Collection[str]) -> None:
    """Note that a job saves into a folder, which is made. jobs: all ids it has. Raises: OSError, CheckpointError."""
    make_folder(root)
    before = owners_of(root)
    now = [*(job for job in before if job not in jobs), *jobs][-_MAX_JOBS:]
    if now != before:
        replace_file(root / OWNERS, json.dumps({"jobs": now}, indent=1).encode() + b"\n")
