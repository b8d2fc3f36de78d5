"""What the ranks learn of one by one and must act on together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm.groups import group_of_notices
from launcher.comm.pending import Pending, begin_call, end_call


class Agreement:
    """Tells every rank, in the same round, that something holds on one of them.

    A round is one all-reduce of a number in host memory: a device is not waited for, and what happens between `begin`
    and `result` hides it. Every rank must make one, and take part in every round.
    """

    def __init__(self) -> None:
        self._process_group = group_of_notices()
        self._flag: Tensor = torch.zeros(1, dtype=torch.int32)
        self._pending: Pending | None = None
        self._has_held = False

    def begin(self, *, holds: bool) -> None:
        """Begin a round. holds: on this rank."""
        self.result()  # an exception has left a round open
        self._flag.fill_(holds)
        if self._process_group is None:
            self._pending = Pending()
            return
        begin_call("all_reduce", self._process_group)
        work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._process_group, async_op=True)
        self._pending = Pending([work] if work is not None else [])
        end_call()

    def result(self) -> bool:
        """End the round, and return whether it held on any rank, now or in an earlier round."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
            self._has_held = self._has_held or bool(self._flag.item())
        return self._has_held
