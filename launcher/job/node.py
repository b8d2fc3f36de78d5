"""One host of a run: its agent and its ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from launcher.agent.wire import JOURNAL, PIECE_BYTES, RESULT, TRACE, Call, LeftBehind, Output, Spawn, encode
from launcher.base.errors import ProtocolError
from launcher.base.processes import original_limit
from launcher.base.progress import STARTING
from launcher.cluster.cluster import NodePlacement
from launcher.fleet.agent_link import AgentLink
from launcher.job.collectives import Stream
from launcher.job.display import Display
from launcher.job.journal import RunJournal
from launcher.job.logs import RankLog, RunFolder
from launcher.job.traces import TraceDesk
from launcher.plan.plan import JobPlan, Settings
from launcher.plan.variables import device_tokens, job_variables, ladder_variables, rank_variables
from launcher.transport.api import Shared

# ---- One rank, as a run sees it: all of its state in one record ----


@dataclass(eq=False)
class Rank:
    """One rank of a run, for the main thread; its reader sets `wrote_s`. Times are our monotonic clock."""

    number: int
    log: RankLog
    moved_s: float  # of its last progress, at first the start
    pid: int | None = None
    is_running: bool = True  # as far as is known: from the order to start it to its end
    was_stopped: bool = False  # it ended after the order to
    wrote_s: float = 0.0  # when its last output came
    num_heartbeats: int = 0
    phase: str = STARTING  # what it is doing, as it has reported
    raised_s: float | None = None  # since when it has been on its way out with an exception
    has_traceback: bool = False  # its traceback is in its log
    stack: str | None = None  # its answer to the last request for stacks
    streams: Mapping[str, Stream] = field(default_factory=dict)  # of collectives, by the same answer
    why_silent: str = ""  # it was asked for these, and its Python cannot answer


# ---- One host of a run ----


# Output that is here and not yet written, of one host and of all together. Then agents leave their ranks' pipes unread
# and ranks wait: nothing is lost and nothing grows. The stream itself is always read, whatever the console does: the
# answers to heartbeats and the news of failures come through it too.
_WINDOW_BYTES = 4 << 20
_ALL_WINDOWS_BYTES = 512 << 20
_MIN_WINDOW_BYTES = 1 << 18
_LOGS, _DISPLAY = _WAYS = 0, 1  # of output
_MAX_NAMED = 5  # processes that a warning lists


class Node(AgentLink):
    """One host of a run."""

    def __init__(
        self,
        placement: NodePlacement,
        plan: JobPlan,
        files: RunFolder,
        journal: RunJournal,
        traces: TraceDesk,
        display: Display,
    ) -> None:
        """plan: of the run, whose hosts share what may be held here. files, display: the ways of its ranks' output."""
        share_bytes = max(_MIN_WINDOW_BYTES, min(_WINDOW_BYTES, _ALL_WINDOWS_BYTES // len(plan.placement.nodes)))
        super().__init__(placement.host, placement.ranks, window_bytes=share_bytes, num_ways=len(_WAYS))
        self.placement = placement
        self.ranks: dict[int, Rank] = {}  # by number; empty until they are started
        self._files, self._journal, self._traces, self._display = files, journal, traces, display
        self._has_call = bool(plan.command.call)

    @property
    def has_running_ranks(self) -> bool:
        """Whether any rank is there, as far as is known."""
        return any(rank.is_running for rank in self.ranks.values())

    def take_output(self, output: Output) -> None:
        rank = self.ranks.get(output.rank)
        if rank is None:
            raise ProtocolError(f"the agent's stream is damaged: output of rank {output.rank} before its start")
        if output.stream == RESULT and not self._has_call:
            raise ProtocolError(f"the agent's stream is damaged: {output.stream} of rank {output.rank} has no place")
        self.window.arrived(output)
        if output.stream in (JOURNAL, TRACE):  # no sign that the script has moved: a thread of its own writes it
            write = self._journal.write_rank if output.stream == JOURNAL else self._traces.write_rank
            write(rank.number, output.data, lambda: self.handled(output, _LOGS))
            if output.stream == JOURNAL:
                self._display.journal(output.rank, output.data)
            self._display.put(self.handled, output, _DISPLAY)
            return
        rank.wrote_s = time.monotonic()
        if output.stream == RESULT:  # for the caller alone
            self.handled(output, _LOGS)
        else:
            rank.log.remember(output.data)
            self._files.write(rank.log, output.data, lambda: self.handled(output, _LOGS))
        self._display.output(output.rank, output.stream, output.data)
        self._display.put(self.handled, output, _DISPLAY)

    def start_ranks(self, pieces: Sequence[Shared], order: Spawn) -> None:
        """Tell the agent to start its ranks, after the pieces of the call that they make, see `pieces_of`.

        order: `spawn_message`.
        """
        for piece in pieces:
            self.send_frame(piece)
        self.send(order)

    def spawn_message(self, plan: JobPlan) -> Spawn:
        """Return the order to start the ranks. Raises: UsageError where the host has not what they need."""
        if plan.master_port is None:
            raise RuntimeError("the master port is chosen before ranks are started")
        transport = plan.transports[self.placement.node_rank]
        tokens = device_tokens(plan, self.placement, self.hello.devices if self.hello is not None else None)
        # A field of the message that has the name of a setting is that setting.
        settings = {one.name: getattr(plan, one.name) for one in fields(Settings) if one.name in Spawn.field_names}
        return Spawn(
            **settings | {"lease_s": plan.lease_s if self.has_lease else None},
            job_id=plan.job_id,
            commands=plan.command.for_ranks(self.placement.num_ranks),
            cwd=plan.cwd,
            # srun has passed on the whole environment, and a local agent inherits it.
            forwarded_env=plan.forwarded_env if transport == "ssh" else {},
            env=job_variables(plan) | plan.given_env | ladder_variables(plan, os.environ),
            rank_envs=rank_variables(plan.placement, self.placement, (plan.master_addr, plan.master_port), tokens),
            window_bytes=self.window.num_bytes,
            # Only sshd starts agents with a limit of their own: others inherit what this process has raised.
            open_files=None if transport == "ssh" else original_limit(),
            progress_interval_s=plan.progress_interval_s,
        )


def pieces_of(call: bytes) -> list[Shared]:
    """Return a call as frames. All nodes get the same ones: a copy for each would be the call times the hosts."""
    starts = range(0, len(call), PIECE_BYTES)
    return [Shared(encode(Call(call[start : start + PIECE_BYTES]))) for start in starts]


def describe_leftovers(node: Node, message: LeftBehind) -> str:
    """Return the words for what the ranks of a node have left running, that it is ended now, and what helps."""
    pairs = list(zip(message.pids, message.names, strict=False))
    shown = [f"{name} (pid {pid})" for pid, name in pairs[:_MAX_NAMED]]
    more = len(pairs) - len(shown)
    what = ", ".join(shown) + (f" and {more} more" if more else "")
    return (
        f"ranks on {node.name} have ended and left processes running, which end with the job: {what};"
        " let the script wait for them (nohup and setsid do not keep them)"
    )
