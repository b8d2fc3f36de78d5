"""Says which collectives this rank has entered and not finished, when its agent asks: `listen()`.

A rank that hangs has its main thread in a collective, so a thread of its own answers. It waits for a writer of a named
pipe and costs nothing until then: no signal, no interval, no descriptor that children inherit. The answer is a small
file, which the agent reads with the stacks. Where the interpreter's lock is held by a native call no answer comes, and
that is said of the rank.

The answer is a JSON object, read by `launcher.job.collectives`: `streams`, a list of what is known of each process
group, and of each kind of collective of the engine in a group:

    name         alike on all ranks
    group        in words; "" where the calls say it
    ranks        of the world, that belong to it
    num_entered  how many this rank has entered
    waits_in     number of the first one that has not ended; null: all have
    waits_s      how long ago that one was entered
    calls        the last ones: [number, operation, size]
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import time

from launcher.base import env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_MAX_CALLS, _NUM_BEFORE = 12, 4  # of a stream: how many are said, and how many of them before the one that is waited in
_WORLD = "the world"
_DTYPES = {"Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64"}
_DTYPES |= {"Half": "float16", "Float": "float32", "Double": "float64"}


def listen() -> None:
    """Start the thread that answers, in a rank of several: once torch is imported, and `torch.distributed` with it.

    A fork of the rank, which is not the leader of its session, has no thread, and starts none.
    """
    path = os.environ.get(env.COLLECTIVES_FILE.name)
    is_rank = os.getsid(0) == os.getpid() and os.environ.get(env.WORLD_SIZE.name, "1") != "1"
    if path is None or not is_rank or "torch.distributed" not in sys.modules:
        return
    with contextlib.suppress(RuntimeError):  # no further thread can be started: the rank is then one without an answer
        threading.Thread(target=_answer_requests, args=(path,), name="launch-collectives", daemon=True).start()


def _answer_requests(path: str) -> None:
    # At once, not when it hangs: what it hangs in may be the disk that this is imported from.
    try:
        torch_internals: Any = importlib.import_module("launcher.comm.torch_internals")
    except Exception:  # noqa: BLE001  # a torch that this package does not know: scripts may still use it
        return
    while True:
        try:
            os.close(os.open(path + env.REQUEST_SUFFIX, os.O_RDONLY | os.O_CLOEXEC))  # until the agent opens it, too
        except OSError:
            return  # the agent has gone
        try:
            streams = [*_recorded(torch_internals), *_of_engine()]
            _leave(path, json.dumps({"streams": streams}))
        except Exception:  # noqa: BLE001  # of another version of torch, say: an answer without streams is one, too
            _leave(path, '{"streams": []}')


def _leave(path: str, text: str) -> None:
    with contextlib.suppress(OSError):
        with open(path + ".new", "w", encoding="utf-8", opener=_open_private) as file:
            file.write(text)
        os.replace(path + ".new", path)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


# ---- What torch has recorded ----


def _recorded(torch_internals: Any) -> Iterable[dict[str, Any]]:
    """Yield a stream for each process group in torch's flight recorders."""
    now_ns = time.time_ns()
    members: dict[str, list[int]] = torch_internals.ranks_of_groups()
    entries: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in torch_internals.recorded_collectives():
        if not entry.get("is_p2p"):
            backend = entry["profiling_name"].partition(":")[0]  # of several in a group each has numbers of its own
            entries.setdefault((backend, entry["process_group"][0]), []).append(entry)
    for (backend, name), of_group in entries.items():
        if name not in members:  # a group that was destroyed
            continue
        first = next((entry for entry in of_group if not _has_ended(entry)), None)
        yield _stream(
            f"{backend} {name}",
            _group_text(of_group[-1]["process_group"][1], members[name]),
            members[name],
            _number(of_group[-1]),
            (_number(first), (now_ns - first["time_created_ns"]) / 1e9) if first is not None else None,
            [(_number(entry), entry["profiling_name"].rpartition(":")[2], _size(entry)) for entry in of_group],
        )


def _number(entry: dict[str, Any]) -> int:
    return int(entry["collective_seq_id"])


def _has_ended(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _group_text(purpose: str, ranks: list[int]) -> str:
    if purpose == "default_pg":
        return _WORLD
    named = f'the group "{purpose}" of' if purpose not in ("", "undefined") else "the group of"
    return f"{named} ranks {', '.join(map(str, ranks[:8]))}{' and others' * (len(ranks) > 8)}"


def _size(entry: dict[str, Any]) -> str:
    """Return how many elements of which type a call was given, such as "4,096 × float32"; "" without tensors."""
    sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    numel_of: dict[str, int] = {}
    for size, dtype in zip(sizes, dtypes, strict=False):
        numel = 1
        for length in size:
            numel *= length
        numel_of[dtype] = numel_of.get(dtype, 0) + numel
    return ", ".join(f"{numel:,} × {_DTYPES.get(dtype, dtype.lower())}" for dtype, numel in numel_of.items())


# ---- What the engine has begun ----


def _of_engine() -> Iterable[dict[str, Any]]:
    """Yield a stream for each kind of collective that the engine has begun in each group; torch records some of them.

    On gloo the engine's gathers and reductions are transfers between ranks, which torch does not record.
    """
    pending: Any = sys.modules.get("launcher.comm.pending")
    if pending is None:
        return
    wait: Any = pending.waiting()
    call: Any = None if wait is None else wait.call
    for name, calls in pending.issued_calls().items():
        last = [(calls.number, calls.what, "")] if calls.number else []
        is_wait = call is not None and call.calls.name == name
        if is_wait and call.number != calls.number:
            last.insert(0, (call.number, call.what, ""))
        waits = (call.number, time.monotonic() - wait.since_s) if is_wait else None
        yield _stream(f"engine {name}", "", calls.ranks, calls.number, waits, last)


def _stream(
    name: str,
    group: str,
    ranks: list[int],
    num_entered: int,
    waits: tuple[int, float] | None,
    calls: list[tuple[int, str, str]],
) -> dict[str, Any]:
    """Return a stream as the module describes it. waits: `waits_in` and `waits_s`, None where all have ended."""
    first = len(calls) - _MAX_CALLS
    if waits is not None:
        first = next(index for index, call in enumerate(calls) if call[0] == waits[0]) - _NUM_BEFORE
    return {
        "name": name,
        "group": group,
        "ranks": ranks,
        "num_entered": num_entered,
        "waits_in": None if waits is None else waits[0],
        "waits_s": 0.0 if waits is None else waits[1],
        "calls": calls[max(0, first) :][:_MAX_CALLS],
    }
