"""Leave the process group in order when the process ends."""

from __future__ import annotations

import atexit
import datetime
import functools
import sys

import torch.distributed as dist

from launcher.comm import collectives

_TIMEOUT = datetime.timedelta(seconds=5)


@functools.cache
def leave_in_order() -> None:
    """At the normal end of this process wait for transfers under way and end the process group.

    Without it the end of a training script is a race: a rank that leaves while the last step's parameters are still
    being exchanged is aborted by gloo, and NCCL complains. After an exception nothing is waited for: the peers may be
    gone.
    """
    atexit.register(_leave)


def _leave() -> None:
    if hasattr(sys, "last_value") or not dist.is_initialized():
        return
    collectives.settle(_TIMEOUT)
    dist.destroy_process_group()
