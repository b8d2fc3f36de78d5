"""What `launch trace`, the launcher, agents and ranks hand each other about a trace: a request, and answers to it.

The command writes the request into the run folder and takes it away when it leaves: what is not done by then is
dropped. The launcher passes it to the agents, and each agent to its ranks, as a file beside a pipe. Into the pipe a
rank writes a line, the head, and then the trace; the launcher makes a file of it in the run folder. Standard library
only: agents and ranks import this.
"""

from __future__ import annotations

import json

from launcher.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

REQUEST_FILE = "trace.request"  # in the folder of the start
MAX_HEAD_BYTES = 1 << 16
MAX_STEPS = 1000
_MAX_ID_CHARS = 64


class TraceRequest(Record):
    """Which steps of which ranks are to be traced."""

    id: str
    pid: int  # of the command
    ranks: list[int]
    num_steps: int
    first_step: int  # where ranks begin, so that they trace the same steps; one that is past it begins at once

    def encoded(self) -> bytes:
        """Return it as the content of a file."""
        return json.dumps(self.as_dict()).encode()


def parsed_request(data: bytes) -> TraceRequest | None:
    """Return the request in a file; None where it is none: anybody may have written there."""
    values = _object(data)
    try:
        request = TraceRequest(**values)
        numbers = [request.pid, request.num_steps, request.first_step, *request.ranks]
        is_sound = isinstance(request.id, str) and all(type(number) is int and number >= 0 for number in numbers)
        return request if is_sound and len(request.id) <= _MAX_ID_CHARS and request.num_steps <= MAX_STEPS else None
    except TypeError:
        return None


class AnswerHead(Record):
    """The first line of an answer."""

    id: str  # of the request
    error: str = ""  # why there is no trace
    num_bytes: int = 0  # of the trace behind this line

    def encoded(self) -> bytes:
        """Return the line."""
        return json.dumps(self.as_dict()).encode() + b"\n"


def parsed_head(line: bytes) -> AnswerHead | None:
    """Return the head that a line is; None where it is none."""
    values = _object(line)
    try:
        head = AnswerHead(**values)
    except TypeError:
        return None
    is_sound = isinstance(head.id, str) and isinstance(head.error, str) and type(head.num_bytes) is int
    return head if is_sound and head.num_bytes >= 0 else None


def answer_file(rank: int) -> str:
    """Return the name of a rank's answer in the folder of the start, once it is complete."""
    return f"trace_rank_{rank}"


def pipe_of(request_path: str) -> str:
    """Return where a rank writes its answer to the request in a file."""
    return f"{request_path}.answer"


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
