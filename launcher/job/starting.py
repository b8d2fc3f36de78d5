"""The start of a run: connect to the agents of all hosts, wait for their first answers, tell them what to start."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from launcher.agent.wire import Hello, Message, Spawn, check_version
from launcher.base.errors import LauncherError, TransportError
from launcher.base.file_limit import original_limit
from launcher.base.timeouts import timeouts
from launcher.cluster.cluster import Host
from launcher.job.environment import device_tokens, job_variables, rank_variables
from launcher.job.node import ChannelEnded, Inbox, Node
from launcher.job.plan import JobPlan, Settings
from launcher.transport.api import Transport
from launcher.transport.diagnose import start_failure
from launcher.transport.fanout import TELL_AFTER_S, open_all

_POLL_S = 0.2


class Start:
    """Waits for agents; every wait can be ended and says what it waits for."""

    def __init__(self, inbox: Inbox, look_up: Callable[[], object], on_waiting: Callable[[str], object]) -> None:
        """look_up: called a few times a second; what it raises ends a wait. on_waiting: told after 2 s what for."""
        self._inbox, self._look_up, self._on_waiting = inbox, look_up, on_waiting

    def connect(self, plan: JobPlan, transport_for: Callable[[Host], Transport]) -> list[Node]:
        """Start the agent of every host, and listen to all. Raises: TransportError, and what `look_up` raises."""
        placements = plan.placement.nodes
        hosts = [placement.host for placement in placements]
        channels = open_all(transport_for, hosts, self._look_up, self._on_waiting)
        nodes = [
            Node(placement, channel, plan.needs_lease(placement.node_rank), len(placements))
            for placement, channel in zip(placements, channels, strict=True)
        ]
        for node in nodes:
            self._inbox.listen(node)
        return nodes

    def expect(self, nodes: Sequence[Node], kind: type[Any], what: str) -> list[Any]:
        """Wait for one message of `kind` from each node. Raises: LauncherError with every node that failed."""
        answers: dict[int, Message] = {}
        failures: list[LauncherError] = []
        deadline_s = time.monotonic() + timeouts().answer_s
        tell_at_s = time.monotonic() + TELL_AFTER_S
        while len(answers) + len(failures) < len(nodes):
            self._look_up()
            event = self._inbox.get(_POLL_S)
            now_s = time.monotonic()
            missing = [node.name for node in nodes if node.placement.node_rank not in answers]
            if now_s > deadline_s:
                raise TransportError(
                    f"no answer after {timeouts().answer_s:g} s while waiting for {what}",
                    where=", ".join(missing),
                )
            if now_s > tell_at_s:
                self._on_waiting(f"{what}: {len(answers)} of {len(nodes)}, missing {', '.join(missing[:5])}")
                tell_at_s = math.inf
            if event is None:
                continue
            node, message = event
            if isinstance(message, ChannelEnded):
                failures.append(start_failure(node.channel, message.reason, message.printed))
            elif isinstance(message, kind):
                answers[node.placement.node_rank] = message
                if isinstance(message, Hello):
                    check_version(message, node.name)
        if failures:
            raise TransportError.from_diagnostics([d for error in failures for d in error.diagnostics])
        return [answers[node.placement.node_rank] for node in nodes]


def spawn_message(plan: JobPlan, node: Node) -> Spawn:
    """Return what starts the ranks of a node. The plan's master port must have been chosen."""
    if plan.master_port is None:
        raise RuntimeError("the master port is chosen before ranks are started")
    transport = plan.transports[node.placement.node_rank]
    tokens = device_tokens(plan, node.placement, node.devices)
    # A field of the message that has the name of a setting is that setting.
    settings = {field.name: getattr(plan, field.name) for field in fields(Settings) if field.name in Spawn.field_names}
    return Spawn(
        **settings | {"lease_s": plan.lease_s if node.has_lease else None},
        job_id=plan.job_id,
        commands=plan.command.for_ranks(node.placement.num_ranks),
        cwd=plan.cwd,
        # srun has passed on the whole environment, and a local agent inherits it.
        env=job_variables(plan) | (plan.forwarded_env if transport == "ssh" else {}) | plan.given_env,
        rank_envs=rank_variables(plan.placement, node.placement, (plan.master_addr, plan.master_port), tokens),
        window_bytes=node.window.num_bytes,
        # Only sshd starts agents with a limit of their own: others inherit what this process has raised.
        open_files=None if transport == "ssh" else original_limit(),
    )
