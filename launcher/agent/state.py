"""The life of an agent as an enum and one table."""

from __future__ import annotations

from enum import Enum, auto


class AgentState(Enum):
    """WAITING -> RUNNING -> STOPPING -> GONE; a node without ranks goes straight to GONE."""

    WAITING = auto()  # connected, no ranks yet
    RUNNING = auto()  # ranks were started and none was asked to end
    STOPPING = auto()  # SIGTERM was sent, or all ranks have ended; descendants are being waited for
    GONE = auto()  # no rank and no descendant is left


TRANSITIONS: dict[AgentState, frozenset[AgentState]] = {
    AgentState.WAITING: frozenset({AgentState.RUNNING, AgentState.GONE}),
    AgentState.RUNNING: frozenset({AgentState.STOPPING}),
    AgentState.STOPPING: frozenset({AgentState.GONE}),
    AgentState.GONE: frozenset(),
}


def move(old: AgentState, new: AgentState) -> AgentState:
    """Return `new`. Raises: RuntimeError for a step the table does not have, a defect of ours."""
    if new not in TRANSITIONS[old]:
        raise RuntimeError(f"the agent cannot go from {old.name} to {new.name}")
    return new
