"""Reading ahead must change nothing but the number of system calls."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from launcher.transport.ssh.connect import EagerSocket


@pytest.fixture
def ends() -> Iterator[tuple[EagerSocket, socket.socket]]:
    near, far = socket.socketpair()
    with EagerSocket(fileno=near.detach()) as eager, far:
        yield eager, far


def test_bytes_come_in_order_in_pieces_no_larger_than_asked_for(ends: tuple[EagerSocket, socket.socket]) -> None:
    eager, far = ends
    data = bytes(range(256)) * 400
    far.sendall(data)
    far.close()
    pieces = []
    while piece := eager.recv(1000):
        pieces.append(piece)
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) == 1000
    assert eager.recv(1) == b""


def test_what_was_read_ahead_needs_no_more_to_arrive(ends: tuple[EagerSocket, socket.socket]) -> None:
    eager, far = ends
    eager.settimeout(0.05)
    far.sendall(b"abcdef")
    assert [eager.recv(4), eager.recv(4)] == [b"abcd", b"ef"]
    with pytest.raises(TimeoutError):
        eager.recv(4)
