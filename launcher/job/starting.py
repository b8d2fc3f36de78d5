"""What starts the ranks of a node."""

from __future__ import annotations

from dataclasses import fields

from launcher.agent.wire import PIECE_BYTES, Call, Spawn
from launcher.base.errors import UsageError
from launcher.base.file_limit import original_limit
from launcher.job.environment import device_tokens, job_variables, rank_variables
from launcher.job.node import Node
from launcher.job.plan import JobPlan, Settings


def check_port(port: int | None, plan: JobPlan) -> None:
    """Raises: UsageError when node 0 has no port for the ranks to meet at. port: what its agent answered."""
    if not port:
        raise UsageError(
            f"port {plan.master_port} is in use" if plan.master_port else "no TCP port is free",
            where=plan.placement.nodes[0].host.name,
            hint="give another --master-port, or leave it out: a free one is chosen" if plan.master_port else None,
        )


def send_start(plan: JobPlan, node: Node) -> None:
    """Tell a node to start its ranks, after the pieces of the call that they make."""
    call = plan.command.call
    for start in range(0, len(call), PIECE_BYTES):
        node.send(Call(call[start : start + PIECE_BYTES]))
    node.send(spawn_message(plan, node))


def spawn_message(plan: JobPlan, node: Node) -> Spawn:
    """Return what starts the ranks of a node. The plan's master port must have been chosen."""
    if plan.master_port is None:
        raise RuntimeError("the master port is chosen before ranks are started")
    transport = plan.transports[node.placement.node_rank]
    tokens = device_tokens(plan, node.placement, node.hello.devices if node.hello is not None else None)
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
