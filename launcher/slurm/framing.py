"""How several agents share the two pipes of one srun: lines of base64, each with the name of its node.

Why lines: srun sends its stdin to every task, and mixes the stdout of all tasks. Measured with Slurm 22.05 and three
tasks that write without pause: lines of 300 to 1000 bytes came whole, 1.5 million of them; of longer ones (1100 bytes
and more), and of any bytes with `--unbuffered`, parts of different tasks were mixed, because Slurm moves messages of
1024 bytes and cuts at line ends only below that. What a task leaves behind when it ends is flushed without regard to
lines; therefore a relay stays until the launcher has everything. Such lines carry 70 MB/s, far more than a console.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.base.errors import ProtocolError

DATA = b"d"  # bytes of the agent protocol
END = b"e"  # to an agent: its stdin ends. From one: it has ended, with this exit status
BEAT = b"b"  # from a node that has nothing else to say: it lives

ALL = "*"  # in place of a node's name: for each of them
PIECE_BYTES = 540  # of a line; 720 in base64, with mark and node name well below Slurm's 1024
_MARK = b"@launch"
_MAX_PENDING_BYTES = 1 << 16


@dataclass(frozen=True)
class Line:
    """One line, taken apart; the body still in base64, because most lines to a node are for others."""

    node: str
    kind: bytes
    encoded: bytes

    @property
    def body(self) -> bytes:
        """The bytes it carries. Raises: ProtocolError when they are damaged."""
        try:
            return base64.b64decode(self.encoded, validate=True)
        except binascii.Error:
            raise ProtocolError("a line of srun's output is damaged", where=self.node) from None


def encode_lines(node: str, kind: bytes, body: bytes = b"") -> bytes:
    """Return `body` as one or more whole lines."""
    head = b"%s %s %s " % (_MARK, node.encode(), kind)
    pieces = [body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES)] or [b""]
    return b"".join(head + base64.b64encode(piece) + b"\n" for piece in pieces)


class LineReader:
    """Finds our lines in a byte stream, cut anywhere; what is not ours (a banner, a prolog's output) is skipped."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> Iterator[Line]:
        """Yield the lines that `data` completes."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _MAX_PENDING_BYTES:
            self._pending = b""  # no line of ours is that long
        for line in lines:
            parts = line.split(b" ")
            if len(parts) == 4 and parts[0] == _MARK:
                yield Line(parts[1].decode("ascii", "replace"), parts[2], parts[3])
            elif line.startswith(_MARK):
                raise ProtocolError("a line of srun's output is damaged", where=line[:80].decode("ascii", "replace"))
