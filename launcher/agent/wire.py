"""The agent protocol: messages as immutable records, frames as bytes.

A stream starts with `MAGIC`; what stands before it (a login banner, the output of a shell's start-up file) is skipped.
A frame is two big-endian 32-bit lengths, a JSON header and a raw payload. Output of ranks is payload, so that
any bytes pass unchanged and unquoted.
"""

from __future__ import annotations

import json
import math
import os
import struct

from launcher.base.errors import ProtocolError
from launcher.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

PROTOCOL_VERSION = 14
MAGIC = b"\x00\x01launch-agent\x01\x00"
MAX_BANNER_BYTES = 1 << 20
MAX_HEADER_BYTES = 64 << 20  # environments and arguments of all ranks of a node
MAX_PAYLOAD_BYTES = 16 << 20
PIECE_BYTES = 1 << 20  # of a call
STDOUT, STDERR, RESULT, JOURNAL, TRACE = "stdout", "stderr", "result", "journal", "trace"  # what `Output.stream` says
MAX_READ_BYTES = 1 << 16  # at once, by the agent
_MAX_WRITE_BYTES = 1 << 20  # at once, by the agent
_MAX_UNSENT_BYTES = 4 << 20  # above it the ranks' pipes are left unread
_FRAME_BYTES = 128  # what the frame of an Output adds to its data, at most
_MIN_COST_BYTES = 512  # of an Output, however short: it may need a line, a buffer, of srun for itself
_LENGTHS = struct.Struct(">II")
_MAX_SHOWN_CHARS = 80
_RECORD_TEXTS = ("type", "message", "traceback")
_SIMPLE_TYPES = {"int": int, "str": str, "bytes": bytes, "bool": bool, "None": type(None)}


class Message(Record):
    """Base of all messages."""


_on_message: Callable[[Message, bool], None] | None = None


def watch_messages(call: Callable[[Message, bool], None] | None) -> None:
    """Have `call` see every message of this process, and whether it is one that is sent. Any thread calls it."""
    global _on_message
    _on_message = call


# ---- controller to agent ----


class PickPort(Message):
    """Ask for a TCP port that is free on the agent's node, or whether a certain one is."""

    port: int = 0  # the one that is wanted; 0: any


class TryMaster(Message):
    """Ask whether ranks of the agent's node can reach the address that they are to meet at."""

    address: str
    port: int  # 0: only whether the name can be resolved


class Spawn(Message):
    """Start the ranks of this node."""

    job_id: str
    commands: list[
        list[str]
    ]  # arguments of launcher.worker: kind, target, user arguments; by local rank, or one for all
    cwd: str
    env: dict[str, str]  # added to the agent's own environment, for every rank
    rank_envs: list[dict[str, str]]  # one for each rank; RANK among them
    lease_s: float | None  # end the ranks after so long without a message; None: the stream's end is enough
    grace_s: float  # between SIGTERM and SIGKILL when the lease ends
    bound_cores: list[int] | None = None  # share these CPUs out to the ranks; []: all; None: no binding
    window_bytes: int | None = None  # how much output may wait for a Handled, see Channel; None: any amount
    open_files: int | None = None  # soft limit of open files of each rank; None: the one the agent was started with
    progress_interval_s: float = 1.0  # between two reports of a rank's heartbeats
    has_journal: bool = True  # ranks get a pipe for it
    forwarded_env: dict[str, str] = {}  # noqa: RUF012  # of the launcher; what a setup changed on the host counts more


class Call(Message):
    """A piece of the function call that the ranks make, in order, before Spawn; answered like Ping."""

    data: bytes


class Stop(Message):
    """End all ranks: SIGTERM, one grace for all, SIGKILL."""

    grace_s: float


class Notify(Message):
    """Tell every rank that the job will soon be taken off its nodes."""


class DumpStacks(Message):
    """Let every rank write its Python stacks and say which collectives it has entered, and send both."""

    native: bool = False  # send the stacks of native code, too, where py-spy is installed


class Trace(Message):
    """Let ranks trace steps, and send what they have recorded; this takes the place of what was asked before."""

    id: str
    ranks: list[int]  # of all nodes; []: none from now on
    num_steps: int
    first_step: int  # see `journal.trace_request`


class Sweep(Message):
    """Kill every process of a job whose agent was lost; the job id in their environment tells which."""

    job_id: str


class Handled(Message):
    """The controller has handled output: the agent may send as much again, see Spawn.window_bytes."""

    num_bytes: int


class Ping(Message):
    """Renew the lease."""


class Lease(Message):
    """Make the lease as long as this from now on; answered like Ping. The launcher may be suspended for a while."""

    lease_s: float


# ---- agent to controller ----


class Hello(Message):
    """The first message of an agent. It is read across versions: fields may be missing, or be new."""

    version: int
    pid: int = 0
    python: str = ""
    time_s: float = 0.0  # monotonic clock of the node, which nobody sets: makes times of different hosts comparable
    devices: list[str] | None = None  # entries of the agent's CUDA_VISIBLE_DEVICES; None: it is not set


class Pong(Message):
    """The answer to Ping and Lease: the node and the way to it are alive."""

    time_s: float  # monotonic clock of the node


