"""Make sure that a host whose agent was lost has nothing of the job left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launcher.agent.wire import Sweep
from launcher.base.timeouts import timeouts
from launcher.cluster.cluster import Host
from launcher.fleet.agent import Agent
from launcher.fleet.fleet import Fleet
from launcher.transport.api import Transport

_POLL_S = 0.1


def sweep_lost_hosts(
    hosts: Sequence[Host],
    transport_for: Callable[[Host], Transport],
    job_id: str,
    on_waiting: Callable[[str], object] = lambda _: None,
    is_to_leave: Callable[[], bool] = lambda: False,
) -> tuple[str, ...]:
    """Start a new agent on each host to kill what carries the job's id. Returns the hosts that could not confirm it.

    The ranks died with their agent (PDEATHSIG), or end with its lease; this finds what they had started. All hosts are
    asked at the same time. on_waiting: called once, after 2 s. is_to_leave: the user does not want to wait.
    """
    if not hosts:
        return ()
    agents = [Agent(host) for host in hosts]
    for agent in agents:
        agent.send(Sweep(job_id))
    fleet = Fleet(agents, transport_for, on_waiting=on_waiting)
    fleet.start()
    give_up_at_s = time.monotonic() + timeouts().sweep_s
    while not fleet.is_over and not is_to_leave() and time.monotonic() < give_up_at_s:
        fleet.get(_POLL_S)
        fleet.explain_wait(fleet.running, "lost hosts to confirm that nothing is left there (Ctrl-C: do not wait)")
    fleet.close()
    # One that names processes could not end them.
    clean = {agent.name for agent in agents if agent.ended and agent.exited_cleanly and not agent.left_pids}
    return tuple(host.name for host in hosts if host.name not in clean)
