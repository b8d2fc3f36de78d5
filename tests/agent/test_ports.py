"""Hosts connect to each other, and what does not answer as it should is named."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from harness.launch.command import ROOT, slowness
from harness.launch.sshd import free_port

from launcher.agent import ports

QUICK_S = 0.5


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A listener that says "words 1" to whoever connects."""
    with ports.listener(0) as sock:
        threading.Thread(target=_serve, args=(sock,), daemon=True).start()
        yield sock
        sock.shutdown(socket.SHUT_RDWR)


def _serve(sock: socket.socket) -> None:
    try:
        ports.serve(sock, ports.answer("words", 1))
    except OSError:  # closed by the fixture
        return


def test_a_peer_that_answers_is_reached(listening: socket.socket) -> None:
    peer = ("127.0.0.1", int(listening.getsockname()[1]))
    assert ports.connect(peer, ports.answer("words", 1), 60.0) is None
    assert ports.connect(peer, ports.answer("words", 2), 60.0) == "another program answers there"


def test_what_does_not_answer_is_named() -> None:
    start_s = time.monotonic()
    assert ports.connect(("127.0.0.1", free_port()), b"", QUICK_S) == "connection refused"
    assert ports.connect(("no-such-host.invalid", 1), b"", QUICK_S) == "the name cannot be resolved"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ports.connect(("127.0.0.1", int(silent.getsockname()[1])), b"x", QUICK_S) == "no answer within 0 s"
    assert time.monotonic() - start_s < 20 * slowness()


def test_a_peer_that_listens_late_is_reached() -> None:
    port = free_port()

    def late() -> None:
        time.sleep(0.2)
        with ports.listener(port) as sock:
            connection, _ = sock.accept()
            with connection:
                connection.sendall(b"here 0\n")

    thread = threading.Thread(target=late)
    thread.start()
    assert ports.connect(("127.0.0.1", port), b"here 0\n", 60.0) is None
    thread.join()


def test_processes_find_each_other_and_the_one_that_is_missing() -> None:
    peers = {0: ["127.0.0.1", free_port()], 1: ["127.0.0.2", free_port()], 2: ["127.0.0.3", free_port()]}
    specs = [
        {
            "index": index,
            "token": "t",
            "port": peers[index][1],
            "peers": {i: peers[i] for i in peers if i != index},
            "timeout_s": 5.0 * slowness(),
        }
        for index in (0, 1)  # the third never starts
    ]
    command = [sys.executable, "-m", "launcher.agent.ports"]
    processes = [subprocess.Popen([*command, json.dumps(spec)], stdout=subprocess.PIPE, cwd=ROOT) for spec in specs]
    try:
        for process in processes:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {"failed": {"2": "connection refused"}}
            assert process.poll() is None  # it keeps answering until it is ended
    finally:
        for process in processes:
            process.kill()
            process.communicate()
