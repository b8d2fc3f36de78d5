"""Leave the process group in order when the process ends."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import gc
import sys
import time
from pathlib import Path

import torch.distributed as dist

from launcher.comm import groups, mesh, pending

_TIMEOUT = datetime.timedelta(seconds=5)
_GLOO_THREAD = "pt_gloo_runloop"
_POLL_S = 0.001
_IDLE_POLLS = 5  # one is not enough: a thread that waits for the interpreter, which the poll holds, looks idle


@functools.cache
def leave_in_order() -> None:
    """At the normal end of this process wait for transfers under way and end the process group.

    Without it the end of a training script is a race: a rank that leaves while the last step's parameters are still
    being exchanged is aborted by gloo, and NCCL complains. After an exception nothing is waited for: the peers may be
    gone.
    """
    atexit.register(_leave)


def _leave() -> None:
    if hasattr(sys, "last_value"):
        return
    pending.drain(_TIMEOUT)
    if dist.is_initialized():  # else the script has ended it, and its threads may still be there
        dist.destroy_process_group()
    mesh.forget_meshes()
    groups.forget_process_groups()
    gc.collect()
    deadline_s = time.monotonic() + _TIMEOUT.total_seconds()
    num_idle = 0
    while num_idle < _IDLE_POLLS and time.monotonic() < deadline_s:
        num_idle = 0 if _is_gloo_busy() else num_idle + 1
        time.sleep(_POLL_S)


def _is_gloo_busy() -> bool:
    """Whether a thread of gloo still runs.

    A collective is done before its thread has released the tensors. To release one that Python has dropped, the thread
    needs the interpreter; if that is being finalized, the process is aborted.
    """
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name.startswith(_GLOO_THREAD) and rest.split()[0] != "S":
                return True
    return False