class PortPicked(Message):
    """The answer to PickPort."""

    port: int  # 0: the one that is wanted cannot be had
    problem: str | None = None  # why: "is in use"


class MasterTried(Message):
    """The answer to TryMaster."""

    problem: str | None


class Started(Message):
    """A rank's process exists."""

    rank: int
    pid: int


class SpawnFailed(Message):
    """No rank was started on this node."""

    reason: str
    hint: str | None = None  # what helps
    is_usage: bool = False  # an option is wrong: to try again would change nothing


class Output(Message):
    """Bytes a rank wrote."""

    rank: int
    # STDOUT, STDERR, JOURNAL; RESULT: what a function call returned or raised, see `api.pickling`; TRACE: the answer to
    # a `Trace`, see `journal.trace_request`, which begins with an empty one.
    stream: str
    data: bytes

    @property
    def cost_bytes(self) -> int:
        """What it takes of the window."""
        return max(len(self.data) + _FRAME_BYTES, _MIN_COST_BYTES)


class Progress(Message):
    """A rank has made heartbeats, or reported more, since the last such message."""

    rank: int
    count: int  # heartbeats since its start
    step: int | None = None  # as it counts them itself, see base.progress
    loss: float | None = None
    phase: str = ""
    total_steps: int | None = None


class Stacks(Message):
    """The answer to DumpStacks, one for each rank that runs."""

    rank: int
    text: str  # "" for a rank that is not a Python script
    collectives: dict[str, Any] | None = None  # what it has entered, see compat.collectives; None: no answer
    why_silent: str = ""  # where it was asked for its collectives, and did not answer


class Raised(Message):
    """A rank has left its error record and runs on: exit handlers, threads, children it waits for."""

    rank: int
    record: dict[str, Any]


class Exited(Message):
    """A rank's process has ended, and all it had written has been sent."""

    rank: int
    status: int  # exit code, or minus the signal number
    time_s: float  # monotonic clock of the node when it was found dead
    record: dict[str, Any] | None  # the error record the worker left
    max_rss_bytes: int  # the most memory its process held
    oom: str | None  # evidence that the kernel ended it for lack of memory
    torch_error: dict[str, Any] | None = None  # what torch's `@record` left, of a rank that failed
    engine: dict[str, Any] | None = None  # what its engine has said of itself, see `planner.ladder.EngineFacts`

    @property
    def error(self) -> dict[str, Any]:
        """What ended the rank, as a record has it: the worker's own, or what is known by torch's; {} for neither."""
        return self.record or (_error_of_torch(self.torch_error) if self.torch_error is not None else {})


def _error_of_torch(data: dict[str, Any]) -> dict[str, Any]:
    """Return type, message and traceback of a file of `@record`. Handlers of users may leave other values in it."""
    text = data.get("message")
    more = text.get("extraInfo") if isinstance(text, dict) else None
    text = text.get("message") if isinstance(text, dict) else text
    if not isinstance(text, str):
        return {}
    name, _, message = text.partition(": ")
    trace = more.get("py_callstack") if isinstance(more, dict) else None
    return {"type": name, "message": message, "traceback": trace if isinstance(trace, str) else f"{text}\n"}


class LeftBehind(Message):
    """Every rank has ended well, and left processes running that the agent ends now."""

    pids: list[int]
    names: list[str]  # of their programs, in the order of `pids`


class Bye(Message):
    """All ranks and all their descendants are gone; the agent leaves."""

    left: list[int] = []  # noqa: RUF012  # pids that SIGKILL did not end: a device or a file system holds them


_TYPES = {kind.__name__: kind for kind in Message.__subclasses__()}


def encode(message: Message) -> bytes:
    """Return the frame of one message. Raises: ProtocolError when it is too large for the other side."""
    fields = message.as_dict()
    payload: bytes = fields.pop("data", b"")
    # Surrogates stand for bytes that are not UTF-8 (file names, arguments); JSON's ASCII escapes keep them.
    header = json.dumps({"type": type(message).__name__, **fields}).encode("ascii")
    if _on_message is not None:
        _on_message(message, True)
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(
            f"arguments and environment of the ranks are larger than {MAX_HEADER_BYTES >> 20} MiB",
            hint="put them into a file that the script reads",
        )
    return _LENGTHS.pack(len(header), len(payload)) + header + payload


