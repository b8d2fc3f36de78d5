"""How ranks agree about a checkpoint: through the store of the process group, beside all collectives.

A collective could be matched with one of the training where a rank calls `save_checkpoint` and another one does not;
and the thread of an asynchronous save must issue none. Whoever waits here gives up after a while, and names the ranks
that were missing. Rank 0 is waited for as long as a collective of the group would, with a warning before: it may write
a large file of its own, such as a Trainer's model.safetensors, while the others have called `save_checkpoint`.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from launcher.base.errors import CheckpointError, LauncherError
from launcher.base.log import get_logger
from launcher.base.timeouts import timeouts
from launcher.comm.groups import DEFAULT_TIMEOUT, RankGroup, timeout_of
from launcher.comm.torch_internals import default_store

_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.25
_POLL_SHARE = 0.05  # of what has been waited: polls lengthen no wait by more


class Exchange:
    """Messages between the ranks of one save or load. Values are plain data for JSON."""

    _num_begun: ClassVar[int] = 0  # alike on every rank: saves and loads are called by all of them

    def __init__(self, group: RankGroup | None, purpose: str) -> None:
        """group: None: this process alone. purpose: for messages, such as "save_checkpoint".

        Every rank must build it, in the same order.
        """
        self._purpose = purpose
        self._number = Exchange._num_begun
        Exchange._num_begun += 1
        self._prefix = f"launch/checkpoint/{self._number}"
        self.rank, self.world_size = (0, 1) if group is None else (group.rank, group.world_size)
        self._store: Any = None
        self._timeout_s = DEFAULT_TIMEOUT.total_seconds()
        if group is not None and group.process_group is not None:
            self._store = default_store()
            self._timeout_s = (timeout_of(group.process_group, group.device) or DEFAULT_TIMEOUT).total_seconds()
        self._num_phases = 0
        self._said: list[str] = []  # keys of what rank 0 has broadcast
        self._gathered: list[str] = []  # keys of what all ranks say in the last `gather`
        self._has_rank0 = False  # it has called, which it takes back when it gives up
        self._has_finished = False

    def gather(self, value: Any, *, timeout_s: float | None = None) -> list[Any] | None:
        """Return the values of all ranks on rank 0, None elsewhere.

        timeout_s: rank 0 waits so long; default: `other_ranks_s`. Raises: CheckpointError where a rank is missing.
        """
        phase = self._next_phase()
        if self._store is None:
            return [value]
        with self._while_rank0_lives():
            keys = self._gathered = [f"{phase}/{rank}" for rank in range(self.world_size)]
            self._store.set(keys[self.rank], json.dumps(value))
            if self.rank != 0:
                return None
            self._wait(keys, timeout_s)
            found = [json.loads(self._store.get(key)) for key in keys]
            for key in keys:
                self._store.delete_key(key)
            return found

    def broadcast(self, value: Any = None, *, timeout_s: float | None = None) -> Any:
        """Return rank 0's value on every rank. Raises: CheckpointError where rank 0 has none in time."""
        phase = self._next_phase()
        if self._store is None:
            return value
        with self._while_rank0_lives():
            if self.rank == 0:
                self._store.set(phase, json.dumps(value))
                self._said.append(phase)
                return value
            self._wait([phase], timeout_s)
            return json.loads(self._store.get(phase))

    def finish(self) -> None:
        """Have rank 0 wait until every rank has read its last message: the store may end with rank 0's process.

        The second call does nothing.
        """
        if self._store is None or self._has_finished:
            return
        self._has_finished = True
        key, start_s = f"{self._prefix}/finished", time.monotonic()
        with contextlib.suppress(RuntimeError):
            num_ranks = self._store.add(key, 1)
            while self.rank == 0 and num_ranks < self.world_size:
                if time.monotonic() - start_s > timeouts().other_ranks_s:
                    return  # a rank has ended in between: there is no one left to wait for
                time.sleep(_pause_s(start_s))
                num_ranks = self._store.add(key, 0)
            if self.rank == 0:
                for each in (*self._said, key, self._warned_key):
                    self._store.delete_key(each)

    def all_succeeded(self, error: str | None, *, timeout_s: float | None = None) -> str | None:
        """Return what went wrong on any rank, by rank; None where nothing did. error: this rank's, if any.

        What went wrong is the last message: all ranks raise it.
        """
        errors = self.gather(error, timeout_s=timeout_s)
        said: str | None = None
        if errors is not None:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text) or None
        failed: str | None = self.broadcast(said, timeout_s=timeout_s)
        if failed:
            self.finish()
        return failed

    def _next_phase(self) -> str:
        self._num_phases += 1
        return f"{self._prefix}/{self._num_phases}"

    def _wait(self, keys: list[str], timeout_s: float | None) -> None:
        late_s, start_s = timeouts().other_ranks_s, time.monotonic()
        # Rank 0 may have a large file of its own to write before its call. After that it waits for others itself.
        is_for_rank0 = timeout_s is None and self.rank != 0
        warns_after_s = late_s if is_for_rank0 else math.inf
        if timeout_s is None:
            timeout_s = self._timeout_s if is_for_rank0 else late_s
        for key in keys:  # one is asked for at a time: of thousands of ranks too
            while not self._store.check([key]):
                waited_s = time.monotonic() - start_s
                if is_for_rank0 and self._gathered and self._store.check(self._gathered[:1]):
                    is_for_rank0, warns_after_s, timeout_s = False, math.inf, min(timeout_s, waited_s + late_s)
                    self._has_rank0 = True
                if waited_s > timeout_s:
                    error = self._error(self._missing(keys), timeout_s)
                    self._take_back()
                    raise error
                if waited_s > warns_after_s:
                    warns_after_s = math.inf
                    self._warn(keys, waited_s, timeout_s)
                time.sleep(_pause_s(start_s))

    @property
    def _warned_key(self) -> str:
        return f"{self._prefix}/warned"

    def _warn(self, keys: list[str], waited_s: float, timeout_s: float) -> None:
        if self._store.add(self._warned_key, 1) > 1:  # another rank has said it
            return
        get_logger().warning(
            "%s was called on rank %d, and for %.0f s not on rank %s, which is waited for: after %.0f s in all it is an"
            " error",
            self._purpose,
            self.rank,
            waited_s,
            self._missing(keys),
            timeout_s,
        )

    def _missing(self, keys: list[str]) -> str:
        """Return the ranks that have not said what is waited for: of a message of rank 0, what that one waits for."""
        if len(keys) == 1:
            # Rank 0 has taken what was gathered: it alone is waited for.
            has_taken = not self._gathered or not self._store.check([self._gathered[self.rank]])
            called = self._gathered[1:] if self._has_rank0 else self._gathered
            keys = keys if has_taken else called
        missing = [key for key in keys if not self._store.check([key])]
        return ", ".join(key.rpartition("/")[2] for key in missing[:8]) if len(keys) > 1 and missing else "0"

    def _take_back(self) -> None:
        """Uncount an exchange that some ranks never began: the next one of all ranks has its number."""
        if self._num_phases <= 2 and Exchange._num_begun == self._number + 1:
            Exchange._num_begun = self._number
            self._store.delete_key(f"{self._prefix}/1/{self.rank}")
            self._store.delete_key(self._warned_key)

    @contextlib.contextmanager
    def _while_rank0_lives(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the store has gone with its rank
            raise CheckpointError(f"{self._purpose}: rank 0 has ended meanwhile ({error})") from None

    def _error(self, missing: str, timeout_s: float) -> CheckpointError:
        return CheckpointError(
            f"{self._purpose} was called on rank {self.rank}, and for {timeout_s:.0f} s not on rank {missing}",
            hint="every rank must call it, also where only rank 0 has something to say",
        )


def error_text(error: Exception) -> str:
    """Return what to tell the other ranks of an error."""
    if isinstance(error, LauncherError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    return f"{type(error).__name__}: {error}"


def _pause_s(start_s: float) -> float:
    return min(max(_FIRST_POLL_S, _POLL_SHARE * (time.monotonic() - start_s)), _LAST_POLL_S)
