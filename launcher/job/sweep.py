"""Make sure that a host whose agent was lost has nothing of the job left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.agent.wire import Bye, Decoder, Message, Sweep, encode
from launcher.base.errors import LauncherError
from launcher.cluster.cluster import Host
from launcher.transport.api import Transport

_READ_BYTES = 1 << 16


def sweep_lost_hosts(hosts: Sequence[Host], transport_for: Callable[[Host], Transport], job_id: str) -> tuple[str, ...]:
    """Start a new agent on each host to kill what carries the job's id. Returns the hosts that did not answer.

    The ranks died with their agent (PDEATHSIG); this finds what they had started.
    """
    return tuple(host.name for host in hosts if not _sweep(host, transport_for, job_id))


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
    return any(isinstance(message, Bye) for message in messages)