class Outbox:
    """Buffers what the agent sends, and counts the output that the launcher has not handled yet.

    `write` never blocks. When the launcher reads too slowly, `room_bytes` becomes 0: the ranks' pipes are left
    unread then, so that ranks wait instead of memory growing or output being lost.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_connected = True
        self.window_bytes: int | None = None  # of output that may be unhandled; None: without a bound
        self._unsent = bytearray(MAGIC)
        self._unhandled_bytes = 0  # of output: sent, or to be sent, and not yet handled by the launcher

    def __bool__(self) -> bool:
        """Whether anything is to be written."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Append a message to the buffer; does nothing once the launcher has gone."""
        if self.is_connected:
            self._unsent += encode(message)

    def send_output(self, rank: int, stream: str, data: bytes) -> None:
        """Append output of a rank, and count it against the window."""
        message = Output(rank, stream, data)
        self._unhandled_bytes += message.cost_bytes
        self.send(message)

    def add_handled(self, num_bytes: int) -> None:
        """Widen the window again by output that the launcher has handled."""
        self._unhandled_bytes -= num_bytes

    def room_bytes(self) -> int:
        """Return how much of a rank's output may be read at once; 0 until a quarter of the window is free."""
        if len(self._unsent) >= _MAX_UNSENT_BYTES:
            return 0
        if self.window_bytes is None or not self.is_connected:
            return MAX_READ_BYTES
        free_bytes = self.window_bytes - self._unhandled_bytes
        return min(free_bytes, MAX_READ_BYTES) if free_bytes >= self.window_bytes // 4 else 0

    def write(self) -> None:
        """Write as much as the descriptor takes now. Raises: OSError when the launcher has gone."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self.descriptor, memoryview(self._unsent)[:_MAX_WRITE_BYTES])]
        except BlockingIOError:
            return

    def disconnect(self) -> None:
        """Drop what is unsent, and all that is sent from now on."""
        self.is_connected = False
        self._unsent.clear()


class Decoder:
    """Turns a byte stream, cut anywhere, into messages."""

    def __init__(self, *, expect_magic: bool) -> None:
        self._buffer = bytearray()
        self._in_banner = expect_magic

    @property
    def banner(self) -> bytes:
        """What came so far in place of an agent's words; empty once an agent has spoken."""
        return bytes(self._buffer) if self._in_banner else b""

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that `data` completes. Raises: ProtocolError for bytes that are not a frame."""
        self._buffer += data
        if self._in_banner and not self._skip_banner():
            return
        while len(self._buffer) >= _LENGTHS.size:
            header_bytes, payload_bytes = _LENGTHS.unpack_from(self._buffer)
            if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
                raise ProtocolError("the agent's stream is damaged: impossible frame length")
            end = _LENGTHS.size + header_bytes + payload_bytes
            if len(self._buffer) < end:
                return
            header = bytes(self._buffer[_LENGTHS.size : _LENGTHS.size + header_bytes])
            payload = bytes(self._buffer[_LENGTHS.size + header_bytes : end])
            del self._buffer[:end]
            yield _decode(header, payload)

    def _skip_banner(self) -> bool:
        start = self._buffer.find(MAGIC)
        if start < 0:
            if len(self._buffer) > MAX_BANNER_BYTES:
                raise ProtocolError(
                    "no agent answered, only other output",
                    hint="see what `ssh HOST true` prints; shell start-up files must be silent",
                )
            return False
        del self._buffer[: start + len(MAGIC)]
        self._in_banner = False
        return True


def _decode(header: bytes, payload: bytes) -> Message:
    try:
        fields = json.loads(header)
        kind = _TYPES[fields.pop("type")]
        if "data" in kind.field_names:
            fields["data"] = payload
        elif kind is Hello:
            fields = {name: fields[name] for name in Hello.field_names if name in fields}
        message = kind(**fields)
        wrong = [name for name, wanted in kind.__annotations__.items() if not _fits(getattr(message, name), wanted)]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"the agent's stream is damaged: {error!r}") from None
    if wrong:
        value = repr(getattr(message, wrong[0]))[:_MAX_SHOWN_CHARS]
        raise ProtocolError(f"the agent's stream is damaged: {wrong[0]} of {kind.__name__} is {value}")
    if _on_message is not None:
        _on_message(message, False)
    return message


def _fits(value: object, wanted: str) -> bool:
    """Return whether a value that came from the other side has the type that the annotation names."""
    if " | " in wanted:
        return any((part == "float" and isinstance(value, float)) or _fits(value, part) for part in wanted.split(" | "))
    if wanted == "float":  # alone: a time, which is computed with; a loss may be infinite
        return isinstance(value, (int, float)) and math.isfinite(value)
    if wanted.startswith("list["):
        return isinstance(value, list) and all(_fits(entry, wanted[len("list[") : -1]) for entry in value)
    if wanted.startswith("dict["):
        inner = wanted[len("dict[str, ") : -1]
        return isinstance(value, dict) and (inner == "Any" or all(_fits(entry, inner) for entry in value.values()))
    return isinstance(value, _SIMPLE_TYPES[wanted])


def is_sound_record(record: dict[str, Any]) -> bool:
    """Return whether what the controller computes with is in an error record, and of the right type."""
    time_s, exit_code = record.get("time_s"), record.get("exit_code")
    return (
        isinstance(time_s, float)
        and math.isfinite(time_s)
        and isinstance(exit_code, int)
        and 0 < exit_code < 256
        and all(isinstance(record.get(name), str) for name in _RECORD_TEXTS)
    )


def check_version(hello: Hello, host_name: str) -> None:
    """Raise ProtocolError when the agent speaks another version of the protocol."""
    if hello.version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the agent speaks protocol {hello.version}, this launcher {PROTOCOL_VERSION}",
            where=host_name,
            hint=f"install the same launch-zero version for {hello.python} there",
        )
