"""Make sure that a host whose agent was lost has nothing of the job left."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from launcher.agent.wire import Bye, Decoder, Message, Sweep, encode
from launcher.base.errors import LauncherError
from launcher.base.timeouts import timeouts
from launcher.cluster.cluster import Host
from launcher.transport.api import Transport

_READ_BYTES = 1 << 16
_TELL_AFTER_S = 2.0
_POLL_S = 0.1
_MAX_PARALLEL = 32


def sweep_lost_hosts(
    hosts: Sequence[Host],
    transport_for: Callable[[Host], Transport],
    job_id: str,
    waiting: Callable[[str], None] = lambda _what: None,
    is_to_leave: Callable[[], bool] = lambda: False,
) -> tuple[str, ...]:
    """Start a new agent on each host to kill what carries the job's id. Returns the hosts that did not answer.

    The ranks died with their agent (PDEATHSIG), or end with its lease; this finds what they had started. All hosts are
    asked at the same time. waiting: is told for what, when it takes long. is_to_leave: the user does not want to wait.
    """
    clean: set[str] = set()
    todo = deque(hosts)

    def work() -> None:
        while todo:
            try:
                host = todo.popleft()
            except IndexError:  # another thread has it
                return
            if _sweep(host, transport_for, job_id):
                clean.add(host.name)

    # Daemons: a host that never answers keeps nobody from leaving.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_MAX_PARALLEL, len(hosts)))]
    for thread in threads:
        thread.start()
    start_s, has_told = time.monotonic(), False
    while any(thread.is_alive() for thread in threads) and not is_to_leave():
        elapsed_s = time.monotonic() - start_s
        if elapsed_s > timeouts().sweep_s:
            break
        if elapsed_s > _TELL_AFTER_S and not has_told:
            missing = [host.name for host in hosts if host.name not in clean]
            waiting(f"{', '.join(missing[:5])}, lost, to be asked whether anything is left there (Ctrl-C: do not wait)")
            has_told = True
        next((thread for thread in threads if thread.is_alive()), threads[0]).join(_POLL_S)
    return tuple(host.name for host in hosts if host.name not in clean)


def _sweep(host: Host, transport_for: Callable[[Host], Transport], job_id: str) -> bool:
    try:
        channel = transport_for(host).open(host)
    except LauncherError:
        return False
    messages: list[Message] = []
    try:
        channel.write(encode(Sweep(job_id)))
        decoder = Decoder(expect_magic=True)
        while data := channel.read(_READ_BYTES):
            messages.extend(decoder.feed(data))
    except LauncherError:
        return False
    finally:
        channel.close()
    return Bye() in messages  # one that names processes could not end them
