"""Ends a process whose rank waits for others that have issued other collectives, and says where they part.

[Note: ranks that wait for each other] At stage 3 a rank that skips a block, unlike the others, gathers another unit
than they do. gloo matches messages by their tags, and messages of different sizes have different ones here (see
`GlooCommunicator`): so the ranks wait for each other, where gloo would otherwise end the processes without a word about
the model. Nothing ends such a wait from outside, and the thread that trains is in it. So a thread of its own looks at
waits that last: ranks publish through the store what they have issued since the last step, and one whose order differs
from that of another rank says so and ends. An order that is only longer is that of a rank that is ahead. In a forward
without gradients it may also be that of a rank that has longer texts or more batches: it says so, and waits further.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.base.timeouts import timeouts
from launcher.comm import pending
from launcher.comm.groups import RankGroup
from launcher.zero.order import CollectiveOrder

_INTERVAL_S = 1.0
_EXIT_CODE = 1


class OrderWatch(threading.Thread):
    """Watches the collectives of one engine until the engine ends or is collected."""

    def __init__(self, order: CollectiveOrder, group: RankGroup) -> None:
        """group: the ranks of the engine, at least two."""
        super().__init__(name="launch-order-watch", daemon=True)
        self._order = weakref.ref(order)
        self._group = group
        self._is_over = threading.Event()

    def stop(self) -> None:
        """End the thread; a wait that lasts is then the backend's to end."""
        self._is_over.set()

    def run(self) -> None:
        """Look at waits; see the module."""
        warned_since_s: float | None = None
        while not self._is_over.wait(_INTERVAL_S):
            order, since_s = self._order(), pending.waiting_since_s()
            if order is None:
                return
            if since_s is None or time.monotonic() - since_s < timeouts().order_check_s:
                continue
            if order.difference_of_waiting(self._group) is not None:
                time.sleep(_INTERVAL_S)  # further ranks may be about to publish, and the order was maybe being changed
                difference = order.difference_of_waiting(self._group)
                if difference is not None:
                    _end_process(difference)
            elif warned_since_s != since_s and time.monotonic() - since_s > timeouts().order_check_s + 2 * _INTERVAL_S:
                warned_since_s = since_s  # once: others had the time to publish that they wait, too
                warning = order.warning_of_waiting(self._group)
                if warning is not None:
                    get_logger().warning("%s", warning)


def watch_order(order: CollectiveOrder, group: RankGroup) -> OrderWatch | None:
    """Start to watch; None where the host waits for no other rank: it is alone, or its device works behind it."""
    if group.process_group is None or group.runtime.runs_behind_host:
        return None
    watch = OrderWatch(order, group)
    watch.start()
    return watch


def _end_process(difference: EngineError) -> None:
    get_logger().error("%s", difference)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(_EXIT_CODE)  # an exception would end this thread only
