"""Open the channels of all hosts at once, and report every host that failed, not only the first."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from launcher.base.errors import Diagnostic, TransportError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from launcher.cluster.cluster import Host
    from launcher.transport.api import Channel, Transport

MAX_PARALLEL = 32  # 64 is no quicker, 8 is 1.3 times slower (250 sshd on one machine)


def is_local(host_name: str) -> bool:
    """Tell whether `host_name` means this machine: `localhost` or its own name.

    Addresses never do, 127.0.0.x included: a user who writes an address means the network.
    """
    own = os.uname().nodename.lower()
    return host_name.lower() in {"localhost", own, own.partition(".")[0]}


def max_parallel(num_hosts: int) -> int:
    """Return how many hosts are connected at a time: so many for each process that connects. Raises: UsageError."""
    from launcher.transport.sharing import helper_count  # a job on one host has no use for it

    return MAX_PARALLEL * max(1, helper_count(num_hosts))


def open_all(transport_for_host: Callable[[Host], Transport], hosts: Sequence[Host]) -> list[Channel]:
    """Start the agents of `hosts`, `max_parallel` at a time; the channels come in the order of `hosts`.

    Raises: TransportError with one finding for each host that failed; channels already open are closed.
    """
    if not hosts:
        return []
    if len(hosts) == 1:  # no pool is needed, nor the 5 ms of its imports
        return [transport_for_host(hosts[0]).open(hosts[0])]
    from concurrent.futures import ThreadPoolExecutor

    channels: list[Channel] = []
    findings: list[Diagnostic] = []
    with ThreadPoolExecutor(min(max_parallel(len(hosts)), len(hosts)), thread_name_prefix="connect") as pool:
        futures = [pool.submit(lambda host: transport_for_host(host).open(host), host) for host in hosts]
        try:
            for future in futures:
                try:
                    channels.append(future.result())
                except TransportError as error:
                    findings.extend(error.diagnostics)
        except BaseException:
            # Ctrl-C, or an error of our own: no host may keep an agent that nobody talks to.
            for future in futures:
                future.cancel()
                future.add_done_callback(_close_result)
            raise
    if findings:
        for channel in channels:
            channel.close()
        raise TransportError.from_diagnostics(findings)
    return channels


def _close_result(future: Future[Channel]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
