"""TCP ports of one host: which is free, does the master answer, and can the hosts connect to each other?

For the last question one process of this runs on each host, all at the same time.

    python -m launcher.agent.ports \
        '{"index": 0, "token": "...", "port": 4711, "peers": {"1": ["node-b", 4712]}, "timeout_s": 5}'

listens on its own port, connects to its peers, prints what failed as one line of JSON, and answers until
it is ended. Who answers says token and index: a wrong address may well lead to a host that listens too.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

UNRESOLVED = "the name cannot be resolved"
_LIFE_S = 300.0  # an end of its own, should nobody end it
_RETRY_S = 0.1
_MAX_PARALLEL = 64
_MAX_ANSWER_BYTES = 256
# Below the range from which Linux takes ports for outgoing connections: ranks bind the port only seconds later, after
# `import torch`, and no connection may hold it by chance then.
_FIRST_PORT, _NUM_PORTS = 12_000, 20_000
_PORT_TRIES = 100
_PORT_PROBLEMS = {
    errno.EADDRINUSE: "is in use",
    errno.EACCES: "is privileged: permission denied, as to all below 1024 (net.ipv4.ip_unprivileged_port_start)",
}
_MASTER_S = 5.0  # for an answer from the master, before there are ranks


def problem_of_port(port: int) -> str | None:
    """Return why ranks could not listen at `port`, None when they can."""
    with socket.socket() as probe:
        # As torch's own listener: connections of a run before may linger.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return _PORT_PROBLEMS.get(error.errno or 0, f"cannot be used: {error.strerror}")
    return None


def free_port() -> int:
    """Return a port that is free."""
    for _ in range(_PORT_TRIES):
        port = _FIRST_PORT + int.from_bytes(os.urandom(4), "big") % _NUM_PORTS
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def problem_of_master(address: str, port: int) -> str | None:
    """Return why ranks of this node would not reach the master, None when they will. port: 0: is not tried.

    torch would repeat it for half an hour, with a warning each time. Nothing listens there yet: a refusal is an answer.
    """
    try:
        found = socket.getaddrinfo(address, port or None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return "cannot be resolved"
    problem = None
    for family, kind, protocol, _, place in found if port else ():
        with socket.socket(family, kind, protocol) as probe:
            probe.settimeout(_MASTER_S / len(found))
            try:
                probe.connect(place)
            except ConnectionRefusedError:
                return None
            except TimeoutError:
                problem = problem or f"gives no answer at port {port}"
            except OSError as error:
                problem = problem or f"cannot be reached: {error.strerror or error}"
            else:
                return None
    return problem


def main(spec: dict[str, Any]) -> None:
    """Listen, connect to all peers, print `{"failed": {index: reason}}`, stay until ended."""
    from concurrent.futures import ThreadPoolExecutor  # the agent imports this file, and starts without it

    index, token, port = int(spec["index"]), str(spec["token"]), int(spec["port"])
    peers = {int(number): (str(host), int(port)) for number, (host, port) in spec["peers"].items()}
    threading.Thread(target=serve, args=(listener(port), answer(token, index)), daemon=True).start()
    others, timeout_s = list(peers), float(spec["timeout_s"])
    with ThreadPoolExecutor(min(_MAX_PARALLEL, max(1, len(others)))) as pool:
        reasons = pool.map(lambda number: connect(peers[number], answer(token, number), timeout_s), others)
        failed = {number: reason for number, reason in zip(others, reasons, strict=True) if reason is not None}
    sys.stdout.write(json.dumps({"failed": failed}) + "\n")
    sys.stdout.flush()
    time.sleep(_LIFE_S)


def answer(token: str, index: int) -> bytes:
    """Return what the host with this index says to whoever connects."""
    return f"{token} {index}\n".encode()


def listener(port: int) -> socket.socket:
    """Listen at `port` on every address, IPv6 too where there is any. Raises: OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def serve(listening: socket.socket, words: bytes) -> None:
    """Say `words` to everybody who connects, forever."""
    while True:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(words)


def connect(peer: tuple[str, int], expected: bytes, timeout_s: float) -> str | None:
    """Return why `peer` cannot be reached, None when it can and it answers as expected.

    timeout_s: for one connection, and for a peer that has not started listening yet.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection(peer, timeout_s) as connection:
                return None if _read_line(connection) == expected else "another program answers there"
        except ConnectionRefusedError:  # it may not be listening yet
            if time.monotonic() > deadline_s:
                return "connection refused"
            time.sleep(_RETRY_S)
        except (socket.gaierror, UnicodeError):
            return UNRESOLVED
        except TimeoutError:
            return f"no answer within {timeout_s:.0f} s"
        except OSError as error:
            return error.strerror or str(error)


def _read_line(connection: socket.socket) -> bytes:
    data = b""
    while len(data) < _MAX_ANSWER_BYTES and not data.endswith(b"\n") and (more := connection.recv(_MAX_ANSWER_BYTES)):
        data += more
    return data


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
