"""The two signals that agents send to ranks and that do not end them."""

from __future__ import annotations

import signal

# The job will soon be taken off its nodes, see `preemption`.
NOTICE_SIGNAL = signal.SIGUSR1
# Asks a rank for its stacks. The default action of this signal is to be ignored, so a rank that is no Python script,
# or not yet one, is not hurt.
STACKS_SIGNAL = signal.SIGURG
