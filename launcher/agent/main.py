"""The agent: the one process per node that owns the node's ranks.

It speaks the protocol of `wire` on stdin and stdout. Its life is a lease: when stdin ends, or no message came for
the length of the lease, it ends its ranks and leaves.
"""

from __future__ import annotations

import os
import signal
import sys

from launcher.agent.supervisor import Supervisor
from launcher.base.processes import adopt_orphans
from launcher.base.signals import NOTICE_SIGNAL


def main(*, is_in_step: bool = False) -> int:
    """Serve until all ranks are gone. Returns the exit status. is_in_step: see `Supervisor`."""
    # Protocol bytes only on the real stdout: a stray print of ours would damage the stream.
    output = os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # Ranks inherit this until their worker listens: an early notice, Slurm's to the whole step too, waits for that.
    signal.pthread_sigmask(signal.SIG_BLOCK, [NOTICE_SIGNAL])
    adopt_orphans()
    try:
        supervisor = Supervisor(sys.stdin.fileno(), output, is_in_step=is_in_step)
    except OSError as error:  # too few descriptors: the launcher shows these words
        sys.stderr.write(f"the agent cannot work on this host: {error.strerror or error}\n")
        return 1
    supervisor.run()
    return 0
